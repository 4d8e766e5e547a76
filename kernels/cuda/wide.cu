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

#include "wide.h"

template <int CODE, bool PAIR>
DEVICE void wide(const LinearArgs& a) {
    Wide<CODE, PAIR, false> kernel;
    kernel.run(a);
}

#define WIDE(name, code, fold) \
    KERNEL_2(128) wide_##name##_##fold(const LinearArgs a) { wide<code, fold == 32>(a); }

WIDE(int4, CODE_INT4, 16)
WIDE(int4, CODE_INT4, 32)
WIDE(int8, CODE_INT8, 16)
WIDE(int8, CODE_INT8, 32)
WIDE(e2m1, CODE_E2M1, 16)
WIDE(e2m1, CODE_E2M1, 32)
WIDE(e4m3, CODE_E4M3, 16)
WIDE(e4m3, CODE_E4M3, 32)
WIDE(halves, CODE_HALVES, 32)
