/* Products of matrices in blocks, and the layouts that they want: of bfloat16 by AMX's tiles or
 * vectors of sixteen pairs or, where FP32 is defined, of fp32 by vectors of sixteen or, with AVX2,
 * eight.
 *
 * A matrix on the left is [rows, inner]; one on the right is [inner / PAIR, columns, PAIR]: of
 * bfloat16, rows 2 i and 2 i + 1 lie side by side. Sums are fp32. Sizes are multiples of 32.
 */
#include "numbers.h"

#include <stdlib.h>

/* HERE: whether the processor has what the products need. */
#if defined(FP32) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
#define HERE
#elif !defined(FP32) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define HERE
#define TILES
#elif !defined(FP32) && defined(__AVX512BF16__)
#define HERE
#endif

#ifdef HERE
#include <immintrin.h>

#ifdef __AVX512F__
enum { LANES = 16, HIGH = 8 }; /* numbers of a vector; rows whose sums stay in registers */
#else
enum { LANES = 8, HIGH = 4 };
#endif
enum { STRIP = 32 }; /* rows worked on at once */

#ifdef FP32
typedef float Number;
enum { HALF = 0, PAIR = 1 };
#define KERNEL(name) name##_fp32
#else
typedef uint16_t Number;
enum { HALF = 1, PAIR = 2 };
#define KERNEL(name) name##_bf16
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Order __attribute__((vector_size(4 * LANES)));
typedef int32_t LooseOrder __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define EACH_LANE _Pragma("GCC unroll 16") for (long i = 0; i < LANES; i++)

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long padded(long count) { return (count + STRIP - 1) / STRIP * STRIP; }
/* Memory of a thread, handed out in pieces. */
typedef struct {
    char *next;
} Room;

INLINE void *take(Room *room, long bytes) {
    char *piece = room->next;
    room->next += (bytes + 63) / 64 * 64;
    return piece;
}

INLINE float number(const Number *from, long i) { return get(from, i, HALF); }
INLINE void set(Number *to, long i, float value) { put(to, i, value, HALF); }

/* Set a number that needs no rounding. */
INLINE void set_exact(Number *to, long i, float value) {
#ifdef FP32
    to[i] = value;
#else
    to[i] = (uint16_t)(bits_of(value) >> 16);
#endif
}

/* out [rows, wide] of `width` (=, or += where `add`) left [rows, inner] of `stride` x right, of
 * `columns`. */
#ifndef TILES
enum { DEEP = 128 * PAIR }; /* terms of a sum */
#define EACH_ROW _Pragma("GCC unroll 8") for (int i = 0; i < HIGH; i++)

/* Return sums plus LANES columns of a matrix on the right times a row's PAIR numbers. */
INLINE Lanes add_products(Lanes sums, const Number *right, const Number *pair) {
#ifdef FP32
    return sums + *(const Loose *)right * *pair;
#else
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(both),
                                   (__m512bh)_mm512_loadu_si512(right));
#endif
}

static void multiply(float *out, long width, const Number *left, long stride, const Number *right,
                     long columns, long rows, long wide, long inner, int add) {
    for (long column = 0; column < wide; column += 2 * LANES)
        for (long start = 0; start < inner; start += DEEP)
            for (long row = 0; row < rows; row += HIGH) {
                const Number *first = left + row * stride;
                float *to = out + row * width + column;
                Lanes even[HIGH], odd[HIGH];
                EACH_ROW even[i] = odd[i] = (Lanes){0};
                for (long k = start; k < least(start + DEEP, inner); k += PAIR) {
                    const Number *place = right + k * columns + column * PAIR;
                    EACH_ROW {
                        even[i] = add_products(even[i], place, first + i * stride + k);
                        odd[i] = add_products(odd[i], place + LANES * PAIR, first + i * stride + k);
                    }
                }
                EACH_ROW {
                    Loose *sums = (Loose *)(to + i * width);
                    if (add || start) even[i] += sums[0], odd[i] += sums[1];
                    sums[0] = even[i], sums[1] = odd[i];
                }
            }
}

INLINE void begin_products(void) {}
INLINE void end_products(void) {}
#else
/* Four blocks at a time, so that what is loaded serves twice. */
INLINE void multiply(float *out, long width, const Number *left, long stride,
                     const Number *right, long columns, long rows, long wide, long inner,
                     int add) {
    for (long column = 0; column < wide; column += 2 * LANES)
        for (long row = 0; row < rows; row += 2 * LANES) {
            float *upper = out + row * width + column, *lower = upper + LANES * width;
            const Number *first = left + row * stride, *second = first + LANES * stride;
            if (add) {
                _tile_loadd(0, upper, width * 4);
                _tile_loadd(1, upper + LANES, width * 4);
                _tile_loadd(2, lower, width * 4);
                _tile_loadd(3, lower + LANES, width * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (long k = 0; k < inner; k += 32) {
                const Number *pairs = right + k * columns + column * 2;
                _tile_loadd(4, first + k, stride * 2);
                _tile_loadd(6, pairs, columns * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, pairs + 2 * LANES, columns * 4);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, second + k, stride * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, width * 4);
            _tile_stored(1, upper + LANES, width * 4);
            _tile_stored(2, lower, width * 4);
            _tile_stored(3, lower + LANES, width * 4);
        }
}

INLINE void begin_products(void) { /* of this thread */
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_a_row[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) tiles.bytes_a_row[tile] = 64, tiles.rows[tile] = 16;
    _tile_loadconfig(&tiles);
}

INLINE void end_products(void) { _tile_release(); }
#endif

/* --------------------------------------------------------------------------- other layouts */

/* LANES numbers from anywhere; those that are set need no rounding. Copied to an array they would
 * be written in halves, and a load of the whole waits until both have reached the cache. */
#ifdef FP32
INLINE Lanes lanes_of(const Number *from) { return *(const Loose *)from; }
INLINE void set_lanes(Number *to, Lanes values) { *(Loose *)to = values; }
#else
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

INLINE Lanes lanes_of(const Number *from) {
    return (Lanes)(__builtin_convertvector(*(const Halves *)from, Bits) << 16);
}

INLINE void set_lanes(Number *to, Lanes values) {
    *(Halves *)to = __builtin_convertvector((Bits)values >> 16, Halves);
}
#endif

/* Transpose a block of LANES by LANES. */
#ifdef __clang__ /* it has no shuffle of this form */
INLINE void turn(Lanes rows[LANES]) {
    float block[LANES][LANES];
    memcpy(block, rows, sizeof block);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) rows[i][j] = block[j][i];
}
#else
INLINE void exchange(Lanes *rows, int apart, Order first, Order second) {
    for (int i = 0; i < LANES; i++)
        if (!(i & apart)) {
            Lanes a = rows[i], b = rows[i + apart];
            rows[i] = __builtin_shuffle(a, b, first);
            rows[i + apart] = __builtin_shuffle(a, b, second);
        }
}

#ifdef __AVX512F__
INLINE void turn(Lanes rows[LANES]) {
    exchange(rows, 1, (Order){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
             (Order){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
    exchange(rows, 2, (Order){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
             (Order){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    exchange(rows, 4, (Order){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
             (Order){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
    exchange(rows, 8, (Order){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
             (Order){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}
#else
INLINE void turn(Lanes rows[LANES]) {
    exchange(rows, 1, (Order){0, 8, 2, 10, 4, 12, 6, 14}, (Order){1, 9, 3, 11, 5, 13, 7, 15});
    exchange(rows, 2, (Order){0, 1, 8, 9, 4, 5, 12, 13}, (Order){2, 3, 10, 11, 6, 7, 14, 15});
    exchange(rows, 4, (Order){0, 1, 2, 3, 8, 9, 10, 11}, (Order){4, 5, 6, 7, 12, 13, 14, 15});
}
#endif
#endif

/* Copy rows of `columns` numbers, `stride` apart, to a padded matrix on the left. */
INLINE void copy_left(Number *to, const Number *from, long stride, long rows, long columns) {
    long wide = padded(columns), a_row = columns * sizeof *to;
    for (long row = 0; row < rows; row++) {
        memcpy(to + row * wide, from + row * stride, a_row);
        if (wide > columns) memset(to + row * wide + columns, 0, wide * sizeof *to - a_row);
    }
    memset(to + rows * wide, 0, (padded(rows) - rows) * wide * sizeof *to);
}

/* Make rows of a matrix on the left, `stride` apart, one on the right, of `width` columns. */
INLINE void pair_rows(Number *to, long width, const Number *left, long stride, long rows,
                      long columns) {
#ifdef FP32
    for (long row = 0; row < rows; row++)
        memcpy(to + row * width, left + row * stride, columns * sizeof *to);
#else
    for (long row = 0; row < rows; row += 2) {
        const uint16_t *even = left + row * stride, *odd = even + stride;
        uint32_t *pairs = (uint32_t *)(to + row * width);
        for (long i = 0; i < columns; i++) pairs[i] = even[i] | (uint32_t)odd[i] << 16;
    }
#endif
}

/* Return the same, and its `width`: the rows themselves where they serve, or made in `room`. */
INLINE const Number *on_right(Number *room, long *width, const Number *left, long stride,
                              long rows, long columns) {
#ifdef FP32
    (void)room, (void)rows, (void)columns;
    *width = stride;
    return left;
#else
    *width = columns;
    pair_rows(room, columns, left, stride, rows, columns);
    return room;
#endif
}

/* Transpose [rows, columns] on the left to [columns, rows] of `width`. */
INLINE void transpose(Number *to, long width, const Number *left, long rows, long columns) {
    for (long row = 0; row < rows; row += LANES)
        for (long column = 0; column < columns; column += LANES) {
            Lanes block[LANES];
            EACH_LANE block[i] = lanes_of(left + (row + i) * columns + column);
            turn(block);
            EACH_LANE set_lanes(to + (column + i) * width + row, block[i]);
        }
}
#endif
