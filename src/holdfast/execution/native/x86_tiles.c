/* The system's permission to use AMX's tiles, and products with them.
 *
 * A product takes some 50 cycles to come out of its tile, a tile 16 to be stored, and its 16 rows about 50 to be scaled and
 * added. So three blocks of 32 columns are under way at a time, and what is read was written a whole block before:
 *
 *   block      j + 1           j               j - 2
 *              multiplied      stored          scaled and added to the rows' sums, which stay in registers
 *   tiles      0, 1 or 2, 3    the other two   (memory)
 *
 * Tiles 4 and 5 are the digits of x, 6 or 7 the weights. */
#include "digits.h"

#if defined(X86_TILES)

#include <sys/syscall.h>
#include <unistd.h>

#include "x86_tiles.h"

/* Linux keeps the 8 KB of tiles for threads of those processes alone that have asked for it. */
#define REQUEST_PERMISSION 0x1023
#define TILE_DATA 18

int prepare_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : -1; }

/* What tiles leave of one block: [digit][row][output]. Two follow each other in 4 KB: a load that lies as far in its page
 * as a store before it waits for that store. */
typedef struct {
    _Alignas(64) ivec of[2][TILE_HEIGHT];
} tile_products;

/* As ldtilecfg reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* gcc does not know that tiles read memory. */
ALWAYS_INLINE void finish_stores(void) { __asm__ volatile("" : : : "memory"); }

ALWAYS_INLINE void shape_tiles(void) {
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 6 ? TILE_HEIGHT : BLOCK_ELEMENTS / 4;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? BLOCK_ELEMENTS : VECTOR_BYTES;
    }
    finish_stores();
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

/* Numbers of tiles are parts of an instruction's name. */
#define MULTIPLY(high, low, weights)                   \
    _tile_zero(high);                                  \
    _tile_zero(low);                                   \
    _tile_loadd(weights, codes, VECTOR_BYTES);         \
    _tile_loadd(4, x, 2 * BLOCK_ELEMENTS);             \
    _tile_dpbssd(high, 4, weights);                    \
    _tile_loadd(5, x + BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS); \
    _tile_dpbssd(low, 5, weights)

ALWAYS_INLINE void multiply_block(int odd, const uint8_t *x, const uint8_t *codes) {
    if (odd) {
        MULTIPLY(2, 3, 7);
    } else {
        MULTIPLY(0, 1, 6);
    }
}

ALWAYS_INLINE void store_block(int odd, tile_products *to) {
    if (odd) {
        _tile_stored(2, to->of[0], sizeof(ivec));
        _tile_stored(3, to->of[1], sizeof(ivec));
    } else {
        _tile_stored(0, to->of[0], sizeof(ivec));
        _tile_stored(1, to->of[1], sizeof(ivec));
    }
}

/* In the order of add_group. */
ALWAYS_INLINE void add_block(const tile_products *from, vec scales, vec added, const row_head *heads, int minimum,
                             vec *total) {
    UNROLL for (int r = 0; r < TILE_HEIGHT; r++) {
        const ivec sum = (from->of[0][r] << 8) + from->of[1][r];
        const vec worth = scales * heads[r].scale;
        total[r] += __builtin_convertvector(sum, vec) * worth;
        if (minimum) total[r] += added * heads[r].sum;
    }
}

/* 16 rows of a panel, of which `x` is the first: `rows` of them count, the others are whatever lies there. `step`: from a
 * block of the panel to the next; `heads`: from x to what the rows are worth. */
ALWAYS_INLINE void multiply_tile_rows(const laid_weights *laid, int minimum, int begins, const uint8_t *x, long step,
                                      long heads, int rows, vec *totals) {
    _Alignas(4096) tile_products products[2];
    vec total[TILE_HEIGHT];
    const long blocks = laid->blocks;
    UNROLL for (int r = 0; r < TILE_HEIGHT; r++) total[r] = r < rows && !begins ? totals[r] : (vec){0};
    multiply_block(0, x, laid->codes[0]);
    for (long block = 0; block < blocks + 2; block += 2) {
        UNROLL for (int odd = 0; odd < 2; odd++) {
            const long now = block + odd, last = now - 2;
            if (now + 1 < blocks) multiply_block(!odd, x + (now + 1) * step, laid->codes[now + 1]);
            if (last >= 0 && last < blocks)
                add_block(products + odd, laid->scales[last], laid->added[last],
                          (const row_head *)(x + last * step + heads), minimum, total);
            finish_stores();
            if (now < blocks) store_block(odd, products + odd);
        }
    }
    UNROLL for (int r = 0; r < TILE_HEIGHT; r++)
        if (r < rows) totals[r] = total[r];
}

void multiply_laid(laid_weights *laid, int minimum, int begins, const uint8_t *x, int rows, vec *totals) {
    const long step = panel_block_bytes(rows);
    finish_stores();
    shape_tiles();
    for (int first = 0; first < rows; first += TILE_HEIGHT) {
        const uint8_t *here = x + 2 * BLOCK_ELEMENTS * first;
        const long heads = 2L * BLOCK_ELEMENTS * (rows - first) + (long)sizeof(row_head) * first;
        const int count = rows - first < TILE_HEIGHT ? rows - first : TILE_HEIGHT;
        if (minimum)
            multiply_tile_rows(laid, 1, begins, here, step, heads, count, totals + first);
        else
            multiply_tile_rows(laid, 0, begins, here, step, heads, count, totals + first);
    }
    _tile_release();
    laid->blocks = 0;
}

#else

int prepare_tiles(void) { return 0; }

#endif
