/* What is computed of one row element by element, or of its elements together: norms, activations, rotations. All in
   float32, in rows of any dtype at any address, whose widths are whole vectors unless said otherwise. */

/* The sum of all elements of two vectors. */
INLINE float total_of(vec x, vec y) { return vsum(x + y); }

/* One row's norm, by the corrected two-pass algorithm (Chan, Golub and LeVeque 1983): the sum of the deviations from
   the mean would be 0 but for rounding, and corrects both the mean and the sum of squares. That matters where a row is
   nearly constant: there the deviations are scaled by up to 1 / sqrt(epsilon). */
INLINE void normalize(const struct norm *norm, int64_t dtype, int64_t width, const void *from, void *to) {
    vec sums[2] = {vzero(), vzero()}, squares[2] = {vzero(), vzero()};
    float mean = 0;
    if (norm->kind == LAYER_NORM) {
        for (int64_t c = 0; c < width; c += V) sums[c / V % 2] = sums[c / V % 2] + vload_as(element(from, dtype, c), dtype);
        mean = total_of(sums[0], sums[1]) / (float)width;
        sums[0] = sums[1] = vzero();
    }
    for (int64_t c = 0; c < width; c += V) {
        vec x = vload_as(element(from, dtype, c), dtype) - vset(mean);
        sums[c / V % 2] = sums[c / V % 2] + x;
        squares[c / V % 2] = vfma(x, x, squares[c / V % 2]);
    }
    float variance = total_of(squares[0], squares[1]) / (float)width;
    if (norm->kind == LAYER_NORM) {
        float rest = total_of(sums[0], sums[1]) / (float)width;
        mean += rest;
        variance -= rest * rest;
        if (variance < 0) variance = 0; /* but not NaN */
    }
    float share = 1 / sqrtf(variance + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c += V) {
        vec x = (vload_as(element(from, dtype, c), dtype) - vset(mean)) * vset(share);
        if (norm->weight) x = x * vload(norm->weight + c);
        if (norm->bias) x = x + vload(norm->bias + c);
        narrow(x, dtype, V, (char *)to + c * bytes_of(dtype));
    }
}

/* 1 / (1 + exp(-x)). */
INLINE vec vsigmoid(vec x) {
    vec e = vexp(vzero() - vabs(x)), one = vset(1.0f);
    return vselect(vbelow(x, vzero()), e, one) / (one + e);
}

INLINE vec vrelu(vec x) { return vmax(vzero(), x); }
INLINE vec vsilu(vec x) { return x * vsigmoid(x); }

/* x times the normal distribution function, Phi(x) = 1 - Phi(-x). With t = |x|, Phi(-t) is exp(-t^2 / 2) times the
   nearest polynomial of degree 9 in 1 / (1 + 0.21 t) that is 0 at 0: its relative error, with that of t^2, is within
   5e-7. */
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

/* Activates a row of hidden units in place: the first `hidden` of them. If gated, they are multiplied by the rest,
   which are as many. */
static void activate_row(int64_t activation, int gated, int64_t dtype, int64_t hidden, char *row) {
    switch (activation) {
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
