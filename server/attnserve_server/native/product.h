/* Products of rows with a weight, y = x W^T + b, in blocks of rows and panels of columns.

   An output is the bias plus one sum for each range of DEPTH inputs, added in order; each sum is one chain of fused
   operations. That order is the same whichever rows are computed together, and for every instruction set. Weights in
   half precision are widened as they are read. For many rows, they are widened before that, once for all rows of a
   unit: DEPTH inputs of a step of panels at a time. Outputs are rounded when their sum is complete. */

enum {
    PANEL = 16,                         /* columns of a packed weight that lie together */
    STEP_PANELS = 2 * V / PANEL,        /* multiplied at once: two vectors of columns */
    DEPTH = 256,                        /* inputs of a range: so many of a block of rows and of a step of panels stay in
                                           the nearest cache */
    AHEAD = V == 16 ? 8 : 64,           /* how many inputs ahead of use data is prefetched */
    DIRECT_BLOCKS = 3,                  /* of rows: for more than these, weights in half precision are widened first */
    WIDEN_AHEAD = 2048,                 /* how many weights ahead they are prefetched for that */
    BLOCK_ROWS = V == 16 ? 14 : 6,      /* as many as there are registers for */
    PRODUCT_ROWS = 56,                  /* of a unit of work, at most: they share each read of the weight */
    PRODUCT_FLOATS = 1 << 18,           /* of a unit's inputs, unless one block has more: they stay in a core's cache */
    UNITS_EACH = 2,                     /* units per thread, at least, if there are enough columns to divide */
    UNIT_PANELS = 8,                    /* of a unit, at least: a thread arranges the rows of its units itself */
    UNIT_PRODUCTS = 1 << 23             /* of a unit, about, if so few panels have them: a thread that is interrupted in
                                           its last unit has all others wait */
};

/* Rows of a batch, by index: those of pieces, end to end, or all in one block of memory. */
struct side {
    const struct piece *pieces; /* NULL: one block */
    const int64_t *starts;      /* the first row of each piece, then the total: [count + 1] */
    int64_t count;              /* of pieces */
    int output;                 /* whether it is what the pieces write */
    char *base;                 /* of the one block */
    int64_t stride;             /* bytes from row to row */
};

/* The addresses of rows from `first` on. */
static void find_rows(const struct side *side, int64_t first, int64_t count, char **rows) {
    if (!side->pieces) {
        for (int64_t r = 0; r < count; r++) rows[r] = side->base + (first + r) * side->stride;
        return;
    }
    int64_t low = 0, high = side->count - 1;
    while (low < high) { /* the last piece that begins at `first` or before */
        int64_t middle = (low + high + 1) / 2;
        if (side->starts[middle] <= first) low = middle;
        else high = middle - 1;
    }
    for (int64_t r = 0, piece = low; r < count; r++) {
        while (first + r >= side->starts[piece + 1]) piece++;
        const struct piece *own = side->pieces + piece;
        rows[r] = (char *)(side->output ? own->to : own->from) + (first + r - side->starts[piece]) * side->stride;
    }
}

/* The inputs of up to V rows as [inputs, V]: transposed, and padded with zeros. */
static void arrange(char *const *rows, int64_t dtype, int64_t count, int64_t inputs, float *to) {
    for (int64_t k = 0; k < inputs; k += V) {
        int64_t columns = least(V, inputs - k);
        vec square[V];
        for (int64_t r = 0; r < V; r++) {
            float whole[V];
            if (r >= count) {
                square[r] = vzero();
            } else if (columns == V) {
                square[r] = vload_as(element(rows[r], dtype, k), dtype);
            } else {
                widen(element(rows[r], dtype, k), dtype, columns, whole);
                square[r] = vload(whole);
            }
        }
        vtranspose(square);
        for (int64_t i = 0; i < columns; i++) vstore(to + (k + i) * V, square[i]);
    }
}

/* Adds the products of n inputs to outputs, or to the bias if it begins them. `apart` is the step from the weights of
   one vector of columns to those of the next, in elements of their dtype. */
INLINE void multiply_block(int64_t dtype, int rows, int vectors, const float *left, const void *weight, int64_t apart,
                           int64_t n, float *const *to, int begins, const float *bias) {
    vec sums[BLOCK_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vzero();
    REPEAT for (int64_t k = 0; k < n; k++) {
        vec columns[2];
        if (V == 16) __builtin_prefetch(left + (k + AHEAD) * V);
        UNROLL for (int c = 0; c < vectors; c += PANEL / V)
            __builtin_prefetch(element(weight, dtype, c * apart + (k + AHEAD) * PANEL));
        UNROLL for (int c = 0; c < vectors; c++)
            columns[c] = vload_as(element(weight, dtype, c * apart + k * PANEL), dtype);
        UNROLL for (int r = 0; r < rows; r++) {
            vec input = vset(left[k * V + r]);
            UNROLL for (int c = 0; c < vectors; c++) sums[r][c] = vfma(input, columns[c], sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int c = 0; c < vectors; c++) {
            float *at = to[r] + c * V;
            vec before = !begins ? vload(at) : bias ? vload(bias + c * V) : vzero();
            vstore(at, before + sums[r][c]);
        }
    }
}

#define ROWS_OF_BLOCK(dtype, rows) \
    case rows: \
        if (vectors == 2) multiply_block(dtype, rows, 2, left, weight, apart, n, to, begins, bias); \
        else multiply_block(dtype, rows, 1, left, weight, apart, n, to, begins, bias); \
        break;
#if BLOCK_ROWS_ABOVE_6
#define ROWS_ABOVE_6(dtype) \
    ROWS_OF_BLOCK(dtype, 7) ROWS_OF_BLOCK(dtype, 8) ROWS_OF_BLOCK(dtype, 9) ROWS_OF_BLOCK(dtype, 10) \
    ROWS_OF_BLOCK(dtype, 11) ROWS_OF_BLOCK(dtype, 12) ROWS_OF_BLOCK(dtype, 13) ROWS_OF_BLOCK(dtype, 14)
#else
#define ROWS_ABOVE_6(dtype)
#endif
#define ROWS_OF(dtype) \
    switch (rows) { \
        ROWS_OF_BLOCK(dtype, 1) ROWS_OF_BLOCK(dtype, 2) ROWS_OF_BLOCK(dtype, 3) ROWS_OF_BLOCK(dtype, 4) \
        ROWS_OF_BLOCK(dtype, 5) ROWS_OF_BLOCK(dtype, 6) ROWS_ABOVE_6(dtype) \
    }

static void multiply_rows(int64_t dtype, int64_t rows, int64_t vectors, const float *left, const void *weight,
                          int64_t apart, int64_t n, float *const *to, int begins, const float *bias) {
    if (dtype == FLOAT32) ROWS_OF(FLOAT32)
    else if (dtype == FLOAT16) ROWS_OF(FLOAT16)
    else ROWS_OF(BFLOAT16)
}

#include "amx_product.h"

/* A product that threads compute together: units are groups of rows times groups of panels. */
struct multiplication {
    const struct product *product;
    struct side from, to;
    int64_t rows, row_groups, panel_groups;
    int64_t next;           /* the first unit that no thread has taken yet */
    int begun;              /* some thread had the memory to begin: it computes all that others do not */
};

/* A thread's own memory. The last two are NULL if the product is of floats, or by AMX, and needs neither. */
struct scratch {
    void *left;             /* the inputs of a unit's rows, arranged block by block, or as tiles are loaded */
    float *wide;            /* [STEP_PANELS, DEPTH, PANEL]: a part of the weight */
    float *sums;            /* [PRODUCT_ROWS, STEP_PANELS * PANEL]: outputs that are not complete */
};

/* n inputs, from `depth` on, of the weights of some panels from `at` on, as floats, DEPTH * PANEL apart. */
static const float *widened(const struct product *product, int64_t at, int64_t panels, int64_t depth, int64_t n,
                            float *wide) {
    for (int64_t p = 0; p < panels; p++) {
        const uint16_t *from = element(product->weight, product->dtype, ((at + p) * product->inputs + depth) * PANEL);
        float *to = wide + p * DEPTH * PANEL;
        for (int64_t i = 0; i < n * PANEL; i += V) {
            __builtin_prefetch(from + i + WIDEN_AHEAD);
            vstore(to + i, vload_as(from + i, product->dtype));
        }
    }
    return wide;
}

/* Computes rows from `first` up to `last`, in panels from `begin` up to `end`. Scratch has room for the rows, or holds
   them already, if they are `arranged`. */
static void multiply_unit(const struct multiplication *work, int64_t first, int64_t last, int64_t begin, int64_t end,
                          const struct scratch *scratch, int arranged) {
    const struct product *product = work->product;
    char *from[AMX_ROWS], *to[AMX_ROWS];
    float *sums[PRODUCT_ROWS], *left = scratch->left;
    int64_t rows = last - first, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, dtype = product->dtype;
    int64_t inputs = product->inputs;
    if (!arranged) find_rows(&work->from, first, rows, from);
    find_rows(&work->to, first, rows, to);
    if (product->amx) {
        if (!arranged) arrange_for_amx(from, rows, inputs, scratch->left);
        multiply_by_amx(product, scratch->left, rows, to, begin, end);
        return;
    }
    for (int64_t b = 0; b < blocks && !arranged; b++) {
        int64_t top = rows * b / blocks, bottom = rows * (b + 1) / blocks;
        arrange(from + top, dtype, bottom - top, inputs, left + b * inputs * V);
    }
    for (int64_t at = begin; at < end; at += STEP_PANELS) {
        int64_t panels = least(STEP_PANELS, end - at), vectors = panels * (PANEL / V);
        const float *bias = product->bias ? product->bias + at * PANEL : NULL;
        for (int64_t r = 0; r < rows; r++)
            sums[r] = dtype == FLOAT32 ? (float *)to[r] + at * PANEL : scratch->sums + r * STEP_PANELS * PANEL;
        for (int64_t depth = 0; depth < inputs; depth += DEPTH) {
            int64_t n = least(DEPTH, inputs - depth), panel = inputs * PANEL, read_as = dtype;
            const void *weight = element(product->weight, dtype, (at * inputs + depth) * PANEL);
            if (dtype != FLOAT32 && blocks > DIRECT_BLOCKS) {
                weight = widened(product, at, panels, depth, n, scratch->wide);
                panel = DEPTH * PANEL, read_as = FLOAT32;
            }
            for (int64_t b = 0; b < blocks; b++) {
                int64_t top = rows * b / blocks, bottom = rows * (b + 1) / blocks;
                multiply_rows(read_as, bottom - top, vectors, left + (b * inputs + depth) * V, weight,
                              (int)V == PANEL ? panel : V, n, sums + top, depth == 0, bias);
            }
        }
        for (int64_t r = 0; r < rows && dtype != FLOAT32; r++)
            for (int64_t i = 0; i < panels * PANEL; i += V)
                narrow(vload(sums[r] + i), dtype, V, (void *)element(to[r], dtype, at * PANEL + i));
    }
}

/* The maximum number of rows in a unit. */
static int64_t rows_of_unit(const struct product *product) {
    if (product->amx) return rows_of_amx_unit(product->inputs);
    return most(least(PRODUCT_ROWS, PRODUCT_FLOATS / product->inputs), BLOCK_ROWS);
}

/* Takes units of work until none is left. */
static void multiply_units(void *all) {
    struct multiplication *work = all;
    const struct product *product = work->product;
    int64_t rows = rows_of_unit(product), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    struct scratch scratch = {NULL, NULL, NULL};
    if (product->amx) scratch.left = allocated(rows * steps_of(product->inputs) * STEP_INPUTS, BFLOAT16);
    else scratch.left = floats(blocks * product->inputs * V);
    int half = product->dtype != FLOAT32 && !product->amx;
    if (half) {
        scratch.wide = floats(STEP_PANELS * DEPTH * PANEL);
        scratch.sums = floats(PRODUCT_ROWS * STEP_PANELS * PANEL);
    }
    if (!scratch.left || (half && (!scratch.wide || !scratch.sums))) goto end;
    int64_t panels = product->outputs / PANEL, units = work->row_groups * work->panel_groups, unit, last = -1;
    __atomic_store_n(&work->begun, 1, __ATOMIC_RELAXED);
    while ((unit = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < units) {
        int64_t group = unit / work->panel_groups, part = unit % work->panel_groups;
        multiply_unit(work, work->rows * group / work->row_groups, work->rows * (group + 1) / work->row_groups,
                      panels * part / work->panel_groups, panels * (part + 1) / work->panel_groups, &scratch,
                      group == last);
        last = group;
    }
end:
    free(scratch.left);
    free(scratch.wide);
    free(scratch.sums);
}

/* Returns 0 if there was no memory. */
static int multiply_all(const struct product *product, struct side from, struct side to, int64_t rows,
                        struct team *team, int64_t helpers) {
    if (!rows || !product->outputs) return 1;
    int64_t panels = product->outputs / PANEL, each = rows_of_unit(product), row_groups = (rows + each - 1) / each;
    int64_t threads = team ? most(helpers, 0) + 1 : 1;
    /* Rows are divided first, and evenly: every thread that computes columns of the same rows would have to arrange
       these rows again. But few rows with many columns take as long as reading the weight. Then only columns are
       divided, so that each is read by one thread. */
    int64_t block = product->amx ? AMX_SIDE : BLOCK_ROWS;
    if (row_groups > 1 || panels < threads * UNITS_EACH * UNIT_PANELS)
        row_groups = least((row_groups + threads - 1) / threads * threads, (rows + block - 1) / block);
    int64_t wanted = most((UNITS_EACH * threads + row_groups - 1) / row_groups,
                          rows / row_groups * product->inputs * product->outputs / UNIT_PRODUCTS);
    int64_t panel_groups = threads > 1 ? least(wanted, most(panels / UNIT_PANELS, 1)) : 1;
    struct multiplication work = {product, from, to, rows, row_groups, panel_groups, 0, 0};
    share(team, helpers, multiply_units, &work);
    return work.begun;
}

int64_t MULTIPLY(const struct product *product, const void *from, int64_t from_stride, void *to, int64_t to_stride,
                 int64_t rows, struct team *team, int64_t helpers) {
    int64_t bytes = bytes_of(product->dtype);
    struct side left = {.base = (char *)from, .stride = from_stride * bytes};
    struct side right = {.base = to, .stride = to_stride * bytes};
    return multiply_all(product, left, right, rows, team, helpers) ? 0 : -1;
}
