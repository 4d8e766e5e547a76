// Choosing tokens: the likeliest of each row of logits, and the sampler of kernels/src/sample.rs.
//
// logits: f32 [rows][vocab]. A key orders tokens as the sampler does: the larger logit, -0 as 0, of equal ones the lower
// token; NaN and -inf have none. Its upper half is the logit as an integer in the order of numbers, its lower half the
// token's complement; 0 is nothing. Maxima of integers, so the order of blocks does not matter.
//
// The likeliest tokens are bound by the bytes of the logits. Sampling takes one block per row and reads the row two to
// four times, mostly from the L2 cache: bound by one multiprocessor's bandwidth per row, rows side by side.
#include "gpu.h"

#define THREADS 256
// Tokens of a part: one block.
#define PART 4096

// What became of a row, the last of its four words.
#define NOTHING 0
#define TOKEN 1
#define HOST 2

struct Found {
    u64 key;
    u32 nans;
    u32 unused;
};

// An integer in the order of numbers, -0 as 0; and back.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float number(u32 ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

DEVICE u64 key_of(float logit, u32 token) {
    if (!(logit > -INFINITY)) return 0;
    return (u64)ordered(logit) << 32 | ~token;
}

DEVICE Found better(Found a, Found b) {
    return {a.key > b.key ? a.key : b.key, a.nans + b.nans, 0};
}

DEVICE Found best_of_warp(Found f) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        f = better(f, {__shfl_xor_sync(FULL, f.key, o), __shfl_xor_sync(FULL, f.nans, o), 0});
    }
    return f;
}

// found: [rows][parts]. Grid: parts x rows.
KERNEL(THREADS) best_of_parts(const float* logits, u32 vocab, Found* found) {
    __shared__ Found shared[THREADS / 32];
    const float* row = logits + (u64)blockIdx.y * vocab;
    Found best = {0, 0, 0};
    u32 end = min(vocab, (blockIdx.x + 1) * PART);
#pragma unroll 4
    for (u32 token = blockIdx.x * PART + threadIdx.x; token < end; token += THREADS) {
        float logit = row[token];
        best = better(best, {key_of(logit, token), logit != logit, 0});
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < THREADS / 32; i++) best = better(best, shared[i]);
        found[(u64)blockIdx.y * gridDim.x + blockIdx.x] = best;
    }
}

// to: u32 [rows][4]: token, bits of its logit, NaNs, whether there is a token. Grid: rows.
KERNEL(32) best_of_rows(const Found* found, u32 parts, uint4* to) {
    Found best = {0, 0, 0};
    for (u32 i = threadIdx.x; i < parts; i += 32) best = better(best, found[(u64)blockIdx.x * parts + i]);
    best = best_of_warp(best);
    if (threadIdx.x == 0) {
        u32 logit = best.key ? __float_as_uint(number((u32)(best.key >> 32))) : 0;
        to[blockIdx.x] = make_uint4(~(u32)best.key, logit, best.nans, best.key != 0);
    }
}

// Tokens, u32 [rows], that the step before chooses: from, u32 [rows], says which row of `chosen`, as the other kernels
// leave it, a token comes from. Where nothing was chosen it is token 0, and the host learns of it. Grid: rows / THREADS.
KERNEL(THREADS) follow(u32* tokens, const u32* from, const uint4* chosen, u32 rows) {
    u32 row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    uint4 found = chosen[from[row]];
    tokens[row] = found.w == TOKEN ? found.x : 0;
}

// ---- the sampler
//
// Every operation on logits is the sampler's own, rounded as there. Only exponentials and logarithms differ from the
// host's in their last bits: wherever that could decide, and where more tokens would have to be sorted than fit, the
// answer is HOST, and the host goes on from the same logits.

#define SAMPLERS 1024
#define WARPS (SAMPLERS / 32)
// Tokens that can be sorted.
#define LIST 2048

// The struct `Pick` of kernels/src/cuda/choose.rs: one row.
struct Pick {
    u64 seed, position;
    float scale;  // 1 / temperature
    float floor;  // scaled logits below it are out
    float top_p;  // 1: off
    float repetition, presence, frequency;
    u32 greedy;
    u32 top_k;      // vocab: off
    u32 row;        // of the logits
    u32 first;      // of its changes
    u32 penalized;  // changes (token, times in the output)
    u32 biased;     // then (token, bits of the bias)
};

struct Shared {
    u64 list[LIST];
    Found found[WARPS];
    double sums[WARPS], seconds[WARPS];
    u32 tokens[WARPS];
    u32 count, keep, status;
};

// The likeliest token of a row; `own` becomes that of this thread's part.
DEVICE Found best_of_row(const float* row, u32 vocab, Shared& s, u64& own) {
    Found best = {0, 0, 0};
#pragma unroll 4
    for (u32 token = threadIdx.x; token < vocab; token += SAMPLERS) {
        float logit = row[token];
        best = better(best, {key_of(logit, token), logit != logit, 0});
    }
    own = best.key;
    best = best_of_warp(best);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.found[threadIdx.x / 32] = best;
    __syncthreads();
    best = s.found[0];
    for (int i = 1; i < WARPS; i++) best = better(best, s.found[i]);
    return best;
}

// Penalties and biases, in place; the tokens of each list are distinct.
DEVICE void change(const Pick& p, const uint2* changes, float* row) {
    changes += p.first;
    for (u32 i = threadIdx.x; i < p.penalized; i += SAMPLERS) {
        uint2 c = changes[i];
        float x = row[c.x];
        x = x > 0.0f ? __fdiv_rn(x, p.repetition) : __fmul_rn(x, p.repetition);
        if (c.y > 0) x = __fsub_rn(x, __fadd_rn(p.presence, __fmul_rn(p.frequency, (float)c.y)));
        row[c.x] = x;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.biased; i += SAMPLERS) {
        uint2 c = changes[p.penalized + i];
        row[c.x] = __fadd_rn(row[c.x], __uint_as_float(c.y));
    }
    __syncthreads();
}

DEVICE float scaled(const Pick& p, float max, float x) {
    return x != x ? -INFINITY : __fmul_rn(__fsub_rn(x, max), p.scale);
}

// Four words for tokens 4 block to 4 block + 3 (kernels/src/sample/noise.rs).
DEVICE uint4 philox(const Pick& p, u32 block) {
    u32 x = block, y = (u32)p.position, z = (u32)(p.position >> 32), w = 0;
    u32 k = (u32)p.seed, l = (u32)(p.seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u32 a = __umulhi(0xd2511f53u, x), b = 0xd2511f53u * x, c = __umulhi(0xcd9e8d57u, z), d = 0xcd9e8d57u * z;
        x = c ^ y ^ k;
        y = d;
        z = a ^ w ^ l;
        w = b;
        k += 0x9e3779b9u;
        l += 0xbb67ae85u;
    }
    return make_uint4(x, y, z, w);
}

// The best sum of logit and noise, and the second. Sums that are this close may be in another order on the host.
#define CLOSE 1e-11

struct Drawn {
    double sum, second;
    u32 token;
};

DEVICE Drawn draw_better(Drawn a, Drawn b) {
    bool first = a.sum >= b.sum;
    double less = first ? b.sum : a.sum, second = fmax(a.second, b.second);
    return {first ? a.sum : b.sum, fmax(less, second), first ? a.token : b.token};
}

// The noise of word x within 2e-4: -ln(-ln(u)) with u = (x + 1/2) / 2^32, by a series in 1 - u near 1.
DEVICE float noise_about(u32 x) {
    float w = ((float)~x + 0.5f) * 2.3283064365386963e-10f;
    float e = w < 0.25f ? w * (1.0f + w * (0.5f + w * (0.33333334f + w * (0.25f + w * 0.2f)))) : -logf(((float)x + 0.5f) * 2.3283064365386963e-10f);
    return -logf(e);
}

DEVICE void offer(Drawn& d, float logit, u32 token, u32 x) {
    // Logarithms in f64 are dear, and most tokens are far behind.
    if ((double)(logit + noise_about(x) + 1e-3f) < d.sum) return;
    double u = ((double)x + 0.5) * 2.3283064365386963e-10;
    d = draw_better(d, {(double)logit - log(-log(u)), -INFINITY, token});
}

DEVICE u32 word(uint4 words, u32 token) {
    u32 low = token % 2 ? words.y : words.x, high = token % 2 ? words.w : words.z;
    return token % 4 / 2 ? high : low;
}

DEVICE void finish(Drawn d, Shared& s, uint4* to) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        d = draw_better(d, {__shfl_xor_sync(FULL, d.sum, o), __shfl_xor_sync(FULL, d.second, o),
                            __shfl_xor_sync(FULL, d.token, o)});
    }
    if (threadIdx.x % 32 == 0) {
        s.sums[threadIdx.x / 32] = d.sum;
        s.seconds[threadIdx.x / 32] = d.second;
        s.tokens[threadIdx.x / 32] = d.token;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; i++) d = draw_better(d, {s.sums[i], s.seconds[i], s.tokens[i]});
        *to = make_uint4(d.token, 0, 0, d.sum - d.second > CLOSE ? TOKEN : HOST);
    }
}

// Sorts the first `n`, a power of two, of the list, the largest first.
DEVICE void sort(Shared& s, u32 n) {
    for (u32 size = 2; size <= n; size *= 2) {
        for (u32 step = size / 2; step; step /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < n / 2; i += SAMPLERS) {
                u32 a = 2 * i - i % step, b = a + step;
                u64 x = s.list[a], y = s.list[b];
                if ((x < y) == ((a & size) == 0)) {
                    s.list[a] = y;
                    s.list[b] = x;
                }
            }
        }
    }
    __syncthreads();
}

// Relative error of a mass from above: exponentials and sums here against the sampler's.
#define TOLERANCE 4e-6

DEVICE double share(u64 key) { return (double)expf(number((u32)(key >> 32))); }

// How many of the first `count` of the sorted list hold the share top_p; 0: too close to tell. `total`: of all tokens,
// or less than 0: of these. For one warp.
DEVICE u32 nucleus(const Pick& p, const Shared& s, u32 count, double total) {
    u32 lane = threadIdx.x % 32, part = (count + 31) / 32;
    u32 from = min(count, lane * part), to = min(count, from + part);
    double mine = 0.0;
    for (u32 i = from; i < to; i++) mine += share(s.list[i]);
    double before = mine;
    for (int o = 1; o < 32; o *= 2) {
        double left = __shfl_up_sync(FULL, before, o);
        if (lane >= o) before += left;
    }
    if (total < 0.0) total = __shfl_sync(FULL, before, 31);
    before -= mine;
    double missing = (double)p.top_p * total, slack = TOLERANCE * total;
    u32 keep = LIST + 1;
    for (u32 i = from; i < to && keep > LIST; i++) {
        double with = before + share(s.list[i]);
        // The first token that may have reached it.
        if (with >= missing - slack) keep = with >= missing + slack ? i + 1 : 0;
        before = with;
    }
    // Lanes are in order: the first that found something decides.
    u32 found = __ballot_sync(FULL, keep <= LIST);
    return found ? __shfl_sync(FULL, keep, __ffs(found) - 1) : 0;
}

// picks, to: one per block; changes: of all.
KERNEL(SAMPLERS) sample_rows(float* logits, u32 vocab, const Pick* picks, const uint2* changes, uint4* to) {
    __shared__ Shared s;
    const Pick p = picks[blockIdx.x];
    float* row = logits + (u64)p.row * vocab;
    to += blockIdx.x;
    u64 own;
    Found best = best_of_row(row, vocab, s, own);
    // An infinity of the model's own is an error, which the host knows by this logit.
    bool infinite = best.key >> 32 == ordered(INFINITY);
    if (!infinite && p.penalized + p.biased > 0) {
        change(p, changes, row);
        best = best_of_row(row, vocab, s, own);
    }
    float max = number((u32)(best.key >> 32));
    if (infinite || best.key == 0 || p.greedy || max == INFINITY) {
        u32 bits = infinite ? __float_as_uint(INFINITY) : 0;
        if (threadIdx.x == 0) *to = make_uint4(~(u32)best.key, bits, best.nans, best.key ? TOKEN : NOTHING);
        return;
    }
    Drawn drawn = {-INFINITY, -INFINITY, 0};
    if (p.top_k >= vocab && p.top_p >= 1.0f) {
        for (u32 block = threadIdx.x; 4 * block < vocab; block += SAMPLERS) {
            uint4 words = philox(p, block);
            for (u32 token = 4 * block; token < min(vocab, 4 * block + 4); token++) {
                float logit = scaled(p, max, row[token]);
                if (logit >= p.floor && logit > -INFINITY) offer(drawn, logit, token, word(words, token));
            }
        }
        finish(drawn, s, to);
        return;
    }
    // So many threads have a token at least as likely as this: so many tokens are in the list.
    s.list[threadIdx.x] = own ? (u64)ordered(scaled(p, max, number((u32)(own >> 32)))) << 32 : 0;
    sort(s, SAMPLERS);
    u32 wanted = p.top_k < vocab ? p.top_k : 256;
    u32 threshold = (u32)(s.list[min(wanted, SAMPLERS) - 1] >> 32);
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    double mass = 0.0;
    bool all = p.top_k >= vocab && p.top_p < 1.0f;
    for (u32 token = threadIdx.x; token < vocab; token += SAMPLERS) {
        float logit = scaled(p, max, row[token]);
        if (all) mass += (double)expf(logit);
        if (logit == -INFINITY || ordered(logit) < threshold) continue;
        u32 at = atomicAdd(&s.count, 1u);
        if (at < LIST) s.list[at] = (u64)ordered(logit) << 32 | ~token;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) mass += __shfl_xor_sync(FULL, mass, o);
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = mass;
    __syncthreads();
    u32 count = s.count, size = 2;
    if (count > LIST) {
        if (threadIdx.x == 0) *to = make_uint4(0, 0, 0, HOST);
        return;
    }
    while (size < count) size *= 2;
    for (u32 i = count + threadIdx.x; i < size; i += SAMPLERS) s.list[i] = 0;
    sort(s, size);
    count = min(count, p.top_k);
    if (p.top_p < 1.0f) {
        if (threadIdx.x < 32) {
            mass = 0.0;
            for (int i = 0; i < WARPS; i++) mass += s.sums[i];
            u32 keep = nucleus(p, s, count, all ? mass : -1.0);
            if (threadIdx.x == 0) s.keep = keep;
        }
        __syncthreads();
        count = s.keep;
        if (count == 0) {
            if (threadIdx.x == 0) *to = make_uint4(0, 0, 0, HOST);
            return;
        }
    }
    for (u32 i = threadIdx.x; i < count; i += SAMPLERS) {
        float logit = number((u32)(s.list[i] >> 32));
        u32 token = ~(u32)s.list[i];
        if (logit >= p.floor) offer(drawn, logit, token, word(philox(p, token / 4), token));
    }
    __syncthreads();
    finish(drawn, s, to);
}
