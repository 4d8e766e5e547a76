// What the rows of a head begin with, and Medusa's blocks (models/src/spec/head.rs). A block of threads takes one row,
// as in ops.cu.
#include "gpu.h"
#include "acts.h"
#include "norm.h"

#define NORM_RMS 0
#define NORM_LAYER 1
#define NORM_NONE 2

// Rows that are normed, or not.
struct Half {
    const float* x;       // f32 [m][n]
    const float* weight;  // f32 [n], as its norm has them
    const float* bias;
    u32 kind;
    float eps;
};

struct Join {
    Half embedding, state;
    const u32* order;      // u32 [2 n], or null: column j of the result is column order[j] of both halves
    const u32* positions;  // u32 [m], or null: the embedding of a row at position 0 is zeros
    u32 n;
    u32 state_first;
};

// A row of a half.
struct HalfRow {
    const float* x;
    bool zero;
    Moments moments;

    METHOD float at(u32 i) const { return zero ? 0.0f : x[i]; }
};

DEVICE HalfRow half_row(const Half& half, u32 row, u32 n, bool zero, float* shared) {
    HalfRow r = {half.x + (u64)row * n, zero, {0.0f, 0.0f}};
    auto at = [&](u32 i) { return r.at(i); };
    if (half.kind == NORM_RMS) r.moments = moments_of<false>(at, n, half.eps, shared);
    if (half.kind == NORM_LAYER) r.moments = moments_of<true>(at, n, half.eps, shared);
    return r;
}

DEVICE float half_value(const Half& half, const HalfRow& r, u32 i) {
    float x = r.at(i);
    if (half.kind == NORM_NONE) return x;
    if (half.kind == NORM_RMS) return norm_one<false>(r.moments, x, half.weight[i], 0.0f);
    return norm_one<true>(r.moments, x, half.weight[i], half.bias[i]);
}

// Normed embedding and normed state side by side. Grid: m blocks.
template <int FORM>
DEVICE void join_to_acts(const Join& join, const Acts& to) {
    u32 row = blockIdx.x, n = join.n;
    __shared__ float shared[32];
    HalfRow embedding = half_row(join.embedding, row, n, join.positions && join.positions[row] == 0, shared);
    HalfRow state = half_row(join.state, row, n, false, shared);
    write_row<FORM, THREADS>(to, row, [&](u32 q) {
        float v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 c = 4 * q + i;
            v[i] = 0.0f;
            if (c >= 2 * n) continue;
            if (join.order) c = join.order[c];
            u32 second = c >= n;
            c -= second ? n : 0;
            v[i] = second == join.state_first ? half_value(join.embedding, embedding, c)
                                              : half_value(join.state, state, c);
        }
        return make_float4(v[0], v[1], v[2], v[3]);
    });
}

KERNEL(THREADS) join_f16(Join join, Acts to) { join_to_acts<FORM_F16>(join, to); }
KERNEL(THREADS) join_f32(Join join, Acts to) { join_to_acts<FORM_F32>(join, to); }
KERNEL(THREADS) join_int8(Join join, Acts to) { join_to_acts<FORM_INT8>(join, to); }

// to += silu(x), both f32 [m][n]. Grid: m blocks.
KERNEL(THREADS) add_silu(const float* x, u32 n, float* to) {
    x += (u64)blockIdx.x * n;
    to += (u64)blockIdx.x * n;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS) to[i] += __fdiv_rn(x[i], 1.0f + expf(-x[i]));
}
