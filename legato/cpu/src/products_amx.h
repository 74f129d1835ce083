// Products of 16 rows and 16 outputs at a time in the tile registers of AMX. A part of products.h.
#pragma once

enum {
    GROUPS_AT_ONCE = 8,  // whose sums are in the first level cache
    FEWEST_ROWS = 6,     // that are not better left to vectors
};

// Tile registers.
#define SUMS 0     // [16 rows][16 outputs] int32
#define INPUTS 1   // [16 rows][32 inputs] int8
#define MORE_WEIGHTS 3
#define MORE_SUMS 4
#define WEIGHTS 2  // [8][16 outputs][4 inputs] int8

// The registers belong to a thread between these two: state that the kernel would save whenever it is interrupted.
INLINE void begin_tiles(int64_t rows) {
    static const uint8_t shapes[64] = {1, [16] = 64, [18] = 32, [20] = 64, [22]=64, [24]=64, [48] = 16, [49] = 16, [50] = 8, 8, 16};
    if (rows >= FEWEST_ROWS) _tile_loadconfig(shapes);
}
INLINE void end_tiles(int64_t rows) {
    if (rows >= FEWEST_ROWS) _tile_release();
}

// Codes of some groups of a block as signed bytes, in the order of FORM_8.
static __attribute__((noinline)) void unpack_groups(const uint8_t *w, int form, int64_t count, uint8_t *out) {
    for (int64_t g = 0; g < count; g++, out += 512)
        if (form == FORM_4) {
            for (int i = 0; i < 4; i++) {
                vb codes = vb_load(w + 64 * i);
                _mm512_store_si512(out + 64 * i, vb_low(codes));
                _mm512_store_si512(out + 256 + 64 * i, vb_high(codes));
            }
            w += GROUP_BYTES_4;
        } else {
            for (int i = 0; i < 8; i++) {
                _mm512_store_si512(out + 64 * i, _mm512_xor_si512(vb_load(w + 64 * i), _mm512_set1_epi8(-128)));
            }
            w += 512;
        }
}

// Integer sums [16 rows][16 outputs] of each part of groups [g0, g1) and each block.
static __attribute__((noinline)) void sum_parts(const struct quants *x, int64_t row, int64_t g0, int64_t g1, int64_t num_blocks,
                      uint8_t (*weights)[GROUPS_AT_ONCE * 512], int32_t (*sums)[2 * GROUPS_AT_ONCE][256]) {
    const int64_t width = x->at[x->groups] * GROUP;
    const int8_t *q = x->q + row * width;
    for (int64_t g = g0, slot = 0; g < g1; g++)
        for (int64_t part = x->at[g]; part < x->at[g + 1]; part++, slot++) {
            _tile_loadd(INPUTS, q + part * GROUP, width);
            _tile_loadd(WEIGHTS, weights[0] + (g - g0) * 512, 64);
            _tile_zero(SUMS);
            _tile_dpbssd(SUMS, INPUTS, WEIGHTS);
            if (num_blocks > 1) {
                _tile_loadd(MORE_WEIGHTS, weights[1] + (g - g0) * 512, 64);
                _tile_zero(MORE_SUMS);
                _tile_dpbssd(MORE_SUMS, INPUTS, MORE_WEIGHTS);
                _tile_stored(MORE_SUMS, sums[1][slot], 64);
            }
            _tile_stored(SUMS, sums[0][slot], 64);
        }
}

// The sums of groups with two parts where those of the second were.
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

// Adds groups [g0, g1) of a block, given their sums, with the float operations of tile_4 and tile_8.
INLINE void add_groups(const struct block *block, const int form, const struct quants *x, int64_t row, int64_t g0,
                       int64_t g1, int32_t (*sums)[256], int64_t ahead, float *out, int64_t stride) {
    const float *scale = x->by_16 + (row / 16 * x->groups + g0) * 32;
    const uint16_t *by_at = (const uint16_t *)(block->data + (form == FORM_4 ? 256 : x->groups * 512));
    const int64_t size = form == FORM_4 ? GROUP_BYTES_4 : 512;
    vf acc[16];
    for (int r = 0; r < 16; r++) acc[r] = g0 ? vf_load(out + r * stride) : vf_set1(0.0f);
    for (int64_t g = g0; g < g1; g++, scale += 32) {
        const uint16_t *at = by_at + g * (form == FORM_4 ? GROUP_BYTES_4 / 2 : LANES);
        const vf by = vf_load_half(at), least = form == FORM_4 ? vf_load_half(at + LANES) : by;
        for (int i = 0; i < size; i += 64) PREFETCH(block->data + g * size + ahead + i);
        const int32_t *sum = sums[x->at[g + 1] - x->at[g0] - 1];
        for (int r = 0; r < 16; r++) {
            vf factor = vf_mul(by, vf_set1(scale[r]));
            acc[r] = vf_fma(vf_from_i(_mm512_load_si512(sum + 16 * r)), factor, acc[r]);
            if (form == FORM_4) acc[r] = vf_fma(least, vf_set1(scale[16 + r]), acc[r]);
        }
    }
    for (int r = 0; r < 16; r++) vf_store(out + r * stride, acc[r]);
}

static __attribute__((noinline)) void add_groups_4(const struct block *block, const struct quants *x, int64_t row, int64_t g0,
                       int64_t g1, int32_t (*sums)[256], int64_t ahead, float *out, int64_t stride) { add_groups(block, FORM_4, x, row, g0, g1, sums, ahead, out, stride); }
static __attribute__((noinline)) void add_groups_8(const struct block *block, const struct quants *x, int64_t row, int64_t g0,
                       int64_t g1, int32_t (*sums)[256], int64_t ahead, float *out, int64_t stride) { add_groups(block, FORM_8, x, row, g0, g1, sums, ahead, out, stride); }

// As many of `count` rows as are better done here, by 16 and the rest as if there were 16: out has room for them.
// Returns how many that are. Some groups are summed, then converted: next to instructions for tiles those for 64 bytes
// take twice as long.
static __attribute__((noinline)) int64_t sixteens(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                        int64_t count, float *out, int64_t stride) {
    uint8_t weights[2][GROUPS_AT_ONCE * 512] __attribute__((aligned(64)));
    int32_t sums[2][2 * GROUPS_AT_ONCE][256] __attribute__((aligned(64)));
    const int64_t groups = x->groups, tiles = (count + 16 - FEWEST_ROWS) / 16;
    for (int64_t g = 0; tiles && g < groups; g += GROUPS_AT_ONCE) {
        const int64_t end = MIN(g + GROUPS_AT_ONCE, groups);
        for (int64_t b = 0; b < num_blocks; b++) {
            const int form = blocks[b].form;
            unpack_groups(blocks[b].data + g * (form == FORM_4 ? GROUP_BYTES_4 : 512), form, end - g,
                          weights[b]);
        }
        __asm__ volatile("" ::: "memory");  // loads of tiles are no accesses to memory for some compilers
        for (int64_t m = row; m < row + 16 * tiles; m += 16) {
            sum_parts(x, m, g, end, num_blocks, weights, sums);
#ifdef PF
            { const int64_t width = x->at[x->groups] * GROUP; for (int r = 0; r < 16; r++) for (int64_t i = x->at[g]*GROUP; i < x->at[end]*GROUP; i += 64) __builtin_prefetch(x->q + (m + 16 + r) * width + i, 0, 3); }
#endif
            for (int64_t b = 0; b < num_blocks; b++) {
                const int64_t ahead = m == row ? num_blocks * BLOCK_BYTES(blocks[b].form, groups) : 0;
                float *to = out + (m - row) * stride + b * LANES;
                join_parts(x, g, end, sums[b]);
                if (blocks[b].form == FORM_4) add_groups_4(&blocks[b], x, m, g, end, sums[b], ahead, to, stride);
                else add_groups_8(&blocks[b], x, m, g, end, sums[b], ahead, to, stride);
            }
        }
    }
    return MIN(count, tiles * 16);
}
