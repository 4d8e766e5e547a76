// Linear layers on tensor cores, any scheme: y[token][n] = sum over k of w[n][k] * x[token][k], for a few to some tens
// of tokens. The order of additions is that of kernels/src/cuda/linear.rs, whatever the number of tokens.
//
// A block has a panel of 64 rows and up to TOKENS tokens. Its 8 warps (times `splits` blocks) cut the panel's columns
// into slices of whole folds, one per warp: every warp has its own pipeline of cp.async and never waits for another
// until its sums are complete. Weights are the A operand (16 rows an instruction), tokens the B operand (8), so the
// time is that of the weights' bytes for up to 8 tokens.
//
// Bound by: memory (weights once per TOKENS tokens). In flight: 32 columns of 64 rows of codes in each stage but one
// of 8 warps.
//
// Divisibility: k_pad of 16, fold of 16; kernels `_32_` take folds of 32 and then read two quads of 4 columns of an
// activation at once. Shared memory: a stage holds codes [quad of 4 columns][64 rows] (with the 16-byte pieces of a
// quad exchanged so that no two lanes of a quarter of a warp meet in a bank), activations [TOKENS][32], scales [64],
// zeros or minima [64], the upper level of nested scales, sums of 16 activations [TOKENS][2]; kernels `_16_` keep
// activations as [2][TOKENS][16].

#include "linear.h"

// Stages of a warp's pipeline: what 99 KiB of shared memory take of the largest of each kind (linear.rs, `stages`).
DEVICE constexpr int stages_of(int code, int tokens, bool pair) {
    const bool four = code == CODE_INT4 || code == CODE_E2M1;
    if (tokens == 8) return four ? 4 : code == CODE_HALVES ? 2 : 3;
    return four && pair ? 3 : 2;
}

// Copies the 32 columns from `at` on, of which those before `end` count, and moves on.
template <int CODE, int TOKENS, bool PAIR>
DEVICE void copy_stage(const LinearArgs& a, const WeightRef& w, u8* stage, u32 panel, Place& at, u32 end, u32 token,
                       int lane) {
    const int PIECES = Quad<CODE>::PIECES;
    const u8* codes = (const u8*)w.codes + ((size_t)panel * w.k_pad + at.column) * (PIECES * 4);
    const u32 quads = (end - at.column) / 4, column = at.column;
#pragma unroll
    for (int i = 0; i < PIECES * 8 / 32; i++) {
        const u32 piece = i * 32 + lane, quad = piece / PIECES, place = piece ^ exchange<PAIR>(quad);
        const bool there = PAIR || quad < quads;
        copy_async_16(stage + place * 16, there ? codes + piece * 16 : codes, there);
    }
    const u8* h = (const u8*)a.h + ((size_t)token * a.stride + column) * 2;
#pragma unroll
    for (int i = 0; i < TOKENS * 4 / 32; i++) {
        const u32 piece = i * 32 + lane, row = piece / 4, part = piece % 4;
        const bool there = token + row < a.m && (PAIR || part * 2 < quads);
        const u32 place = PAIR ? piece * 16 : part / 2 * TOKENS * 32 + row * 32 + part % 2 * 16;
        copy_async_16(stage + a.at_h + place, there ? h + (size_t)row * a.stride * 2 + part * 16 : h, there);
    }
    if (CODE == CODE_HALVES) {
        at.column += 32;
        return;
    }
    copy_grid<CODE>(a, w, stage, 0, panel, at, PAIR ? 32 : 16, lane);
    advance(at, w, PAIR ? 32 : 16);
    if (!PAIR) {
        if (at.column < end) copy_grid<CODE>(a, w, stage, 1, panel, at, 16, lane);
        advance(at, w, 16);
    }
    if (w.zero == ZERO_MIN) {
        // Two sums of 16 columns of each token; what follows the end is not looked at.
        const int SUMS = PAIR ? 1 : 2;
#pragma unroll
        for (int i = 0; i < (TOKENS * SUMS + 31) / 32; i++) {
            const u32 sum = i * 32 + lane, row = sum / SUMS, part = sum % SUMS;
            if (row < TOKENS) {
                const bool there = token + row < a.m && (PAIR || part * 4 < quads);
                const float* sums = (const float*)a.sums + (size_t)token * (a.stride / 16) + column / 16;
                copy_async<8 / SUMS>(stage + a.at_sums + row * 8 + part * 4,
                                     there ? sums + (size_t)row * (a.stride / 16) + part : sums, there);
            }
        }
    }
}

// ---- sums

// total = fma(scale, part, total), and with minima total = fma(min, sum of h, total); then part and sums are zero.
template <int CODE, int N8>
DEVICE void fold(float (&total)[4][N8][4], float (&part)[4][N8][4], float (&sum)[N8][2], const LinearArgs& a,
                 const WeightRef& w, const u8* stage, int slot, int g) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float scale[4], min[4];
        grid_four<CODE>(scale, a, w, stage, slot, 0, half, g);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    total[i][j][half * 2 + e] = fmaf(scale[i], part[i][j][half * 2 + e], total[i][j][half * 2 + e]);
                    part[i][j][half * 2 + e] = 0.0f;
                }
        if (w.zero == ZERO_MIN) {
            grid_four<CODE>(min, a, w, stage, slot, 1, half, g);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < N8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        total[i][j][half * 2 + e] = fmaf(min[i], sum[j][e], total[i][j][half * 2 + e]);
        }
    }
#pragma unroll
    for (int j = 0; j < N8; j++) sum[j][0] = sum[j][1] = 0.0f;
}

template <int CODE, int TOKENS, bool PAIR>
DEVICE void narrow(const LinearArgs& a) {
    const int N8 = TOKENS / 8;
    constexpr int STAGES = stages_of(CODE, TOKENS, PAIR);
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 token = blockIdx.x * TOKENS;
    u32 panel = blockIdx.y, first;
    const WeightRef w = pick(a, panel, first);
    const Slice slice = slice_of(w, a.splits * SLICES, blockIdx.z * SLICES + warp);
    u8* stages = (u8*)shared + warp * STAGES * a.stage;

    float total[4][N8][4] = {}, part[4][N8][4] = {}, sum[N8][2] = {};
    u32 zero[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            zero[i][half] = zero_word<CODE>(w.zero == ZERO_MIN ? 0 : CODE == CODE_INT4 ? 8 : 128, half);

    Place next = place_at(w, slice.start);
    u32 in_fold = next.in_fold;
    const int steps = (slice.end - slice.start + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy_stage<CODE, TOKENS, PAIR>(a, w, stages + s * a.stage, panel, next, slice.end, token, lane);
        copy_commit();
    }
    u32 used = 0, filled = STAGES - 1;
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        if (step + STAGES - 1 < steps) {
            copy_stage<CODE, TOKENS, PAIR>(a, w, stages + filled * a.stage, panel, next, slice.end, token, lane);
            filled = filled == STAGES - 1 ? 0 : filled + 1;
        }
        copy_commit();
        const u8* stage = stages + used * a.stage;
        used = used == STAGES - 1 ? 0 : used + 1;
        const uint4* codes = (const uint4*)stage;
        const u8* h = stage + a.at_h;
        uint4 b[N8];
        if (PAIR) {
#pragma unroll
            for (int j = 0; j < N8; j++) b[j] = *(const uint4*)(h + (j * 8 + g) * 64 + t * 16);
        }
#pragma unroll (PAIR ? 2 : 1)
        for (int half = 0; half < 2; half++) {
            if (!PAIR && slice.start + step * STAGE_COLUMNS + half * 16 >= slice.end) break;
            const int quad = PAIR ? 2 * t + half : 4 * half + t, slot = PAIR ? 0 : half;
            if (CODE <= CODE_INT8 && w.zero == ZERO_CODE && (!PAIR || half == 0) && in_fold == 0)
                load_zeros<CODE>(zero, a, stage, slot, g);
            u32 b0[N8], b1[N8];
#pragma unroll
            for (int j = 0; j < N8; j++) {
                if (PAIR) {
                    b0[j] = half ? b[j].z : b[j].x, b1[j] = half ? b[j].w : b[j].y;
                } else {
                    uint2 v = *(const uint2*)(h + half * TOKENS * 32 + (j * 8 + g) * 32 + t * 8);
                    b0[j] = v.x, b1[j] = v.y;
                }
            }
            uint4 piece[Quad<CODE>::LANE];
#pragma unroll
            for (int i = 0; i < Quad<CODE>::LANE; i++)
                piece[i] = codes[quad * Quad<CODE>::PIECES + ((g ^ exchange<PAIR>(quad)) + 8 * i)];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 f[4], words[4];
                words_of<CODE>(words, piece, i);
                fragment<CODE>(f, words, zero[i]);
#pragma unroll
                for (int j = 0; j < N8; j++)
                    mma_f16(CODE == CODE_HALVES ? total[i][j] : part[i][j], f[0], f[1], f[2], f[3], b0[j], b1[j]);
            }
            if (CODE <= CODE_INT8 && w.zero == ZERO_MIN) {
                const float* sums = (const float*)(stage + a.at_sums) + half;
#pragma unroll
                for (int j = 0; j < N8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) sum[j][e] += sums[(j * 8 + 2 * t + e) * 2];
            }
            in_fold += 16;
            if (CODE != CODE_HALVES && (!PAIR || half == 1) && in_fold == w.fold) {
                fold<CODE, N8>(total, part, sum, a, w, stage, slot, g);
                in_fold = 0;
            }
        }
    }

    // Slices in order. The stages are done with.
    copy_wait<0>();
    __syncthreads();
    float* sums = (float*)shared;  // [SLICES][TOKENS][64]
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[(warp * TOKENS + j * 8 + 2 * t + e % 2) * 64 + row_of<CODE>(g, i, e / 2)] = total[i][j][e];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TOKENS * 64 / (SLICES * 32); i++) {
        const u32 at = i * SLICES * 32 + threadIdx.x, row = panel * 64 + at % 64, token_of = token + at / 64;
        float y = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) y += sums[s * TOKENS * 64 + at];
        if (token_of < a.m && row < w.n) {
            if (a.splits == 1) put(a, token_of, first + row, y);
            else ((float*)a.partial)[((size_t)blockIdx.z * a.m + token_of) * a.columns + first + row] = y;
        }
    }
}

#define NARROW(name, code, fold)                                                                                 \
    KERNEL(256) name##_##fold##_8(const LinearArgs a) { narrow<code, 8, fold == 32>(a); }                        \
    KERNEL(256) name##_##fold##_32(const LinearArgs a) { narrow<code, 32, fold == 32>(a); }

NARROW(int4, CODE_INT4, 16)
NARROW(int4, CODE_INT4, 32)
NARROW(int8, CODE_INT8, 16)
NARROW(int8, CODE_INT8, 32)
NARROW(e2m1, CODE_E2M1, 16)
NARROW(e2m1, CODE_E2M1, 32)
NARROW(e4m3, CODE_E4M3, 16)
NARROW(e4m3, CODE_E4M3, 32)
NARROW(halves, CODE_HALVES, 32)

// Sums of the blocks that shared a panel's columns, in order. A thread per output column, a block row per token.
KERNEL(256) reduce(const LinearArgs a) {
    const u32 column = blockIdx.x * 256 + threadIdx.x, token = blockIdx.y;
    if (column >= a.columns) return;
    const float* from = (const float*)a.partial + (size_t)token * a.columns + column;
    float y = from[0];
    for (u32 s = 1; s < a.splits; s++) y += from[(size_t)s * a.m * a.columns];
    put(a, token, column, y);
}
