/* LayerNorm(dropout(x) + y) and its gradients, each in one go.
 *
 * Rows [first, last) belong to the caller's thread, and every row is computed alike however rows
 * are shared out. Sums over rows go to a buffer of the thread. 16-bit numbers are bfloat16; sums
 * are fp32 throughout. Compiled with free order of additions, but with NaN and infinity kept.
 */
#include "numbers.h"

enum { BLOCK = 64 }; /* rows summed before they are added to a larger sum */

/* Dropout keeps element i where its word reaches the threshold: as deberta_ds/model/keep.py. */
typedef struct {
    uint32_t key, second_key, threshold; /* 0: nothing is dropped */
    float scale;                         /* of what is kept */
} Dropout;

INLINE float kept(Dropout d, uint32_t i) {
    uint32_t word = i + d.key;
    word = (word ^ word >> 16) * 0x21F0AAADu ^ d.second_key;
    word = (word ^ word >> 15) * 0xD35A2D97u;
    word ^= word >> 15;
    return word >= d.threshold ? d.scale : 0.0f;
}

INLINE void norm_row(const void *x, const void *y, const float *weight, const float *bias,
                     void *sum, void *out, float *statistics, long row, long width, float epsilon,
                     Dropout dropout, int x_half, int y_half) {
    float total = 0, squares = 0;
    uint32_t place = (uint32_t)(row * width);
    if (dropout.threshold)
        for (long i = 0; i < width; i++)
            put(sum, i, get(x, i, x_half) * kept(dropout, place + (uint32_t)i) + get(y, i, y_half),
                y_half);
    else
        for (long i = 0; i < width; i++)
            put(sum, i, get(x, i, x_half) + get(y, i, y_half), y_half);
    for (long i = 0; i < width; i++) total += get(sum, i, y_half);
    float mean = total / width;
    for (long i = 0; i < width; i++) {
        float apart = get(sum, i, y_half) - mean;
        squares += apart * apart;
    }
    float inverse = 1 / sqrtf(squares / width + epsilon);
    for (long i = 0; i < width; i++)
        put(out, i, (get(sum, i, y_half) - mean) * inverse * weight[i] + bias[i], y_half);
    statistics[0] = mean;
    statistics[1] = inverse;
}

INLINE void norm_rows(const void *x, const void *y, const float *weight, const float *bias,
                      void *sum, void *out, float *statistics, long first, long last, long width,
                      float epsilon, Dropout dropout, int x_half, int y_half) {
    for (long row = first; row < last; row++)
        norm_row(row_of(x, row, width, x_half), row_of(y, row, width, y_half), weight, bias,
                 (void *)row_of(sum, row, width, y_half), (void *)row_of(out, row, width, y_half),
                 statistics + 2 * row, row, width, epsilon, dropout, x_half, y_half);
}

void residual_norm(long first, long last, const void *x, const void *y, const float *weight,
                   const float *bias, void *sum, void *out, float *statistics, long width,
                   float epsilon, uint32_t key, uint32_t second_key, uint32_t threshold,
                   float scale, int x_half, int y_half) {
    Dropout d = {key, second_key, threshold, scale};
    if (x_half && y_half)
        norm_rows(x, y, weight, bias, sum, out, statistics, first, last, width, epsilon, d, 1, 1);
    else if (x_half)
        norm_rows(x, y, weight, bias, sum, out, statistics, first, last, width, epsilon, d, 1, 0);
    else
        norm_rows(x, y, weight, bias, sum, out, statistics, first, last, width, epsilon, d, 0, 0);
}

INLINE void norm_gradients(const void *out_grad, const void *sum, const float *statistics,
                           const float *weight, void *x_grad, void *y_grad, float *weight_grad,
                           float *bias_grad, float *block_sums, long first, long last, long width,
                           Dropout dropout, int x_half, int y_half) {
    float *weight_part = block_sums, *bias_part = block_sums + width;
    for (long start = first; start < last; start += BLOCK) {
        memset(block_sums, 0, 2 * width * sizeof *block_sums);
        for (long row = start; row < last && row < start + BLOCK; row++) {
            const void *g = row_of(out_grad, row, width, y_half);
            const void *s = row_of(sum, row, width, y_half);
            void *x = (void *)row_of(x_grad, row, width, x_half);
            void *y = (void *)row_of(y_grad, row, width, y_half);
            float mean = statistics[2 * row], inverse = statistics[2 * row + 1];
            float total = 0, along = 0;
            for (long i = 0; i < width; i++) {
                float normal = (get(s, i, y_half) - mean) * inverse, grad = get(g, i, y_half);
                weight_part[i] += grad * normal;
                bias_part[i] += grad;
                total += grad * weight[i];
                along += grad * weight[i] * normal;
            }
            total /= width;
            along /= width;
            uint32_t place = (uint32_t)(row * width);
            for (long i = 0; i < width; i++) {
                float normal = (get(s, i, y_half) - mean) * inverse;
                float grad = (get(g, i, y_half) * weight[i] - total - normal * along) * inverse;
                float share = dropout.threshold ? kept(dropout, place + (uint32_t)i) : 1.0f;
                put(y, i, grad, y_half);
                put(x, i, grad * share, x_half);
            }
        }
        for (long i = 0; i < width; i++) weight_grad[i] += weight_part[i];
        for (long i = 0; i < width; i++) bias_grad[i] += bias_part[i];
    }
}

void residual_norm_gradients(long first, long last, const void *out_grad, const void *sum,
                             const float *statistics, const float *weight, void *x_grad,
                             void *y_grad, float *sums, long width, uint32_t key,
                             uint32_t second_key, uint32_t threshold, float scale, int x_half,
                             int y_half) {
    /* sums: [4, width] of this thread: of weight, bias, and two to work in */
    float *w = sums, *b = sums + width, *t = sums + 2 * width;
    Dropout d = {key, second_key, threshold, scale};
    memset(sums, 0, 2 * width * sizeof *sums);
    if (x_half && y_half)
        norm_gradients(out_grad, sum, statistics, weight, x_grad, y_grad, w, b, t, first, last,
                       width, d, 1, 1);
    else if (x_half)
        norm_gradients(out_grad, sum, statistics, weight, x_grad, y_grad, w, b, t, first, last,
                       width, d, 1, 0);
    else
        norm_gradients(out_grad, sum, statistics, weight, x_grad, y_grad, w, b, t, first, last,
                       width, d, 0, 0);
}
