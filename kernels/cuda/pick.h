// Which tokens and which weight a block of a linear kernel has.
#pragma once
#include "layout.h"

// Tokens from `token` to `end`, of which the block takes the first; `expert` of a mixture, else 0.
struct Part {
    u32 token, end, expert;
};

// The block's, `tokens` of them at most. Without any, `token` is not below `end`.
DEVICE Part part_of(const LinearArgs& a, u32 tokens) {
    if (!a.tiles) return {blockIdx.x * tokens, a.m, 0};
    const uint4 tile = ((const uint4*)a.tiles)[blockIdx.x];
    return {tile.y, tile.z, tile.x};
}

// The same, looked up again rather than kept in registers.
DEVICE Part part_again(const LinearArgs& a, u32 tokens) {
    if (!a.tiles) return {blockIdx.x * tokens, a.m, 0};
    u64 tiles = a.tiles;
    asm volatile("mov.u64 %0, %0;" : "+l"(tiles));
    const uint4 tile = ((const uint4*)tiles)[blockIdx.x];
    return {tile.y, tile.z, tile.x};
}

// The weight that a panel of the launch belongs to; `panel` becomes the weight's own, `column` its first output. Those of
// all experts are alike and lie in equal steps.
DEVICE WeightRef pick(const LinearArgs& a, u32 expert, u32& panel, u32& column) {
    WeightRef w = a.weight[0];
    column = a.column[0];
    u32 first = 0;
#pragma unroll
    for (int i = 1; i < 3; i++) {
        if ((u32)i < a.count && panel >= a.first[i]) {
            w = a.weight[i];
            column = a.column[i];
            first = a.first[i];
        }
    }
    panel -= first;
    const u64 further = expert * w.step;
    w.codes += further, w.scales += further, w.zeros += further, w.supers += further;
    return w;
}
