/* Attention with AVX-512. */

#include "attention.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define REPEAT /* an inner loop of products: each turn has enough of them here */
#define ATTEND attnserve_attend_avx512
#define MULTIPLY attnserve_multiply_avx512
#define MULTI_HEAD attnserve_multi_head_avx512
#define PASS attnserve_pass_avx512
#define STEP attnserve_step_avx512
#define BLOCK_ROWS_ABOVE_6 1

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "avx512.h"
#include "kernel.h"
#include "product.h"
#include "layer.h"
#include "passage.h"
#include "decoder.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
