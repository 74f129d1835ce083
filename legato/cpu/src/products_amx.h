// Products of 16 rows and 16 outputs at a time in the tile registers of AMX. A part of products.h.
#pragma once

enum {
    GROUPS_AT_ONCE = 8,  // whose sums fit into the first level cache, with all that they are made of
    FEWEST_ROWS = 30,    // fewer are better left to vectors, which need not unpack weights first
    FEWEST_LEFT = 13,    // behind tiles of 16
};

// Tile registers: [16 rows][32 inputs] int8; of two blocks [8][16 outputs][4 inputs] and [16 rows][16 outputs] int32.
#define INPUTS 0
#define WEIGHTS_0 1
#define WEIGHTS_1 2
#define SUMS_0 3
#define SUMS_1 4

// The registers are a thread's between these two: otherwise the kernel would save them whenever it is interrupted.
INLINE void begin_tiles(int64_t rows) {
    static const uint8_t shapes[64] = {1,  [16] = 32, [18] = 64, [20] = 64, [22] = 64, [24] = 64,  // bytes of a line
                                       [48] = 16, 8, 8, 16, 16};                                   // lines
    if (rows >= FEWEST_ROWS) _tile_loadconfig(shapes);
}
INLINE void end_tiles(int64_t rows) {
    if (rows >= FEWEST_ROWS) _tile_release();
}

// Codes of groups [g0, g1) of a block as signed bytes, in the order of FORM_8.
INLINE void unpack_groups(const int form, const struct block *block, int64_t g0, int64_t g1, uint8_t *out) {
    const vb sign = form == FORM_8 ? _mm512_set1_epi8(-128) : _mm512_setzero_si512();
    for (int64_t g = g0; g < g1; g++, out += 512)
        for (int i = 0; i < 4; i++) {
            vb first, second;
            weights_at(block->data + codes_at(form, g), form, i, &first, &second);
            _mm512_store_si512(out + 64 * i, _mm512_xor_si512(first, sign));
            _mm512_store_si512(out + 256 + 64 * i, _mm512_xor_si512(second, sign));
        }
}

// Sums [16 rows][16 outputs] of each part of groups [g0, g1), of one block or two.
INLINE void sum_parts(const struct quants *x, int64_t row, int64_t g0, int64_t g1, int64_t num_blocks,
                      uint8_t (*weights)[GROUPS_AT_ONCE * 512], int32_t (*sums)[2 * GROUPS_AT_ONCE][256]) {
    const int64_t width = x->at[x->groups] * GROUP;
    const int8_t *q = x->q + row * width;
    for (int64_t g = g0, i = 0; g < g1; g++)
        for (int64_t part = x->at[g]; part < x->at[g + 1]; part++, i++) {
            _tile_loadd(INPUTS, q + part * GROUP, width);
            _tile_loadd(WEIGHTS_0, weights[0] + (g - g0) * 512, 64);
            _tile_zero(SUMS_0);
            _tile_dpbssd(SUMS_0, INPUTS, WEIGHTS_0);
            if (num_blocks > 1) {
                _tile_loadd(WEIGHTS_1, weights[1] + (g - g0) * 512, 64);
                _tile_zero(SUMS_1);
                _tile_dpbssd(SUMS_1, INPUTS, WEIGHTS_1);
                _tile_stored(SUMS_1, sums[1][i], 64);
            }
            _tile_stored(SUMS_0, sums[0][i], 64);
        }
}

// Of groups with two parts one sum, where that of the second was.
INLINE void join_parts(const struct quants *x, int64_t g0, int64_t g1, int32_t (*sums)[256]) {
    for (int64_t g = g0; g < g1; g++) {
        int32_t *first = sums[x->at[g] - x->at[g0]], *second = first + 256;
        if (x->at[g + 1] - x->at[g] == 1) continue;
        for (int i = 0; i < 256; i += LANES) {
            vi high = _mm512_slli_epi32(_mm512_load_si512(first + i), 8);
            _mm512_store_si512(second + i, vi_add(high, _mm512_load_si512(second + i)));
        }
    }
}

// out[16 rows][16 outputs] = or, behind the first group, += groups [g0, g1) of a block, given their sums. The float
// operations are those of `tile`.
INLINE void add_groups(const int form, const struct block *block, const struct quants *x, int64_t row, int64_t g0,
                       int64_t g1, int32_t (*sums)[256], int64_t ahead, float *out, int64_t stride) {
    const float *scale = x->by_16 + (row / 16 * x->groups + g0) * 32, *shift = scale + 16;
    vf acc[16];
    for (int r = 0; r < 16; r++) acc[r] = g0 ? vf_load(out + r * stride) : vf_set1(0.0f);
    for (int64_t g = g0; g < g1; g++, scale += 32, shift += 32) {
        const int32_t *sum = sums[x->at[g + 1] - x->at[g0] - 1];
        vf by, least;
        const uint8_t *w = block->data + codes_at(form, g);
        factors_at(block, w, form, x->groups, g, &by, &least);
        for (int i = 0; i <= CODE_BYTES(form); i += 64) PREFETCH(w + ahead + i);
        for (int r = 0; r < 16; r++) {
            vf factor = vf_mul(by, vf_set1(scale[r]));
            acc[r] = vf_fma(vf_from_i(_mm512_load_si512(sum + 16 * r)), factor, acc[r]);
            if (HAS_MINIMA(form)) acc[r] = vf_fma(least, vf_set1(shift[r]), acc[r]);
        }
    }
    for (int r = 0; r < 16; r++) vf_store(out + r * stride, acc[r]);
}

// Products of one block or two with as many of `count` rows as are better done here; the last ones as if there were 16,
// for which out has room. Returns how many that are. First the sums of some groups, then their floats: while there are
// instructions for tiles in flight those for vectors of 64 bytes have one port instead of two.
static int64_t sixteens(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                        int64_t count, float *out, int64_t stride) {
    uint8_t weights[2][GROUPS_AT_ONCE * 512] __attribute__((aligned(64)));
    int32_t sums[2][2 * GROUPS_AT_ONCE][256] __attribute__((aligned(64)));
    const int64_t groups = x->groups, tiles = count < FEWEST_ROWS ? 0 : (count + 16 - FEWEST_LEFT) / 16;
    for (int64_t b = 0; b < num_blocks; b++)
        if (blocks[b].form == FORM_K6) return 0;  // its halves have scales of their own
    for (int64_t g = 0; tiles && g < groups; g += GROUPS_AT_ONCE) {
        const int64_t end = MIN(g + GROUPS_AT_ONCE, groups);
        for (int64_t b = 0; b < num_blocks; b++)
            FOR_FORM(blocks[b].form, unpack_groups, &blocks[b], g, end, weights[b]);
        __asm__ volatile("" ::: "memory");  // not every compiler knows that tiles are loaded from memory
        for (int64_t m = 0; m < 16 * tiles; m += 16) {
            sum_parts(x, row + m, g, end, num_blocks, weights, sums);
            for (int64_t b = 0; b < num_blocks; b++) {
                // The first rows bring in the weights of the next blocks.
                const int64_t ahead = m ? 0 : num_blocks * block_bytes(blocks[b].form, groups);
                float *to = out + m * stride + b * LANES;
                join_parts(x, g, end, sums[b]);
                FOR_FORM(blocks[b].form, add_groups, &blocks[b], x, row + m, g, end, sums[b], ahead, to, stride);
            }
        }
    }
    return MIN(count, tiles * 16);
}
