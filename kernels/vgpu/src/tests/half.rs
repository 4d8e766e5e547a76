//! f16 and bf16. 0x3c00 is 1.0, 0x4000 is 2.0 as f16; 0x3f80 and 0x4000 as bf16.

use super::cases;

#[test]
fn f16() {
    cases(&[
        ("add.f16 h, h, h", &[0x3c00, 0x4000], 0x4200),
        ("add.rn.f16 h, h, h", &[0x3c00, 0x1000], 0x3c00),
        ("add.sat.f16 h, h, h", &[0x3c00, 0x4000], 0x3c00),
        ("sub.f16 h, h, h", &[0x3c00, 0x4000], 0xbc00),
        ("mul.f16 h, h, h", &[0x4200, 0x3800], 0x3e00),
        ("mul.ftz.f16 h, h, h", &[0x0001, 0x3c00], 0),
        ("mul.f16 h, h, h", &[0x7bff, 0x4000], 0x7c00),
        ("fma.rn.f16 h, h, h, h", &[0x4000, 0x4200, 0x3c00], 0x4700),
        ("fma.rn.relu.f16 h, h, h, h", &[0xc000, 0x4200, 0x3c00], 0),
        ("fma.rn.sat.f16 h, h, h, h", &[0x4000, 0x4200, 0x3c00], 0x3c00),
        // (1 + 2^-10)^2 - 1 = 2^-9 + 2^-20, of which 11 bits hold 2^-9 (1 + 2^-11): to even.
        ("fma.rn.f16 h, h, h, h", &[0x3c01, 0x3c01, 0xbc00], 0x1800),
        ("neg.f16 h, h", &[0x3c00], 0xbc00),
        ("abs.f16 h, h", &[0xbc00], 0x3c00),
        ("min.f16 h, h, h", &[0x3c00, 0xc000], 0xc000),
        ("max.f16 h, h, h", &[0x7fff, 0xc000], 0xc000),
        ("max.NaN.f16 h, h, h", &[0x7e00, 0xc000], 0x7fff),
        ("ex2.approx.f16 h, h", &[0x4200], 0x4800),
        ("tanh.approx.f16 h, h", &[0x7c00], 0x3c00),
        ("setp.lt.f16 p, h, h", &[0x3c00, 0x4000], 1),
        ("setp.neu.f16 p, h, h", &[0x7fff, 0x4000], 1),
        ("set.lt.f16.f16 h, h, h", &[0x3c00, 0x4000], 0x3c00),
        ("set.gt.u16.f16 h, h, h", &[0x3c00, 0x4000], 0),
        ("set.lt.u32.f16 r, h, h", &[0x3c00, 0x4000], 0xffff_ffff),
    ]);
}

#[test]
fn bf16() {
    cases(&[
        ("add.bf16 h, h, h", &[0x3f80, 0x4000], 0x4040),
        ("sub.bf16 h, h, h", &[0x3f80, 0x4000], 0xbf80),
        ("mul.bf16 h, h, h", &[0x4040, 0x3f00], 0x3fc0),
        // 1 + 2^-9 is less than half a step above 1; 1 + 3 * 2^-9 rounds up.
        ("add.bf16 h, h, h", &[0x3f80, 0x3b00], 0x3f80),
        ("add.bf16 h, h, h", &[0x3f80, 0x3bc0], 0x3f81),
        ("fma.rn.bf16 h, h, h, h", &[0x4000, 0x4040, 0x3f80], 0x40e0),
        ("fma.rn.relu.bf16 h, h, h, h", &[0xc000, 0x4040, 0x3f80], 0),
        ("neg.bf16 h, h", &[0x3f80], 0xbf80),
        ("abs.bf16 h, h", &[0xbf80], 0x3f80),
        ("min.bf16 h, h, h", &[0x3f80, 0xc000], 0xc000),
        ("max.bf16 h, h, h", &[0x3f80, 0xc000], 0x3f80),
        ("setp.ge.bf16 p, h, h", &[0x4000, 0x3f80], 1),
        ("ex2.approx.ftz.bf16 h, h", &[0x4040], 0x4100),
        ("tanh.approx.bf16 h, h", &[0xff80], 0xbf80),
        ("set.lt.bf16.bf16 h, h, h", &[0x3f80, 0x4000], 0x3f80),
    ]);
}

#[test]
fn pairs() {
    cases(&[
        ("add.f16x2 r, r, r", &[0x3c00_4000, 0x3c00_3c00], 0x4000_4200),
        ("sub.f16x2 r, r, r", &[0x3c00_4000, 0x4000_3c00], 0xbc00_3c00),
        ("mul.f16x2 r, r, r", &[0x4200_3c00, 0x3800_bc00], 0x3e00_bc00),
        ("fma.rn.f16x2 r, r, r, r", &[0x4000_3c00, 0x4200_3c00, 0x3c00_3c00], 0x4700_4000),
        ("fma.rn.relu.f16x2 r, r, r, r", &[0xc000_3c00, 0x4200_3c00, 0x3c00_3c00], 0x0000_4000),
        ("neg.f16x2 r, r", &[0x3c00_bc00], 0xbc00_3c00),
        ("abs.f16x2 r, r", &[0x3c00_bc00], 0x3c00_3c00),
        ("min.f16x2 r, r, r", &[0x3c00_4000, 0x4000_3c00], 0x3c00_3c00),
        ("max.f16x2 r, r, r", &[0x3c00_4000, 0x4000_3c00], 0x4000_4000),
        ("ex2.approx.f16x2 r, r", &[0x4200_3c00], 0x4800_4000),
        ("add.bf16x2 r, r, r", &[0x3f80_4000, 0x3f80_3f80], 0x4000_4040),
        ("sub.bf16x2 r, r, r", &[0x3f80_4000, 0x4000_3f80], 0xbf80_3f80),
        ("mul.bf16x2 r, r, r", &[0x4040_3f80, 0x3f00_bf80], 0x3fc0_bf80),
        ("fma.rn.bf16x2 r, r, r, r", &[0x4000_3f80, 0x4040_3f80, 0x3f80_3f80], 0x40e0_4000),
        ("max.bf16x2 r, r, r", &[0x3f80_4000, 0x4000_3f80], 0x4000_4000),
        ("neg.bf16x2 r, r", &[0x3f80_bf80], 0xbf80_3f80),
        ("set.lt.f16x2.f16x2 r, r, r", &[0x3c00_4000, 0x4000_3c00], 0x3c00_0000),
        ("set.lt.u32.f16x2 r, r, r", &[0x3c00_4000, 0x4000_3c00], 0xffff_0000),
        ("set.lt.bf16x2.bf16x2 r, r, r", &[0x3f80_4000, 0x4000_3f80], 0x3f80_0000),
    ]);
    let body = "setp.lt.f16x2 %p1|%p2, %r1, %r2;";
    let text = format!(
        "mov.b32 %r1, 0x3c004000; mov.b32 %r2, 0x40003c00; {body} selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 1, 0, %p2;
         st.global.u32 [%d1], %r3; st.global.u32 [%d1+4], %r4;"
    );
    let outcome = super::run(&text, super::Run { block: 1, out: 8, ..Default::default() }).clean();
    assert_eq!(outcome.words(), [0, 1]);
}
