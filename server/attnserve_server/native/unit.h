/* A unit of work: computes some rows of one key head of a call, or all of one key head of a group of calls that share
   pages. */

#include "rows.h"

enum {
    RANGE_KEYS = 2048,  /* in a range, for few rows: which ranges a row has follows from its own call's reach */
    RANGE_ROWS = 32,    /* of a call with ranges, at most: more rows make as many units without ranges, and would need
                           more memory for merging */
    FAR_BYTES = 1 << 22, /* of all keys and values of a call of few rows: fewer are mostly in cache */
    NEAR_BYTES = 1 << 24, /* of all calls, for narrow tiles: up to this many may be in cache from the last time */
    NARROW_BYTES = 256  /* of a key or value: for wider ones, the processor's own prefetching suffices */
};

struct memory {
    float *queries;             /* [rows, padded D] */
    const float *asked;         /* the queries of a unit: `queries`, or where they were received, at any address */
    float *outputs;             /* [rows, padded Dv] */
    float *keys;                /* [D, BLOCK] transposed, or [BLOCK, padded D] */
    float *values;              /* [BLOCK, padded Dv] */
    float *merged;              /* [rows + 1, kept_floats]: the merged ranges of each row, and one more range */
    struct row *rows;
    int near;                   /* all keys and values of all calls may be in cache: then nothing is prefetched */
    float scores[TILE_ROWS * BLOCK] __attribute__((aligned(64)));
};

/* How many rows of a call read the same key head. */
INLINE int64_t rows_of_call(const struct call *call) {
    return call->query_length * (call->query_heads / call->kv_heads);
}

/* The address of a token's key or value in a head. */
INLINE const void *token_of(const struct call *call, const void *base, int64_t stride, int64_t head, int64_t token) {
    if (call->page_tokens) {
        base = ((const void *const *)base)[token / call->page_tokens];
        token %= call->page_tokens;
    }
    return element(base, call->kv_dtype, token * stride + head);
}

/* The float32 keys or values of a head, from a token on. */
INLINE struct ahead rows_ahead(const struct call *call, const void *base, int64_t stride, int64_t head, int64_t width,
                               int64_t token) {
    int64_t bytes = sizeof(float);
    return (struct ahead){token_of(call, base, stride, head, token), stride * bytes, width * bytes};
}

/* Whether all keys and values of calls may still be in the processor's last cache, from the last time that the calls
   were computed: then prefetching would cost a fifth of the time. Never with wide tiles. */
static int all_near(const struct call *calls, int64_t count) {
    int64_t left = NARROW_TILES ? NEAR_BYTES : 0;
    for (int64_t i = 0; i < count && left > 0; i++) {
        int64_t bytes = (calls[i].head_dim + calls[i].value_dim) * calls[i].kv_heads * (int64_t)sizeof(float);
        left = calls[i].kv_length < left / bytes ? left - calls[i].kv_length * bytes : 0;
    }
    return left > 0;
}

/* Whether to prefetch keys and values for few rows of a call. Where these are in cache, or are widened when read,
   prefetching made it take 5 to 50 % longer. */
INLINE int asks_ahead(const struct call *call) {
    int64_t bytes = (call->head_dim + call->value_dim) * (int64_t)sizeof(float);
    return call->kv_dtype == FLOAT32 && call->head_dim <= NARROW_BYTES / 4 && call->value_dim <= NARROW_BYTES / 4 &&
           call->kv_length > FAR_BYTES / bytes / call->kv_heads;
}

/* Processes rows from `first_row` up to `last_row` with the keys from token `begin` up to `end` that any of them
   reaches. */
static void meet(struct memory *memory, int64_t first_row, int64_t last_row, int64_t kv_head, int64_t begin,
                 int64_t end, int few) {
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
    int asks = few && !memory->near && asks_ahead(call);
    int64_t page = call->page_tokens ? call->page_tokens : INT64_MAX;
    for (int64_t at = begin; at < end;) {
        /* Blocks begin at multiples of BLOCK in a page, whichever keys are reached. */
        int64_t page_begin = at / page * page, block = page_begin + (at - page_begin) / BLOCK * BLOCK;
        int64_t page_end = sum_of(page_begin, page);
        int64_t block_end = least(least(block + BLOCK, page_end), call->kv_length);
        int64_t n = least(block_end, end) - block;
        const void *key = token_of(call, call->key, call->key_token, key_head, block);
        const void *value = token_of(call, call->value, call->value_token, value_head, block);
        const float *keys = memory->keys;
        if (few) keys = rows_of(key, call->kv_dtype, call->key_token, n, call->head_dim, memory->keys);
        else transpose_keys(call, key, n, memory->keys);
        const float *values = rows_of(value, call->kv_dtype, call->value_token, n, call->value_dim, memory->values);
        /* To prefetch: this block's values if read in place (the next block's if just copied), then the next keys. */
        struct ahead next_values = NOTHING, next_keys = NOTHING;
        int64_t next = values == value ? block : block_end;
        if (asks && next < end)
            next_values = rows_ahead(call, call->value, call->value_token, value_head, call->value_dim, next);
        if (asks && block_end < end)
            next_keys = rows_ahead(call, call->key, call->key_token, key_head, call->head_dim, block_end);
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
            const float *queries = memory->asked + r * width;
            float fades[V];
            if (few) {
                if (next_values.rows) any_few_scores(count, queries, width, keys, to, memory->scores, next_values);
                else any_few_scores(count, queries, width, keys, to, memory->scores, NOTHING);
            } else {
                many_scores(count, vectors, queries, width, call->head_dim, keys, memory->scores);
            }
            weigh_tile(count, rows, memory->scores, block, to, vectors, fades);
            add_outputs(few, count, memory->scores, fades, values, from, to, value_width,
                        memory->outputs + r * value_width, next_keys);
            next_values.rows = next_keys.rows = NULL;
        }
        at = block_end;
    }
}

/* Ranges of RANGE_KEYS keys that are computed separately; if there is only one, keys are not divided. */
struct ranges {
    int64_t first, end;
};

INLINE int64_t count_of(struct ranges ranges) { return ranges.end - ranges.first; }

/* The ranges that the rows of a call reach, before masking. */
static struct ranges ranges_of(const struct call *call) {
    struct ranges one = {0, 1};
    int64_t rows = rows_of_call(call);
    if (rows < 1 || rows > RANGE_ROWS || call->kv_length <= RANGE_KEYS) return one;
    struct row first, last;
    begin_row(&first, call, 0, 0);
    begin_row(&last, call, 0, call->query_length - 1);
    int64_t end = least(last.end, call->kv_length);
    if (first.begin >= end) return one;
    return (struct ranges){first.begin / RANGE_KEYS, (end - 1) / RANGE_KEYS + 1};
}

/* The floats of a row's partial result. */
INLINE int64_t kept_floats(const struct call *call) { return padded(call->value_dim) + V; }

/* Writes a row's result. Returns whether it is finite. */
INLINE int ends_finite(const struct row *row, const float *output) {
    vec suspect = vzero();
    return end_row(row, output, &suspect) && vsum(suspect) == 0;
}

/* Recomputes a non-finite row by itself: it may have met a value that only other rows of its tile reach, even those of
   another call. Returns whether it is finite. */
__attribute__((noinline, cold))
static int is_finite_alone(struct memory *memory, int64_t place, int64_t kv_head, int few) {
    struct row *row = memory->rows + place;
    const struct call *call = row->call;
    int64_t value_width = padded(call->value_dim), head = row->head, query = row->query;
    float *output = memory->outputs + place * value_width, *behind = memory->merged + kept_floats(call);
    struct ranges ranges = ranges_of(call);
    int divided = count_of(ranges) > 1;
    for (int64_t range = ranges.first; range < ranges.end; range++) {
        begin_row(row, call, head, query);
        if (divided) narrow_row(row, range * RANGE_KEYS, (range + 1) * RANGE_KEYS);
        memset(output, 0, value_width * sizeof(float));
        meet(memory, place, place + 1, kv_head, 0, call->kv_length, few);
        if (!divided) break;
        keep(row, output, value_width, range > ranges.first ? behind : memory->merged);
        if (range > ranges.first) join(memory->merged, behind, value_width);
    }
    if (divided) recall(row, output, value_width, memory->merged);
    return ends_finite(row, output);
}

/* Writes the results of a unit's rows. */
static void end_rows(struct memory *memory, struct call *calls, int64_t count, int64_t rows, int64_t kv_head, int few) {
    int64_t value_width = padded(calls->value_dim);
    for (int64_t i = 0; i < count; i++) {
        vec suspect = vzero(); /* of all rows together: non-finite rows are rare */
        int finite = 1;
        for (int64_t r = i * rows; r < (i + 1) * rows; r++)
            finite &= end_row(memory->rows + r, memory->outputs + r * value_width, &suspect);
        if (finite && vsum(suspect) == 0) continue;
        for (int64_t r = i * rows; r < (i + 1) * rows; r++) {
            if (ends_finite(memory->rows + r, memory->outputs + r * value_width)) continue;
            if (__atomic_load_n(&calls[i].finite, __ATOMIC_RELAXED) && !is_finite_alone(memory, r, kv_head, few))
                __atomic_store_n(&calls[i].finite, 0, __ATOMIC_RELAXED);
        }
    }
}

/* Gathers the queries of rows `first` up to `last`, counted query by query, of one key head of a group. Those of a
   single call are used in place if their layout allows. */
static void take_queries(struct memory *memory, const struct call *calls, int64_t count, int64_t kv_head, int64_t first,
                         int64_t last) {
    int64_t group = calls->query_heads / calls->kv_heads, width = padded(calls->head_dim);
    int adjacent = (group == 1 || calls->query_head == width) &&
                   (calls->query_length == 1 || calls->query_token == group * width);
    if (count == 1 && calls->query_dtype == FLOAT32 && calls->head_dim == width && adjacent) {
        memory->asked = (const float *)calls->query + kv_head * group * calls->query_head + first * width;
        return;
    }
    float *to = memory->queries;
    memory->asked = to;
    for (int64_t i = 0; i < count; i++) {
        const struct call *call = calls + i;
        for (int64_t r = first; r < last; r++, to += width)
            widen(element(call->query, call->query_dtype,
                          r / group * call->query_token + (kv_head * group + r % group) * call->query_head),
                  call->query_dtype, call->head_dim, to);
    }
}

/* Processes these rows with the keys from `begin` up to `end`, which is INT64_MAX for all keys. */
INLINE void meet_range(struct memory *memory, const struct call *calls, int64_t count, int64_t kv_head, int64_t first,
                       int64_t last, int64_t begin, int64_t end, int few) {
    int64_t group = calls->query_heads / calls->kv_heads, rows = last - first;
    struct row *row = memory->rows;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t r = first; r < last; r++, row++) {
            begin_row(row, calls + i, kv_head * group + r % group, r / group);
            if (end < INT64_MAX) narrow_row(row, begin, end);
        }
    }
    memset(memory->outputs, 0, count * rows * padded(calls->value_dim) * sizeof(float));
    int64_t together = 0;
    if (count > 1) {
        together = calls->kv_length / calls->page_tokens; /* whole pages: a partial one may hold more in another call */
        for (int64_t i = 1; i < count; i++)
            together = least(together, least(calls[i].shared, calls[i].kv_length / calls[i].page_tokens));
        together *= calls->page_tokens;
        meet(memory, 0, count * rows, kv_head, 0, together, few);
    }
    for (int64_t i = 0; i < count; i++)
        meet(memory, i * rows, (i + 1) * rows, kv_head, together, calls[i].kv_length, few);
}

/* The partial results of a group's rows of one key head, in each range of keys that any of its calls reaches. */
struct apart {
    struct ranges ranges;
    float *kept;        /* [ranges, rows, kept_floats], if each range is a unit; otherwise NULL */
    int64_t *left;      /* how many ranges are not computed yet */
};

/* Computes rows from `first` up to `last` of one key head, of all calls of a group. Where ranges are units, it computes
   one range, and the last of these units to finish merges them all. Otherwise it computes one range after the other. */
static void run_unit(struct memory *memory, struct call *calls, int64_t count, int64_t kv_head, int64_t first,
                     int64_t last, struct apart apart, int64_t range) {
    int64_t rows = last - first, all = count * rows, value_width = padded(calls->value_dim), each = kept_floats(calls);
    int few = rows_of_call(calls) <= FEW_ROWS;
    take_queries(memory, calls, count, kv_head, first, last);
    if (count_of(apart.ranges) == 1) {
        meet_range(memory, calls, count, kv_head, first, last, 0, INT64_MAX, few);
    } else if (apart.kept) {
        meet_range(memory, calls, count, kv_head, first, last, range * RANGE_KEYS, (range + 1) * RANGE_KEYS, few);
        for (int64_t r = 0; r < all; r++)
            keep(memory->rows + r, memory->outputs + r * value_width, value_width,
                 apart.kept + ((range - apart.ranges.first) * all + r) * each);
        if (__atomic_sub_fetch(apart.left, 1, __ATOMIC_ACQ_REL)) return;
        for (int64_t r = 0; r < all; r++) {
            struct ranges own = ranges_of(calls + r / rows);
            float *kept = apart.kept + ((own.first - apart.ranges.first) * all + r) * each;
            for (int64_t next = 1; next < count_of(own); next++) join(kept, kept + next * all * each, value_width);
            recall(memory->rows + r, memory->outputs + r * value_width, value_width, kept);
        }
    } else {
        float *behind = memory->merged + all * each;
        for (range = apart.ranges.first; range < apart.ranges.end; range++) {
            meet_range(memory, calls, count, kv_head, first, last, range * RANGE_KEYS, (range + 1) * RANGE_KEYS, few);
            for (int64_t r = 0; r < all; r++) {
                struct ranges own = ranges_of(calls + r / rows);
                if (range < own.first || range >= own.end) continue;
                float *kept = memory->merged + r * each, *to = range > own.first ? behind : kept;
                keep(memory->rows + r, memory->outputs + r * value_width, value_width, to);
                if (to == behind) join(kept, behind, value_width);
            }
        }
        for (int64_t r = 0; r < all; r++)
            recall(memory->rows + r, memory->outputs + r * value_width, value_width, memory->merged + r * each);
    }
    end_rows(memory, calls, count, rows, kv_head, few);
}
