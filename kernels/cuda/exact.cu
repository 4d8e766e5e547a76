// Linear layers in f32, any scheme: y[token][n] = sum over k of w[n][k] * x[token][k]. Weights are dequantized as
// TensorView::at does (models/src/scheme.rs), products are added by fma. The order depends on the weight's shape only.
// For parity with references, not for speed: bound by conversions, reads weights once per 8 tokens.
//
// Codes: a block has a panel of 64 rows and 8 tokens; thread (row, part) takes every fourth quad of columns, and the
// four sums are added in order. Rows of floats: a warp has a row, a lane every 32nd column; then the sum of a warp.

#include "codes.h"
#include "pick.h"

DEVICE void put(const LinearArgs& a, u32 token, u32 column, float y) {
    if (a.bias) y += ((const float*)a.bias)[a.offset + column];
    float* to = (float*)a.to + (size_t)token * a.to_stride + a.offset + column;
    *to = a.add ? *to + y : y;
}

template <int CODE>
DEVICE void tiles(const LinearArgs& a) {
    __shared__ float sums[4][EXACT_TOKENS][64];
    const u32 r = threadIdx.x % 64, part = threadIdx.x / 64;
    const Part of = part_of(a, EXACT_TOKENS);
    const u32 token = of.token, end = of.end;
    if (token >= end) return;
    u32 panel = blockIdx.y, first;
    const WeightRef w = pick(a, of.expert, panel, first);
    float y[EXACT_TOKENS] = {};
    u32 group = ~0u;
    Grid grid;
    for (u32 quad = part; quad < w.k_pad / 4; quad += 4) {
        if (quad * 4 / w.group != group) {
            group = quad * 4 / w.group;
            grid = grid_at<CODE>(w, panel, r, group);
        }
        const u32 codes = codes_at<CODE>(w, panel, r, quad);
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = value_of<CODE>(w, grid, codes >> (8 * i) & 255);
#pragma unroll
        for (int i = 0; i < EXACT_TOKENS; i++) {
            if (token + i < end) {
                const float4 x = *(const float4*)((const float*)a.x + (size_t)(token + i) * a.stride + quad * 4);
                y[i] = fmaf(v[3], x.w, fmaf(v[2], x.z, fmaf(v[1], x.y, fmaf(v[0], x.x, y[i]))));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EXACT_TOKENS; i++) sums[part][i][r] = y[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EXACT_TOKENS / 4; i++) {
        const u32 t = i * 4 + part, row = panel * 64 + r;
        if (token + t < end && row < w.n)
            put(a, token + t, first + row, ((sums[0][t][r] + sums[1][t][r]) + sums[2][t][r]) + sums[3][t][r]);
    }
}

template <int CODE>
DEVICE void floats(const LinearArgs& a) {
    const u32 lane = threadIdx.x % 32;
    const Part of = part_of(a, EXACT_TOKENS);
    const u32 token = of.token, end = of.end;
    if (token >= end) return;
    u32 block = blockIdx.y, first;
    const WeightRef w = pick(a, of.expert, block, first);
    const u32 row = block * 8 + threadIdx.x / 32;
    if (row >= w.n) return;
    float y[EXACT_TOKENS] = {};
    for (u32 k = lane; k < w.k; k += 32) {
        const float v = float_at<CODE>(w.codes, (size_t)row * w.k + k);
#pragma unroll
        for (int i = 0; i < EXACT_TOKENS; i++)
            if (token + i < end) y[i] = fmaf(v, ((const float*)a.x)[(size_t)(token + i) * a.stride + k], y[i]);
    }
#pragma unroll
    for (int i = 0; i < EXACT_TOKENS; i++) {
        const float sum = warp_sum(y[i]);
        if (lane == 0 && token + i < end) put(a, token + i, first + row, sum);
    }
}

KERNEL(256) exact_int4(const LinearArgs a) { tiles<CODE_INT4>(a); }
KERNEL(256) exact_int8(const LinearArgs a) { tiles<CODE_INT8>(a); }
KERNEL(256) exact_e2m1(const LinearArgs a) { tiles<CODE_E2M1>(a); }
KERNEL(256) exact_e4m3(const LinearArgs a) { tiles<CODE_E4M3>(a); }
KERNEL(256) exact_f32(const LinearArgs a) { floats<CODE_F32>(a); }
KERNEL(256) exact_f16(const LinearArgs a) { floats<CODE_F16>(a); }
KERNEL(256) exact_bf16(const LinearArgs a) { floats<CODE_BF16>(a); }
