// Linear layers on tensor cores, any scheme, for many tokens: y[token][n] = sum over k of w[n][k] * x[token][k], bit for
// bit what linear.cu computes.
//
// A block has two panels of 64 rows, 64 tokens and one split of the columns; a warp has half of the fragments of a
// panel: 32 rows x 64 tokens, so that a fragment of weights is made of its codes once for 8 instructions and a fragment
// of activations is read once for 2. What linear.cu gives to eight warps, the slices, are gone through one after the
// other: at the end of each its sums are added to those before it, which wait in shared memory.
//
// Bound by: tensor cores (from about 64 tokens). Codes, activations and scales come by cp.async, in 3 stages of 32
// columns. Shared memory: sums f32 [16][128 threads][4]; with minima sums of a fold's activations f32 [64]; then the
// stages, as in linear.cu with two panels. Divisibility: as in linear.cu.

#include "linear.h"

static const int TOKENS = WIDE_TOKENS, N8 = TOKENS / 8, THREADS = 128, STAGES = 3;

// Copies the 32 columns from `at` on, of which those before `end` count, and moves on. `panels` is 2, or 1 at the end of
// an odd weight: then that panel comes twice.
template <int CODE, bool PAIR>
DEVICE void copy_stage(const LinearArgs& a, const WeightRef& w, u8* stage, u32 panel, u32 panels, Place& at, u32 end,
                       u32 token) {
    const int PIECES = Quad<CODE>::PIECES, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 quads = (end - at.column) / 4, column = at.column;
#pragma unroll
    for (int i = 0; i < 2 * PIECES * 8 / THREADS; i++) {
        const u32 all = i * THREADS + threadIdx.x, which = all / (PIECES * 8), piece = all % (PIECES * 8);
        const u32 quad = piece / PIECES, place = piece ^ exchange<PAIR>(quad);
        const bool there = PAIR || quad < quads;
        const u32 from = panel + min(which, panels - 1);
        const u8* codes = (const u8*)w.codes + ((size_t)from * w.k_pad + column) * (PIECES * 4) + piece * 16;
        copy_async_16(stage + (which * PIECES * 8 + place) * 16, there ? codes : (const u8*)w.codes, there);
    }
    const u8* h = (const u8*)a.h + ((size_t)token * a.stride + column) * 2;
#pragma unroll
    for (int i = 0; i < TOKENS * 4 / THREADS; i++) {
        const u32 piece = i * THREADS + threadIdx.x, row = piece / 4, part = piece % 4;
        const bool there = token + row < a.m && (PAIR || part * 2 < quads);
        const u32 place = PAIR ? piece * 16 : part / 2 * TOKENS * 32 + row * 32 + part % 2 * 16;
        copy_async_16(stage + a.at_h + place, there ? h + (size_t)row * a.stride * 2 + part * 16 : h, there);
    }
    if (CODE == CODE_HALVES) {
        at.column += 32;
        return;
    }
    const u32 mine = warp / 2, slots = PAIR ? 1 : 2;
    const u32 from = panel + min(mine, panels - 1);
    const bool copies = warp % 2 == 0;
    if (copies) copy_grid<CODE>(a, w, stage, mine * slots, from, at, PAIR ? 32 : 16, lane);
    advance(at, w, PAIR ? 32 : 16);
    if (!PAIR) {
        if (copies && at.column < end) copy_grid<CODE>(a, w, stage, mine * slots + 1, from, at, 16, lane);
        advance(at, w, 16);
    }
    if (w.zero == ZERO_MIN) {
        // Two sums of 16 columns of each token; what follows the end is not looked at.
        const u32 row = threadIdx.x / 2, part = threadIdx.x % 2;
        const bool there = token + row < a.m && (PAIR || part * 4 < quads);
        const float* sums = (const float*)a.sums + (size_t)token * (a.stride / 16) + column / 16;
        copy_async<4>(stage + a.at_sums + row * 8 + part * 4,
                      there ? sums + (size_t)row * (a.stride / 16) + part : sums, there);
    }
}

// The words of the warp's two fragments of a panel: of every piece the first half or the second, of halves two pieces.
template <int CODE>
DEVICE void read_words(u32 (&words)[2][4], const uint4* codes, int quad, int place, int side) {
    const int PIECES = Quad<CODE>::PIECES;
    if constexpr (CODE == CODE_HALVES) {
        const uint4 low = codes[quad * PIECES + place + 16 * side], high = codes[quad * PIECES + place + 16 * side + 8];
        words[0][0] = low.x, words[0][1] = high.x, words[0][2] = low.y, words[0][3] = high.y;
        words[1][0] = low.z, words[1][1] = high.z, words[1][2] = low.w, words[1][3] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < Quad<CODE>::LANE; i++) {
            const uint4 v = codes[quad * PIECES + place + 8 * i];
            words[0][i] = side ? v.z : v.x;
            words[1][i] = side ? v.w : v.y;
        }
    }
}

// total = fma(scale, part, total), and with minima total = fma(min, sum of h, total).
template <int CODE>
DEVICE void fold(float (&total)[2][N8][4], const float (&part)[2][N8][4], const float* sums, const LinearArgs& a,
                 const WeightRef& w, const u8* stage, int slot, int g, int t, int side) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float all[4];
        grid_four<CODE>(all, a, w, stage, slot, 0, half, g);
        const float scale[2] = {side ? all[2] : all[0], side ? all[3] : all[1]};
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    total[i][j][half * 2 + e] = fmaf(scale[i], part[i][j][half * 2 + e], total[i][j][half * 2 + e]);
        if (w.zero == ZERO_MIN) {
            grid_four<CODE>(all, a, w, stage, slot, 1, half, g);
            const float min[2] = {side ? all[2] : all[0], side ? all[3] : all[1]};
#pragma unroll
            for (int j = 0; j < N8; j++) {
                const float2 sum = *(const float2*)(sums + j * 8 + 2 * t);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    total[i][j][half * 2] = fmaf(min[i], sum.x, total[i][j][half * 2]);
                    total[i][j][half * 2 + 1] = fmaf(min[i], sum.y, total[i][j][half * 2 + 1]);
                }
            }
        }
    }
}

template <int CODE, bool PAIR>
DEVICE void wide(const LinearArgs& a) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, side = warp % 2;
    const u32 token = blockIdx.x * TOKENS;
    u32 panel = blockIdx.y, first;
    const WeightRef w = pick(a, panel, first);
    panel *= 2;
    const u32 panels = min(2u, (w.n + 63) / 64 - panel);
    const u32 slices = a.splits * SLICES;
    u32 slice = blockIdx.z * SLICES;
    const u32 start = slice_of(w, slices, slice).start, end = slice_of(w, slices, slice + SLICES - 1).end;
    u32 slice_end = slice_of(w, slices, slice).end;
    while (slice_end == start && slice_end < end) slice_end = slice_of(w, slices, ++slice).end;

    float4* kept = (float4*)shared + threadIdx.x;               // [16][THREADS]
    float* sums = (float*)((float4*)shared + 16 * THREADS);     // [TOKENS], of the activations of a fold
    u8* stages = (u8*)(sums + TOKENS);
#pragma unroll
    for (int i = 0; i < 16; i++) kept[i * THREADS] = make_float4(0, 0, 0, 0);

    float total[2][N8][4] = {}, part[2][N8][4] = {};
    u32 zero[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            zero[i][half] = zero_word<CODE>(w.zero == ZERO_MIN ? 0 : CODE == CODE_INT4 ? 8 : 128, half);

    Place next = place_at(w, start);
    u32 in_fold = 0, used = 0, filled = STAGES - 1;
    const int steps = (end - start + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy_stage<CODE, PAIR>(a, w, stages + s * a.stage, panel, panels, next, end, token);
        copy_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            copy_stage<CODE, PAIR>(a, w, stages + filled * a.stage, panel, panels, next, end, token);
            filled = filled == STAGES - 1 ? 0 : filled + 1;
        }
        copy_commit();
        const u8* stage = stages + used * a.stage;
        used = used == STAGES - 1 ? 0 : used + 1;
        const uint4* codes = (const uint4*)stage + warp / 2 * Quad<CODE>::PIECES * 8;
        const u8* h = stage + a.at_h;
        const u32 column = start + step * STAGE_COLUMNS;
        const int grid = warp / 2 * (PAIR ? 1 : 2);

        // Two times 16 columns at once if they are in one fold, else one after the other.
#pragma unroll 1
        for (int half = 0; half < (PAIR ? 1 : 2); half++) {
            const u32 at = column + half * 16;
            if (!PAIR && at >= end) break;
            const int slot = grid + half;
            if (CODE <= CODE_INT8 && w.zero == ZERO_CODE && in_fold == 0) {
                u32 all[4][2];
                load_zeros<CODE>(all, a, stage, slot, g);
#pragma unroll
                for (int i = 0; i < 4; i++) zero[i / 2][i % 2] = side ? all[2 + i / 2][i % 2] : all[i / 2][i % 2];
            }
            const int HALVES = PAIR ? 2 : 1;
            u32 f[HALVES][2][4];
#pragma unroll
            for (int k = 0; k < HALVES; k++) {
                const int quad = PAIR ? 2 * t + k : 4 * half + t;
                u32 words[2][4];
                read_words<CODE>(words, codes, quad, g ^ exchange<PAIR>(quad), side);
#pragma unroll
                for (int i = 0; i < 2; i++) fragment<CODE>(f[k][i], words[i], zero[i]);
            }
#pragma unroll
            for (int j = 0; j < N8; j++) {
                u32 b[HALVES][2];
                if (PAIR) {
                    const uint4 v = *(const uint4*)(h + (j * 8 + g) * 64 + t * 16);
                    b[0][0] = v.x, b[0][1] = v.y, b[HALVES - 1][0] = v.z, b[HALVES - 1][1] = v.w;
                } else {
                    const uint2 v = *(const uint2*)(h + half * TOKENS * 32 + (j * 8 + g) * 32 + t * 8);
                    b[0][0] = v.x, b[0][1] = v.y;
                }
#pragma unroll
                for (int k = 0; k < HALVES; k++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        mma_f16(CODE == CODE_HALVES ? total[i][j] : part[i][j], f[k][i][0], f[k][i][1], f[k][i][2],
                                f[k][i][3], b[k][0], b[k][1]);
            }
            if (CODE <= CODE_INT8 && w.zero == ZERO_MIN) {
                if (!PAIR) __syncthreads();
                if (threadIdx.x < TOKENS) {
                    const float2 two = *(const float2*)(stage + a.at_sums + threadIdx.x * 8);
                    float sum = in_fold == 0 ? 0.0f : sums[threadIdx.x];
                    sum += half == 0 ? two.x : two.y;
                    if (PAIR) sum += two.y;
                    sums[threadIdx.x] = sum;
                }
                __syncthreads();
            }
            in_fold += HALVES * 16;
            if (CODE != CODE_HALVES && in_fold == w.fold) {
                fold<CODE>(total, part, sums, a, w, stage, slot, g, t, side);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < N8; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) part[i][j][e] = 0.0f;
                in_fold = 0;
            }
            if (at + HALVES * 16 == slice_end) {
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < N8; j++) {
                        float4 v = kept[(i * N8 + j) * THREADS];
                        float(&s)[4] = total[i][j];
                        v.x += s[0], v.y += s[1], v.z += s[2], v.w += s[3];
                        kept[(i * N8 + j) * THREADS] = v;
                        s[0] = s[1] = s[2] = s[3] = 0.0f;
                    }
                // The next slice that has columns.
                while (slice_end == at + HALVES * 16 && slice_end < end) slice_end = slice_of(w, slices, ++slice).end;
            }
        }
    }

    // Rows side by side for the way out: [TOKENS][132]. Nothing is under way any more.
    copy_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N8; j++) {
            const float4 v = kept[(i * N8 + j) * THREADS];
            total[i][j][0] = v.x, total[i][j][1] = v.y, total[i][j][2] = v.z, total[i][j][3] = v.w;
        }
    __syncthreads();
    float* out = (float*)shared;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp / 2 * 64 + (side ? row_of<CODE>(g, 2 + i, half) : row_of<CODE>(g, i, half));
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) out[(j * 8 + 2 * t + e) * 132 + row] = total[i][j][half * 2 + e];
        }
    __syncthreads();
    const u32 row = panel * 64 + threadIdx.x;
    if (row >= w.n) return;
    for (int i = 0; i < TOKENS && token + i < a.m; i++) {
        const float y = out[i * 132 + threadIdx.x];
        if (a.splits == 1) put(a, token + i, first + row, y);
        else ((float*)a.partial)[((size_t)blockIdx.z * a.m + token + i) * a.columns + first + row] = y;
    }
}

#define WIDE(name, code, fold) \
    KERNEL(128) wide_##name##_##fold(const LinearArgs a) { wide<code, fold == 32>(a); }

WIDE(int4, CODE_INT4, 16)
WIDE(int4, CODE_INT4, 32)
WIDE(int8, CODE_INT8, 16)
WIDE(int8, CODE_INT8, 32)
WIDE(e2m1, CODE_E2M1, 16)
WIDE(e2m1, CODE_E2M1, 32)
WIDE(e4m3, CODE_E4M3, 16)
WIDE(e4m3, CODE_E4M3, 32)
WIDE(halves, CODE_HALVES, 32)
