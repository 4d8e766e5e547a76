//! Integers and bits: values by hand from the sections of the PTX manual of the same names.

use super::{Run, cases, l, refused, run, s};

#[test]
fn addition_and_its_kin() {
    cases(&[
        ("add.u16 h, h, h", &[0xffff, 2], 1),
        ("add.s32 r, r, r", &[s(-5), 3], s(-2)),
        ("add.u32 r, r, r", &[0xffff_ffff, 1], 0),
        ("add.sat.s32 r, r, r", &[0x7fff_ffff, 1], 0x7fff_ffff),
        ("add.sat.s32 r, r, r", &[0x8000_0000, s(-1)], 0x8000_0000),
        ("add.s64 d, d, d", &[u64::MAX, 1], 0),
        ("sub.s16 h, h, h", &[3, 5], 0xfffe),
        ("sub.u32 r, r, r", &[3, 5], s(-2)),
        ("sub.sat.s32 r, r, r", &[0x8000_0000, 1], 0x8000_0000),
        ("sub.u64 d, d, d", &[0, 1], u64::MAX),
        ("neg.s16 h, h", &[1], 0xffff),
        ("neg.s32 r, r", &[5], s(-5)),
        ("neg.s64 d, d", &[5], l(-5)),
        ("abs.s16 h, h", &[0xfffd], 3),
        ("abs.s32 r, r", &[s(-7)], 7),
        ("abs.s32 r, r", &[0x8000_0000], 0x8000_0000),
        ("abs.s64 d, d", &[l(-7)], 7),
        ("sad.u32 r, r, r, r", &[3, 10, 100], 107),
        ("sad.s32 r, r, r, r", &[s(-3), 4, 1], 8),
        ("min.s32 r, r, r", &[s(-1), 1], s(-1)),
        ("min.u32 r, r, r", &[s(-1), 1], 1),
        ("max.s16 h, h, h", &[0xffff, 1], 1),
        ("max.u16 h, h, h", &[0xffff, 1], 0xffff),
        ("min.s64 d, d, d", &[l(-9), 4], l(-9)),
        ("max.u64 d, d, d", &[l(-9), 4], l(-9)),
    ]);
}

#[test]
fn products() {
    cases(&[
        ("mul.lo.s32 r, r, r", &[0x1_0001, 0x1_0001], 0x2_0001),
        ("mul.lo.u16 h, h, h", &[300, 300], 90_000 & 0xffff),
        ("mul.lo.s64 d, d, d", &[1 << 40, 1 << 30], 0),
        ("mul.hi.u32 r, r, r", &[0xd251_1f53, 0x8000_0001], 0x6928_8faa),
        ("mul.hi.s32 r, r, r", &[s(-1), 2], s(-1)),
        ("mul.hi.u64 d, d, d", &[1 << 63, 6], 3),
        ("mul.hi.s64 d, d, d", &[l(-1), 1], l(-1)),
        ("mul.hi.u16 h, h, h", &[0x8000, 4], 2),
        ("mul.wide.u32 d, r, r", &[0xffff_ffff, 0xffff_ffff], 0xffff_fffe_0000_0001),
        ("mul.wide.s32 d, r, r", &[s(-3), 5], l(-15)),
        ("mul.wide.u16 r, h, h", &[0xffff, 0xffff], 0xfffe_0001),
        ("mul.wide.s16 r, h, h", &[0xffff, 7], s(-7)),
        ("mul24.lo.u32 r, r, r", &[0x0100_0003, 5], 15),
        ("mul24.lo.s32 r, r, r", &[0x00ff_ffff, 5], s(-5)),
        ("mad.lo.s32 r, r, r, r", &[7, s(-3), 1], s(-20)),
        ("mad.lo.u16 h, h, h, h", &[7, 3, 1], 22),
        ("mad.lo.u64 d, d, d, d", &[1 << 33, 2, 5], (1 << 34) + 5),
        ("mad.hi.u32 r, r, r, r", &[1 << 31, 4, 10], 12),
        ("mad.wide.u32 d, r, r, d", &[0xffff_ffff, 2, 3], 0x2_0000_0001),
        ("mad.wide.s32 d, r, r, d", &[s(-2), 3, 1], l(-5)),
        ("mad.wide.u16 r, h, h, r", &[256, 256, 1], 65_537),
        ("mad.wide.s16 r, h, h, r", &[0xffff, 2, 1], s(-1)),
        ("dp4a.u32.u32 r, r, r, r", &[0x0102_03ff, 0x0101_0101, 10], 1 + 2 + 3 + 255 + 10),
        ("dp4a.s32.s32 r, r, r, r", &[0x0102_03ff, 0x0101_ff02, 10], s(1 + 2 - 3 - 2 + 10)),
        ("dp4a.s32.u32 r, r, r, r", &[0xff00_0000, 0xff00_0000, 0], s(-255)),
        ("dp4a.u32.s32 r, r, r, r", &[0xff00_0000, 0xff00_0000, 0], s(-255)),
        ("dp2a.lo.s32.s32 r, r, r, r", &[0xffff_0003, 0x0101_0402, 1], s(3 * 2 - 4 + 1)),
        ("dp2a.hi.s32.s32 r, r, r, r", &[0xffff_0003, 0x0502_0101, 1], s(3 * 2 - 5 + 1)),
        ("dp2a.lo.u32.u32 r, r, r, r", &[0xffff_0003, 0x0000_0102, 0], 65_535 + 6),
    ]);
}

#[test]
fn quotients() {
    cases(&[
        ("div.s32 r, r, r", &[s(-7), 2], s(-3)),
        ("div.u32 r, r, r", &[s(-7), 2], 0x7fff_fffc),
        ("div.s32 r, r, r", &[0x8000_0000, s(-1)], 0x8000_0000),
        ("div.u16 h, h, h", &[65_535, 16], 4095),
        ("div.s64 d, d, d", &[l(-100), 7], l(-14)),
        ("div.u64 d, d, d", &[100, 7], 14),
        ("div.u32 r, r, r", &[1, 0], 0xffff_ffff),
        ("rem.s32 r, r, r", &[s(-7), 2], s(-1)),
        ("rem.u32 r, r, r", &[17, 5], 2),
        ("rem.s64 d, d, d", &[l(-100), 7], l(-2)),
        ("rem.u64 d, d, d", &[100, 7], 2),
    ]);
}

#[test]
fn logic_and_shifts() {
    cases(&[
        ("and.b32 r, r, r", &[0xff00_ff00, 0x0ff0_0ff0], 0x0f00_0f00),
        ("or.b16 h, h, h", &[0x1100, 0x0011], 0x1111),
        ("xor.b64 d, d, d", &[l(-1), 1], l(-2)),
        ("not.b32 r, r", &[0xffff_0000], 0x0000_ffff),
        ("not.b16 h, h", &[0x00ff], 0xff00),
        ("cnot.b32 r, r", &[0], 1),
        ("cnot.b32 r, r", &[7], 0),
        ("shl.b32 r, r, r", &[1, 31], 0x8000_0000),
        ("shl.b32 r, r, r", &[1, 32], 0),
        ("shl.b32 r, r, r", &[1, 0xffff_ffff], 0),
        ("shl.b16 h, h, r", &[0x8001, 1], 2),
        ("shl.b64 d, d, r", &[1, 63], 1 << 63),
        ("shl.b64 d, d, r", &[1, 64], 0),
        ("shr.u32 r, r, r", &[0x8000_0000, 31], 1),
        ("shr.u32 r, r, r", &[0x8000_0000, 40], 0),
        ("shr.s32 r, r, r", &[0x8000_0000, 40], 0xffff_ffff),
        ("shr.s16 h, h, r", &[0x8000, 15], 0xffff),
        ("shr.u16 h, h, r", &[0x8000, 15], 1),
        ("shr.s64 d, d, r", &[1 << 63, 100], u64::MAX),
        ("shr.u64 d, d, r", &[1 << 63, 63], 1),
        ("shf.l.wrap.b32 r, r, r, r", &[0x8000_0001, 0x1234_5678, 4], 0x2345_6788),
        ("shf.l.clamp.b32 r, r, r, r", &[0x8000_0001, 0x1234_5678, 40], 0x8000_0001),
        ("shf.l.wrap.b32 r, r, r, r", &[0x8000_0001, 0x1234_5678, 36], 0x2345_6788),
        ("shf.r.wrap.b32 r, r, r, r", &[0x8000_0001, 0x1234_5678, 4], 0x8800_0000),
        ("shf.r.clamp.b32 r, r, r, r", &[0x8000_0001, 0x1234_5678, 99], 0x1234_5678),
        ("lop3.b32 r, r, r, r, 0x80", &[0xff, 0x3f, 0x1f], 0x1f),
        ("lop3.b32 r, r, r, r, 0xea", &[0xf0, 0x3c, 0x01], 0x31),
        ("lop3.b32 r, r, r, r, 0x96", &[0xf0, 0x3c, 0x01], 0xcd),
        ("lop3.b32 r, r, r, r, 0xca", &[0xf0, 0x5a, 0x33], 0x53),
        ("lop3.b32 r, r, r, r, 0xf8", &[0xf0, 0x0a, 0x03], 0xf2),
        ("lop3.b32 r, r, r, r, 0xfe", &[0xf0, 0x0a, 0x01], 0xfb),
        ("lop3.b32 r, r, r, r, 0x6a", &[0xf0, 0x3c, 0x01], 0x31),
        // a & !b & c, by the long way.
        ("lop3.b32 r, r, r, r, 0x20", &[0xff, 0x0f, 0x3c], 0x30),
        ("lop3.b32 r, r, r, r, 0x01", &[0xff, 0x0f, 0x3c], 0xffff_ff00),
    ]);
}

#[test]
fn fields_and_counts() {
    cases(&[
        ("popc.b32 r, r", &[0xf0f0_0001], 9),
        ("popc.b64 r, d", &[u64::MAX], 64),
        ("clz.b32 r, r", &[0x0001_0000], 15),
        ("clz.b32 r, r", &[0], 32),
        ("clz.b64 r, d", &[1], 63),
        ("brev.b32 r, r", &[0x0000_0003], 0xc000_0000),
        ("brev.b64 d, d", &[1], 1 << 63),
        ("bfind.u32 r, r", &[0x0001_0000], 16),
        ("bfind.u32 r, r", &[0], 0xffff_ffff),
        ("bfind.s32 r, r", &[s(-2)], 0),
        ("bfind.s32 r, r", &[s(-1)], 0xffff_ffff),
        ("bfind.shiftamt.u32 r, r", &[0x0001_0000], 15),
        ("bfind.u64 r, d", &[1 << 40], 40),
        ("bfe.u32 r, r, r, r", &[0x1234_5678, 8, 12], 0x456),
        ("bfe.u32 r, r, r, r", &[0x1234_5678, 28, 12], 1),
        ("bfe.u32 r, r, r, r", &[0x1234_5678, 40, 4], 0),
        ("bfe.u32 r, r, r, r", &[0x1234_5678, 0, 0], 0),
        ("bfe.s32 r, r, r, r", &[0x0000_0f00, 8, 4], 0xffff_ffff),
        ("bfe.s32 r, r, r, r", &[0x8000_0000, 28, 12], 0xffff_fff8),
        ("bfe.s32 r, r, r, r", &[0x8000_0000, 28, 0], 0),
        ("bfe.u64 d, d, r, r", &[0x1234_5678_9abc_def0, 32, 64], 0x1234_5678),
        ("bfe.s64 d, d, r, r", &[0xf000_0000_0000_0000, 60, 4], u64::MAX),
        ("bfi.b32 r, r, r, r, r", &[0xf, 0x1234_5678, 8, 4], 0x1234_5f78),
        ("bfi.b32 r, r, r, r, r", &[0xf, 0x1234_5678, 8, 0], 0x1234_5678),
        ("bfi.b32 r, r, r, r, r", &[0xffff_ffff, 0, 28, 12], 0xf000_0000),
        ("bfi.b32 r, r, r, r, r", &[0xffff_ffff, 5, 33, 4], 5),
        ("bfi.b64 d, d, d, r, r", &[0xff, 0, 56, 8], 0xff << 56),
        ("bmsk.clamp.b32 r, r, r", &[4, 8], 0xff0),
        ("bmsk.clamp.b32 r, r, r", &[28, 40], 0xf000_0000),
        ("prmt.b32 r, r, r, r", &[0x3322_1100, 0x7766_5544, 0x7531], 0x7755_3311),
        ("prmt.b32 r, r, r, r", &[0x3382_1100, 0x7766_5544, 0xa210], 0xff82_1100),
        ("prmt.b32.f4e r, r, r, r", &[0x3322_1100, 0x7766_5544, 1], 0x4433_2211),
        ("prmt.b32.b4e r, r, r, r", &[0x3322_1100, 0x7766_5544, 1], 0x6677_0011),
        ("prmt.b32.rc8 r, r, r, r", &[0x3322_1100, 0, 2], 0x2222_2222),
        ("prmt.b32.rc16 r, r, r, r", &[0x3322_1100, 0, 1], 0x3322_3322),
        ("prmt.b32.ecl r, r, r, r", &[0x3322_1100, 0, 1], 0x3322_1111),
        ("prmt.b32.ecr r, r, r, r", &[0x3322_1100, 0, 2], 0x2222_1100),
    ]);
}

#[test]
fn moves_and_choices() {
    cases(&[
        ("mov.b16 h, h", &[0x1234], 0x1234),
        ("mov.b64 d, d", &[l(-1)], l(-1)),
        ("selp.b32 r, r, r, p", &[1, 2, 1], 1),
        ("selp.b32 r, r, r, p", &[1, 2, 0], 2),
        ("selp.b16 h, h, h, p", &[1, 2, 0], 2),
        ("selp.s64 d, d, d, p", &[l(-1), 2, 1], l(-1)),
        ("slct.s32.s32 r, r, r, r", &[1, 2, 0], 1),
        ("slct.s32.s32 r, r, r, r", &[1, 2, s(-1)], 2),
        ("slct.u64.f32 d, d, d, r", &[1, 2, super::f(-0.5)], 2),
        ("setp.lt.s32 p, r, r", &[s(-1), 0], 1),
        ("setp.lt.u32 p, r, r", &[s(-1), 0], 0),
        ("setp.lo.s32 p, r, r", &[0, s(-1)], 1),
        ("setp.hs.u32 p, r, r", &[5, 5], 1),
        ("setp.eq.s16 p, h, h", &[0xffff, 0xffff], 1),
        ("setp.ge.s16 p, h, h", &[0xffff, 0], 0),
        ("setp.ne.b64 p, d, d", &[1 << 40, 0], 1),
        ("setp.gt.s64 p, d, d", &[1, l(-1)], 1),
        ("setp.le.u64 p, d, d", &[1, l(-1)], 1),
        ("setp.eq.and.s32 p, r, r, p", &[1, 1, 0], 0),
        ("setp.eq.or.s32 p, r, r, p", &[1, 2, 1], 1),
        ("setp.eq.xor.s32 p, r, r, p", &[1, 1, 1], 0),
        ("and.pred p, p, p", &[1, 0], 0),
        ("or.pred p, p, p", &[1, 0], 1),
        ("xor.pred p, p, p", &[1, 1], 0),
        ("not.pred p, p", &[1], 0),
        ("set.lt.u32.s32 r, r, r", &[s(-1), 0], 0xffff_ffff),
        ("set.lt.f32.s32 r, r, r", &[s(-1), 0], super::f(1.0)),
        ("set.gt.u32.u32 r, r, r", &[0, 1], 0),
    ]);
}

#[test]
fn carries_go_through_chains() {
    let body = "add.cc.u32 %r1, 0xffffffff, 1; addc.cc.u32 %r2, 0xffffffff, 0; addc.u32 %r3, 0, 0;
        sub.cc.u32 %r4, 0, 1; subc.u32 %r5, 5, 0;
        st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; st.global.u32 [%d1+8], %r3;
        st.global.u32 [%d1+12], %r4; st.global.u32 [%d1+16], %r5;";
    let outcome = run(body, Run { block: 1, out: 20, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [0, 0, 1, 0xffff_ffff, 4]);
}

#[test]
fn halves_of_registers() {
    let body = "mov.b32 %r1, 0x12345678; mov.b32 {%h1, %h2}, %r1; mov.b32 %r2, {%h2, %h1};
        mov.b64 %d5, {%r1, %r2}; mov.b64 {%r3, %r4}, %d5; mov.b64 {%h3, %h4, %h5, %h6}, %d5;
        mov.b64 %d6, {%h6, %h5, %h4, %h3}; mov.b32 {_, %h7}, %r1; cvt.u32.u16 %r5, %h7;
        st.global.u32 [%d1], %r2; st.global.u32 [%d1+4], %r3; st.global.u32 [%d1+8], %r4;
        mov.b64 {%r6, %r7}, %d6; st.global.u32 [%d1+12], %r6; st.global.u32 [%d1+16], %r7; st.global.u32 [%d1+20], %r5;";
    let outcome = run(body, Run { block: 1, out: 24, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [0x5678_1234, 0x1234_5678, 0x5678_1234, 0x1234_5678, 0x5678_1234, 0x1234]);
}

#[test]
fn setp_has_a_second_result_and_negated_predicates() {
    let body = "setp.lt.s32 %p1|%p2, 1, 2; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 1, 0, %p2;
        setp.eq.and.s32 %p3, 1, 1, !%p2; selp.u32 %r3, 1, 0, %p3;
        st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; st.global.u32 [%d1+8], %r3;";
    let outcome = run(body, Run { block: 1, out: 12, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [1, 0, 1]);
}

#[test]
fn every_modifier_must_be_known() {
    let (line, what) = refused(&super::module("add.weird.s32 %r1, %r2, %r3;"));
    assert!(what.contains("unknown modifier `.weird`"), "{what}");
    assert_eq!(line, 10);
    assert!(refused(&super::module("frobnicate.b32 %r1, %r2;")).1.contains("unknown instruction"));
    assert!(refused(&super::module("add.s32 %r1, %h2, %r999;")).1.contains("unknown"));
    assert!(refused(&super::module("add.s32 %d1, %r2, %r3;")).1.contains("is needed"));
}
