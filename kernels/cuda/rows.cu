// Rows of tables of any scheme in f32, as TensorView::at has them (models/src/scheme.rs), and rows of floats on their
// way to tiles of f16. Bound by memory.

#include "codes.h"

// Columns 4 * quad .. of a row; those beyond `k` mean nothing. A row that is not there is NaN.
DEVICE void row_quad(float (&v)[4], const WeightRef& w, u32 row, u32 quad) {
    v[0] = v[1] = v[2] = v[3] = __uint_as_float(0x7fc00000);
    if (row >= w.n) return;
    const u32 p = row / 64, r = row % 64, group = quad * 4 / w.group;
    if (w.code >= CODE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (quad * 4 + i < w.k) {
                const size_t at = (size_t)row * w.k + quad * 4 + i;
                v[i] = w.code == CODE_F32   ? float_at<CODE_F32>(w.codes, at)
                       : w.code == CODE_F16 ? float_at<CODE_F16>(w.codes, at)
                                            : float_at<CODE_BF16>(w.codes, at);
            }
        }
    } else if (w.code == CODE_HALVES) {
        const uint2 h = *(const uint2*)((const u8*)w.codes + (size_t)p * 128 * w.k_pad + (size_t)quad * 512 + r * 8);
        v[0] = f16_to_f32((u16)h.x), v[2] = f16_to_f32((u16)(h.x >> 16));
        v[1] = f16_to_f32((u16)h.y), v[3] = f16_to_f32((u16)(h.y >> 16));
    } else {
#define VALUES(CODE)                                                                        \
    if (w.code == CODE) {                                                                   \
        const Grid grid = grid_at<CODE>(w, p, r, group);                                    \
        const u32 codes = codes_at<CODE>(w, p, r, quad);                                    \
        for (int i = 0; i < 4; i++) v[i] = value_of<CODE>(w, grid, codes >> (8 * i) & 255); \
    }
        VALUES(CODE_INT4)
        VALUES(CODE_INT8)
        VALUES(CODE_E2M1)
        VALUES(CODE_E4M3)
    }
}

// to[i][k] = scale * table[tokens[i]][k] (+ positions[places[i]][k], if there are places). Grid: (rows, quads / 128).
KERNEL(128)
embed(const WeightRef table, const WeightRef positions, const u32* tokens, const u32* places, float* to, float scale) {
    const u32 quad = blockIdx.y * 128 + threadIdx.x;
    if (quad * 4 >= table.k) return;
    float v[4];
    row_quad(v, table, tokens[blockIdx.x], quad);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], scale);
    if (places) {
        float p[4];
        row_quad(p, positions, places[blockIdx.x], quad);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] += p[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (quad * 4 + i < table.k) to[(size_t)blockIdx.x * table.k + quad * 4 + i] = v[i];
}

// `rows` rows of k floats of a kind become tiles of f16 (kernels/src/cuda/weight.rs), padded with zeros. `beyond` is
// set if a finite value has no f16. Grid: (quads / 4, panels), threads: 64 rows of 4 quads.
KERNEL(256) pack_halves(DevicePtr from, u32 kind, u32 rows, u32 k, u8* to, u32* beyond) {
    const u32 quad = blockIdx.x * 4 + threadIdx.x / 64, r = threadIdx.x % 64, row = blockIdx.y * 64 + r;
    const u32 k_pad = (k + 63) / 64 * 64;
    u16 h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 column = quad * 4 + i;
        float v = 0.0f;
        if (row < rows && column < k) {
            const size_t at = (size_t)row * k + column;
            v = kind == CODE_F32   ? float_at<CODE_F32>(from, at)
                : kind == CODE_F16 ? float_at<CODE_F16>(from, at)
                                   : float_at<CODE_BF16>(from, at);
        }
        h[i] = f32_to_f16(v);
        if ((h[i] & 0x7fff) == 0x7c00 && fabsf(v) != INFINITY) *beyond = 1;
    }
    if (quad * 4 < k_pad) {
        uint2 out;
        out.x = h[0] | (u32)h[2] << 16;
        out.y = h[1] | (u32)h[3] << 16;
        *(uint2*)(to + (size_t)blockIdx.y * 128 * k_pad + (size_t)quad * 512 + r * 8) = out;
    }
}
