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
    float buffer[ROWS_AT_ONCE * MAX_HEAD_DIM] __attribute__((aligned(64)));
    const int64_t dim = s->head_dim, num_blocks = dim / BLOCK_ROWS, kv_heads = s->num_kv_heads;
    const int is_query = head < s->num_heads, is_key = !is_query && head < s->num_heads + kv_heads;
    const int64_t kv_head = is_query ? 0 : (head - s->num_heads) % kv_heads;
    const float *weight = is_query ? l->q_norm : is_key ? l->k_norm : 0;
    const float *bias = l->qkv->bias ? l->qkv->bias + head * dim : 0;
    begin_tiles(m1 - m0);
    for (int64_t m = m0; m < m1; m += ROWS_AT_ONCE) {
        int64_t count = MIN(ROWS_AT_ONCE, m1 - m);
        for (int64_t b = 0; b < num_blocks; b += 2)
            pair_rows(&l->qkv->blocks[head * num_blocks + b], 2, x, m, count, buffer + b * LANES, dim);
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
            const int64_t slot = t->slots[m + r], block = (slot / LANES * kv_heads + kv_head) * dim * LANES;
            if (!is_key) {
                uint16_t *to = l->values + block + slot % LANES * dim;
                for (int64_t i = 0; i < dim; i += LANES) vf_store_half(to + i, vf_load(row + i));
                continue;
            }
            uint16_t halves[MAX_HEAD_DIM], *to = l->keys + block + slot % LANES;
            for (int64_t i = 0; i < dim; i += LANES) vf_store_half(halves + i, vf_load(row + i));
            for (int64_t i = 0; i < dim; i++) to[i * LANES] = halves[i];
        }
    }
    end_tiles(m1 - m0);
}

// Where vectors come from: row i of vector v is at from[v] + i * step, as floats or as half floats. Half floats are in
// the KV cache, and those that come next `ahead` of them: asked for early.
struct lines {
    const void *from[MIX_VECS];
    int64_t step, ahead[MIX_VECS];
};

// c[r][16 v ..] += or = sum over i of a[r][at + i] * line i of v, for R rows and V vectors.
INLINE void mix_tile(const float *const *a, int64_t at, struct lines b, const int halves, int64_t depth, const int R,
                     const int V, float *c, int64_t stride, const int add) {
    vf acc[MIX_ROWS][MIX_VECS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = add ? vf_load(c + r * stride + v * LANES) : vf_set1(0.0f);
    for (int64_t i = 0; i < depth; i++) {
        vf line[MIX_VECS];
        for (int v = 0; v < V; v++) {
            line[v] = halves ? vf_load_half((const uint16_t *)b.from[v] + i * b.step)
                             : vf_load((const float *)b.from[v] + i * b.step);
            if (halves) PREFETCH((const uint16_t *)b.from[v] + i * b.step + b.ahead[v]);
        }
        for (int r = 0; r < R; r++) {
            vf factor = vf_set1(a[r][at + i]);
            for (int v = 0; v < V; v++) acc[r][v] = vf_fma(factor, line[v], acc[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vf_store(c + r * stride + v * LANES, acc[r][v]);
}

INLINE void mix(const float *const *a, int64_t at, struct lines b, const int halves, int64_t depth, int64_t rows,
                int64_t vecs, float *c, int64_t stride, const int add) {
    for (int64_t r = 0; r < rows; r += MIX_ROWS) {
        float *to = c + r * stride;
#define LINE(v) ((struct lines){{b.from[v]}, b.step, {b.ahead[v]}})
#define MIX(R)                                                                                          \
    if (vecs == MIX_VECS) mix_tile(a + r, at, b, halves, depth, R, MIX_VECS, to, stride, add);          \
    else for (int64_t v = 0; v < vecs; v++)                                                             \
        mix_tile(a + r, at, LINE(v), halves, depth, R, 1, to + v * LANES, stride, add)
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
#undef LINE
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
    vf weights[KEY_TILE / LANES], total = vf_set1(0.0f);
    for (int i = 0; i < KEY_TILE / LANES; i++) weights[i] = vf_load(scores + i * LANES);
    vf top = weights[0];
    for (int i = 1; i < KEY_TILE / LANES; i++) top = vf_max(top, weights[i]);
    float now = MAX(*most, vf_hmax(top));
    for (int i = 0; i < KEY_TILE / LANES; i++) {
        weights[i] = vf_exp(vf_sub(weights[i], vf_set1(now)));
        vf_store(scores + i * LANES, weights[i]);
    }
    if (low > 0 || high < KEY_TILE) {
        for (int64_t i = 0; i < low; i++) scores[i] = 0.0f;
        for (int64_t i = high; i < KEY_TILE; i++) scores[i] = 0.0f;
        for (int i = 0; i < KEY_TILE / LANES; i++) weights[i] = vf_load(scores + i * LANES);
    }
    for (int i = 0; i < KEY_TILE / LANES; i++) total = vf_add(total, weights[i]);
    float factor[LANES] = {1.0f};
    if (now != *most) vf_store(factor, vf_exp(vf_set1(*most - now)));
    *sum = *sum * factor[0] + vf_sum(total);
    *most = now;
    return factor[0];
}

#define QUERY_ROWS 192   // queries times heads that share a key head, at a time
#define TILE_VECS (KEY_TILE / LANES)

// The keys and values of a tile: where those of every 16 slots are, and copies as floats if many rows read them.
struct tile {
    int64_t count;          // keys that are there
    int64_t seen, per_key;  // of which the first query sees this many, and each query one more; rows of a query
    const uint16_t *key_blocks[TILE_VECS], *value_blocks[TILE_VECS];
    int64_t ahead[TILE_VECS];  // from there to the blocks that are read next, of keys and of values
    float keys[MAX_HEAD_DIM * KEY_TILE] __attribute__((aligned(64)));    // [dim][KEY_TILE]
    float values[KEY_TILE * MAX_HEAD_DIM] __attribute__((aligned(64)));  // [KEY_TILE][dim]
};

// Where key `at` of a sequence is, if it is the first of 16 slots.
INLINE int64_t block_of(const struct attention *a, int64_t kv_head, int64_t at) {
    const int64_t slot = a->table[at / a->block_size] * a->block_size + at % a->block_size;
    return (slot / LANES * a->shape->num_kv_heads + kv_head) * a->shape->head_dim * LANES;
}

static void find_tile(const struct attention *a, int64_t kv_head, int64_t first, int64_t end, int copied,
                      struct tile *t) {
    const int64_t dim = a->shape->head_dim;
    t->count = MIN(KEY_TILE, end - first);
    for (int64_t v = 0; v * LANES < t->count; v++) {  // blocks are multiples of 16 keys
        const int64_t at = first + v * LANES, block = block_of(a, kv_head, at);
        // Behind the last tile comes another head's first.
        const int64_t is_last = at + KEY_TILE >= end, next = is_last ? v * LANES : at + KEY_TILE;
        t->key_blocks[v] = a->layer->keys + block, t->value_blocks[v] = a->layer->values + block;
        t->ahead[v] = block_of(a, kv_head + is_last, next) - block;
        if (!copied) continue;
        for (int64_t d = 0; d < dim; d++)
            vf_store(t->keys + d * KEY_TILE + v * LANES, vf_load_half(t->key_blocks[v] + d * LANES));
        for (int64_t i = 0; i < MIN(LANES, t->count - v * LANES); i++)
            for (int64_t d = 0; d < dim; d += LANES)
                vf_store(t->values + (v * LANES + i) * dim + d, vf_load_half(t->value_blocks[v] + i * dim + d));
    }
}

// Keys that rows up to this one see. What is left out for others adds nothing: sums stay the same.
INLINE int64_t seen_by(const struct tile *t, int64_t row) {
    return MAX(0, MIN(t->count, t->seen + row / t->per_key));
}

static void score_rows(const struct tile *t, int64_t dim, const float *const *queries, int64_t rows, int copied,
                       int64_t count, float *scores) {
    int64_t vecs = CEIL(count, LANES);
    if (vecs % MIX_VECS > MIX_VECS / 2) vecs = CEIL(t->count, LANES);  // one by one they would take as long
    for (int64_t v = 0; v < vecs; v += MIX_VECS) {
        struct lines keys = {{0}, copied ? KEY_TILE : LANES, {0}};
        for (int i = 0; i < MIX_VECS && v + i < vecs; i++) {
            keys.from[i] = copied ? (const void *)(t->keys + (v + i) * LANES) : t->key_blocks[v + i];
            keys.ahead[i] = t->ahead[v + i];
        }
        const int64_t now = MIN(MIX_VECS, vecs - v);
        if (copied) mix(queries, 0, keys, 0, dim, rows, now, scores + v * LANES, KEY_TILE, 0);
        else mix(queries, 0, keys, 1, dim, rows, now, scores + v * LANES, KEY_TILE, 0);
    }
}

static void gather_rows(const struct tile *t, int64_t dim, const float *const *weights, int64_t rows, int copied,
                        int64_t count, float *mixed) {
    for (int64_t d = 0; d < dim; d += MIX_VECS * LANES) {
        const int64_t now = MIN(MIX_VECS, (dim - d) / LANES);
        struct lines values = {{0}, dim, {0}};
        for (int64_t at = 0; at < count; at += copied ? KEY_TILE : LANES) {
            for (int i = 0; i < now; i++) {
                values.from[i] = copied ? (const void *)(t->values + d + i * LANES)
                                        : t->value_blocks[at / LANES] + d + i * LANES;
                values.ahead[i] = t->ahead[at / LANES];
            }
            if (copied) mix(weights, 0, values, 0, count, rows, now, mixed + d, dim, 1);
            else mix(weights, at, values, 1, MIN(LANES, count - at), rows, now, mixed + d, dim, 1);
        }
    }
}

// Scores [rows][KEY_TILE] of the keys of a tile, or [rows][dim] += weights [rows][KEY_TILE] times its values, one key
// after the other. Rows that do not see the tile as a whole are taken a few at a time, with the keys that these see.
INLINE void by_rows(void (*work)(const struct tile *, int64_t, const float *const *, int64_t, int, int64_t, float *),
                    const struct tile *t, int64_t dim, const float *const *a, int64_t rows, int copied, float *out,
                    int64_t width) {
    const int64_t each = t->seen < t->count ? MIX_ROWS : rows;
    for (int64_t r = 0; r < rows; r += each) {
        const int64_t now = MIN(each, rows - r);
        work(t, dim, a + r, now, copied, seen_by(t, r + now - 1), out + r * width);
    }
}

static void attend(const struct attention *a, int64_t kv_head, const float *queries, int64_t count, int64_t position,
                   struct quants *out, int64_t row) {
    const struct shape *s = a->shape;
    const int64_t dim = s->head_dim, per_key = s->num_heads / s->num_kv_heads, window = a->layer->window;
    const int64_t at_once = MAX(1, QUERY_ROWS / per_key);
    float mixed[QUERY_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[QUERY_ROWS * KEY_TILE] __attribute__((aligned(64)));
    float most[QUERY_ROWS], sum[QUERY_ROWS];
    const float *query_rows[QUERY_ROWS], *weight_rows[QUERY_ROWS];
    struct tile t;
    for (int64_t begin = 0; begin < count; begin += at_once) {
        int64_t num = MIN(at_once, count - begin), rows = num * per_key;
        int64_t first = position + begin, end = first + num;  // of the queries; and behind the last key they see
        for (int64_t r = 0; r < rows; r++) {
            query_rows[r] = queries + ((begin + r / per_key) * s->num_heads + kv_head * per_key + r % per_key) * dim;
            weight_rows[r] = scores + r * KEY_TILE;
            most[r] = LOWEST, sum[r] = 0.0f;
        }
        memset(mixed, 0, (size_t)(rows * dim) * sizeof(float));
        const int copied = rows > 2 * MIX_ROWS;
        int64_t at = window && first >= window ? (first - window + 1) / KEY_TILE * KEY_TILE : 0;
        for (; at < end; at += KEY_TILE) {
            find_tile(a, kv_head, at, end, copied, &t);
            t.seen = first + 1 - at, t.per_key = per_key;
            by_rows(score_rows, &t, dim, query_rows, rows, copied, scores, KEY_TILE);
            for (int64_t r = 0; r < rows; r++) {
                int64_t seen = first + r / per_key + 1 - at;
                int64_t high = MAX(0, MIN(seen, KEY_TILE)), low = window ? MAX(0, MIN(seen - window, high)) : 0;
                float factor = soften(scores + r * KEY_TILE, low, high, s->soft_cap, &most[r], &sum[r]);
                if (factor != 1.0f)
                    for (int64_t d = 0; d < dim; d += LANES)
                        vf_store(mixed + r * dim + d, vf_mul(vf_load(mixed + r * dim + d), vf_set1(factor)));
            }
            by_rows(gather_rows, &t, dim, weight_rows, rows, copied, mixed, dim);
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
