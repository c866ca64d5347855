/* Cosines and sines of the angles by which positions rotate pairs of elements. */

#define _GNU_SOURCE
#include "attention.h"

#include <math.h>

void attnserve_rotations(const double *frequencies, int64_t pairs, const int64_t *positions, int64_t count, float *to) {
    for (int64_t r = 0; r < count; r++, to += 2 * pairs) {
        for (int64_t i = 0; i < pairs; i++) {
            double sine, cosine;
            sincos((double)positions[r] * frequencies[i], &sine, &cosine);
            to[i] = (float)cosine;
            to[pairs + i] = (float)sine;
        }
    }
}
