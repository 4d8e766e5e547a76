// Structs and constants that kernels share with the program. Made of kernels/src/cuda/layout.rs by its
// test with QUERN_WRITE_LAYOUT=1; what they mean stands there.
#pragma once
#include "gpu.h"

typedef u64 DevicePtr;

#define PANEL_ROWS 64
#define SUPER_COLUMNS 256
#define CODE_INT4 0
#define CODE_INT8 1
#define CODE_E2M1 2
#define CODE_E4M3 3
#define CODE_HALVES 4
#define CODE_F32 5
#define CODE_F16 6
#define CODE_BF16 7
#define ZERO_MID 0
#define ZERO_CODE 1
#define ZERO_MIN 2
#define SCALE_F32 0
#define SCALE_F16 1
#define SCALE_BF16 2
#define SCALE_NESTED 3
#define SCALE_NONE 4
#define SLICES 8
#define STAGE_COLUMNS 32
#define SUMS_PITCH 68
#define WIDE_TOKENS 64
#define EXACT_TOKENS 8
#define MAX_EXPERTS 1024
#define MAX_TOP 64

struct WeightRef {
    DevicePtr codes;
    DevicePtr scales;
    DevicePtr zeros;
    DevicePtr supers;
    u64 step;
    u32 n;
    u32 k;
    u32 k_pad;
    u32 group;
    u32 groups;
    u32 fold;
    u32 code;
    u32 zero;
    u32 scale;
    u32 row_supers;
};

struct LinearArgs {
    WeightRef weight[3];
    DevicePtr h;
    DevicePtr factors;
    DevicePtr sums;
    DevicePtr x;
    DevicePtr to;
    DevicePtr bias;
    DevicePtr partial;
    DevicePtr tiles;
    u32 first[3];
    u32 column[3];
    u32 count;
    u32 m;
    u32 stride;
    u32 to_stride;
    u32 add;
    u32 splits;
    u32 columns;
    u32 offset;
    u32 at_h;
    u32 at_scales;
    u32 at_zeros;
    u32 at_supers;
    u32 at_sums;
    u32 stage;
    u32 rows;
    u32 unused;
};
