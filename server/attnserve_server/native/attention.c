/* Which instruction set this processor has, the size of a call, and the digest of the sources. */

#include "attention.h"

const char attnserve_sources[] = SOURCES;

int64_t attnserve_instructions(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 2;
    return 0;
}

int64_t attnserve_call_bytes(void) { return sizeof(struct call); }
