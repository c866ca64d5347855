/* Numbers of any dtype at any address, as vectors of floats; and functions of vectors.

   vectors: V floats each.
     vfma(a, b, c)          a * b + c
     vbelow(a, b)           set where a < b
     vnan(a)                set for NaN
     vselect(mask, a, b)    a where the mask is set, else b
     vrange(begin, end)     set for elements begin <= i < end
     vbytes(p)              set for elements whose byte is not 0
     vtranspose(x)          turns V vectors of rows into vectors of columns
     vsums(x)               the sum of each of V vectors
     vtotals(x), vtops(x)   the sum and the maximum of each of 8 vectors; all three take elements in the same order
     vpower(a)              2^(b - 127), or 0 for b = 0; b, below 255, is the number in the last 9 bits of a */

#include <math.h>
#include <stdlib.h>
#include <string.h>

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
/* a + b, saturating. */
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

/* exp(x) for x <= 0, within 2 units in the last place, and 0 below -86.99. NaN stays NaN. No intermediate result is
   subnormal, not even for -inf: some processors take 20 times as long for such a vector.

   exp(x) = 2^n 2^r with n whole and |r| <= 1/2. 2^r is, relatively within 2e-9, the nearest polynomial of degree 6 that
   is 1 at 0. The product is that of 2 * 2^r and 2^n / 2: so the latter is normal or 0. */
INLINE vec vexp(vec x) {
    vec bounded = vmax(vset(-87.0f), x), log2e = vset(1.44269504088896341f);
    vec whole = vset(12583038.0f);  /* 1.5 * 2^23 + 126: what is added to it is rounded to n, and n + 126 is in the last
                                       bits */
    vec sum = vfma(bounded, log2e, whole);
    /* The first term is the rounding error of log2e. */
    vec r = vfma(bounded, vset(1.92596299e-8f), vfma(bounded, log2e, whole - sum));
    vec p = vset(0.000307067239f);
    p = vfma(p, r, vset(0.00267977477f));
    p = vfma(p, r, vset(0.0192368738f));
    p = vfma(p, r, vset(0.111006647f));
    p = vfma(p, r, vset(0.480452955f));
    p = vfma(p, r, vset(1.38629436f));
    p = vfma(p, r, vset(2.0f));
    return p * vpower(sum);
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

INLINE int64_t bytes_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* `width` elements of a dtype as floats, padded with zeros to a whole number of vectors. */
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
    if (count < V) memcpy(to, &all, count * bytes_of(dtype));
}

INLINE const void *element(const void *base, int64_t dtype, int64_t index) {
    return (const char *)base + index * bytes_of(dtype);
}

/* V elements of a dtype, as floats. */
INLINE vec vload_as(const void *from, int64_t dtype) {
    return dtype == FLOAT32 ? vload(from) : dtype == FLOAT16 ? vload_f16(from) : vload_bf16(from);
}
