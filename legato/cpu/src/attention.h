// Heads of q, k and v, and attention over paged keys and values. A part of kernels.c.
#pragma once
#include "products.h"

#define LOWEST -1.0e30f

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
            uint16_t *to = (is_key ? l->keys : l->values) + (t->slots[m + r] * kv_heads + kv_head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) vf_store_half(to + i, vf_load(row + i));
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
    const int64_t at_once = MAX(1, QUERY_ROWS / per_key), size = a->block_size, slot_size = s->num_kv_heads * dim;
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
                int64_t at = tile + v * LANES, slot = a->table[at / size] * size + at % size;
                const uint16_t *key = a->layer->keys + (slot * s->num_kv_heads + kv_head) * dim;
                const uint16_t *value = a->layer->values + (slot * s->num_kv_heads + kv_head) * dim;
                for (int64_t d = 0; d < dim; d += LANES) {
                    vf lines[LANES];
                    for (int i = 0; i < LANES; i++) lines[i] = vf_load_half(key + i * slot_size + d);
                    turn(lines, keys + d * KEY_TILE + v * LANES, KEY_TILE);
                }
                for (int64_t i = 0; i < MIN(LANES, there - v * LANES); i++)
                    for (int64_t d = 0; d < dim; d += LANES)
                        vf_store(values + (v * LANES + i) * dim + d, vf_load_half(value + i * slot_size + d));
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
