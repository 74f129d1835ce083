// The instructions of AMX that the kernels use, in plain C: included before kernels.c (`-include`) for processors that
// have none (test_amx.py). A use that the registers were not configured for ends the process.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_INT8__ 1  // kernels.c is then that of AMX

static _Thread_local struct {
    uint8_t shapes[64];  // as _tile_loadconfig gets them; all zero: released
    uint8_t lines[8][16][64];
} tiles_of_thread;

static int tile_lines(int tile) {
    const int count = tiles_of_thread.shapes[48 + tile];
    if (tiles_of_thread.shapes[0] != 1 || !count || count > 16) abort();
    return count;
}

static int tile_bytes(int tile) {  // of a line
    const int count = tiles_of_thread.shapes[16 + 2 * tile];
    if (!count || count > 64) abort();
    return count;
}

static void tile_load(int tile, const void *from, int64_t stride) {
    memset(tiles_of_thread.lines[tile], 0, sizeof tiles_of_thread.lines[tile]);
    for (int i = 0; i < tile_lines(tile); i++)
        memcpy(tiles_of_thread.lines[tile][i], (const uint8_t *)from + i * stride, (size_t)tile_bytes(tile));
}

static void tile_store(int tile, void *to, int64_t stride) {
    for (int i = 0; i < tile_lines(tile); i++)
        memcpy((uint8_t *)to + i * stride, tiles_of_thread.lines[tile][i], (size_t)tile_bytes(tile));
}

// To lane n of line m of the sums, which are int32, come products of inputs 4 k + i of line m and weights 4 n + i of
// line k.
static void tile_multiply(int sums, int inputs, int weights) {
    if (tile_lines(sums) != tile_lines(inputs) || tile_bytes(sums) != tile_bytes(weights) ||
        4 * tile_lines(weights) != tile_bytes(inputs))
        abort();
    for (int m = 0; m < tile_lines(sums); m++) {
        int32_t *sum = (int32_t *)tiles_of_thread.lines[sums][m];
        const int8_t *x = (const int8_t *)tiles_of_thread.lines[inputs][m];
        for (int k = 0; k < tile_lines(weights); k++) {
            const int8_t *w = (const int8_t *)tiles_of_thread.lines[weights][k];
            for (int n = 0; n < tile_bytes(sums) / 4; n++)
                for (int i = 0; i < 4; i++) sum[n] += x[4 * k + i] * w[4 * n + i];
        }
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig(from) memcpy(tiles_of_thread.shapes, from, 64)
#define _tile_release() memset(tiles_of_thread.shapes, 0, 64)
#define _tile_loadd(tile, from, stride) tile_load(tile, from, stride)
#define _tile_stored(tile, to, stride) tile_store(tile, to, stride)
#define _tile_zero(tile) memset(tiles_of_thread.lines[tile], 0, 16 * 64)
#define _tile_dpbssd(sums, inputs, weights) tile_multiply(sums, inputs, weights)
