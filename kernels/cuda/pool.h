// The KV cache as kernels take it (kernels/src/cuda/kv.rs has the layout).
#pragma once

// One layer's part.
struct Pool {
    u8* base;   // of block 0, at the layer
    u64 block;  // bytes from block to block
    u64 head;   // bytes from head to head
};

#define KV_F16 0
#define KV_F32 1
#define KV_INT8 2
#define KV_FP8 3
// Tokens of a block, and bytes of the scales of an int8 or fp8 (block, head).
#define BLOCK 16
#define SCALES 64
