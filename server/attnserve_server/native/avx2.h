/* Vectors of 8 floats. See `vectors` in elements.h for what each function is. */

#include <immintrin.h>
#include <math.h>

typedef __m256 vec;
typedef __m256 vmask;
enum { V = 8, TILE_VECTORS = 2 };

INLINE vec vzero(void) { return _mm256_setzero_ps(); }
INLINE vec vset(float x) { return _mm256_set1_ps(x); }
INLINE vec vload(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE vec vfma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vmax(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vabs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vec vpower(vec a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
INLINE float vsum(vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE vec viota(void) { return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0); }

INLINE vmask vbelow(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
INLINE vmask vnan(vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
INLINE vec vselect(vmask mask, vec a, vec b) { return _mm256_blendv_ps(b, a, mask); }
INLINE vmask vand(vmask a, vmask b) { return _mm256_and_ps(a, b); }
INLINE int vcount(vmask a) { return __builtin_popcount((unsigned)_mm256_movemask_ps(a)); }
INLINE vmask vrange(int64_t begin, int64_t end) {
    float from = begin > V ? V : begin < 0 ? 0 : begin, to = end > V ? V : end < 0 ? 0 : end;
    return vand(_mm256_cmp_ps(viota(), vset(from), _CMP_GE_OQ), vbelow(viota(), vset(to)));
}
INLINE vmask vbytes(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()));
}

INLINE vec vload_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec vload_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE void vstore_f16(uint16_t *p, vec x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vstore_bf16(uint16_t *p, vec x) { /* to the nearest, ties to even; NaN stays NaN */
    x = vselect(vnan(x), vset(NAN), x); /* some of its bits would carry */
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_srli_epi32(bits, 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(bits));
}

INLINE void vtranspose(vec x[8]) {
    vec t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) { /* u[i + k]: in each half h, column 4 * h + k of rows i to i + 3 */
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int k = 0; k < 4; k++) {
        x[k] = _mm256_permute2f128_ps(u[k], u[4 + k], 0x20);
        x[4 + k] = _mm256_permute2f128_ps(u[k], u[4 + k], 0x31);
    }
}

INLINE vec vsums(vec x[8]) {
    vec a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    vec b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}

#define ADD(a, b) ((a) + (b))
#define EACH_OF_EIGHT(name, op) \
    INLINE vec name(const vec x[8]) { \
        vec t[4], u[2]; \
        for (int i = 0; i < 4; i++) \
            t[i] = op(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1])); \
        for (int i = 0; i < 2; i++) \
            u[i] = op(_mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44), \
                      _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee)); \
        return op(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31)); \
    }
EACH_OF_EIGHT(vtotals, ADD)
EACH_OF_EIGHT(vtops, vmax)
