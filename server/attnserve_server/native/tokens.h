/* Tokens appended to the pages of caches, without converting them. */

#ifndef ATTNSERVE_TOKENS_H
#define ATTNSERVE_TOKENS_H

#include <stdint.h>

/* How a token lies in a page: strides are in elements, those of a head adjacent. */
struct page_layout {
    int64_t dtype, heads, head_dim, value_dim;
    int64_t key_token, key_head, value_token, value_head;
};

/* A token, and where it goes: the page's first key and first value, and the index of the token in the page. */
struct token {
    const uint8_t *key, *value;     /* [heads, width], adjacent */
    uint8_t *keys, *values;
    int64_t slot;
    int64_t finite;                 /* output: whether all of the token is finite */
};

void attnserve_append_tokens(const struct page_layout *layout, struct token *tokens, int64_t count);

#endif
