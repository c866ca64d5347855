/* From one attention of a stack of blocks to the next: products, and norms, activations and rotations between them.

   Many rows are divided into units, which a thread computes from end to end: its rows stay in a cache near it, and no
   thread waits for another. Few rows are computed step by step, each divided among threads, mostly by the columns of a
   weight: reading the weights takes longest then. A row's bits are the same either way. */

#include "elementwise.h"

enum {
    UNITS_OF_THREAD = 4,            /* at least, if units so small have FEWEST_ROWS */
    FEWEST_ROWS = 2 * BLOCK_ROWS,   /* of a unit: each reads all weights */
    ALONE_ELEMENTS = 1 << 12        /* between products: one thread has computed fewer than these before another has
                                       begun */
};

/* Rows of one unit, and what they become. All but hidden units [rows, outputs of up] are [rows, width]. */
struct unit {
    const struct passage *passage;
    struct passed passed;
    const char *attention;          /* what the attention gives */
    char *part;                     /* what a part of a block gives */
    char *normed;                   /* what the feed-forward part takes, if there is a norm before it */
    char *ready;                    /* likewise, what the next product takes; or the results, if there is none */
    char *hidden;
};

/* Computes a row behind a part: with the residual connection, and with a norm if that comes after it. Then, if there is
   a norm before the next part, what that gives. */
INLINE void connect(const struct unit *unit, int64_t row, const void *before, const char *part, const struct norm *norm,
                    const struct norm *next, char *ready) {
    const struct passage *passage = unit->passage;
    int64_t dtype = passage->dtype, width = passage->width, at = row * width * bytes_of(dtype);
    char *behind = (char *)unit->passed.behind + at;
    for (int64_t c = 0; c < width; c += V) {
        vec x = vload_as(element((const char *)before + at, dtype, c), dtype);
        narrow(x + vload_as(element(part + at, dtype, c), dtype), dtype, V, behind + c * bytes_of(dtype));
    }
    if (norm->kind) normalize(norm, dtype, width, behind, behind);
    if (next->kind) normalize(next, dtype, width, behind, ready + at);
}

/* The steps between products, each for one row of a unit. */

static void enter_forward(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    connect(unit, row, unit->passed.rows, unit->attention, &passage->behind_attention, &passage->before_forward,
            unit->normed);
}

static void leave_attention(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    connect(unit, row, unit->passed.rows, unit->attention, &passage->behind_attention, &passage->before_next,
            unit->ready);
}

static void leave_forward(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    connect(unit, row, unit->passed.behind, unit->part, &passage->behind_forward, &passage->before_next, unit->ready);
}

static void begin(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    int64_t at = row * passage->width * bytes_of(passage->dtype);
    normalize(&passage->before_next, passage->dtype, passage->width, (const char *)unit->passed.rows + at,
              unit->ready + at);
}

static void activate(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    int64_t dtype = passage->dtype;
    char *hidden = unit->hidden + row * passage->up.outputs * bytes_of(dtype);
    activate_row(passage->activation, passage->gated != 0, dtype, passage->down.inputs, hidden);
}

static void turn_row(const struct unit *unit, int64_t row) {
    const struct passage *passage = unit->passage;
    char *projected = (char *)unit->passed.next + row * passage->next.outputs * bytes_of(passage->dtype);
    int64_t width = passage->query.heads ? passage->query.width : passage->key.width;
    const float *rotations = unit->passed.rotations + row * width;
    turn(&passage->query, passage->dtype, projected, rotations);
    turn(&passage->key, passage->dtype, projected, rotations);
}

typedef void (*step)(const struct unit *unit, int64_t row);

/* A step of all rows of a unit. */
struct between {
    const struct unit *unit;
    step step;
    int64_t next;                   /* the first row that no thread has taken yet */
};

static void step_rows(void *all) {
    struct between *between = all;
    for (int64_t row; (row = __atomic_fetch_add(&between->next, 1, __ATOMIC_RELAXED)) < between->unit->passed.count;)
        between->step(between->unit, row);
}

static void step_all(const struct unit *unit, step step, int64_t width, struct team *team, int64_t helpers) {
    struct between between = {unit, step, 0};
    share(unit->passed.count * width < ALONE_ELEMENTS ? NULL : team, helpers, step_rows, &between);
}

/* The product of the first elements of all rows of a unit, which are `across` wide. Returns 0 if there was no
   memory. */
static int multiply_part(const struct unit *unit, const struct product *product, const void *from, int64_t across,
                         void *to, struct team *team, int64_t helpers) {
    int64_t bytes = bytes_of(unit->passage->dtype);
    struct side left = {.base = (char *)from, .stride = across * bytes};
    struct side right = {.base = to, .stride = product->outputs * bytes};
    return multiply_all(product, left, right, unit->passed.count, team, helpers);
}

/* All that a passage does with the rows of a unit. Returns 0 if there was no memory. */
static int pass_unit(const struct unit *unit, struct team *team, int64_t helpers) {
    const struct passage *passage = unit->passage;
    const struct passed *passed = &unit->passed;
    const struct product *output = &passage->output, *up = &passage->up, *down = &passage->down, *next = &passage->next;
    const void *input = passed->rows;
    int64_t width = passage->width, has_forward = passed->attended && up->weight;
    if (passed->attended) {
        input = passed->behind;
        if (output->weight && !multiply_part(unit, output, passed->attended, output->inputs, unit->part, team, helpers))
            return 0;
        step_all(unit, has_forward ? enter_forward : leave_attention, width, team, helpers);
    } else if (passage->before_next.kind) {
        step_all(unit, begin, width, team, helpers);
    }
    if (has_forward) {
        const void *entering = passage->before_forward.kind ? unit->normed : input;
        if (!multiply_part(unit, up, entering, width, unit->hidden, team, helpers)) return 0;
        step_all(unit, activate, up->outputs, team, helpers);
        if (!multiply_part(unit, down, unit->hidden, up->outputs, unit->part, team, helpers)) return 0;
        step_all(unit, leave_forward, width, team, helpers);
    }
    if (!next->weight) return 1;
    if (passage->before_next.kind) input = unit->ready;
    if (!multiply_part(unit, next, input, width, passed->next, team, helpers)) return 0;
    if (passage->query.heads || passage->key.heads) step_all(unit, turn_row, next->outputs, team, helpers);
    return 1;
}

/* Units that threads compute together. */
struct passing {
    const struct passage *passage;
    const struct passed *passed;
    int64_t units;
    int64_t next;                   /* the first unit that no thread has taken yet */
    int begun;                      /* some thread had the memory to begin: it computes all that others do not */
    int failed;                     /* some thread had no memory later on */
};

/* The bytes from row to row of what goes to the next attention. */
static int64_t row_of_next(const struct passage *passage) {
    return (passage->next.weight ? passage->next.outputs : passage->width) * bytes_of(passage->dtype);
}

/* Rows of a unit from `first` on, with a thread's memory. */
static struct unit unit_of(const struct passage *passage, const struct passed *all, int64_t first, int64_t count,
                           char *memory) {
    int64_t bytes = bytes_of(passage->dtype), row = passage->width * bytes;
    int64_t attended = passage->output.weight ? passage->output.inputs * bytes : row;
    int64_t turned = passage->query.heads ? passage->query.width : passage->key.width;
    struct passed passed = {
        .rows = (const char *)all->rows + first * row,
        .attended = all->attended ? (const char *)all->attended + first * attended : NULL,
        .rotations = all->rotations ? all->rotations + first * turned : NULL,
        .behind = all->behind ? (char *)all->behind + first * row : NULL,
        .next = all->next ? (char *)all->next + first * row_of_next(passage) : NULL,
        .count = count,
    };
    return (struct unit){
        .passage = passage,
        .passed = passed,
        .attention = passage->output.weight ? memory : passed.attended,
        .part = memory,
        .normed = memory + count * row,
        .ready = passage->next.weight ? memory + count * row : passed.next,
        .hidden = memory + 2 * count * row,
    };
}

/* A thread's memory for this many rows. */
static char *memory_of(const struct passage *passage, int64_t rows) {
    return allocated(rows * (2 * passage->width + (passage->up.weight ? passage->up.outputs : 0)), passage->dtype);
}

static void pass_units(void *all) {
    struct passing *work = all;
    int64_t rows = work->passed->count, unit;
    char *memory = memory_of(work->passage, (rows + work->units - 1) / work->units);
    if (!memory) return;
    __atomic_store_n(&work->begun, 1, __ATOMIC_RELAXED);
    while ((unit = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->units) {
        int64_t first = rows * unit / work->units, last = rows * (unit + 1) / work->units;
        struct unit own = unit_of(work->passage, work->passed, first, last - first, memory);
        if (!pass_unit(&own, NULL, 0)) __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
    }
    free(memory);
}

int64_t PASS(const struct passage *passage, const struct passed *passed, struct team *team, int64_t helpers) {
    int64_t rows = passed->count, threads = team ? most(helpers, 0) + 1 : 1;
    if (!rows) return 0;
    if (threads == 1 || rows >= threads * FEWEST_ROWS) {
        int64_t units = (rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
        if (threads > 1) units = most(units, least(UNITS_OF_THREAD * threads, rows / FEWEST_ROWS));
        struct passing work = {passage, passed, (units + threads - 1) / threads * threads, 0, 0, 0};
        share(team, helpers, pass_units, &work);
        return work.begun && !work.failed ? 0 : -1;
    }
    char *memory = memory_of(passage, rows);
    if (!memory) return -1;
    struct unit unit = unit_of(passage, passed, 0, rows, memory);
    stay(team);
    int done = pass_unit(&unit, team, helpers);
    part(team);
    free(memory);
    return done ? 0 : -1;
}
