//! f32 and f64.

use super::{cases, f, g};

const INF: u64 = 0x7f80_0000;
const NAN: u64 = 0x7fff_ffff;
/// One and the number after it.
const ONE: u64 = 0x3f80_0000;
const TINY: u64 = 1;

#[test]
fn sums_and_products() {
    cases(&[
        ("add.f32 r, r, r", &[f(1.5), f(2.25)], f(3.75)),
        ("add.rn.f32 r, r, r", &[ONE, f(5.960_464_5e-8)], ONE),
        ("add.rp.f32 r, r, r", &[ONE, f(5.960_464_5e-8)], ONE + 1),
        ("add.rz.f32 r, r, r", &[f(-1.0), f(-1e-10)], f(-1.0)),
        ("add.rm.f32 r, r, r", &[f(-1.0), f(-1e-10)], f(-1.0) + 1),
        ("add.sat.f32 r, r, r", &[f(0.75), f(0.75)], ONE),
        ("add.sat.f32 r, r, r", &[NAN, f(0.75)], 0),
        ("add.ftz.f32 r, r, r", &[TINY, 0], 0),
        ("add.f32 r, r, r", &[TINY, TINY], 2),
        ("sub.f32 r, r, r", &[f(1.0), f(3.0)], f(-2.0)),
        ("sub.rz.f32 r, r, r", &[f(1.0), f(1e-10)], ONE - 1),
        ("mul.f32 r, r, r", &[f(3.0), f(-0.5)], f(-1.5)),
        ("mul.rz.f32 r, r, r", &[f(1.1), f(1.1)], f(1.21)),
        ("mul.rp.f32 r, r, r", &[f(1.1), f(1.1)], f(1.21) + 1),
        ("mul.ftz.f32 r, r, r", &[f(1e-30), f(1e-10)], 0),
        ("mul.f32 r, r, r", &[INF, 0], 0xffc0_0000),
        ("fma.rn.f32 r, r, r, r", &[ONE + 1, ONE - 1, f(-1.0)], 0x337f_fffe),
        ("fma.rz.f32 r, r, r, r", &[f(1.0), f(1.0), f(-1e-10)], ONE - 1),
        ("fma.rn.sat.f32 r, r, r, r", &[f(2.0), f(2.0), f(0.0)], ONE),
        ("mad.rn.f32 r, r, r, r", &[f(2.0), f(3.0), f(4.0)], f(10.0)),
        ("div.rn.f32 r, r, r", &[f(1.0), f(3.0)], 0x3eaa_aaab),
        ("div.rz.f32 r, r, r", &[f(1.0), f(3.0)], 0x3eaa_aaaa),
        ("div.full.f32 r, r, r", &[f(6.0), f(3.0)], f(2.0)),
        ("div.approx.f32 r, r, r", &[f(1.0), 0], INF),
        ("add.f64 d, d, d", &[g(0.1), g(0.2)], g(0.300_000_000_000_000_04)),
        ("sub.f64 d, d, d", &[g(1.0), g(3.0)], g(-2.0)),
        ("mul.f64 d, d, d", &[g(1.5), g(1.5)], g(2.25)),
        ("fma.rn.f64 d, d, d, d", &[g(2.0), g(3.0), g(4.0)], g(10.0)),
        ("div.rn.f64 d, d, d", &[g(1.0), g(4.0)], g(0.25)),
    ]);
}

#[test]
fn extremes_and_signs() {
    cases(&[
        ("min.f32 r, r, r", &[f(1.0), f(-2.0)], f(-2.0)),
        ("max.f32 r, r, r", &[f(1.0), f(-2.0)], f(1.0)),
        ("max.f32 r, r, r", &[NAN, f(-2.0)], f(-2.0)),
        ("min.f32 r, r, r", &[f(3.0), NAN], f(3.0)),
        ("max.f32 r, r, r", &[NAN, 0x7fc0_0000], NAN),
        ("max.NaN.f32 r, r, r", &[NAN, f(-2.0)], NAN),
        ("max.f32 r, r, r", &[f(-0.0), f(0.0)], 0),
        ("max.f32 r, r, r", &[f(0.0), f(-0.0)], 0),
        ("min.f32 r, r, r", &[f(0.0), f(-0.0)], f(-0.0)),
        ("min.ftz.f32 r, r, r", &[TINY, f(1.0)], 0),
        ("min.f64 d, d, d", &[g(f64::NAN), g(2.0)], g(2.0)),
        ("max.f64 d, d, d", &[g(5.0), g(2.0)], g(5.0)),
        ("neg.f32 r, r", &[f(0.0)], f(-0.0)),
        ("neg.f64 d, d", &[g(2.0)], g(-2.0)),
        ("abs.f32 r, r", &[f(-3.0)], f(3.0)),
        ("abs.ftz.f32 r, r", &[0x8000_0001], 0),
        ("abs.f64 d, d", &[g(-3.0)], g(3.0)),
        ("copysign.f32 r, r, r", &[f(-1.0), f(5.0)], f(-5.0)),
        ("copysign.f64 d, d, d", &[g(-1.0), g(5.0)], g(-5.0)),
    ]);
}

#[test]
fn functions() {
    cases(&[
        ("rcp.rn.f32 r, r", &[f(4.0)], f(0.25)),
        ("rcp.approx.ftz.f32 r, r", &[f(4.0)], f(0.25)),
        ("rcp.approx.f32 r, r", &[0], INF),
        ("rcp.rz.f32 r, r", &[f(3.0)], 0x3eaa_aaaa),
        ("rcp.rn.f64 d, d", &[g(4.0)], g(0.25)),
        ("sqrt.rn.f32 r, r", &[f(2.0)], f(std::f32::consts::SQRT_2)),
        ("sqrt.rz.f32 r, r", &[f(2.0)], f(std::f32::consts::SQRT_2)),
        ("sqrt.rp.f32 r, r", &[f(2.0)], f(std::f32::consts::SQRT_2) + 1),
        ("sqrt.rn.f64 d, d", &[g(9.0)], g(3.0)),
        ("rsqrt.approx.f32 r, r", &[f(4.0)], f(0.5)),
        ("rsqrt.approx.ftz.f32 r, r", &[0], INF),
        ("ex2.approx.f32 r, r", &[f(3.0)], f(8.0)),
        ("ex2.approx.ftz.f32 r, r", &[f(-140.0)], 0),
        ("ex2.approx.f32 r, r", &[f(-140.0)], 1 << 9),
        ("lg2.approx.f32 r, r", &[f(8.0)], f(3.0)),
        ("lg2.approx.f32 r, r", &[0], 0xff80_0000),
        ("sin.approx.f32 r, r", &[0], 0),
        ("cos.approx.f32 r, r", &[0], ONE),
        ("tanh.approx.f32 r, r", &[f(100.0)], ONE),
    ]);
}

#[test]
fn comparisons() {
    let nan = NAN;
    cases(&[
        ("setp.eq.f32 p, r, r", &[f(0.0), f(-0.0)], 1),
        ("setp.eq.f32 p, r, r", &[nan, nan], 0),
        ("setp.ne.f32 p, r, r", &[nan, f(1.0)], 0),
        ("setp.ne.f32 p, r, r", &[f(2.0), f(1.0)], 1),
        ("setp.lt.f32 p, r, r", &[f(-1.0), f(1.0)], 1),
        ("setp.le.f32 p, r, r", &[f(1.0), f(1.0)], 1),
        ("setp.gt.f32 p, r, r", &[nan, f(1.0)], 0),
        ("setp.ge.f32 p, r, r", &[f(2.0), f(1.0)], 1),
        ("setp.equ.f32 p, r, r", &[nan, f(1.0)], 1),
        ("setp.neu.f32 p, r, r", &[nan, nan], 1),
        ("setp.ltu.f32 p, r, r", &[f(2.0), f(1.0)], 0),
        ("setp.ltu.f32 p, r, r", &[nan, f(1.0)], 1),
        ("setp.leu.f32 p, r, r", &[f(1.0), f(1.0)], 1),
        ("setp.gtu.f32 p, r, r", &[nan, f(1.0)], 1),
        ("setp.geu.f32 p, r, r", &[f(0.0), f(1.0)], 0),
        ("setp.num.f32 p, r, r", &[f(0.0), f(1.0)], 1),
        ("setp.nan.f32 p, r, r", &[f(0.0), nan], 1),
        ("setp.eq.ftz.f32 p, r, r", &[TINY, 0], 1),
        ("setp.gt.ftz.f32 p, r, r", &[TINY, 0], 0),
        ("setp.gt.f32 p, r, r", &[TINY, 0], 1),
        ("setp.lt.f64 p, d, d", &[g(1.0), g(2.0)], 1),
        ("setp.neu.f64 p, d, d", &[g(f64::NAN), g(2.0)], 1),
        ("setp.gt.f64 p, d, d", &[g(f64::NAN), g(2.0)], 0),
        ("set.gt.u32.f32 r, r, r", &[f(2.0), f(1.0)], 0xffff_ffff),
        ("set.gt.f32.f32 r, r, r", &[f(2.0), f(1.0)], ONE),
        ("set.ltu.u32.f32 r, r, r", &[nan, f(1.0)], 0xffff_ffff),
        ("testp.finite.f32 p, r", &[f(1.0)], 1),
        ("testp.infinite.f32 p, r", &[INF], 1),
        ("testp.notanumber.f32 p, r", &[nan], 1),
        ("testp.number.f32 p, r", &[nan], 0),
        ("testp.normal.f32 p, r", &[TINY], 0),
        ("testp.subnormal.f32 p, r", &[TINY], 1),
        ("testp.finite.f64 p, d", &[g(f64::INFINITY)], 0),
    ]);
}
