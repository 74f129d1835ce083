// Compares two instruction sets of the CPU kernels, bit for bit: instruction_sets NAME OTHER. For processors that no
// test machine has, run by an emulator (`make test-neon`). Exits with 1 if results differ, 2 if one is not there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../legato/cpu/src/legato.h"

const char *legato_choose(const char *name);
int legato_start_threads(int count);
void legato_pack(int form, const uint8_t *codes, const uint16_t *scales, const uint16_t *minima, const int8_t *first,
                 const int8_t *second, int64_t rows, int64_t groups, uint8_t *out);
void legato_pack_dense(const float *dense, int64_t rows, int64_t in_features, uint8_t *out);
struct matrix *legato_matrix(int64_t rows, int64_t groups, const float *bias);
void legato_matrix_blocks(struct matrix *m, int64_t first, int64_t count, int form, const uint8_t *data);
int legato_apply(const struct matrix *w, const float *x, int64_t rows, int64_t in_features, const float *norm,
                 float eps, int twice, float *out);
int legato_forward(const struct shape *s, const struct layer *layers, const struct step *t, float *x, float *out);
int legato_calibrate(const struct shape *s, const struct layer *layers, const struct step *t, float *x, float *out);
void legato_best(const float *logits, int64_t rows, int64_t size, int64_t *ids, float *logprobs);

enum { LAYERS = 2, HIDDEN = 256, INNER = 512, HEADS = 6, KV_HEADS = 2, DIM = 32, VOCABULARY = 320, TOKENS = 100 };
#define CACHE_BYTES (4096 * KV_HEADS * DIM * sizeof(uint16_t))  // of 4,096 slots

static float number(void) { return (float)(rand() % 2001 - 1000) / 1000.0f; }

static float *numbers(int64_t count) {
    float *made = aligned_alloc(64, (size_t)(count * 4 + 63) / 64 * 64);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}

static struct matrix *matrix(int64_t rows, int64_t in_features, int form) {
    const int64_t groups = in_features / GROUP, num_blocks = rows / BLOCK_ROWS;
    uint8_t *data = aligned_alloc(64, (size_t)(num_blocks * block_bytes(form, groups) + 63) / 64 * 64);
    if (form == FORM_8) {
        legato_pack_dense(numbers(rows * in_features), rows, in_features, data);
    } else {
        const int64_t num_codes = rows * in_features / (form == FORM_K6 ? 1 : 2), num_scales = rows * groups;
        uint8_t *codes = malloc((size_t)num_codes);
        uint16_t *scales = malloc((size_t)num_scales * 2), *minima = malloc((size_t)num_scales * 2);
        int8_t *integers = malloc((size_t)num_scales * 2);
        for (int64_t i = 0; i < num_codes; i++) codes[i] = (uint8_t)(rand() & (form == FORM_K6 ? 63 : 255));
        for (int64_t i = 0; i < num_scales; i++)
            scales[i] = (uint16_t)(0x2000 + rand() % 1024), minima[i] = (uint16_t)(0xa800 + rand() % 1024);
        for (int64_t i = 0; i < 2 * num_scales; i++) integers[i] = (int8_t)(rand() % 8 - (form == FORM_K6 ? 4 : 0));
        const int8_t *second = integers + num_scales;
        legato_pack(form, codes, scales, form == FORM_K6 ? 0 : minima, integers, second, rows, groups, data);
    }
    struct matrix *m = legato_matrix(rows, groups, numbers(rows));
    legato_matrix_blocks(m, 0, num_blocks, form, data);
    return m;
}

static void begin(float *x) {
    srand(7);
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = 3.0f * number();
}

// A prompt of 70 tokens and 30 decodes of its own positions; then logits and the likeliest tokens. The first one
// decides which inputs are rounded twice, in matrices of all forms.
static int64_t computed(struct layer *layers, const struct matrix *head, float *result, int is_first) {
    static int64_t positions[TOKENS], slots[TOKENS], wanted[TOKENS], ids[TOKENS];
    static int32_t counts[TOKENS], context[TOKENS], tables[TOKENS * 8];
    float *x = malloc(sizeof(float) * TOKENS * HIDDEN), *out = result, *logits = result + TOKENS * HIDDEN;
    float *logprobs = logits + TOKENS * VOCABULARY;
    static float cos_sin[256 * DIM], ones[HIDDEN];
    for (int i = 0; i < 256 * DIM; i++) cos_sin[i] = i % DIM < DIM / 2 ? 0.8f : 0.6f;
    for (int i = 0; i < HIDDEN; i++) ones[i] = 1.0f + 0.01f * (float)i;
    struct shape s = {LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, DIM, 1e-5f, 0.2f, 30.0f, SILU, cos_sin};
    for (int l = 0; l < LAYERS; l++) {
        layers[l].norm = layers[l].mlp_norm = ones;
        memset(layers[l].keys, 0, CACHE_BYTES), memset(layers[l].values, 0, CACHE_BYTES);
    }
    counts[30] = context[30] = 70;
    for (int i = 0; i < TOKENS; i++) {
        int sequence = i < 30 ? i : 30;
        positions[i] = i < 30 ? 64 + i : i - 30, wanted[i] = i;
        if (i < 30) counts[i] = 1, context[i] = 65 + i;
        for (int b = 0; b < 8; b++) tables[sequence * 8 + b] = sequence * 8 + b + 1;  // nobody shares a slot
        slots[i] = tables[sequence * 8 + positions[i] / 16] * 16 + positions[i] % 16;
    }
    struct step t = {TOKENS, 31, TOKENS, 16, 8, positions, slots, counts, context, tables, wanted};
    begin(x);
    if (is_first && legato_calibrate(&s, layers, &t, x, out)) exit(3);
    begin(x);
    if (legato_forward(&s, layers, &t, x, out)) exit(3);
    if (legato_apply(head, out, TOKENS, HIDDEN, ones, 1e-5f, 1, logits)) exit(3);
    legato_best(logits, TOKENS, VOCABULARY, ids, logprobs);
    free(x);
    return TOKENS * HIDDEN + TOKENS * VOCABULARY + TOKENS;
}

int main(int argc, char **argv) {
    struct layer layers[LAYERS];
    static float results[2][TOKENS * (HIDDEN + VOCABULARY + 1)];
    int64_t count = 0;
    srand(1);
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = (struct layer){matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, FORM_4),
                                   matrix(HIDDEN, HEADS * DIM, FORM_8), matrix(2 * INNER, HIDDEN, FORM_K4),
                                   matrix(HIDDEN, INNER, FORM_K6), 0, 0, 0, 0, l ? 40 : 0, 0, 0};
        layers[l].keys = malloc(CACHE_BYTES), layers[l].values = malloc(CACHE_BYTES);
    }
    struct matrix *head = matrix(VOCABULARY, HIDDEN, FORM_8);
    legato_start_threads(2);
    for (int i = 0; i < 2; i++) {
        if (argc != 3 || !legato_choose(argv[1 + i])) return fprintf(stderr, "no such instruction set\n"), 2;
        count = computed(layers, head, results[i], i == 0);
    }
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++) different += results[0][i] != results[1][i];
    printf("%s and %s: %lld of %lld numbers differ; the first is %g\n", argv[1], argv[2], (long long)different,
           (long long)count, (double)results[0][0]);
    return different != 0;
}
