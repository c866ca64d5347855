/* Messages read and written: see messages.h. */

#include "messages.h"
#include "tokens.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

enum { ALIGNMENT = 64 };

/* messages.py accesses these fields at these offsets. */
_Static_assert(offsetof(struct call, key) == 8 && offsetof(struct call, value) == 16, "keys and values of a call");
_Static_assert(offsetof(struct call, kv_length) == 96 && offsetof(struct call, offset) == 104, "its lengths");
_Static_assert(offsetof(struct asked, compute) == 80 && offsetof(struct asked, answer_bytes) == 88 &&
               offsetof(struct asked, ids) == 168, "what was asked");
_Static_assert(offsetof(struct reference, length) == 40 && sizeof(struct reference) == 48, "a reference");

/* The part of a message that has not been read yet. */
struct rest {
    const uint8_t *at, *end;
};

/* Reads a varint below 2^56 in its shortest encoding. Returns whether there is one. */
static int take_number(struct rest *rest, int64_t *number) {
    *number = 0;
    for (int shift = 0; shift < 56 && rest->at < rest->end; shift += 7) {
        uint8_t byte = *rest->at++;
        *number |= (int64_t)(byte & 127) << shift;
        if (byte < 128) return byte || !shift;
    }
    return 0;
}

/* Reads 64 bits. Returns whether they are there. */
static int take_fixed(struct rest *rest, int64_t *bits) {
    if (rest->end - rest->at < (int64_t)sizeof *bits) return 0;
    memcpy(bits, rest->at, sizeof *bits);
    rest->at += sizeof *bits;
    return 1;
}

/* Reads a tag. Returns whether it is there; if not, nothing is read. */
static int take_tag(struct rest *rest, int64_t tag) {
    if (rest->at == rest->end || *rest->at != tag) return 0;
    rest->at++;
    return 1;
}

/* Reads a length and splits off that many bytes as `part`. Returns whether there are that many. */
static int take_part(struct rest *rest, struct rest *part) {
    int64_t length;
    if (!take_number(rest, &length) || length > rest->end - rest->at) return 0;
    *part = (struct rest){rest->at, rest->at + length};
    rest->at += length;
    return 1;
}

/* Reads a positive timeout, if there is one. If it is shorter than `nanoseconds`, these become as short. Returns
   whether nothing is unusual. */
static int take_timeout(const struct known *known, struct rest *rest, int64_t *nanoseconds) {
    struct rest part;
    int64_t seconds = 0, nanos = 0;
    if (!take_tag(rest, known->timeout_tag)) return 1;
    if (!take_part(rest, &part)) return 0;
    if (take_tag(&part, known->seconds_tag) && (!take_number(&part, &seconds) || !seconds)) return 0;
    if (take_tag(&part, known->nanos_tag) && (!take_number(&part, &nanos) || !nanos)) return 0;
    if (part.at != part.end || nanos >= 1000000000 || !(seconds | nanos)) return 0;
    int64_t most = INT64_MAX / 1000000000 - 1;
    int64_t whole = (seconds < most ? seconds : most) * 1000000000 + nanos;
    if (whole < *nanoseconds) *nanoseconds = whole;
    return 1;
}

static const int64_t *places_of(const struct layout *layout) { return (const int64_t *)(layout + 1); }

static const uint8_t *fixed_of(const struct layout *layout) {
    return (const uint8_t *)(places_of(layout) + 2 * layout->pieces);
}

/* Whether a request has a layout: whether all that is fixed in it is the same. */
static int is_of(const struct layout *layout, const uint8_t *request) {
    const int64_t *place = places_of(layout);
    const uint8_t *fixed = fixed_of(layout);
    for (int64_t piece = 0; piece < layout->pieces; piece++, place += 2) {
        if (memcmp(request + place[0], fixed, place[1])) return 0;
        fixed += place[1];
    }
    return 1;
}

/* The place of a request's layout, which is marked as used; -1 if it is unknown. */
static int64_t place_of(struct known *known, const uint8_t *request, int64_t length) {
    for (int64_t place = 0; place < known->count; place++) {
        if (known->lengths[place] != length || !is_of(known->layouts[place], request)) continue;
        known->used[place] = 1;
        return place;
    }
    return -1;
}

/* Reads a request's references to caches, one per sequence. Returns whether nothing is unusual. */
static int take_references(const struct known *known, const uint8_t *message, const struct layout *layout,
                           const uint8_t *request, struct reference *references) {
    struct rest rest = {request + layout->references, request + layout->references + layout->references_bytes};
    for (int64_t sequence = 0; sequence < layout->sequences; sequence++) {
        struct rest part, name;
        if (!take_tag(&rest, known->references_tag) || !take_part(&rest, &part)) return 0;
        if (!take_tag(&part, known->name_tag) || !take_part(&part, &name) || name.at == name.end) return 0;
        struct reference reference = {name.at - message, name.end - name.at, 0, -1, 0, 0};
        if (take_tag(&part, known->layer_tag) && (!take_number(&part, &reference.layer) || !reference.layer)) return 0;
        if (take_tag(&part, known->expected_tag) && !take_number(&part, &reference.expected)) return 0;
        if (take_tag(&part, known->append_id_tag) &&
            (!take_fixed(&part, &reference.append_id) || !reference.append_id)) return 0;
        if (part.at != part.end) return 0;
        references[sequence] = reference;
    }
    return rest.at == rest.end;
}

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* A message to read, the known layouts, and where results go, in `room` bytes. */
struct reading {
    struct known *known;
    const uint8_t *message;
    uint8_t *results;
    int64_t room;
    struct asked *asked;
};

/* Adds the calls of a request whose layout is at `place`. Returns whether there was room and nothing is unusual. */
static int add(const struct reading *reading, int64_t number, int64_t place, const uint8_t *request) {
    struct asked *asked = reading->asked;
    const struct layout *layout = reading->known->layouts[place];
    int64_t lse_at = asked->result_bytes + aligned(layout->output_bytes);
    int64_t behind = lse_at + aligned(layout->lse_bytes);
    if (asked->calls + layout->sequences > MOST_CALLS || behind > reading->room) return 0;
    struct reference *references = asked->references + asked->calls;
    if (layout->references_bytes) {
        if (!take_references(reading->known, reading->message, layout, request, references)) return 0;
        asked->cached++;
    } else {
        memset(references, 0, layout->sequences * sizeof *references);
    }
    uint8_t *output = reading->results + asked->result_bytes;
    uint8_t *lse = layout->lse_bytes ? reading->results + lse_at : NULL;
    asked->begins[number] = request - reading->message;
    asked->places[number] = place;
    asked->first_calls[number] = asked->calls;
    for (int64_t sequence = 0; sequence < layout->sequences; sequence++) {
        struct call *call = &asked->call[asked->calls++];
        *call = layout->call;
        call->query = request + layout->query + sequence * layout->query_step;
        call->key = request + layout->key + sequence * layout->key_step;
        call->value = request + layout->value + sequence * layout->value_step;
        call->output = output + sequence * layout->output_step;
        call->lse = lse ? (float *)(lse + sequence * layout->lse_step) : NULL;
    }
    asked->layouts[number] = layout;
    asked->outputs[number] = output;
    asked->lses[number] = (float *)lse;
    asked->result_bytes = behind;
    asked->request_bytes += layout->length;
    asked->cost += layout->cost;
    asked->effort += layout->effort;
    asked->flops += layout->flops;
    asked->tokens += layout->tokens;
    return 1;
}

static void begin(struct asked *asked) {
    memset(asked, 0, offsetof(struct asked, ids));
    asked->timeout = INT64_MAX;
}

/* Adds a request to `asked`. Returns 1; 0 if there is no room, or something is unusual; -1 if its layout is unknown. */
static int64_t take_request(const struct reading *reading, const struct rest *request, int64_t number) {
    int64_t place = place_of(reading->known, request->at, request->end - request->at);
    return place < 0 ? -1 : add(reading, number, place, request->at);
}

void attnserve_read_message(struct known *known, const uint8_t *message, int64_t length, int64_t most,
                            uint8_t *results, int64_t room, struct asked *asked) {
    struct reading reading = {known, message, results, room, asked};
    begin(asked);
    if (most > MOST_REQUESTS) most = MOST_REQUESTS;
    struct rest rest = {message, message + length};
    int64_t requests = 0;
    for (; rest.at < rest.end; requests++) {
        struct rest call, request;
        if (requests == most || !take_tag(&rest, known->calls_tag) || !take_part(&rest, &call)) return;
        if (!take_tag(&call, known->id_tag) || !take_number(&call, &asked->ids[requests])) return;
        if (!asked->ids[requests]) return;
        if (!take_timeout(known, &call, &asked->timeout)) return;
        if (!take_tag(&call, known->attend_tag) || !take_part(&call, &request) || call.at != call.end) return;
        int64_t found = take_request(&reading, &request, requests);
        if (found < 0) asked->requests = found;
        if (found < 1) return;
    }
    asked->requests = requests;
}

void attnserve_read_request(struct known *known, const uint8_t *message, int64_t length, uint8_t *results,
                            int64_t room, struct asked *asked) {
    struct reading reading = {known, message, results, room, asked};
    struct rest request = {message, message + length};
    begin(asked);
    asked->ids[0] = 0;
    asked->requests = take_request(&reading, &request, 0);
}

int64_t attnserve_append_token(const struct asked *asked, int64_t call, uint8_t *keys, uint8_t *values, int64_t slot) {
    const struct call *of = &asked->call[call];
    struct page_layout layout = {
        of->kv_dtype, of->kv_heads, of->head_dim, of->value_dim, of->key_token, of->key_head, of->value_token,
        of->value_head,
    };
    struct token token = {of->key, of->value, keys, values, slot, 0};
    attnserve_append_tokens(&layout, &token, 1);
    return token.finite;
}

static int64_t number_bytes(int64_t number) {
    int64_t bytes = 1;
    while (number >>= 7) bytes++;
    return bytes;
}

static uint8_t *put_number(uint8_t *to, int64_t number) {
    for (; number > 127; number >>= 7) *to++ = (uint8_t)(number | 128);
    *to++ = (uint8_t)number;
    return to;
}

static uint8_t *put_bytes(uint8_t *to, const void *from, int64_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

static uint8_t *put_field(uint8_t *to, int64_t tag, int64_t number) {
    if (!number) return to;
    *to++ = (uint8_t)tag;
    return put_number(to, number);
}

/* The caches that a request attends to, one per call. */
static const struct reference *references_of(const struct asked *asked, int64_t place) {
    return asked->references + asked->first_calls[place];
}

/* The bytes that the lengths of these caches take, as varints. */
static int64_t lengths_bytes(const struct asked *asked, int64_t place) {
    const struct reference *reference = references_of(asked, place);
    int64_t bytes = 0;
    for (int64_t left = asked->layouts[place]->sequences; left; left--) bytes += number_bytes(reference++->length);
    return bytes;
}

/* The size of a reply, without its envelope on a stream. */
static int64_t reply_bytes(const struct asked *asked, int64_t place) {
    const struct layout *layout = asked->layouts[place];
    int64_t lengths = layout->references_bytes ? lengths_bytes(asked, place) : 0;
    if (lengths) lengths += 1 + number_bytes(lengths);
    return asked->timings_bytes + lengths + layout->head_bytes + layout->output_bytes + layout->middle_bytes +
           layout->lse_bytes + layout->tail_bytes;
}

/* The size of a reply with its envelope, but without the tag and the length that precede that. */
static int64_t envelope_bytes(const struct asked *asked, int64_t place) {
    int64_t reply = reply_bytes(asked, place);
    return 1 + number_bytes(asked->ids[place]) + 1 + number_bytes(reply) + reply;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t attnserve_compute_message(const struct known *known, struct asked *asked, int64_t decode, int64_t queue,
                                  int64_t staging, attend_function *attend, struct team *team, int64_t helpers) {
    int64_t begin = now();
    if (attend(asked->call, asked->calls, team, helpers)) return -1;
    for (int64_t place = 0; place < asked->calls; place++)
        if (!asked->call[place].finite) return -2;
    asked->compute = now() - begin;
    uint8_t *to = asked->timings + 2;
    to = put_field(to, known->decode_tag, decode);
    to = put_field(to, known->queue_tag, queue);
    to = put_field(to, known->staging_tag, staging);
    to = put_field(to, known->compute_tag, asked->compute);
    asked->timings[0] = (uint8_t)known->timings_tag;
    asked->timings[1] = (uint8_t)(to - asked->timings - 2);
    asked->timings_bytes = put_field(to, known->batch_tag, asked->requests) - asked->timings;
    asked->answer_bytes = 0;
    for (int64_t place = 0; place < asked->requests; place++) {
        int64_t envelope = envelope_bytes(asked, place);
        asked->answer_bytes += asked->ids[place] ? 1 + number_bytes(envelope) + envelope : reply_bytes(asked, place);
    }
    return 0;
}

void attnserve_write_message(const struct known *known, const struct asked *asked, uint8_t *to) {
    for (int64_t place = 0; place < asked->requests; place++) {
        const struct layout *layout = asked->layouts[place];
        if (asked->ids[place]) {
            *to++ = (uint8_t)known->replies_tag;
            to = put_number(to, envelope_bytes(asked, place));
            *to++ = (uint8_t)known->reply_id_tag;
            to = put_number(to, asked->ids[place]);
            *to++ = (uint8_t)known->reply_tag;
            to = put_number(to, reply_bytes(asked, place));
        }
        to = put_bytes(to, asked->timings, asked->timings_bytes);
        if (layout->references_bytes) {
            *to++ = (uint8_t)known->lengths_tag;
            to = put_number(to, lengths_bytes(asked, place));
            const struct reference *reference = references_of(asked, place);
            for (int64_t left = layout->sequences; left; left--) to = put_number(to, reference++->length);
        }
        const uint8_t *head = fixed_of(layout) + layout->fixed_bytes, *middle = head + layout->head_bytes;
        to = put_bytes(to, head, layout->head_bytes);
        to = put_bytes(to, asked->outputs[place], layout->output_bytes);
        to = put_bytes(to, middle, layout->middle_bytes);
        if (layout->lse_bytes) to = put_bytes(to, asked->lses[place], layout->lse_bytes);
        to = put_bytes(to, middle + layout->middle_bytes, layout->tail_bytes);
    }
}

int64_t attnserve_layout_bytes(void) { return sizeof(struct layout); }

int64_t attnserve_known_bytes(void) { return sizeof(struct known); }

int64_t attnserve_asked_bytes(void) { return sizeof(struct asked); }
