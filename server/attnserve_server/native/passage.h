/* From one attention of a stack of blocks to the next: products, and norms, activations and rotations between them.

   Many rows are divided into units, which a thread computes from end to end: its rows stay in a cache near it, and no
   thread waits for another. Few rows are computed step by step, each divided among threads, mostly by the columns of a
   weight: reading the weights takes longest then. A row's bits are the same either way. */

enum {
    UNITS_OF_THREAD = 4,            /* at least, if units so small have FEWEST_ROWS */
    FEWEST_ROWS = 2 * BLOCK_ROWS,   /* of a unit: each reads all weights */
    ALONE_ELEMENTS = 1 << 12        /* between products: one thread has computed so few before another has begun */
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

/* Sums of all elements of a vector in a certain order. */
INLINE float total_of(vec x, vec y) { return vsum(x + y); }

/* One row's norm. The sums of squares are those of deviations from the mean, not differences of sums of squares. */
INLINE void normalize(const struct norm *norm, int64_t dtype, int64_t width, const void *from, void *to) {
    vec sums[2] = {vzero(), vzero()}, squares[2] = {vzero(), vzero()};
    float mean = 0;
    if (norm->kind == LAYER_NORM) {
        for (int64_t c = 0; c < width; c += V) sums[c / V % 2] = sums[c / V % 2] + vload_as(element(from, dtype, c), dtype);
        mean = total_of(sums[0], sums[1]) / (float)width;
    }
    for (int64_t c = 0; c < width; c += V) {
        vec x = vload_as(element(from, dtype, c), dtype) - vset(mean);
        squares[c / V % 2] = vfma(x, x, squares[c / V % 2]);
    }
    float share = 1 / sqrtf(total_of(squares[0], squares[1]) / (float)width + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c += V) {
        vec x = (vload_as(element(from, dtype, c), dtype) - vset(mean)) * vset(share);
        if (norm->weight) x = x * vload(norm->weight + c);
        if (norm->bias) x = x + vload(norm->bias + c);
        narrow(x, dtype, V, (char *)to + c * bytes_of(dtype));
    }
}

/* A row behind a part: with the residual connection, and a norm if that comes after it; and what the norm before the
   next part gives. */
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

/* 1 / (1 + exp(-x)). */
INLINE vec vsigmoid(vec x) {
    vec e = vexp(vzero() - vabs(x)), one = vset(1.0f);
    return vselect(vbelow(x, vzero()), e, one) / (one + e);
}

INLINE vec vrelu(vec x) { return vmax(vzero(), x); }
INLINE vec vsilu(vec x) { return x * vsigmoid(x); }

/* x times the normal distribution function, Phi(x) = 1 - Phi(-x). With t = |x|, Phi(-t) is exp(-t^2 / 2) times the
   nearest polynomial of degree 9 in 1 / (1 + 0.21 t) that is 0 at 0: relatively within 5e-7, that of t^2 included. */
INLINE vec vgelu(vec x) {
    vec t = vabs(x), half = t * vset(0.5f), square = half * t, lost = vfma(half, t, vzero() - square);
    vec s = vset(1.0f) / vfma(vset(0.21f), t, vset(1.0f)), p = vset(-0.0716593564f);
    p = vfma(p, s, vset(0.283603728f));
    p = vfma(p, s, vset(-0.330285519f));
    p = vfma(p, s, vset(0.349438936f));
    p = vfma(p, s, vset(-0.0939524546f));
    p = vfma(p, s, vset(0.124884903f));
    p = vfma(p, s, vset(0.0691888705f));
    p = vfma(p, s, vset(0.0850693509f));
    p = vfma(p, s, vset(0.0837115422f));
    vec e = vexp(vzero() - square);
    vec tail = vselect(vbelow(vzero(), e), vfma(vzero() - e, lost, e), e) * (p * s);
    return x * vselect(vbelow(x, vzero()), tail, vset(1.0f) - tail);
}

/* 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vec vgelu_tanh(vec x) {
    vec u = vset(0.79788456080286536f) * vfma(vset(0.044715f) * x, x * x, x);
    return x * vsigmoid(u + u);
}

#define ACTIVATE(function) \
    for (int64_t c = 0; c < hidden; c += V) { \
        vec x = function(vload_as(element(row, dtype, c), dtype)); \
        if (gated) x = x * vload_as(element(row, dtype, hidden + c), dtype); \
        narrow(x, dtype, V, row + c * bytes_of(dtype)); \
    }

/* A row of hidden units, in place: gated ones become half as many. */
static void activate(const struct unit *unit, int64_t at) {
    const struct passage *passage = unit->passage;
    int64_t dtype = passage->dtype, across = passage->up.outputs, hidden = passage->down.inputs;
    int gated = passage->gated != 0;
    char *row = unit->hidden + at * across * bytes_of(dtype);
    switch (passage->activation) {
    case RELU: ACTIVATE(vrelu) break;
    case GELU: ACTIVATE(vgelu) break;
    case GELU_TANH: ACTIVATE(vgelu_tanh) break;
    default: ACTIVATE(vsilu)
    }
}

/* Up to V elements of a dtype as floats, then 0. */
INLINE vec vload_some(const void *from, int64_t dtype, int64_t count) {
    if (count >= V) return vload_as(from, dtype);
    float some[V];
    widen(from, dtype, count, some);
    return vload(some);
}

/* Up to V pairs of adjacent elements. */
INLINE void turn_adjacent(char *pairs, int64_t dtype, const float *cos, const float *sin, int64_t count) {
    float both[2 * V];
    widen(pairs, dtype, 2 * count, both);
    for (int64_t i = 0; i < count; i++) {
        float x = both[2 * i], y = both[2 * i + 1], c = float_at(cos, i), s = float_at(sin, i);
        both[2 * i] = x * c - y * s;
        both[2 * i + 1] = y * c + x * s;
    }
    narrow(vload(both), dtype, least(V, 2 * count), pairs);
    if (2 * count > V) narrow(vload(both + V), dtype, 2 * count - V, pairs + V * bytes_of(dtype));
}

/* Rotates the heads of one row. */
static void turn(const struct turning *turning, int64_t dtype, char *row, const float *rotations) {
    int64_t pairs = turning->width / 2, bytes = bytes_of(dtype);
    for (int64_t h = 0; h < turning->heads; h++) {
        char *head = row + (turning->column + h * turning->head_dim) * bytes;
        for (int64_t i = 0; i < pairs; i += V) {
            int64_t count = least(V, pairs - i);
            const float *cos = rotations + i, *sin = rotations + pairs + i;
            if (turning->interleaved) {
                turn_adjacent(head + 2 * i * bytes, dtype, cos, sin, count);
                continue;
            }
            char *first = head + i * bytes, *second = head + (pairs + i) * bytes;
            vec x = vload_some(first, dtype, count), y = vload_some(second, dtype, count);
            vec c = vload_some(cos, FLOAT32, count), s = vload_some(sin, FLOAT32, count);
            narrow(x * c - y * s, dtype, count, first);
            narrow(y * c + x * s, dtype, count, second);
        }
    }
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

/* The product of the first elements of all rows of a unit, which are `across` wide. Returns 0 if there was no memory. */
static int multiply_part(const struct unit *unit, const struct product *product, const void *from, int64_t across,
                         void *to, struct team *team, int64_t helpers) {
    int64_t bytes = bytes_of(unit->passage->dtype);
    struct side left = {.base = (char *)from, .stride = across * bytes};
    struct side right = {.base = to, .stride = product->outputs * bytes};
    return multiply_all(product, left, right, unit->passed.count, team, helpers);
}

/* Likewise, all that a passage does with the rows of a unit. */
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

/* The bytes from row to row. */
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
