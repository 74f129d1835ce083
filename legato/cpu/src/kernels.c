// The kernels, compiled once for each instruction set (build.py). No sum depends on which other rows there are.
#include "simd.h"
#include "legato.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define LOWEST -1.0e30f

// ---------------------------------------------------------------------------------------------------- quantization

// One group of 32. Scales of numbers that are not finite are NaN, so that the result is.
INLINE void quantize_group(vf a, vf b, struct quants *out, int64_t row, int64_t group) {
    int64_t at = row * out->groups + group;
    float most = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    float check = vf_sum(vf_mul(vf_add(a, b), vf_set1(0.0f)));
    float scale = most * (1.0f / 127.0f);
    vf inverse = vf_set1(most > 1e-30f && most < 1e30f ? 127.0f / most : 0.0f);
    vi low = vi_from_f(vf_mul(a, inverse)), high = vi_from_f(vf_mul(b, inverse));
    int32_t sum = vi_sum(vi_add(low, high));
    vi_store_i8(out->q + at * GROUP, low);
    vi_store_i8(out->q + at * GROUP + LANES, high);
    out->scale[at] = scale + check;
    out->shift[at] = (scale + check) * (float)sum;
    out->sum[at] = sum;
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

// out[r][0 .. 16 B) of R rows and B blocks. In every group first the integer sums, then the floats, in the order of the
// groups.
INLINE void tile_4(const struct block *blocks, int64_t groups, const struct quants *x, int64_t row, const int R,
                   const int B, float *out, int64_t stride) {
    const int64_t width = groups * GROUP;
    const int8_t *q = x->q + row * width;
    const float *scale = x->scale + row * groups, *shift = x->shift + row * groups;
    const uint8_t *w[TILE_BLOCKS];
    vf acc[TILE_ROWS][TILE_BLOCKS];
    for (int b = 0; b < B; b++) w[b] = blocks[b].data;
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = vf_set1(0.0f);
    for (int64_t g = 0; g < groups; g++, q += GROUP) {
        u4_acc sums[TILE_ROWS][TILE_BLOCKS];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sums[r][b] = u4_begin();
        for (int i = 0; i < 4; i++) {
            vb low[TILE_BLOCKS], high[TILE_BLOCKS];
            for (int b = 0; b < B; b++) {
                vb codes = vb_load(w[b] + 64 * i);
                low[b] = vb_low(codes), high[b] = vb_high(codes);
                if (R <= FEW_ROWS) __builtin_prefetch(w[b] + AHEAD + 64 * i);
            }
            for (int r = 0; r < R; r++) {
                inputs near = inputs_at(q + r * width + 4 * i), far = inputs_at(q + r * width + 16 + 4 * i);
                for (int b = 0; b < B; b++) sums[r][b] = dot_u4(sums[r][b], low[b], near);
                for (int b = 0; b < B; b++) sums[r][b] = dot_u4(sums[r][b], high[b], far);
            }
        }
        for (int b = 0; b < B; b++) {
            const uint16_t *scales = (const uint16_t *)(w[b] + 256);
            if (R <= FEW_ROWS) __builtin_prefetch(w[b] + AHEAD + 256);
            vf by = vf_load_half(scales), least = vf_load_half(scales + LANES);
            for (int r = 0; r < R; r++) {
                vf sum = vf_from_i(u4_sum(sums[r][b]));
                acc[r][b] = vf_fma(sum, vf_mul(by, vf_set1(scale[r * groups + g])), acc[r][b]);
                acc[r][b] = vf_fma(least, vf_set1(shift[r * groups + g]), acc[r][b]);
            }
            w[b] += GROUP_BYTES_4;
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) vf_store(out + r * stride + b * LANES, acc[r][b]);
}

INLINE void tile_8(const struct block *blocks, int64_t groups, const struct quants *x, int64_t row, const int R,
                   const int B, float *out, int64_t stride) {
    const int64_t width = groups * GROUP;
    const int8_t *q = x->q + row * width;
    const float *scale = x->scale + row * groups;
    const int32_t *sum = x->sum + row * groups;
    vf acc[TILE_ROWS][TILE_BLOCKS];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) acc[r][b] = vf_set1(0.0f);
    for (int64_t g = 0; g < groups; g++, q += GROUP) {
        u8_acc sums[TILE_ROWS][TILE_BLOCKS];
        for (int r = 0; r < R; r++)
            for (int b = 0; b < B; b++) sums[r][b] = u8_begin(sum[r * groups + g]);
        for (int i = 0; i < 8; i++) {
            vb codes[TILE_BLOCKS];
            for (int b = 0; b < B; b++) {
                codes[b] = vb_load(blocks[b].data + g * 512 + 64 * i);
                if (R <= FEW_ROWS) __builtin_prefetch(blocks[b].data + g * 512 + AHEAD + 64 * i);
            }
            for (int r = 0; r < R; r++) {
                inputs four = inputs_at(q + r * width + 4 * i);
                for (int b = 0; b < B; b++) sums[r][b] = dot_u8(sums[r][b], codes[b], four);
            }
        }
        for (int b = 0; b < B; b++) {
            vf by = vf_load_half((const uint16_t *)(blocks[b].data + groups * 512) + g * LANES);
            for (int r = 0; r < R; r++) {
                vf dot = vf_from_i(u8_sum(sums[r][b]));
                acc[r][b] = vf_fma(dot, vf_mul(by, vf_set1(scale[r * groups + g])), acc[r][b]);
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

// Two blocks share what is loaded of the rows, where an instruction set has the registers for it.
static void block_rows(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                       int64_t count, float *out, int64_t stride) {
    for (int64_t b = 0; b < num_blocks;) {
        if (TILE_BLOCKS > 1 && b + 1 < num_blocks && blocks[b].form == blocks[b + 1].form) {
            tiles(blocks + b, TILE_BLOCKS, x, row, count, out + b * LANES, stride);
            b += TILE_BLOCKS;
        } else {
            tiles(blocks + b, 1, x, row, count, out + b * LANES, stride);
            b++;
        }
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

// ------------------------------------------------------------------------------------------------------- attention

INLINE void rotate(float *restrict x, const float *restrict cos_sin, int64_t dim) {
    const float *restrict cosine = cos_sin, *restrict sine = cos_sin + dim / 2;
    float *restrict y = x + dim / 2;
    for (int64_t i = 0; i < dim / 2; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cosine[i] - b * sine[i];
        y[i] = b * cosine[i] + a * sine[i];
    }
}

static void head(const struct shape *s, const struct layer *l, const struct quants *x, int64_t head, int64_t m0,
                 int64_t m1, const struct step *t, float *queries) {
    enum { AT_ONCE = 16 };
    float buffer[AT_ONCE * MAX_HEAD_DIM];
    const int64_t dim = s->head_dim, num_blocks = dim / BLOCK_ROWS, kv_heads = s->num_kv_heads;
    const int is_query = head < s->num_heads, is_key = !is_query && head < s->num_heads + kv_heads;
    const int64_t kv_head = is_query ? 0 : (head - s->num_heads) % kv_heads;
    const float *weight = is_query ? l->q_norm : is_key ? l->k_norm : 0;
    const float *bias = l->qkv->bias ? l->qkv->bias + head * dim : 0;
    for (int64_t m = m0; m < m1; m += AT_ONCE) {
        int64_t count = MIN(AT_ONCE, m1 - m);
        block_rows(&l->qkv->blocks[head * num_blocks], num_blocks, x, m, count, buffer, dim);
        for (int64_t r = 0; r < count; r++) {
            float *row = buffer + r * dim;
            if (bias)
                for (int64_t i = 0; i < dim; i += LANES) vf_store(row + i, vf_add(vf_load(row + i), vf_load(bias + i)));
            if (weight) {
                vf factor = vf_set1(root_mean_square(row, dim, s->eps));
                for (int64_t i = 0; i < dim; i += LANES)
                    vf_store(row + i, vf_mul(vf_mul(vf_load(row + i), factor), vf_load(weight + i)));
            }
            if (is_query || is_key) rotate(row, s->cos_sin + t->positions[m + r] * s->rope_dim, s->rope_dim);
            if (is_query) {
                float *to = queries + ((m + r) * s->num_heads + head) * dim;
                for (int64_t i = 0; i < dim; i += LANES)
                    vf_store(to + i, vf_mul(vf_load(row + i), vf_set1(s->scale)));
                continue;
            }
            int64_t block = t->slots[m + r] / t->block_size, place = t->slots[m + r] % t->block_size;
            int64_t begin = (block * kv_heads + kv_head) * t->block_size * dim;
            uint16_t halves[MAX_HEAD_DIM];
            for (int64_t i = 0; i < dim; i += LANES) vf_store_half(halves + i, vf_load(row + i));
            if (is_key)
                for (int64_t i = 0; i < dim; i++) l->keys[begin + i * t->block_size + place] = halves[i];
            else
                memcpy(l->values + begin + place * dim, halves, (size_t)dim * sizeof *halves);
        }
    }
}

// c[r][16 v ..] += or = sum over i of a[r][i] * b[i][16 v ..], for R rows and V vectors.
INLINE void mix_tile(const float *const *a, const float *b, int64_t step, int64_t depth, const int R, const int V,
                     float *c, int64_t stride, const int add) {
    vf acc[MIX_ROWS][MIX_VECS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = add ? vf_load(c + r * stride + v * LANES) : vf_set1(0.0f);
    for (int64_t i = 0; i < depth; i++, b += step) {
        vf line[MIX_VECS];
        for (int v = 0; v < V; v++) line[v] = vf_load(b + v * LANES);
        for (int r = 0; r < R; r++) {
            vf factor = vf_set1(a[r][i]);
            for (int v = 0; v < V; v++) acc[r][v] = vf_fma(factor, line[v], acc[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vf_store(c + r * stride + v * LANES, acc[r][v]);
}

static void mix(const float *const *a, const float *b, int64_t step, int64_t depth, int64_t rows, int64_t num_vecs,
                float *c, int64_t stride, const int add) {
    for (int64_t r = 0; r < rows; r += MIX_ROWS)
        for (int64_t v = 0; v < num_vecs;) {
            int vecs = num_vecs - v >= MIX_VECS ? MIX_VECS : 1;
            const float *from = b + v * LANES;
            float *to = c + r * stride + v * LANES;
#define MIX(R)                                                                                \
    if (vecs == MIX_VECS) mix_tile(a + r, from, step, depth, R, MIX_VECS, to, stride, add);   \
    else mix_tile(a + r, from, step, depth, R, 1, to, stride, add)
            switch (MIN(MIX_ROWS, rows - r)) {
                case 1: MIX(1); break;
                case 2: MIX(2); break;
#if MIX_ROWS > 2
                case 3: MIX(3); break;
                case 4: MIX(4); break;
                case 5: MIX(5); break;
                default: MIX(6); break;
#endif
            }
#undef MIX
            v += vecs;
        }
}

INLINE vf capped(vf scores, float cap) {  // cap * tanh(scores / cap)
    vf e = vf_exp(vf_min(vf_mul(scores, vf_set1(2.0f / cap)), vf_set1(80.0f)));
    return vf_mul(vf_set1(cap), vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f)))));
}

// One row of scores to weights of the visible keys [low, high): the running maximum and sum change, and so does the
// factor on what was mixed before.
INLINE float soften(float *scores, int64_t low, int64_t high, float cap, float *most, float *sum) {
    if (cap > 0.0f)
        for (int i = 0; i < KEY_TILE; i += LANES) vf_store(scores + i, capped(vf_load(scores + i), cap));
    for (int64_t i = 0; i < low; i++) scores[i] = LOWEST;
    for (int64_t i = high; i < KEY_TILE; i++) scores[i] = LOWEST;
    vf top = vf_load(scores);
    for (int i = LANES; i < KEY_TILE; i += LANES) top = vf_max(top, vf_load(scores + i));
    float now = MAX(*most, vf_hmax(top));
    vf total = vf_set1(0.0f);
    for (int i = 0; i < KEY_TILE; i += LANES) vf_store(scores + i, vf_exp(vf_sub(vf_load(scores + i), vf_set1(now))));
    for (int64_t i = 0; i < low; i++) scores[i] = 0.0f;
    for (int64_t i = high; i < KEY_TILE; i++) scores[i] = 0.0f;
    for (int i = 0; i < KEY_TILE; i += LANES) total = vf_add(total, vf_load(scores + i));
    float factor[LANES];
    vf_store(factor, vf_exp(vf_set1(*most - now)));
    *sum = *sum * factor[0] + vf_sum(total);
    *most = now;
    return factor[0];
}

#define QUERY_ROWS 192   // queries times heads that share a key head, at a time

static void attend(const struct attention *a, int64_t kv_head, const float *queries, int64_t count, int64_t position,
                   struct quants *out, int64_t row) {
    const struct shape *s = a->shape;
    const int64_t dim = s->head_dim, per_key = s->num_heads / s->num_kv_heads, window = a->layer->window;
    const int64_t at_once = MAX(1, QUERY_ROWS / per_key), size = a->block_size, block_floats = size * dim;
    float mixed[QUERY_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[QUERY_ROWS * KEY_TILE] __attribute__((aligned(64)));
    float most[QUERY_ROWS], sum[QUERY_ROWS];
    float keys[MAX_HEAD_DIM * KEY_TILE] __attribute__((aligned(64)));    // [dim][KEY_TILE]
    float values[KEY_TILE * MAX_HEAD_DIM] __attribute__((aligned(64)));  // [KEY_TILE][dim]
    const float *query_rows[QUERY_ROWS], *weight_rows[QUERY_ROWS];
    for (int64_t begin = 0; begin < count; begin += at_once) {
        int64_t num = MIN(at_once, count - begin), rows = num * per_key;
        int64_t first = position + begin, end = first + num;  // of the queries; and behind the last key they see
        for (int64_t r = 0; r < rows; r++) {
            query_rows[r] = queries + ((begin + r / per_key) * s->num_heads + kv_head * per_key + r % per_key) * dim;
            weight_rows[r] = scores + r * KEY_TILE;
            most[r] = LOWEST, sum[r] = 0.0f;
        }
        memset(mixed, 0, (size_t)(rows * dim) * sizeof(float));
        int64_t tile = window && first >= window ? (first - window + 1) / KEY_TILE * KEY_TILE : 0;
        for (; tile < end; tile += KEY_TILE) {
            int64_t there = MIN(KEY_TILE, end - tile), vecs = (there + LANES - 1) / LANES;
            for (int64_t v = 0; v < vecs; v++) {  // blocks are multiples of 16 keys
                int64_t at = tile + v * LANES;
                int64_t begin = (a->table[at / size] * s->num_kv_heads + kv_head) * block_floats;
                const uint16_t *from = a->layer->keys + begin + at % size;
                for (int64_t d = 0; d < dim; d++)
                    vf_store(keys + d * KEY_TILE + v * LANES, vf_load_half(from + d * size));
                from = a->layer->values + begin + at % size * dim;
                for (int64_t i = 0; i < MIN(LANES, there - v * LANES) * dim; i += LANES)
                    vf_store(values + v * LANES * dim + i, vf_load_half(from + i));
            }
            mix(query_rows, keys, KEY_TILE, dim, rows, vecs, scores, KEY_TILE, 0);
            for (int64_t r = 0; r < rows; r++) {
                int64_t seen = first + r / per_key + 1 - tile;
                int64_t high = MAX(0, MIN(seen, KEY_TILE)), low = window ? MAX(0, MIN(seen - window, high)) : 0;
                float factor = soften(scores + r * KEY_TILE, low, high, s->soft_cap, &most[r], &sum[r]);
                if (factor != 1.0f)
                    for (int64_t d = 0; d < dim; d += LANES)
                        vf_store(mixed + r * dim + d, vf_mul(vf_load(mixed + r * dim + d), vf_set1(factor)));
            }
            mix(weight_rows, values, dim, there, rows, dim / LANES, mixed, dim, 1);
        }
        for (int64_t r = 0; r < rows; r++) {
            vf inverse = vf_set1(1.0f / sum[r]);
            int64_t group = (kv_head * per_key + r % per_key) * dim / GROUP;
            for (int64_t d = 0; d < dim; d += GROUP, group++)
                quantize_group(vf_mul(vf_load(mixed + r * dim + d), inverse),
                               vf_mul(vf_load(mixed + r * dim + d + LANES), inverse), out, row + begin + r / per_key,
                               group);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- sampling

static void best(const float *logits, int64_t size, int64_t *id, float *logprob) {
    int64_t whole = size / LANES * LANES;
    vf top = vf_set1(-INFINITY), check = vf_set1(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = vf_load(logits + i);
        top = vf_max(top, v);
        check = vf_fma(v, vf_set1(0.0f), check);
    }
    float most = vf_hmax(top), bad = vf_sum(check);
    for (int64_t i = whole; i < size; i++) {
        most = MAX(most, logits[i]);
        bad += logits[i] * 0.0f;
    }
    vf sums = vf_set1(0.0f);
    for (int64_t i = 0; i < whole; i += LANES)
        sums = vf_add(sums, vf_exp(vf_sub(vf_load(logits + i), vf_set1(most))));
    float sum = vf_sum(sums);
    for (int64_t i = whole; i < size; i++) sum += expf(logits[i] - most);
    *id = 0;
    for (int64_t i = 0; i < size; i++)
        if (logits[i] == most) {
            *id = i;
            break;
        }
    *logprob = bad == 0.0f ? -logf(sum) : NAN;
}

#define NAME_(suffix) kernels_##suffix
#define NAME(suffix) NAME_(suffix)
const struct kernels NAME(SUFFIX) = {ISA_NAME, product, gated, head, norm, quantize, attend, best};
