/* Attention with AVX2. */

#include "attention.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
/* An inner loop of products. Where two threads share a core, instructions that do not multiply are not free. */
#define REPEAT _Pragma("GCC unroll 4")
#define ATTEND attnserve_attend_avx2
#define MULTIPLY attnserve_multiply_avx2
#define MULTI_HEAD attnserve_multi_head_avx2
#define PASS attnserve_pass_avx2
#define STEP attnserve_step_avx2
#define BLOCK_ROWS_ABOVE_6 0

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "avx2.h"
#include "kernel.h"
#include "product.h"
#include "layer.h"
#include "passage.h"
#include "decoder.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
