//! Branches, barriers, and what lanes of a warp do together.

use super::{Run, module_with, run, run_text};

/// A value per lane that a body leaves in `%r1`.
fn lanes(body: &str) -> Vec<u32> {
    run(&format!("{body} st.global.u32 [%d2], %r1;"), Run::default()).clean().words()
}

fn each(f: impl Fn(u32) -> u32) -> Vec<u32> {
    (0..32).map(f).collect()
}

#[test]
fn special_registers() {
    assert_eq!(lanes("mov.u32 %r1, %laneid;"), each(|i| i));
    assert_eq!(lanes("mov.u32 %r1, %lanemask_eq;"), each(|i| 1 << i));
    assert_eq!(lanes("mov.u32 %r1, %lanemask_lt;"), each(|i| (1 << i) - 1));
    assert_eq!(lanes("mov.u32 %r1, %lanemask_le;"), each(|i| ((2u64 << i) - 1) as u32));
    assert_eq!(lanes("mov.u32 %r1, %lanemask_gt;"), each(|i| !(((2u64 << i) - 1) as u32)));
    assert_eq!(lanes("mov.u32 %r1, %lanemask_ge;"), each(|i| !((1 << i) - 1)));
    assert_eq!(lanes("mov.u32 %r1, %ntid.x; mov.u32 %r2, %nctaid.y; add.u32 %r1, %r1, %r2;"), [33; 32]);
    assert_eq!(lanes("mov.u32 %r1, %warpid; mov.u32 %r2, %nwarpid; add.u32 %r1, %r1, %r2;"), [1; 32]);
}

#[test]
fn shuffles() {
    let shuffle = |kind: &str, b: u32, c: u32| {
        lanes(&format!(
            "shfl.sync.{kind}.b32 %r2|%p1, %t, {b}, {c:#x}, 0xffffffff; selp.u32 %r3, 100, 0, %p1; add.u32 %r1, %r2, %r3;"
        ))
    };
    assert_eq!(shuffle("bfly", 3, 0x1f), each(|i| 100 + (i ^ 3)));
    assert_eq!(shuffle("down", 4, 0x1f), each(|i| if i < 28 { 104 + i } else { i }));
    assert_eq!(shuffle("up", 4, 0), each(|i| if i >= 4 { 96 + i } else { i }));
    assert_eq!(shuffle("idx", 5, 0x1f), [105; 32]);
    // Segments of 8: the mask of segments is in bits 8 to 12 of c.
    assert_eq!(shuffle("idx", 3, 0x181f), each(|i| 100 + (i & 24) + 3));
    assert_eq!(shuffle("down", 1, 0x181f), each(|i| if i % 8 < 7 { 101 + i } else { i }));
    assert_eq!(shuffle("up", 2, 0x1800), each(|i| if i % 8 >= 2 { 98 + i } else { i }));
}

#[test]
fn votes_matches_and_reductions() {
    let odd = "and.b32 %r2, %t, 1; setp.eq.u32 %p1, %r2, 1;";
    assert_eq!(lanes(&format!("{odd} vote.sync.ballot.b32 %r1, %p1, -1;")), [0xaaaa_aaaa; 32]);
    assert_eq!(lanes(&format!("{odd} vote.sync.ballot.b32 %r1, !%p1, -1;")), [0x5555_5555; 32]);
    for (kind, want) in [("any", 1), ("all", 0), ("uni", 0)] {
        let body = format!("{odd} vote.sync.{kind}.pred %p2, %p1, 0xffffffff; selp.u32 %r1, 1, 0, %p2;");
        assert_eq!(lanes(&body), [want; 32], "{kind}");
    }
    assert_eq!(lanes("and.b32 %r2, %t, 3; match.any.sync.b32 %r1, %r2, -1;"), each(|i| 0x1111_1111 << (i % 4)));
    assert_eq!(lanes("mov.b64 %d5, 9; match.all.sync.b64 %r1|%p1, %d5, -1;"), [!0; 32]);
    assert_eq!(lanes("match.all.sync.b32 %r1|%p1, %t, -1;"), [0; 32]);
    assert_eq!(lanes("redux.sync.add.u32 %r1, %t, -1;"), [496; 32]);
    assert_eq!(lanes("sub.s32 %r2, 5, %t; redux.sync.min.s32 %r1, %r2, -1;"), [-26i32 as u32; 32]);
    assert_eq!(lanes("sub.s32 %r2, 5, %t; redux.sync.max.u32 %r1, %r2, -1;"), [!0; 32]);
    assert_eq!(lanes("redux.sync.or.b32 %r1, %t, -1;"), [31; 32]);
    assert_eq!(lanes("redux.sync.xor.b32 %r1, %t, -1;"), [0; 32]);
    assert_eq!(lanes("mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 4; @%p1 activemask.b32 %r1;")[..5], [15, 15, 15, 15, 0]);
}

#[test]
fn branches_and_loops() {
    // Lanes loop as often as their number says.
    let body = "mov.u32 %r1, 0; mov.u32 %r2, 0;
        LOOP: setp.ge.u32 %p1, %r2, %t; @%p1 bra DONE; add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra.uni LOOP; DONE:";
    assert_eq!(lanes(body), each(|i| (0..i).sum()));
    let switch = "and.b32 %r2, %t, 3; CASES: .branchtargets A, B, C, D; brx.idx %r2, CASES;
        A: mov.u32 %r1, 1; bra E; B: mov.u32 %r1, 2; bra E; C: mov.u32 %r1, 3; bra E; D: mov.u32 %r1, 4; E:";
    assert_eq!(lanes(switch), each(|i| i % 4 + 1));
    // Lanes that wait for each other on both sides of a branch meet at the second shuffle.
    let late = "setp.lt.u32 %p1, %t, 16; @%p1 bra A; mov.u32 %r2, 7; bra B; A: mov.u32 %r2, 5;
        B: shfl.sync.bfly.b32 %r1, %r2, 16, 0x1f, -1;";
    assert_eq!(lanes(late), each(|i| if i < 16 { 7 } else { 5 }));
}

#[test]
fn barriers() {
    let before = ".shared .align 4 .b8 buffer[512];";
    let body = "shl.b32 %r2, %t, 2; mov.u32 %r3, buffer; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %t; bar.sync 0;
        sub.u32 %r4, 127, %t; shl.b32 %r4, %r4, 2; mov.u32 %r5, buffer; add.u32 %r4, %r4, %r5; ld.shared.u32 %r1, [%r4];
        st.global.u32 [%d2], %r1;";
    let outcome = run_text(&module_with(before, body), Run { block: 128, out: 512, ..Run::default() }).clean();
    assert_eq!(outcome.words(), (0..128).rev().collect::<Vec<u32>>());
    let reductions = "setp.lt.u32 %p1, %t, 40; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, !%p1;
        selp.u32 %r2, 1000, 0, %p2; selp.u32 %r3, 2000, 0, %p3; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.u32 [%d2], %r1;";
    assert_eq!(run(reductions, Run { block: 64, out: 256, ..Run::default() }).clean().words(), [2040; 64]);
    // A producer warp arrives, a consumer warp waits.
    let named = "setp.lt.u32 %p1, %t, 32; @!%p1 bra CONSUME; mov.u32 %r3, buffer; shl.b32 %r2, %t, 2; add.u32 %r3, %r3, %r2;
        st.shared.u32 [%r3], %t; bar.arrive 1, 64; bra END;
        CONSUME: bar.sync 1, 64; sub.u32 %r4, %t, 32; shl.b32 %r4, %r4, 2; mov.u32 %r3, buffer; add.u32 %r3, %r3, %r4; ld.shared.u32 %r1, [%r3];
        st.global.u32 [%d2], %r1; END:";
    let outcome = run_text(&module_with(before, named), Run { block: 64, out: 256, ..Run::default() }).clean();
    assert_eq!(outcome.words()[32..], (0..32).collect::<Vec<u32>>());
}

#[test]
fn a_warp_barrier_orders_its_lanes() {
    let before = ".shared .align 4 .b8 buffer[128];";
    let body =
        "shl.b32 %r2, %t, 2; mov.u32 %r3, buffer; add.u32 %r4, %r3, %r2; st.shared.u32 [%r4], %t; bar.warp.sync -1;
        xor.b32 %r5, %r2, 4; add.u32 %r5, %r5, %r3; ld.shared.u32 %r1, [%r5]; st.global.u32 [%d2], %r1;";
    assert_eq!(run_text(&module_with(before, body), Run::default()).clean().words(), each(|i| i ^ 1));
}
