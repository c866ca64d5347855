/* Messages whose requests are all small and of known layouts: what they ask for, as calls, and the message that answers
   them. Whatever is unusual is left to other code, which reports what is wrong with it. Every field has 8 bytes, as in
   attention.h. */

#ifndef ATTNSERVE_MESSAGES_H
#define ATTNSERVE_MESSAGES_H

#include "attention.h"

enum { MOST_LAYOUTS = 256, MOST_REQUESTS = 64, MOST_CALLS = 256 };

/* Requests that differ only in the contents of query, key and value, and in the caches that they refer to. It is
   followed by `places`, [pieces, 2], and the bytes of `fixed`, `head`, `middle` and `tail`. */
struct layout {
    int64_t length;         /* of a request, in bytes */
    int64_t pieces;         /* how many pieces of it are fixed: `places` has where each begins, and its length */
    int64_t fixed_bytes;    /* of `fixed`, which has the pieces end to end */
    int64_t sequences;      /* and as many calls */
    int64_t references, references_bytes;   /* where references to caches begin in it, one per sequence, and their total
                                               bytes; 0 bytes: it has none */
    int64_t query, key, value;                                      /* where they begin in it */
    int64_t query_step, key_step, value_step, output_step, lse_step; /* in bytes, from one sequence to the next */
    int64_t output_bytes, lse_bytes;    /* of the reply's tensors */
    int64_t head_bytes, middle_bytes, tail_bytes;   /* its reply, without timings, is head, output, middle, lse, tail */
    int64_t cost, effort, flops, tokens;
    struct call call;       /* of a sequence, without addresses */
};

/* The tags of message fields, of one byte each; and the known layouts. */
struct known {
    /* Of a stream request: its calls. Of a call: id, timeout, `attend`. Of a timeout: seconds, nanoseconds. */
    int64_t calls_tag, id_tag, timeout_tag, attend_tag, seconds_tag, nanos_tag;
    /* Of an `attend`: its references to caches. Of a reference: name, layer, expected length, append id. */
    int64_t references_tag, name_tag, layer_tag, expected_tag, append_id_tag;
    /* Of a stream response: its replies. Of a reply: id, `attend`. */
    int64_t replies_tag, reply_id_tag, reply_tag;
    /* Of such an `attend`: timings, batch size, cache lengths. Of timings: those of each phase, in nanoseconds. */
    int64_t timings_tag, batch_tag, lengths_tag, decode_tag, queue_tag, staging_tag, compute_tag;
    int64_t count;                  /* of the known layouts */
    int64_t lengths[MOST_LAYOUTS];  /* of their requests, in bytes */
    const struct layout *layouts[MOST_LAYOUTS];
    int64_t used[MOST_LAYOUTS];     /* whether each was used since this was last cleared */
};

/* A layer of a cache, as a request refers to it. */
struct reference {
    int64_t name, name_bytes;   /* where its name is in the message; 0 bytes for a call without a cache */
    int64_t layer;
    int64_t expected;           /* the expected length; -1 if there is none */
    int64_t append_id;          /* 64 bits; 0 if there is none */
    int64_t length;             /* the length when the request is answered: set by messages.py */
};

/* What a message asks for. */
struct asked {
    int64_t requests;       /* 0 if the message is left to other code; -1 if that is because of an unknown layout */
    int64_t calls;          /* how many `call` has */
    int64_t request_bytes, result_bytes, cost, effort, flops, tokens;   /* totals */
    int64_t timeout;        /* the shortest, in nanoseconds; INT64_MAX if there is none */
    int64_t cached;         /* how many requests are to caches: messages.py sets where their keys are, before they are
                               computed */
    int64_t compute;        /* how long computing took, in nanoseconds */
    int64_t answer_bytes;   /* of the message that answers it */
    int64_t timings_bytes;
    uint8_t timings[64];    /* of each reply */
    int64_t ids[MOST_REQUESTS]; /* 0 for a unary call, which has none */
    int64_t begins[MOST_REQUESTS];      /* where a request begins in the message */
    int64_t places[MOST_REQUESTS];      /* the place of its layout in `struct known` */
    int64_t first_calls[MOST_REQUESTS]; /* the first of its calls */
    const struct layout *layouts[MOST_REQUESTS];
    uint8_t *outputs[MOST_REQUESTS];
    float *lses[MOST_REQUESTS];
    struct reference references[MOST_CALLS];
    struct call call[MOST_CALLS];
};

/* Reads a message of a stream, of at most `most` requests. Their results will be written to `results`, of `room` bytes,
   aligned to 64. */
void attnserve_read_message(struct known *known, const uint8_t *message, int64_t length, int64_t most,
                            uint8_t *results, int64_t room, struct asked *asked);

/* The same for a message that is the request of a unary call. */
void attnserve_read_request(struct known *known, const uint8_t *message, int64_t length, uint8_t *results,
                            int64_t room, struct asked *asked);

/* Appends a call's token to a cache of the request's dtype: at index `slot` of a page of keys and one of values. Must
   come before the call's key addresses are set. Returns whether all of the token is finite. */
int64_t attnserve_append_token(const struct asked *asked, int64_t call, uint8_t *keys, uint8_t *values, int64_t slot);

/* Computes what a message asks for with `attend`, which gets `team` and `helpers`. `decode`, `queue` and `staging` are
   the nanoseconds that these took each request. Returns 0; -1 if there was no memory; -2 if a result is not finite. */
typedef int64_t attend_function(struct call *calls, int64_t count, struct team *team, int64_t helpers);
int64_t attnserve_compute_message(const struct known *known, struct asked *asked, int64_t decode, int64_t queue,
                                  int64_t staging, attend_function *attend, struct team *team, int64_t helpers);

/* Writes the message that answers it, of `answer_bytes`: for a unary call, a reply without envelope. */
void attnserve_write_message(const struct known *known, const struct asked *asked, uint8_t *to);

/* The sizes of these structs: a caller with other sizes was made for another version of this file. */
int64_t attnserve_layout_bytes(void);
int64_t attnserve_known_bytes(void);
int64_t attnserve_asked_bytes(void);

#endif
