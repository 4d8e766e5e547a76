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
// activations as [2][TOKENS][16], the second 16 columns 64 bytes further on than that, for the banks' sake.

#include "narrow.h"

template <int CODE, int TOKENS, bool PAIR>
DEVICE void narrow(const LinearArgs& a) {
    Narrow<CODE, TOKENS, PAIR, false> kernel;
    kernel.run(a);
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
    if (a.factors) put<false>(a, token, column, y);
    else put<true>(a, token, column, y);
}
