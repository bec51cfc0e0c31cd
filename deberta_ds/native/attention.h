/* What attention's forward and backward pass over a span share. */
#include "products.h"

#ifdef HERE
/* Keys [start, start + keys) of some batch rows, and the queries that look at them: all of those
 * columns, or, in a single row, chosen ones. */
typedef struct {
    int64_t first_row, last_row, start, keys, queries;
    const int64_t *chosen, *columns; /* number and column from `start` of each query, or null */
    const uint8_t *forbidden;        /* [masks, queries, keys], or null */
    int64_t masks;                   /* one for all rows of the span, or one a row */
    int64_t kept; /* where its probabilities begin: [rows, heads, queries, keys] */
} Span;

typedef struct {
    const Number *query, *key, *value; /* [rows, heads, tokens, size] by strides */
    int64_t query_strides[3], key_strides[3], value_strides[3];
    const Number *to_key, *to_query; /* [heads, 2 longest, size], or null; scaled */
    int64_t rows, heads, size, longest, most; /* keys and queries of the largest span, padded */
    const int32_t *query_words, *key_words; /* [rows, heads, tokens], or null: no dropout */
    int64_t query_tokens, tokens;
    int32_t threshold;
    float scale, grown; /* of scores; of the kept probabilities' context */
} Problem;

typedef struct {
    const Number *out; /* of the context; strides of rows, heads and tokens, in numbers */
    int64_t out_strides[3];
    Number *query, *key, *value;
    float *to_key, *to_query; /* or null */
} Gradients;

/* A position term is a product with an expanded table, whose row c serves the pair with y - x =
 * c - (longest - 1), rows x being queries for the content-to-position term and keys for the
 * other. A strip of rows from x0 needs columns from longest - STRIP - x0; there the pair (x, y)
 * lies at y - (x - x0) + STRIP - 1. */
INLINE long skewed(long column, long row_of_strip) { return column - row_of_strip + STRIP - 1; }

INLINE const Number *table_of(const Number *base, const Problem *p, const Span *span,
                                long head) {
    long first = p->longest - padded(span->keys); /* the first row that it needs */
    return base + (head * 2 * p->longest + first) * p->size;
}

/* Rows [first, last) of a span are a unit's: unit u is head u / chunks, and chunk u % chunks of the
 * batch's rows, [rows c / chunks, rows (c + 1) / chunks). */
typedef struct {
    long head, first, last;
} Share;

INLINE Share share_of(const Problem *p, const Span *span, long unit, long chunks) {
    long chunk = unit % chunks, first = p->rows * chunk / chunks;
    return (Share){unit / chunks, span->first_row > first ? span->first_row : first,
                   least(span->last_row, p->rows * (chunk + 1) / chunks)};
}

INLINE long probs_of(const Problem *p, const Span *span, long row, long head) {
    long plane = (row - span->first_row) * p->heads + head;
    return span->kept + plane * span->queries * span->keys;
}

/* Where, in a strip's row of a product with the content-to-position table, column 0 lies. */
INLINE long first_of_row(const Span *span, long keys, long first, long row_of_strip) {
    return span->columns ? keys - 1 - span->columns[first + row_of_strip] : skewed(0, row_of_strip);
}

INLINE long query_of(const Span *span, long number) {
    return span->chosen ? span->chosen[number] : span->start + number;
}

/* Copy the keys of a span, or what has their shape, to the left. */
INLINE void copy_keys(Number *to, const Number *base, const int64_t *strides, const Span *span,
                      long row, long head, long size) {
    const Number *from = base + row * strides[0] + head * strides[1] + span->start * strides[2];
    copy_left(to, from, strides[2], span->keys, size);
}

/* The same of queries. */
INLINE void copy_queries(Number *to, const Number *base, const int64_t *strides,
                         const Span *span, long row, long head, long size) {
    const Number *from = base + row * strides[0] + head * strides[1];
    if (!span->chosen) {
        copy_left(to, from + span->start * strides[2], strides[2], span->queries, size);
        return;
    }
    memset(to, 0, padded(span->queries) * padded(size) * sizeof *to);
    for (long i = 0; i < span->queries; i++)
        memcpy(to + i * padded(size), from + span->chosen[i] * strides[2], size * sizeof *to);
}

/* Take memory for the largest span, either way; 0 where there is none. */
INLINE int make_room(Room *room, const Problem *p) {
    long keys = p->longest, size = padded(p->size), wide = keys + STRIP, most = p->most + STRIP;
    long bytes = (20 * wide + 4 * most) * size * sizeof(Number); /* operands */
    bytes += 3 * wide * size * 4; /* gradients */
    bytes += keys * wide * 4 + STRIP * (9 * wide + size) * 4 + 32 * 64;   /* scores */
    room->next = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return room->next != 0;
}

/* Expanded tables as a span's products want them. Those of a unit's other spans of as many keys are
 * the same: the decoder has a span for every row. */
typedef struct {
    Number *to_key, *to_query;
    const Span *packed; /* for which they were made, or null */
} Tables;

INLINE int serve(const Tables *tables, const Span *span) {
    return tables->packed && padded(tables->packed->keys) == padded(span->keys);
}

INLINE Tables take_room_for_tables(Room *room, const Problem *p) {
    long bytes = 2 * (p->longest + STRIP) * padded(p->size) * sizeof(Number);
    char *first = take(room, bytes);
    return (Tables){(Number *)first, take(room, bytes), 0};
}
#endif
