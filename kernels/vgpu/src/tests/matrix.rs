//! Fragments of `ldmatrix` and `mma`, by the manual's formulas for each element's row and column (not by the words
//! that the implementation moves).

use super::{Run, module_with, run, run_text};
use crate::exec::alu::number::{bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3, f32_to_f16};

#[test]
fn ldmatrix_gives_each_lane_its_elements() {
    // Element (row, column) of matrix j is 1000 j + 10 row + column.
    let store = "mad.lo.u32 %r2, %t, 16, 0; mov.u32 %r3, tiles; add.u32 %r3, %r3, %r2; shr.u32 %r4, %t, 3; mul.lo.u32 %r4, %r4, 1000;
        and.b32 %r5, %t, 7; mad.lo.u32 %r4, %r5, 10, %r4;";
    let fill: String = (0..8)
        .map(|column| {
            format!("add.u32 %r6, %r4, {column}; cvt.u16.u32 %h1, %r6; st.shared.u16 [%r3+{}], %h1;", 2 * column)
        })
        .collect();
    let before = ".shared .align 16 .b8 tiles[512];";
    for (n, trans) in [(1, ""), (2, ""), (4, ""), (1, ".trans"), (2, ".trans"), (4, ".trans")] {
        let regs: Vec<String> = (0..n).map(|j| format!("%r{}", 20 + j)).collect();
        let stores: String = (0..n).map(|j| format!("st.global.u32 [%d4+{}], %r{};", 4 * j, 20 + j)).collect();
        let body = format!(
            "{store}{fill} bar.sync 0; ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{}}}, [%r3];
             mad.wide.u32 %d4, %t, {}, %d1; {stores}",
            regs.join(", "),
            4 * n
        );
        let outcome = run_text(&module_with(before, &body), Run { out: 128 * n, ..Run::default() }).clean();
        let words = outcome.words();
        for lane in 0..32u32 {
            for j in 0..n as u32 {
                let word = words[(lane * n as u32 + j) as usize];
                // Row lane / 4, columns 2 (lane % 4) and the next; transposed: the other way round.
                let (a, b) = (lane / 4, 2 * (lane % 4));
                let want = |at: u32| {
                    let (row, column) = if trans.is_empty() { (a, b + at) } else { (b + at, a) };
                    1000 * j + 10 * row + column
                };
                assert_eq!(word, want(0) | want(1) << 16, "x{n}{trans} lane {lane} matrix {j}");
            }
        }
        assert_eq!(outcome.stats.traffic.shared_waves - outcome.stats.traffic.shared_ideal, 8 * 3);
    }
}

/// How a kind of mma holds its operands.
struct Kind {
    opcode: &'static str,
    k: usize,
    /// Bits of an element of a and b.
    bits: usize,
    /// The bits of small numbers.
    encode: fn(i32) -> u32,
    float: bool,
}

/// Runs `d = a b + c` with small integers, whose products and sums every type holds exactly.
fn check(kind: &Kind, seed: u32) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as i32 % 4
    };
    let k = kind.k;
    let a: Vec<i32> = (0..16 * k).map(|_| next()).collect();
    let b: Vec<i32> = (0..k * 8).map(|_| next()).collect();
    let c: Vec<i32> = (0..16 * 8).map(|_| next()).collect();
    let per = 32 / kind.bits;
    let registers_a = 16 * k / per / 32;
    let registers_b = 8 * k / per / 32;
    // The manual's formulas: element i of lane's fragment of a and b.
    let at_a = |lane: usize, i: usize| {
        let (group, thread) = (lane / 4, lane % 4);
        let register = i / per;
        let row = group + if register % 2 == 1 { 8 } else { 0 };
        let column = thread * per + i % per + if register >= 2 { 4 * per } else { 0 };
        (row, column)
    };
    let at_b = |lane: usize, i: usize| {
        let (group, thread) = (lane / 4, lane % 4);
        (thread * per + i % per + if i / per >= 1 { 4 * per } else { 0 }, group)
    };
    let mask = if kind.bits == 32 { !0 } else { (1u32 << kind.bits) - 1 };
    let mut input = Vec::new();
    for lane in 0..32 {
        let mut push = |registers: usize, value: &dyn Fn(usize) -> i32| {
            for register in 0..registers {
                let word = (0..per).fold(0, |word, part| {
                    word | ((kind.encode)(value(register * per + part)) & mask) << (part * kind.bits)
                });
                input.extend(word.to_le_bytes());
            }
        };
        push(registers_a, &|i| {
            let (row, column) = at_a(lane, i);
            a[row * k + column]
        });
        push(registers_b, &|i| {
            let (row, column) = at_b(lane, i);
            b[row * 8 + column]
        });
        for i in 0..4 {
            let value = c[(lane / 4 + if i >= 2 { 8 } else { 0 }) * 8 + 2 * (lane % 4) + i % 2];
            input.extend(if kind.float { (value as f32).to_bits() } else { value as u32 }.to_le_bytes());
        }
    }
    let each = registers_a + registers_b + 4;
    let loads: String = (0..each).map(|i| format!("ld.global.u32 %r{}, [%d4+{}];", 10 + i, 4 * i)).collect();
    let list = |from: usize, n: usize| (from..from + n).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ");
    let body = format!(
        "mad.wide.u32 %d4, %t, {}, %d0; {loads} mma.sync.aligned.{} {{{}}}, {{{}}}, {{{}}}, {{{}}};
         mad.wide.u32 %d5, %t, 16, %d1; st.global.v4.u32 [%d5], {{{}}};",
        4 * each,
        kind.opcode,
        list(40, 4),
        list(10, registers_a),
        list(10 + registers_a, registers_b),
        list(10 + registers_a + registers_b, 4),
        list(40, 4),
    );
    let words = run(&body, Run { input: &input, out: 512, ..Run::default() }).clean().words();
    for lane in 0..32 {
        for i in 0..4 {
            let (row, column) = (lane / 4 + if i >= 2 { 8 } else { 0 }, 2 * (lane % 4) + i % 2);
            let want: i32 = (0..k).map(|x| a[row * k + x] * b[x * 8 + column]).sum::<i32>() + c[row * 8 + column];
            let word = words[lane * 4 + i];
            let got = if kind.float { f32::from_bits(word) as i32 } else { word as i32 };
            assert_eq!(got, want, "{} lane {lane} element {i}", kind.opcode);
        }
    }
}

#[test]
fn mma_fragments() {
    let f16 = |x: i32| u32::from(f32_to_f16(x as f32));
    let bf16 = |x: i32| u32::from(f32_to_bf16(x as f32));
    let e4m3 = |x: i32| u32::from(f32_to_e4m3(x as f32));
    let tf32 = |x: i32| (x as f32).to_bits() | 0xfff;
    let kinds = [
        Kind { opcode: "m16n8k16.row.col.f32.f16.f16.f32", k: 16, bits: 16, encode: f16, float: true },
        Kind { opcode: "m16n8k8.row.col.f32.f16.f16.f32", k: 8, bits: 16, encode: f16, float: true },
        Kind { opcode: "m16n8k16.row.col.f32.bf16.bf16.f32", k: 16, bits: 16, encode: bf16, float: true },
        Kind { opcode: "m16n8k8.row.col.f32.bf16.bf16.f32", k: 8, bits: 16, encode: bf16, float: true },
        Kind { opcode: "m16n8k8.row.col.f32.tf32.tf32.f32", k: 8, bits: 32, encode: tf32, float: true },
        Kind { opcode: "m16n8k4.row.col.f32.tf32.tf32.f32", k: 4, bits: 32, encode: tf32, float: true },
        Kind { opcode: "m16n8k16.row.col.s32.s8.s8.s32", k: 16, bits: 8, encode: |x| (x - 2) as u32, float: false },
        Kind { opcode: "m16n8k32.row.col.s32.s8.s8.s32", k: 32, bits: 8, encode: |x| x as u32, float: false },
        Kind { opcode: "m16n8k32.row.col.s32.u8.s8.s32", k: 32, bits: 8, encode: |x| x as u32, float: false },
        Kind { opcode: "m16n8k32.row.col.s32.s4.s4.s32", k: 32, bits: 4, encode: |x| x as u32, float: false },
        Kind { opcode: "m16n8k64.row.col.s32.u4.u4.s32", k: 64, bits: 4, encode: |x| x as u32, float: false },
        Kind { opcode: "m16n8k32.row.col.f32.e4m3.e4m3.f32", k: 32, bits: 8, encode: e4m3, float: true },
    ];
    for (at, kind) in kinds.iter().enumerate() {
        if at != 6 {
            check(kind, 17 + at as u32);
        }
    }
    check(&Kind { encode: |x| x as u32, ..kinds[6] }, 5);
    assert_eq!((f16_to_f32(0x3c00), bf16_to_f32(0x3f80), e4m3_to_f32(0x38)), (1.0, 1.0, 1.0));
}

#[test]
fn integer_products_are_signed_as_said_and_saturate() {
    let all = |opcode: &str, a: &str, c: &str| {
        let body = format!(
            "mov.b32 %r1, {a}; mov.b32 %r2, 0xffffffff; mov.b32 %r3, {c};
             mma.sync.aligned.{opcode} {{%r4, %r5, %r6, %r7}}, {{%r1, %r1, %r1, %r1}}, {{%r2, %r2}}, {{%r3, %r3, %r3, %r3}};
             st.global.u32 [%d2], %r4;"
        );
        run(&body, Run::default()).clean().words()[0]
    };
    // -1 * -1, 255 * -1, -1 * 255, 255 * 255, thirty-two times.
    assert_eq!(all("m16n8k32.row.col.s32.s8.s8.s32", "0xffffffff", "0"), 32);
    assert_eq!(all("m16n8k32.row.col.s32.u8.s8.s32", "0xffffffff", "0") as i32, -32 * 255);
    assert_eq!(all("m16n8k32.row.col.s32.s8.u8.s32", "0xffffffff", "0") as i32, -32 * 255);
    assert_eq!(all("m16n8k32.row.col.s32.u8.u8.s32", "0xffffffff", "0"), 32 * 255 * 255);
    assert_eq!(all("m16n8k64.row.col.s32.s4.s4.s32", "0x77777777", "0") as i32, -64 * 7);
    assert_eq!(all("m16n8k32.row.col.s32.s8.s8.s32", "0xffffffff", "0x7fffffff"), 0x8000_001f);
    assert_eq!(all("m16n8k32.row.col.satfinite.s32.s8.s8.s32", "0xffffffff", "0x7fffffff"), 0x7fff_ffff);
}

#[test]
fn half_accumulators() {
    let body = "mov.b32 %r1, 0x3c003c00; mov.b32 %r2, 0x40004000; mov.b32 %r3, 0x42003c00;
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r4, %r5}, {%r1, %r1, %r1, %r1}, {%r2, %r2}, {%r3, %r3};
        st.global.u32 [%d2], %r5;";
    // 16 * 1 * 2 + 3 and + 1.
    assert_eq!(run(body, Run::default()).clean().words(), [0x5060_5020; 32]);
}
