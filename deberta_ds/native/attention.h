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

/* A position term's relative rows: [heads, count, size], scaled, or null. Pair (x, y) has the
 * distance y - x + longest - 1 and the row of this number, or row_at[it] where neighbouring
 * distances share rows (far ones do, in logarithmic buckets): products need fewer columns, and a
 * vector of neighbours finds its rows in one vector. It grows by 0 or 1. */
typedef struct {
    const Number *rows;
    const int32_t *row_at; /* of 2 longest distances, or null */
    int64_t count; /* where they share rows, 2 STRIP and more behind the last that is needed */
} Table;

typedef struct {
    const Number *query, *key, *value; /* [rows, heads, tokens, size] by strides */
    int64_t query_strides[3], key_strides[3], value_strides[3];
    Table to_key, to_query;
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

/* A position term is a product with a table, rows x being queries for the content-to-position term
 * and keys for the other. A strip of rows from x0 needs distances from longest - STRIP - x0; there
 * the pair (x, y) lies at y - (x - x0) + STRIP - 1. */
INLINE long skewed(long column, long row_of_strip) { return column - row_of_strip + STRIP - 1; }

INLINE long row_at(const Table *table, long distance) {
    return table->row_at ? table->row_at[distance] : distance;
}

/* The rows of a table that `used` distances from `column` of a span need. */
typedef struct {
    long first, count;     /* from the span's first row; padded */
    const int32_t *row_at; /* of each of these distances, or null: a row a distance */
} Stretch;

INLINE long first_row(const Problem *p, const Table *table, const Span *span) {
    return row_at(table, p->longest - padded(span->keys));
}

INLINE Stretch stretch_of(const Problem *p, const Table *table, const Span *span, long column,
                          long used) {
    long distance = p->longest - padded(span->keys) + column, first = row_at(table, distance);
    long count = row_at(table, distance + used - 1) - first + 1;
    return (Stretch){first - first_row(p, table, span), padded(count),
                     count < used ? table->row_at + distance : 0};
}

/* Those of a strip of queries, and of keys. Chosen queries stand anywhere. */
INLINE Stretch to_key_stretch(const Problem *p, const Span *span, long first_query) {
    long keys = padded(span->keys);
    if (span->columns) return stretch_of(p, &p->to_key, span, 0, 2 * keys);
    return stretch_of(p, &p->to_key, span, keys - STRIP - first_query, keys + STRIP);
}

INLINE Stretch to_query_stretch(const Problem *p, const Span *span, long first_key) {
    long keys = padded(span->keys);
    return stretch_of(p, &p->to_query, span, keys - STRIP - first_key, keys + STRIP);
}

/* All rows that a span needs, and how many. */
INLINE const Number *table_of(const Problem *p, const Table *table, const Span *span, long head,
                              long *count) {
    long keys = padded(span->keys);
    *count = stretch_of(p, table, span, 0, 2 * keys).count + (table->row_at ? STRIP : 0);
    return table->rows + (head * table->count + first_row(p, table, span)) * p->size;
}

INLINE Lanes permuted(Lanes values, Order order) {
#ifdef __AVX512F__
    return (Lanes)_mm512_permutexvar_ps((__m512i)order, (__m512)values);
#else
    return (Lanes)_mm256_permutevar8x32_ps((__m256)values, (__m256i)order);
#endif
}

/* LANES distances from `column` of a strip's row of a product with a stretch. */
INLINE Lanes at_distances(const float *row, const int32_t *row_at, long column) {
    const int32_t *here = row_at + column;
    Order order = *(const LooseOrder *)here - here[0];
    return permuted(*(const Loose *)(row + here[0] - row_at[0]), order);
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
    long bytes = (22 * wide + 4 * most) * size * sizeof(Number); /* operands */
    bytes += 3 * wide * size * 4; /* gradients */
    bytes += keys * wide * 4 + STRIP * (11 * wide + size) * 4 + 32 * 64;   /* scores */
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
    long bytes = 2 * (p->longest + 2 * STRIP) * padded(p->size) * sizeof(Number);
    char *first = take(room, bytes);
    return (Tables){(Number *)first, take(room, bytes), 0};
}
#endif
