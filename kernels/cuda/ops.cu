// Row operations between linear layers: norms, activations, rope and the way into the KV cache.
//
// A block of threads takes one row (rope: one warp takes one head), so what a row gives depends on nothing else. All
// are bound by the bytes of their rows or, for few rows, by the time of a launch; a row is read two or three times,
// from the L1 cache after the first. Shapes are given at the kernels; columns are padded with zeros to the stride of
// the result. Any number of columns; four at a time where it is a multiple of four.
#include "gpu.h"
#include "acts.h"
#include "cap.h"
#include "norm.h"
#include "pool.h"

// ---- norms

template <bool LAYER>
DEVICE float4 norm_quad(Moments m, const float* x, const float* weight, const float* bias, const u32* order, u32 q,
                        u32 n) {
    if (order) {
        float v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            bool there = 4 * q + i < n;
            u32 c = there ? order[4 * q + i] : 0;
            v[i] = there ? norm_one<LAYER>(m, x[c], weight[c], LAYER ? bias[c] : 0.0f) : 0.0f;
        }
        return make_float4(v[0], v[1], v[2], v[3]);
    }
    float4 v = load_quad(x, q, n), w = load_quad(weight, q, n), b = LAYER ? load_quad(bias, q, n) : zero4();
    float4 y = make_float4(norm_one<LAYER>(m, v.x, w.x, b.x), norm_one<LAYER>(m, v.y, w.y, b.y),
                           norm_one<LAYER>(m, v.z, w.z, b.z), norm_one<LAYER>(m, v.w, w.w, b.w));
    // What lies beyond the row's end is (0 - mean) * r * 0 + 0, which is no number where r is none.
    if (4 * q >= n) y.x = 0.0f;
    if (4 * q + 1 >= n) y.y = 0.0f;
    if (4 * q + 2 >= n) y.z = 0.0f;
    if (4 * q + 3 >= n) y.w = 0.0f;
    return y;
}

// x: f32 [..][n]; rows: u32 [m] or null (row i is row i of x); weight, bias: f32 [n]; order: u32 [n] or null: column j
// of the result is column order[j] of the normed row. Grid: m blocks.
template <bool LAYER, int FORM>
DEVICE void norm_to_acts(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order,
                         u32 n, float eps, Acts to) {
    u32 row = blockIdx.x;
    x += (u64)(rows ? rows[row] : row) * n;
    __shared__ float shared[32];
    Moments m = moments<LAYER>(x, n, eps, shared);
    write_row<FORM, THREADS>(to, row, [&](u32 q) { return norm_quad<LAYER>(m, x, weight, bias, order, q, n); });
}

KERNEL(THREADS)
rms_norm_f16(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
             float eps, Acts to) {
    norm_to_acts<false, FORM_F16>(x, rows, weight, bias, order, n, eps, to);
}

KERNEL(THREADS)
rms_norm_f32(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
             float eps, Acts to) {
    norm_to_acts<false, FORM_F32>(x, rows, weight, bias, order, n, eps, to);
}

KERNEL(THREADS)
rms_norm_int8(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
              float eps, Acts to) {
    norm_to_acts<false, FORM_INT8>(x, rows, weight, bias, order, n, eps, to);
}

KERNEL(THREADS)
layer_norm_f16(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
               float eps, Acts to) {
    norm_to_acts<true, FORM_F16>(x, rows, weight, bias, order, n, eps, to);
}

KERNEL(THREADS)
layer_norm_f32(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
               float eps, Acts to) {
    norm_to_acts<true, FORM_F32>(x, rows, weight, bias, order, n, eps, to);
}

KERNEL(THREADS)
layer_norm_int8(const float* x, const u32* rows, const float* weight, const float* bias, const u32* order, u32 n,
              float eps, Acts to) {
    norm_to_acts<true, FORM_INT8>(x, rows, weight, bias, order, n, eps, to);
}

// The same into f32 [m][n], in natural order.
template <bool LAYER>
DEVICE void norm_to_rows(const float* x, const u32* rows, const float* weight, const float* bias, u32 n, float eps,
                         float* to) {
    u32 row = blockIdx.x;
    x += (u64)(rows ? rows[row] : row) * n;
    to += (u64)row * n;
    __shared__ float shared[32];
    Moments m = moments<LAYER>(x, n, eps, shared);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        to[i] = norm_one<LAYER>(m, x[i], weight[i], LAYER ? bias[i] : 0.0f);
    }
}

KERNEL(THREADS)
rms_norm_rows(const float* x, const u32* rows, const float* weight, const float* bias, u32 n, float eps, float* to) {
    norm_to_rows<false>(x, rows, weight, bias, n, eps, to);
}

KERNEL(THREADS)
layer_norm_rows(const float* x, const u32* rows, const float* weight, const float* bias, u32 n, float eps, float* to) {
    norm_to_rows<true>(x, rows, weight, bias, n, eps, to);
}

// x, f32 [m][n], grows by the RMS norm of y, f32 [m][n]. Grid: m blocks.
KERNEL(THREADS) rms_norm_add(const float* y, const float* weight, u32 n, float eps, float* x) {
    y += (u64)blockIdx.x * n;
    x += (u64)blockIdx.x * n;
    __shared__ float shared[32];
    Moments m = moments<false>(y, n, eps, shared);
    for (u32 i = threadIdx.x; i < n; i += THREADS) x[i] = __fadd_rn(x[i], norm_one<false>(m, y[i], weight[i], 0.0f));
}

// Soft caps, in place: x f32 [m][n]. Grid: (m, n / THREADS).
KERNEL(THREADS) soft_cap_rows(float* x, u32 n, float cap) {
    u32 i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= n) return;
    x += (u64)blockIdx.x * n + i;
    *x = soft_cap(*x, cap);
}

// ---- rows as they are: x f32 [..][n], rows and order as above. Grid: m blocks.

template <int FORM>
DEVICE void rows_to_acts(const float* x, const u32* rows, const u32* order, u32 n, Acts to) {
    u32 row = blockIdx.x;
    x += (u64)(rows ? rows[row] : row) * n;
    write_row<FORM, THREADS>(to, row, [&](u32 q) {
        if (!order) return load_quad(x, q, n);
        float v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = 4 * q + i < n ? x[order[4 * q + i]] : 0.0f;
        return make_float4(v[0], v[1], v[2], v[3]);
    });
}

#define ROWS(name, FORM)                                                                                               \
    KERNEL(THREADS)                                                                                                   \
    name(const float* x, const u32* rows, const u32* order, u32 n, Acts to) {                                         \
        rows_to_acts<FORM>(x, rows, order, n, to);                                                                    \
    }

ROWS(rows_f16, FORM_F16)
ROWS(rows_f32, FORM_F32)
ROWS(rows_int8, FORM_INT8)

// The same into f32 [m][stride], in natural order.
KERNEL(THREADS) copy_rows(const float* x, const u32* rows, u32 n, float* to, u32 stride) {
    u32 row = blockIdx.x;
    x += (u64)(rows ? rows[row] : row) * n;
    to += (u64)row * stride;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n; i += THREADS) to[i] = x[i];
}

// ---- activations (models/src/spec.rs, Act)

#define SILU 0
#define GELU 1
#define GELU_TANH 2

// x (1 + erf(x / sqrt 2)) / 2, with the complementary error function of cpu/act.rs: erfc(z) = t e^(P(t) - z^2) with
// t = 1 / (1 + z / 2), z = |x| / sqrt 2. The coefficients are those of P(t) / (t - 1).
DEVICE float gelu(float x) {
    float z = fabsf(x) * 0.70710678118654752f;
    float t = __fdiv_rn(1.0f, __fmaf_rn(0.5f, z, 1.0f));
    float p = 0.13713501f;
    p = __fmaf_rn(p, t, -0.5023636f);
    p = __fmaf_rn(p, t, 0.55967236f);
    p = __fmaf_rn(p, t, -0.013808897f);
    p = __fmaf_rn(p, t, -0.19306366f);
    p = __fmaf_rn(p, t, -0.14049111f);
    p = __fmaf_rn(p, t, -0.1229379f);
    p = __fmaf_rn(p, t, 0.26719496f);
    p = __fmaf_rn(p, t, 1.2654287f);
    float tail = 0.5f * t * expf(__fmaf_rn(-z, z, p * (t - 1.0f)));
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <int KIND>
DEVICE float act_one(float x) {
    if (KIND == SILU) return __fdiv_rn(x, 1.0f + expf(-x));
    if (KIND == GELU) return gelu(x);
    // x (1 + tanh u) / 2 is x / (1 + e^-2u), which does not cancel; the factor is -2 sqrt(2 / pi).
    float u = x * __fmaf_rn(x * x, 0.044715f, 1.0f);
    return __fdiv_rn(x, 1.0f + expf(u * -1.5957691216057308f));
}

// gate_up: f32 [m][2 n], gate | up, or [m][n] without a gate; the result goes through its first n columns, which are
// overwritten. Grid: m blocks.
#define ACT_THREADS 512

template <int KIND, int FORM>
DEVICE void act_to_acts(float* gate_up, u32 n, u32 gated, Acts to) {
    u32 row = blockIdx.x;
    float* gate = gate_up + (u64)row * (gated ? 2 * n : n);
    const float* up = gate + n;
    // A thread reads back only what it wrote itself: quad q is always that of the same thread.
#pragma unroll 1
    for (u32 q = threadIdx.x; 4 * q < n; q += ACT_THREADS) {
        if (n % 4 == 0) {
            float4 g = ((const float4*)gate)[q];
            float4 v = make_float4(act_one<KIND>(g.x), act_one<KIND>(g.y), act_one<KIND>(g.z), act_one<KIND>(g.w));
            if (gated) {
                float4 u = ((const float4*)up)[q];
                v = make_float4(v.x * u.x, v.y * u.y, v.z * u.z, v.w * u.w);
            }
            ((float4*)gate)[q] = v;
            continue;
        }
#pragma unroll 1
        for (u32 i = 4 * q; i < min(n, 4 * q + 4); i++) gate[i] = act_one<KIND>(gate[i]) * (gated ? up[i] : 1.0f);
    }
    write_row<FORM, ACT_THREADS>(to, row, [&](u32 q) { return load_quad(gate, q, n); });
}

#define ACT(name, KIND)                                                                                                \
    KERNEL(ACT_THREADS)                                                                                               \
    name##_f16(float* x, u32 n, u32 gated, Acts to) { act_to_acts<KIND, FORM_F16>(x, n, gated, to); }                 \
    KERNEL(ACT_THREADS)                                                                                               \
    name##_f32(float* x, u32 n, u32 gated, Acts to) { act_to_acts<KIND, FORM_F32>(x, n, gated, to); }                 \
    KERNEL(ACT_THREADS)                                                                                               \
    name##_int8(float* x, u32 n, u32 gated, Acts to) { act_to_acts<KIND, FORM_INT8>(x, n, gated, to); }

ACT(silu, SILU)
ACT(gelu, GELU)
ACT(gelu_tanh, GELU_TANH)

// ---- norms of heads, rope, and keys and values into the cache

struct RopeAppend {
    float* qkv;        // f32 [m][(heads + 2 kv_heads) * d], changed in place
    const float* cos;  // f32 [m][d / 2], or null: no rope
    const float* sin;
    const float* q_norm;  // f32 [d], or null: no norms
    const float* k_norm;
    const u32* places;    // u32 [m]: block * 16 + slot; all ones: nowhere
    Pool pool;
    float eps;
    u32 heads, kv_heads, d;
};

// Pairs of a lane; heads have up to 256 elements.
#define PAIRS 4
#define F16_MOST 65504.0f

// A head in the registers of a warp: lane l has the pairs (i, i + d / 2) of i = l, l + 32, ...
struct Head {
    float a[PAIRS], b[PAIRS];
};

DEVICE Head load_head(const float* x, u32 half) {
    Head h;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        u32 i = threadIdx.x % 32 + 32 * j;
        h.a[j] = i < half ? x[i] : 0.0f;
        h.b[j] = i < half ? x[i + half] : 0.0f;
    }
    return h;
}

DEVICE void norm_head(Head& h, const float* weight, u32 half, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        sum = __fmaf_rn(h.a[j], h.a[j], sum);
        sum = __fmaf_rn(h.b[j], h.b[j], sum);
    }
    sum = warp_sum(sum);
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)(2 * half)) + eps));
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        u32 i = threadIdx.x % 32 + 32 * j;
        if (i < half) {
            h.a[j] = __fmul_rn(__fmul_rn(h.a[j], r), weight[i]);
            h.b[j] = __fmul_rn(__fmul_rn(h.b[j], r), weight[i + half]);
        }
    }
}

DEVICE void turn_head(Head& h, const float* cos, const float* sin, u32 half) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        u32 i = threadIdx.x % 32 + 32 * j;
        if (i < half) {
            float c = cos[i], s = sin[i], a = h.a[j], b = h.b[j];
            h.a[j] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            h.b[j] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
        }
    }
}

// Calls `store(i, element)` for the lane's elements.
template <class Store>
DEVICE void each(const Head& h, u32 half, Store store) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        u32 i = threadIdx.x % 32 + 32 * j;
        if (i < half) {
            store(i, h.a[j]);
            store(i + half, h.b[j]);
        }
    }
}

// Largest magnitude of a head, as bits.
DEVICE u32 most_of(const Head& h) {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) most = max(most, max(magnitude(h.a[j]), magnitude(h.b[j])));
    return __reduce_max_sync(FULL, most);
}

DEVICE u16 clamp_f16(float x) { return f32_to_f16(fminf(fmaxf(x, -F16_MOST), F16_MOST)); }

// Least f16 with which the largest code reaches the greatest magnitude, at most the largest finite one (cpu/kv.rs,
// scale_of).
template <int KV>
DEVICE u16 scale_of(u32 most) {
    float exact = fminf(__fdiv_rn(__uint_as_float(most), KV == KV_INT8 ? 127.0f : 448.0f), F16_MOST);
    u16 near = f32_to_f16(exact);
    return f16_to_f32(near) < exact ? near + 1 : near;
}

// The nearest e4m3 (OCP FP8: no infinities, largest 448), ties to even, saturating; no NaN (cpu/kv.rs, e4m3).
DEVICE u8 e4m3_of(float x) {
    u32 bits = __float_as_uint(fminf(fmaxf(x, -448.0f), 448.0f)), most = bits & 0x7fffffffu;
    // Below 2^-6 codes are multiples of 2^-9; above, the upper bits of a float with another bias.
    u32 small = (u32)__float2int_rn(__fmul_rn(__uint_as_float(most), 512.0f));
    u32 large = (most + 0x7ffffu + (most >> 20 & 1)) >> 20;
    return (u8)(bits >> 24 & 0x80 | (most < 0x3c800000u ? small : large - (120 << 3)));
}

template <int KV>
DEVICE void codes_of(const Head& h, u16 scale, i8* to, u32 half) {
    float s = f16_to_f32(scale);
    float inverse = s > 0.0f ? __fdiv_rn(1.0f, s) : 0.0f;
    each(h, half, [&](u32 i, float x) {
        x = __fmul_rn(x, inverse);
        if (KV == KV_FP8) to[i] = s > 0.0f ? (i8)e4m3_of(x) : 0;
        else to[i] = s > 0.0f ? (i8)__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)) : 0;
    });
}

// A NaN in the key or the value makes the whole key NaN (f16) or its scale (codes), and the value zero: whoever sees the
// token gets NaN, and nobody else does, as a weight of zero times a stored value is zero.
template <int KV>
DEVICE void append(u8* at, u32 slot, u32 d, const Head& k, const Head& v) {
    u32 half = d / 2;
    if (KV == KV_F32) {
        float *to_k = (float*)at + slot * d, *to_v = to_k + BLOCK * d;
        each(k, half, [&](u32 i, float x) { to_k[i] = x; });
        each(v, half, [&](u32 i, float x) { to_v[i] = x; });
        return;
    }
    u32 most_k = most_of(k), most_v = most_of(v);
    bool nan = max(most_k, most_v) > 0x7f800000u;
    if (KV == KV_F16) {
        u16 *to_k = (u16*)at + slot * d, *to_v = to_k + BLOCK * d;
        each(k, half, [&](u32 i, float x) { to_k[i] = nan ? 0x7fff : clamp_f16(x); });
        each(v, half, [&](u32 i, float x) { to_v[i] = nan ? 0 : clamp_f16(x); });
        return;
    }
    u16 scale_k = nan ? 0x7fff : scale_of<KV>(most_k), scale_v = nan ? 0 : scale_of<KV>(most_v);
    if (threadIdx.x % 32 == 0) {
        ((u16*)at)[slot] = scale_k;
        ((u16*)at)[BLOCK + slot] = scale_v;
    }
    i8* codes = (i8*)at + SCALES + slot * d;
    codes_of<KV>(k, scale_k, codes, half);
    codes_of<KV>(v, scale_v, codes + BLOCK * d, half);
}

// Warp w of block (row, y) takes head 4y + w: query heads first, then pairs of a key and a value.
template <int KV>
DEVICE void rope_append(const RopeAppend& p) {
    u32 head = blockIdx.y * 4 + threadIdx.x / 32, row = blockIdx.x, half = p.d / 2;
    if (head >= p.heads + p.kv_heads) return;
    bool key = head >= p.heads;
    float* x = p.qkv + (u64)row * (p.heads + 2 * p.kv_heads) * p.d + head * p.d;
    Head h = load_head(x, half);
    const float* norm = key ? p.k_norm : p.q_norm;
    if (norm) norm_head(h, norm, half, p.eps);
    if (p.cos) turn_head(h, p.cos + (u64)row * half, p.sin + (u64)row * half, half);
    each(h, half, [&](u32 i, float v) { x[i] = v; });
    u32 place = p.places[row];
    if (!key || place == FULL) return;
    Head value = load_head(x + p.kv_heads * p.d, half);
    u8* at = p.pool.base + (place / BLOCK) * p.pool.block + (head - p.heads) * p.pool.head;
    append<KV>(at, place % BLOCK, p.d, h, value);
}

KERNEL(128) rope_append_f16(RopeAppend p) { rope_append<KV_F16>(p); }
KERNEL(128) rope_append_f32(RopeAppend p) { rope_append<KV_F32>(p); }
KERNEL(128) rope_append_int8(RopeAppend p) { rope_append<KV_INT8>(p); }
KERNEL(128) rope_append_fp8(RopeAppend p) { rope_append<KV_FP8>(p); }

// ---- keys and values of slots over those of others

// Pairs (from, to) of places (block * 16 + slot), `count` of them in lists of `each`. Grid: lists x heads. A list is done
// in order, and a thread has the same bytes of all its slots: a slot may be written after it was read. Lists must not
// write what others read.
struct CopySlots {
    const uint2* pairs;
    Pool pool;
    u32 count, each;
    u32 row;   // bytes of a key
    u32 skip;  // bytes of the scales before the keys of a block: SCALES, or 0
};

KERNEL(64) copy_slots(CopySlots p) {
    u32 first = blockIdx.x * p.each, last = min(first + p.each, p.count);
    u8* head = p.pool.base + blockIdx.y * p.pool.head;
    // Words of 8 bytes: a key's, its value's, and one more for the two scales.
    u32 words = p.row / 8, all = 2 * words + (p.skip ? 1 : 0);
    for (u32 w = threadIdx.x; w < all; w += 64) {
        for (u32 i = first; i < last; i++) {
            uint2 places = p.pairs[i];
            const u8* from = head + places.x / BLOCK * p.pool.block;
            u8* to = head + places.y / BLOCK * p.pool.block;
            u32 a = places.x % BLOCK, b = places.y % BLOCK;
            if (w == 2 * words) {
                ((u16*)to)[b] = ((const u16*)from)[a];
                ((u16*)to)[BLOCK + b] = ((const u16*)from)[BLOCK + a];
                continue;
            }
            u32 at = p.skip + w / words * BLOCK * p.row + w % words * 8;
            *(uint2*)(to + at + b * p.row) = *(const uint2*)(from + at + a * p.row);
        }
    }
}
