/* The backward pass of attention.c, a batch row and head at a time. */
#include "attention.h"
#ifdef HERE

typedef struct { /* of one row and head; N and D are padded, W is N + STRIP */
    Number *left, *turned;                                  /* to make the others from */
    Number *out_grad, *queries, *keys;                      /* [N, D] */
    Number *out_grad_turned, *queries_turned, *keys_turned; /* [D, W] */
    Number *values_right, *keys_right;                      /* [D, W], [N, D] */
    Number *to_key_right, *to_query_right;                  /* [2 N, D] */
    Number *to_key, *rows, *to_query; /* [STRIP, W] and [N, W]: of scores, skewed or not */
    Number *kept, *paired;     /* [STRIP, W], and what is on the right of a product */
    Number *folded;            /* of scores: distances that share a table's row, added up */
    float *scores, *out;         /* [STRIP, W], [STRIP, D] */
    float *keys_grad, *values_grad, *grad_left; /* [D, W], [D, W], [N, D] */
} Plane;

static Plane lay_out(Room *room, const Tables *tables, long keys, long queries, long size) {
    long wide = keys + STRIP, one = sizeof(Number);
    long operand = wide * size * one, chosen = (queries + STRIP) * size * one;
    return (Plane){.left = take(room, 2 * operand),
                   .turned = take(room, operand),
                   .out_grad = take(room, chosen),
                   .queries = take(room, chosen),
                   .keys = take(room, operand),
                   .out_grad_turned = take(room, chosen),
                   .queries_turned = take(room, chosen),
                   .keys_turned = take(room, operand),
                   .values_right = take(room, operand),
                   .keys_right = take(room, operand),
                   .to_key_right = tables->to_key,
                   .to_query_right = tables->to_query,
                   .to_key = take(room, STRIP * (keys + wide) * one),
                   .rows = take(room, STRIP * wide * one),
                   .to_query = take(room, keys * wide * one),
                   .kept = take(room, STRIP * wide * one),
                   .paired = take(room, STRIP * (keys + wide) * one),
                   .folded = take(room, (STRIP * (keys + wide) + LANES) * one),
                   .scores = take(room, STRIP * wide * 4),
                   .out = take(room, STRIP * size * 4),
                   .keys_grad = take(room, wide * size * 4),
                   .values_grad = take(room, wide * size * 4),
                   .grad_left = take(room, wide * size * 4)};
}

static void take_tables(Plane *p, const Problem *problem, const Span *span, long head) {
    long size = problem->size, rows;
    const Table *tables[] = {&problem->to_key, &problem->to_query};
    Number *right[] = {p->to_key_right, p->to_query_right};
    for (int side = 0; side < 2; side++)
        if (tables[side]->rows) {
            const Number *from = table_of(problem, tables[side], span, head, &rows);
            copy_left(p->left, from, size, rows, size);
            pair_rows(right[side], padded(size), p->left, padded(size), rows, padded(size));
        }
}

static void take_row(Plane *p, const Problem *problem, const Gradients *grads, const Span *span,
                     long row, long head) {
    long keys = padded(span->keys), size = padded(problem->size);
    long wide = keys + STRIP, chosen = padded(span->queries);
    copy_queries(p->queries, problem->query, problem->query_strides, span, row, head,
                 problem->size);
    copy_keys(p->keys, problem->key, problem->key_strides, span, row, head, problem->size);
    copy_queries(p->out_grad, grads->out, grads->out_strides, span, row, head, problem->size);
    copy_keys(p->left, problem->value, problem->value_strides, span, row, head, problem->size);
    transpose(p->turned, keys, p->left, keys, size);
    pair_rows(p->values_right, wide, p->turned, keys, size, keys);
    pair_rows(p->keys_right, size, p->keys, size, keys, size);
    transpose(p->out_grad_turned, chosen + STRIP, p->out_grad, chosen, size);
    transpose(p->queries_turned, chosen + STRIP, p->queries, chosen, size);
    transpose(p->keys_turned, wide, p->keys, keys, size);
    memset(p->keys_grad, 0, wide * size * 4);
    memset(p->values_grad, 0, wide * size * 4);
    memset(p->to_query, 0, keys * wide * sizeof *p->to_query);
}

INLINE void put_turned(Number *to_query, const float *scores, long first, long keys) {
    long wide = keys + STRIP;
    for (long y = 0; y < keys; y += LANES)
        for (long x = 0; x < STRIP; x += LANES) {
            Number *to = to_query + y * wide + skewed(first + x, y % STRIP);
            Lanes block[LANES];
            EACH_LANE block[i] = *(const Loose *)(scores + (x + i) * wide + y);
            turn(block);
            EACH_LANE set_lanes(to + i * (wide - 1), block[i]);
        }
}

/* The same for chosen queries, of which several may stand at one column. */
INLINE void put_chosen(Number *to_query, const float *scores, const Span *span, long first,
                       long keys) {
    long wide = keys + STRIP;
    for (long i = 0; i < least(STRIP, span->queries - first); i++)
        for (long y = 0; y < span->keys; y++) {
            Number *to = to_query + y * wide + skewed(span->columns[first + i], y % STRIP);
            set(to, 0, number(to, 0) + scores[i * wide + y]);
        }
}

/* Turn the gradient of a strip's kept probabilities, in p->scores, into that of its scores, there
 * and, skewed, in p->to_key; the kept probabilities go to p->kept. */
static void strip_gradient(Plane *p, const Span *span, long first, const Number *probs,
                           float grown) {
    long count = span->keys, keys = padded(count), wide = keys + STRIP;
    long rows = least(STRIP, span->queries - first), used = span->columns ? 2 * keys : wide;
    if (rows < STRIP || count < keys) {
        memset(p->kept, 0, STRIP * wide * sizeof *p->kept);
        memset(p->scores + rows * wide, 0, (STRIP - rows) * wide * 4);
    }
    memset(p->to_key, 0, STRIP * used * sizeof *p->to_key);
    if (span->columns) memset(p->rows, 0, STRIP * wide * sizeof *p->rows);
    for (long i = 0; i < rows; i++) {
        float *restrict scores = p->scores + i * wide, along = 0;
        const Number *restrict marked = probs + (first + i) * count;
        Number *restrict kept = p->kept + i * wide;
        Number *restrict to_key = p->to_key + i * used + first_of_row(span, keys, first, i);
        for (long y = 0; y < count; y++) {
            float prob = number(marked, y), share = scores[y] * grown;
            uint32_t dropped = bits_of(prob) >> 31;
            set_exact(kept, y, dropped ? 0.0f : prob);
            scores[y] = dropped ? 0.0f : share;
            along += scores[y] * fabsf(prob);
        }
        for (long y = 0; y < count; y++) {
            scores[y] = rounded(fabsf(number(marked, y)) * (scores[y] - along), HALF);
            set_exact(to_key, y, scores[y]);
        }
        for (long y = count; y < keys; y++) scores[y] = 0;
        if (span->columns) memcpy(p->rows + i * wide, to_key, count * sizeof *to_key);
    }
}

/* Add gradients by distance, [STRIP, used], up by the table's rows, [STRIP, count]. */
static void fold(Number *to, long count, const Number *from, long used, const int32_t *row_at) {
    memset(to, 0, STRIP * count * sizeof *to);
    for (long column = 0; column < used; column += LANES) {
        const int32_t *here = row_at + column;
        Number *window = to + here[0] - row_at[0];
        Order order[LANES] = {0}, there[LANES] = {0}; /* of each row's n-th distance, if it has one */
        int most = 0;
        for (int lane = 0, nth = 0; lane < LANES; lane++) {
            nth = lane && here[lane] == here[lane - 1] ? nth + 1 : 0;
            order[nth][here[lane] - here[0]] = lane;
            there[nth][here[lane] - here[0]] = -1;
            most = nth > most ? nth : most;
        }
        for (long i = 0; i < STRIP; i++) {
            Lanes values = lanes_of(from + i * used + column), sums = lanes_of(window + i * count);
            for (int nth = 0; nth <= most; nth++)
                sums += (Lanes)((Order)permuted(values, order[nth]) & there[nth]);
            set_lanes(window + i * count, sums);
        }
    }
}

INLINE void scale_all(float *values, long count, float scale) {
    for (long i = 0; i < count; i++) values[i] *= scale;
}

/* Transpose [rows, columns] of `width`, numbers of fp32. */
INLINE void turn_all(float *to, const float *from, long width, long rows, long columns) {
    for (long row = 0; row < rows; row += LANES)
        for (long column = 0; column < columns; column += LANES) {
            Lanes block[LANES];
            EACH_LANE block[i] = *(const Loose *)(from + (row + i) * width + column);
            turn(block);
            EACH_LANE *(Loose *)(to + (column + i) * rows + row) = block[i];
        }
}

/* Write one token's row of [rows, tokens, heads, size]. */
INLINE void write_row(Number *to, const float *from, const Problem *problem, long tokens,
                      long token, long row, long head, float scale) {
    long size = problem->size;
    Number *restrict place = to + ((row * tokens + token) * problem->heads + head) * size;
    for (long d = 0; d < size; d++) set(place, d, from[d] * scale);
}

/* Add a strip's gradients of scores by distance, [STRIP, used], to those of a term's two factors:
 * its own rows, [STRIP, size], and the table, of which these are the stretch's rows. */
static void add_term(Plane *p, const Problem *problem, const Table *table, Stretch stretch,
                     const Number *scores, long used, const Number *rows_turned, long turned,
                     const Number *table_right, float *rows_grad, float *table_grad) {
    long size = padded(problem->size), width = stretch.count;
    if (stretch.row_at) {
        fold(p->folded, width, scores, used, stretch.row_at);
        scores = p->folded, used = width;
    }
    multiply(rows_grad, size, scores, used, table_right + stretch.first * size, size, STRIP, size,
             used, 1);
    const Number *right = on_right(p->paired, &width, scores, used, STRIP, used);
    multiply(table_grad + stretch.first, table->count, rows_turned, turned, right, width, size,
             used, STRIP, 1);
}

/* Add what a strip of queries gives to its own gradient and to those of keys, values and table. */
static void strip_products(Plane *p, const Problem *problem, const Span *span, long x,
                           float *table_grad) {
    long keys = padded(span->keys), size = padded(problem->size), wide = keys + STRIP;
    long stride = span->columns ? wide : wide - 1, turned = padded(span->queries) + STRIP, width;
    const Number *unskewed = span->columns ? p->rows : p->to_key + skewed(0, 0);
    const Number *queries = p->queries_turned + x, *right;
    multiply(p->out, size, unskewed, stride, p->keys_right, size, STRIP, size, keys, 0);
    scale_all(p->out, STRIP * size, problem->scale);
    if (problem->to_key.rows)
        add_term(p, problem, &problem->to_key, to_key_stretch(problem, span, x), p->to_key,
                 span->columns ? 2 * keys : wide, queries, turned, p->to_key_right, p->out,
                 table_grad);
    right = on_right(p->paired, &width, unskewed, stride, STRIP, keys);
    multiply(p->keys_grad, wide, queries, turned, right, width, size, keys, STRIP, 1);
    right = on_right(p->paired, &width, p->kept, wide, STRIP, keys);
    multiply(p->values_grad, wide, p->out_grad_turned + x, turned, right, width, size, keys,
             STRIP, 1);
}

static void backward(const Problem *problem, const Gradients *grads, const Span *span, long row,
                     long head, const Number *probs, float *to_key_grad, float *to_query_grad,
                     Plane *p) {
    long count = span->keys, keys = padded(count), size = padded(problem->size);
    long wide = keys + STRIP;
    take_row(p, problem, grads, span, row, head);
    for (long x = 0; x < span->queries; x += STRIP) {
        multiply(p->scores, wide, p->out_grad + x * size, size, p->values_right, wide, STRIP, keys,
                 size, 0);
        strip_gradient(p, span, x, probs, problem->grown);
        strip_products(p, problem, span, x,
                       to_key_grad + first_row(problem, &problem->to_key, span));
        if (problem->to_query.rows && span->columns)
            put_chosen(p->to_query, p->scores, span, x, keys);
        else if (problem->to_query.rows)
            put_turned(p->to_query, p->scores, x, keys);
        for (long i = 0; i < least(STRIP, span->queries - x); i++)
            write_row(grads->query, p->out + i * size, problem, problem->query_tokens,
                      query_of(span, x + i), row, head, 1);
    }
    scale_all(p->keys_grad, size * wide, problem->scale);
    turn_all(p->grad_left, p->keys_grad, wide, size, keys);
    for (long y = 0; problem->to_query.rows && y < keys; y += STRIP)
        add_term(p, problem, &problem->to_query, to_query_stretch(problem, span, y),
                 p->to_query + y * wide, wide, p->keys_turned + y, wide, p->to_query_right,
                 p->grad_left + y * size,
                 to_query_grad + first_row(problem, &problem->to_query, span));
    for (long y = 0; y < count; y++)
        write_row(grads->key, p->grad_left + y * size, problem, problem->tokens, span->start + y,
                  row, head, 1);
    turn_all(p->grad_left, p->values_grad, wide, size, keys);
    for (long y = 0; y < count; y++)
        write_row(grads->value, p->grad_left + y * size, problem, problem->tokens, span->start + y,
                  row, head, problem->grown);
}

/* Add sums [heads, width, columns] of a table's columns to the slots [heads, slots, size] that they
 * were read from, in the order of the columns. */
int KERNEL(attend_table)(long first, long last, const float *sums, const int64_t *slot_of,
                         float *to, long width, long columns, long slots, long size) {
    for (long head = first; head < last; head++)
        for (long column = 0; column < columns; column += LANES)
            for (long d = 0; d < size; d += LANES) {
                const float *from = sums + (head * width + d) * columns + column;
                Lanes block[LANES];
                EACH_LANE block[i] = *(const Loose *)(from + i * columns);
                turn(block);
                for (long i = 0; i < LANES; i++) {
                    float *slot = to + (head * slots + slot_of[column + i]) * size + d;
                    for (long j = 0; j < least(LANES, size - d); j++) slot[j] += block[i][j];
                }
            }
    return 0;
}

/* The units of `attend_forward`, from what it wrote. Gradients of queries, keys and values are
 * [rows, tokens, heads, size]; those of the tables are sums, [units, size, count]. */
int KERNEL(attend_backward)(long first, long last, const Problem *problem, const Span *spans,
                            long num_spans, long chunks, const Gradients *grads,
                            const Number *probs) {
    Room room;
    if (!make_room(&room, problem)) return 1;
    char *memory = room.next;
    Tables tables = take_room_for_tables(&room, problem);
    char *rest = room.next;
    long key_table = padded(problem->size) * problem->to_key.count;
    long query_table = padded(problem->size) * problem->to_query.count;
    begin_products();
    for (long unit = first; unit < last; unit++) {
        tables.packed = 0;
        if (grads->to_key) memset(grads->to_key + unit * key_table, 0, key_table * 4);
        if (grads->to_query) memset(grads->to_query + unit * query_table, 0, query_table * 4);
        for (const Span *span = spans; span < spans + num_spans; span++) {
            Share mine = share_of(problem, span, unit, chunks);
            if (mine.first >= mine.last) continue;
            room.next = rest;
            Plane plane = lay_out(&room, &tables, padded(span->keys), padded(span->queries),
                                  padded(problem->size));
            if (!serve(&tables, span)) take_tables(&plane, problem, span, mine.head);
            tables.packed = span;
            for (long row = mine.first; row < mine.last; row++)
                backward(problem, grads, span, row, mine.head,
                         probs + probs_of(problem, span, row, mine.head),
                         grads->to_key + unit * key_table, grads->to_query + unit * query_table,
                         &plane);
        }
    }
    end_products();
    free(memory);
    return 0;
}
#endif
