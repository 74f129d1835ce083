// Quantized activations and products with packed weights. A part of kernels.c.
#pragma once
#include "legato.h"
#include "simd.h"

#ifdef __AMX_INT8__
#define BY_16 1          // many rows are multiplied 16 at a time
#define ROWS_AT_ONCE 96  // of a product, in a buffer on the stack
#define ROW_MULTIPLE 16  // of the rows of a tile
#else
#define BY_16 0
#define ROWS_AT_ONCE 72
#define ROW_MULTIPLE 12
#endif

// ---------------------------------------------------------------------------------------------------- quantization

// Codes of a group times `factor`, where the next ones of its row go. Adds to 256 times the sums of its halves.
INLINE void put_codes(vf *a, vf *b, float factor, float scale, int8_t *q, int32_t sums[2]) {
    // Of what rounding leaves a code could be 128, and -128 has no absolute value in a byte.
    const vf most = vf_set1(127.0f), least = vf_set1(-127.0f);
    vi first = vi_from_f(vf_max(vf_min(vf_mul(*a, vf_set1(factor)), most), least));
    vi second = vi_from_f(vf_max(vf_min(vf_mul(*b, vf_set1(factor)), most), least));
    vi_store_i8(q, first);
    vi_store_i8(q + LANES, second);
    *a = vf_fma(vf_from_i(first), vf_set1(-scale), *a);
    *b = vf_fma(vf_from_i(second), vf_set1(-scale), *b);
    sums[0] = 256 * sums[0] + vi_sum(first), sums[1] = 256 * sums[1] + vi_sum(second);
}

// If a number is not finite the scale is NaN, and so is the result.
INLINE void quantize_group(vf a, vf b, struct quants *out, int64_t row, int64_t group) {
    int64_t at = row * out->groups + group;
    int8_t *q = out->q + (row * out->at[out->groups] + out->at[group]) * GROUP;
    float most = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    float check = vf_sum(vf_mul(vf_add(a, b), vf_set1(0.0f)));
    float scale = most * (1.0f / 127.0f) + check;
    float factor = most > 1e-30f && most < 1e30f ? 127.0f / most : 0.0f;
    int32_t sums[2] = {0, 0};
    put_codes(&a, &b, factor, scale, q, sums);
    if (out->at[group + 1] - out->at[group] == 2) {
        put_codes(&a, &b, 256.0f * factor, scale, q + GROUP, sums);
        scale *= 1.0f / 256.0f;
    }
    out->scale[at] = scale;
    out->base[2 * at] = -128 * sums[0], out->base[2 * at + 1] = -128 * sums[1];
    out->shift[at] = scale * (float)(sums[0] + sums[1]);
    if (BY_16) {
        float *to = out->by_16 + (row / 16 * out->groups + group) * 32 + row % 16;
        to[0] = scale, to[16] = out->shift[at];
    }
}

static void quantize(const float *x, int64_t m0, int64_t m1, int64_t size, struct quants *out) {
    for (int64_t m = m0; m < m1; m++) {
        const float *row = x + m * size;
        int64_t g = 0;
        for (; (g + 1) * GROUP <= size; g++)
            quantize_group(vf_load(row + g * GROUP), vf_load(row + g * GROUP + LANES), out, m, g);
        if (g < out->groups) {
            float last[GROUP] = {0};
            memcpy(last, row + g * GROUP, (size_t)(size - g * GROUP) * sizeof(float));
            quantize_group(vf_load(last), vf_load(last + LANES), out, m, g);
        }
    }
}

static float root_mean_square(const float *x, int64_t size, float eps) {
    vf sum = vf_set1(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vf v = vf_load(x + i);
        sum = vf_fma(v, v, sum);
    }
    return 1.0f / sqrtf(vf_sum(sum) / (float)size + eps);
}

static void norm(const float *x, const float *weight, float eps, int64_t m0, int64_t m1, int64_t size,
                 struct quants *out) {
    for (int64_t m = m0; m < m1; m++) {
        const float *row = x + m * size;
        vf factor = vf_set1(root_mean_square(row, size, eps));
        for (int64_t i = 0; i < size; i += GROUP) {
            vf a = vf_mul(vf_mul(vf_load(row + i), factor), vf_load(weight + i));
            vf b = vf_mul(vf_mul(vf_load(row + i + LANES), factor), vf_load(weight + i + LANES));
            quantize_group(a, b, out, m, i / GROUP);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- products

// Vectors i and 4 + i of the eight of a group: inputs from 4 i and from 16 + 4 i on.
INLINE void weights_at(const uint8_t *w, const int form, int i, vb *first, vb *second) {
    vb codes = vb_load(w + 64 * i);
    *first = form == FORM_8 ? codes : vb_low(codes);
    *second = form == FORM_8 ? vb_load(w + 256 + 64 * i) : vb_high(codes);
    if (form == FORM_K6) *first = vb_six(*first, vb_load(w + 256), i), *second = vb_six(*second, vb_load(w + 320), i);
}

// Scales of the group whose codes are at w, and its minima, or of FORM_K6 the scales of its second half.
INLINE void factors_at(const struct block *block, const uint8_t *w, const int form, int64_t groups, int64_t g,
                       vf *first, vf *second) {
    const uint16_t *scales = (const uint16_t *)(form == FORM_4 ? w + 256 : block->data + scales_at(form, groups, g));
    const int8_t *integers = (const int8_t *)scales + 64 + g % 8 * 32;
    *first = vf_load_half(scales);
    *second = HAS_MINIMA(form) ? vf_load_half(scales + LANES) : *first;
    if (!IS_K(form)) return;
    *first = vf_mul(*first, vf_load_i8(integers)), *second = vf_mul(*second, vf_load_i8(integers + LANES));
}

// out[r][0 .. 16 B) = of R rows and B blocks. Of every group first the integer sums, then the floats, in the order of
// the groups; where inputs were rounded twice there are two sums, the first 256 times. `ahead` is how far behind the
// weights those are that come next: asked for early, also beyond the end.
INLINE void tile(const struct block *blocks, const int form, const struct quants *x, int64_t row, const int R,
                 const int B, int64_t ahead, float *out, int64_t stride) {
    const int64_t groups = x->groups, width = x->at[groups] * GROUP;
    const int in_4 = HAS_MINIMA(form), in_halves = form == FORM_K6;
    const int8_t *q = x->q + row * width;
    const float *scale = x->scale + row * groups, *shift = x->shift + row * groups;
    const int32_t *base = x->base + row * groups * 2;
    const uint8_t *w[TILE_BLOCKS];
    vf acc[TILE_ROWS][TILE_BLOCKS];
    for (int b = 0; b < B; b++) w[b] = blocks[b].data + codes_at(form, 0);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = vf_set1(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        u4_acc sums_4[TILE_ROWS][TILE_BLOCKS];
        u8_acc sums_8[TILE_ROWS][TILE_BLOCKS][2];
        for (int b = 0; b < B; b++) {
            for (int i = 0; i < CODE_BYTES(form) + 64 * (form == FORM_4); i += 64) PREFETCH(w[b] + ahead + i);
            if (IS_K(form)) PREFETCH(blocks[b].data + ahead + scales_at(form, groups, g) + g % 8 * 40);
        }
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++)
                sums_4[r][b] = u4_begin(), sums_8[r][b][0] = sums_8[r][b][1] = u8_begin();
        for (int left = x->at[g + 1] - x->at[g];; q += GROUP) {
            for (int b = 0; b < B; b++) __asm__("" : "+r"(w[b]));  // kept for a second part codes would be spilled
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vb first[TILE_BLOCKS], second[TILE_BLOCKS];
                for (int b = 0; b < B; b++) weights_at(w[b], form, i, &first[b], &second[b]);
                for (int r = 0; r < R; r++) {
                    inputs a = inputs_at(q + r * width + 4 * i), c = inputs_at(q + r * width + 16 + 4 * i);
                    for (int b = 0; b < B; b++)
                        if (in_4) sums_4[r][b] = dot_u4(sums_4[r][b], first[b], a);
                        else sums_8[r][b][0] = dot_u8(sums_8[r][b][0], first[b], a);
                    for (int b = 0; b < B; b++)
                        if (in_4) sums_4[r][b] = dot_u4(sums_4[r][b], second[b], c);
                        else sums_8[r][b][in_halves] = dot_u8(sums_8[r][b][in_halves], second[b], c);
                }
            }
            if (!--left) break;
            for (int r = 0; r < R; r++)
                for (int b = 0; b < B; b++) {
                    sums_4[r][b] = u4_times_256(sums_4[r][b]);
                    for (int h = 0; h < 2; h++) sums_8[r][b][h] = u8_times_256(sums_8[r][b][h]);
                }
        }
        q += GROUP;
        for (int b = 0; b < B; b++) {
            vf by, other;
            factors_at(&blocks[b], w[b], form, groups, g, &by, &other);
            w[b] += codes_at(form, g + 1) - codes_at(form, g);
            for (int r = 0; r < R; r++) {
                const int64_t at = r * groups + g;
                const vf times = vf_set1(scale[at]);
                const int32_t low = base[2 * at], high = base[2 * at + 1];
                vi sum = in_4 ? u4_sum(sums_4[r][b]) : u8_sum(sums_8[r][b][0], in_halves ? low : low + high);
                acc[r][b] = vf_fma(vf_from_i(sum), vf_mul(by, times), acc[r][b]);
                if (in_4) acc[r][b] = vf_fma(other, vf_set1(shift[at]), acc[r][b]);
                if (in_halves)
                    acc[r][b] = vf_fma(vf_from_i(u8_sum(sums_8[r][b][1], high)), vf_mul(other, times), acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) vf_store(out + r * stride + b * LANES, acc[r][b]);
}

// 16 B outputs of `count` rows of quants, of blocks of one form. The first tile brings in the weights of the next ones.
INLINE void tiles(const int form, const struct block *blocks, const int B, const struct quants *x, int64_t row,
                  int64_t count, float *out, int64_t stride) {
    int64_t size = B * block_bytes(form, x->groups), ahead = size > 65536 ? 8192 : size;  // in long rows their own
#define TILE(R)                                                    \
    tile(blocks, form, x, row, R, B, ahead, out, stride);          \
    count -= R, row += R, out += R * stride, ahead = 0
    while (count >= TILE_ROWS) { TILE(TILE_ROWS); }
#if TILE_ROWS > 4
    if (count >= 4) { TILE(4); }
#endif
#if TILE_ROWS > 2
    if (count >= 2) { TILE(2); }
#endif
    if (count) { TILE(1); }
#undef TILE
}

#if BY_16
#include "products_amx.h"
#else
INLINE void begin_tiles(int64_t rows) { (void)rows; }
INLINE void end_tiles(int64_t rows) { (void)rows; }
#endif

// Products of two blocks, or of one, and rows [row, row + count). Two blocks share what is loaded of the rows, where an
// instruction set has the registers for it.
static void pair_rows(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                      int64_t count, float *out, int64_t stride) {
#if BY_16  // where `row` is a multiple of 16
    const int64_t done = sixteens(blocks, num_blocks, x, row, count, out, stride);
    row += done, count -= done, out += done * stride;
#endif
    const int has_room = blocks->form != FORM_K6 || count < 4;  // which has two sums of everything
    if (TILE_BLOCKS > 1 && num_blocks > 1 && blocks[0].form == blocks[1].form && has_room)
        FOR_FORM(blocks->form, tiles, blocks, TILE_BLOCKS, x, row, count, out, stride);
    else
        for (int64_t b = 0; b < num_blocks; b++)
            FOR_FORM(blocks[b].form, tiles, blocks + b, 1, x, row, count, out + b * LANES, stride);
}

// Of one block: out[m][n] = or += sums + bias.
static void put(const struct matrix *w, int64_t b, int64_t count, const float *sums, int64_t width, float *out,
                int64_t stride, int add) {
    int64_t n = b * BLOCK_ROWS, left = MIN(BLOCK_ROWS, w->rows - n);
    float bias[LANES] = {0};
    if (w->bias) memcpy(bias, w->bias + n, (size_t)left * sizeof(float));
    for (int64_t r = 0; r < count; r++) {
        float *to = out + r * stride + n;
        vf sum = vf_load(sums + r * width);
        if (w->bias) sum = vf_add(sum, vf_load(bias));
        if (left == LANES) {
            vf_store(to, add ? vf_add(vf_load(to), sum) : sum);
        } else {
            float tail[LANES];
            vf_store(tail, sum);
            for (int64_t i = 0; i < left; i++) to[i] = add ? to[i] + tail[i] : tail[i];
        }
    }
}

static void product(const struct matrix *w, const struct quants *x, int64_t b0, int64_t b1, int64_t m0, int64_t m1,
                    float *out, int64_t stride, int add) {
    float buffer[ROWS_AT_ONCE * 2 * LANES];
    begin_tiles(m1 - m0);
    for (int64_t b = b0; b < b1; b += 2)
        for (int64_t m = m0; m < m1; m += ROWS_AT_ONCE) {
            int64_t count = MIN(ROWS_AT_ONCE, m1 - m), blocks = MIN(2, b1 - b);
            pair_rows(&w->blocks[b], blocks, x, m, count, buffer, 2 * LANES);
            for (int64_t i = 0; i < blocks; i++)
                put(w, b + i, count, buffer + i * LANES, 2 * LANES, out + m * stride, stride, add);
        }
    end_tiles(m1 - m0);
}

INLINE vf activated(vf x, int activation) {
    vf one = vf_set1(1.0f);
    if (activation == SILU) return vf_div(x, vf_add(one, vf_exp(vf_min(vf_sub(vf_set1(0.0f), x), vf_set1(80.0f)))));
    // gelu: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)), which is the version with tanh
    vf inner = vf_mul(vf_set1(-1.5957691216f), vf_fma(vf_mul(vf_mul(x, x), x), vf_set1(0.044715f), x));
    return vf_div(x, vf_add(one, vf_exp(vf_min(inner, vf_set1(80.0f)))));
}

static void gated(const struct matrix *w, const struct quants *x, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                  int activation, struct quants *out) {
    float gate[ROWS_AT_ONCE * GROUP], up[ROWS_AT_ONCE * GROUP];
    const struct block *ups = w->blocks + w->num_blocks / 2;
    const int64_t inner = w->rows / 2;
    begin_tiles(m1 - m0);
    for (int64_t g = g0; g < g1; g++)
        for (int64_t m = m0; m < m1; m += ROWS_AT_ONCE) {
            int64_t count = MIN(ROWS_AT_ONCE, m1 - m);
            pair_rows(&w->blocks[2 * g], 2, x, m, count, gate, GROUP);
            pair_rows(&ups[2 * g], 2, x, m, count, up, GROUP);
            for (int64_t r = 0; r < count; r++) {
                vf parts[2];
                for (int half = 0; half < 2; half++) {
                    int64_t n = g * GROUP + half * LANES;
                    vf a = vf_load(gate + r * GROUP + half * LANES), b = vf_load(up + r * GROUP + half * LANES);
                    if (w->bias) a = vf_add(a, vf_load(w->bias + n)), b = vf_add(b, vf_load(w->bias + inner + n));
                    parts[half] = vf_mul(activated(a, activation), b);
                }
                quantize_group(parts[0], parts[1], out, m + r, g);
            }
        }
    end_tiles(m1 - m0);
}
