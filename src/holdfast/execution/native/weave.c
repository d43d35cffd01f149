/* Moves bytes between the two orders; products read the woven one (strips.c, x86_dots.c). */
#include "weave.h"

#include <string.h>

#include "kquant_weave.h"
#include "parallel.h"

/* Halves before the quants of a block: its scale, and its minimum where it has one. */
static int heads_of(enum layout plain) { return plain == Q4_1 ? 2 : 1; }

/* Turns quants from unsigned to signed or back, where they are not woven as they come. */
static uint32_t sign_bits(enum layout plain) {
#if defined(X86_DIGITS)
    return plain == Q8_0 ? 0x80808080u : 0;
#else
    return plain == Q8_0 ? 0 : 0x88888888u;
#endif
}

static void move_word(uint8_t *to, const uint8_t *from, uint32_t flipped) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    word ^= flipped;
    memcpy(to, &word, sizeof word);
}

#if defined(ARM_DIGITS) || defined(X86_DIGITS)

/* One block of a bundle, whose rows are `stride` bytes apart. */
static void weave_block(const uint8_t *rows, long stride, enum layout plain, uint8_t *out) {
    const int heads = heads_of(plain), bytes = block_bytes(plain), words = (bytes - 2 * heads) / 4;
    for (int row = 0; row < BUNDLE; row++) {
        const uint8_t *from = rows + row * stride;
        for (int head = 0; head < heads; head++) memcpy(out + 2 * (BUNDLE * head + row), from + 2 * head, 2);
        for (int word = 0; word < words; word++)
            move_word(out + 2 * BUNDLE * heads + 4 * (BUNDLE * word + row), from + 2 * heads + 4 * word, sign_bits(plain));
    }
}

int weave_rows(uint8_t *weights, long rows, long columns, enum layout layout) {
    if (is_kquant(layout)) return weave_kquants(weights, rows, columns, layout);
    if (layout != Q8_0 && layout != Q4_0 && layout != Q4_1) return (int)layout;
    const long bytes = block_bytes(layout), blocks = columns / BLOCK_ELEMENTS, stride = blocks * bytes;
    uint8_t *woven = scratch(SCRATCH_OWN, (size_t)(BUNDLE * stride));
    if (woven == NULL) return -1;
    for (long row = 0; row + BUNDLE <= rows; row += BUNDLE) {
        uint8_t *bundle = weights + row * stride;
        for (long block = 0; block < blocks; block++)
            weave_block(bundle + block * bytes, stride, layout, woven + block * BUNDLE * bytes);
        memcpy(bundle, woven, (size_t)(BUNDLE * stride));
    }
    return (int)layout - Q8_0 + Q8_0_WOVEN;
}

#else

int weave_rows(uint8_t *weights, long rows, long columns, enum layout layout) {
    (void)weights, (void)rows, (void)columns;
    return (int)layout;
}

#endif

void unweave_row(const uint8_t *bundle, enum layout layout, int row, long first, long count, uint8_t *out) {
    const enum layout plain = plain_layout(layout);
    const int heads = heads_of(plain), bytes = block_bytes(plain), words = (bytes - 2 * heads) / 4;
    bundle += first * BUNDLE * bytes;
    for (long block = 0; block < count; block++, bundle += BUNDLE * bytes, out += bytes) {
        for (int head = 0; head < heads; head++) memcpy(out + 2 * head, bundle + 2 * (BUNDLE * head + row), 2);
        for (int word = 0; word < words; word++)
            move_word(out + 2 * heads + 4 * word, bundle + 2 * BUNDLE * heads + 4 * (BUNDLE * word + row), sign_bits(plain));
    }
}
