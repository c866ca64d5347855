/* Products of queries with a block of keys, and of weights with its values: in tiles, so that they read from cache.

   Many rows compute scores from a transposed block of keys: a vector is a query's scores for V keys. Few rows would not
   repay the transposition, and use vectors of V elements of a key. */

#include "elements.h"

enum {
    BLOCK = 64,         /* keys */
    TILE_ROWS = 6,
    EIGHT = 8,          /* the number of vectors that vtops and vtotals take; no less than TILE_ROWS */
    FEW_ROWS = 3,       /* of a call and a key head: up to this many are computed without transposition */
    NARROW_TILES = TILE_VECTORS < 4, /* a tile's columns are so few sums that a single row stalls on each of them */
    FEW_VECTORS = NARROW_TILES ? 4 : TILE_VECTORS, /* of outputs at once, for a single row */
    SUMMED = 32,        /* products: a score of wider heads is a sum of such sums, for smaller rounding errors */
};

/* n keys, [n, D] by strides, as [D, BLOCK], padded with zeros to whole vectors. */
static void transpose_keys(const struct call *call, const void *from, int64_t n, float *to) {
    int64_t width = call->head_dim;
    for (int64_t j = 0; j < n; j += V) {
        int64_t rows = least(V, n - j);
        for (int64_t d = 0; d < width; d += V) {
            int64_t columns = least(V, width - d);
            vec square[V];
            if (rows == V && columns == V && call->kv_dtype == FLOAT32) {
                const float *part = (const float *)from + j * call->key_token + d;
                UNROLL for (int64_t i = 0; i < V; i++) square[i] = vload(part + i * call->key_token);
            } else {
                for (int64_t i = 0; i < V; i++) {
                    float whole[V];
                    const void *part = element(from, call->kv_dtype, (j + i) * call->key_token + d);
                    if (i < rows) widen(part, call->kv_dtype, columns, whole);
                    square[i] = i < rows ? vload(whole) : vzero();
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

/* n rows [n, width] by a stride, as [n, padded width]: in place if they are that already, else copied to `to`. */
static const float *rows_of(const void *from, int64_t dtype, int64_t stride, int64_t n, int64_t width, float *to) {
    if (dtype == FLOAT32 && stride == width && width % V == 0) return from;
    for (int64_t i = 0; i < n; i++) widen(element(from, dtype, i * stride), dtype, width, to + i * padded(width));
    return to;
}

/* Dot products of `rows` queries and `vectors` * V keys of a transposed block, from column 0 of `keys` on. */
INLINE void tile_scores(int rows, int vectors, const float *queries, int64_t stride, int64_t width, const float *keys,
                        float *scores) {
    int64_t from = 0;
    do {
        int64_t to = least(from + SUMMED, width);
        vec sums[TILE_ROWS][TILE_VECTORS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vzero();
        REPEAT for (int64_t d = from; d < to; d++) {
            vec columns[TILE_VECTORS];
            UNROLL for (int c = 0; c < vectors; c++) columns[c] = vload(keys + d * BLOCK + c * V);
            UNROLL for (int r = 0; r < rows; r++) {
                vec element = vset(float_at(queries, r * stride + d));
                UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vfma(element, columns[c], sums[r][c]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < vectors; c++) {
                float *score = scores + r * BLOCK + c * V;
                vec before = vzero();
                if (from > 0) before = vload(score);
                vstore(score, before + sums[r][c]);
            }
        from = to;
    } while (from < width);
}

/* outputs[r] = outputs[r] * fades[r] + sum over n of weights[r][j] * values[j], for `vectors` * V columns of values. */
INLINE void tile_outputs(int rows, int vectors, const float *weights, const float *fades, const float *values,
                         int64_t n, int64_t stride, float *outputs) {
    vec sums[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vzero();
    }
    REPEAT for (int64_t j = 0; j < n; j++) {
        vec columns[TILE_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++) columns[c] = vload(values + j * stride + c * V);
        UNROLL for (int r = 0; r < rows; r++) {
            vec weight = vset(weights[r * BLOCK + j]);
            UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vfma(weight, columns[c], sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        vec fade = vset(fades[r]);
        UNROLL for (int c = 0; c < vectors; c++) {
            float *output = outputs + r * stride + c * V;
            vstore(output, vfma(fade, vload(output), sums[r][c]));
        }
    }
}

/* Keys or values that few rows need next, NULL if none. They are prefetched row by row while those before them are
   processed, because few rows are bound by memory. By itself, a processor prefetches no further than its next page, and
   nothing while scores are being weighed. Strides and widths are in bytes. */
struct ahead {
    const char *rows;
    int64_t stride, width;
};
#define NOTHING ((struct ahead){NULL, 0, 0}) /* gets code of its own: checking for NULL takes a tenth of the time */

INLINE void ask_for(struct ahead ahead, int64_t row) {
    if (!ahead.rows) return;
    const char *from = ahead.rows + row * ahead.stride;
    for (int64_t at = 0; at < ahead.width; at += 64) __builtin_prefetch(from + at);
}

/* tile_outputs for few rows: every other key goes to a second sum, since a single one would stall on itself. In the
   block in which a row's reach begins, other rows decide which key goes to which sum. That changes no bit: there is no
   output yet, so that the sums are at most swapped. */
INLINE void few_outputs(int rows, int vectors, const float *weights, const float *fades, const float *values, int64_t n,
                        int64_t stride, float *outputs, struct ahead ahead) {
    vec sums[FEW_ROWS][FEW_VECTORS], others[FEW_ROWS][FEW_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) {
        vec fade = vset(fades[r]);
        UNROLL for (int c = 0; c < vectors; c++) {
            sums[r][c] = fade * vload(outputs + r * stride + c * V);
            others[r][c] = vzero();
        }
    }
    int64_t j = 0;
    for (; j + 2 <= n; j += 2) {
        ask_for(ahead, j);
        ask_for(ahead, j + 1);
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
INLINE void few_scores(int rows, const float *queries, int64_t stride, const float *keys, int64_t n, float *scores,
                       struct ahead ahead) {
    for (int64_t j = 0; j < n; j += V) {
        vec sums[FEW_ROWS][V];
        if (n - j >= V && stride == 4 * V) { /* such as 64 elements of 16 */
            UNROLL for (int i = 0; i < V; i++) {
                const float *key = keys + (j + i) * stride;
                ask_for(ahead, j + i);
                UNROLL for (int r = 0; r < rows; r++) {
                    const float *query = queries + r * stride;
                    vec sum = vload(query) * vload(key);
                    sum = vfma(vload(query + V), vload(key + V), sum);
                    sum = vfma(vload(query + 2 * V), vload(key + 2 * V), sum);
                    sums[r][i] = vfma(vload(query + 3 * V), vload(key + 3 * V), sum);
                }
            }
        } else if (NARROW_TILES && !ahead.rows && n - j >= V && stride == 8 * V) { /* such as 64 elements of 8 */
            UNROLL for (int i = 0; i < V; i++) {
                const float *key = keys + (j + i) * stride;
                UNROLL for (int r = 0; r < rows; r++) {
                    const float *query = queries + r * stride;
                    vec sum = vload(query) * vload(key);
                    UNROLL for (int d = 1; d < 8; d++) sum = vfma(vload(query + d * V), vload(key + d * V), sum);
                    sums[r][i] = sum;
                }
            }
        } else {
            for (int64_t i = 0; i < V; i++) {
                const float *key = keys + (j + i) * stride;
                ask_for(ahead, j + i);
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

INLINE void any_few_scores(int rows, const float *queries, int64_t stride, const float *keys, int64_t n, float *scores,
                           struct ahead ahead) {
    switch (rows) {
    case 1: few_scores(1, queries, stride, keys, n, scores, ahead); break;
    case 2: few_scores(2, queries, stride, keys, n, scores, ahead); break;
    default: few_scores(3, queries, stride, keys, n, scores, ahead);
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

/* Adds the weighted values of keys `from` up to `to` of a block. */
static void add_outputs(int few, int rows, const float *weights, const float *fades, const float *values, int64_t from,
                        int64_t to, int64_t stride, float *outputs, struct ahead ahead) {
    int64_t n = to - from;
    weights += from, values += from * stride;
    int64_t c = 0;
    if (NARROW_TILES && few && rows == 1 && !ahead.rows)
        for (; c + FEW_VECTORS * V <= stride; c += FEW_VECTORS * V)
            few_outputs(1, FEW_VECTORS, weights, fades, values + c, n, stride, outputs + c, NOTHING);
    for (; c < stride; c += TILE_VECTORS * V) {
        int64_t vectors = least(TILE_VECTORS, (stride - c) / V);
        if (few && ahead.rows)
            FOR_FEW(rows, vectors, few_outputs, weights, fades, values + c, n, stride, outputs + c, ahead)
        else if (few)
            FOR_FEW(rows, vectors, few_outputs, weights, fades, values + c, n, stride, outputs + c, NOTHING)
        else
            FOR_TILE(rows, vectors, tile_outputs, weights, fades, values + c, n, stride, outputs + c)
        ahead.rows = NULL;
    }
}
