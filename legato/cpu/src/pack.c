// Weights into blocks of 16 interleaved rows, and single rows back out of them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "legato.h"

static float from_half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    if (value >= 65536.0f) value = h & 0x3ff ? NAN : INFINITY;
    return h & 0x8000 ? -value : value;
}

// The half float that is equal or next above, of a number that is not negative.
static uint16_t half_above(float value) {
    if (!(value < 65504.0f)) return value == 65504.0f ? 0x7bff : 0x7e00;  // too large or NaN: NaN
    float scaled = value * 0x1p-112f;
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    uint16_t half = (uint16_t)(bits >> 13);
    while (from_half(half) < value) half++;
    return half;
}

EXPORT int64_t legato_block_bytes(int form, int64_t groups) { return block_bytes(form, groups); }

struct packing {
    int form;
    int64_t rows, groups, in_features;
    const uint8_t *codes;
    const uint16_t *scales, *minima;
    const int8_t *integers[2];
    const float *dense;
    uint8_t *out;
};

static void put_group_4(const struct packing *p, uint8_t *out, uint16_t *scales, int64_t r, int64_t row, int64_t g) {
    int64_t at = row * p->groups + g;
    for (int i = 0; i < 16; i++) out[i / 4 * 64 + 4 * r + i % 4] = p->codes[at * 16 + i];
    scales[r] = p->scales[at], scales[BLOCK_ROWS + r] = p->minima[at];
}

static void put_group_8(const struct packing *p, uint8_t *out, uint16_t *scales, int64_t r, int64_t row, int64_t g) {
    int64_t at = row * p->groups + g;
    for (int i = 0; i < GROUP; i++) out[i / 4 * 64 + 4 * r + i % 4] = p->codes[at * GROUP + i] ^ 0x80;
    scales[r] = p->scales[at];
}

static void put_group_k(const struct packing *p, uint8_t *out, uint16_t *scales, int64_t r, int64_t row, int64_t g) {
    int64_t at = row * p->groups + g;
    int8_t *integers = (int8_t *)scales + 64 + g % 8 * 32 + r;
    scales[r] = p->scales[at / 8], scales[BLOCK_ROWS + r] = p->minima ? p->minima[at / 8] : 0;
    integers[0] = p->integers[0][at], integers[BLOCK_ROWS] = p->integers[1][at];
    for (int i = 0; i < 16; i++) {
        const uint8_t *code = p->codes + (p->form == FORM_K4 ? at * 16 : at * GROUP) + i;
        uint8_t *pair = out + i / 4 * 64 + 4 * r + i % 4, *high = out + 256 + 4 * r + i % 4;
        *pair = p->form == FORM_K4 ? *code : (code[0] & 15) | (uint8_t)(code[16] << 4);
        for (int half = 0; half < 2 && p->form == FORM_K6; half++)
            high[64 * half] |= (uint8_t)(code[16 * half] >> 4 << i / 4 * 2);
    }
}

static void put_dense(const struct packing *p, uint8_t *out, uint16_t *scales, int64_t r, int64_t row, int64_t g) {
    const float *x = p->dense + row * p->in_features + g * GROUP;
    int64_t count = p->in_features - g * GROUP < GROUP ? p->in_features - g * GROUP : GROUP;
    float most = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        most = size > most || size != size ? size : most;  // NaN stays
    }
    scales[r] = half_above(most / 127.0f);
    float scale = from_half(scales[r]), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < GROUP; i++) {
        float code = i < count ? rintf(x[i] * inverse) : 0.0f;
        out[i / 4 * 64 + 4 * r + i % 4] = (uint8_t)(128 + (int)(code > 127 ? 127 : code > -127 ? code : -127));
    }
}

static void pack_block(void *context, int64_t b) {
    const struct packing *p = context;
    const int64_t size = block_bytes(p->form, p->groups);
    uint8_t *out = p->out + b * size;
    memset(out, 0, (size_t)size);  // rows that are not there have scale 0
    for (int64_t r = 0; r < BLOCK_ROWS && b * BLOCK_ROWS + r < p->rows; r++)
        for (int64_t g = 0; g < p->groups; g++)
            (p->dense ? put_dense : IS_K(p->form) ? put_group_k : p->form == FORM_4 ? put_group_4 : put_group_8)(
                p, out + codes_at(p->form, g), (uint16_t *)(out + scales_at(p->form, p->groups, g)), r,
                b * BLOCK_ROWS + r, g);
}

// Codes with 4 bits are [rows][groups * 16], low halves of a group before high ones, others [rows][groups * 32]: below
// 64, or int8 without -128. Scales and minima, which only 4 bits have, are [rows][groups] half floats; of K forms
// [rows][groups / 8], with integers [rows][groups].
EXPORT void legato_pack(int form, const uint8_t *codes, const uint16_t *scales, const uint16_t *minima,
                        const int8_t *first, const int8_t *second, int64_t rows, int64_t groups, uint8_t *out) {
    struct packing p = {form, rows, groups, groups * GROUP, codes, scales, minima, {first, second}, 0, out};
    pool_run(pack_block, &p, CEIL(rows, BLOCK_ROWS));
}

// dense [rows][in_features], quantized to 8 bits.
EXPORT void legato_pack_dense(const float *dense, int64_t rows, int64_t in_features, uint8_t *out) {
    struct packing p = {FORM_8, rows, (in_features + GROUP - 1) / GROUP, in_features, 0, 0, 0, {0}, dense, out};
    pool_run(pack_block, &p, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

EXPORT struct matrix *legato_matrix(int64_t rows, int64_t groups, const float *bias) {
    int64_t num_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    size_t size = sizeof(struct matrix) + (size_t)num_blocks * sizeof(struct block);
    struct matrix *m = calloc(1, size + (size_t)(groups + 1) * sizeof(int32_t));
    if (!m) return 0;
    m->rows = rows, m->groups = groups, m->num_blocks = num_blocks, m->bias = bias;
    m->at = (int32_t *)((char *)m + size);
    for (int64_t g = 0; g <= groups; g++) m->at[g] = (int32_t)g;  // all inputs are rounded once
    return m;
}

// Blocks [first, first + count), packed one behind the other in `data`, which must outlive the matrix.
EXPORT void legato_matrix_blocks(struct matrix *m, int64_t first, int64_t count, int form, const uint8_t *data) {
    for (int64_t b = 0; b < count; b++)
        m->blocks[first + b] = (struct block){data + b * block_bytes(form, m->groups), form};
}

EXPORT void legato_matrix_free(struct matrix *m) { free(m); }

// Row `row` as floats.
static void unpack(const struct matrix *m, int64_t row, int64_t in_features, float *out) {
    const struct block *b = &m->blocks[row / BLOCK_ROWS];
    const int64_t r = row % BLOCK_ROWS;
    for (int64_t k = 0; k < in_features; k++) {
        int64_t g = k / GROUP, i = k % GROUP, at = i % 16 / 4 * 64 + 4 * r + i % 4;
        const uint8_t *codes = b->data + codes_at(b->form, g);
        const uint16_t *scales = (const uint16_t *)(b->data + scales_at(b->form, m->groups, g));
        const int8_t *integers = (const int8_t *)scales + 64 + g % 8 * 32 + r;  // of K forms
        float scale = from_half(scales[r]);
        int code = i < 16 ? codes[at] & 15 : codes[at] >> 4;
        if (b->form == FORM_8) out[k] = scale * (codes[i / 4 * 64 + 4 * r + i % 4] - 128);
        if (b->form == FORM_4) out[k] = scale * code + from_half(scales[BLOCK_ROWS + r]);
        if (b->form == FORM_K4)
            out[k] = scale * integers[0] * code + from_half(scales[BLOCK_ROWS + r]) * integers[BLOCK_ROWS];
        if (b->form == FORM_K6) {
            code |= (codes[256 + i / 16 * 64 + 4 * r + i % 4] >> i % 16 / 4 * 2 & 3) << 4;
            out[k] = scale * integers[i / 16 * BLOCK_ROWS] * (code - 32);
        }
    }
}

struct lookup {
    const struct matrix *m;
    const int64_t *ids;
    int64_t in_features;
    float *out;
};

static void look_up(void *context, int64_t i) {
    const struct lookup *l = context;
    unpack(l->m, l->ids[i], l->in_features, l->out + i * l->in_features);
}

// Rows `ids` of a matrix: an embedding. out [count][in_features]. Returns 0, or -1 for an id that is no row.
EXPORT int legato_rows(const struct matrix *m, const int64_t *ids, int64_t count, int64_t in_features, float *out) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= m->rows) return -1;
    struct lookup l = {m, ids, in_features, out};
    pool_run(look_up, &l, count);
    return 0;
}
