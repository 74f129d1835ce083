// What the files of the library share. Python sees only the functions that EXPORT marks (legato/cpu/library.py).
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define GROUP 32         // inputs that share a scale, of weights and of activations
#define BLOCK_ROWS 16    // outputs that are stored interleaved: one per vector lane
#define KEY_TILE 64      // keys that attention scores at a time, at multiples of it in every sequence
#define MAX_HEAD_DIM 256
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CEIL(a, b) (((a) + (b) - 1) / (b))

// How 16 outputs are stored. By group of 32 inputs:
//   FORM_4: 4 x 64 bytes, byte 4 r + i of vector q has input 4 q + i of row r below and input 16 + 4 q + i above,
//           then 16 scales and 16 minima, half floats: weight = scale * code + minimum
//   FORM_8: 8 x 64 bytes, byte 4 r + i of vector q has 128 plus input 4 q + i of row r;
//           behind all groups 16 scales of each: weight = scale * (code - 128), codes 1 to 255
// By eight groups, as the K types of GGUF: 16 scales and 16 minima, half floats; of every group 32 int8; then codes:
//   FORM_K4: codes as in FORM_4; of 16 rows the integers a, then b: weight = scale * a * code + minimum * b
//   FORM_K6: the low halves of codes as in FORM_4, then their high bits in 2 x 64 bytes: byte 4 r + i of vector h has
//            at 2 q those of input 16 h + 4 q + i; weight = scale * (a, of inputs from 16 on b) * (code - 32)
enum form { FORM_4 = 4, FORM_8 = 8, FORM_K4 = 16 + 4, FORM_K6 = 16 + 6 };
#define IS_K(form) ((form) & 16)
#define HAS_MINIMA(form) (((form) & 15) == 4)
#define K_HEADER 320  // bytes before the codes of eight groups
#define CODE_BYTES(form) ((form) == FORM_8 ? 512 : (form) == FORM_K6 ? 384 : 256)
#define K_BYTES(form) (K_HEADER + 8 * CODE_BYTES(form))
// Calls a function that is compiled for each form, its first argument.
#define FOR_FORM(form, function, ...)                                                           \
    ((form) == FORM_4 ? function(FORM_4, __VA_ARGS__) : (form) == FORM_8 ? function(FORM_8, __VA_ARGS__) \
     : (form) == FORM_K4 ? function(FORM_K4, __VA_ARGS__) : function(FORM_K6, __VA_ARGS__))

// Where the codes of a group are in a block, and its scales: of K forms what is before eight groups.
static inline int64_t codes_at(int form, int64_t group) {
    if (IS_K(form)) return group / 8 * K_BYTES(form) + K_HEADER + group % 8 * CODE_BYTES(form);
    return group * (form == FORM_4 ? 256 + 64 : 512);
}
static inline int64_t scales_at(int form, int64_t groups, int64_t group) {
    if (IS_K(form)) return group / 8 * K_BYTES(form);
    return form == FORM_4 ? codes_at(form, group) + 256 : groups * 512 + group * 32;
}
static inline int64_t block_bytes(int form, int64_t groups) {
    return form == FORM_8 ? CEIL(groups * 544, 64) * 64 : form == FORM_4 ? groups * 320 : groups / 8 * K_BYTES(form);
}

struct block {
    const uint8_t *data;  // aligned to 64 bytes
    int32_t form;
};

struct matrix {
    int64_t rows;    // outputs; the last block is filled up with zeros
    int64_t groups;  // of inputs; filled up with zeros
    int64_t num_blocks;
    const float *bias;  // [rows] or null
    int32_t *at;        // [groups + 1]: of a row of inputs, where the codes of each group begin (`quants`)
    struct block blocks[];
};

// Rows of activations in int8, with a scale for each group. Zero beyond the last input. Where that is too coarse, a
// group is rounded twice: it has two parts, and its inputs are 256 times the first plus the second. Group g has the
// parts [at[g], at[g + 1]) of a row.
struct quants {
    int64_t groups;
    const int32_t *at;  // [groups + 1]
    int8_t *q;          // [rows][at[groups]][GROUP]
    float *scale;       // [rows][groups]
    int32_t *base;      // [rows][groups][2], -128 times the sums of the halves of a group's inputs
    float *shift;       // [rows][groups], scale times the sum of both
    float *by_16;       // [rows / 16][groups][2][16], scale and shift again, for kernels that take 16 rows at a time
};

enum activation { SILU = 0, GELU_TANH = 1 };

struct layer {
    struct matrix *qkv, *output, *gate_up, *down;
    const float *norm, *mlp_norm;      // [hidden]
    const float *q_norm, *k_norm;      // [head_dim] or null
    int64_t window;                    // keys that a query sees; 0: all
    // Half floats, by 16 slots: keys [slots / 16][num_kv_heads][head_dim][16], so that a vector has the same dimension
    // of 16 keys, values [slots / 16][num_kv_heads][16][head_dim].
    uint16_t *keys, *values;
};

struct shape {
    int64_t num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, rope_dim;
    float eps, scale, soft_cap;
    int32_t activation;
    const float *cos_sin;  // [positions][rope_dim], cosines and then sines
};

// One forward: T tokens of n sequences, those that bring one token first.
struct step {
    int64_t num_tokens, num_sequences, num_wanted, block_size, table_stride;
    const int64_t *positions;     // [T]
    const int64_t *slots;         // [T] where keys and values go
    const int32_t *counts;        // [n] tokens of each sequence
    const int32_t *context_lens;  // [n] with those of this step
    const int32_t *tables;        // [n][table_stride] blocks of each sequence
    const int64_t *wanted;        // [m] tokens whose hidden states are returned
};

struct attention {
    const struct shape *shape;
    const struct layer *layer;
    const int32_t *table;  // of the sequence
    int64_t block_size;
};

struct kernels {
    const char *name;
    int64_t most_rows, tile_rows;  // of a piece of work: at most so many, and a multiple unless they are the last
    // Outputs of blocks [b0, b1) for rows [m0, m1) of x: out[m][n] = or += product + bias.
    void (*product)(const struct matrix *w, const struct quants *x, int64_t b0, int64_t b1, int64_t m0, int64_t m1,
                    float *out, int64_t stride, int add);
    // Groups [g0, g1) of activation(gate) * up, quantized; gate and up are the halves of w.
    void (*gated)(const struct matrix *w, const struct quants *x, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                  int activation, struct quants *out);
    // Head `head` of q, k and v: norm, rotation; q (times scale) to `queries` [T][num_heads * head_dim], k and v to
    // their slots.
    void (*head)(const struct shape *s, const struct layer *l, const struct quants *x, int64_t head, int64_t m0,
                 int64_t m1, const struct step *t, float *queries);
    void (*norm)(const float *x, const float *weight, float eps, int64_t m0, int64_t m1, int64_t size,
                 struct quants *out);
    void (*quantize)(const float *x, int64_t m0, int64_t m1, int64_t size, struct quants *out);
    // Attention of `count` queries of one sequence and key head; the first has `position`. Row i of `out` is theirs.
    void (*attend)(const struct attention *a, int64_t kv_head, const float *queries, int64_t count, int64_t position,
                   struct quants *out, int64_t row);
    // The largest of `size` numbers, of equal ones the first, and its log probability: NaN if a number is not finite.
    void (*best)(const float *logits, int64_t size, int64_t *id, float *logprob);
};

extern const struct kernels kernels_plain, kernels_neon, kernels_avx2, kernels_avxvnni, kernels_avx512, kernels_amx;
const struct kernels *chosen_kernels(void);

// Runs work(context, piece) for each piece in [0, count), on the calling thread and those of the pool. Pieces are
// handed out one at a time, so that a thread that loses its core delays its piece only.
typedef void work(void *context, int64_t piece);
void pool_run(work *function, void *context, int64_t count);
int pool_threads(void);
