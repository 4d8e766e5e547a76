// The kernels for few tokens: linear.cu on float tensor cores, int8.cu on integer ones (`INT`). See there.
#pragma once
#include "integer.h"

// Stages of a warp's pipeline: what 99 KiB of shared memory take of the largest of each kind (linear.rs, `stages`).
DEVICE constexpr int stages_of(int code, int tokens, bool pair) {
    const bool four = code == CODE_INT4 || code == CODE_E2M1;
    if (tokens == 8) return four ? 4 : code == CODE_HALVES ? 2 : 3;
    return four && pair ? 3 : 2;
}

// A warp's copies of 32 columns after 32 columns.
template <int CODE, int TOKENS, bool PAIR, bool INT>
struct NarrowCopies {
    static const int PIECES = Quad<CODE>::PIECES, ROWS = INT ? (TOKENS + 15) / 16 : TOKENS / 8;
    const u8 *codes, *h[ROWS], *levels;
    int there[INT ? 1 : ROWS];  // bytes to copy of a token's activations: 16, or 0 beyond the last; of integers a byte
                                // each, and in the last byte those of scales and sums
    u32 codes_to, h_to, end, panel;
    Place at;

    METHOD void init(const LinearArgs& a, const WeightRef& w, u32 panel_, const Part& part, const Slice& slice,
                     int lane) {
        panel = panel_, end = slice.end;
        at = place_at(w, slice.start);
        codes = (const u8*)w.codes + ((size_t)panel * w.k_pad + slice.start) * (PIECES * 4) + lane * 16;
        codes_to = fixed((lane ^ exchange<PAIR>(lane / PIECES)) * 16);
        if constexpr (INT) integers(a, part, slice, lane);
        else floats(a, part, slice, lane);
    }

    // Lane / 4 is a token, lane % 4 eight of its columns.
    METHOD void floats(const LinearArgs& a, const Part& part, const Slice& slice, int lane) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const u32 row = part.token + i * 8 + lane / 4;
            h[i] = (const u8*)a.h + ((size_t)row * a.stride + slice.start + lane % 4 * 8) * 2;
            there[i] = fixed(row < part.end ? 16 : 0);
        }
        h_to = fixed(a.at_h + (PAIR ? lane * 16 : lane % 4 / 2 * (TOKENS * 32 + 64) + lane / 4 * 32 + lane % 2 * 16));
    }

    // Lane / 2 is a token, lane % 2 16 of its columns. Scales and sums: a lane has those of two tokens.
    METHOD void integers(const LinearArgs& a, const Part& part, const Slice& slice, int lane) {
        there[0] = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const u32 row = part.token + i * 16 + lane / 2;
            h[i] = (const u8*)a.h + (size_t)row * a.stride + slice.start + lane % 2 * 16;
            if (row < part.end && lane < TOKENS * 2) there[0] |= 16 << (8 * i);
        }
        h_to = fixed(a.at_h + (PAIR ? lane * 16 : lane % 2 * (TOKENS * 16 + 64) + lane / 2 * 16));
        const u32 which = lane / (TOKENS / 2), row = part.token + lane % (TOKENS / 2) * 2;
        levels = (const u8*)a.sums + ((size_t)(slice.start / (PAIR ? 32 : 16) + which) * a.rows + row) * 8;
        if (row < part.end) there[0] |= min(part.end - row, 2u) * 8 << 24;
        there[0] = fixed(there[0]);
    }

    METHOD void next_integers(const LinearArgs& a, u32 to, int lane, u32 quads) {
        each<ROWS>([&](auto i) {
            const int I = decltype(i)::VALUE;
            if (TOKENS * 2 >= 32 || lane < TOKENS * 2)
                copy_some<I * (PAIR ? 512 : 256), 0>(to + h_to, h[I], PAIR || lane % 2 * 4 < quads ? there[0] >> (8 * I) & 31 : 0);
            h[I] += 32;
        });
        if (lane < TOKENS / 2 * (PAIR ? 1 : 2)) {
            const bool within = PAIR || lane < TOKENS / 2 || quads > 4;
            copy_some<0, 0>(to + a.at_sums + lane * 16, levels, within ? there[0] >> 24 : 0);
        }
        levels += (size_t)a.rows * (PAIR ? 8 : 16);
    }

    // `to` is the address of `stage`.
    METHOD void next(const LinearArgs& a, const WeightRef& w, u8* stage, u32 to, int lane) {
        const u32 quads = (end - at.column) / 4;
        each<PIECES / 4>([&](auto i) {
            const int I = decltype(i)::VALUE;
            const u32 place = to + (codes_to ^ exchange<PAIR>(I * 32 / PIECES) * 16);
            if (PAIR) copy_whole<I * 512, I * 512>(place, codes);
            else copy_some<I * 512, I * 512>(place, codes, (I * 32 + lane) / PIECES < quads ? 16 : 0);
        });
        codes += 32 * PIECES * 4;
        if constexpr (INT) {
            next_integers(a, to, lane, quads);
        } else {
            each<ROWS>([&](auto i) {
                const int I = decltype(i)::VALUE;
                copy_some<I * (PAIR ? 512 : 256), 0>(to + h_to, h[I], PAIR || lane % 4 * 2 < quads ? there[I] : 0);
                h[I] += 64;
            });
        }
        if (CODE == CODE_HALVES) {
            at.column += 32;
            return;
        }
        const u32 column = at.column;
        copy_grid<CODE>(a, w, stage, 0, panel, at, PAIR ? 32 : 16, lane);
        advance(at, w, PAIR ? 32 : 16);
        if (!PAIR) {
            if (at.column < end) copy_grid<CODE>(a, w, stage, 1, panel, at, 16, lane);
            advance(at, w, 16);
        }
        if (!INT && w.zero == ZERO_MIN) {
            // Two sums of 16 columns of each token; what follows the end is not looked at.
            const Part of = part_again(a, TOKENS);
            const int SUMS = PAIR ? 1 : 2;
#pragma unroll
            for (int i = 0; i < (TOKENS * SUMS + 31) / 32; i++) {
                const u32 sum = i * 32 + lane, row = sum / SUMS, part = sum % SUMS;
                if (row < TOKENS) {
                    const bool there = of.token + row < of.end && (PAIR || part * 4 < quads);
                    const size_t first = (size_t)(of.token + row) * (a.stride / 16);
                    const float* from = (const float*)a.sums + first + column / 16 + part;
                    copy_async<8 / SUMS>(stage + a.at_sums + row * 8 + part * 4, from, there);
                }
            }
        }
    }
};

template <int CODE, int TOKENS, bool PAIR, bool INT>
struct Narrow {
    static const int N8 = TOKENS / 8, STAGES = stages_of(CODE, TOKENS, PAIR), UNIT = PAIR ? 32 : 16;
    static const int QUAD = Quad<CODE>::PIECES * 16;
    float total[4][N8][4], part[4][N8][4], sum[N8][2];
    u32 zero[4][2], zeros[2];  // of floats, of integers
    NarrowCopies<CODE, TOKENS, PAIR, INT> copies;
    u8* stages;
    u32 base;                    // their address
    u32 filled, used;            // where stages begin, from there
    u32 codes_from, h_from;      // where the lane reads in a stage
    int half, lane, g, t;
    bool mini;  // codes are e2m1 (of the integer kernels; the others have kernels of their own)

    // One more stage under way, if there are any more.
    METHOD void copy(const LinearArgs& a, const WeightRef& w) {
        if (copies.at.column < copies.end) {
            copies.next(a, w, stages + filled, base + filled, lane);
            filled += a.stage;
            if (filled == STAGES * a.stage) filled = 0;
        }
        copy_commit();
    }

    // 32 or 16 columns; `FIRST` of a fold.
    template <bool FIRST>
    METHOD void unit(const LinearArgs& a, const WeightRef& w) {
        if (PAIR || half == 0) {
            copy_wait<STAGES - 2>();
            __syncwarp();
            copy(a, w);
        }
        const u8* stage = stages + used;
        const u32 codes_at = base + used + codes_from, h_at = base + used + h_from;
        if (FIRST && CODE <= CODE_INT8 && w.zero == ZERO_CODE) {
            if (INT) load_integer_zeros<CODE, 4>(zeros, a, stage, PAIR ? 0 : half, g, 0);
            else load_zeros<CODE, 4>(zero, a, stage, PAIR ? 0 : half, g, 0);
        }
        if constexpr (INT) integers<FIRST>(w, codes_at, h_at, base + used + a.at_sums);
        else floats<FIRST>(a, w, stage, codes_at, h_at);
    }

    template <bool FIRST>
    METHOD void floats(const LinearArgs& a, const WeightRef& w, const u8* stage, u32 codes_at, u32 h_at) {
        uint4 b[N8];
        each<N8>([&](auto j) {
            const int J = decltype(j)::VALUE;
            if (PAIR) {
                b[J] = shared_16<J * 512>(h_at);
            } else {
                const uint2 v = shared_8<J * 256>(h_at + half * (TOKENS * 32 + 64));
                b[J].x = v.x, b[J].y = v.y;
            }
        });
        each<UNIT / 16>([&](auto k_) {
            const int k = decltype(k_)::VALUE;
            uint4 piece[Quad<CODE>::LANE];
            each<Quad<CODE>::LANE>([&](auto i) {
                const int I = decltype(i)::VALUE;
                piece[I] = shared_16<k * QUAD + I * 128>(codes_at + (PAIR ? 0 : half * 4 * QUAD));
            });
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 f[4], words[4];
                words_of<CODE>(words, piece, i);
                fragment<CODE>(f, words, zero[i]);
#pragma unroll
                for (int j = 0; j < N8; j++) {
                    const u32 b0 = k ? b[j].z : b[j].x, b1 = k ? b[j].w : b[j].y;
                    if (CODE == CODE_HALVES) mma_f16(total[i][j], f[0], f[1], f[2], f[3], b0, b1);
                    else if (FIRST && k == 0) mma_f16_first(part[i][j], f[0], f[1], f[2], f[3], b0, b1);
                    else mma_f16(part[i][j], f[0], f[1], f[2], f[3], b0, b1);
                }
            }
        });
        if (CODE <= CODE_INT8 && w.zero == ZERO_MIN) {
            const float* sums = (const float*)(stage + a.at_sums);
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float2 two = *(const float2*)(sums + (j * 8 + 2 * t + e) * 2);
                    const float before = FIRST ? 0.0f : sum[j][e];
                    sum[j][e] = before + (PAIR || half == 0 ? two.x : two.y);
                    if (PAIR) sum[j][e] += two.y;
                }
        }
    }

    // The same in integers: one block. Of 8 bits two fragments at a time, for want of registers.
    template <bool FIRST>
    METHOD void integers(const WeightRef& w, u32 codes_at, u32 h_at, u32 levels_at) {
        levels_at += t * 16 + (PAIR ? 0 : half * TOKENS * 8);
        if (!PAIR) codes_at += half * 4 * QUAD, h_at += half * (TOKENS * 16 + 64);
        if (CODE == CODE_INT4) {
            some<FIRST, false, 0, 4>(codes_at, h_at, levels_at);
        } else if (w.zero == ZERO_MID) {
            some<FIRST, false, 0, 2>(codes_at, h_at, levels_at);
            some<FIRST, false, 2, 2>(codes_at, h_at, levels_at);
        } else {
            some<FIRST, true, 0, 2>(codes_at, h_at, levels_at);
            some<FIRST, true, 2, 2>(codes_at, h_at, levels_at);
        }
        if (w.zero == ZERO_MIN) {
            each<N8>([&](auto j) {
                const int J = decltype(j)::VALUE;
                const uint4 two = shared_16<J * 64>(levels_at);
                add_sum<FIRST>(sum[J][0], __uint_as_float(two.x), __uint_as_float(two.y));
                add_sum<FIRST>(sum[J][1], __uint_as_float(two.z), __uint_as_float(two.w));
            });
        }
    }

    // N fragments of the block from FROM on; `SHIFTED`: whether zeros are not 128.
    template <bool FIRST, bool SHIFTED, int FROM, int N>
    METHOD void some(u32 codes_at, u32 h_at, u32 levels_at) {
        const int QUADS = UNIT / 16;
        u32 words[QUADS][N][2], f[N][4];
        each<QUADS>([&](auto k_) {
            const int k = decltype(k_)::VALUE;
            // Of 8 bits a piece has two words of two fragments.
            const uint4 piece = shared_16<k * QUAD + FROM * 64>(codes_at);
            const u32* word = (const u32*)&piece;
#pragma unroll
            for (int i = 0; i < N; i++) {
                words[k][i][0] = word[CODE == CODE_INT4 ? i : 2 * i];
                if (CODE == CODE_INT8) words[k][i][1] = word[2 * i + 1];
            }
        });
        fragments<CODE>(f, words, zeros, mini);
        each<N8>([&](auto j_) {
            const int j = decltype(j_)::VALUE;
            uint2 b;
            if (PAIR) b = shared_8<j * 256>(h_at);
            else b.x = b.y = shared_4<j * 128>(h_at);
            const uint4 two = shared_16<j * 64>(levels_at);
            each<N>([&](auto i) {
                const int I = decltype(i)::VALUE;
                int d[4];
                mma_block<PAIR>(d, f[I], b.x, b.y);
                add_block<FIRST, SHIFTED, FROM + I>(part[FROM + I][j], d, two, zeros);
            });
        });
    }

    // To the next stage, if this one is used up.
    METHOD void pass(const LinearArgs& a) {
        half ^= 1;
        if (PAIR || half == 0) {
            used += a.stage;
            if (used == STAGES * a.stage) used = 0;
        }
    }

    // total = fma(scale, part, total), and with minima total = fma(min, sum of h, total).
    METHOD void fold(const LinearArgs& a, const WeightRef& w) {
        const u8* stage = stages + used;
        const int slot = PAIR ? 0 : half;
        float level[4][2];
        levels_of<CODE, 4>(level, a, w, stage, slot, 0, g, 0);
        if (INT && mini) {
#pragma unroll
            for (int i = 0; i < 4; i++) level[i][0] *= 0.5f, level[i][1] *= 0.5f;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] = fmaf(level[i][e / 2], part[i][j][e], total[i][j][e]);
        if (CODE > CODE_INT8 || w.zero != ZERO_MIN) return;
        levels_of<CODE, 4>(level, a, w, stage, slot, 1, g, 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] = fmaf(level[i][e / 2], sum[j][e % 2], total[i][j][e]);
    }

    METHOD void run(const LinearArgs& a) {
        extern __shared__ uint4 shared[];
        const int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, half = 0;
        const Part part = part_of(a, TOKENS);
        if (part.token >= part.end) return;
        u32 panel = blockIdx.y, first;
        const WeightRef w = pick(a, part.expert, panel, first);
        const Slice slice = slice_of(w, a.splits * SLICES, blockIdx.z * SLICES + warp);
        stages = (u8*)shared + warp * STAGES * a.stage;
        filled = used = 0;
        base = fixed(shared_address(stages));
        codes_from = fixed((PAIR ? 2 * t : t) * QUAD + (g ^ exchange<PAIR>(PAIR ? 2 * t : t)) * 16);
        h_from = fixed(a.at_h + (PAIR ? g * 64 + t * 16 : g * 32 + t * 8) / (INT ? 2 : 1));
        mini = INT && w.code == CODE_E2M1;
        copies.init(a, w, panel, part, slice, lane);
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) copy(a, w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < N8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[i][j][e] = 0.0f;
        same_zeros<CODE, 4>(zero, w);
        same_integer_zeros<CODE>(zeros, w);

        for (u32 column = slice.start; column < slice.end; column += w.fold) {
            unit<true>(a, w);
            for (u32 done = UNIT; done < w.fold; done += UNIT) {
                pass(a);
                unit<false>(a, w);
            }
            if (CODE != CODE_HALVES) fold(a, w);
            pass(a);
        }
        out(a, w, (float*)shared, warp, panel, first);
    }

    // Slices in order, and out.
    METHOD void out(const LinearArgs& a, const WeightRef& w, float* sums, int warp, u32 panel, u32 first) {
        const Part of = part_again(a, TOKENS);
        copy_wait<0>();
        __syncthreads();  // The stages are done with: sums f32 [SLICES][TOKENS][SUMS_PITCH].
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float* to = sums + (warp * TOKENS + j * 8 + 2 * t + e) * SUMS_PITCH;
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    const float(&x)[4] = total[2 * p][j], (&y)[4] = total[2 * p + 1][j];
                    if (Quad<CODE>::LANE == 1) {
                        // Half p of all fragments.
                        *(float4*)(to + row_of<CODE>(g, 0, p)) = make_float4(total[0][j][2 * p + e], total[1][j][2 * p + e],
                                                                            total[2][j][2 * p + e], total[3][j][2 * p + e]);
                    } else if (Quad<CODE>::LANE == 2) {
                        *(float4*)(to + row_of<CODE>(g, 2 * p, 0)) = make_float4(x[e], x[2 + e], y[e], y[2 + e]);
                    } else {
                        *(float2*)(to + row_of<CODE>(g, 2 * p, 0)) = make_float2(x[e], y[e]);
                        *(float2*)(to + row_of<CODE>(g, 2 * p, 1)) = make_float2(x[2 + e], y[2 + e]);
                    }
                }
            }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TOKENS * 64 / (SLICES * 32); i++) {
            const u32 at = i * SLICES * 32 + threadIdx.x, row = panel * 64 + at % 64, token_of = of.token + at / 64;
            float y = 0.0f;
#pragma unroll
            for (int s = 0; s < SLICES; s++) y += sums[(s * TOKENS + at / 64) * SUMS_PITCH + at % 64];
            if (token_of < of.end && row < w.n) {
                if (a.splits == 1) put<INT>(a, token_of, first + row, y);
                else ((float*)a.partial)[((size_t)blockIdx.z * a.m + token_of) * a.columns + first + row] = y;
            }
        }
    }
};
