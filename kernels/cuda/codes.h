// Codes, scales and zeros of weights in P64 tiles (models/FORMAT.md, "Layouts"): one at a time, in f32, exactly as
// TensorView::at of models/src/scheme.rs defines them; and four at a time as operands of tensor cores.
#pragma once
#include "layout.h"

// ---- one at a time

// Element `i` of a plane of scales or minima of a type that is not nested.
DEVICE float scale_at(DevicePtr plane, u32 kind, size_t i) {
    if (kind == SCALE_F32) return ((const float*)plane)[i];
    u16 bits = ((const u16*)plane)[i];
    return kind == SCALE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Scale (level 0) or minimum (level 1) of row `r` of panel `p` and a group, from its plane.
DEVICE float level_at(const WeightRef& w, DevicePtr plane, int level, u32 p, u32 r, u32 group) {
    size_t cell = ((size_t)p * w.groups + group) * 64 + r;
    if (w.scale != SCALE_NESTED) return scale_at(plane, w.scale, cell);
    u32 levels = w.zero == ZERO_MIN ? 2 : 1;
    size_t super = (((size_t)p * w.row_supers + group * w.group / SUPER_COLUMNS) * levels + level) * 64 + r;
    return __fmul_rn(f16_to_f32(((const u16*)w.supers)[super]), (float)((const i8*)plane)[cell]);
}

// Zero code of row `r` of panel `p` and a group, or the code that stands for zero.
template <int CODE>
DEVICE float zero_at(const WeightRef& w, u32 p, u32 r, u32 group) {
    if (w.zero == ZERO_MIN) return 0.0f;
    if (w.zero == ZERO_MID) return CODE == CODE_INT4 ? 8.0f : 128.0f;
    size_t cell = (size_t)p * w.groups + group;
    const u8* zeros = (const u8*)w.zeros;
    if (CODE == CODE_INT8) return (float)zeros[cell * 64 + r];
    return (float)(zeros[cell * 32 + r / 16 * 8 + r % 8] >> (r % 16 / 8 * 4) & 15);
}

// f16 of a small float, as bits.
DEVICE float e2m1(u32 code) {
    return f16_to_f32((u16)((code & 7) << 9 | (code & 8) << 12)) * 16384.0f;
}
DEVICE float e4m3(u32 code) {
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
    return f16_to_f32((u16)((code & 0x7f) << 7 | (code & 0x80) << 8)) * 256.0f;
}

// What stays the same over a group of a row.
struct Grid {
    float scale, zero, min;
};

template <int CODE>
DEVICE Grid grid_at(const WeightRef& w, u32 p, u32 r, u32 group) {
    Grid grid;
    grid.scale = level_at(w, w.scales, 0, p, r, group);
    grid.zero = CODE <= CODE_INT8 ? zero_at<CODE>(w, p, r, group) : 0.0f;
    grid.min = w.zero == ZERO_MIN ? level_at(w, w.zeros, 1, p, r, group) : 0.0f;
    return grid;
}

// Codes of columns 4 * quad .. of row `r` of panel `p`, one a byte.
template <int CODE>
DEVICE u32 codes_at(const WeightRef& w, u32 p, u32 r, u32 quad) {
    const u8* codes = (const u8*)w.codes;
    if (CODE == CODE_INT8 || CODE == CODE_E4M3)
        return *(const u32*)(codes + (size_t)p * 64 * w.k_pad + (size_t)quad * 256 + r * 4);
    u32 word = *(const u32*)(codes + (size_t)p * 32 * w.k_pad + (size_t)quad * 128 + r / 16 * 32 + r % 8 * 4);
    return word >> (r % 16 / 8 * 4) & 0x0f0f0f0f;
}

// Value of a code in f32 arithmetic.
template <int CODE>
DEVICE float value_of(const WeightRef& w, const Grid& grid, u32 code) {
    if (CODE == CODE_E2M1) return __fmul_rn(grid.scale, e2m1(code));
    if (CODE == CODE_E4M3) return __fmul_rn(grid.scale, e4m3(code));
    // Two rounded operations with a minimum, never one fma.
    if (w.zero == ZERO_MIN) return __fadd_rn(__fmul_rn(grid.scale, (float)code), grid.min);
    return __fmul_rn(grid.scale, (float)code - grid.zero);
}

// Element `i` of rows of floats.
template <int CODE>
DEVICE float float_at(DevicePtr rows, size_t i) {
    if (CODE == CODE_F32) return ((const float*)rows)[i];
    u16 bits = ((const u16*)rows)[i];
    return CODE == CODE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// ---- as operands of tensor cores
//
// A fragment of mma_f16 holds 16 rows of a panel and 16 columns. Lane l, g = l / 4, t = l % 4. The lane's columns are
// those of one quad per 16 columns: mma-k (2t, 2t+1) are its columns 0 and 2, (2t+8, 2t+9) its columns 1 and 3. The
// activations lie in that order (acts.rs). Fragment i of the panel's four: half 0 is the row that the instruction
// calls g, half 1 the one it calls g + 8:

// Row of the panel.
template <int CODE>
DEVICE int row_of(int g, int i, int half) {
    if (CODE == CODE_INT4 || CODE == CODE_E2M1) return g / 2 * 16 + g % 2 * 4 + i + half * 8;
    if (CODE == CODE_HALVES) return (i / 2 * 2 + half) * 16 + 2 * g + i % 2;
    return i / 2 * 32 + 4 * g + i % 2 * 2 + half;
}

// 16-byte pieces of a quad of 64 rows, and how many of them a lane takes: piece g, g + 8, ...
template <int CODE>
struct Quad {
    static const int PIECES = CODE == CODE_INT4 || CODE == CODE_E2M1 ? 8 : CODE == CODE_HALVES ? 32 : 16;
    static const int LANE = PIECES / 8;
};

DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// What is subtracted from codes of one row to make them numbers, twice in a word. 4 bits: of nibbles at bit 0 of
// 0x6400 (1024 + q) it is 1024 + z, of nibbles at bit 4 (1024 + 16 q, times 1/16) it is 64 + z. 8 bits: 1024 + z.
// Everything here is a whole number below 2048, so that f16 holds it exactly.
template <int CODE>
DEVICE u32 zero_word(u32 z, int half) {
    if (CODE == CODE_INT4 && half == 1) return (0xd400u + z * 16) * 0x10001u;  // -(64 + z): 64 is 0x5400, a unit 16
    return (0x6400u + z) * 0x10001u;                                           // 1024 + z: a unit is 1
}

// Words that fragment i takes of the lane's pieces of a quad: one of 4 bits, two of 8, four of halves.
template <int CODE>
DEVICE void words_of(u32 (&w)[4], const uint4 (&piece)[Quad<CODE>::LANE], int i) {
    const u32* all = (const u32*)&piece[0];
    if (Quad<CODE>::LANE == 1) {
        w[0] = all[i];
    } else if (Quad<CODE>::LANE == 2) {
        w[0] = all[2 * i], w[1] = all[2 * i + 1];
    } else {
        const int at = i / 2 * 8 + i % 2 * 2;
        w[0] = all[at], w[1] = all[at + 4], w[2] = all[at + 1], w[3] = all[at + 5];
    }
}

// The four registers of a fragment out of its words; `zero` is what its two rows subtract.
template <int CODE>
DEVICE void fragment(u32 (&a)[4], const u32 (&w)[4], const u32 (&zero)[2]) {
    if (CODE == CODE_INT4) {
        const u32 v = w[0] >> 8;
        a[0] = sub_f16x2(and_or(w[0], 0x000f000fu, 0x64006400u), zero[0]);
        a[1] = fma_f16x2(and_or(w[0], 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero[1]);
        a[2] = sub_f16x2(and_or(v, 0x000f000fu, 0x64006400u), zero[0]);
        a[3] = fma_f16x2(and_or(v, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero[1]);
    } else if (CODE == CODE_E2M1) {
        // Sign to bit 15, the rest to bits 9..11: a value times 2^-14.
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 x = w[0] >> (4 * j);
            a[j] = mul_f16x2(and_or(x << 9, 0x0e000e00u, x << 12 & 0x80008000u), 0x74007400u);
        }
    } else if (CODE == CODE_INT8) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[j] = sub_f16x2(__byte_perm(w[j % 2], 0x64646464u, j < 2 ? 0x4240 : 0x4341), zero[j % 2]);
    } else if (CODE == CODE_E4M3) {
        // Sign to bit 15, the rest to bits 7..13: a value times 2^-8.
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 x = __byte_perm(w[j % 2], 0, j < 2 ? 0x4240 : 0x4341);
            a[j] = mul_f16x2(and_or(x << 7, 0x3f803f80u, x << 8 & 0x80008000u), 0x5c005c00u);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = w[j];
    }
}
