/* Cross-entropy of a linear layer over a vocabulary by AMX, without the logits.
 *
 * Logits are made turned, [ids, targets], a block of ids and of targets at a time: the sums of a
 * target run down a column, so sixteen targets share every step. A chunk of ids is worked on alike
 * whoever does it; gradients of the hidden states are summed per unit of chunks.
 */
#include "products.h"
#ifdef TILES
#include "exponential.h"

enum { IDS = 256, TARGETS = 256 }; /* of a block */

typedef struct {
    const uint16_t *hidden_right, *turned_right; /* on the right: [T, C] and [C, T] */
    const void *weight;                          /* [V, size] of fp32 or bfloat16 */
    const float *bias;                           /* [ids] */
    const int64_t *labels;                       /* [T] */
    int64_t targets, ids, size, chunk;           /* ids that may be predicted; of a chunk */
    int32_t half;                                /* whether the weight is bfloat16 */
    float colder;                                /* 1 / temperature of the draw */
} Vocabulary;

typedef struct {
    uint16_t *weight, *weight_right, *grad, *grad_turned;
    float *logits;
} Work;

static int make_work(Work *w, const Vocabulary *v) {
    long width = padded(v->size);
    Room room = {aligned_alloc(64, 2 * IDS * (width + TARGETS) * 2 + STRIP * TARGETS * 4)};
    if (!room.next) return 0;
    w->weight = take(&room, IDS * width * 2);
    w->weight_right = take(&room, IDS * width * 2);
    w->grad = take(&room, IDS * TARGETS * 2);
    w->grad_turned = take(&room, IDS * TARGETS * 2);
    w->logits = take(&room, STRIP * TARGETS * 4);
    return 1;
}

/* Cast ids [first, first + count) to rows on the left; those up to a whole strip are 0. */
static void cast_rows(const Work *w, const Vocabulary *v, long first, long count) {
    long width = padded(v->size);
    memset(w->weight, 0, padded(count) * width * 2);
    for (long i = 0; i < count; i++) {
        const void *from = row_of(v->weight, first + i, v->size, (int)v->half);
        uint16_t *restrict row = w->weight + i * width;
        if (v->half)
            memcpy(row, from, v->size * 2);
        else
            for (long c = 0; c < v->size; c++) set(row, c, ((const float *)from)[c]);
    }
}

/* Make the logits [rows, TARGETS] of a strip of ids that begins at `id`, row `strip` of the block. */
INLINE void strip_logits(const Work *w, const Vocabulary *v, long strip, long id, long rows,
                         long target, long count) {
    long width = padded(v->size);
    multiply(w->logits, TARGETS, w->weight + strip * width, width, v->turned_right + 2 * target,
             padded(v->targets), STRIP, padded(count), width, 0);
    for (long i = 0; i < rows; i++) {
        float *restrict row = w->logits + i * TARGETS, bias = v->bias[id + i];
        for (long t = 0; t < padded(count); t++) row[t] += bias;
    }
}

typedef struct { /* of a chunk, [targets] each */
    float *top, *mass, *cold_mass; /* cold_mass: or null */
    int32_t *top_id;
} Sums;

/* Take a strip's logits into the running maximum and sums of exponentials. */
INLINE void add_strip(const float *logits, long rows, long id, long target, long count, Sums sums,
                      float colder) {
    float before[TARGETS];
    float *restrict top = sums.top + target, *restrict mass = sums.mass + target;
    int32_t *restrict top_id = sums.top_id + target;
    memcpy(before, top, count * 4);
    for (long i = 0; i < rows; i++) {
        const float *restrict row = logits + i * TARGETS;
        int32_t number = (int32_t)(id + i);
        for (long t = 0; t < count; t++) {
            int more = row[t] > top[t];
            top_id[t] = more ? number : top_id[t];
            top[t] = more ? row[t] : top[t];
        }
    }
    for (long t = 0; t < count; t++) mass[t] *= exponential(before[t] - top[t]);
    for (long i = 0; i < rows; i++) {
        const float *restrict row = logits + i * TARGETS;
        for (long t = 0; t < count; t++) mass[t] += exponential(row[t] - top[t]);
    }
    if (!sums.cold_mass) return;
    float *restrict cold = sums.cold_mass + target;
    for (long t = 0; t < count; t++) cold[t] *= exponential((before[t] - top[t]) * colder);
    for (long i = 0; i < rows; i++) {
        const float *restrict row = logits + i * TARGETS;
        for (long t = 0; t < count; t++) cold[t] += exponential((row[t] - top[t]) * colder);
    }
}

/* Sums of chunks [first, last): largest logit, its id, the sum of exponentials below it (and the
 * same of the draw's temperature), [chunks, targets]; the logit of each label. Returns 0, or 1
 * where there was no memory. */
int KERNEL(vocabulary_sums)(long first, long last, const Vocabulary *v, float *top,
                            int32_t *top_id, float *mass, float *cold_mass, float *label_logit) {
    Work w;
    if (!make_work(&w, v)) return 1;
    begin_products();
    for (long chunk = first; chunk < last; chunk++) {
        long stop = least((chunk + 1) * v->chunk, v->ids), at = chunk * v->targets;
        Sums sums = {top + at, mass + at, cold_mass ? cold_mass + at : 0, top_id + at};
        for (long t = 0; t < v->targets; t++) {
            sums.top[t] = -INFINITY, sums.top_id[t] = (int32_t)(chunk * v->chunk), sums.mass[t] = 0;
            if (cold_mass) sums.cold_mass[t] = 0;
        }
        for (long block = chunk * v->chunk; block < stop; block += IDS) {
            long ids = least(IDS, stop - block);
            cast_rows(&w, v, block, ids);
            for (long target = 0; target < v->targets; target += TARGETS)
                for (long strip = 0; strip < ids; strip += STRIP) {
                    long count = least(TARGETS, v->targets - target);
                    long rows = least(STRIP, ids - strip), id = block + strip;
                    strip_logits(&w, v, strip, id, rows, target, count);
                    add_strip(w.logits, rows, id, target, count, sums, v->colder);
                    for (long t = 0; t < count; t++) {
                        long row = v->labels[target + t] - id;
                        if (row >= 0 && row < rows)
                            label_logit[target + t] = w.logits[row * TARGETS + t];
                    }
                }
        }
    }
    end_products();
    free(w.weight);
    return 0;
}

/* Make the rounded gradient of a strip's logits, at its rows, and its sums in bias_grad. */
INLINE void strip_gradient(const Work *w, const Vocabulary *v, const float *log_norm, float scale,
                           long strip, long id, long rows, long target, long count,
                           float *bias_grad) {
    uint16_t *first = w->grad + strip * TARGETS;
    memset(first, 0, STRIP * TARGETS * 2);
    for (long i = 0; i < rows; i++) {
        float *restrict row = w->logits + i * TARGETS, total = 0;
        uint16_t *restrict grad = first + i * TARGETS;
        const int64_t *restrict labels = v->labels + target;
        for (long t = 0; t < count; t++) {
            float share = row[t] - log_norm[target + t];
            share = exponential(share < 0 ? share : 0 * share) - (labels[t] == id + i);
            total += share * scale;
            set(grad, t, share * scale);
        }
        bias_grad[i] += total;
    }
}

/* Gradients of chunks [first, last) for each unit, which is `chunks_a_unit` of them: of the table
 * [ids, size] and the bias [ids], zeros before; and the sum of the hidden states', [units, targets
 * padded, size padded], zeros before. */
int KERNEL(vocabulary_gradients)(long first, long last, const Vocabulary *v, long chunks_a_unit,
                                 const float *log_norm, float scale, float *weight_grad,
                                 float *bias_grad, float *hidden_grad) {
    Work w;
    if (!make_work(&w, v)) return 1;
    long width = padded(v->size), wide = padded(v->targets);
    float *out = aligned_alloc(64, IDS * width * 4);
    if (!out) {
        free(w.weight);
        return 1;
    }
    begin_products();
    for (long unit = first; unit < last; unit++) {
        long stop = least((unit + 1) * chunks_a_unit * v->chunk, v->ids);
        float *hidden = hidden_grad + unit * wide * width;
        for (long block = unit * chunks_a_unit * v->chunk; block < stop; block += IDS) {
            long ids = least(IDS, stop - block);
            cast_rows(&w, v, block, ids);
            pair_rows(w.weight_right, width, w.weight, width, padded(ids), width);
            for (long target = 0; target < v->targets; target += TARGETS) {
                long count = least(TARGETS, v->targets - target), inner = padded(count);
                for (long strip = 0; strip < ids; strip += STRIP) {
                    long rows = least(STRIP, ids - strip), id = block + strip;
                    strip_logits(&w, v, strip, id, rows, target, count);
                    strip_gradient(&w, v, log_norm, scale, strip, id, rows, target, count,
                                   bias_grad + id);
                }
                multiply(out, width, w.grad, TARGETS, v->hidden_right + target * width, width,
                         padded(ids), width, inner, target > 0);
                transpose(w.grad_turned, IDS, w.grad, padded(ids), TARGETS);
                multiply(hidden + target * width, width, w.grad_turned, IDS, w.weight_right, width,
                         inner, width, padded(ids), 1);
            }
            for (long i = 0; i < ids; i++)
                memcpy(weight_grad + (block + i) * v->size, out + i * width, v->size * 4);
        }
    }
    end_products();
    free(out);
    free(w.weight);
    return 0;
}
#endif
