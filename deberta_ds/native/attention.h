/* What attention's forward and backward pass over a span share. */
#include "products.h"

/* Spans of batch rows whose tokens attend to each other; strides in numbers. */
typedef struct {
    int64_t first_row, last_row, start, keys;
    const uint8_t *forbidden; /* [masks, keys, keys], or null */
    int64_t masks;            /* one for all rows of the span, or one a row */
    int64_t kept;             /* where its probabilities begin: [rows, heads, keys, keys] */
} Span;

typedef struct {
    const uint16_t *query, *key, *value; /* [rows, heads, tokens, size] by strides */
    int64_t query_strides[3], key_strides[3], value_strides[3];
    const uint16_t *to_key, *to_query; /* [heads, 2 longest, size], or null; scaled */
    int64_t rows, heads, size, longest; /* keys of the longest span, padded */
    const int32_t *query_words, *key_words; /* [rows, heads, tokens], or null: no dropout */
    int64_t tokens;
    int32_t threshold;
    float scale, grown; /* of scores; of the kept probabilities' context */
} Problem;

typedef struct {
    const uint16_t *out; /* of the context; strides of rows, heads and tokens, in numbers */
    int64_t out_strides[3];
    uint16_t *query, *key, *value;
    float *to_key, *to_query; /* or null */
} Gradients;

/* A position term is a product with an expanded table, whose row c serves the pair with y - x =
 * c - (longest - 1), rows x being queries for the content-to-position term and keys for the
 * other. A strip of rows from x0 needs columns from longest - STRIP - x0; there the pair (x, y)
 * lies at y - (x - x0) + STRIP - 1. */
INLINE long skewed(long column, long row_of_strip) { return column - row_of_strip + STRIP - 1; }

INLINE const uint16_t *plane_of(const uint16_t *base, const int64_t *strides, long row, long head,
                                long token) {
    return base + row * strides[0] + head * strides[1] + token * strides[2];
}

INLINE const uint16_t *table_of(const uint16_t *base, const Problem *p, const Span *span,
                                long head) {
    long first = p->longest - padded(span->keys); /* the first row that it needs */
    return base + (head * 2 * p->longest + first) * p->size;
}

INLINE long first_row_of(const Problem *p, const Span *span, long chunk, long chunks) {
    long first = p->rows * chunk / chunks;
    return span->first_row > first ? span->first_row : first;
}

INLINE long last_row_of(const Problem *p, const Span *span, long chunk, long chunks) {
    return least(span->last_row, p->rows * (chunk + 1) / chunks);
}

INLINE long probs_of(const Problem *p, const Span *span, long row, long head) {
    long plane = (row - span->first_row) * p->heads + head;
    return span->kept + plane * span->keys * span->keys;
}

/* Memory of a thread, handed out in pieces. */
typedef struct {
    char *next;
} Room;

INLINE int make_room(Room *room, const Problem *p) { /* for the largest span, either way */
    long keys = p->longest, size = padded(p->size), wide = keys + STRIP;
    long bytes = 24 * wide * size * 2 + 3 * wide * size * 4; /* operands and gradients */
    bytes += keys * wide * 4 + STRIP * (4 * wide + size) * 4 + 32 * 64; /* scores */
    room->next = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return room->next != 0;
}

INLINE void *take(Room *room, long bytes) {
    char *piece = room->next;
    room->next += (bytes + 63) / 64 * 64;
    return piece;
}
