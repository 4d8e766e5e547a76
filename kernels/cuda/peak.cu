// What a device can do at most, for shares of it: bytes read, f16 products on tensor cores.
//
// read_all: every vector of 16 bytes once, coalesced; bound by bandwidth. Grid: any, threads 256.
// multiply_all: mma.m16n8k16 on registers, 8 independent sums a warp, 8 * 4096 operations a turn and warp (multiply and
// add). Grid: any, threads 256.
#include "gpu.h"

KERNEL(256) read_all(const uint4* __restrict__ from, u64 vectors, u32* __restrict__ to) {
    u32 sum = 0;
    u64 step = gridDim.x * 256ull;
#pragma unroll 8
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < vectors; i += step) {
        uint4 v = __ldcs(from + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    // Never so in memory that was set to one byte, and the compiler does not know that.
    if (sum == 0x12345678) to[0] = sum;
}

KERNEL(256) multiply_all(u32 turns, float* __restrict__ to) {
    float sums[8][4] = {};
    u32 a = threadIdx.x, b = blockIdx.x;
    for (u32 turn = 0; turn < turns; turn++) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) mma_f16(sums[i], a, b, a, b, a + i, b);
    }
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    if (sum == 1.25f) to[0] = sum;
}
