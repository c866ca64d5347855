/* Exact attention on a CPU: what a caller hands over. Every field has 8 bytes, so that structs are packed without gaps.

   Strides are in elements. What a score is, and in which order options apply, is specified in the protos. */

#ifndef ATTNSERVE_ATTENTION_H
#define ATTNSERVE_ATTENTION_H

#include "team.h"
#include "tokens.h"

enum dtype { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

/* One sequence: Lq queries of Hq heads over S keys of Hk heads. Hq is a multiple of Hk, and none of the
   widths is 0. Inputs may lie at any address. */
struct call {
    /* Addresses of the first token of the first head. The elements of a head of a token are adjacent. */
    const void *query;      /* [Lq, Hq, D] by strides, of query_dtype */
    const void *key;        /* [S, Hk, D] by strides, of kv_dtype; or, if page_tokens, one address for each page */
    const void *value;      /* [S, Hk, Dv], likewise */
    void *output;           /* [Lq, Hq, Dv] by strides, of query_dtype */
    float *lse;             /* [Hq, Lq] by lse_head, or NULL */
    const uint8_t *mask;    /* [Hq, Lq, S] by strides, 0 excludes; or NULL. Strides of 0 broadcast;
                               mask_key is 0 or 1 */
    const float *bias;      /* [Hq, Lq, S], likewise, or NULL */
    const float *slopes;    /* ALiBi: [Hq], or NULL */
    const float *sinks;     /* [Hq], or NULL */
    int64_t shared;         /* how many first pages this call shares with the call before it, which may differ only in
                               pages, length and position: they are read once for both; 0: none */
    int64_t finite;         /* set to 1 by the caller. 0 afterwards if any result is NaN or infinite: then the results
                               have no meaning. Rows with nothing to attend do not count */
    int64_t query_length, kv_length, offset;    /* Lq, S; query i stands at offset + i */
    int64_t query_heads, kv_heads, head_dim, value_dim;
    int64_t query_dtype, kv_dtype;
    int64_t page_tokens;    /* tokens in each page but the last; 0: all keys and all values are in one piece */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, output_token, output_head, lse_head;
    int64_t mask_head, mask_query, mask_key, bias_head, bias_query, bias_key;
    int64_t left, right;    /* query i reaches keys offset + i - left to offset + i + right; negative: no bound */
    double scale, softcap;  /* softcap 0: none */
};

/* Computes calls, with at most `helpers` threads of a team, or alone if that is NULL. Each thread takes units of work
   one by one. A unit's bits depend neither on the thread that computes it nor on the other calls. Returns 0, or -1 if
   there was no memory: then no result has any meaning. */
int64_t attnserve_attend_avx512(struct call *calls, int64_t count, struct team *team, int64_t helpers);
int64_t attnserve_attend_avx2(struct call *calls, int64_t count, struct team *team, int64_t helpers);

/* y = x W^T + b, in float32, rounded at the end to the dtype that x, W and y have. */
struct product {
    const void *weight;     /* [outputs / 16, inputs, 16]: the weights of 16 outputs for one input are adjacent. For
                               AMX, it is [outputs / 16, inputs / 2, 16, 2]: those for two inputs are; inputs are padded
                               with zeros to a multiple of 32 */
    const float *bias;      /* [outputs], or NULL */
    int64_t inputs, outputs; /* inputs: 1 or more; outputs: a multiple of 16 */
    int64_t dtype;
    int64_t amx;            /* 1: computed by AMX, in bfloat16; 0: by vectors */
};

/* Rows [rows, inputs] to [rows, outputs]; strides are in elements. Both may lie at any address. A row's bits do not
   depend on the thread that computes it or on the number of rows. Returns 0, or -1 if there was no memory: then no
   result has any meaning. */
int64_t attnserve_multiply_avx512(const struct product *product, const void *from, int64_t from_stride, void *to,
                                  int64_t to_stride, int64_t rows, struct team *team, int64_t helpers);
int64_t attnserve_multiply_avx2(const struct product *product, const void *from, int64_t from_stride, void *to,
                                int64_t to_stride, int64_t rows, struct team *team, int64_t helpers);

/* Tiles are the registers of AMX, of 16 rows, with 32 elements of bfloat16 or 16 floats each. */
enum { AMX_SIDE = 16, AMX_ELEMENTS = 512, AMX_DOWN = 2, AMX_ACROSS = 2 };

/* Whether this processor has AMX for bfloat16, and the system lets this process use it. This asks the system to let
   it. */
int64_t attnserve_amx_permitted(void);

/* Before and after a thread multiplies tiles. Between the two it must not call what may use them, too. */
void attnserve_amx_begin(void);
void attnserve_amx_end(void);

/* The sums of the products of `down` times 16 rows, 1 or 2, with `across` panels, 1 or 2, of a weight that is packed
   for AMX. Rows are [down, steps, 16, 32], the weight [across, steps, 16, 16, 2]. Of sums [AMX_DOWN * 16, AMX_ACROSS *
   16], those that are asked for are written. */
void attnserve_amx_multiply(int64_t down, int64_t across, const uint16_t *rows, const uint16_t *weight, int64_t steps,
                            float *sums);

/* A sequence of a batch. */
struct piece {
    const void *from;       /* [rows, inputs], at any address */
    void *to;               /* [rows, outputs], likewise */
    int64_t rows;           /* 1 or more */
    int64_t finite;         /* output: 0 if the attention has any NaN or infinity: then `to` has no meaning */
};

/* Multi-head self-attention of sequences, with its weights. Rows, weights, and the heads in between have one dtype;
   each step computes in float32 and rounds its results to that. */
struct multi_head {
    struct product project; /* to the heads' queries, keys and values, which begin at these columns */
    int64_t query_column, key_column, value_column;
    struct product output;  /* of all heads side by side; weight NULL: the heads themselves are the result */
    struct call call;       /* the attention of a sequence, without addresses and lengths */
};

/* Returns 0, or -1 if there was no memory: then no result has any meaning. */
int64_t attnserve_multi_head_avx512(const struct multi_head *layer, struct piece *pieces, int64_t count,
                                    struct team *team, int64_t helpers);
int64_t attnserve_multi_head_avx2(const struct multi_head *layer, struct piece *pieces, int64_t count,
                                  struct team *team, int64_t helpers);

/* A norm of rows [rows, width], computed in float32: x / sqrt(mean(x^2) + epsilon) * weight + bias (RMSNorm), or the
   same of x - mean(x) (LayerNorm). */
enum norm_kind { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };
struct norm {
    const float *weight, *bias; /* [width], or NULL */
    int64_t kind;
    double epsilon;
};

/* A rotation of heads in place (RoPE): x and y of each pair become x cos - y sin and y cos + x sin. */
struct turning {
    int64_t column, heads;      /* of the first head, and how many of them; 0: nothing is rotated */
    int64_t head_dim, width;    /* of a head; and how many of its first elements are rotated, an even number */
    int64_t interleaved;        /* pairs are adjacent elements; 0: one of the first half and one of the second */
};

enum activation { RELU = 0, GELU = 1, GELU_TANH = 2, SILU = 3 };

/* What a stack of blocks computes from one attention to the next: the first one's output, its residual connection, the
   feed-forward part, and the second one's queries, keys and values. With its residual connection, a part is either x +
   part(norm(x)) or norm(x + part(x)). Rows and weights have one dtype; each step computes in float32 and rounds its
   results to that. */
struct passage {
    int64_t dtype, width;       /* of rows, a multiple of 16 */
    struct product output;      /* of all heads side by side; weight NULL: these are the part's result themselves */
    struct norm behind_attention, before_forward;
    struct product up, down;    /* weight NULL: there is no feed-forward part */
    int64_t gated, activation;  /* down(activation(up)); gated: the activation of the first half of up, times the
                                   rest */
    struct norm behind_forward, before_next;
    struct product next;        /* weight NULL: the stack ends here, after before_next */
    struct turning query, key;  /* within what `next` gives */
};

/* Rows on their way: all of them end to end, at any address. */
struct passed {
    const void *rows;           /* [rows, width] */
    const void *attended;       /* [rows, inputs of output, or width]; or NULL: the stack begins here, with
                                   before_next */
    const float *rotations;     /* [rows, width of turning]: cosines, then sines; or NULL */
    void *behind;               /* output, if there is `attended`: the rows behind the last part [rows, width] */
    void *next;                 /* output: [rows, outputs of next]; without that, what before_next gives [rows, width],
                                   or NULL if it is no norm */
    int64_t count;
};

/* A row's bits do not depend on the thread that computes it or on the number of rows. Returns 0, or -1 if there was no
   memory: then no result has any meaning. */
int64_t attnserve_pass_avx512(const struct passage *passage, const struct passed *passed, struct team *team,
                              int64_t helpers);
int64_t attnserve_pass_avx2(const struct passage *passage, const struct passed *passed, struct team *team,
                            int64_t helpers);

/* A decoder, whose sequences continue caches with pages of one layout. */
struct decoder {
    const struct passage *passages; /* [blocks + 1]: to the attention of each block, and from the last to the end */
    int64_t blocks;
    struct page_layout page;
};

/* Rows on their way through all blocks of a decoder. In each block, first its tokens are appended to caches, then its
   calls are computed. */
struct stepped {
    const void *rows;           /* [rows, width], at any address; of sequences of 1 row or more, end to end */
    const float *rotations;     /* as in `passed` */
    void *output;               /* [rows, width] */
    int64_t count;
    struct token *tokens;       /* [blocks, token_count]: the addresses of keys and values are offsets in bytes from the
                                   first of the projected rows, which `next` of a passage gives */
    int64_t token_count;
    struct call *calls;         /* [blocks, call_count]: the addresses of queries are such offsets, too; those of
                                   outputs are offsets in bytes from the first of rows [rows, inputs of output, or
                                   width]; all else is as in other calls */
    int64_t call_count;
};

/* Returns 0; -1 if there was no memory; or 1 if the result of some call is not finite. Then no result has any meaning,
   nor has what was appended. */
int64_t attnserve_step_avx512(const struct decoder *decoder, struct stepped *stepped, struct team *team,
                              int64_t helpers);
int64_t attnserve_step_avx2(const struct decoder *decoder, struct stepped *stepped, struct team *team,
                            int64_t helpers);

/* For each position, of all pairs the cosines of position times frequency, then the sines: [count, 2 pairs]. */
void attnserve_rotations(const double *frequencies, int64_t pairs, const int64_t *positions, int64_t count, float *to);

/* A team without helpers so far; NULL if there is no memory. A patient team is for tests: its callers wait until all
   the helpers that they ask for have joined, so that there must be enough of them. A team is never freed, since callers
   may use it at any time. */
struct team *attnserve_gather(int64_t patient);

/* Makes this thread a helper of a team, until the team is dismissed. */
void attnserve_help(struct team *team);

/* Ends all helpers; those at work finish it first. Whatever helpers do not compute, present and later callers of the
   team compute by themselves. */
void attnserve_dismiss(struct team *team);

/* The best of these instruction sets that this processor has: 512, 2, or 0 for neither. */
int64_t attnserve_instructions(void);

/* The size of a call: a caller that packs another size was made for another version of this file. */
int64_t attnserve_call_bytes(void);

/* The digest of all that the library is made of (sources.py), which shows whether it is out of date. */
extern const char attnserve_sources[];

#endif
