/* Exact attention with the vectors of one instruction set, which whoever includes this file has defined.

   vectors: V floats each. vfma(a, b, c) is a * b + c; vbelow a comparison; vselect(mask, a, b) is a where the mask is
   set, else b; vrange sets places begin <= i < end; vbytes those whose byte is not 0; vtranspose turns V vectors of rows
   into those of columns; vsums gives the sum of each of V vectors.

   Keys are met in blocks of BLOCK, one after the other, with the running maximum and sum of each query (Milakov and
   Gimelshein 2018). A query and a head that it has are a row here; rows that read the same key head meet a block
   together, in tiles of up to TILE_ROWS, so that what they read is near. Row by row everything is added up in an order
   that follows from the row's own call alone.

   Many rows take scores from a transposed block of keys: a vector is a query's scores of V keys. Few rows would not
   repay the transposition, and take them from vectors of V elements of a key. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = 64,         /* keys */
    TILE_ROWS = 6,
    FEW_ROWS = 3,       /* of a call and a key head: up to so many are computed without transposition */
    UNIT_ROWS = 126,    /* of a unit of work, about, if its call is in no group: each transposes all keys by itself */
    GROUP_ROWS = 504,   /* calls of a group that together have more of a key head are computed as several groups */
};

struct row {
    const struct call *call;
    const float *bias;          /* of the first key; as in the call, or NULL */
    const uint8_t *mask;
    int64_t begin, end;         /* the keys that it reaches, but for its mask */
    int64_t head, query;
    int64_t nearest;            /* the key within reach that its position is nearest to, */
    double distance;            /* and how far that is */
    int64_t reached;            /* how many keys have not been excluded so far */
    float slope;
    float top, total;           /* the greatest score so far, and the sum of all exp(score - top) */
};

struct memory {
    float *queries;             /* [rows, padded D] */
    float *outputs;             /* [rows, padded Dv] */
    float *keys;                /* [D, BLOCK] transposed, or [BLOCK, padded D] */
    float *values;              /* [BLOCK, padded Dv] */
    struct row *rows;
    float scores[TILE_ROWS * BLOCK] __attribute__((aligned(64)));
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
/* a + b, or whichever number is nearest to it. */
INLINE int64_t sum_of(int64_t a, int64_t b) {
    int64_t sum;
    return !__builtin_add_overflow(a, b, &sum) ? sum : b < 0 ? INT64_MIN : INT64_MAX;
}
/* An element of an array that may lie anywhere. */
INLINE float float_at(const float *base, int64_t index) {
    float found;
    memcpy(&found, base + index, sizeof found);
    return found;
}
INLINE int64_t padded(int64_t width) { return (width + V - 1) / V * V; }
/* How many rows of a call read the same key head. */
INLINE int64_t rows_of_call(const struct call *call) {
    return call->query_length * (call->query_heads / call->kv_heads);
}

/* exp(x) for x <= 0, 0 for what is too small: Cephes' polynomial, within 2 units in the last place. NaN stays NaN. */
INLINE vec vexp(vec x) {
    x = vmax(vset(-104.0f), x);
    vec n = vround(x * vset(1.44269504088896341f));
    vec r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vec p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, r * r, r + vset(1.0f));
    return vscale(p, n);
}

/* tanh(x), as Cephes has it: a polynomial near 0, exponentials elsewhere. */
INLINE vec vtanh(vec x) {
    vec size = vabs(x), z = x * x;
    vec p = vset(-5.70498872745e-3f);
    p = vfma(p, z, vset(2.06390887954e-2f));
    p = vfma(p, z, vset(-5.37397155531e-2f));
    p = vfma(p, z, vset(1.33314422036e-1f));
    p = vfma(p, z, vset(-3.33332819422e-1f));
    vec small = vfma(p * z, x, x);
    vec e = vexp(vset(-2.0f) * size);
    vec large = (vset(1.0f) - e) / (vset(1.0f) + e);
    large = vselect(vbelow(x, vzero()), vzero() - large, large);
    return vselect(vbelow(size, vset(0.625f)), small, large);
}

/* `width` elements of a dtype as floats, up to a whole number of vectors with zeros behind them. */
INLINE void widen(const void *from, int64_t dtype, int64_t width, float *to) {
    int64_t at = 0;
    if (dtype == FLOAT32) {
        const float *source = from;
        for (; at + V <= width; at += V) vstore(to + at, vload(source + at));
        if (at < width) {
            memcpy(to + at, source + at, (width - at) * sizeof(float));
            for (int64_t i = width; i < padded(width); i++) to[i] = 0;
        }
        return;
    }
    const uint16_t *source = from;
    for (; at < width; at += V) {
        uint16_t rest[V];
        const uint16_t *part = source + at;
        if (at + V > width) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, part, (width - at) * sizeof *rest);
            part = rest;
        }
        vstore(to + at, dtype == FLOAT16 ? vload_f16(part) : vload_bf16(part));
    }
}

/* `count` floats to elements of a dtype; count <= V. */
INLINE void narrow(vec x, int64_t dtype, int64_t count, void *to) {
    union { float single[V]; uint16_t half[V]; } all;
    void *target = count == V ? to : &all;
    if (dtype == FLOAT32) vstore(target, x);
    else if (dtype == FLOAT16) vstore_f16(target, x);
    else vstore_bf16(target, x);
    if (count < V) memcpy(to, &all, count * (dtype == FLOAT32 ? 4 : 2));
}

INLINE const void *element(const void *base, int64_t dtype, int64_t index) {
    return (const char *)base + index * (dtype == FLOAT32 ? 4 : 2);
}

/* Where a token's keys or values of a head are. */
INLINE const void *token_of(const struct call *call, const void *base, int64_t stride, int64_t head, int64_t token) {
    if (call->page_tokens) {
        base = ((const void *const *)base)[token / call->page_tokens];
        token %= call->page_tokens;
    }
    return element(base, call->kv_dtype, token * stride + head);
}

/* n keys, [n, D] by strides, as [D, BLOCK]: zeros up to whole vectors. */
static void transpose_keys(const struct call *call, const void *from, int64_t n, float *to) {
    int64_t width = call->head_dim;
    for (int64_t j = 0; j < n; j += V) {
        int64_t rows = least(V, n - j);
        for (int64_t d = 0; d < width; d += V) {
            int64_t columns = least(V, width - d);
            vec square[V];
            for (int64_t i = 0; i < V; i++) {
                const void *part = element(from, call->kv_dtype, (j + i) * call->key_token + d);
                if (i >= rows) {
                    square[i] = vzero();
                } else if (columns == V && call->kv_dtype == FLOAT32) {
                    square[i] = vload(part);
                } else {
                    float whole[V];
                    widen(part, call->kv_dtype, columns, whole);
                    square[i] = vload(whole);
                }
            }
            vtranspose(square);
            if (columns == V) {
                UNROLL for (int64_t i = 0; i < V; i++) vstore(to + (d + i) * BLOCK + j, square[i]);
            } else {
                for (int64_t i = 0; i < columns; i++) vstore(to + (d + i) * BLOCK + j, square[i]);
            }
        }
    }
}

/* n rows [n, width] by a stride, as [n, padded width]. Where they are that already, they stay where they are. */
static const float *rows_of(const void *from, int64_t dtype, int64_t stride, int64_t n, int64_t width, float *to) {
    if (dtype == FLOAT32 && stride == width && width % V == 0) return from;
    for (int64_t i = 0; i < n; i++) widen(element(from, dtype, i * stride), dtype, width, to + i * padded(width));
    return to;
}

/* Dot products of `rows` queries and of `vectors` * V keys of a transposed block, from column 0 of `keys` on. */
INLINE void tile_scores(int rows, int vectors, const float *queries, int64_t stride, int64_t width, const float *keys,
                        float *scores) {
    vec sums[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vzero();
    for (int64_t d = 0; d < width; d++) {
        vec columns[TILE_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++) columns[c] = vload(keys + d * BLOCK + c * V);
        UNROLL for (int r = 0; r < rows; r++) {
            vec element = vset(queries[r * stride + d]);
            UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vfma(element, columns[c], sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) vstore(scores + r * BLOCK + c * V, sums[r][c]);
}

/* outputs[r] = outputs[r] * fades[r] + sum over n of weights[r][j] * values[j], for `vectors` * V columns of values. */
INLINE void tile_outputs(int rows, int vectors, const float *weights, const float *fades, const float *values,
                         int64_t n, int64_t stride, float *outputs) {
    vec sums[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) {
        vec fade = vset(fades[r]);
        UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = fade * vload(outputs + r * stride + c * V);
    }
    for (int64_t j = 0; j < n; j++) {
        vec columns[TILE_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++) columns[c] = vload(values + j * stride + c * V);
        UNROLL for (int r = 0; r < rows; r++) {
            vec weight = vset(weights[r * BLOCK + j]);
            UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vfma(weight, columns[c], sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) vstore(outputs + r * stride + c * V, sums[r][c]);
}

/* The same for few rows: every other key is added up apart, since one sum would wait for itself. Whether the first is
   one of those follows from its place in its block: each stays in its sum, wherever begins what is reached. */
INLINE void few_outputs(int rows, int vectors, int first_apart, const float *weights, const float *fades,
                        const float *values, int64_t n, int64_t stride, float *outputs) {
    vec sums[FEW_ROWS][TILE_VECTORS], others[FEW_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) {
        vec fade = vset(fades[r]);
        UNROLL for (int c = 0; c < vectors; c++) {
            sums[r][c] = fade * vload(outputs + r * stride + c * V);
            others[r][c] = vzero();
        }
    }
    int64_t j = 0;
    if (first_apart && n > 0) {
        UNROLL for (int c = 0; c < vectors; c++)
            UNROLL for (int r = 0; r < rows; r++)
                others[r][c] = vfma(vset(weights[r * BLOCK]), vload(values + c * V), others[r][c]);
        j = 1;
    }
    for (; j + 2 <= n; j += 2) {
        UNROLL for (int c = 0; c < vectors; c++) {
            vec column = vload(values + j * stride + c * V), other = vload(values + (j + 1) * stride + c * V);
            UNROLL for (int r = 0; r < rows; r++) {
                sums[r][c] = vfma(vset(weights[r * BLOCK + j]), column, sums[r][c]);
                others[r][c] = vfma(vset(weights[r * BLOCK + j + 1]), other, others[r][c]);
            }
        }
    }
    if (j < n)
        UNROLL for (int c = 0; c < vectors; c++)
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][c] = vfma(vset(weights[r * BLOCK + j]), vload(values + j * stride + c * V), sums[r][c]);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) vstore(outputs + r * stride + c * V, sums[r][c] + others[r][c]);
}

/* Dot products of few queries and n keys [n, stride], both padded with zeros. */
INLINE void few_scores(int rows, const float *queries, int64_t stride, const float *keys, int64_t n, float *scores) {
    for (int64_t j = 0; j < n; j += V) {
        vec sums[FEW_ROWS][V];
        if (n - j >= V && stride == 4 * V) { /* such as 64 elements of 16 */
            UNROLL for (int i = 0; i < V; i++) {
                const float *key = keys + (j + i) * stride;
                UNROLL for (int r = 0; r < rows; r++) {
                    const float *query = queries + r * stride;
                    vec sum = vload(query) * vload(key);
                    sum = vfma(vload(query + V), vload(key + V), sum);
                    sum = vfma(vload(query + 2 * V), vload(key + 2 * V), sum);
                    sums[r][i] = vfma(vload(query + 3 * V), vload(key + 3 * V), sum);
                }
            }
        } else {
            for (int64_t i = 0; i < V; i++) {
                const float *key = keys + (j + i) * stride;
                UNROLL for (int r = 0; r < rows; r++) {
                    const float *query = queries + r * stride;
                    vec sum = vzero();
                    if (j + i < n) {
                        sum = vload(query) * vload(key);
                        for (int64_t d = V; d < stride; d += V) sum = vfma(vload(query + d), vload(key + d), sum);
                    }
                    sums[r][i] = sum;
                }
            }
        }
        UNROLL for (int r = 0; r < rows; r++) vstore(scores + r * BLOCK + j, vsums(sums[r]));
    }
}

#define FOR_VECTORS(function, rows, vectors, ...) \
    switch (vectors) { \
    case 1: function(rows, 1, __VA_ARGS__); break; \
    case 2: function(rows, 2, __VA_ARGS__); break; \
    case 3: function(rows, TILE_VECTORS > 2 ? 3 : 2, __VA_ARGS__); break; \
    default: function(rows, TILE_VECTORS, __VA_ARGS__); \
    }

#define FOR_FEW(rows, vectors, function, ...) \
    switch (rows) { \
    case 1: FOR_VECTORS(function, 1, vectors, __VA_ARGS__) break; \
    case 2: FOR_VECTORS(function, 2, vectors, __VA_ARGS__) break; \
    default: FOR_VECTORS(function, 3, vectors, __VA_ARGS__) \
    }

#define FOR_TILE(rows, vectors, function, ...) \
    switch (rows) { \
    case 1: FOR_VECTORS(function, 1, vectors, __VA_ARGS__) break; \
    case 2: FOR_VECTORS(function, 2, vectors, __VA_ARGS__) break; \
    case 3: FOR_VECTORS(function, 3, vectors, __VA_ARGS__) break; \
    case 4: FOR_VECTORS(function, 4, vectors, __VA_ARGS__) break; \
    case 5: FOR_VECTORS(function, 5, vectors, __VA_ARGS__) break; \
    default: FOR_VECTORS(function, 6, vectors, __VA_ARGS__) \
    }

static void many_scores(int rows, int64_t vectors, const float *queries, int64_t stride, int64_t width,
                        const float *keys, float *scores) {
    for (int64_t c = 0; c < vectors; c += TILE_VECTORS)
        FOR_TILE(rows, least(TILE_VECTORS, vectors - c), tile_scores, queries, stride, width, keys + c * V,
                 scores + c * V)
}

/* Keys from `from` up to `to` of a block. */
static void add_outputs(int few, int rows, const float *weights, const float *fades, const float *values, int64_t from,
                        int64_t to, int64_t stride, float *outputs) {
    int64_t n = to - from;
    weights += from, values += from * stride;
    for (int64_t c = 0; c < stride; c += TILE_VECTORS * V) {
        int64_t vectors = least(TILE_VECTORS, (stride - c) / V);
        if (few)
            FOR_FEW(rows, vectors, few_outputs, from % 2, weights, fades, values + c, n, stride, outputs + c)
        else
            FOR_TILE(rows, vectors, tile_outputs, weights, fades, values + c, n, stride, outputs + c)
    }
}

/* Scores of a row and the keys from `first` on, of which it reaches those from begin to end: with all options. */
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
        vec x = vload(scores + c) * scale;
        if (call->softcap > 0) x = cap * vtanh(x / cap);
        if (bias) x = x + (call->bias_key ? vload(bias + c) : vset(*bias_part));
        if (call->slopes) x = vfma(vset(-row->slope), vabs(viota() + vset((float)(first + c - row->nearest))), x);
        vmask within = vrange(begin - c, end - c);
        if (mask) {
            within = vand(within, vbytes(mask + c));
            row->reached += vcount(within);
        }
        vstore(scores + c, vselect(within, x, barred));
    }
}

/* Scores of a row become weights, 0 up to `vectors`; returns what all that has been added up so far fades by. */
static float weigh(struct row *row, float *scores, int64_t first, int64_t n, int64_t vectors) {
    const struct call *call = row->call;
    int64_t begin = most(row->begin - first, 0), end = least(row->end - first, n);
    float top = -INFINITY;
    if (begin < end) {
        vec greatest = vset(-INFINITY);
        if (begin || row->mask || row->bias || call->slopes || call->softcap > 0) {
            finish_scores(row, scores, first, begin, end);
            for (int64_t c = 0; c < end; c += V) greatest = vmax(vload(scores + c), greatest);
        } else {
            vec scale = vset((float)call->scale);
            int64_t c = 0;
            row->reached += end;
            for (; c + V <= end; c += V) {
                vec x = vload(scores + c) * scale;
                vstore(scores + c, x);
                greatest = vmax(x, greatest);
            }
            if (c < end) {
                vec x = vselect(vrange(0, end - c), vload(scores + c) * scale, vset(-INFINITY));
                vstore(scores + c, x);
                greatest = vmax(x, greatest);
            }
        }
        top = vgreatest(greatest);
    }
    float before = row->top;
    top = top > before ? top : before;
    int64_t c = 0;
    float fade = 1;
    if (begin < end && top != -INFINITY) {
        vec shift = vset(top), total = vzero();
        for (; c < end; c += V) {
            vec x = vload(scores + c) - shift;
            vec weights = vselect(vbelow(x, vset(-103.0f)), vzero(), vexp(x));
            vstore(scores + c, weights);
            total = total + weights;
        }
        if (top != before) {
            fade = before == -INFINITY ? 0 : expf(before - top);
            row->top = top;
        }
        row->total = row->total * fade + vsum(total);
    } else {
        /* Of all that it reaches nothing weighs anything so far: NaN would not have shown. */
        for (int64_t i = most(begin, 0); i < end; i++)
            if (scores[i] != -INFINITY) row->total = NAN;
    }
    for (; c < vectors * V; c += V) vstore(scores + c, vzero());
    return fade;
}

/* Rows from `first_row` up to `last_row` meet the keys from token `begin` up to `end` that any of them reaches. */
static void meet(struct memory *memory, int64_t first_row, int64_t last_row, int64_t kv_head, int64_t begin, int64_t end,
                 int few) {
    const struct call *call = memory->rows[first_row].call;
    int64_t width = padded(call->head_dim), value_width = padded(call->value_dim);
    int64_t key_head = kv_head * call->key_head, value_head = kv_head * call->value_head;
    int64_t reach_begin = end, reach_end = begin;
    for (int64_t r = first_row; r < last_row; r++) {
        if (memory->rows[r].begin >= memory->rows[r].end) continue;
        reach_begin = least(reach_begin, memory->rows[r].begin);
        reach_end = most(reach_end, memory->rows[r].end);
    }
    begin = most(begin, reach_begin), end = least(end, reach_end);
    int64_t each = few ? FEW_ROWS : TILE_ROWS;
    int64_t page = call->page_tokens ? call->page_tokens : INT64_MAX;
    for (int64_t at = begin; at < end;) {
        /* Blocks begin at multiples of BLOCK in a page, whatever is reached. */
        int64_t page_begin = at / page * page, block = page_begin + (at - page_begin) / BLOCK * BLOCK;
        int64_t block_end = least(least(block + BLOCK, page_begin + least(page, INT64_MAX - page_begin)), call->kv_length);
        int64_t n = least(block_end, end) - block;
        const void *key = token_of(call, call->key, call->key_token, key_head, block);
        const void *value = token_of(call, call->value, call->value_token, value_head, block);
        const float *keys = memory->keys;
        if (few) keys = rows_of(key, call->kv_dtype, call->key_token, n, call->head_dim, memory->keys);
        else transpose_keys(call, key, n, memory->keys);
        const float *values = rows_of(value, call->kv_dtype, call->value_token, n, call->value_dim, memory->values);
        for (int64_t r = first_row; r < last_row; r += each) {
            int count = (int)least(each, last_row - r);
            struct row *rows = memory->rows + r;
            int64_t from = n, to = 0;
            for (int i = 0; i < count; i++) {
                if (rows[i].begin >= rows[i].end) continue;
                from = least(from, rows[i].begin - block);
                to = most(to, rows[i].end - block);
            }
            from = most(from, 0), to = least(to, n);
            if (from >= to) continue;
            int64_t vectors = (to + V - 1) / V;
            const float *queries = memory->queries + r * width;
            float fades[TILE_ROWS];
            if (few) {
                switch (count) {
                case 1: few_scores(1, queries, width, keys, to, memory->scores); break;
                case 2: few_scores(2, queries, width, keys, to, memory->scores); break;
                default: few_scores(3, queries, width, keys, to, memory->scores);
                }
            } else {
                many_scores(count, vectors, queries, width, call->head_dim, keys, memory->scores);
            }
            for (int i = 0; i < count; i++)
                fades[i] = weigh(rows + i, memory->scores + i * BLOCK, block, to, vectors);
            add_outputs(few, count, memory->scores, fades, values, from, to, value_width,
                        memory->outputs + r * value_width);
        }
        at = block_end;
    }
}

/* The row of a query in a head. */
INLINE void begin_row(struct row *row, const struct call *call, int64_t head, int64_t query) {
    int64_t position = sum_of(call->offset, query);
    int64_t begin = call->left >= 0 ? most(sum_of(position, -call->left), 0) : 0;
    int64_t end = call->right >= 0 ? least(sum_of(sum_of(position, call->right), 1), call->kv_length) : call->kv_length;
    row->call = call;
    row->head = head;
    row->query = query;
    row->begin = begin;
    row->end = most(end, begin);
    row->nearest = most(least(position, row->end - 1), begin);
    row->distance = begin < end ? fabs((double)position - (double)row->nearest) : 0;
    row->bias = call->bias ? call->bias + head * call->bias_head + query * call->bias_query : NULL;
    row->mask = call->mask ? call->mask + head * call->mask_head + query * call->mask_query : NULL;
    row->slope = call->slopes ? float_at(call->slopes, head) : 0;
    row->reached = 0;
    row->top = -INFINITY;
    row->total = 0;
}

/* Writes what a row has come to. Returns whether it is finite. */
INLINE int end_row(const struct row *row, const float *output) {
    const struct call *call = row->call;
    int64_t element_size = call->query_dtype == FLOAT32 ? 4 : 2;
    char *to = (char *)call->output + (row->query * call->output_token + row->head * call->output_head) * element_size;
    /* Until now all scores of a row with ALiBi have been too large by what the nearest key lacks. */
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
    vec share = vset(total == 0 ? 0 : (float)(fade / total)), suspect = vzero();
    for (int64_t c = 0; c < call->value_dim; c += V) {
        vec x = vfma(vload(output + c), share, vzero()); /* 0 even where what is next to nothing has made it -0 */
        suspect = suspect + x * vzero();
        narrow(x, call->query_dtype, least(V, call->value_dim - c), to + c * element_size);
    }
    finite &= vsum(suspect) == 0 && total - total == 0;
    if (call->lse) {
        float lse = total == 0 ? -INFINITY : (float)(top + log(total));
        memcpy(call->lse + row->head * call->lse_head + row->query, &lse, sizeof lse);
        finite &= lse < INFINITY;
    }
    return finite;
}

/* Computes again, by itself, a row that is not finite: it may have met a value that only other rows of its tile reach,
   be they of another call. Returns whether it is finite. */
__attribute__((noinline, cold))
static int is_finite_alone(struct memory *memory, int64_t place, int64_t kv_head, int few) {
    struct row *row = memory->rows + place;
    int64_t value_width = padded(row->call->value_dim);
    float *output = memory->outputs + place * value_width;
    begin_row(row, row->call, row->head, row->query);
    memset(output, 0, value_width * sizeof(float));
    meet(memory, place, place + 1, kv_head, 0, row->call->kv_length, few);
    return end_row(row, output);
}

/* Computes rows from `first` up to `last`, counted query by query, of one key head of all calls of a group. */
static void run_unit(struct memory *memory, struct call *calls, int64_t count, int64_t kv_head, int64_t first,
                     int64_t last) {
    int64_t group = calls->query_heads / calls->kv_heads, rows = last - first;
    int64_t width = padded(calls->head_dim), value_width = padded(calls->value_dim);
    int few = rows_of_call(calls) <= FEW_ROWS;
    for (int64_t i = 0; i < count; i++) {
        const struct call *call = calls + i;
        for (int64_t r = 0; r < rows; r++) {
            int64_t query = (first + r) / group, head = kv_head * group + (first + r) % group, at = i * rows + r;
            begin_row(memory->rows + at, call, head, query);
            widen(element(call->query, call->query_dtype, query * call->query_token + head * call->query_head),
                  call->query_dtype, call->head_dim, memory->queries + at * width);
        }
    }
    memset(memory->outputs, 0, count * rows * value_width * sizeof(float));
    int64_t together = 0;
    if (count > 1) {
        together = calls->kv_length / calls->page_tokens; /* a page that is not full may be fuller in another call */
        for (int64_t i = 1; i < count; i++)
            together = least(together, least(calls[i].shared, calls[i].kv_length / calls[i].page_tokens));
        together *= calls->page_tokens;
        meet(memory, 0, count * rows, kv_head, 0, together, few);
    }
    for (int64_t i = 0; i < count; i++) {
        meet(memory, i * rows, (i + 1) * rows, kv_head, together, calls[i].kv_length, few);
        for (int64_t r = i * rows; r < (i + 1) * rows; r++) {
            if (end_row(memory->rows + r, memory->outputs + r * value_width)) continue;
            if (__atomic_load_n(&calls[i].finite, __ATOMIC_RELAXED) && !is_finite_alone(memory, r, kv_head, few))
                __atomic_store_n(&calls[i].finite, 0, __ATOMIC_RELAXED);
        }
    }
}

/* How many of the calls from the first on are computed as a group. */
static int64_t group_of(const struct call *calls, int64_t count) {
    int64_t found = 1, rows = most(rows_of_call(calls), 1);
    while (found < count && calls[found].shared > 0 && (found + 1) * rows <= GROUP_ROWS) found++;
    return found;
}

/* The rows of each call in a unit of a group of calls: whole tiles, if they are not all. */
static int64_t unit_rows(const struct call *calls, int64_t group) {
    int64_t rows = rows_of_call(calls), parts = most((rows + UNIT_ROWS / 2) / UNIT_ROWS, 1);
    if (group > 1 || parts == 1) return most(rows, 1);
    int64_t each = (rows + parts - 1) / parts;
    return (each + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
}

static float *floats(int64_t count) {
    return aligned_alloc(64, (size_t)(count * sizeof(float) + 63) / 64 * 64 + 64);
}

static int take_memory(struct memory *memory, const struct call *calls, int64_t count) {
    int64_t rows = 0, queries = 0, outputs = 0, keys = 0, values = 0;
    for (int64_t at = 0; at < count;) {
        int64_t group = group_of(calls + at, count - at), own = unit_rows(calls + at, group) * group;
        int64_t width = padded(calls[at].head_dim), value_width = padded(calls[at].value_dim);
        rows = most(rows, own);
        queries = most(queries, own * width);
        outputs = most(outputs, own * value_width);
        keys = most(keys, width);
        values = most(values, value_width);
        at += group;
    }
    memory->queries = floats(queries);
    memory->outputs = floats(outputs);
    memory->keys = floats(keys * BLOCK);
    memory->values = floats(values * BLOCK);
    memory->rows = malloc(rows * sizeof *memory->rows + 1);
    return memory->queries && memory->outputs && memory->keys && memory->values && memory->rows;
}

int64_t ATTEND(struct call *calls, int64_t count, int64_t *next) {
    struct memory memory;
    int64_t taken = take_memory(&memory, calls, count);
    if (taken) {
        int64_t unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), before = 0;
        for (int64_t at = 0; at < count;) {
            int64_t group = group_of(calls + at, count - at), each = unit_rows(calls + at, group);
            int64_t rows = rows_of_call(calls + at);
            int64_t parts = (rows + each - 1) / each, units = parts * calls[at].kv_heads;
            for (; unit < before + units; unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) {
                int64_t head = (unit - before) / parts, part = (unit - before) % parts;
                run_unit(&memory, calls + at, group, head, part * each, least((part + 1) * each, rows));
            }
            before += units;
            at += group;
        }
    }
    free(memory.queries);
    free(memory.outputs);
    free(memory.keys);
    free(memory.values);
    free(memory.rows);
    return taken ? 0 : -1;
}
