/* Tokens go to their places in pages, where their heads lie apart. */

#include "tokens.h"

#include "attention.h"

#include <string.h>

/* Copies rows of `width` elements, adjacent in `from`, `step` apart in `to`. Returns whether all are finite. */
static int put_rows(uint8_t *to, int64_t step, const uint8_t *from, int64_t rows, int64_t width, int64_t dtype) {
    int64_t item = dtype == FLOAT32 ? 4 : 2;
    uint32_t exponent = dtype == FLOAT32 ? 0x7f800000 : dtype == FLOAT16 ? 0x7c00 : 0x7f80;
    int finite = 1;
    for (; rows; rows--, to += step * item, from += width * item) {
        memcpy(to, from, width * item);
        for (int64_t at = 0; at < width * item; at += item) {
            uint32_t bits = 0;
            memcpy(&bits, from + at, item);
            finite &= (bits & exponent) != exponent;
        }
    }
    return finite;
}

void attnserve_append_tokens(const struct page_layout *layout, struct token *tokens, int64_t count) {
    int64_t dtype = layout->dtype, item = dtype == FLOAT32 ? 4 : 2;
    for (struct token *token = tokens; token < tokens + count; token++) {
        uint8_t *keys = token->keys + token->slot * layout->key_token * item;
        uint8_t *values = token->values + token->slot * layout->value_token * item;
        token->finite = put_rows(keys, layout->key_head, token->key, layout->heads, layout->head_dim, dtype);
        token->finite &= put_rows(values, layout->value_head, token->value, layout->heads, layout->value_dim, dtype);
    }
}
