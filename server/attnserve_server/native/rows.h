/* A row: a query of one head, the keys that it reaches, and its running result.

   Keys are processed in blocks, one after the other, with the running maximum and sum of each row (Milakov and
   Gimelshein 2018). The order of all summation follows from the row's own call alone. */

#include "tiles.h"

struct row {
    const struct call *call;
    const float *bias;          /* of the first key, with the call's strides; or NULL */
    const uint8_t *mask;
    int64_t begin, end;         /* the keys that it reaches, before masking */
    int64_t head, query;
    int64_t nearest;            /* with ALiBi: the key within reach that is nearest to its position */
    float origin;               /* likewise: how much further away the key with the greatest bias is; that bias is taken
                                   for 0 */
    double distance;            /* likewise: the distance of that key from its position; 0 without ALiBi */
    int64_t reached;            /* how many keys so far have not been excluded */
    float slope;
    float top, total;           /* the maximum score so far, and the sum of all exp(score - top) */
};

/* Sets up the row of a query in a head. */
INLINE void begin_row(struct row *row, const struct call *call, int64_t head, int64_t query) {
    int64_t position = sum_of(call->offset, query);
    int64_t begin = call->left >= 0 ? most(sum_of(position, -call->left), 0) : 0;
    int64_t end = call->right >= 0 ? least(sum_of(sum_of(position, call->right), 1), call->kv_length) : call->kv_length;
    row->call = call;
    row->head = head;
    row->query = query;
    row->begin = begin;
    row->end = most(end, begin);
    row->distance = 0;
    if (call->slopes) {
        row->nearest = most(least(position, row->end - 1), begin);
        int rises = float_at(call->slopes, head) < 0;
        row->origin = rises && begin < end ? (float)most(row->nearest - begin, end - 1 - row->nearest) : 0;
        row->distance = begin < end ? fabs((double)position - (double)row->nearest) + row->origin : 0;
    }
    row->bias = call->bias ? call->bias + head * call->bias_head + query * call->bias_query : NULL;
    row->mask = call->mask ? call->mask + head * call->mask_head + query * call->mask_query : NULL;
    row->slope = call->slopes ? float_at(call->slopes, head) : 0;
    row->reached = 0;
    row->top = -INFINITY;
    row->total = 0;
}

/* Restricts the keys that a row reaches to those from `begin` up to `end`. */
INLINE void narrow_row(struct row *row, int64_t begin, int64_t end) {
    row->begin = most(row->begin, begin);
    row->end = most(least(row->end, end), row->begin);
}

/* Scores, NaN where the sum of products is not finite. An infinite sum may have been infinite on the way only: then its
   sign means nothing, and neither a softcap nor a weight of 0 must hide that. */
INLINE vec show_overflow(vec products, vec scores) { return vfma(products, vzero(), scores); }

/* Applies all options to the scores of a row for the keys from `first` on, of which it reaches begin to end. */
static void finish_scores(struct row *row, float *scores, int64_t first, int64_t begin, int64_t end) {
    const struct call *call = row->call;
    vec scale = vset((float)call->scale), cap = vset((float)call->softcap), barred = vset(-INFINITY);
    uint8_t mask_part[BLOCK];
    float bias_part[BLOCK];
    const uint8_t *mask = row->mask;
    const float *bias = row->bias;
    if (mask && call->mask_key) {
        memset(mask_part, 0, sizeof mask_part);
        memcpy(mask_part + begin, mask + first + begin, end - begin);
        mask = mask_part;
    } else if (mask) {
        if (!*mask) begin = end;
        mask = NULL;
    }
    if (bias && call->bias_key) {
        memset(bias_part, 0, sizeof bias_part);
        memcpy(bias_part + begin, bias + first + begin, (end - begin) * sizeof *bias);
        bias = bias_part;
    } else if (bias) {
        memcpy(bias_part, bias, sizeof *bias);
    }
    if (!mask) row->reached += end - begin;
    for (int64_t c = 0; c < end; c += V) {
        vec product = vload(scores + c), x = product * scale;
        if (call->softcap > 0) x = cap * vtanh(x / cap);
        x = show_overflow(product, x);
        if (bias) x = x + (call->bias_key ? vload(bias + c) : vset(*bias_part));
        if (call->slopes) {
            vec further = vabs(viota() + vset((float)(first + c - row->nearest))) - vset(row->origin);
            x = vfma(vset(-row->slope), further, x);
        }
        vmask within = vrange(begin - c, end - c);
        if (mask) {
            within = vand(within, vbytes(mask + c));
            row->reached += vcount(within);
        }
        vstore(scores + c, vselect(within, x, barred));
    }
}

/* Whether a row's scores need more than scaling and its range of keys. */
INLINE int has_options(const struct row *row) {
    return row->mask || row->bias || row->call->slopes || row->call->softcap > 0;
}

/* Applies all options to the scores of a tile, of `vectors` vectors a row: -inf where a row does not reach. */
static __attribute__((noinline))
void finish_tile(int count, struct row *rows, float *scores, int64_t first, int64_t n, int64_t vectors) {
    for (int r = 0; r < count; r++, scores += BLOCK) {
        int64_t begin = most(rows[r].begin - first, 0), end = least(rows[r].end - first, n), c = 0;
        if (begin < end) {
            finish_scores(rows + r, scores, first, begin, end);
            c = (end + V - 1) / V * V;
        }
        for (; c < vectors * V; c += V) vstore(scores + c, vset(-INFINITY));
    }
}

#define OF_ROW(r, field) (r < count ? rows[r < count ? r : 0].field : 0)
#define OF_ROWS(field) \
    {OF_ROW(0, field), OF_ROW(1, field), OF_ROW(2, field), OF_ROW(3, field), OF_ROW(4, field), OF_ROW(5, field), 0, 0}

/* Turns a tile's scores, `vectors` vectors a row, into weights: 0 where a row does not reach. `fades` are the factors
   that rescale earlier sums. The maxima of all rows are taken side by side, because the steps towards a single one
   would wait for each other. No row's bits depend on how many rows there are. */
INLINE void weigh(int count, struct row *rows, float *scores, int64_t first, int64_t n, int64_t vectors, float *fades) {
    vec greatest[EIGHT], totals[EIGHT];
    float tops[V], sums[V], shifts[V];
    UNROLL for (int r = 0; r < EIGHT; r++) greatest[r] = vset(-INFINITY), totals[r] = vzero();
    /* Not through memory: floats that were just stored one by one are slow to load as a vector. */
    vec before = OF_ROWS(top), sum = OF_ROWS(total);
    int options = 0;
    UNROLL for (int r = 0; r < count; r++) options |= has_options(rows + r);
    if (options) {
        finish_tile(count, rows, scores, first, n, vectors);
        for (int64_t c = 0; c < vectors * V; c += V)
            UNROLL for (int r = 0; r < count; r++) greatest[r] = vmax(vload(scores + r * BLOCK + c), greatest[r]);
    } else {
        int64_t begins[EIGHT], ends[EIGHT], begin = 0, end = n;
        UNROLL for (int r = 0; r < count; r++) {
            begins[r] = most(rows[r].begin - first, 0);
            ends[r] = most(least(rows[r].end - first, n), begins[r]);
            rows[r].reached += ends[r] - begins[r];
            begin = most(begin, begins[r]), end = least(end, ends[r]);
        }
        vec scale = vset((float)rows->call->scale);
        for (int64_t c = 0; c < vectors * V; c += V) {
            int whole = begin <= c && c + V <= end;
            UNROLL for (int r = 0; r < count; r++) {
                vec product = vload(scores + r * BLOCK + c), x = show_overflow(product, product * scale);
                if (!whole) x = vselect(vrange(begins[r] - c, ends[r] - c), x, vset(-INFINITY));
                vstore(scores + r * BLOCK + c, x);
                greatest[r] = vmax(x, greatest[r]);
            }
        }
    }
    vec top = vmax(vtops(greatest), before);
    /* If all scores of a row have been -inf so far, 0 is subtracted; likewise if one is NaN, which still shows. */
    vec shift = vselect(vbelow(vset(-INFINITY), top), top, vzero());
    vstore(shifts, shift);
    UNROLL for (int r = 0; r < count; r++) {
        vec total = vzero(), own = vset(shifts[r]);
        for (int64_t c = 0; c < vectors * V; c += V) {
            vec weights = vexp(vload(scores + r * BLOCK + c) - own);
            vstore(scores + r * BLOCK + c, weights);
            total = total + weights;
        }
        totals[r] = total;
    }
    vec fade = vexp(before - shift);
    vstore(fades, fade);
    vstore(tops, top);
    vstore(sums, sum * fade + vtotals(totals));
    UNROLL for (int r = 0; r < count; r++) rows[r].top = tops[r], rows[r].total = sums[r];
}

static void weigh_tile(int count, struct row *rows, float *scores, int64_t first, int64_t n, int64_t vectors,
                       float *fades) {
    switch (count) {
    case 1: weigh(1, rows, scores, first, n, vectors, fades); break;
    case 2: weigh(2, rows, scores, first, n, vectors, fades); break;
    case 3: weigh(3, rows, scores, first, n, vectors, fades); break;
    case 4: weigh(4, rows, scores, first, n, vectors, fades); break;
    case 5: weigh(5, rows, scores, first, n, vectors, fades); break;
    default: weigh(TILE_ROWS, rows, scores, first, n, vectors, fades);
    }
}

/* Keeps a row's partial result over some of its keys for merging: its output, `width` floats, then its top, its total,
   and whether it has reached anything. */
INLINE void keep(const struct row *row, const float *output, int64_t width, float *kept) {
    memcpy(kept, output, width * sizeof(float));
    kept[width] = row->top;
    kept[width + 1] = row->total;
    kept[width + 2] = row->reached > 0;
}

/* Restores a row and its output from what was kept. */
INLINE void recall(struct row *row, float *output, int64_t width, const float *kept) {
    memcpy(output, kept, width * sizeof(float));
    row->top = kept[width];
    row->total = kept[width + 1];
    row->reached = kept[width + 2] > 0;
}

/* Merges the next partial result of a row, `behind`, into `kept`. */
static void join(float *kept, const float *behind, int64_t width) {
    float top = kept[width] > behind[width] ? kept[width] : behind[width];
    float fade = kept[width] == -INFINITY ? 0 : expf(kept[width] - top);
    float share = behind[width] == -INFINITY ? 0 : expf(behind[width] - top);
    for (int64_t c = 0; c < width; c += V)
        vstore(kept + c, vfma(vset(share), vload(behind + c), vset(fade) * vload(kept + c)));
    kept[width] = top;
    kept[width + 1] = kept[width + 1] * fade + behind[width + 1] * share;
    kept[width + 2] += behind[width + 2];
}

/* Writes a row's result. It is finite if this returns 1 and `suspect`, which it adds to, is 0 in the end. */
INLINE int end_row(const struct row *row, const float *output, vec *suspect) {
    const struct call *call = row->call;
    int64_t element_size = call->query_dtype == FLOAT32 ? 4 : 2;
    char *to = (char *)call->output + (row->query * call->output_token + row->head * call->output_head) * element_size;
    /* Until now all scores of a row with ALiBi were relative to the key whose bias is greatest, and so too large by the
       penalty of that key. */
    double top = row->top - (double)row->slope * row->distance, total = row->total, fade = 1;
    int finite = !(row->reached && row->top == -INFINITY);
    if (call->sinks) {
        double sink = float_at(call->sinks, row->head), greatest = sink > top ? sink : top;
        if (greatest != -INFINITY) {
            fade = exp(top - greatest);
            total = total * fade + exp(sink - greatest);
            top = greatest;
        }
    }
    vec share = vset(total == 0 ? 0 : (float)(fade / total));
    for (int64_t c = 0; c < call->value_dim; c += V) {
        vec x = vfma(vload(output + c), share, vzero()); /* + 0 turns an underflow to -0 into 0 */
        *suspect = *suspect + x * vzero();
        narrow(x, call->query_dtype, least(V, call->value_dim - c), to + c * element_size);
    }
    finite &= total - total == 0;
    if (call->lse) {
        float lse = total == 0 ? -INFINITY : (float)(top + log(total));
        memcpy(call->lse + row->head * call->lse_head + row->query, &lse, sizeof lse);
        finite &= lse < INFINITY;
    }
    return finite;
}
