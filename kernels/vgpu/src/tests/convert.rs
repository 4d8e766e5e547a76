//! Conversions.

use super::{cases, f, g, l, s};

const NAN: u64 = 0x7fff_ffff;

#[test]
fn integers() {
    cases(&[
        ("cvt.u64.u32 d, r", &[0xffff_ffff], 0xffff_ffff),
        ("cvt.s64.s32 d, r", &[s(-1)], u64::MAX),
        ("cvt.s64.s8 d, r", &[0x80], l(-128)),
        ("cvt.u32.u16 r, h", &[0xffff], 0xffff),
        ("cvt.s32.s16 r, h", &[0xffff], 0xffff_ffff),
        ("cvt.u16.u32 h, r", &[0x1_2345], 0x2345),
        ("cvt.u32.u64 r, d", &[0x1_2345_6789], 0x2345_6789),
        ("cvt.u32.u8 r, h", &[0x1ff], 0xff),
        ("cvt.s32.s8 r, r", &[0x1ff], 0xffff_ffff),
        ("cvt.u8.u32 h, r", &[0x1ff], 0xff),
        ("cvt.s16.s8 h, h", &[0x80], 0xff80),
        ("cvt.s8.s32 r, r", &[0x80], 0xffff_ff80),
        ("cvt.u16.u8 h, h", &[0x1234], 0x34),
        ("cvt.sat.u8.s32 h, r", &[s(-5)], 0),
        ("cvt.sat.u8.s32 h, r", &[300], 255),
        ("cvt.sat.s8.s32 r, r", &[s(-300)], s(-128)),
        ("cvt.sat.s16.s32 h, r", &[40_000], 32_767),
        ("cvt.sat.u32.s64 r, d", &[l(-1)], 0),
        ("cvt.sat.s32.u32 r, r", &[0xffff_ffff], 0x7fff_ffff),
        ("cvt.sat.u32.s32 r, r", &[s(-1)], 0),
    ]);
}

#[test]
fn floats_to_integers() {
    cases(&[
        ("cvt.rzi.s32.f32 r, r", &[f(-2.7)], s(-2)),
        ("cvt.rni.s32.f32 r, r", &[f(2.5)], 2),
        ("cvt.rni.s32.f32 r, r", &[f(3.5)], 4),
        ("cvt.rmi.s32.f32 r, r", &[f(-2.1)], s(-3)),
        ("cvt.rpi.s32.f32 r, r", &[f(-2.9)], s(-2)),
        ("cvt.rzi.u32.f32 r, r", &[f(-2.7)], 0),
        ("cvt.rni.u32.f32 r, r", &[f(4e9)], 4_000_000_000),
        ("cvt.rzi.s32.f32 r, r", &[f(1e20)], 0x7fff_ffff),
        ("cvt.rzi.s32.f32 r, r", &[NAN], 0),
        ("cvt.rzi.ftz.s32.f32 r, r", &[f(7.9)], 7),
        ("cvt.rpi.ftz.s32.f32 r, r", &[1], 0),
        ("cvt.rni.sat.s8.f32 r, r", &[f(200.0)], 127),
        ("cvt.rni.s8.f32 r, r", &[f(-200.0)], s(-128)),
        ("cvt.rni.s8.f32 h, r", &[f(-3.0)], 0xfffd),
        ("cvt.rzi.u8.f32 h, r", &[f(99.9)], 99),
        ("cvt.rni.s16.f32 h, r", &[f(-3.2)], 0xfffd),
        ("cvt.rzi.s64.f32 d, r", &[f(-1e12)], l(-999_999_995_904)),
        ("cvt.rzi.s64.f32 d, r", &[NAN], 1 << 63),
        ("cvt.rzi.u64.f64 d, d", &[g(1e19)], 10_000_000_000_000_000_000),
        ("cvt.rzi.s32.f64 r, d", &[g(-7.9)], s(-7)),
        ("cvt.rni.s32.f16 r, h", &[0x4100], 2),
        ("cvt.rzi.u16.f16 h, h", &[0x4900], 10),
        ("cvt.rzi.s32.bf16 r, h", &[0xc049], s(-3)),
    ]);
}

#[test]
fn integers_to_floats() {
    cases(&[
        ("cvt.rn.f32.s32 r, r", &[s(-7)], f(-7.0)),
        ("cvt.rn.f32.u32 r, r", &[0xffff_ffff], f(4_294_967_296.0)),
        ("cvt.rz.f32.u32 r, r", &[0xffff_ffff], f(4_294_967_040.0)),
        ("cvt.rp.f32.s32 r, r", &[16_777_217], f(16_777_218.0)),
        ("cvt.rm.f32.s32 r, r", &[s(-16_777_217)], f(-16_777_218.0)),
        ("cvt.rn.f32.s32 r, r", &[16_777_217], f(16_777_216.0)),
        ("cvt.rn.f32.u8 r, r", &[0x1ff], f(255.0)),
        ("cvt.rn.f32.s8 r, h", &[0x80], f(-128.0)),
        ("cvt.rn.f32.u16 r, h", &[0xffff], f(65_535.0)),
        ("cvt.rn.f32.s64 r, d", &[l(-1)], f(-1.0)),
        ("cvt.rn.f64.s32 d, r", &[s(-7)], g(-7.0)),
        ("cvt.rn.f64.u64 d, d", &[1 << 60], g((1u64 << 60) as f64)),
        ("cvt.rn.f16.s32 h, r", &[3], 0x4200),
        ("cvt.rn.f16.u32 h, r", &[2049], 0x6800),
        ("cvt.rn.f16.s8 h, h", &[0xff], 0xbc00),
        ("cvt.rn.bf16.s32 h, r", &[3], 0x4040),
    ]);
}

#[test]
fn floats() {
    cases(&[
        ("cvt.f32.f16 r, h", &[0x3555], 0x3eaa_a000),
        ("cvt.f32.f16 r, h", &[0x0001], f(5.960_464_5e-8)),
        ("cvt.f32.f16 r, h", &[0xfc00], 0xff80_0000),
        ("cvt.f32.bf16 r, h", &[0x4049], 0x4049_0000),
        ("cvt.rn.f16.f32 h, r", &[f(1.0 / 3.0)], 0x3555),
        ("cvt.rz.f16.f32 h, r", &[f(0.999_99)], 0x3bff),
        ("cvt.rp.f16.f32 h, r", &[f(1.000_01)], 0x3c01),
        ("cvt.rm.f16.f32 h, r", &[f(-1.000_01)], 0xbc01),
        ("cvt.rz.f16.f32 h, r", &[f(1e6)], 0x7bff),
        ("cvt.rn.relu.f16.f32 h, r", &[f(-1.0)], 0),
        ("cvt.rn.satfinite.f16.f32 h, r", &[f(1e6)], 0x7bff),
        ("cvt.rn.sat.f16.f32 h, r", &[f(3.0)], 0x3c00),
        ("cvt.rn.bf16.f32 h, r", &[f(std::f32::consts::PI)], 0x4049),
        ("cvt.rz.bf16.f32 h, r", &[f(1.999)], 0x3fff),
        ("cvt.rn.relu.bf16.f32 h, r", &[f(-2.0)], 0),
        ("cvt.f64.f32 d, r", &[f(0.1)], g(0.100_000_001_490_116_12)),
        ("cvt.rn.f32.f64 r, d", &[g(0.1)], f(0.1)),
        ("cvt.rz.f32.f64 r, d", &[g(0.1)], f(0.1) - 1),
        ("cvt.rni.f32.f32 r, r", &[f(2.5)], f(2.0)),
        ("cvt.rmi.f32.f32 r, r", &[f(-2.5)], f(-3.0)),
        ("cvt.rpi.f32.f32 r, r", &[f(2.1)], f(3.0)),
        ("cvt.rzi.f32.f32 r, r", &[f(-2.9)], f(-2.0)),
        ("cvt.sat.f32.f32 r, r", &[f(1.5)], f(1.0)),
        ("cvt.ftz.f32.f32 r, r", &[1], 0),
        ("cvt.rmi.f64.f64 d, d", &[g(-0.5)], g(-1.0)),
        ("cvt.f64.f16 d, h", &[0x3800], g(0.5)),
        ("cvt.rn.f16.f64 h, d", &[g(1.0 / 3.0)], 0x3555),
        ("cvt.rn.f16x2.f32 r, r, r", &[f(1.0), f(2.0)], 0x3c00_4000),
        ("cvt.rz.f16x2.f32 r, r, r", &[f(0.999_99), f(2.0)], 0x3bff_4000),
        ("cvt.rn.bf16x2.f32 r, r, r", &[f(1.0), f(2.0)], 0x3f80_4000),
        ("cvt.rn.relu.bf16x2.f32 r, r, r", &[f(-1.0), f(2.0)], 0x0000_4000),
        ("cvt.rna.tf32.f32 r, r", &[0x3f80_1000], 0x3f80_2000),
        ("cvt.rn.tf32.f32 r, r", &[0x3f80_1000], 0x3f80_0000),
        ("cvt.rz.tf32.f32 r, r", &[0x3f80_1fff], 0x3f80_0000),
    ]);
}

#[test]
fn floats_of_eight_bits() {
    cases(&[
        ("cvt.rn.satfinite.e4m3x2.f32 h, r, r", &[f(1.0), f(-448.0)], 0x38fe),
        ("cvt.rn.satfinite.e4m3x2.f32 h, r, r", &[f(1e9), f(0.001_953_125)], 0x7e01),
        ("cvt.rn.satfinite.relu.e4m3x2.f32 h, r, r", &[f(-1.0), f(2.0)], 0x0040),
        ("cvt.rn.satfinite.e5m2x2.f32 h, r, r", &[f(1.0), f(-57_344.0)], 0x3cfb),
        ("cvt.rn.f16x2.e4m3x2 r, h", &[0x38c0], 0x3c00_c000),
        ("cvt.rn.f16x2.e5m2x2 r, h", &[0x3cc0], 0x3c00_c000),
        ("cvt.rn.satfinite.e4m3x2.f16x2 h, r", &[0x3c00_c000], 0x38c0),
        ("cvt.rn.satfinite.e5m2x2.f16x2 h, r", &[0x3c00_c000], 0x3cc0),
    ]);
}
