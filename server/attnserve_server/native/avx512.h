/* Vectors of 16 floats. See `vectors` in elements.h for what each function is. */

#include <immintrin.h>
#include <math.h>

typedef __m512 vec;
typedef __mmask16 vmask;
enum { V = 16, TILE_VECTORS = 4 };

INLINE vec vzero(void) { return _mm512_setzero_ps(); }
INLINE vec vset(float x) { return _mm512_set1_ps(x); }
INLINE vec vload(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec vfma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vmax(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vabs(vec a) { return _mm512_abs_ps(a); }
INLINE vec vpower(vec a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
INLINE float vsum(vec a) { return _mm512_reduce_add_ps(a); }
INLINE vec viota(void) { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

INLINE vmask vbelow(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vmask vnan(vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE vec vselect(vmask mask, vec a, vec b) { return _mm512_mask_blend_ps(mask, b, a); }
INLINE vmask vand(vmask a, vmask b) { return a & b; }
INLINE int vcount(vmask a) { return __builtin_popcount(a); }
INLINE vmask vrange(int64_t begin, int64_t end) {
    uint32_t below_end = end >= V ? 0xffff : end <= 0 ? 0 : (1u << end) - 1;
    uint32_t below_begin = begin >= V ? 0xffff : begin <= 0 ? 0 : (1u << begin) - 1;
    return (vmask)(below_end & ~below_begin);
}
INLINE vmask vbytes(const uint8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return _mm_test_epi8_mask(bytes, bytes);
}

INLINE vec vload_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec vload_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void vstore_f16(uint16_t *p, vec x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vstore_bf16(uint16_t *p, vec x) { /* to the nearest, ties to even; NaN stays NaN */
    x = vselect(vnan(x), vset(NAN), x); /* some of its bits would carry */
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

INLINE void vtranspose(vec x[16]) {
    vec t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* x[i + k]: in each quarter q, column 4 * q + k of rows i to i + 3 */
        x[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        x[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        x[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        x[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int k = 0; k < 4; k++) {
        vec a = _mm512_shuffle_f32x4(x[k], x[4 + k], 0x88), b = _mm512_shuffle_f32x4(x[8 + k], x[12 + k], 0x88);
        vec c = _mm512_shuffle_f32x4(x[k], x[4 + k], 0xdd), d = _mm512_shuffle_f32x4(x[8 + k], x[12 + k], 0xdd);
        t[k] = _mm512_shuffle_f32x4(a, b, 0x88);
        t[8 + k] = _mm512_shuffle_f32x4(a, b, 0xdd);
        t[4 + k] = _mm512_shuffle_f32x4(c, d, 0x88);
        t[12 + k] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) x[i] = t[i];
}

INLINE vec vsums(vec x[16]) {
    vec t[8], u[4];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++)
        u[i] = _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44) + _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee);
    vec a = _mm512_shuffle_f32x4(u[0], u[1], 0x44) + _mm512_shuffle_f32x4(u[0], u[1], 0xee);
    vec b = _mm512_shuffle_f32x4(u[2], u[3], 0x44) + _mm512_shuffle_f32x4(u[2], u[3], 0xee);
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}

#define ADD(a, b) ((a) + (b))
#define EACH_OF_EIGHT(name, op) \
    INLINE vec name(const vec x[8]) { \
        vec t[4], u[2]; \
        for (int i = 0; i < 4; i++) \
            t[i] = op(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1])); \
        for (int i = 0; i < 2; i++) \
            u[i] = op(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44), \
                      _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee)); \
        vec a = op(_mm512_shuffle_f32x4(u[0], u[1], 0x44), _mm512_shuffle_f32x4(u[0], u[1], 0xee)); \
        return op(_mm512_shuffle_f32x4(a, a, 0x88), _mm512_shuffle_f32x4(a, a, 0xdd)); \
    }
EACH_OF_EIGHT(vtotals, ADD)
EACH_OF_EIGHT(vtops, vmax)
