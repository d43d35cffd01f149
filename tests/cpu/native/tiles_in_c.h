/* AMX's tiles in plain C, for CPUs that have none: what the instructions do, one byte after another. Included before the
 * kernels' sources when they are compiled for the test. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The system is not asked for tiles that are not there. */
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0 : syscall(number, __VA_ARGS__))

static _Thread_local struct {
    uint8_t bytes[8][16][64];
    uint16_t row_bytes[8];
    uint8_t rows[8];
} tiles;

static inline void configure_tiles(const void *shapes) {
    memset(&tiles, 0, sizeof tiles);
    memcpy(tiles.row_bytes, (const uint8_t *)shapes + 16, sizeof tiles.row_bytes);
    memcpy(tiles.rows, (const uint8_t *)shapes + 48, sizeof tiles.rows);
}

static inline void clear_tile(int tile) { memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]); }

static inline void load_tile(int tile, const void *from, long stride) {
    clear_tile(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.bytes[tile][row], (const uint8_t *)from + row * stride, tiles.row_bytes[tile]);
}

static inline void store_tile(int tile, void *to, long stride) {
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy((uint8_t *)to + row * stride, tiles.bytes[tile][row], tiles.row_bytes[tile]);
}

static inline void add_signed_products(int to, int a, int b) {
    for (int row = 0; row < tiles.rows[to]; row++) {
        for (int column = 0; column < tiles.row_bytes[to] / 4; column++) {
            int32_t sum;
            memcpy(&sum, &tiles.bytes[to][row][4 * column], sizeof sum);
            for (int i = 0; i < tiles.row_bytes[a]; i++)
                sum += (int8_t)tiles.bytes[a][row][i] * (int8_t)tiles.bytes[b][i / 4][4 * column + i % 4];
            memcpy(&tiles.bytes[to][row][4 * column], &sum, sizeof sum);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_release
#define _tile_loadconfig configure_tiles
#define _tile_zero clear_tile
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbssd add_signed_products
#define _tile_release() ((void)0)
