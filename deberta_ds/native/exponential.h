/* The exponential of numbers up to 0, in a form that compilers make vectors of. */
#include <math.h>

INLINE float exponential(float x) { /* to 2e-7; 0 below -87; NaN stays */
    float whole = rintf(x * 1.44269504f);
    float part = fmaf(x, 1.92596299e-8f, fmaf(x, 1.44269502f, -whole)); /* of log2(e) x */
    float power = 1.52527338e-5f;                                       /* 2^part by Taylor */
    power = fmaf(power, part, 1.54035304e-4f);
    power = fmaf(power, part, 1.33335581e-3f);
    power = fmaf(power, part, 9.61812911e-3f);
    power = fmaf(power, part, 5.55041087e-2f);
    power = fmaf(power, part, 2.40226507e-1f);
    power = fmaf(power, part, 6.93147181e-1f);
    power = fmaf(power, part, 1.0f);
    float value = power * of_bits((uint32_t)((int32_t)whole + 127) << 23);
    return x < -87.0f ? 0.0f : value;
}
