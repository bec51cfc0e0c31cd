/* Reading and writing numbers of either type, for every kernel. 16-bit numbers are bfloat16. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float get(const void *from, long i, int half) {
    return half ? of_bits((uint32_t)((const uint16_t *)from)[i] << 16) : ((const float *)from)[i];
}

INLINE float rounded(float value, int half) { /* to the nearest even bfloat16 */
    if (!half) return value;
    uint32_t bits = bits_of(value);
    uint32_t even = (bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u;
    return of_bits(value != value ? 0x7FC00000u : even);
}

INLINE void put(void *to, long i, float value, int half) {
    if (half)
        ((uint16_t *)to)[i] = (uint16_t)(bits_of(rounded(value, 1)) >> 16);
    else
        ((float *)to)[i] = value;
}

INLINE const void *row_of(const void *from, long row, long width, int half) {
    return (const char *)from + row * width * (half ? 2 : 4);
}
