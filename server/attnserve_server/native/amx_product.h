/* Products with weights that are packed for AMX, in tiles.

   The sum of an output begins with 0. It takes the inputs two by two, in their order; the bias is added in the end. As
   for the other products, that order is the same whichever rows are computed together. */

enum {
    AMX_ROWS = 256,         /* the most rows of a unit of work: they share each read of the weight */
    AMX_INPUTS = 1 << 19,   /* the most inputs of a unit, which stay in a core's cache; 16 rows may have more */
    STEP_INPUTS = 32        /* the inputs of a row in a tile */
};

/* The number of tiles that hold a row's inputs; the rest of the last one is zeros. */
INLINE int64_t steps_of(int64_t inputs) { return (inputs + STEP_INPUTS - 1) / STEP_INPUTS; }

/* The maximum number of rows in a unit. */
static int64_t rows_of_amx_unit(int64_t inputs) {
    return most(least(AMX_ROWS, AMX_INPUTS / inputs / AMX_SIDE * AMX_SIDE), AMX_SIDE);
}

/* Copies the inputs of rows tile by tile, to [rows / 16, steps, 16, STEP_INPUTS], padded with zeros. Tiles can
   be loaded from rows end to end, too, but these would often compete for the same places of the nearest cache. */
static void arrange_for_amx(char *const *rows, int64_t count, int64_t inputs, uint16_t *to) {
    int64_t steps = steps_of(inputs);
    for (int64_t r = 0; r < (count + AMX_SIDE - 1) / AMX_SIDE * AMX_SIDE; r++) {
        uint16_t *own = to + r / AMX_SIDE * steps * AMX_ELEMENTS + r % AMX_SIDE * STEP_INPUTS;
        for (int64_t step = 0; step < steps; step++, own += AMX_ELEMENTS) {
            int64_t there = r < count ? least(STEP_INPUTS, inputs - step * STEP_INPUTS) : 0;
            if (there == STEP_INPUTS) {
                memcpy(own, rows[r] + step * STEP_INPUTS * sizeof *own, STEP_INPUTS * sizeof *own);
                continue;
            }
            memset(own, 0, STEP_INPUTS * sizeof *own);
            if (there) memcpy(own, rows[r] + step * STEP_INPUTS * sizeof *own, there * sizeof *own);
        }
    }
}

/* Computes the outputs of panels from `begin` up to `end`, of `count` rows that are arranged, to the addresses `to`. */
static void multiply_by_amx(const struct product *product, const uint16_t *rows, int64_t count, char *const *to,
                           int64_t begin, int64_t end) {
    int64_t steps = steps_of(product->inputs);
    float sums[AMX_DOWN * AMX_SIDE * AMX_ACROSS * AMX_SIDE] __attribute__((aligned(64)));
    attnserve_amx_begin();
    for (int64_t at = begin; at < end; at += AMX_ACROSS) {
        int64_t across = least(AMX_ACROSS, end - at);
        const uint16_t *weight = (const uint16_t *)product->weight + at * steps * AMX_ELEMENTS;
        for (int64_t first = 0; first < count; first += AMX_DOWN * AMX_SIDE) {
            int64_t own = least(AMX_DOWN * AMX_SIDE, count - first);
            const uint16_t *tiles = rows + first / AMX_SIDE * steps * AMX_ELEMENTS;
            attnserve_amx_multiply(own > AMX_SIDE ? 2 : 1, across, tiles, weight, steps, sums);
            for (int64_t r = 0; r < own; r++) {
                for (int64_t i = 0; i < across * AMX_SIDE; i += V) {
                    vec sum = vload(sums + r * AMX_ACROSS * AMX_SIDE + i);
                    if (product->bias) sum += vload(product->bias + at * AMX_SIDE + i);
                    vstore_bf16((uint16_t *)to[first + r] + at * AMX_SIDE + i, sum);
                }
            }
        }
    }
    attnserve_amx_end();
}
