// Quantized activations and products with packed weights. A part of kernels.c.
#pragma once
#include "legato.h"
#include "simd.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// ---------------------------------------------------------------------------------------------------- quantization

// Half a group, and what rounding leaves of it. Scales of numbers that are not finite are NaN, so that the result is.
INLINE vf quantize_half(vf x, struct quants *out, int64_t at) {
    float most = vf_hmax(vf_abs(x)), check = vf_sum(vf_mul(x, vf_set1(0.0f)));
    float scale = most * (1.0f / 127.0f) + check;
    vi q = vi_from_f(vf_mul(x, vf_set1(most > 1e-30f && most < 1e30f ? 127.0f / most : 0.0f)));
    vi_store_i8(out->q + at * LANES, q);
    out->scale[at] = scale;
    out->sum[at] = vi_sum(q);
    return vf_fma(vf_from_i(q), vf_set1(-scale), x);
}

INLINE void quantize_group(vf a, vf b, struct quants *out, int64_t row, int64_t group) {
    int64_t at = row * out->groups + group;
    for (struct quants *to = out; to; to = to->rest) {
        a = quantize_half(a, to, 2 * at);
        b = quantize_half(b, to, 2 * at + 1);
        to->shift[at] = to->scale[2 * at] * (float)to->sum[2 * at] + to->scale[2 * at + 1] * (float)to->sum[2 * at + 1];
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

// Of few rows the time is that of reading the weights: they are asked for early, also beyond the end of a page.
#define FEW_ROWS 4
#define AHEAD 3072

// out[r][0 .. 16 B) += of R rows and B blocks. Of every half of a group first the integer sums, then the floats, in the
// order of the groups.
INLINE void tile_4(const struct block *blocks, int64_t groups, const struct quants *x, int64_t row, const int R,
                   const int B, float *out, int64_t stride) {
    const int64_t width = groups * GROUP;
    const int8_t *q = x->q + row * width;
    const float *scale = x->scale + row * 2 * groups, *shift = x->shift + row * groups;
    const uint8_t *w[TILE_BLOCKS];
    vf acc[TILE_ROWS][TILE_BLOCKS];
    for (int b = 0; b < B; b++) w[b] = blocks[b].data;
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = vf_load(out + r * stride + b * LANES);
    for (int64_t g = 0; g < groups; g++) {
        for (int half = 0; half < 2; half++, q += GROUP / 2) {
            u4_acc sums[TILE_ROWS][TILE_BLOCKS];
            for (int r = 0; r < R; r++)
                for (int b = 0; b < B; b++) sums[r][b] = u4_begin();
            for (int i = 0; i < 4; i++) {
                vb codes[TILE_BLOCKS];
                for (int b = 0; b < B; b++) {
                    codes[b] = vb_load(w[b] + 64 * i);
                    codes[b] = half ? vb_high(codes[b]) : vb_low(codes[b]);
                    if (R <= FEW_ROWS && !half) __builtin_prefetch(w[b] + AHEAD + 64 * i);
                }
                for (int r = 0; r < R; r++) {
                    inputs four = inputs_at(q + r * width + 4 * i);
                    for (int b = 0; b < B; b++) sums[r][b] = dot_u4(sums[r][b], codes[b], four);
                }
            }
            for (int b = 0; b < B; b++) {
                vf by = vf_load_half((const uint16_t *)(w[b] + 256));
                for (int r = 0; r < R; r++) {
                    vf sum = vf_from_i(u4_sum(sums[r][b]));
                    acc[r][b] = vf_fma(sum, vf_mul(by, vf_set1(scale[2 * (r * groups + g) + half])), acc[r][b]);
                }
            }
        }
        for (int b = 0; b < B; b++) {
            if (R <= FEW_ROWS) __builtin_prefetch(w[b] + AHEAD + 256);
            vf least = vf_load_half((const uint16_t *)(w[b] + 256) + LANES);
            for (int r = 0; r < R; r++) acc[r][b] = vf_fma(least, vf_set1(shift[r * groups + g]), acc[r][b]);
            w[b] += GROUP_BYTES_4;
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) vf_store(out + r * stride + b * LANES, acc[r][b]);
}

INLINE void tile_8(const struct block *blocks, int64_t groups, const struct quants *x, int64_t row, const int R,
                   const int B, float *out, int64_t stride) {
    const int64_t width = groups * GROUP, halves = 2 * groups;
    const int8_t *q = x->q + row * width;
    const float *scale = x->scale + row * halves;
    const int32_t *sum = x->sum + row * halves;
    vf acc[TILE_ROWS][TILE_BLOCKS];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = vf_load(out + r * stride + b * LANES);
    for (int64_t h = 0; h < halves; h++, q += GROUP / 2) {
        u8_acc sums[TILE_ROWS][TILE_BLOCKS];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sums[r][b] = u8_begin(sum[r * halves + h]);
        for (int i = 0; i < 4; i++) {
            vb codes[TILE_BLOCKS];
            for (int b = 0; b < B; b++) {
                codes[b] = vb_load(blocks[b].data + h * 256 + 64 * i);
                if (R <= FEW_ROWS) __builtin_prefetch(blocks[b].data + h * 256 + AHEAD + 64 * i);
            }
            for (int r = 0; r < R; r++) {
                inputs four = inputs_at(q + r * width + 4 * i);
                for (int b = 0; b < B; b++) sums[r][b] = dot_u8(sums[r][b], codes[b], four);
            }
        }
        for (int b = 0; b < B; b++) {
            vf by = vf_load_half((const uint16_t *)(blocks[b].data + groups * 512) + h / 2 * LANES);
            for (int r = 0; r < R; r++) {
                vf dot = vf_from_i(u8_sum(sums[r][b]));
                acc[r][b] = vf_fma(dot, vf_mul(by, vf_set1(scale[r * halves + h])), acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) vf_store(out + r * stride + b * LANES, acc[r][b]);
}

// 16 B outputs of rows [row, row + count), of blocks of one form.
INLINE void tiles(const struct block *blocks, const int B, const struct quants *x, int64_t row, int64_t count,
                  float *out, int64_t stride) {
#define TILE(R)                                                                               \
    if (blocks->form == FORM_4) tile_4(blocks, x->groups, x, row, R, B, out, stride);         \
    else tile_8(blocks, x->groups, x, row, R, B, out, stride)
    for (; count >= TILE_ROWS; count -= TILE_ROWS, row += TILE_ROWS, out += TILE_ROWS * stride) { TILE(TILE_ROWS); }
#if TILE_ROWS > 4
    if (count >= 4) { TILE(4); count -= 4, row += 4, out += 4 * stride; }
#endif
#if TILE_ROWS > 2
    if (count >= 2) { TILE(2); count -= 2, row += 2, out += 2 * stride; }
#endif
    if (count) { TILE(1); }
#undef TILE
}

// Products of some blocks and rows [row, row + count) with all that x has. Two blocks share what is loaded of the rows,
// where an instruction set has the registers for it; the second reading of a block, for `rest`, is from the cache.
static void block_rows(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                       int64_t count, float *out, int64_t stride) {
    for (int64_t r = 0; r < count; r++) memset(out + r * stride, 0, (size_t)(num_blocks * LANES) * sizeof(float));
    for (int64_t b = 0; b < num_blocks;) {
        int pair = TILE_BLOCKS > 1 && b + 1 < num_blocks && blocks[b].form == blocks[b + 1].form;
        for (const struct quants *part = x; part; part = part->rest)
            if (pair) tiles(blocks + b, TILE_BLOCKS, part, row, count, out + b * LANES, stride);
            else tiles(blocks + b, 1, part, row, count, out + b * LANES, stride);
        b += pair ? 2 : 1;
    }
}

#define ROWS_AT_ONCE 64  // of a product, in a buffer on the stack

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
    for (int64_t b = b0; b < b1; b += 2)
        for (int64_t m = m0; m < m1; m += ROWS_AT_ONCE) {
            int64_t count = MIN(ROWS_AT_ONCE, m1 - m), blocks = MIN(2, b1 - b);
            block_rows(&w->blocks[b], blocks, x, m, count, buffer, 2 * LANES);
            for (int64_t i = 0; i < blocks; i++)
                put(w, b + i, count, buffer + i * LANES, 2 * LANES, out + m * stride, stride, add);
        }
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
    for (int64_t g = g0; g < g1; g++)
        for (int64_t m = m0; m < m1; m += ROWS_AT_ONCE) {
            int64_t count = MIN(ROWS_AT_ONCE, m1 - m);
            block_rows(&w->blocks[2 * g], 2, x, m, count, gate, GROUP);
            block_rows(&ups[2 * g], 2, x, m, count, up, GROUP);
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
}
