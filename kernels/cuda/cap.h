// Soft caps: cap * tanh(x / cap).
#pragma once

// As on the CPU (cpu/lanes.rs, soft_cap, with the coefficients from there) but for the exponential's last bits.
DEVICE float soft_cap(float x, float cap) {
    float y = __fdiv_rn(x, cap), size = fabsf(y), square = y * y;
    float p = -0.0056919856f;
    p = __fmaf_rn(p, square, 0.020626292f);
    p = __fmaf_rn(p, square, -0.05373532f);
    p = __fmaf_rn(p, square, 0.13331382f);
    p = __fmaf_rn(p, square, -0.3333328f);
    float near = __fmaf_rn(p * square, y, y);
    float far = 1.0f - __fdiv_rn(2.0f, expf(2.0f * size) + 1.0f);
    return cap * (size < 0.625f ? near : copysignf(far, y));
}
