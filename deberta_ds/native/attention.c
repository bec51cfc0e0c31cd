/* Disentangled attention over spans of up to 512 tokens, a batch row and head at a time: both
 * position terms, mask, softmax, dropout and context while a strip of scores is in the cache.
 */
#include "attention.h"
#ifdef HERE
#include "exponential.h"

/* -------------------------------------------------------------------------------- softmax */

INLINE float largest(const float *row, long count) { /* of those that are numbers */
    Lanes tops;
    float top = -INFINITY;
    long y = 0;
    for (int lane = 0; lane < LANES; lane++) tops[lane] = -INFINITY;
    for (; y + LANES <= count; y += LANES) {
        Lanes here;
        memcpy(&here, row + y, sizeof here);
        Order more = here > tops;
        tops = (Lanes)((more & (Order)here) | (~more & (Order)tops));
    }
    for (; y < count; y++) top = row[y] > top ? row[y] : top;
    for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    return top;
}

INLINE void softmax(float *row, long keys, int masked) {
    float top = largest(row, keys), total = 0;
    if (masked && top == -INFINITY) { /* a query without keys is 0; NaN stays */
        for (long y = 0; y < keys; y++) row[y] = row[y] != row[y] ? row[y] : 0.0f;
        return;
    }
    for (long y = 0; y < keys; y++) {
        row[y] = exponential(row[y] - top);
        total += row[y];
    }
    float share = 1 / total;
    for (long y = 0; y < keys; y++) row[y] *= share;
}

/* Whether a pair is dropped: as deberta_ds/model/attention/dropout.py, its shifts arithmetic. */
INLINE uint32_t is_dropped(int32_t query_word, int32_t key_word, int32_t threshold) {
    int32_t word = (int32_t)((uint32_t)query_word + (uint32_t)key_word);
    word = (int32_t)((uint32_t)(word ^ word >> 15) * 0x21F0AAADu);
    word = (int32_t)((uint32_t)(word ^ word >> 13) * 0xD35A2D97u);
    return word < threshold;
}

/* --------------------------------------------------------------------------------- a plane */

typedef struct { /* of one row and head; N and D are padded, W is N + STRIP */
    Number *left, *turned;                 /* to make the others from */
    Number *queries, *keys, *keys_right;   /* [N, D], [N, D], [D, W] */
    Number *values_right;                  /* [N, D] */
    Number *to_key_right, *to_query_right; /* [D, N + W] */
    Number *kept;                          /* [STRIP, W] */
    float *to_query, *scores, *to_key, *out; /* [N, W], [STRIP, W], [STRIP, W], [STRIP, D] */
} Plane;

static Plane lay_out(Room *room, const Tables *tables, long keys, long queries, long size) {
    long wide = keys + STRIP, operand = wide * size * sizeof(Number);
    return (Plane){.left = take(room, 2 * operand),
                   .turned = take(room, 2 * operand),
                   .queries = take(room, queries * size * sizeof(Number)),
                   .keys = take(room, operand),
                   .keys_right = take(room, operand),
                   .values_right = take(room, operand),
                   .to_key_right = tables->to_key,
                   .to_query_right = tables->to_query,
                   .kept = take(room, STRIP * wide * sizeof(Number)),
                   .to_query = take(room, keys * wide * 4),
                   .scores = take(room, STRIP * wide * 4),
                   .to_key = take(room, STRIP * (keys + wide) * 4),
                   .out = take(room, STRIP * size * 4)};
}

static void take_tables(Plane *p, const Problem *problem, const Span *span, long head) {
    long wide = 2 * padded(span->keys) + STRIP, size = problem->size, rows;
    const Table *tables[] = {&problem->to_key, &problem->to_query};
    Number *right[] = {p->to_key_right, p->to_query_right};
    for (int side = 0; side < 2; side++)
        if (tables[side]->rows) {
            const Number *from = table_of(problem, tables[side], span, head, &rows);
            copy_left(p->left, from, size, rows, size);
            transpose(p->turned, rows, p->left, rows, padded(size));
            pair_rows(right[side], wide, p->turned, rows, padded(size), rows);
        }
}

static void take_row(Plane *p, const Problem *problem, const Span *span, long row, long head) {
    long keys = padded(span->keys), size = padded(problem->size), wide = keys + STRIP;
    copy_queries(p->queries, problem->query, problem->query_strides, span, row, head,
                 problem->size);
    copy_keys(p->keys, problem->key, problem->key_strides, span, row, head, problem->size);
    copy_keys(p->left, problem->value, problem->value_strides, span, row, head, problem->size);
    pair_rows(p->values_right, size, p->left, size, keys, size);
    transpose(p->turned, keys, p->keys, keys, size);
    pair_rows(p->keys_right, wide, p->turned, keys, size, keys);
    for (long y = 0; problem->to_query.rows && y < keys; y += STRIP) {
        Stretch stretch = to_query_stretch(problem, span, y);
        multiply(p->to_query + y * wide, wide, p->keys + y * size, size,
                 p->to_query_right + PAIR * stretch.first, keys + wide, STRIP, stretch.count, size,
                 0);
    }
}

static void add_turned(float *scores, const float *to_query, const Problem *problem,
                       const Span *span, long first) {
    long keys = padded(span->keys), wide = keys + STRIP;
    for (long y = 0; y < keys; y += LANES) {
        const int32_t *row_at = to_query_stretch(problem, span, y / STRIP * STRIP).row_at;
        for (long x = 0; x < STRIP; x += LANES) {
            const float *from = to_query + y * wide;
            long column = skewed(first + x, y % STRIP);
            Lanes block[LANES];
            if (row_at)
                EACH_LANE block[i] = at_distances(from + i * wide, row_at, column - i);
            else
                EACH_LANE block[i] = *(const Loose *)(from + column + i * (wide - 1));
            turn(block);
            EACH_LANE *(Loose *)(scores + (x + i) * wide + y) += block[i];
        }
    }
}

/* The same for chosen queries. */
static void add_chosen(float *scores, const float *to_query, const Problem *problem,
                       const Span *span, long first) {
    long keys = padded(span->keys), wide = keys + STRIP;
    for (long y = 0; y < keys; y++) {
        const int32_t *row_at = to_query_stretch(problem, span, y / STRIP * STRIP).row_at;
        for (long i = 0; i < least(STRIP, span->queries - first); i++) {
            long column = skewed(span->columns[first + i], y % STRIP);
            if (row_at) column = row_at[column] - row_at[0];
            scores[i * wide + y] += to_query[y * wide + column];
        }
    }
}

static void add_scores(Plane *p, const Problem *problem, const Span *span, long first) {
    long keys = padded(span->keys), size = padded(problem->size), wide = keys + STRIP;
    const Number *queries = p->queries + first * size;
    multiply(p->scores, wide, queries, size, p->keys_right, wide, STRIP, keys, size, 0);
    Stretch stretch = {0};
    if (problem->to_key.rows) {
        stretch = to_key_stretch(problem, span, first);
        multiply(p->to_key, stretch.count, queries, size, p->to_key_right + PAIR * stretch.first,
                 keys + wide, STRIP, stretch.count, size, 0);
    }
    for (long i = 0; i < least(STRIP, span->queries - first); i++) {
        float *restrict scores = p->scores + i * wide;
        const float *restrict term = p->to_key + i * stretch.count;
        long column = first_of_row(span, keys, first, i);
        if (stretch.row_at)
            for (long y = 0; y < keys; y += LANES) {
                Loose *place = (Loose *)(scores + y);
                *place = *place * problem->scale + at_distances(term, stretch.row_at, column + y);
            }
        else if (problem->to_key.rows)
            for (long y = 0; y < keys; y++)
                scores[y] = scores[y] * problem->scale + term[column + y];
        else
            for (long y = 0; y < keys; y++) scores[y] *= problem->scale;
    }
    if (problem->to_query.rows && span->columns)
        add_chosen(p->scores, p->to_query, problem, span, first);
    else if (problem->to_query.rows)
        add_turned(p->scores, p->to_query, problem, span, first);
}

/* Fill p->kept with a strip's kept probabilities, and the caller's, if there are, with all of them:
 * dropped ones carry a minus sign. */
static void strip_probabilities(Plane *p, const Problem *problem, const Span *span, long row,
                                long head, long first, Number *probs) {
    long count = span->keys, wide = padded(count) + STRIP;
    long rows = least(STRIP, span->queries - first), plane = row * problem->heads + head;
    const uint8_t *hidden = span->forbidden;
    if (hidden && span->masks > 1) hidden += (row - span->first_row) * span->queries * count;
    add_scores(p, problem, span, first);
    if (rows < STRIP || count % STRIP) memset(p->kept, 0, STRIP * wide * sizeof *p->kept);
    for (long i = 0; i < rows; i++) {
        float *restrict scores = p->scores + i * wide;
        Number *restrict kept = p->kept + i * wide;
        if (hidden)
            for (long y = 0; y < count; y++)
                scores[y] = hidden[(first + i) * count + y] ? -INFINITY : scores[y];
        softmax(scores, count, hidden != 0);
        if (problem->query_words) {
            long number = plane * problem->query_tokens + query_of(span, first + i);
            int32_t word = problem->query_words[number];
            const int32_t *restrict key_words =
                problem->key_words + plane * problem->tokens + span->start;
            for (long y = 0; y < count; y++) {
                uint32_t dropped = is_dropped(word, key_words[y], problem->threshold);
                set(kept, y, dropped ? 0.0f : scores[y]);
                scores[y] = of_bits(bits_of(scores[y]) | dropped << 31);
            }
            if (probs) {
                Number *restrict all = probs + (first + i) * count;
                for (long y = 0; y < count; y++) set(all, y, scores[y]);
            }
        } else {
            for (long y = 0; y < count; y++) set(kept, y, scores[y]);
            if (probs) memcpy(probs + (first + i) * count, kept, count * sizeof *kept);
        }
    }
}

static void forward(const Problem *problem, const Span *span, long row, long head,
                    Number *context, Number *probs, Plane *p) {
    long keys = padded(span->keys), size = problem->size, wide = padded(size);
    take_row(p, problem, span, row, head);
    for (long x = 0; x < span->queries; x += STRIP) {
        strip_probabilities(p, problem, span, row, head, x, probs);
        multiply(p->out, wide, p->kept, keys + STRIP, p->values_right, wide, STRIP, wide, keys, 0);
        for (long i = 0; i < least(STRIP, span->queries - x); i++) {
            long token = row * problem->query_tokens + query_of(span, x + i);
            Number *restrict to = context + (token * problem->heads + head) * size;
            for (long d = 0; d < size; d++) set(to, d, p->out[i * wide + d] * problem->grown);
        }
    }
}

/* Run units [first, last). Writes context [rows, query_tokens, heads, size] and, if asked for, all
 * probabilities. Returns 0, or 1 where there was no memory. */
int KERNEL(attend_forward)(long first, long last, const Problem *problem, const Span *spans,
                           long num_spans, long chunks, Number *context, Number *probs) {
    Room room;
    if (!make_room(&room, problem)) return 1;
    char *memory = room.next;
    Tables tables = take_room_for_tables(&room, problem);
    char *rest = room.next;
    begin_products();
    for (long unit = first; unit < last; unit++) {
        tables.packed = 0;
        for (const Span *span = spans; span < spans + num_spans; span++) {
            Share mine = share_of(problem, span, unit, chunks);
            if (mine.first >= mine.last) continue;
            room.next = rest;
            Plane plane = lay_out(&room, &tables, padded(span->keys), padded(span->queries),
                                  padded(problem->size));
            if (!serve(&tables, span)) take_tables(&plane, problem, span, mine.head);
            tables.packed = span;
            for (long row = mine.first; row < mine.last; row++)
                forward(problem, span, row, mine.head, context,
                        probs ? probs + probs_of(problem, span, row, mine.head) : 0, &plane);
        }
    }
    end_products();
    free(memory);
    return 0;
}
#endif
