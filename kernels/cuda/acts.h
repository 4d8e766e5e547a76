// Rows into the form that the linear kernels read (kernels/src/cuda/acts.rs has the definition), and sums and maxima
// of a block of threads. Needs gpu.h.
#pragma once

#define FORM_F16 0
#define FORM_F32 1
#define FORM_INT8 2

// Of blocks of one size; null if there is none.
struct Int8 {
    i8* q;
    float2* levels;
};

// The struct `ActsArgs` of acts.rs. `h`, `factors` and `sums` are of the form f16, `x` of the form f32; the form int8
// has what its weights need of `x`, blocks of 32 columns and blocks of 16.
struct Acts {
    u16* h;
    float* factors;
    float* sums;
    float* x;
    Int8 int8, int8_small;
    u32 stride;
    u32 rows;
};

// Largest exponent distance that a row's factor covers; a row whose largest magnitude is below 2^-100 keeps fewer bits.
#define LEAST_EXPONENT -100

// Magnitudes are ordered as their bits are, NaN last.
DEVICE u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
DEVICE u32 magnitude(float4 v) {
    return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

// Power of two (as `up`) that brings a row with this largest magnitude into [256, 512), and its inverse. For a row
// with a NaN or an infinity: 0 and NaN.
DEVICE void row_factor(u32 most, float& up, float& factor) {
    int e = max((int)(most >> 23) - 127, LEAST_EXPONENT);
    bool finite = most < 0x7f800000u;
    up = finite ? __uint_as_float((u32)(127 + 8 - e) << 23) : 0.0f;
    factor = finite ? __uint_as_float((u32)(127 + e - 8) << 23) : __uint_as_float(0x7fc00000u);
}

// Over all threads of a block, in one order; every thread gets the result. `shared` has 32 words.
template <int THREADS>
DEVICE float block_sum(float v, float* shared) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += shared[i];
    __syncthreads();
    return sum;
}

template <int THREADS>
DEVICE u32 block_max(u32 v, u32* shared) {
    v = __reduce_max_sync(FULL, v);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) most = max(most, shared[i]);
    __syncthreads();
    return most;
}

// Largest magnitude of a block that is quantized to zeros.
#define TINY 1e-35f

// Quad q of a row in int8, as `quantize` of kernels/src/reference/linear.rs: of a block of LANES quads, which are those
// of as many neighbouring lanes.
template <u32 LANES>
DEVICE void write_int8(const Int8& to, const Acts& acts, u32 row, u32 q, float4 v) {
    u32 top = magnitude(v);
#pragma unroll
    for (u32 o = 1; o < LANES; o *= 2) top = max(top, __shfl_xor_sync(FULL, top, o));
    const float most = __uint_as_float(top);
    const bool finite = top < 0x7f800000u, zero = !finite || most < TINY;
    const float up = zero ? 0.0f : __fdiv_rn(127.0f, most);
    const int a = zero ? 0 : __float2int_rn(__fmul_rn(v.x, up)), b = zero ? 0 : __float2int_rn(__fmul_rn(v.y, up));
    const int c = zero ? 0 : __float2int_rn(__fmul_rn(v.z, up)), d = zero ? 0 : __float2int_rn(__fmul_rn(v.w, up));
    int sum = a + b + c + d;
#pragma unroll
    for (u32 o = 1; o < LANES; o *= 2) sum += __shfl_xor_sync(FULL, sum, o);
    if (q * 4 >= acts.stride) return;
    ((u32*)(to.q + (u64)row * acts.stride))[q] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)d << 24;
    const float scale = !finite ? __uint_as_float(0x7fc00000u) : zero ? 0.0f : __fdiv_rn(most, 127.0f);
    if (q % LANES == 0) to.levels[(u64)(q / LANES) * acts.rows + row] = make_float2(scale, (float)sum);
}

// Writes row `row`: `quad(q)` gives columns 4q to 4q + 3, zeros from the row's end on. A quad is asked for twice, by
// the same thread.
template <int FORM, int THREADS, class Quad>
DEVICE void write_row(const Acts& to, u32 row, Quad quad) {
    u32 quads = to.stride / 4;
    float4* x = (float4*)(to.x + (u64)row * to.stride);
    if (FORM == FORM_F32) {
#pragma unroll 1
        for (u32 q = threadIdx.x; q < quads; q += THREADS) x[q] = quad(q);
        return;
    }
    if (FORM == FORM_INT8) {
#pragma unroll 1
        for (u32 first = 0; first < quads; first += THREADS) {
            const u32 q = first + threadIdx.x;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (q < quads) v = quad(q);
            if (to.x && q < quads) x[q] = v;
            if (to.int8.q) write_int8<8>(to.int8, to, row, q, v);
            if (to.int8_small.q) write_int8<4>(to.int8_small, to, row, q, v);
        }
        return;
    }
    __shared__ u32 shared[32];
    u32 most = 0;
#pragma unroll 1
    for (u32 q = threadIdx.x; q < quads; q += THREADS) most = max(most, magnitude(quad(q)));
    most = block_max<THREADS>(most, shared);
    float up, factor;
    row_factor(most, up, factor);
    if (threadIdx.x == 0) to.factors[row] = factor;
    uint2* h = (uint2*)(to.h + (u64)row * to.stride);
    float* sums = to.sums + (u64)row * (to.stride / 16);
#pragma unroll 1
    for (u32 first = 0; first < quads; first += THREADS) {
        u32 q = first + threadIdx.x;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (q < quads && up != 0.0f) v = quad(q);
        uint2 word = make_uint2(f32_to_f16x2(v.x * up, v.z * up), f32_to_f16x2(v.y * up, v.w * up));
        float sum = (f16_to_f32((u16)word.x) + f16_to_f32((u16)(word.x >> 16))) +
                    (f16_to_f32((u16)word.y) + f16_to_f32((u16)(word.y >> 16)));
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (q < quads) {
            h[q] = word;
            if (q % 4 == 0) sums[q / 4] = sum;
        }
    }
}
