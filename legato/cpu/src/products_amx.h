// Products of 16 rows and 16 outputs at a time in the tile registers of AMX. A part of products.h.
#pragma once

enum { GROUPS_AT_ONCE = 32, FEWEST_ROWS = 6 };  // that are unpacked; that are not better left to vectors

// Tile registers.
#define SUMS 0     // [16 rows][16 outputs] int32
#define INPUTS 1   // [16 rows][32 inputs] int8
#define WEIGHTS 2  // [8][16 outputs][4 inputs] int8

// The registers belong to a thread between these two: state that the kernel would save whenever it is interrupted.
INLINE void begin_tiles(int64_t rows) {
    static const uint8_t shapes[64] = {1, [16] = 64, [18] = 32, [20] = 64, [48] = 16, [49] = 16, [50] = 8};
    if (rows >= FEWEST_ROWS) _tile_loadconfig(shapes);
}
INLINE void end_tiles(int64_t rows) {
    if (rows >= FEWEST_ROWS) _tile_release();
}

// Codes of some groups of a block as signed bytes, in the order of FORM_8.
INLINE void unpack_groups(const uint8_t *w, int form, int64_t count, int64_t ahead, uint8_t *out) {
    for (int64_t g = 0; g < count; g++, out += 512)
        if (form == FORM_4) {
            for (int i = 0; i < 4; i++) {
                vb codes = vb_load(w + 64 * i);
                _mm512_store_si512(out + 64 * i, vb_low(codes));
                _mm512_store_si512(out + 256 + 64 * i, vb_high(codes));
                PREFETCH(w + ahead + 64 * i);
            }
            PREFETCH(w + ahead + 256);
            w += GROUP_BYTES_4;
        } else {
            for (int i = 0; i < 8; i++) {
                _mm512_store_si512(out + 64 * i, _mm512_xor_si512(vb_load(w + 64 * i), _mm512_set1_epi8(-128)));
                PREFETCH(w + ahead + 64 * i);
            }
            w += 512;
        }
}

// Integer sums of a group: of the first parts of its inputs times 256, if there are two, and of the last.
INLINE void sum_group(const int8_t *q, int64_t width, int parts, const uint8_t *weights, int32_t *sums) {
    _tile_loadd(WEIGHTS, weights, 64);
    _tile_loadd(INPUTS, q, width);
    _tile_zero(SUMS);
    _tile_dpbssd(SUMS, INPUTS, WEIGHTS);
    _tile_stored(SUMS, sums, 64);
    if (parts == 1) return;
    int32_t first[256] __attribute__((aligned(64)));
    _tile_stored(SUMS, first, 64);
    _tile_loadd(INPUTS, q + GROUP, width);
    _tile_zero(SUMS);
    _tile_dpbssd(SUMS, INPUTS, WEIGHTS);
    _tile_stored(SUMS, sums, 64);
    for (int r = 0; r < 16; r++) {
        vi both = vi_add(_mm512_slli_epi32(_mm512_load_si512(first + 16 * r), 8), _mm512_load_si512(sums + 16 * r));
        _mm512_store_si512(sums + 16 * r, both);
    }
}

// Groups [g0, g1) of 16 rows and one block; the float operations are those of tile_4 and tile_8.
INLINE void sixteen(const struct block *block, const int form, const struct quants *x, int64_t row, int64_t g0,
                    int64_t g1, const uint8_t *weights, float *out, int64_t stride) {
    int32_t sums[2][256] __attribute__((aligned(64)));
    const int64_t width = x->at[x->groups] * GROUP;
    const int8_t *q = x->q + row * width;
    const float *by_16 = x->by_16 + row / 16 * x->groups * 32;
    const uint16_t *scales = (const uint16_t *)(form == FORM_4 ? block->data + 256 : block->data + x->groups * 512);
    const int64_t scales_step = form == FORM_4 ? GROUP_BYTES_4 / 2 : LANES;
    vf acc[16];
    for (int r = 0; r < 16; r++) acc[r] = g0 ? vf_load(out + r * stride) : vf_set1(0.0f);
    sum_group(q + x->at[g0] * GROUP, width, x->at[g0 + 1] - x->at[g0], weights, sums[g0 & 1]);
    for (int64_t g = g0; g < g1; g++) {
        if (g + 1 < g1)
            sum_group(q + x->at[g + 1] * GROUP, width, x->at[g + 2] - x->at[g + 1], weights + (g + 1 - g0) * 512,
                      sums[(g + 1) & 1]);
        const float *scale = by_16 + g * 32, *shift = scale + 16;
        const int32_t *sum = sums[g & 1];
        vf by = vf_load_half(scales + g * scales_step);
        vf least = form == FORM_4 ? vf_load_half(scales + g * scales_step + LANES) : by;
        for (int r = 0; r < 16; r++) {
            vf factor = vf_mul(by, vf_set1(scale[r]));
            acc[r] = vf_fma(vf_from_i(_mm512_load_si512(sum + 16 * r)), factor, acc[r]);
            if (form == FORM_4) acc[r] = vf_fma(least, vf_set1(shift[r]), acc[r]);
        }
    }
    for (int r = 0; r < 16; r++) vf_store(out + r * stride, acc[r]);
}

// As many of `count` rows as are better done here, by 16 and the rest as if there were 16: out has room for them.
// Returns how many that are.
static int64_t sixteens(const struct block *blocks, int64_t num_blocks, const struct quants *x, int64_t row,
                        int64_t count, float *out, int64_t stride) {
    uint8_t weights[GROUPS_AT_ONCE * 512] __attribute__((aligned(64)));
    const int64_t groups = x->groups, tiles = (count + 16 - FEWEST_ROWS) / 16;
    if (!tiles) return 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        const int form = blocks[b].form;
        for (int64_t g = 0; g < groups; g += GROUPS_AT_ONCE) {
            int64_t end = MIN(g + GROUPS_AT_ONCE, groups);
            const uint8_t *packed = blocks[b].data + g * (form == FORM_4 ? GROUP_BYTES_4 : 512);
            unpack_groups(packed, form, end - g, num_blocks * BLOCK_BYTES(form, groups), weights);
            __asm__ volatile("" ::: "memory");  // loads of tiles are no accesses to memory for some compilers
            for (int64_t t = 0; t < tiles; t++) {
                float *to = out + t * 16 * stride + b * LANES;
                if (form == FORM_4) sixteen(&blocks[b], FORM_4, x, row + 16 * t, g, end, weights, to, stride);
                else sixteen(&blocks[b], FORM_8, x, row + 16 * t, g, end, weights, to, stride);
            }
        }
    }
    return MIN(count, tiles * 16);
}
