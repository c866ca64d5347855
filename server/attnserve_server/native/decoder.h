/* Rows through all blocks of a decoder in one call: from one attention to the next, what each block appends to caches,
   and its attention over them. Helpers stay awake until the end. */

/* Projected rows to attended ones, by one block. Returns as STEP does. */
static int64_t attend_block(const struct decoder *decoder, struct stepped *stepped, int64_t block, char *projected,
                            char *attended, struct team *team, int64_t helpers) {
    struct token *tokens = stepped->tokens + block * stepped->token_count;
    struct call *calls = stepped->calls + block * stepped->call_count;
    for (int64_t i = 0; i < stepped->token_count; i++) {
        tokens[i].key = (uint8_t *)projected + (intptr_t)tokens[i].key;
        tokens[i].value = (uint8_t *)projected + (intptr_t)tokens[i].value;
    }
    for (int64_t i = 0; i < stepped->call_count; i++) {
        calls[i].query = projected + (intptr_t)calls[i].query;
        calls[i].output = attended + (intptr_t)calls[i].output;
    }
    attnserve_append_tokens(&decoder->page, tokens, stepped->token_count);
    int64_t status = ATTEND(calls, stepped->call_count, team, helpers);
    for (int64_t i = 0; i < stepped->call_count && !status; i++) status = !calls[i].finite;
    return status;
}

int64_t STEP(const struct decoder *decoder, struct stepped *stepped, struct team *team, int64_t helpers) {
    const struct passage *passages = decoder->passages, *last = passages + decoder->blocks;
    int64_t rows = stepped->count, width = last->width, dtype = last->dtype, status = -1;
    int64_t across = last->output.weight ? last->output.inputs : width;
    char *projected = allocated(rows * passages->next.outputs, dtype), *attended = allocated(rows * across, dtype);
    char *behind[2] = {allocated(rows * width, dtype), allocated(rows * width, dtype)};
    const void *at = stepped->rows;
    if (!projected || !attended || !behind[0] || !behind[1]) goto end;
    memset(attended, 0, rows * across * bytes_of(dtype)); /* rows of no sequence stay 0 */
    stay(team);
    for (int64_t block = 0; block < decoder->blocks; block++) {
        struct passed passed = {at, block ? attended : NULL, stepped->rotations, behind[block % 2], projected, rows};
        status = PASS(passages + block, &passed, team, helpers);
        if (!status) status = attend_block(decoder, stepped, block, projected, attended, team, helpers);
        if (status) break;
        if (block) at = behind[block % 2];
    }
    if (!status) {
        struct passed passed = {at, attended, NULL, behind[decoder->blocks % 2], stepped->output, rows};
        if (!last->before_next.kind) passed.behind = stepped->output, passed.next = NULL;
        status = PASS(last, &passed, team, helpers);
    }
    part(team);
end:
    free(projected);
    free(attended);
    free(behind[0]);
    free(behind[1]);
    return status;
}
