//! Loads, stores, atomics, copies, address spaces.

use super::{Run, module_with, refused, run, run_text};

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn every_size_and_sign() {
    let input = words(&[0x8182_8384, 0xfffe_fdfc, 3, 4]);
    let body = "ld.global.u8 %r1, [%d0]; ld.global.s8 %r2, [%d0]; ld.global.u16 %r3, [%d0+2]; ld.global.s16 %r4, [%d0+2];
        ld.global.nc.L1::no_allocate.b32 %r5, [%d0+4]; ld.volatile.global.u64 %d10, [%d0];
        ld.global.s8 %h1, [%d0]; cvt.u32.u16 %r6, %h1; ld.global.s32 %d11, [%d0]; shr.u64 %d12, %d11, 32; cvt.u32.u64 %r7, %d12;
        ld.global.v2.u32 {%r8, %r9}, [%d0+8]; ld.global.v4.u8 {%r10, %r11, %r12, %r13}, [%d0];
        ld.global.v2.b64 {%d13, %d14}, [%d0]; cvt.u32.u64 %r14, %d14;
        st.global.v4.u32 [%d1], {%r1, %r2, %r3, %r4}; st.global.wt.v2.b32 [%d1+16], {%r5, %r6};
        st.global.u32 [%d1+24], %r7; st.global.v2.u32 [%d1+28+-4+4+4], {%r8, %r9};";
    // The last offset is not PTX: a sum of offsets is refused.
    assert!(refused(&super::module(body)).1.contains("expected"));
    let body = body.replace("[%d1+28+-4+4+4], {%r8, %r9}", "[%d1+32], {%r8, %r9}")
        + "st.global.u32 [%d1+28], %r10; st.global.u8 [%d1+40], %r13; st.global.u16 [%d1+42], %r5; st.global.u8 [%d1+41], %h1;
           st.global.u32 [%d1+44], %r14;";
    let outcome = run(&body, Run { block: 1, input: &input, out: 48, ..Run::default() }).clean();
    let want = [0x84, 0xffff_ff84, 0x8182, 0xffff_8182, 0xfffe_fdfc, 0xff84, 0xffff_ffff, 0x84, 3, 4, 0xfdfc_8481, 3];
    assert_eq!(outcome.words(), want);
}

#[test]
fn shared_local_and_constant_memory() {
    let before = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};
        .global .align 8 .b8 text[4] = {65, 66, 67, 0};
        .shared .align 16 .b8 fixed[64];
        .extern .shared .align 16 .b8 more[];";
    let body = ".local .align 8 .b8 depot[64];
        mov.u32 %r1, fixed; mov.u32 %r2, more; sub.u32 %r3, %r2, %r1; st.shared.u32 [more+4], 7; ld.shared.u32 %r4, [%r2+4];
        mov.u64 %d5, depot; cvta.local.u64 %d6, %d5; st.u32 [%d6+8], 99; ld.local.u32 %r5, [depot+8];
        ld.const.u32 %r6, [table+8]; mov.u64 %d7, table; add.s64 %d7, %d7, 12; ld.const.u32 %r7, [%d7];
        ld.global.u8 %r8, [text+1]; cvta.shared.u64 %d8, 64; ld.u32 %r9, [%d8+4]; cvta.to.shared.u64 %d9, %d8; cvt.u32.u64 %r10, %d9;
        mov.u64 %d11, more; ld.shared.u32 %r11, [%d11+4];
        mov.u32 %r12, %dynamic_smem_size;
        st.global.v4.u32 [%d1], {%r3, %r4, %r5, %r6}; st.global.v4.u32 [%d1+16], {%r7, %r8, %r9, %r10};
        st.global.v2.u32 [%d1+32], {%r11, %r12};";
    let run = Run { block: 1, dynamic: 32, out: 40, ..Run::default() };
    let outcome = run_text(&module_with(before, body), run).clean();
    assert_eq!(outcome.words(), [64, 7, 99, 30, 40, 66, 7, 64, 7, 32]);
}

#[test]
fn atomics() {
    let body = "mov.u64 %d5, %d1; st.global.u32 [%d1], 10; st.global.u64 [%d1+8], 100; st.global.f32 [%d1+16], 0f3F800000;
        st.global.b32 [%d1+20], 0x3c003c00; st.global.u32 [%d1+24], 5; st.global.u32 [%d1+28], 0;
        atom.global.add.u32 %r1, [%d1], 5; atom.global.gpu.relaxed.max.s32 %r2, [%d1], 7; red.global.min.s32 [%d1], -3;
        atom.global.cas.b32 %r3, [%d1], -3, 77; atom.global.cas.b32 %r4, [%d1], 1, 2; atom.exch.b32 %r5, [%d1], 64;
        red.global.or.b32 [%d1], 1; red.global.and.b32 [%d1], 0x41; red.global.xor.b32 [%d1], 2;
        atom.global.add.u64 %d6, [%d1+8], 11; red.global.add.f32 [%d1+16], 0f40000000;
        atom.global.add.noftz.f16x2 %r6, [%d1+20], 0x40003c00;
        atom.global.inc.u32 %r7, [%d1+24], 5; atom.global.dec.u32 %r8, [%d1+28], 9;
        cvt.u32.u64 %r9, %d6; st.global.v4.u32 [%d1+32], {%r1, %r2, %r3, %r4}; st.global.v4.u32 [%d1+48], {%r5, %r6, %r7, %r8};
        st.global.u32 [%d1+64], %r9;";
    let outcome = run(body, Run { block: 1, out: 68, ..Run::default() }).clean();
    let want = [
        0x43,
        0xffff_ffff,
        111,
        0,
        3f32.to_bits(),
        0x4200_4000,
        0,
        9,
        10,
        15,
        0xffff_fffd,
        77,
        77,
        0x3c00_3c00,
        5,
        0,
        100,
    ];
    assert_eq!(outcome.words(), want);
}

#[test]
fn all_lanes_and_ctas_add_up() {
    let before = ".shared .align 4 .u32 sum;";
    let body = "setp.ne.s32 %p1, %t, 0; @!%p1 st.shared.u32 [sum], 0; bar.sync 0; red.shared.add.u32 [sum], %t; bar.sync 0;
        ld.shared.u32 %r1, [sum]; @!%p1 red.global.add.u32 [%d0], %r1; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, 64, %t;
        mad.wide.u32 %d4, %r3, 4, %d1; st.global.u32 [%d4], %r1;";
    let outcome =
        run_text(&module_with(before, body), Run { grid: 5, block: 64, out: 5 * 256, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [64 * 63 / 2; 320]);
    assert_eq!(outcome.stats.ctas, 5);
}

#[test]
fn copies_arrive_when_waited_for() {
    let input = words(&std::array::from_fn::<u32, 128, _>(|i| i as u32 + 1));
    let before = ".shared .align 16 .b8 tile[1024];";
    // Two groups; the second with fewer bytes than it has room for.
    let body =
        "shl.b32 %r1, %t, 4; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1; cvt.u64.u32 %d5, %r1; add.u64 %d5, %d0, %d5;
        cp.async.cg.shared.global [%r2], [%d5], 16; cp.async.commit_group;
        cp.async.ca.shared.global.L2::128B [%r2+512], [%d5], 16, 8; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.u32 %r3, [%r2+12];
        cp.async.wait_group 0; ld.shared.u32 %r4, [%r2+516]; ld.shared.u32 %r5, [%r2+520];
        cp.async.ca.shared.global [%r2], [%d5+4], 4; cp.async.wait_all; ld.shared.u32 %r6, [%r2];
        mad.wide.u32 %d6, %t, 16, %d1; st.global.v4.u32 [%d6], {%r3, %r4, %r5, %r6};";
    let outcome = run_text(&module_with(before, body), Run { input: &input, out: 512, ..Run::default() }).clean();
    let want: Vec<u32> = (0..32).flat_map(|t| [4 * t + 4, 4 * t + 2, 0, 4 * t + 2]).collect();
    assert_eq!(outcome.words(), want);
    for bad in ["cp.async.cg.shared.global [%r2], [%d5], 8;", "cp.async.ca.shared.global [%r2], [%d5], 12;"] {
        assert!(refused(&super::module(bad)).1.contains("bytes"));
    }
}

#[test]
fn functions_are_called() {
    let before = ".func (.param .b32 result) twice(.param .b32 x, .param .align 8 .b8 pair[8])
        { .reg .b32 %r<4>; .reg .pred %p1; ld.param.u32 %r0, [x]; ld.param.u32 %r1, [pair+4]; setp.gt.u32 %p1, %r0, 2;
          @%p1 bra BIG; mad.lo.u32 %r2, %r0, 2, %r1; st.param.b32 [result], %r2; ret;
          BIG: st.param.b32 [result], 1000; ret; }";
    let body =
        "{ .param .b32 p0; .param .align 8 .b8 p1[8]; .param .b32 back; st.param.b32 [p0], %t; st.param.b32 [p1+4], 5;
        call.uni (back), twice, (p0, p1); ld.param.b32 %r1, [back]; }
        { .param .b32 p0; .param .align 8 .b8 p1[8]; .param .b32 back; st.param.b32 [p0], 1; st.param.b32 [p1+4], %r1;
        call (back), twice, (p0, p1); ld.param.b32 %r2, [back]; }
        st.global.u32 [%d2], %r2;";
    let outcome = run_text(&module_with(before, body), Run { block: 4, out: 16, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [7, 9, 11, 1002]);
    let recursive = ".func again() { call again; ret; }";
    assert!(refused(&module_with(recursive, "call again;")).1.contains("calls itself"));
}

#[test]
fn parameters_by_address() {
    let text =
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 a, .param .align 8 .b8 b[8]) {
        .reg .b64 %d<9>; .reg .b32 %r<9>; ld.param.u64 %d1, [b]; mov.b64 %d2, b; ld.param.u32 %r1, [%d2+4];
        cvta.param.u64 %d3, %d2; ld.u32 %r2, [%d3+4]; sub.u32 %r3, %r1, %r2; st.global.u32 [%d1], %r3; ret; }";
    let outcome = run_text(text, Run { block: 1, out: 4, ..Run::default() }).clean();
    assert_eq!(outcome.words(), [0]);
}
