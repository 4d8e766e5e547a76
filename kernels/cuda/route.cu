// A mixture of experts: which experts a token goes to, its rows sorted by expert for the linear kernels, and the sum of
// what the experts give (kernels/src/cuda/route.rs).
//
// A pair is a token and one of its experts, `token * top + i`. Sorted, the pairs of an expert follow each other from an
// even place on (scales of activations are copied two at a time); what is left over reads token 0 and is not looked at.
// Nothing here depends on what the host does not know: sizes of grids are bounds.
//
// Bound by: launches, for a few tokens; the sum by the bytes of what the experts give.

#include "layout.h"

#define THREADS 256

// An integer in the order of numbers, NaN as -inf, -0 as 0.
DEVICE u32 ordered(float x) {
    if (x != x) x = -INFINITY;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE u64 warp_most(u64 v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const u64 other = __shfl_xor_sync(FULL, v, o);
        v = other > v ? other : v;
    }
    return v;
}

// The experts of the largest logits, the largest first, of equal ones the lower, and their weights: a softmax over all,
// or over those picked. logits: f32 [m][experts]; picks: u32 [m][top]; weights: f32 [m][top]. A warp per token.
KERNEL(32) pick(const float* logits, u32 experts, u32 top, u32 normalized, u32* picks, float* weights) {
    const u32 lane = threadIdx.x;
    logits += (u64)blockIdx.x * experts, picks += (u64)blockIdx.x * top, weights += (u64)blockIdx.x * top;
    // Keys are above 0, and all different.
    u64 last = ~0ull;
    float most = 0.0f, mine[MAX_TOP / 32];
#pragma unroll
    for (u32 part = 0; part < MAX_TOP / 32; part++) {
        mine[part] = 0.0f;
        for (u32 i = part * 32; i < min(top, part * 32 + 32); i++) {
            u64 best = 0;
            for (u32 e = lane; e < experts; e += 32) {
                const u64 key = (u64)ordered(logits[e]) << 32 | ~e;
                if (key < last && key > best) best = key;
            }
            last = warp_most(best);
            const u32 expert = ~(u32)last;
            const float logit = logits[expert];
            if (i == 0) most = logit;
            if (lane == 0) picks[i] = expert;
            if (lane == i % 32) mine[part] = expf(logit - most);
        }
    }
    float sum = 0.0f;
    if (normalized) {
#pragma unroll
        for (u32 part = 0; part < MAX_TOP / 32; part++) sum += mine[part];
    } else {
        for (u32 e = lane; e < experts; e += 32) sum += expf(logits[e] - most);
    }
    sum = warp_sum(sum);
#pragma unroll
    for (u32 part = 0; part < MAX_TOP / 32; part++) {
        const u32 i = part * 32 + lane;
        if (i < top) weights[i] = __fdiv_rn(mine[part], sum);
    }
}

// Sorts `pairs` picks by expert, tokens in their order. rows: u32 [room], the token of each sorted pair; places: u32
// [pairs], where each pair went; tiles: u32 [most][4], expert, first and end of up to `tokens` sorted pairs of one
// expert; those beyond the last are zeros. One block, a warp per expert at a time.
KERNEL(1024)
sort(const u32* picks, u32 pairs, u32 top, u32 experts, u32 tokens, u32* rows, u32 room, u32* places, uint4* tiles,
     u32 most) {
    __shared__ u32 count[MAX_EXPERTS], start[MAX_EXPERTS], tile[MAX_EXPERTS], ends[2];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 e = warp; e < experts; e += 32) {
        u32 n = 0;
        for (u32 p = lane; p < pairs; p += 32) n += picks[p] == e;
        n = __reduce_add_sync(FULL, n);
        if (lane == 0) count[e] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 at = 0, first = 0;
        for (u32 e = 0; e < experts; e++) {
            start[e] = at, tile[e] = first;
            at += (count[e] + 1) / 2 * 2;
            first += (count[e] + tokens - 1) / tokens;
        }
        ends[0] = at, ends[1] = first;
    }
    __syncthreads();
    for (u32 e = warp; e < experts; e += 32) {
        const u32 n = count[e], from = start[e];
        u32 at = from;
        for (u32 first = 0; first < pairs; first += 32) {
            const u32 p = first + lane;
            const bool mine = p < pairs && picks[p] == e;
            const u32 all = __ballot_sync(FULL, mine);
            if (mine) {
                const u32 to = at + __popc(all & ((1u << lane) - 1));
                places[p] = to;
                rows[to] = p / top;
            }
            at += __popc(all);
        }
        if (lane == 0 && n % 2 == 1) rows[from + n] = 0;
        for (u32 i = lane; i * tokens < n; i += 32) {
            tiles[tile[e] + i] = make_uint4(e, from + i * tokens, from + min(n, (i + 1) * tokens), 0);
        }
    }
    for (u32 i = ends[0] + threadIdx.x; i < room; i += 1024) rows[i] = 0;
    for (u32 i = ends[1] + threadIdx.x; i < most; i += 1024) tiles[i] = make_uint4(0, 0, 0, 0);
}

// x[token] += sum of weight * y of its experts, in the order of the picks. y: f32 [room][hidden]; x: f32 [m][hidden].
// Grid: parts of the columns x m.
KERNEL(THREADS) sum(const float* y, const u32* places, const float* weights, u32 top, u32 hidden, float* x) {
    const u32 column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= hidden) return;
    places += (u64)blockIdx.y * top, weights += (u64)blockIdx.y * top;
    float sum = 0.0f;
    for (u32 i = 0; i < top; i++) sum = fmaf(weights[i], y[(u64)places[i] * hidden + column], sum);
    x[(u64)blockIdx.y * hidden + column] += sum;
}
