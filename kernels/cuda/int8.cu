// Linear layers on integer tensor cores: y[token][n] = sum over k of w[n][k] * x[token][k], for codes that are whole
// numbers (int4, int8, twice e2m1) and activations in int8 (acts.rs). As the CPU's default mode: sums of a block of 32
// or 16 columns are exact, and scaled in f32; their order is that of kernels/src/cuda/linear.rs, whatever the number
// of tokens.
//
// Blocks, warps, slices and the pipeline are those of linear.cu (`int8_..`: up to 8 or 32 tokens) and wide.cu
// (`wide_..`). A stage holds activations i8 [TOKENS][32] ([2][TOKENS][16], the second 64 bytes further on, of the
// kernels `_16`, whose blocks have 16 columns) and, for each block, scale and sum of each token, f32 [TOKENS][2].
//
// Bound by: memory for few tokens, then by the f32 operations that scale the sums: two for each of the 128 sums that an
// instruction of the tensor cores makes, eight of a warp.

#include "narrow.h"
#include "wide.h"

#define INTEGER(name, code, fold)                                                                                    \
    KERNEL(256) name##_##fold##_8(const LinearArgs a) { Narrow<code, 8, fold == 32, true>().run(a); }                \
    KERNEL(256) name##_##fold##_32(const LinearArgs a) { Narrow<code, 32, fold == 32, true>().run(a); }              \
    KERNEL_2(128) wide_##name##_##fold(const LinearArgs a) { Wide<code, fold == 32, true>().run(a); }

INTEGER(four_int8, CODE_INT4, 16)
INTEGER(four_int8, CODE_INT4, 32)
INTEGER(eight_int8, CODE_INT8, 16)
INTEGER(eight_int8, CODE_INT8, 32)
