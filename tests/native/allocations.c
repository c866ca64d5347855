/* Counts what the library has allocated and not freed, and lets allocations fail. It is linked with
   --wrap=malloc,--wrap=aligned_alloc,--wrap=free. */

#include <stdint.h>
#include <stdlib.h>

int64_t allocations_alive;
int64_t allocations_left = INT64_MAX;   /* how many more succeed; negative afterwards */
int64_t allocations_failing;            /* how many fail then */

void *__real_malloc(size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *memory);

static int fails(void) {
    int64_t left = __atomic_sub_fetch(&allocations_left, 1, __ATOMIC_SEQ_CST);
    return left < 0 && left >= -allocations_failing;
}

static void *counted(void *memory) {
    if (memory) __atomic_add_fetch(&allocations_alive, 1, __ATOMIC_SEQ_CST);
    return memory;
}

void *__wrap_malloc(size_t size) { return fails() ? NULL : counted(__real_malloc(size)); }

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return fails() ? NULL : counted(__real_aligned_alloc(alignment, size));
}

void __wrap_free(void *memory) {
    if (memory) __atomic_sub_fetch(&allocations_alive, 1, __ATOMIC_SEQ_CST);
    __real_free(memory);
}
