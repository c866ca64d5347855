/* Multi-head attention with its weights: rows are projected to queries, keys and values, each sequence attends to
   itself, and the outputs of its heads are projected once more. Threads wait for each other between these steps. */

int64_t MULTI_HEAD(const struct multi_head *layer, struct piece *pieces, int64_t count, struct team *team,
                   int64_t helpers) {
    const struct product *project = &layer->project, *output = &layer->output;
    int64_t rows = 0, width = layer->call.query_heads * layer->call.value_dim, dtype = project->dtype;
    int64_t *starts = malloc((count + 1) * sizeof *starts);
    struct call *calls = malloc(count * sizeof *calls + 1);
    char *projected = NULL, *attended = NULL;
    int64_t status = -1;
    if (!starts || !calls) goto end;
    for (int64_t i = 0; i < count; i++) starts[i] = rows, rows += pieces[i].rows;
    starts[count] = rows;
    projected = allocated(rows * project->outputs, dtype);
    if (output->weight) attended = allocated(rows * width, dtype);
    if (!projected || (output->weight && !attended)) goto end;
    int64_t bytes = bytes_of(dtype), across = project->outputs * bytes;
    struct side inputs = {.pieces = pieces, .starts = starts, .count = count, .stride = project->inputs * bytes};
    struct side outputs = {
        .pieces = pieces, .starts = starts, .count = count, .output = 1, .stride = output->outputs * bytes
    };
    struct side heads = {.base = projected, .stride = across};
    struct side values = {.base = attended, .stride = width * bytes};
    if (!multiply_all(project, inputs, heads, rows, team, helpers)) goto end;
    for (int64_t i = 0; i < count; i++) {
        const char *own = projected + starts[i] * across;
        calls[i] = layer->call;
        calls[i].query = own + layer->query_column * bytes;
        calls[i].key = own + layer->key_column * bytes;
        calls[i].value = own + layer->value_column * bytes;
        calls[i].output = output->weight ? attended + starts[i] * width * bytes : pieces[i].to;
        calls[i].query_length = calls[i].kv_length = pieces[i].rows;
        calls[i].finite = 1;
    }
    if (ATTEND(calls, count, team, helpers)) goto end;
    for (int64_t i = 0; i < count; i++) pieces[i].finite = calls[i].finite;
    if (!output->weight || multiply_all(output, values, outputs, rows, team, helpers)) status = 0;
end:
    free(starts);
    free(calls);
    free(projected);
    free(attended);
    return status;
}
