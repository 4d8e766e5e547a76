// Norms of rows that a block of threads has. Needs acts.h.
#pragma once

#define THREADS 256

DEVICE float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

// Columns 4q to 4q + 3 of a row of `n`, zeros beyond.
DEVICE float4 load_quad(const float* row, u32 q, u32 n) {
    if (n % 4 == 0) return 4 * q < n ? ((const float4*)row)[q] : zero4();
    float4 v = zero4();
    if (4 * q < n) v.x = row[4 * q];
    if (4 * q + 1 < n) v.y = row[4 * q + 1];
    if (4 * q + 2 < n) v.z = row[4 * q + 2];
    if (4 * q + 3 < n) v.w = row[4 * q + 3];
    return v;
}

// Mean and 1 / deviation of a row. RMS norms have mean 0.
struct Moments {
    float mean, r;
};

// Of the numbers `at(0)` to `at(n - 1)`.
template <bool LAYER, class At>
DEVICE Moments moments_of(At at, u32 n, float eps, float* shared) {
    float mean = 0.0f, sum = 0.0f;
    if (LAYER) {
#pragma unroll 4
        for (u32 i = threadIdx.x; i < n; i += THREADS) sum += at(i);
        mean = __fdiv_rn(block_sum<THREADS>(sum, shared), (float)n);
        sum = 0.0f;
    }
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float d = LAYER ? at(i) - mean : at(i);
        sum = __fmaf_rn(d, d, sum);
    }
    sum = block_sum<THREADS>(sum, shared);
    return {mean, __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)n) + eps))};
}

template <bool LAYER>
DEVICE Moments moments(const float* x, u32 n, float eps, float* shared) {
    return moments_of<LAYER>([&](u32 i) { return x[i]; }, n, eps, shared);
}

template <bool LAYER>
DEVICE float norm_one(Moments m, float x, float w, float b) {
    if (LAYER) return __fmaf_rn(__fmul_rn(__fsub_rn(x, m.mean), m.r), w, b);
    return __fmul_rn(__fmul_rn(x, m.r), w);
}
