/* Messages of a stream whose requests are all small and of layouts that came before: what they ask for, as calls, and
   the message that answers them. Whatever is unusual is left to others, who say what is wrong with it. Every field has 8
   bytes, as in attention.h. */

#ifndef ATTNSERVE_MESSAGES_H
#define ATTNSERVE_MESSAGES_H

#include "attention.h"

enum { MOST_LAYOUTS = 256, MOST_REQUESTS = 64, MOST_CALLS = 256 };

/* Requests that differ in nothing but the contents of query, key and value, and in the caches that they refer to. Behind
   it lie `places`, [pieces, 2], and the bytes of `fixed`, `head`, `middle` and `tail`. */
struct layout {
    int64_t length;         /* of a request, in bytes */
    int64_t pieces;         /* so many pieces of it are fixed: `places` says where each begins, and its length */
    int64_t fixed_bytes;    /* `fixed` has them, end to end */
    int64_t sequences;      /* as many calls it comes to */
    int64_t references, references_bytes;   /* where references to caches begin in it, one a sequence, and their bytes
                                               together; 0 bytes: it has none */
    int64_t query, key, value;                                      /* where they begin in it */
    int64_t query_step, key_step, value_step, output_step, lse_step; /* in bytes, from a sequence to the next */
    int64_t output_bytes, lse_bytes;    /* of the reply's tensors */
    int64_t head_bytes, middle_bytes, tail_bytes;   /* of its reply, but for the timings: head, output, middle, lse, tail */
    int64_t cost, effort, flops, tokens;
    struct call call;       /* a sequence, but for addresses */
};

/* The layouts that are known, by the lengths of their requests, and which were used since somebody looked; and the tags
   of the fields of messages, of a byte each: the calls of a request; id, timeout and attention of a call; seconds and
   nanoseconds of a timeout; the references of an attention, and name, layer, expected length and append's id of one; the
   replies of a response; id and attention of a reply; timings, batch size and lengths of caches of an attention, and how
   long was taken for decoding, waiting, staging and computing. */
struct known {
    int64_t calls_tag, id_tag, timeout_tag, attend_tag, seconds_tag, nanos_tag;
    int64_t references_tag, name_tag, layer_tag, expected_tag, append_id_tag;
    int64_t replies_tag, reply_id_tag, reply_tag;
    int64_t timings_tag, batch_tag, lengths_tag, decode_tag, queue_tag, staging_tag, compute_tag;
    int64_t count;
    int64_t lengths[MOST_LAYOUTS];
    const struct layout *layouts[MOST_LAYOUTS];
    int64_t used[MOST_LAYOUTS];
};

/* A layer of a cache, as a request refers to it. */
struct reference {
    int64_t name, name_bytes;   /* where its name is in the message; 0 bytes where a call is to no cache */
    int64_t layer;
    int64_t expected;           /* the length that it should have; -1 if that is not said */
    int64_t append_id;          /* 64 bits; 0 if there is none */
    int64_t length;             /* the length that it has when the request is answered: for others to say */
};

/* What a message asks for. */
struct asked {
    int64_t requests;       /* 0 if the message is for others; -1 if that is so for a layout that is not known */
    int64_t calls;          /* `call` has so many */
    int64_t request_bytes, result_bytes, cost, effort, flops, tokens;   /* together */
    int64_t timeout;        /* the shortest, in nanoseconds; the largest number if there is none */
    int64_t cached;         /* so many requests are to caches: where their keys are is for others to say, before they are
                               computed */
    int64_t compute;        /* how long computing took, in nanoseconds */
    int64_t answer_bytes;   /* of the message that answers it */
    int64_t timings_bytes;
    uint8_t timings[64];    /* of each reply */
    int64_t ids[MOST_REQUESTS]; /* 0 for a unary call, which has none */
    int64_t begins[MOST_REQUESTS];      /* where a request begins in the message */
    int64_t places[MOST_REQUESTS];      /* the place of its layout among those that are known */
    int64_t first_calls[MOST_REQUESTS]; /* the first of its calls */
    const struct layout *layouts[MOST_REQUESTS];
    uint8_t *outputs[MOST_REQUESTS];
    float *lses[MOST_REQUESTS];
    struct reference references[MOST_CALLS];
    struct call call[MOST_CALLS];
};

/* Reads a message of a stream, of at most `most` requests. Their results are to lie in `results`, of so many bytes, the
   first of which is at a multiple of 64. */
void attnserve_read_message(struct known *known, const uint8_t *message, int64_t length, int64_t most,
                            uint8_t *results, int64_t room, struct asked *asked);

/* The same of a message that is one request, of a unary call. */
void attnserve_read_request(struct known *known, const uint8_t *message, int64_t length, uint8_t *results,
                            int64_t room, struct asked *asked);

/* Appends the token that a call brings to a cache, whose keys and values are of the dtype of the request: to two pages,
   behind so many tokens there. Before it is said where the call's keys are. Returns whether all of the token is finite. */
int64_t attnserve_append_token(const struct asked *asked, int64_t call, uint8_t *keys, uint8_t *values, int64_t slot);

/* Computes what a message asks for, by `attend`, for which the last two are. Decoding, waiting and staging took each
   request so many nanoseconds. Returns 0; -1 if there was no memory; -2 if results are not all finite. */
typedef int64_t attend_function(struct call *calls, int64_t count, struct team *team, int64_t helpers);
int64_t attnserve_compute_message(const struct known *known, struct asked *asked, int64_t decode, int64_t queue,
                                  int64_t staging, attend_function *attend, struct team *team, int64_t helpers);

/* Writes the message that answers it, of `answer_bytes`: for a unary call a reply without its envelope. */
void attnserve_write_message(const struct known *known, const struct asked *asked, uint8_t *to);

/* Their sizes: who has others has another version of this file. */
int64_t attnserve_layout_bytes(void);
int64_t attnserve_known_bytes(void);
int64_t attnserve_asked_bytes(void);

#endif
