// Linear layers in integers: codes of weights and int8 activations as operands of tensor cores, and blocks of columns
// scaled in f32. Definition: `int8` of kernels/src/reference/linear.rs.
#pragma once
#include "linear.h"

// Lane l, g = l / 4, t = l % 4. A fragment has rows row_of(g, i, 0) and row_of(g, i, 1), as in codes.h, and a block of
// 32 or 16 columns: the lane's are those of quads 2t and 2t + 1 (32) or of quad t (16), four to a register. Which
// columns the instruction takes them for does not matter, as the activations (columns 8t.. or 4t.. of token g) lie alike.

// 1.5 * 2^23 as bits: a sum that begins with it is, read as f32, 1.5 * 2^23 and the sum, exact up to 2^22 (a block's is
// below 255 * 127 * 32 = 1.04e6).
#define SUM_START 0x4b400000
#define SUM_START_F 12582912.0f

// a[16][32] * b[32][8], or [16][16] * [16][8] of which only a[0], a[1] and b0 are looked at.
template <bool PAIR>
DEVICE void mma_block(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (PAIR)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(SUM_START));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(SUM_START));
}

template <int SELECTOR>
DEVICE u32 permute(u32 a, u32 b) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(SELECTOR));
    return r;
}

DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// Zeros of the lane's rows: byte i of a word is fragment i's, of the row g (0) and of g + 8 (1). 4 bits: 128 less the
// zero code; 8 bits: the zero code.
template <int CODE>
DEVICE void same_integer_zeros(u32 (&zeros)[2], const WeightRef& w) {
    const u32 z = w.zero == ZERO_MIN ? 0 : CODE == CODE_INT4 ? 8 : 128;
    zeros[0] = zeros[1] = (CODE == CODE_INT4 ? 128 - z : z) * 0x01010101u;
}

// Those of N fragments from `from` on, out of zero codes.
template <int CODE, int N>
DEVICE void load_integer_zeros(u32 (&zeros)[2], const LinearArgs& a, const u8* stage, int slot, int g, int from) {
    if (CODE == CODE_INT4) {
        const u32 word = *(const u32*)(stage + a.at_zeros + slot * 32 + g * 4) >> (8 * from);
        zeros[0] = 0x80808080u - (word & 0x0f0f0f0fu), zeros[1] = 0x80808080u - (word >> 4 & 0x0f0f0f0fu);
    } else {
        const u32* words = (const u32*)(stage + a.at_zeros + slot * 64 + from * 16 + g * 4);
        const u32 low = words[0], high = N > 2 ? words[8] : 0;
        zeros[0] = permute<0x6420>(low, high), zeros[1] = permute<0x7531>(low, high);
    }
}

// Byte I of a word in all bytes.
template <int I>
DEVICE u32 all_bytes(u32 word) {
    return permute<I * 0x1111>(word, 0);
}

// Registers of the two rows of fragment I and one quad, out of the quad's words (one of 4 bits, two of 8). 4 bits: the
// code less its zero. 8 bits: the code less 128; what is left of the zero is subtracted from the sums.
template <int CODE, int I>
DEVICE void integers(u32& low, u32& high, const u32 (&w)[2], const u32 (&zeros)[2]) {
    if (CODE == CODE_INT4) {
        low = ((w[0] & 0x0f0f0f0fu) + all_bytes<I>(zeros[0])) ^ 0x80808080u;
        high = ((w[0] >> 4 & 0x0f0f0f0fu) + all_bytes<I>(zeros[1])) ^ 0x80808080u;
    } else {
        low = w[0] ^ 0x80808080u;
        high = w[1] ^ 0x80808080u;
    }
}

// The same of e2m1: twice the value, a whole number.
DEVICE void twice_e2m1(u32& low, u32& high, u32 w) {
    // By code, and what they are with a sign: 0 1 2 3 4 6 8 12.
    const u32 plain[2] = {0x03020100u, 0x0c080604u}, minus[2] = {0xfdfeff00u, 0xf4f8fafcu};
    const u32 code = w & 0x77777777u;
    u32 p[2], m[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // Row g, row g + 8, twice.
        p[i] = permute(plain[0], plain[1], code >> (16 * i));
        m[i] = permute(minus[0], minus[1], code >> (16 * i));
    }
    // A byte's sign, eight times.
    const u32 signs[2] = {permute<0xba98>(w << 4, 0), permute<0xba98>(w, 0)};
    low = (permute<0x6420>(p[0], p[1]) & ~signs[0]) | (permute<0x6420>(m[0], m[1]) & signs[0]);
    high = (permute<0x7531>(p[0], p[1]) & ~signs[1]) | (permute<0x7531>(m[0], m[1]) & signs[1]);
}

// Fragments of QUADS quads out of their words, `words[quad][fragment]`.
template <int CODE, int N, int QUADS>
DEVICE void fragments(u32 (&f)[N][4], const u32 (&words)[QUADS][N][2], const u32 (&zeros)[2], bool mini) {
#pragma unroll
    for (int i = 0; i < N; i++) f[i][2] = f[i][3] = 0;
    if (CODE == CODE_INT4 && mini) {
#pragma unroll
        for (int k = 0; k < QUADS; k++)
#pragma unroll
            for (int i = 0; i < N; i++) twice_e2m1(f[i][2 * k], f[i][2 * k + 1], words[k][i][0]);
        return;
    }
    each<N>([&](auto i) {
        const int I = decltype(i)::VALUE;
#pragma unroll
        for (int k = 0; k < QUADS; k++) integers<CODE, I>(f[I][2 * k], f[I][2 * k + 1], words[k][I], zeros);
    });
}

// Adds a block: part += scale * (sum + rest * sum of activations) for two rows and two tokens, of which `levels` has
// scale, sum, scale, sum; `SHIFTED`: whether there is a rest, which is 128 less the zero code of 8 bits.
template <bool FIRST, bool SHIFTED, int I>
DEVICE void add_block(float (&part)[4], const int (&d)[4], const uint4& levels, const u32 (&zeros)[2]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float t = __fsub_rn(__int_as_float(d[e]), SUM_START_F);
        const float scale = __uint_as_float(e % 2 ? levels.z : levels.x);
        const float sum = __uint_as_float(e % 2 ? levels.w : levels.y);
        if (SHIFTED) {
            // 2^23 + z as f32, and 2^23 + 128 less that.
            const float z = __uint_as_float(permute<0x7440 + I>(zeros[e / 2], 0x4b000000u));
            t = __fmaf_rn(__fsub_rn(8388736.0f, z), sum, t);
        }
        part[e] = FIRST ? __fmul_rn(t, scale) : __fmaf_rn(t, scale, part[e]);
    }
}

// Adds a block's scale times sum of activations to that of its fold, for minima.
template <bool FIRST>
DEVICE void add_sum(float& to, float scale, float sum) {
    to = FIRST ? __fmul_rn(scale, sum) : __fmaf_rn(scale, sum, to);
}
