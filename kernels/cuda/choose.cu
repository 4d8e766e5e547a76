// The likeliest token of each row of logits, and what is wrong with a row that has none.
//
// logits: f32 [rows][vocab]. A key orders tokens as the sampler does (kernels/src/sample.rs, argmax): the larger logit,
// -0 as 0, of equal ones the lower token; NaN and -inf have none. Its upper half is the logit as an integer in the
// order of numbers, its lower half the token's complement; 0 is nothing. Maxima of integers, so the order of blocks
// does not matter. Bound by the bytes of the logits.
#include "gpu.h"

#define THREADS 256
// Tokens of a part: one block.
#define PART 4096

struct Found {
    u64 key;
    u32 nans;
    u32 unused;
};

DEVICE u64 key_of(float logit, u32 token) {
    if (!(logit > -INFINITY)) return 0;
    u32 bits = __float_as_uint(logit + 0.0f);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | ~token;
}

DEVICE Found better(Found a, Found b) {
    return {a.key > b.key ? a.key : b.key, a.nans + b.nans, 0};
}

DEVICE Found best_of_warp(Found f) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        f = better(f, {__shfl_xor_sync(FULL, f.key, o), __shfl_xor_sync(FULL, f.nans, o), 0});
    }
    return f;
}

// found: [rows][parts]. Grid: parts x rows.
KERNEL(THREADS) best_of_parts(const float* logits, u32 vocab, Found* found) {
    __shared__ Found shared[THREADS / 32];
    const float* row = logits + (u64)blockIdx.y * vocab;
    Found best = {0, 0, 0};
    u32 end = min(vocab, (blockIdx.x + 1) * PART);
#pragma unroll 4
    for (u32 token = blockIdx.x * PART + threadIdx.x; token < end; token += THREADS) {
        float logit = row[token];
        best = better(best, {key_of(logit, token), logit != logit, 0});
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < THREADS / 32; i++) best = better(best, shared[i]);
        found[(u64)blockIdx.y * gridDim.x + blockIdx.x] = best;
    }
}

// to: u32 [rows][4]: token, bits of its logit, NaNs, whether there is a token. Grid: rows.
KERNEL(32) best_of_rows(const Found* found, u32 parts, uint4* to) {
    Found best = {0, 0, 0};
    for (u32 i = threadIdx.x; i < parts; i += 32) best = better(best, found[(u64)blockIdx.x * parts + i]);
    best = best_of_warp(best);
    if (threadIdx.x == 0) {
        u32 bits = (u32)(best.key >> 32);
        bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
        to[blockIdx.x] = make_uint4(~(u32)best.key, bits, best.nans, best.key != 0);
    }
}
