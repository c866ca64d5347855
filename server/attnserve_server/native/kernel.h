/* Exact attention with the vectors of one instruction set, which the including file has defined.

   Rows that read the same key head process a block of keys together. A unit of work is some rows of one key head of a
   call; or, of a group of calls that share pages, all rows of one key head. If these are few rows over many keys, each
   range of keys is a unit instead, and the partial results are merged in the order of the keys. */

#include "unit.h"

enum {
    UNIT_ROWS = 126,    /* of a unit, approximately, if its call is in no group: each unit transposes all keys itself */
    GROUP_ROWS = 504,   /* calls with more rows of a key head together than this are computed as several groups */
    MOST_KEPT = 1 << 24 /* floats kept for ranges that are units: if they need more, a unit computes all its ranges, one
                           after the other */
};

/* How many of the calls from the first on are computed as a group. */
static int64_t group_of(const struct call *calls, int64_t count) {
    int64_t found = 1, rows = most(rows_of_call(calls), 1);
    while (found < count && calls[found].shared > 0 && (found + 1) * rows <= GROUP_ROWS) found++;
    return found;
}

/* The rows of each call in a unit of a group: all of them, or a multiple of whole tiles. */
static int64_t unit_rows(const struct call *calls, int64_t group) {
    int64_t rows = rows_of_call(calls), parts = most((rows + UNIT_ROWS / 2) / UNIT_ROWS, 1);
    if (group > 1 || parts == 1) return most(rows, 1);
    int64_t each = (rows + parts - 1) / parts;
    return (each + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
}

static float *floats(int64_t count) {
    return aligned_alloc(64, (size_t)(count * sizeof(float) + 63) / 64 * 64 + 64);
}

static char *allocated(int64_t count, int64_t dtype) {
    return (char *)floats((count * bytes_of(dtype) + 3) / 4);
}

/* What threads compute together. */
struct work {
    struct call *calls;
    int64_t count;
    int64_t next;           /* the first unit that no thread has taken yet */
    float *kept;            /* partial results of all groups and key heads whose ranges are units, end to end */
    int64_t *left;          /* for each of these: how many ranges are not computed yet */
    int begun;              /* some thread had the memory to begin: it computes all that others do not */
};

/* The ranges that any call of a group reaches. */
static struct ranges ranges_of_group(const struct call *calls, int64_t group) {
    struct ranges ranges = ranges_of(calls);
    for (int64_t i = 1; i < group; i++) {
        struct ranges own = ranges_of(calls + i);
        ranges.first = least(ranges.first, own.first);
        ranges.end = most(ranges.end, own.end);
    }
    return ranges;
}

/* The floats that a key head of a group keeps if its ranges are units; 0 if they are not. They are if there is room for
   all of them beside those of earlier groups, which keep `before`. */
static int64_t kept_of_group(const struct call *calls, int64_t group, struct ranges ranges, int64_t before) {
    int64_t kept = count_of(ranges) * group * rows_of_call(calls) * kept_floats(calls);
    return count_of(ranges) > 1 && kept <= (MOST_KEPT - before) / calls->kv_heads ? kept : 0;
}

/* Allocates the memory that all threads write to. */
static int prepare(struct work *work) {
    int64_t kept = 0, heads = 0;
    for (int64_t at = 0; at < work->count;) {
        const struct call *calls = work->calls + at;
        int64_t group = group_of(calls, work->count - at);
        int64_t own = kept_of_group(calls, group, ranges_of_group(calls, group), kept);
        if (own) heads += calls->kv_heads;
        kept += calls->kv_heads * own;
        at += group;
    }
    if (!heads) return 1;
    work->kept = floats(kept);
    work->left = malloc(heads * sizeof *work->left);
    if (!work->kept || !work->left) return 0;
    int64_t *left = work->left;
    kept = 0;
    for (int64_t at = 0; at < work->count;) {
        const struct call *calls = work->calls + at;
        int64_t group = group_of(calls, work->count - at);
        struct ranges ranges = ranges_of_group(calls, group);
        int64_t own = kept_of_group(calls, group, ranges, kept);
        for (int64_t head = 0; own && head < calls->kv_heads; head++) *left++ = count_of(ranges);
        kept += calls->kv_heads * own;
        at += group;
    }
    return 1;
}

static int take_memory(struct memory *memory, const struct call *calls, int64_t count) {
    int64_t rows = 0, queries = 0, outputs = 0, keys = 0, values = 0, merged = 0;
    for (int64_t at = 0; at < count;) {
        int64_t group = group_of(calls + at, count - at), own = unit_rows(calls + at, group) * group;
        int64_t width = padded(calls[at].head_dim), value_width = padded(calls[at].value_dim);
        rows = most(rows, own);
        queries = most(queries, own * width);
        outputs = most(outputs, own * value_width);
        keys = most(keys, width);
        values = most(values, value_width);
        if (rows_of_call(calls + at) <= RANGE_ROWS) merged = most(merged, (own + 1) * kept_floats(calls + at));
        at += group;
    }
    memory->near = all_near(calls, count);
    memory->queries = floats(queries);
    memory->outputs = floats(outputs);
    memory->keys = floats(keys * BLOCK);
    memory->values = floats(values * BLOCK);
    memory->merged = floats(merged);
    memory->rows = malloc(rows * sizeof *memory->rows + 1);
    return memory->queries && memory->outputs && memory->keys && memory->values && memory->merged && memory->rows;
}

/* Takes units of work until none is left. Units are numbered group by group, so that each thread goes through the
   groups once. */
static void compute(void *all) {
    struct work *work = all;
    struct memory memory;
    if (take_memory(&memory, work->calls, work->count)) {
        int64_t unit = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED), before = 0;
        __atomic_store_n(&work->begun, 1, __ATOMIC_RELAXED);
        int64_t taken = 0, *left = work->left;
        for (int64_t at = 0; at < work->count;) {
            struct call *calls = work->calls + at;
            int64_t group = group_of(calls, work->count - at);
            int64_t each = unit_rows(calls, group), rows = rows_of_call(calls);
            struct ranges ranges = ranges_of_group(calls, group);
            int64_t kept = kept_of_group(calls, group, ranges, taken);
            int64_t parts = kept ? count_of(ranges) : (rows + each - 1) / each, units = parts * calls->kv_heads;
            for (; unit < before + units; unit = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) {
                int64_t head = (unit - before) / parts, part = (unit - before) % parts;
                struct apart apart = {ranges, kept ? work->kept + taken + head * kept : NULL, left + head};
                int64_t first = kept ? 0 : part * each;
                run_unit(&memory, calls, group, head, first, least(first + each, rows), apart, ranges.first + part);
            }
            if (kept) taken += kept * calls->kv_heads, left += calls->kv_heads;
            before += units;
            at += group;
        }
    }
    free(memory.queries);
    free(memory.outputs);
    free(memory.keys);
    free(memory.values);
    free(memory.merged);
    free(memory.rows);
}

int64_t ATTEND(struct call *calls, int64_t count, struct team *team, int64_t helpers) {
    struct work work = {calls, count, 0, NULL, NULL, 0};
    if (prepare(&work)) share(team, helpers, compute, &work);
    free(work.kept);
    free(work.left);
    return work.begun ? 0 : -1;
}
