// What the tensor-core kernels of linear layers have in common: slices, where weights of a launch begin, copies of
// scales and zeros to shared memory and from there to registers, outputs. See linear.cu.
#pragma once
#include "codes.h"
#include "pick.h"

// A kernel of which two blocks are to fit on a multiprocessor.
#define KERNEL_2(threads) extern "C" __global__ void __launch_bounds__(threads, 2)

// ---- what a slice is

struct Slice {
    u32 start, end;  // columns
};

DEVICE Slice slice_of(const WeightRef& w, u32 slices, u32 slice) {
    u64 folds = w.k_pad / w.fold;
    Slice s;
    s.start = (u32)(folds * slice / slices) * w.fold;
    s.end = (u32)(folds * (slice + 1) / slices) * w.fold;
    return s;
}


// ---- addresses in shared memory, as numbers

// A number that is kept: the compiler would rather compute such again in every round of a loop.
DEVICE u32 fixed(u32 x) {
    asm volatile("mov.u32 %0, %0;" : "+r"(x));
    return x;
}

// 16 bytes at an address and a constant.
template <int OFFSET>
DEVICE uint4 shared_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4+%5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at), "n"(OFFSET)
                 : "memory");
    return v;
}

template <int OFFSET>
DEVICE uint2 shared_8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "r"(at), "n"(OFFSET) : "memory");
    return v;
}

template <int OFFSET>
DEVICE u32 shared_4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(at), "n"(OFFSET) : "memory");
    return v;
}

// Copies the first `bytes` of 16, and zeros for the rest; where that is 0, `global` may point anywhere.
template <int TO, int FROM>
DEVICE void copy_some(u32 to, const u8* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0+%3], [%1+%4], 16, %2;" ::"r"(to), "l"(global), "r"(bytes), "n"(TO),
                 "n"(FROM)
                 : "memory");
}

// Copies 16.
template <int TO, int FROM>
DEVICE void copy_whole(u32 to, const u8* global) {
    asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" ::"r"(to), "l"(global), "n"(TO), "n"(FROM)
                 : "memory");
}

// f(0), f(1), ... f(N - 1) with constants.
template <int I>
struct Constant {
    static const int VALUE = I;
};
template <int N, int I = 0, typename F>
METHOD void each(F f) {
    if constexpr (I < N) {
        f(Constant<I>());
        each<N, I + 1>(f);
    }
}

// ---- a stage of the pipeline

// Piece p of a quad lies at place p ^ exchange(quad), so that lanes t = 0..3, which read the same piece of different
// quads, are in different banks. exchange(a + b) = exchange(a) ^ exchange(b) if a and b have no bit in common.
template <bool PAIR>
DEVICE constexpr u32 exchange(u32 quad) {
    return PAIR ? quad & 6 : (quad & 3) * 2;
}

// Copies `bytes` (a multiple of 16, at most 512) by the warp.
DEVICE void copy_row(u8* to, DevicePtr from, u32 bytes, int lane) {
    if (lane * 16 < bytes) copy_async_16(to + lane * 16, (const u8*)from + lane * 16, true);
}

// A place among the columns of a weight: its group, where its fold lies in that, and where it lies in its fold.
struct Place {
    u32 column, in_fold, in_group, group;
};

// Where a fold begins.
DEVICE Place place_at(const WeightRef& w, u32 column) {
    Place p;
    p.column = column;
    p.group = column / w.group;
    p.in_group = column - p.group * w.group;
    p.in_fold = 0;
    return p;
}

DEVICE void advance(Place& p, const WeightRef& w, u32 columns) {
    p.column += columns, p.in_fold += columns;
    if (p.in_fold < w.fold) return;
    p.in_fold = 0, p.in_group += w.fold;
    if (p.in_group < w.group) return;
    p.in_group = 0, p.group++;
}

// Scales, zeros and minima of `columns` columns, which lie in one fold: zero codes if they begin it, the rest if they
// end it.
template <int CODE>
DEVICE void copy_grid(const LinearArgs& a, const WeightRef& w, u8* stage, int slot, u32 panel, const Place& at,
                      u32 columns, int lane) {
    const bool ends = at.in_fold + columns == w.fold;
    if (!ends && (at.in_fold > 0 || w.zero != ZERO_CODE)) return;
    const size_t cell = (size_t)panel * w.groups + at.group;
    if (at.in_fold == 0 && w.zero == ZERO_CODE) {
        const u32 bytes = CODE == CODE_INT4 ? 32 : 64;
        copy_row(stage + a.at_zeros + slot * bytes, w.zeros + cell * bytes, bytes, lane);
    }
    if (!ends) return;
    const u32 bytes = w.scale == SCALE_F32 ? 256 : w.scale == SCALE_NESTED ? 64 : 128;
    copy_row(stage + a.at_scales + slot * bytes, w.scales + cell * bytes, bytes, lane);
    if (w.zero == ZERO_MIN) copy_row(stage + a.at_zeros + slot * bytes, w.zeros + cell * bytes, bytes, lane);
    if (w.scale == SCALE_NESTED) {
        const u32 row = w.zero == ZERO_MIN ? 256 : 128;
        const size_t super = (size_t)panel * w.row_supers + at.column / SUPER_COLUMNS;
        copy_row(stage + a.at_supers + slot * row, w.supers + super * row, row, lane);
    }
}

// ---- sums

// f32 of N (2 or 4) scales or minima that lie together: rows `row`.. of a slot.
template <int N>
DEVICE void some(float (&out)[N], const u8* slot, u32 kind, int row) {
    if (kind == SCALE_F32) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 v = *(const float2*)(slot + (row + i) * 4);
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else if (kind == SCALE_NESTED) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const char2 v = *(const char2*)(slot + row + i);
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else {
        u32 v[N / 2];
        if (N == 4) *(uint2*)&v[0] = *(const uint2*)(slot + row * 2);
        else v[0] = *(const u32*)(slot + row * 2);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            out[i] = kind == SCALE_F16 ? f16_to_f32((u16)v[i / 2]) : __uint_as_float(v[i / 2] << 16);
            out[i + 1] = kind == SCALE_F16 ? f16_to_f32((u16)(v[i / 2] >> 16)) : __uint_as_float(v[i / 2] & 0xffff0000u);
        }
    }
}

// Scales (level 0) or minima (level 1) of N rows from `row` on, the upper level multiplied in.
template <int N>
DEVICE void grid_of(float (&out)[N], const LinearArgs& a, const WeightRef& w, const u8* stage, int slot, int level,
                    int row) {
    const u32 bytes = w.scale == SCALE_F32 ? 256 : w.scale == SCALE_NESTED ? 64 : 128;
    some(out, stage + (level ? a.at_zeros : a.at_scales) + slot * bytes, w.scale, row);
    if (w.scale == SCALE_NESTED) {
        float d[N];
        some(d, stage + a.at_supers + slot * (w.zero == ZERO_MIN ? 256 : 128) + level * 128, SCALE_F16, row);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] *= d[i];
    }
}

// The same for the two rows of the lane in each of N fragments from `from` on (0, or 0 or 2 if N is 2).
template <int CODE, int N>
DEVICE void levels_of(float (&out)[N][2], const LinearArgs& a, const WeightRef& w, const u8* stage, int slot, int level,
                      int g, int from) {
    if (Quad<CODE>::LANE == 1) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v[N];
            grid_of<N>(v, a, w, stage, slot, level, row_of<CODE>(g, 0, half) + from);
#pragma unroll
            for (int i = 0; i < N; i++) out[i][half] = v[i];
        }
    } else {
#pragma unroll
        for (int p = 0; p < N; p += 2) {
            float v[4];
            grid_of<4>(v, a, w, stage, slot, level, row_of<CODE>(g, p, 0) + from * 16);
            out[p][0] = v[0], out[p][1] = v[1], out[p + 1][0] = v[2], out[p + 1][1] = v[3];
        }
    }
}

// What those rows subtract, out of zero codes.
template <int CODE, int N>
DEVICE void load_zeros(u32 (&zero)[N][2], const LinearArgs& a, const u8* stage, int slot, int g, int from) {
    if (CODE == CODE_INT4) {
        const u32 word = *(const u32*)(stage + a.at_zeros + slot * 32 + g * 4) >> (8 * from);
#pragma unroll
        for (int i = 0; i < N; i++) {
            zero[i][0] = zero_word<CODE>(word >> (8 * i) & 15, 0);
            zero[i][1] = zero_word<CODE>(word >> (8 * i + 4) & 15, 1);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 word = *(const u32*)(stage + a.at_zeros + slot * 64 + (i / 2 * 2 + from) * 16 + g * 4);
            zero[i][0] = zero_word<CODE>(word >> (16 * (i % 2)) & 255, 0);
            zero[i][1] = zero_word<CODE>(word >> (16 * (i % 2) + 8) & 255, 1);
        }
    }
}

// The same where zero is one code for all, or there are minima.
template <int CODE, int N>
DEVICE void same_zeros(u32 (&zero)[N][2], const WeightRef& w) {
    const u32 z = w.zero == ZERO_MIN ? 0 : CODE == CODE_INT4 ? 8 : 128;
#pragma unroll
    for (int i = 0; i < N; i++) zero[i][0] = zero_word<CODE>(z, 0), zero[i][1] = zero_word<CODE>(z, 1);
}

// The output of a row and a token once all columns are in.
DEVICE void put_plain(const LinearArgs& a, u32 token, u32 column, float y) {
    if (a.bias) y += ((const float*)a.bias)[a.offset + column];
    float* to = (float*)a.to + (size_t)token * a.to_stride + a.offset + column;
    *to = a.add ? *to + y : y;
}

// The same, times the power of two of the token's activations; `INT` has none.
template <bool INT>
DEVICE void put(const LinearArgs& a, u32 token, u32 column, float y) {
    put_plain(a, token, column, INT ? y : y * ((const float*)a.factors)[token]);
}
