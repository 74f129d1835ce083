// A step: all layers of a Llama-like decoder on the threads of the pool, and what comes behind them.
#include <stdlib.h>
#include <string.h>

#include "legato.h"

#ifndef __linux__
#undef HAS_AMX  // other systems are asked for it in other ways
#endif
#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(HAS_NEON) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

static const struct kernels *kernels;

#ifdef HAS_AVX512
static int has_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef HAS_AMX
// Whether the processor has tiles of AMX, and the kernel saves them and lets this process use them: asked for once.
static int amx_permitted(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int permitted = -1;
    if (permitted >= 0) return permitted;
    uint32_t a = 7, b, c = 0, d, saved, high;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    permitted = 0;
    if (!has_avx512() || (d >> 24 & 3) != 3) return 0;  // tiles, and products of bytes in them
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    permitted = (saved >> 17 & 3) == 3 && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    return permitted;
}
#endif

// The best instruction set of this processor, or the one of this name, if it has it. Returns its name, or null.
EXPORT const char *legato_choose(const char *name) {
    const struct kernels *found[5];
    int count = 0;
#ifdef HAS_AMX
    if (amx_permitted()) found[count++] = &kernels_amx;
#endif
#ifdef HAS_AVX512
    if (has_avx512()) found[count++] = &kernels_avx512;
#endif
#ifdef HAS_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#ifdef HAS_AVXVNNI
        uint32_t a = 7, b, c = 1, d;  // leaf 7.1, which not every compiler has a name for
        __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        if (a >> 4 & 1) found[count++] = &kernels_avxvnni;
#endif
        found[count++] = &kernels_avx2;
    }
#endif
#ifdef HAS_NEON
#ifdef __linux__
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)  // others that it is compiled for always have it
#endif
        found[count++] = &kernels_neon;
#endif
    found[count++] = &kernels_plain;
    for (int i = 0; i < count; i++)
        if (!name || !strcmp(name, found[i]->name)) {
            kernels = found[i];
            return kernels->name;
        }
    return 0;
}

const struct kernels *chosen_kernels(void) {
    if (!kernels) legato_choose(0);
    return kernels;
}

// ------------------------------------------------------------------------------------------------ memory of a step

// Grows with the largest step and stays: a step of usual size allocates nothing.
struct buffer {
    void *data;
    size_t size;
};

static void *at_least(struct buffer *b, size_t size) {
    if (b->size < size || !b->data) {
        free(b->data);
        b->data = 0, b->size = 0;
        size = CEIL(size + size / 4 + 1, 64) * 64;  // of no rows at all, too: only without memory there is no address
        b->data = aligned_alloc(64, size);
        b->size = b->data ? size : 0;
        if (b->data) memset(b->data, 0, size);  // rows that nobody has written are computed, too, and not slowly
    }
    return b->data;
}

struct quants_buffer {
    struct buffer q, scale, shift, base, by_16;
};

// Room for `rows` rows of inputs of w, all of whose groups may be rounded twice; the last of 16 rows are there, too.
static int quants_for(struct quants_buffer *b, struct quants *x, int64_t rows, const struct matrix *w) {
    size_t count = (size_t)(CEIL(rows, 16) * 16 * w->groups);
    x->groups = w->groups, x->at = w->at;
    x->q = at_least(&b->q, 2 * count * GROUP);
    x->scale = at_least(&b->scale, count * sizeof(float));
    x->base = at_least(&b->base, 2 * count * sizeof(int32_t));
    x->shift = at_least(&b->shift, count * sizeof(float));
    x->by_16 = at_least(&b->by_16, 2 * count * sizeof(float));
    return x->q && x->scale && x->shift && x->base && x->by_16;
}

// ---------------------------------------------------------------------------------------------------------- pieces

#define PIECES_PER_THREAD 12

// Work on `units` by `rows`, cut into pieces: some units of some rows each.
struct plan {
    int64_t units, rows, units_each, rows_each, unit_pieces;
};

static struct plan planned(int64_t units, int64_t rows) {
    struct plan p = {units, rows, 1, MAX(1, rows), 0};  // no rows are no pieces
    const int64_t most = kernels->most_rows, tile = kernels->tile_rows;
    if (rows > most) p.rows_each = CEIL(CEIL(rows, CEIL(rows, most)), tile) * tile;
    int64_t wanted = pool_threads() == 1 ? 1 : PIECES_PER_THREAD * pool_threads();
    int64_t row_pieces = CEIL(rows, p.rows_each);
    p.units_each = MAX(1, MIN(units * row_pieces / wanted, row_pieces > 1 ? 16 : units));
    p.unit_pieces = CEIL(units, p.units_each);
    return p;
}

static int64_t num_pieces(const struct plan *p) { return p->unit_pieces * CEIL(p->rows, p->rows_each); }

struct span {
    int64_t u0, u1, m0, m1;
};

static struct span span_of(const struct plan *p, int64_t piece) {
    int64_t u = piece % p->unit_pieces * p->units_each, m = piece / p->unit_pieces * p->rows_each;
    return (struct span){u, MIN(u + p->units_each, p->units), m, MIN(m + p->rows_each, p->rows)};
}

struct product_work {
    struct plan plan;
    const struct matrix *w;
    const struct quants *x;
    float *out;
    int64_t stride;
    int add;
};

static void product_piece(void *context, int64_t piece) {
    const struct product_work *j = context;
    struct span s = span_of(&j->plan, piece);
    kernels->product(j->w, j->x, s.u0, s.u1, s.m0, s.m1, j->out, j->stride, j->add);
}

static void run_product(const struct matrix *w, const struct quants *x, int64_t rows, float *out, int64_t stride,
                        int add) {
    struct product_work j = {planned(w->num_blocks, rows), w, x, out, stride, add};
    pool_run(product_piece, &j, num_pieces(&j.plan));
}

struct norm_work {
    struct plan plan;
    const float *x, *weight;
    float eps;
    int64_t size;
    struct quants *out;
};

static void norm_piece(void *context, int64_t piece) {
    const struct norm_work *j = context;
    struct span s = span_of(&j->plan, piece);
    if (j->weight) kernels->norm(j->x, j->weight, j->eps, s.u0, s.u1, j->size, j->out);
    else kernels->quantize(j->x, s.u0, s.u1, j->size, j->out);
}

// Rows of x normed (if there is a weight) and quantized. A few rows are not worth waking anybody.
static void run_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t size, struct quants *out) {
    struct norm_work j = {planned(rows, 1), x, weight, eps, size, out};
    if (rows <= 2) j.plan.units_each = rows, j.plan.unit_pieces = 1;
    pool_run(norm_piece, &j, num_pieces(&j.plan));
}

struct layer_work {
    struct plan plan;
    const struct shape *shape;
    const struct layer *layer;
    const struct step *step;
    const struct quants *x;
    float *queries;
    struct quants *out;
    const struct attention_piece *pieces;
};

static void head_piece(void *context, int64_t piece) {
    const struct layer_work *j = context;
    struct span s = span_of(&j->plan, piece);
    for (int64_t h = s.u0; h < s.u1; h++)
        kernels->head(j->shape, j->layer, j->x, h, s.m0, s.m1, j->step, j->queries);
}

static void gated_piece(void *context, int64_t piece) {
    const struct layer_work *j = context;
    struct span s = span_of(&j->plan, piece);
    kernels->gated(j->layer->gate_up, j->x, s.u0, s.u1, s.m0, s.m1, j->shape->activation, j->out);
}

#define QUERIES_OF_A_PIECE 64

struct attention_piece {
    int32_t sequence, kv_head;
    int64_t token, count, row;  // first query in the step, how many, and the first row of the result
};

static void attention_piece(void *context, int64_t piece) {
    const struct layer_work *j = context;
    const struct attention_piece *p = &j->pieces[piece];
    struct attention a = {j->shape, j->layer, j->step->tables + p->sequence * j->step->table_stride,
                          j->step->block_size};
    kernels->attend(&a, p->kv_head, j->queries + p->token * j->shape->num_heads * j->shape->head_dim, p->count,
                    j->step->positions[p->token], j->out, p->row);
}

static struct {
    struct buffer queries, pieces, last_pieces;
    struct quants_buffer hidden, attended, inner;
} memory;

// All queries of a step, or only those of wanted tokens. Returns how many pieces there are, -1 without memory, or -2 if
// wanted tokens are not in order.
static int64_t plan_attention(const struct step *t, int64_t kv_heads, int wanted_only, struct buffer *buffer) {
    int64_t most = kv_heads * (t->num_sequences + t->num_wanted + CEIL(t->num_tokens, QUERIES_OF_A_PIECE));
    struct attention_piece *p = at_least(buffer, (size_t)most * sizeof *p);
    if (!p) return -1;
    int64_t count = 0, token = 0, next = 0;
    for (int64_t s = 0; s < t->num_sequences; token += t->counts[s++])
        if (wanted_only)
            for (; next < t->num_wanted && t->wanted[next] >= token && t->wanted[next] < token + t->counts[s]; next++)
                for (int64_t h = 0; h < kv_heads; h++)
                    p[count++] = (struct attention_piece){(int32_t)s, (int32_t)h, t->wanted[next], 1, next};
        else
            // The last queries, which see the most keys, come first: threads end at about the same time.
            for (int64_t begin = CEIL(t->counts[s], QUERIES_OF_A_PIECE) * QUERIES_OF_A_PIECE;
                 (begin -= QUERIES_OF_A_PIECE) >= 0;)
                for (int64_t h = 0; h < kv_heads; h++)
                    p[count++] = (struct attention_piece){(int32_t)s, (int32_t)h, token + begin,
                                                          MIN(QUERIES_OF_A_PIECE, t->counts[s] - begin), token + begin};
    return wanted_only && (next < t->num_wanted || count != kv_heads * t->num_wanted) ? -2 : count;
}

static int calibrating;

// Which groups of inputs are rounded twice from now on: the eighth in which rounding is coarsest, given some rows that
// were rounded once. In most models a few dimensions are far larger than all others, and always the same.
static void calibrate(struct matrix *w, const struct quants *x, int64_t rows) {
    enum { ONE_OF = 8 };
    double *errors = calloc((size_t)w->groups, sizeof *errors);
    if (!calibrating || !errors) return free(errors);
    for (int64_t r = 0; r < rows; r++) {
        const float *scale = x->scale + r * w->groups;
        double sum = 1e-30;
        for (int64_t g = 0; g < w->groups; g++) sum += (double)scale[g] * scale[g];
        for (int64_t g = 0; g < w->groups; g++) errors[g] += (double)scale[g] * scale[g] / sum;
    }
    for (int64_t left = CEIL(w->groups, ONE_OF); left; left--) {
        int64_t worst = 0;
        for (int64_t g = 1; g < w->groups; g++)
            if (errors[g] > errors[worst]) worst = g;
        errors[worst] = -1.0;
    }
    for (int64_t g = 0; g < w->groups; g++) w->at[g + 1] = w->at[g] + (errors[g] < 0.0 ? 2 : 1);
    free(errors);
}

// x [T][hidden] are embeddings, and are overwritten; out [m][hidden] the hidden states of the wanted tokens, before
// the last norm. `wanted` is in ascending order; without it all tokens are. Returns 0, -1 without memory, or -2 if
// `wanted` is not in order.
EXPORT int legato_forward(const struct shape *s, const struct layer *layers, const struct step *t, float *x,
                          float *out) {
    chosen_kernels();
    const int64_t hidden = s->hidden, all = t->num_tokens, width = s->num_heads * s->head_dim;
    struct quants normed, attended, inner;
    float *queries = at_least(&memory.queries, (size_t)(all * width) * sizeof(float));
    int64_t pieces = plan_attention(t, s->num_kv_heads, 0, &memory.pieces);
    const int is_partial = t->wanted || t->num_wanted < all;  // of no wanted tokens there may be no address
    int64_t last_pieces = is_partial ? plan_attention(t, s->num_kv_heads, 1, &memory.last_pieces) : 0;
    if (last_pieces == -2) return -2;
    if (!queries || pieces < 0 || last_pieces < 0 || !quants_for(&memory.hidden, &normed, all, layers->qkv) ||
        !quants_for(&memory.attended, &attended, all, layers->output) ||
        !quants_for(&memory.inner, &inner, all, layers->down))
        return -1;
    for (int64_t i = 0; i < s->num_layers; i++) {
        const struct layer *l = &layers[i];
        const int is_last = i == s->num_layers - 1, wants = is_last && is_partial;
        normed.at = l->qkv->at, attended.at = l->output->at, inner.at = l->down->at;
        run_norm(x, l->norm, s->eps, all, hidden, &normed);
        struct layer_work j = {planned(s->num_heads + 2 * s->num_kv_heads, all), s, l, t, &normed, queries, 0, 0};
        pool_run(head_piece, &j, num_pieces(&j.plan));
        calibrate(l->qkv, &normed, all);
        // After the attention of the last layer only wanted tokens matter.
        int64_t rows = wants ? t->num_wanted : all;
        j.out = &attended;
        j.pieces = wants ? memory.last_pieces.data : memory.pieces.data;
        pool_run(attention_piece, &j, wants ? last_pieces : pieces);
        if (is_last) {
            for (int64_t r = 0; r < rows; r++)
                memcpy(out + r * hidden, x + (wants ? t->wanted[r] : r) * hidden, (size_t)hidden * sizeof(float));
            x = out;
        }
        run_product(l->output, &attended, rows, x, hidden, 1);
        calibrate(l->output, &attended, rows);
        normed.at = l->gate_up->at;
        run_norm(x, l->mlp_norm, s->eps, rows, hidden, &normed);
        j.plan = planned(s->inner / GROUP, rows), j.out = &inner;
        pool_run(gated_piece, &j, num_pieces(&j.plan));
        calibrate(l->gate_up, &normed, rows);
        run_product(l->down, &inner, rows, x, hidden, 1);
        calibrate(l->down, &inner, rows);
    }
    return 0;
}

// A forward of some tokens that decides which inputs of the layers' matrices are rounded twice. Only once, before all
// others.
EXPORT int legato_calibrate(const struct shape *s, const struct layer *layers, const struct step *t, float *x,
                            float *out) {
    calibrating = 1;
    int result = legato_forward(s, layers, t, x, out);
    calibrating = 0;
    return result;
}

// out [rows][w.rows] = x [rows][in_features], normed first if there is a norm, times w. With `twice` all of x is
// rounded twice, else once. Returns 0, or -1 without memory.
EXPORT int legato_apply(const struct matrix *w, const float *x, int64_t rows, int64_t in_features, const float *norm,
                        float eps, int twice, float *out) {
    static struct quants_buffer buffer;
    static struct buffer places;
    struct quants quants;
    int32_t *at = at_least(&places, (size_t)(w->groups + 1) * sizeof(int32_t));
    chosen_kernels();
    if (!at || !quants_for(&buffer, &quants, rows, w)) return -1;
    for (int64_t g = 0; g <= w->groups; g++) at[g] = (int32_t)(twice ? 2 * g : g);
    quants.at = at;
    run_norm(x, norm, eps, rows, in_features, &quants);
    run_product(w, &quants, rows, out, w->rows, 0);
    return 0;
}

struct best_work {
    const float *logits;
    int64_t size, *ids;
    float *logprobs;
};

static void best_piece(void *context, int64_t row) {
    const struct best_work *j = context;
    kernels->best(j->logits + row * j->size, j->size, &j->ids[row], &j->logprobs[row]);
}

// Of each row of logits the likeliest token and its log probability.
EXPORT void legato_best(const float *logits, int64_t rows, int64_t size, int64_t *ids, float *logprobs) {
    chosen_kernels();
    struct best_work j = {logits, size, ids, logprobs};
    pool_run(best_piece, &j, rows);
}

// What this was built from: a library that is older than the package is not used.
EXPORT const char *legato_sources(void) { return SOURCES_DIGEST; }

// So that Python can check that it has the same idea of the structures.
EXPORT void legato_sizes(int64_t sizes[3]) {
    sizes[0] = sizeof(struct shape), sizes[1] = sizeof(struct layer), sizes[2] = sizeof(struct step);
}
