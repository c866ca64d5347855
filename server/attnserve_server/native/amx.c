/* Sums of products in bfloat16 by AMX: Intel's registers of tiles, 16 rows of 64 bytes each. */

#include "attention.h"

#if defined __clang__ ? __clang_major__ >= 12 : __GNUC__ >= 11
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16")
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    REQUEST_PERMISSION = 0x1023, /* of arch_prctl: for a process to use a part of the registers, here tiles */
    TILE_DATA = 18,
    AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, /* in EDX, of CPUID's leaf 7 */
    ROW_BYTES = 64
};

int64_t attnserve_amx_permitted(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return 0;
    return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

/* Eight tiles, each whole. Constant: GCC does not know what _tile_loadconfig reads, and might write it later. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} WHOLE = {
    .palette = 1,
    .row_bytes = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES},
    .rows = {AMX_SIDE, AMX_SIDE, AMX_SIDE, AMX_SIDE, AMX_SIDE, AMX_SIDE, AMX_SIDE, AMX_SIDE},
};

void attnserve_amx_begin(void) { _tile_loadconfig(&WHOLE); }

void attnserve_amx_end(void) { _tile_release(); }

/* Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. */
INLINE void multiply(int two_rows, int two_panels, const uint16_t *rows, const uint16_t *weight, int64_t steps,
                     float *sums) {
    const uint16_t *others = weight + steps * AMX_ELEMENTS, *below = rows + steps * AMX_ELEMENTS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(6, weight + step * AMX_ELEMENTS, ROW_BYTES);
        _tile_loadd(4, rows + step * AMX_ELEMENTS, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_loadd(7, others + step * AMX_ELEMENTS, ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, below + step * AMX_ELEMENTS, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            if (two_panels) _tile_dpbf16ps(3, 5, 7);
        }
    }
    int64_t across = AMX_ACROSS * AMX_SIDE * sizeof *sums;
    _tile_stored(0, sums, across);
    if (two_panels) _tile_stored(1, sums + AMX_SIDE, across);
    if (two_rows) _tile_stored(2, sums + AMX_ACROSS * AMX_SIDE * AMX_SIDE, across);
    if (two_rows && two_panels) _tile_stored(3, sums + AMX_ACROSS * AMX_SIDE * AMX_SIDE + AMX_SIDE, across);
}

void attnserve_amx_multiply(int64_t down, int64_t across, const uint16_t *rows, const uint16_t *weight, int64_t steps,
                            float *sums) {
    if (down > 1 && across > 1) multiply(1, 1, rows, weight, steps, sums);
    else if (down > 1) multiply(1, 0, rows, weight, steps, sums);
    else if (across > 1) multiply(0, 1, rows, weight, steps, sums);
    else multiply(0, 0, rows, weight, steps, sums);
}

#ifdef __clang__
#pragma clang attribute pop
#endif
#else /* the compiler knows of no such registers */
int64_t attnserve_amx_permitted(void) { return 0; }
void attnserve_amx_begin(void) {}
void attnserve_amx_end(void) {}
void attnserve_amx_multiply(int64_t down, int64_t across, const uint16_t *rows, const uint16_t *weight, int64_t steps,
                            float *sums) {
    (void)down, (void)across, (void)rows, (void)weight, (void)steps, (void)sums;
}
#endif
