// The kernels for many tokens: wide.cu on float tensor cores, int8.cu on integer ones (`INT`). See there.
#pragma once
#include "integer.h"

static const int TOKENS = WIDE_TOKENS, N8 = TOKENS / 8, THREADS = 128, STAGES = 3;

// A block's copies of 32 columns after 32 columns of two panels; where there is one left, it comes twice.
template <int CODE, bool PAIR, bool INT>
struct WideCopies {
    static const int PIECES = Quad<CODE>::PIECES, EACH = PIECES * 16 / THREADS;
    const u8 *codes[2], *h[2], *levels;
    int there[2];  // bytes to copy of a token's activations: 16, or 0 beyond the last
    int levels_there;
    u32 codes_to, h_to, end, panel, mine;
    Place at;

    METHOD void init(const LinearArgs& a, const WeightRef& w, u32 panel_, const Part& part, u32 start, u32 end_) {
        const u32 thread = threadIdx.x, last = (w.n + 63) / 64 - 1;
        panel = panel_, end = end_;
        at = place_at(w, start);
        // 4 bits: half of the threads have a piece of each panel; 8 bits: all have one of each; halves: two.
        const u32 piece = EACH == 1 ? thread % 64 : thread;
        codes_to = fixed(((piece ^ exchange<PAIR>(piece / PIECES)) + (EACH == 1 ? thread / 64 * 64 : 0)) * 16);
#pragma unroll
        for (int i = 0; i < (EACH == 1 ? 1 : 2); i++) {
            const u32 from = min(panel + (EACH == 1 ? thread / 64 : i), last);
            codes[i] = (const u8*)w.codes + ((size_t)from * w.k_pad + start) * (PIECES * 4) + piece * 16;
        }
        mine = min(panel + thread / 64, last);
        if constexpr (INT) integers(a, part, start);
        else floats(a, part, start);
    }

    // Thread / 4 is a token, thread % 4 eight of its columns; then the same 32 tokens on.
    METHOD void floats(const LinearArgs& a, const Part& part, u32 start) {
        const u32 thread = threadIdx.x;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 row = part.token + i * 32 + thread / 4;
            h[i] = (const u8*)a.h + ((size_t)row * a.stride + start + thread % 4 * 8) * 2;
            there[i] = fixed(row < part.end ? 16 : 0);
        }
        h_to = thread % 4 / 2 * (TOKENS * 32 + 64) + thread / 4 * 32 + thread % 2 * 16;
        h_to = fixed(a.at_h + (PAIR ? thread * 16 : h_to));
    }

    // Thread / 2 is a token, thread % 2 16 of its columns. Scales and sums: a thread has those of two tokens.
    METHOD void integers(const LinearArgs& a, const Part& part, u32 start) {
        const u32 thread = threadIdx.x, row = part.token + thread / 2;
        h[0] = (const u8*)a.h + (size_t)row * a.stride + start + thread % 2 * 16;
        there[0] = fixed(row < part.end ? 16 : 0);
        h_to = fixed(a.at_h + (PAIR ? thread * 16 : thread % 2 * (TOKENS * 16 + 64) + thread / 2 * 16));
        const u32 which = thread / (TOKENS / 2), two = part.token + thread % (TOKENS / 2) * 2;
        levels = (const u8*)a.sums + ((size_t)(start / (PAIR ? 32 : 16) + which) * a.rows + two) * 8;
        levels_there = fixed(two < part.end ? min(part.end - two, 2u) * 8 : 0);
    }

    METHOD void next_integers(const LinearArgs& a, u32 to, u32 quads) {
        const u32 thread = threadIdx.x;
        copy_some<0, 0>(to + h_to, h[0], PAIR || thread % 2 * 4 < quads ? there[0] : 0);
        h[0] += 32;
        if (thread < TOKENS / 2 * (PAIR ? 1 : 2)) {
            const bool within = PAIR || thread < TOKENS / 2 || quads > 4;
            copy_some<0, 0>(to + a.at_sums + thread * 16, levels, within ? levels_there : 0);
        }
        levels += (size_t)a.rows * (PAIR ? 8 : 16);
    }

    // `to` is the address of `stage`.
    METHOD void next(const LinearArgs& a, const WeightRef& w, u8* stage, u32 to) {
        const u32 quads = (end - at.column) / 4, column = at.column, thread = threadIdx.x;
        each<EACH>([&](auto i) {
            // Of halves 0 and 1 are of the first panel.
            const int I = decltype(i)::VALUE, PANEL = EACH == 4 ? I / 2 : I, MORE = EACH == 4 ? I % 2 : 0;
            const int TO = I * THREADS * 16, FROM = MORE * THREADS * 16;
            const u32 place = to + (codes_to ^ exchange<PAIR>(MORE * THREADS / PIECES) * 16);
            const u32 quad = (EACH == 1 ? thread % 64 : thread) / PIECES;
            if (PAIR) copy_whole<TO, FROM>(place, codes[PANEL]);
            else copy_some<TO, FROM>(place, codes[PANEL], quad < quads ? 16 : 0);
        });
#pragma unroll
        for (int i = 0; i < (EACH == 1 ? 1 : 2); i++) codes[i] += 32 * PIECES * 4;
        if constexpr (INT) {
            next_integers(a, to, quads);
        } else {
            each<2>([&](auto i) {
                const int I = decltype(i)::VALUE;
                copy_some<I * (PAIR ? 2048 : 1024), 0>(to + h_to, h[I], PAIR || thread % 4 * 2 < quads ? there[I] : 0);
                h[I] += 64;
            });
        }
        if (CODE == CODE_HALVES) {
            at.column += 32;
            return;
        }
        // Scales of the two panels by two warps.
        const int lane = thread % 32, slots = PAIR ? 1 : 2;
        const bool copies = thread / 32 % 2 == 0;
        if (copies) copy_grid<CODE>(a, w, stage, thread / 64 * slots, mine, at, PAIR ? 32 : 16, lane);
        advance(at, w, PAIR ? 32 : 16);
        if (!PAIR) {
            if (copies && at.column < end) copy_grid<CODE>(a, w, stage, thread / 64 * slots + 1, mine, at, 16, lane);
            advance(at, w, 16);
        }
        if (!INT && w.zero == ZERO_MIN) {
            // Two sums of 16 columns of each token; what follows the end is not looked at.
            const Part of = part_again(a, TOKENS);
            const u32 row = thread / 2, part = thread % 2;
            const bool there = of.token + row < of.end && (PAIR || part * 4 < quads);
            const float* from = (const float*)a.sums + (size_t)(of.token + row) * (a.stride / 16) + column / 16 + part;
            copy_async<4>(stage + a.at_sums + thread * 4, from, there);
        }
    }
};

// The words of the warp's two fragments of a panel: half of the lane's one piece of 4 bits; one piece of 8 bits, two of
// halves, which begin at `codes`.
template <int CODE, int K>
DEVICE void read_words(u32 (&words)[2][4], u32 codes, int side) {
    const int AT = K * Quad<CODE>::PIECES * 16;
    const uint4 v = shared_16<AT>(codes);
    if constexpr (Quad<CODE>::LANE == 1) {
        words[0][0] = side ? v.z : v.x;
        words[1][0] = side ? v.w : v.y;
    } else if constexpr (Quad<CODE>::LANE == 2) {
        words[0][0] = v.x, words[0][1] = v.y, words[1][0] = v.z, words[1][1] = v.w;
    } else {
        const uint4 high = shared_16<AT + 128>(codes);
        words[0][0] = v.x, words[0][1] = high.x, words[0][2] = v.y, words[0][3] = high.y;
        words[1][0] = v.z, words[1][1] = high.z, words[1][2] = v.w, words[1][3] = high.w;
    }
}

template <int CODE, bool PAIR, bool INT>
struct Wide {
    static const int UNIT = PAIR ? 32 : 16, K = UNIT / 16, QUAD = Quad<CODE>::PIECES * 16;
    float total[2][N8][4], part[2][N8][4];
    u32 zero[2][2], zeros[2];  // of floats, of integers
    WideCopies<CODE, PAIR, INT> copies;
    float4* kept;  // [16][THREADS], the thread's
    float* sums;   // [TOKENS], of the activations of a fold
    u8* stages;
    u32 base;                // their address
    u32 filled, used, ring;  // where stages begin, from there, and where all end
    u32 codes_from, h_from;  // where the lane reads in a stage
    int half, g, t, side, mine;
    u32 adds;   // whether the thread adds sums of activations
    bool mini;  // codes are e2m1 (of the integer kernels; the others have kernels of their own)

    // One more stage under way, if there are any more.
    METHOD void copy(const LinearArgs& a, const WeightRef& w) {
        if (copies.at.column < copies.end) {
            copies.next(a, w, stages + filled, base + filled);
            filled += a.stage;
            if (filled == ring) filled = 0;
        }
        copy_commit();
    }

    // 32 or 16 columns; `FIRST` of a fold.
    template <bool FIRST>
    METHOD void unit(const LinearArgs& a, const WeightRef& w) {
        if (PAIR || half == 0) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            copy(a, w);
        }
        const u8* stage = stages + used;
        if (FIRST && CODE <= CODE_INT8 && w.zero == ZERO_CODE) {
            if (INT) load_integer_zeros<CODE, 2>(zeros, a, stage, PAIR ? mine : mine * 2 + half, g, 2 * side);
            else load_zeros<CODE, 2>(zero, a, stage, PAIR ? mine : mine * 2 + half, g, 2 * side);
        }
        const u32 codes_at = base + used + codes_from, h_at = base + used + h_from;
        if constexpr (INT) integers<FIRST>(w, codes_at, h_at, base + used + a.at_sums, stage + a.at_sums);
        else floats<FIRST>(w, stage, codes_at, h_at, a.at_sums);
    }

    template <bool FIRST>
    METHOD void floats(const WeightRef& w, const u8* stage, u32 codes_at, u32 h_at, u32 at_sums) {
        u32 f[K][2][4];
        each<K>([&](auto k) {
            const int I = decltype(k)::VALUE;
            u32 words[2][4];
            read_words<CODE, I>(words, codes_at + (PAIR ? 0 : half * 4 * QUAD), side);
#pragma unroll
            for (int i = 0; i < 2; i++) fragment<CODE>(f[I][i], words[i], zero[i]);
        });
        each<N8>([&](auto j_) {
            const int j = decltype(j_)::VALUE;
            uint4 b;
            if (PAIR) {
                b = shared_16<j * 512>(h_at);
            } else {
                const uint2 v = shared_8<j * 256>(h_at + half * (TOKENS * 32 + 64));
                b.x = v.x, b.y = v.y;
            }
#pragma unroll
            for (int k = 0; k < K; k++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32(&x)[4] = f[k][i];
                    const u32 b0 = k ? b.z : b.x, b1 = k ? b.w : b.y;
                    if (CODE == CODE_HALVES) mma_f16(total[i][j], x[0], x[1], x[2], x[3], b0, b1);
                    else if (FIRST && k == 0) mma_f16_first(part[i][j], x[0], x[1], x[2], x[3], b0, b1);
                    else mma_f16(part[i][j], x[0], x[1], x[2], x[3], b0, b1);
                }
        });
        if (CODE <= CODE_INT8) {
            if (!PAIR && w.zero == ZERO_MIN) __syncthreads();
            if (adds) {
                const float2 two = *(const float2*)(stage + at_sums + threadIdx.x * 8);
                float sum = (FIRST ? 0.0f : sums[threadIdx.x]) + (PAIR || half == 0 ? two.x : two.y);
                if (PAIR) sum += two.y;
                sums[threadIdx.x] = sum;
            }
        }
    }

    // The same in integers: one block.
    template <bool FIRST>
    METHOD void integers(const WeightRef& w, u32 codes_at, u32 h_at, u32 levels_at, const u8* levels) {
        u32 words[K][2][2], f[2][4];
        each<K>([&](auto k) {
            const int I = decltype(k)::VALUE;
            u32 some[2][4];
            read_words<CODE, I>(some, codes_at + (PAIR ? 0 : half * 4 * QUAD), side);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                words[I][i][0] = some[i][0];
                if (Quad<CODE>::LANE == 2) words[I][i][1] = some[i][1];
            }
        });
        fragments<CODE>(f, words, zeros, mini);
        const u32 from = levels_at + t * 16 + (PAIR ? 0 : half * TOKENS * 8);
        const auto tokens = [&](auto shifted) {
            each<N8>([&](auto j_) {
                const int j = decltype(j_)::VALUE;
                uint2 b;
                if (PAIR) b = shared_8<j * 256>(h_at);
                else b.x = b.y = shared_4<j * 128>(h_at + half * (TOKENS * 16 + 64));
                const uint4 two = shared_16<j * 64>(from);
                each<2>([&](auto i) {
                    const int I = decltype(i)::VALUE;
                    int d[4];
                    mma_block<PAIR>(d, f[I], b.x, b.y);
                    add_block<FIRST, decltype(shifted)::VALUE, I>(part[I][j], d, two, zeros);
                });
            });
        };
        if (CODE == CODE_INT8 && w.zero != ZERO_MID) tokens(Constant<1>());
        else tokens(Constant<0>());
        if (!PAIR && w.zero == ZERO_MIN) __syncthreads();
        if (adds) {
            const float2 level = *(const float2*)(levels + (PAIR ? 0 : half * TOKENS * 8) + threadIdx.x * 8);
            add_sum<FIRST>(sums[threadIdx.x], level.x, level.y);
        }
    }

    // To the next stage, if this one is used up.
    METHOD void pass(const LinearArgs& a) {
        half ^= 1;
        if (PAIR || half == 0) {
            used += a.stage;
            if (used == ring) used = 0;
        }
    }

    // total = fma(scale, part, total), and with minima total = fma(min, sum of h, total).
    METHOD void fold(const LinearArgs& a, const WeightRef& w) {
        const u8* stage = stages + used;
        const int slot = PAIR ? mine : mine * 2 + half;
        const bool minima = CODE <= CODE_INT8 && w.zero == ZERO_MIN;
        if (minima) __syncthreads();
        float level[2][2];
        levels_of<CODE, 2>(level, a, w, stage, slot, 0, g, 2 * side);
        if (INT && mini) {
#pragma unroll
            for (int i = 0; i < 2; i++) level[i][0] *= 0.5f, level[i][1] *= 0.5f;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] = fmaf(level[i][e / 2], part[i][j][e], total[i][j][e]);
        if (!minima) return;
        levels_of<CODE, 2>(level, a, w, stage, slot, 1, g, 2 * side);
#pragma unroll
        for (int j = 0; j < N8; j++) {
            const float2 sum = *(const float2*)(sums + j * 8 + 2 * t);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    total[i][j][e] = fmaf(level[i][e / 2], e % 2 ? sum.y : sum.x, total[i][j][e]);
        }
    }

    // Adds a slice to those before it.
    METHOD void keep() {
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
    }

    METHOD void run(const LinearArgs& a) {
        extern __shared__ uint4 shared[];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        g = lane / 4, t = lane % 4, side = fixed(warp % 2), mine = warp / 2, half = 0;
        const Part part = part_of(a, TOKENS);
        if (part.token >= part.end) return;
        u32 pair = blockIdx.y, first;
        const WeightRef w = pick(a, part.expert, pair, first);
        const u32 slices = a.splits * SLICES;
        u32 slice = blockIdx.z * SLICES, slice_end;
        const u32 start = slice_of(w, slices, slice).start, end = slice_of(w, slices, slice + SLICES - 1).end;

        kept = (float4*)shared + threadIdx.x;
        sums = (float*)((float4*)shared + 16 * THREADS);
        stages = (u8*)(sums + TOKENS);
        filled = used = 0, ring = fixed(STAGES * a.stage);
        base = fixed(shared_address(stages));
        codes_from = fixed((mine * 8 + (PAIR ? 2 * t : t)) * QUAD + (g ^ exchange<PAIR>(PAIR ? 2 * t : t)) * 16 +
                           (Quad<CODE>::LANE == 1 ? 0 : side * Quad<CODE>::LANE * 64));
        h_from = fixed(a.at_h + (PAIR ? g * 64 + t * 16 : g * 32 + t * 8) / (INT ? 2 : 1));
        mini = INT && w.code == CODE_E2M1;
        adds = fixed(w.zero == ZERO_MIN && threadIdx.x < TOKENS);
        copies.init(a, w, pair * 2, part, start, end);
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) copy(a, w);
#pragma unroll
        for (int i = 0; i < 16; i++) kept[i * THREADS] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] = 0.0f;
        same_zeros<CODE, 2>(zero, w);
        same_integer_zeros<CODE>(zeros, w);

        slice_end = slice_of(w, slices, slice).end;
        for (u32 column = start; column < end;) {
            unit<true>(a, w);
            for (u32 done = UNIT; done < w.fold; done += UNIT) {
                pass(a);
                unit<false>(a, w);
            }
            if (CODE != CODE_HALVES) fold(a, w);
            pass(a);
            column += w.fold;
            // A slice may have no columns.
            while (slice_end < column) slice_end = slice_of(w, slices, ++slice).end;
            if (slice_end == column) keep();
        }
        out(a, w, (float*)shared, pair * 128, first);
    }

    // Rows side by side for the way out: [TOKENS][132]. Nothing is under way any more.
    METHOD void out(const LinearArgs& a, const WeightRef& w, float* rows, u32 row, u32 first) {
        const Part of = part_again(a, TOKENS);
        copy_wait<0>();
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N8; j++) *(float4*)&total[i][j][0] = kept[(i * N8 + j) * THREADS];
        __syncthreads();
        float* to = rows + 2 * t * 132 + mine * 64;
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float(&x)[4] = total[0][j], (&y)[4] = total[1][j];
                float* at = to + (j * 8 + e) * 132;
                if (Quad<CODE>::LANE == 2) {
                    *(float4*)(at + row_of<CODE>(g, 2 * side, 0)) = make_float4(x[e], x[2 + e], y[e], y[2 + e]);
                } else {
                    *(float2*)(at + row_of<CODE>(g, 2 * side, 0)) = make_float2(x[e], y[e]);
                    *(float2*)(at + row_of<CODE>(g, 2 * side, 1)) = make_float2(x[2 + e], y[2 + e]);
                }
            }
        __syncthreads();
        row += threadIdx.x;
        if (row >= w.n) return;
        for (int i = 0; i < TOKENS && of.token + i < of.end; i++) {
            const float y = rows[i * 132 + threadIdx.x];
            if (a.splits == 1) put<INT>(a, of.token + i, first + row, y);
            else ((float*)a.partial)[((size_t)blockIdx.z * a.m + of.token + i) * a.columns + first + row] = y;
        }
    }
};
