//! One small kernel for each kind of mistake: nothing is found in the right one, and the mistake in the wrong one.

use super::{Outcome, Run, module_with, run_text};

const BEFORE: &str = ".shared .align 16 .b8 buffer[1024];";
/// `%r3`: the address of the thread's word in `buffer`, `%r4` that of its neighbour's (of the pair).
const PLACE: &str =
    "shl.b32 %r2, %t, 2; mov.u32 %r6, buffer; add.u32 %r3, %r6, %r2; xor.b32 %r5, %r2, 4; add.u32 %r4, %r6, %r5;";

fn go(body: &str, run: Run) -> Outcome {
    run_text(&module_with(BEFORE, &format!("{PLACE}\n{body}")), run)
}

fn wide<'r>() -> Run<'r> {
    Run { block: 64, out: 256, input: &[1; 512], ..Run::default() }
}

/// The right kernel is clean; with `from` replaced by `to` it is reported as `kind`, at a line with `place`.
fn mutate(right: &str, from: &str, to: &str, kind: &str, place: &str) {
    let clean = go(right, wide());
    assert_eq!((clean.code, clean.reports.as_slice()), (None, [].as_slice()), "{right}");
    assert!(right.contains(from), "`{from}` is not in the kernel");
    let wrong = go(&right.replacen(from, to, 1), wide());
    let found = wrong.reports.iter().find(|report| report.starts_with(kind) && report.contains(place));
    assert!(found.is_some(), "{kind} at `{place}` expected, got {:#?}", wrong.reports);
    let report = found.unwrap();
    for part in ["kernel k", "CTA (0,0,0)", "warp ", "lane ", "PTX line "] {
        assert!(report.contains(part), "{report}");
    }
}

const REVERSE: &str = "st.shared.u32 [%r3], %t;
    bar.sync 0;
    sub.u32 %r7, 63, %t; shl.b32 %r7, %r7, 2; add.u32 %r7, %r7, %r6;
    ld.shared.u32 %r8, [%r7];
    bar.sync 1;
    st.shared.u32 [%r3], 5;
    st.global.u32 [%d2], %r8;";

#[test]
fn races_in_shared_memory() {
    mutate(REVERSE, "bar.sync 0;", "", "race", "ld.shared.u32 %r8");
    mutate(REVERSE, "bar.sync 1;", "", "race", "st.shared.u32 [%r3], 5");
    // Two writers.
    let writers = "st.shared.u32 [%r3], %t; bar.sync 0; ld.shared.u32 %r8, [%r3]; st.global.u32 [%d2], %r8;";
    mutate(writers, "[%r3], %t", "[%r6], %t", "race", "st.shared.u32 [%r6], %t");
    // A whole warp writes one value: no harm.
    assert!(
        go("st.shared.u32 [%r6], 3; bar.sync 0; ld.shared.u32 %r8, [%r6]; st.global.u32 [%d2], %r8;", wide())
            .reports
            .is_empty()
    );
}

#[test]
fn races_within_a_warp() {
    let right = "st.shared.u32 [%r3], %t;
        bar.warp.sync -1;
        ld.shared.u32 %r8, [%r4];
        bar.warp.sync 0xffffffff;
        st.shared.u32 [%r3], 1;
        st.global.u32 [%d2], %r8;";
    mutate(right, "bar.warp.sync -1;", "", "race", "ld.shared.u32 %r8");
    mutate(right, "bar.warp.sync 0xffffffff;", "", "race", "st.shared.u32 [%r3], 1");
    // A shuffle exchanges registers and orders nothing.
    mutate(right, "bar.warp.sync -1;", "shfl.sync.bfly.b32 %r9, %t, 1, 31, -1;", "race", "ld.shared.u32 %r8");
}

#[test]
fn unwritten_shared_memory() {
    mutate(
        REVERSE,
        "st.shared.u32 [%r3], %t;",
        "setp.ne.u32 %p1, %t, 9; @%p1 st.shared.u32 [%r3], %t;",
        "uninitialised",
        "ld.shared",
    );
}

#[test]
fn unwritten_global_memory() {
    let right = "st.global.u32 [%d2], %t; ld.global.u32 %r8, [%d2]; ld.global.u32 %r9, [%d0];";
    mutate(right, "st.global.u32 [%d2], %t;", "", "uninitialised", "ld.global.u32 %r8");
    mutate(
        right,
        "[%d2], %t",
        "[%d2+0], 1; ld.global.u32 %r10, [%d1+252]; st.global.u32 [%d2], %t",
        "uninitialised",
        "ld.global.u32 %r10",
    );
}

#[test]
fn out_of_bounds() {
    let right =
        "ld.global.u32 %r8, [%d0]; st.shared.u32 [%r3], %r8; ld.shared.u32 %r9, [%r3]; st.global.u32 [%d2], %r9;";
    mutate(right, "[%d0]", "[%d0+512]", "out of bounds", "ld.global.u32 %r8");
    mutate(right, "[%d0]", "[%d0+-4]", "out of bounds", "ld.global.u32 %r8");
    mutate(right, "st.global.u32 [%d2]", "st.global.u32 [%d2+4]", "out of bounds", "st.global.u32");
    mutate(right, "st.shared.u32 [%r3]", "st.shared.u32 [%r3+1000]", "out of bounds", "st.shared");
    mutate(right, "ld.shared.u32 %r9, [%r3]", "ld.shared.u32 %r9, [%r3+-4]", "out of bounds", "ld.shared");
    let outcome = go(&right.replace("[%d0]", "[%d0+512]"), Run { checks: false, ..wide() });
    assert_eq!(outcome.code, Some(700));
    let local = ".local .align 4 .b8 depot[16]; st.local.u32 [depot+12], 1; ld.local.u32 %r8, [depot+12]; st.global.u32 [%d2], %r8;";
    mutate(local, "st.local.u32 [depot+12]", "st.local.u32 [depot+16]", "out of bounds", "st.local");
}

#[test]
fn misaligned() {
    let right =
        "ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d0+16]; st.shared.u32 [%r3], %r8; ld.shared.u16 %r9, [%r3+2];
        st.global.u32 [%d2], %r9;";
    mutate(right, "[%d0+16]", "[%d0+8]", "misaligned", "ld.global.v4");
    mutate(right, "[%r3+2]", "[%r3+1]", "misaligned", "ld.shared.u16");
    let outcome = go(&right.replace("[%d0+16]", "[%d0+8]"), Run { checks: false, ..wide() });
    assert_eq!(outcome.code, Some(716));
}

#[test]
fn divergent_barriers() {
    let right = "setp.lt.u32 %p1, %t, 48; @%p1 bra A; mov.u32 %r8, 1; bra B; A: mov.u32 %r8, 2; B: bar.sync 0; st.global.u32 [%d2], %r8;";
    mutate(right, "mov.u32 %r8, 1;", "mov.u32 %r8, 1; bar.sync 0;", "divergent barrier", "bar.sync 0");
    mutate(right, "B: bar.sync 0;", "B: @%p1 bar.sync 0;", "divergent barrier", "@%p1 bar.sync 0");
    // Some threads are gone.
    mutate(right, "mov.u32 %r8, 1;", "exit;", "divergent barrier", "bar.sync 0");
    // Warps at different barriers.
    let warps = "setp.lt.u32 %p1, %t, 32; @%p1 bra A; mov.u32 %r8, 1; bra B; A: mov.u32 %r8, 2; B: bar.sync 0; st.global.u32 [%d2], %r8;";
    mutate(
        warps,
        "mov.u32 %r8, 1; bra B;",
        "mov.u32 %r8, 1; bar.sync 0; st.global.u32 [%d2], %r8; exit;",
        "divergent barrier",
        "bar.sync 0",
    );
    let stuck = go("setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 1, 64; A: bar.sync 2, 64;", wide());
    assert_eq!(stuck.code, Some(719));
    assert!(stuck.reports[0].starts_with("deadlock"), "{:?}", stuck.reports);
}

const COPY: &str =
    "shl.b32 %r9, %t, 2; cvt.u64.u32 %d5, %r9; add.u64 %d5, %d0, %d5; cp.async.ca.shared.global [%r3], [%d5], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.u32 %r8, [%r4]; st.global.u32 [%d2], %r8;";

#[test]
fn copies_without_a_wait() {
    mutate(COPY, "cp.async.wait_group 0;", "", "missing cp.async wait", "ld.shared");
    mutate(COPY, "cp.async.wait_group 0;", "cp.async.wait_group 1;", "missing cp.async wait", "ld.shared");
    mutate(COPY, "cp.async.commit_group;", "", "missing cp.async wait", "ld.shared");
    mutate(COPY, "bar.sync 0;", "", "race", "ld.shared");
    mutate(COPY, "[%d5], 4", "[%d5+508], 4", "out of bounds", "cp.async");
    // What was not waited for is not there: the numbers are wrong too.
    let outcome = go(&COPY.replace("cp.async.wait_group 0;", ""), Run { checks: false, ..wide() });
    assert_eq!(outcome.words()[0], 0xffff_ffff);
}

#[test]
fn partial_warps() {
    let right = "and.b32 %r9, %t, 31; setp.lt.u32 %p1, %r9, 20; mov.u32 %r8, %t; shfl.sync.bfly.b32 %r8, %t, 1, 31, 0xffffffff; st.global.u32 [%d2], %r8;";
    mutate(
        right,
        "shfl.sync.bfly.b32 %r8, %t, 1, 31, 0xffffffff",
        "@%p1 shfl.sync.bfly.b32 %r8, %t, 1, 31, 0xffffffff",
        "partial warp",
        "shfl",
    );
    // Lanes that have exited.
    mutate(right, "mov.u32 %r8, %t;", "@!%p1 exit;", "partial warp", "shfl");
    // From a lane that takes no part, and by one that its mask leaves out.
    let masked = "and.b32 %r9, %t, 31; setp.lt.u32 %p1, %r9, 16; mov.u32 %r8, %t; @%p1 shfl.sync.bfly.b32 %r8, %t, 1, 31, 0xffff; st.global.u32 [%d2], %r8;";
    mutate(masked, "%t, 1, 31, 0xffff;", "%t, 16, 31, 0xffff;", "partial warp", "shfl");
    mutate(masked, "0xffff;", "0x00ff;", "partial warp", "shfl");
    let votes = "setp.lt.u32 %p1, %t, 20; vote.sync.ballot.b32 %r8, %p1, -1; st.global.u32 [%d2], %r8;";
    mutate(votes, "vote.sync", "@%p1 vote.sync", "partial warp", "vote");
    let mma = "mov.b32 %r8, 0; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r10, %r11, %r12, %r13}, {%r8, %r8}, {%r8}, {%r8, %r8, %r8, %r8};";
    let right = format!("setp.lt.u32 %p1, %t, 40; {mma} st.global.u32 [%d2], %r10;");
    mutate(&right, "mma.sync", "@%p1 mma.sync", "partial warp", "mma");
}

#[test]
fn races_between_ctas() {
    // Each CTA writes its own word; then all the same one.
    let right =
        "mov.u32 %r8, %ctaid.x; mad.lo.u32 %r8, %r8, 64, %t; mad.wide.u32 %d4, %r8, 4, %d1; st.global.u32 [%d4], %r8;";
    let run = || Run { grid: 3, out: 768, ..wide() };
    assert!(go(right, run()).reports.is_empty());
    let found = go(&right.replace("[%d4], %r8", "[%d2], %r8"), run()).reports;
    assert!(found.iter().any(|report| report.starts_with("race between CTAs")), "{found:?}");
    // All the same value into one word, and atomics: no conflict; a reader among atomics: one.
    assert!(go("st.global.u32 [%d2], %t;", run()).reports.is_empty());
    assert!(go("red.global.add.u32 [%d0], 1;", run()).reports.is_empty());
    let found = go("red.global.add.u32 [%d0], 1; ld.global.u32 %r8, [%d0];", run()).reports;
    assert!(found.iter().any(|report| report.starts_with("race between CTAs")), "{found:?}");
}

#[test]
fn traps_assertions_and_deadlocks() {
    assert_eq!(go("setp.eq.u32 %p1, %t, 40; @%p1 trap;", wide()).code, Some(719));
    let before =
        ".extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
        .global .align 1 .b8 message[5] = {120, 62, 48, 33, 0}; .global .align 1 .b8 file[5] = {97, 46, 99, 117, 0};";
    let body = "mov.u64 %d5, message; mov.u64 %d6, file; { .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
        st.param.b64 [a], %d5; st.param.b64 [b], %d6; st.param.b32 [c], 42; st.param.b64 [d], %d5; st.param.b64 [e], 1;
        call.uni __assertfail, (a, b, c, d, e); }";
    let outcome = run_text(&module_with(before, body), wide());
    assert_eq!(outcome.code, Some(710));
    assert!(outcome.reports[0].contains("x>0! (a.cu:42)"), "{:?}", outcome.reports);
    // Each half of a warp waits for the other at another instruction.
    let body = "setp.lt.u32 %p1, %t, 16; @%p1 bra A; shfl.sync.bfly.b32 %r8, %t, 1, 31, -1; bra B; A: shfl.sync.bfly.b32 %r8, %t, 2, 31, -1; B:";
    let outcome = go(body, Run::default());
    assert!(outcome.reports[0].starts_with("deadlock"), "{:?}", outcome.reports);
}

#[test]
fn what_a_report_says() {
    let body = "\n.loc 1 77 3\nld.global.u32 %r8, [%d0+16];";
    let text = module_with(".file 1 \"kernel.cu\"", body);
    let reports = run_text(&text, Run::default()).reports;
    let line = text.lines().position(|line| line.contains("[%d0+16]")).unwrap() + 1;
    let want = format!("PTX line {line}: ld.global.u32 %r8, [%d0+16]; (kernel.cu:77)");
    assert!(reports[0].ends_with(&want), "{reports:?} {want}");
    assert!(reports[0].contains("byte 16 of an allocation of 16"), "{reports:?}");
}
