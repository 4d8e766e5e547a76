// Causal attention over pages of keys and values, query heads grouped by the key/value head that they share.
//
// A vector is one query head of one row; the vectors of a chunk and a key/value head are numbered row by row, so that
// tiles of them are full whatever the group. Work is a list of (tile, split), for each key/value head, that the host
// wrote to device memory (kernels/src/cuda/batch.rs): splits lie at absolute multiples of 256 tokens. Inside a split the
// softmax is online over steps of STEP keys, which lie at absolute multiples of STEP; splits are folded from left to
// right, by the block that has all of them or by `merge`. What a vector gets depends on its own position and window
// only: steps and splits of which it sees nothing leave every bit as it is. Rows of a tree are chunks of their own, with
// tables in which the tokens of their path lie one behind the other (copy_slots of ops.cu).
//
// Tensor cores (m16n8k16, f16 in, f32 sums): S = Q K^T, then O += P V and, with a column of ones, l += P 1. Queries
// become f16 under a power of two per vector. int8 and fp8 keys are exact in f16, their scales multiply the scores;
// such values become f16 under their scales. Two ways to cut a step, which do the same operations in the same order:
// - wide, for many rows: 64 vectors, 16 to a warp, which has all keys and columns. The layouts of accumulators and of
//   the left operand are such that P never leaves the registers (as in FlashAttention-2).
// - narrow, for few: 16 vectors; the four warps share the keys of S and the columns of O, and P goes by shared memory.
//   Four times as fast for one tile, which is what a lone sequence waits for.
//
// Bound by the bytes of keys and values where rows are few, by tensor cores where they are many. head_dim: any
// multiple of 8 up to 256, padded with zeros to D = 32, 64, 128 or 256.
#include "gpu.h"
#include "acts.h"
#include "cap.h"
#include "pool.h"

#define SPLIT 256
#define WARPS 4
#define THREADS (32 * WARPS)
// Vectors of a tile.
#define WIDE (16 * WARPS)
#define NARROW 16
#define NONE 0xffffffffu
#define LOG2E 1.4426950408889634f

// ---- what the host wrote: words, of which the first say where the others are

// Word 0: rows. Word 1: where the chunk of each row is. Word 2: vectors of a tile. From word 4 on, four words per kind of layer: tiles, where
// they are, where the chunks are, unused. All begin at multiples of four words.
struct __align__(16) Chunk {
    u32 first;     // row of the step
    u32 rows;
    u32 last;      // last token that the first row sees
    u32 table;     // where its blocks are
    u32 partials;  // its first (row, slot)
    u32 slots;     // slots of each row
    u32 split;     // the split of slot 0
    u32 step;      // 1: each row sees one token more than the row before; 0: all the same
};

struct __align__(16) Tile {
    u32 chunk;
    u32 vector;  // its first
    u32 split;   // NONE: all, folded into slot 0
    u32 unused;
};

struct Attend {
    const float* qkv;  // f32 [m][(heads + 2 kv_heads) * d]
    const u32* batch;
    float* out;       // f32 [partials][heads][d]: of each (row, slot), sums of weighted values
    float2* states;   // [partials][heads]: largest score (in powers of two), sum of weights
    const float* sinks;  // f32 [heads], a score of each head that has no value; or null: none
    Pool pool;
    float scale;      // of scores
    float cap;        // soft cap of scores; 0: none
    float twice;      // 2 / cap
    u32 kind, heads, kv_heads, d;
    u32 window;       // NONE: none
};

DEVICE const Chunk* chunks_of(const Attend& p) { return (const Chunk*)(p.batch + p.batch[4 + 4 * p.kind + 2]); }

// Last token that a row of a chunk sees.
DEVICE u32 last_seen(const Chunk& c, u32 row) { return c.last + row * c.step; }

// First token that a row sees whose last one is `pos`.
DEVICE u32 first_seen(u32 pos, u32 window) { return window == NONE || pos + 1 < window ? 0 : pos + 1 - window; }

// ---- softmax

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A maximum to subtract: nothing was seen while it is -inf.
DEVICE float finite(float m) { return m == -INFINITY ? 0.0f : m; }

// Factors that bring what is under `m` and what is under `n` under the larger of them, which `m` becomes.
DEVICE float2 fold_factors(float& m, float n) {
    float most = fmaxf(m, n), f = finite(most);
    float2 r = make_float2(exp2_fast(m - f), exp2_fast(n - f));
    m = most;
    return r;
}

DEVICE float fold(float2 factors, float a, float b) { return __fmaf_rn(a, factors.x, __fmul_rn(b, factors.y)); }

// ---- matrices in shared memory

// Four 8x8 matrices of f16; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

DEVICE void load_matrices_turned(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Bytes from the first of four matrices to this lane's row in rows of `pitch` elements: matrices 0 and 1 lie one below
// the other, 2 and 3 right of them; or 0 and 1 side by side, 2 and 3 below.
DEVICE u32 rows_first(u32 pitch) {
    u32 l = threadIdx.x % 32;
    return (l % 16 * pitch + l / 16 * 8) * 2;
}

DEVICE u32 columns_first(u32 pitch) {
    u32 l = threadIdx.x % 32;
    return ((l / 16 * 8 + l % 8) * pitch + l / 8 % 2 * 8) * 2;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Within the finite range of f16.
DEVICE u32 clamp_f16x2(u32 a) {
    u32 r;
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(0x7bff7bffu));
    asm("max.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0xfbfffbffu));
    return r;
}

// Four codes as exact f16, in order.
DEVICE uint2 codes_to_f16(u32 codes) {
    u32 biased = codes ^ 0x80808080u;  // 128 more, unsigned; 0x6400 | u is 1024 + u
    u32 lo = __byte_perm(biased, 0x64646464u, 0x4140), hi = __byte_perm(biased, 0x64646464u, 0x4342);
    return make_uint2(sub_f16x2(lo, 0x64806480u), sub_f16x2(hi, 0x64806480u));
}

// ---- steps of keys and values on their way to shared memory

// `copy_async_16` of gpu.h, to an address of shared memory.
DEVICE void copy_async(u32 shared, const void* global, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// A step. Rows are padded by 16 bytes, so that the eight rows of a matrix lie in different banks.
template <int D>
struct Shape {
    static constexpr int STEP = D <= 128 ? 32 : 16;
    static constexpr int ROW = D + 8;
    // Elements of the keys (or the values) of a step.
    static constexpr int PART = STEP * ROW;
    // Queries of a wide tile that do not fit into registers stay in shared memory.
    static constexpr bool SPILL = D > 128;
    // Codes of the next step wait in registers while this one is computed, where there are any left.
    static constexpr bool AHEAD = D <= 128;
    // Rows of keys (and of values) of which a thread takes 8 elements.
    static constexpr int ROWS = STEP * (D / 8) / THREADS;
};

// What a block reads of the cache: one sequence, one head, keys `from..to`.
struct Span {
    const u32* table;
    const u8* base;
    u64 block;
    u32 from, to, d;
};

// Row `i` of this thread in a step, and its column.
template <int D>
DEVICE u32 row_of(int i) {
    return threadIdx.x / (D / 8) + i * (THREADS / (D / 8));
}

template <int D>
DEVICE u32 column_of() {
    return threadIdx.x % (D / 8) * 8;
}

// Keys and values `first..` to a stage, at shared address `stage`; zeros for what the block does not look at.
template <int D>
DEVICE void load_step_f16(u32 stage, const Span& s, u32 first) {
    using S = Shape<D>;
    u32 column = column_of<D>();
    if (column >= s.d) return;
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
        u32 row = row_of<D>(i), key = first + row;
        bool there = key >= s.from && key < s.to;
        const u8* at = s.base;
        if (there) at += s.table[key / BLOCK] * s.block + 2 * (key % BLOCK * s.d + column);
        u32 to = stage + 2 * (row * S::ROW + column);
        copy_async(to, at, there);
        copy_async(to + 2 * S::PART, at + (there ? 2 * BLOCK * s.d : 0), there);
    }
}

// At once; the compiler alone sometimes makes four stores of it, which collide.
DEVICE void store_shared(void* to, uint2 a, uint2 b) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(a.x), "r"(a.y), "r"(b.x),
                 "r"(b.y)
                 : "memory");
}

// Eight codes of a key and of its value, and their scales.
struct Codes {
    uint2 key, value;
    u16 key_scale, value_scale;
};

DEVICE Codes load_codes(const Span& s, u32 key, u32 column) {
    Codes c = {make_uint2(0, 0), make_uint2(0, 0), 0, 0};
    if (column >= s.d || key < s.from || key >= s.to) return c;
    u32 slot = key % BLOCK;
    const u8* at = s.base + s.table[key / BLOCK] * s.block;
    const u8* codes = at + SCALES + slot * s.d + column;
    c.key = *(const uint2*)codes;
    c.value = *(const uint2*)(codes + BLOCK * s.d);
    c.key_scale = ((const u16*)at)[slot];
    c.value_scale = ((const u16*)at)[BLOCK + slot];
    return c;
}

// Four e4m3 codes. Every one is an f16, but for the exponent's bias: 2^8 times as large as the same bits there.
DEVICE uint2 e4m3_to_f16(u32 codes) {
    u32 a = __byte_perm(codes, 0, 0x4140), b = __byte_perm(codes, 0, 0x4342);
    a = (a & 0x800080u) << 8 | (a & 0x7f007fu) << 7;
    b = (b & 0x800080u) << 8 | (b & 0x7f007fu) << 7;
    return make_uint2(mul_f16x2(a, 0x5c005c00u), mul_f16x2(b, 0x5c005c00u));
}

template <int KV>
DEVICE uint2 exact_f16(u32 codes) {
    return KV == KV_FP8 ? e4m3_to_f16(codes) : codes_to_f16(codes);
}

// Keys as their codes mean and their scales to `scales`, values under their scales.
template <int D, int KV>
DEVICE void store_codes(u16* stage, float* scales, const Codes& c, u32 row, u32 column, u32 d) {
    if (column >= d) return;
    u16* to = stage + row * Shape<D>::ROW + column;
    if (column == 0) scales[row] = f16_to_f32(c.key_scale);
    uint2 a = exact_f16<KV>(c.key.x), b = exact_f16<KV>(c.key.y);
    store_shared(to, a, b);
    a = exact_f16<KV>(c.value.x);
    b = exact_f16<KV>(c.value.y);
    u32 scale = c.value_scale * 0x10001u;
    a = make_uint2(clamp_f16x2(mul_f16x2(a.x, scale)), clamp_f16x2(mul_f16x2(a.y, scale)));
    b = make_uint2(clamp_f16x2(mul_f16x2(b.x, scale)), clamp_f16x2(mul_f16x2(b.y, scale)));
    store_shared(to + Shape<D>::PART, a, b);
}

// A step of codes: into registers, from there to a stage, or both at once.
template <int D>
struct Waiting {
    Codes rows[Shape<D>::ROWS];
};

template <int D>
DEVICE void load_step_codes(Waiting<D>& to, const Span& s, u32 first) {
#pragma unroll
    for (int i = 0; i < Shape<D>::ROWS; i++) to.rows[i] = load_codes(s, first + row_of<D>(i), column_of<D>());
}

template <int D, int KV>
DEVICE void store_step_codes(u16* stage, float* scales, const Waiting<D>& from, u32 d) {
#pragma unroll
    for (int i = 0; i < Shape<D>::ROWS; i++) {
        store_codes<D, KV>(stage, scales, from.rows[i], row_of<D>(i), column_of<D>(), d);
    }
}

template <int D, int KV>
DEVICE void move_step_codes(u16* stage, float* scales, const Span& s, u32 first) {
#pragma unroll 1
    for (int i = 0; i < Shape<D>::ROWS; i++) {
        Codes c = load_codes(s, first + row_of<D>(i), column_of<D>());
        store_codes<D, KV>(stage, scales, c, row_of<D>(i), column_of<D>(), s.d);
    }
}

// Fills columns that no head has: they are zero in both factors of every product.
template <int D>
DEVICE void clear_padding(u16* stages, u32 rows, u32 d) {
    for (u32 i = threadIdx.x; i < rows * (D - d); i += THREADS) {
        stages[i / (D - d) * Shape<D>::ROW + d + i % (D - d)] = 0;
    }
}

// ---- vectors

// The queries of vectors `vector..vector + count` of `all`, one after the other, as f16 to shared memory, rows of
// `Shape::ROW`, under powers of two whose inverses go to `factors`; zeros for what is none.
template <int D>
DEVICE void load_queries(const Attend& p, const Chunk& c, u32 kv_head, u32 vector, u32 count, u32 all, u16* to,
                         float* factors) {
    u32 lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        u32 v = vector + i;
        u64 row = c.first + v / group;
        const float* from = p.qkv + (row * (p.heads + 2 * p.kv_heads) + kv_head * group + v % group) * p.d;
        float x[D / 32];
        u32 most = 0;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            u32 column = lane + 32 * j;
            x[j] = v < all && column < p.d ? from[column] : 0.0f;
            most = max(most, magnitude(x[j]));
        }
        float up, factor;
        row_factor(__reduce_max_sync(FULL, most), up, factor);
        if (lane == 0) factors[i] = factor;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            to[i * Shape<D>::ROW + lane + 32 * j] = up != 0.0f ? f32_to_f16(x[j] * up) : 0;
        }
    }
}

// What a lane keeps of the two vectors that it has columns of: g = l / 4 and g + 8 (i = 0, 1) of 16.
struct Vectors {
    float m[2];              // largest scores so far
    float scale[2];          // of scores, and to powers of two
    u32 first[2], last[2];   // keys seen
    u32 at[2];               // (row, slot, head) of the result, counted; NONE: no vector
    float put_m[2], put_l[2];  // what is there already, if `any`
    bool any;
};

DEVICE Vectors vectors_of(const Attend& p, const Chunk& c, const Tile& tile, u32 kv_head, u32 vector, u32 all,
                          const float* factors) {
    Vectors r;
    r.any = false;
    u32 g = threadIdx.x % 32 / 4, group = p.heads / p.kv_heads;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 v = vector + g + 8 * i, row = v / group, pos = last_seen(c, row);
        bool there = v < all;
        r.scale[i] = factors[g + 8 * i] * (p.scale * LOG2E);
        // What is no vector hides nothing, so that the others need no mask because of it.
        r.first[i] = there ? first_seen(pos, p.window) : 0;
        r.last[i] = there ? pos : NONE;
        u32 slot = c.partials + row * c.slots + (tile.split == NONE ? 0 : tile.split - c.split);
        r.at[i] = there ? slot * p.heads + kv_head * group + v % group : NONE;
        r.m[i] = -INFINITY;
        r.put_m[i] = r.put_l[i] = 0.0f;
    }
    return r;
}

// Whether vectors of the warp do not see all of keys `first..first + N`.
template <int N>
DEVICE bool hides(const Vectors& v, u32 first) {
    bool all = first >= v.first[0] && first >= v.first[1] && first + N - 1 <= v.last[0] && first + N - 1 <= v.last[1];
    return __any_sync(FULL, !all);
}

// A score as a power of two; `scale`: of an int8 key.
template <bool CODES>
DEVICE float score(const Vectors& v, int i, float x, const float* scale) {
    return CODES ? x * *scale * v.scale[i] : x * v.scale[i];
}

// A score in powers of two under the cap: cap tanh(x / cap) with tanh y = 1 - 2 / (e^2y + 1), to about 2^-21 of the cap.
DEVICE float capped(const Attend& p, float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(exp2_fast(x * p.twice) + 1.0f));
    return p.cap * LOG2E * (1.0f - 2.0f * r);
}

// -inf, whatever was read for the key, where the vector does not see it.
DEVICE float mask(const Vectors& v, int i, u32 key, float x) {
    return key >= v.first[i] && key <= v.last[i] ? x : -INFINITY;
}

// Takes new maxima: factors for what was summed under the old ones.
DEVICE void take_maxima(Vectors& v, const float (&most)[2], float (&old)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        old[i] = exp2_fast(v.m[i] - finite(most[i]));
        v.m[i] = most[i];
    }
}

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}

// Sums of weighted values in N tiles of 8 columns (lane l, t = l % 4: columns 2t and 2t + 1 of each), and of weights in
// elements 0 and 2 of `l`.
template <int N>
struct Sums {
    float o[N][4];
    float l[4];
};

template <int N>
DEVICE void clear(Sums<N>& s) {
#pragma unroll
    for (int j = 0; j < N; j++) s.o[j][0] = s.o[j][1] = s.o[j][2] = s.o[j][3] = 0.0f;
    s.l[0] = s.l[1] = s.l[2] = s.l[3] = 0.0f;
}

template <int N>
DEVICE void rescale(Sums<N>& s, const float (&old)[2]) {
    // A factor of one changes nothing, and mostly all are one.
    if (!__any_sync(FULL, old[0] != 1.0f || old[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < N; j++) {
        s.o[j][0] *= old[0];
        s.o[j][1] *= old[0];
        s.o[j][2] *= old[1];
        s.o[j][3] *= old[1];
    }
    s.l[0] *= old[0];
    s.l[2] *= old[1];
}

// Adds a split to what is there, and begins anew. `column` is that of the first tile.
template <int N>
DEVICE void put(const Attend& p, Sums<N>& s, Vectors& v, u32 column, bool state) {
    u32 t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (v.at[i] == NONE) continue;
        float* out = p.out + (u64)v.at[i] * p.d + column + 2 * t;
        float2 factors = make_float2(0.0f, 1.0f);
        if (v.any) factors = fold_factors(v.put_m[i], v.m[i]);
        else v.put_m[i] = v.m[i];
        v.put_l[i] = v.any ? fold(factors, v.put_l[i], s.l[2 * i]) : s.l[2 * i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (column + 8 * j >= p.d) continue;
            float2 x = make_float2(s.o[j][2 * i], s.o[j][2 * i + 1]);
            if (v.any) {
                float2 before = *(const float2*)(out + 8 * j);
                x = make_float2(fold(factors, before.x, x.x), fold(factors, before.y, x.y));
            }
            *(float2*)(out + 8 * j) = x;
        }
        if (state && t == 0) p.states[v.at[i]] = make_float2(v.put_m[i], v.put_l[i]);
    }
    v.any = true;
    v.m[0] = v.m[1] = -INFINITY;
    clear(s);
}

#define ONES 0x3c003c00u

// ---- wide

// One step of keys `first..` in `stage`, for a warp; `scales`: of int8 keys. `q`: left operands in registers, or, where
// they do not fit, `queries` in shared memory.
template <int D, bool CODES>
DEVICE void wide_step(const Attend& p, Vectors& v, Sums<D / 8>& sums, const u32 (&q)[Shape<D>::SPILL ? 1 : D / 16][4],
                      u32 queries, u32 stage, const float* scales, u32 first) {
    using S = Shape<D>;
    u32 t = threadIdx.x % 4;
    float s[S::STEP / 8][4];
#pragma unroll
    for (int j = 0; j < S::STEP / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
    u32 keys = stage + columns_first(S::ROW);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[4];
        if (S::SPILL) {
            load_matrices(a, queries + 32 * k);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = q[k][i];
        }
#pragma unroll
        for (int j = 0; j < S::STEP / 16; j++) {
            u32 b[4];
            load_matrices(b, keys + 2 * (16 * j * S::ROW + 16 * k));
            mma_f16(s[2 * j], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_f16(s[2 * j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
    scales += 2 * t;
#pragma unroll
    for (int j = 0; j < S::STEP / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) s[j][e] = score<CODES>(v, e / 2, s[j][e], scales + 8 * j + e % 2);
    }
    if (p.cap > 0.0f) {
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = capped(p, s[j][e]);
        }
    }
    if (hides<S::STEP>(v, first)) {
#pragma unroll
        for (int j = 0; j < S::STEP / 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[j][e] = mask(v, e / 2, first + 2 * t + 8 * j + e % 2, s[j][e]);
        }
    }
    float most[2] = {v.m[0], v.m[1]}, old[2];
#pragma unroll
    for (int j = 0; j < S::STEP / 8; j++) {
        most[0] = fmaxf(most[0], fmaxf(s[j][0], s[j][1]));
        most[1] = fmaxf(most[1], fmaxf(s[j][2], s[j][3]));
    }
    most[0] = quad_max(most[0]);
    most[1] = quad_max(most[1]);
    take_maxima(v, most, old);
    rescale(sums, old);
    float under[2] = {finite(most[0]), finite(most[1])};
    u32 values = stage + 2 * S::PART + rows_first(S::ROW);
#pragma unroll
    for (int k = 0; k < S::STEP / 16; k++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float* x = &s[2 * k + i / 2][i % 2 * 2];
            a[i] = f32_to_f16x2(exp2_fast(x[0] - under[i % 2]), exp2_fast(x[1] - under[i % 2]));
        }
        mma_f16(sums.l, a[0], a[1], a[2], a[3], ONES, ONES);
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 b[4];
            load_matrices_turned(b, values + 2 * (16 * k * S::ROW + 16 * n));
            mma_f16(sums.o[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_f16(sums.o[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Keys that a tile of vectors `from..to` of a chunk sees, and where they lie.
DEVICE Span span_of(const Attend& p, const Chunk& c, const Tile& tile, u32 kv_head, u32 to) {
    u32 group = p.heads / p.kv_heads;
    Span span;
    span.table = p.batch + c.table;
    span.base = p.pool.base + kv_head * p.pool.head;
    span.block = p.pool.block;
    span.d = p.d;
    span.from = first_seen(last_seen(c, tile.vector / group), p.window);
    span.to = last_seen(c, (to - 1) / group) + 1;
    if (tile.split != NONE) {
        span.from = max(span.from, tile.split * SPLIT);
        span.to = min(span.to, tile.split * SPLIT + SPLIT);
    }
    return span;
}

// Shared memory of a wide block: two stages, factors of queries, two stages of scales, queries that stay. The host
// knows its size (kernels/src/cuda/attend.rs).
template <int D, int KV>
DEVICE void wide_tile(const Attend& p, const Tile& tile, u32 kv_head, u16* shared) {
    using S = Shape<D>;
    constexpr bool CODES = KV != KV_F16;
    u32 warp = threadIdx.x / 32;
    const Chunk c = chunks_of(p)[tile.chunk];
    u32 all = c.rows * (p.heads / p.kv_heads);
    Span span = span_of(p, c, tile, kv_head, min(all, tile.vector + WIDE));
    u16* stages = shared;
    float* factors = (float*)(shared + 4 * S::PART);
    float* scales = factors + WIDE;
    u16* queries = (S::SPILL ? (u16*)(scales + 2 * S::STEP) : stages) + warp * 16 * S::ROW;

    // Everybody is done with what was here before.
    __syncthreads();
    u32 vector = tile.vector + warp * 16;
    load_queries<D>(p, c, kv_head, vector, 16, all, queries, factors + warp * 16);
    __syncwarp();
    u32 q[S::SPILL ? 1 : D / 16][4];
    if (!S::SPILL) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            load_matrices(q[k], shared_address(queries) + rows_first(S::ROW) + 32 * k);
        }
    }
    Vectors v = vectors_of(p, c, tile, kv_head, vector, all, factors + warp * 16);
    // Of the warp; steps outside do nothing.
    bool there[2] = {v.at[0] != NONE, v.at[1] != NONE};
    u32 seen_first = __reduce_min_sync(FULL, min(there[0] ? v.first[0] : NONE, there[1] ? v.first[1] : NONE));
    u32 seen_last = __reduce_max_sync(FULL, max(there[0] ? v.last[0] : 0, there[1] ? v.last[1] : 0));
    __syncthreads();
    clear_padding<D>(stages, 4 * S::STEP, p.d);
    Sums<D / 8> sums;
    clear(sums);

    u32 first = span.from / S::STEP * S::STEP, stage = 0, address = shared_address(stages);
    u32 own_queries = shared_address(queries) + rows_first(S::ROW);
    Waiting<D> codes;
    if (CODES) {
        move_step_codes<D, KV>(stages, scales, span, first);
    } else {
        load_step_f16<D>(address, span, first);
        copy_commit();
    }
    for (; first < span.to; first += S::STEP, stage ^= 1) {
        if (!CODES) copy_wait<0>();
        // The step is there, and everybody is done with the one before.
        __syncthreads();
        bool more = first + S::STEP < span.to;
        if (more) {
            if (CODES && S::AHEAD) load_step_codes<D>(codes, span, first + S::STEP);
            if (!CODES) load_step_f16<D>(address + (stage ^ 1) * 4 * S::PART, span, first + S::STEP);
        }
        if (!CODES) copy_commit();
        if (vector < all && first <= seen_last && first + S::STEP > seen_first) {
            wide_step<D, CODES>(p, v, sums, q, own_queries, address + stage * 4 * S::PART, scales + stage * S::STEP, first);
        }
        if (CODES && more) {
            u16* to = stages + (stage ^ 1) * 2 * S::PART;
            float* to_scales = scales + (stage ^ 1) * S::STEP;
            if (S::AHEAD) store_step_codes<D, KV>(to, to_scales, codes, p.d);
            else move_step_codes<D, KV>(to, to_scales, span, first + S::STEP);
        }
        if ((first + S::STEP) % SPLIT == 0 || !more) put(p, sums, v, 0, true);
    }
}

// ---- narrow

// Steps on their way; of codes the next one waits in registers.
template <bool CODES>
struct Depth {
    static constexpr int STAGES = CODES ? 2 : 4;
};

// What the warps of a narrow block tell each other.
template <int D>
struct Exchange {
    static constexpr int ROW = Shape<D>::STEP + 8;
    u16 p[NARROW * ROW];            // weights of a step
    float most[WARPS][NARROW];      // largest scores of each warp's keys
    float factors[NARROW];          // of queries
};

template <int D, bool CODES>
DEVICE void narrow_step(const Attend& p, Vectors& v, Sums<D / 32>& sums, const u32 (&q)[D / 16][4], Exchange<D>& x, u32 stage,
                        const float* scales, u32 first) {
    using S = Shape<D>;
    constexpr int ROW = Exchange<D>::ROW;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 column = 8 * warp + 2 * t;
    // A warp has eight keys; of 16 only two warps have some.
    bool keys = 8 * warp < S::STEP;
    if (keys) {
        // Four matrices side by side.
        u32 at = stage + 2 * ((8 * warp + lane % 8) * S::ROW + lane / 8 * 8);
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            u32 b[4];
            load_matrices(b, at + 64 * k);
            mma_f16(s, q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b[0], b[1]);
            mma_f16(s, q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[e] = score<CODES>(v, e / 2, s[e], scales + column + e % 2);
            if (p.cap > 0.0f) s[e] = capped(p, s[e]);
            s[e] = mask(v, e / 2, first + column + e % 2, s[e]);
        }
        float top = quad_max(fmaxf(s[0], s[1])), bottom = quad_max(fmaxf(s[2], s[3]));
        if (t == 0) {
            x.most[warp][g] = top;
            x.most[warp][g + 8] = bottom;
        }
    }
    __syncthreads();
    float most[2] = {v.m[0], v.m[1]}, old[2];
#pragma unroll
    for (int w = 0; w < S::STEP / 8; w++) {
        most[0] = fmaxf(most[0], x.most[w][g]);
        most[1] = fmaxf(most[1], x.most[w][g + 8]);
    }
    take_maxima(v, most, old);
    if (keys) {
        *(u32*)(x.p + g * ROW + column) =
            f32_to_f16x2(exp2_fast(s[0] - finite(most[0])), exp2_fast(s[1] - finite(most[0])));
        *(u32*)(x.p + (g + 8) * ROW + column) =
            f32_to_f16x2(exp2_fast(s[2] - finite(most[1])), exp2_fast(s[3] - finite(most[1])));
    }
    __syncthreads();
    rescale(sums, old);
    u32 a[2][4], weights = shared_address(x.p) + rows_first(ROW);
#pragma unroll
    for (int k = 0; k < S::STEP / 16; k++) {
        load_matrices(a[k], weights + 32 * k);
        mma_f16(sums.l, a[k][0], a[k][1], a[k][2], a[k][3], ONES, ONES);
    }
    u32 values = stage + 2 * (S::PART + warp * (D / 4));
    if (S::STEP == 32) {
        // Four matrices one below the other.
        values += 2 * lane * S::ROW;
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            u32 b[4];
            load_matrices_turned(b, values + 16 * n);
            mma_f16(sums.o[n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_f16(sums.o[n], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    } else {
        values += rows_first(S::ROW);
#pragma unroll
        for (int n = 0; n < D / 64; n++) {
            u32 b[4];
            load_matrices_turned(b, values + 32 * n);
            mma_f16(sums.o[2 * n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_f16(sums.o[2 * n + 1], a[0][0], a[0][1], a[0][2], a[0][3], b[2], b[3]);
        }
    }
}

// Shared memory of a narrow block: its stages, their scales, `Exchange`.
template <int D, int KV>
DEVICE void narrow_tile(const Attend& p, const Tile& tile, u32 kv_head, u16* shared) {
    using S = Shape<D>;
    constexpr bool CODES = KV != KV_F16;
    constexpr int STAGES = Depth<CODES>::STAGES;
    u32 warp = threadIdx.x / 32;
    const Chunk c = chunks_of(p)[tile.chunk];
    u32 all = c.rows * (p.heads / p.kv_heads);
    Span span = span_of(p, c, tile, kv_head, min(all, tile.vector + NARROW));
    float* scales = (float*)(shared + STAGES * 2 * S::PART);
    Exchange<D>& x = *(Exchange<D>*)(scales + STAGES * S::STEP);

    __syncthreads();
    u32 mine = warp * (NARROW / WARPS);
    load_queries<D>(p, c, kv_head, tile.vector + mine, NARROW / WARPS, all, shared + mine * S::ROW, x.factors + mine);
    __syncthreads();
    u32 q[D / 16][4], address = shared_address(shared);
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_matrices(q[k], address + rows_first(S::ROW) + 32 * k);
    Vectors v = vectors_of(p, c, tile, kv_head, tile.vector, all, x.factors);
    __syncthreads();
    clear_padding<D>(shared, 2 * STAGES * S::STEP, p.d);
    Sums<D / 32> sums;
    clear(sums);

    u32 first = span.from / S::STEP * S::STEP, stage = 0;
    Waiting<D> codes;
    if (CODES) {
        move_step_codes<D, KV>(shared, scales, span, first);
    } else {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (first + i * S::STEP < span.to) load_step_f16<D>(address + i * 4 * S::PART, span, first + i * S::STEP);
            copy_commit();
        }
    }
    for (; first < span.to; first += S::STEP, stage = (stage + 1) % STAGES) {
        if (!CODES) copy_wait<STAGES - 2>();
        __syncthreads();
        bool more = first + S::STEP < span.to;
        u32 ahead = first + (STAGES - 1) * S::STEP, next = (stage + STAGES - 1) % STAGES;
        if (CODES && more) load_step_codes<D>(codes, span, ahead);
        if (!CODES && ahead < span.to) load_step_f16<D>(address + next * 4 * S::PART, span, ahead);
        if (!CODES) copy_commit();
        narrow_step<D, CODES>(p, v, sums, q, x, address + stage * 4 * S::PART, scales + stage * S::STEP, first);
        if (CODES && more) store_step_codes<D, KV>(shared + next * 2 * S::PART, scales + next * S::STEP, codes, p.d);
        if ((first + S::STEP) % SPLIT == 0 || !more) put(p, sums, v, warp * (D / 4), warp == 0);
    }
}

// The host has cut this step for the other kernel: a graph was recorded for another kind of step.
DEVICE void check_cut(const Attend& p, u32 vectors) {
    if (p.batch[2] != vectors) asm volatile("trap;");
}

template <int D, int KV, int VECTORS>
DEVICE void attend(const Attend& p) {
    extern __shared__ __align__(16) u16 shared[];
    check_cut(p, VECTORS);
    const u32* kind = p.batch + 4 + 4 * p.kind;
    const Tile* tiles = (const Tile*)(p.batch + kind[1]);
    u32 items = kind[0] * p.kv_heads;
    for (u32 i = blockIdx.x; i < items; i += gridDim.x) {
        const Tile tile = tiles[i / p.kv_heads];
        if (VECTORS == WIDE) wide_tile<D, KV>(p, tile, i % p.kv_heads, shared);
        else narrow_tile<D, KV>(p, tile, i % p.kv_heads, shared);
    }
}

// `blocks`: of threads that shall fit into a multiprocessor, so that the assembler does not aim at more by spilling.
#define RESIDENT(blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks)

RESIDENT(4) wide_f16_32(Attend p) { attend<32, KV_F16, WIDE>(p); }
RESIDENT(3) wide_f16_64(Attend p) { attend<64, KV_F16, WIDE>(p); }
RESIDENT(2) wide_f16_128(Attend p) { attend<128, KV_F16, WIDE>(p); }
RESIDENT(2) wide_f16_256(Attend p) { attend<256, KV_F16, WIDE>(p); }
RESIDENT(4) wide_int8_32(Attend p) { attend<32, KV_INT8, WIDE>(p); }
RESIDENT(3) wide_int8_64(Attend p) { attend<64, KV_INT8, WIDE>(p); }
RESIDENT(2) wide_int8_128(Attend p) { attend<128, KV_INT8, WIDE>(p); }
RESIDENT(2) wide_int8_256(Attend p) { attend<256, KV_INT8, WIDE>(p); }
RESIDENT(4) wide_fp8_32(Attend p) { attend<32, KV_FP8, WIDE>(p); }
RESIDENT(3) wide_fp8_64(Attend p) { attend<64, KV_FP8, WIDE>(p); }
RESIDENT(2) wide_fp8_128(Attend p) { attend<128, KV_FP8, WIDE>(p); }
RESIDENT(2) wide_fp8_256(Attend p) { attend<256, KV_FP8, WIDE>(p); }
RESIDENT(4) narrow_f16_32(Attend p) { attend<32, KV_F16, NARROW>(p); }
RESIDENT(3) narrow_f16_64(Attend p) { attend<64, KV_F16, NARROW>(p); }
RESIDENT(2) narrow_f16_128(Attend p) { attend<128, KV_F16, NARROW>(p); }
RESIDENT(2) narrow_f16_256(Attend p) { attend<256, KV_F16, NARROW>(p); }
RESIDENT(4) narrow_int8_32(Attend p) { attend<32, KV_INT8, NARROW>(p); }
RESIDENT(3) narrow_int8_64(Attend p) { attend<64, KV_INT8, NARROW>(p); }
RESIDENT(2) narrow_int8_128(Attend p) { attend<128, KV_INT8, NARROW>(p); }
RESIDENT(2) narrow_int8_256(Attend p) { attend<256, KV_INT8, NARROW>(p); }
RESIDENT(4) narrow_fp8_32(Attend p) { attend<32, KV_FP8, NARROW>(p); }
RESIDENT(3) narrow_fp8_64(Attend p) { attend<64, KV_FP8, NARROW>(p); }
RESIDENT(2) narrow_fp8_128(Attend p) { attend<128, KV_FP8, NARROW>(p); }
RESIDENT(2) narrow_fp8_256(Attend p) { attend<256, KV_FP8, NARROW>(p); }

// ---- the splits of a row and a head together: to f32 [m][heads * d]. Grid: m x heads. Rows of no chunk are zero.

#define MERGE_THREADS 64

KERNEL(MERGE_THREADS) merge(Attend p, float* to) {
    u32 row = blockIdx.x, head = blockIdx.y;
    to += ((u64)row * p.heads + head) * p.d;
    u32 chunk = row < p.batch[0] ? p.batch[p.batch[1] + row] : NONE;
    if (chunk == NONE) {
        for (u32 i = threadIdx.x; i < p.d; i += MERGE_THREADS) to[i] = 0.0f;
        return;
    }
    const Chunk c = chunks_of(p)[chunk];
    u32 pos = last_seen(c, row - c.first), slot = 0, end = 1;
    if (c.slots > 1) {
        slot = first_seen(pos, p.window) / SPLIT - c.split;
        end = pos / SPLIT + 1 - c.split;
    }
    u64 at = ((u64)c.partials + (u64)(row - c.first) * c.slots + slot) * p.heads + head;
    float o[256 / MERGE_THREADS];
    float2 state = p.states[at];
#pragma unroll
    for (int i = 0; i < 256 / MERGE_THREADS; i++) {
        u32 column = threadIdx.x + i * MERGE_THREADS;
        o[i] = column < p.d ? p.out[at * p.d + column] : 0.0f;
    }
    for (slot++, at += p.heads; slot < end; slot++, at += p.heads) {
        float2 next = p.states[at], factors = fold_factors(state.x, next.x);
        state.y = fold(factors, state.y, next.y);
#pragma unroll
        for (int i = 0; i < 256 / MERGE_THREADS; i++) {
            u32 column = threadIdx.x + i * MERGE_THREADS;
            if (column < p.d) o[i] = fold(factors, o[i], p.out[at * p.d + column]);
        }
    }
    if (p.sinks) {
        float2 factors = fold_factors(state.x, p.sinks[head] * LOG2E);
        state.y = fold(factors, state.y, 1.0f);
#pragma unroll
        for (int i = 0; i < 256 / MERGE_THREADS; i++) o[i] *= factors.x;
    }
#pragma unroll
    for (int i = 0; i < 256 / MERGE_THREADS; i++) {
        u32 column = threadIdx.x + i * MERGE_THREADS;
        if (column < p.d) to[column] = __fdiv_rn(o[i], state.y);
    }
}

// ---- f32 throughout: one block of threads per row and head, all splits in order; straight to f32 [m][heads * d].

#define PLAIN_THREADS 128

DEVICE float plain_max(float v, float* shared) {
    v = warp_max(v);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float most = shared[0];
#pragma unroll
    for (int i = 1; i < PLAIN_THREADS / 32; i++) most = fmaxf(most, shared[i]);
    __syncthreads();
    return most;
}

DEVICE float plain_sum(float v, float* shared) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = shared[0];
#pragma unroll
    for (int i = 1; i < PLAIN_THREADS / 32; i++) sum += shared[i];
    __syncthreads();
    return sum;
}

// Element `i` of a key (part 0) or value (part 1), without the scale of codes.
template <int KV>
DEVICE float element(const u8* at, u32 part, u32 slot, u32 d, u32 i) {
    u32 place = (part * BLOCK + slot) * d + i;
    if (KV == KV_F16) return f16_to_f32(((const u16*)at)[place]);
    if (KV == KV_F32) return ((const float*)at)[place];
    if (KV == KV_FP8) {
        // An f32 but for the exponent's bias: 2^-120 times as large.
        int code = ((const i8*)at + SCALES)[place];
        return __fmul_rn(__uint_as_float((u32)code << 20 & 0x87f00000u), 0x1p120f);
    }
    return (float)((const i8*)at + SCALES)[place];
}

template <int KV>
DEVICE float scale_of(const u8* at, u32 part, u32 slot) {
    return KV == KV_INT8 || KV == KV_FP8 ? f16_to_f32(((const u16*)at)[part * BLOCK + slot]) : 1.0f;
}

template <int KV>
DEVICE void attend_plain(const Attend& p, float* to) {
    __shared__ float q[256], weights[SPLIT], shared[PLAIN_THREADS / 32];
    u32 row = blockIdx.x, head = blockIdx.y, group = p.heads / p.kv_heads;
    to += ((u64)row * p.heads + head) * p.d;
    u32 chunk = row < p.batch[0] ? p.batch[p.batch[1] + row] : NONE;
    if (chunk == NONE) {
        for (u32 i = threadIdx.x; i < p.d; i += PLAIN_THREADS) to[i] = 0.0f;
        return;
    }
    const Chunk& c = chunks_of(p)[chunk];
    const u32* table = p.batch + c.table;
    const u8* base = p.pool.base + head / group * p.pool.head;
    const float* query = p.qkv + ((u64)row * (p.heads + 2 * p.kv_heads) + head) * p.d;
    for (u32 i = threadIdx.x; i < p.d; i += PLAIN_THREADS) q[i] = query[i];
    u32 pos = last_seen(c, row - c.first), seen = first_seen(pos, p.window);
    float m = -INFINITY, l = 0.0f, o[2] = {0.0f, 0.0f};
    __syncthreads();
    for (u32 split = seen / SPLIT; split <= pos / SPLIT; split++) {
        u32 from = max(seen, split * SPLIT), end = min(pos + 1, split * SPLIT + SPLIT);
        float most = -INFINITY;
        for (u32 t = threadIdx.x; t < SPLIT; t += PLAIN_THREADS) {
            u32 key = split * SPLIT + t;
            float x = -INFINITY;
            if (key >= from && key < end) {
                const u8* at = base + table[key / BLOCK] * p.pool.block;
                float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                for (u32 i = 0; i < p.d; i += 4) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        dot[e] = __fmaf_rn(q[i + e], element<KV>(at, 0, key % BLOCK, p.d, i + e), dot[e]);
                    }
                }
                x = ((dot[0] + dot[1]) + (dot[2] + dot[3])) * scale_of<KV>(at, 0, key % BLOCK) * p.scale;
                if (p.cap > 0.0f) x = soft_cap(x, p.cap);
            }
            weights[t] = x;
            most = fmaxf(most, x);
        }
        most = plain_max(most, shared);
        float next = fmaxf(m, most), f = finite(next), sum = 0.0f;
        for (u32 t = threadIdx.x; t < SPLIT; t += PLAIN_THREADS) {
            float w = expf(weights[t] - f);
            sum += w;
            // A value's scale goes with its weight.
            u32 key = split * SPLIT + t;
            if ((KV == KV_INT8 || KV == KV_FP8) && key >= from && key < end) {
                w *= scale_of<KV>(base + table[key / BLOCK] * p.pool.block, 1, key % BLOCK);
            }
            weights[t] = w;
        }
        sum = plain_sum(sum, shared);
        float old = expf(m - f);
        m = next;
        l = __fmaf_rn(l, old, sum);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 column = threadIdx.x + i * PLAIN_THREADS;
            if (column >= p.d) continue;
            o[i] *= old;
            for (u32 key = from; key < end; key++) {
                const u8* at = base + table[key / BLOCK] * p.pool.block;
                o[i] = __fmaf_rn(weights[key % SPLIT], element<KV>(at, 1, key % BLOCK, p.d, column), o[i]);
            }
        }
        __syncthreads();
    }
    if (p.sinks) {
        float sink = p.sinks[head], f = finite(fmaxf(m, sink)), old = expf(m - f);
        l = __fmaf_rn(l, old, expf(sink - f));
        o[0] *= old;
        o[1] *= old;
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 column = threadIdx.x + i * PLAIN_THREADS;
        if (column < p.d) to[column] = __fdiv_rn(o[i], l);
    }
}

KERNEL(PLAIN_THREADS) attend_plain_f16(Attend p, float* to) { attend_plain<KV_F16>(p, to); }
KERNEL(PLAIN_THREADS) attend_plain_f32(Attend p, float* to) { attend_plain<KV_F32>(p, to); }
KERNEL(PLAIN_THREADS) attend_plain_int8(Attend p, float* to) { attend_plain<KV_INT8>(p, to); }
KERNEL(PLAIN_THREADS) attend_plain_fp8(Attend p, float* to) { attend_plain<KV_FP8>(p, to); }
