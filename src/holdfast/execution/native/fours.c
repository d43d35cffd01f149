/* Moves bytes between the two orders; products read the woven one in digits.c. */
#include "fours.h"

#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kquant_weave.h"
#include "parallel.h"

/* Halves before the quants of a block: its scale, and its minimum where it has one. */
static int heads_of(enum layout plain) { return plain == Q4_1 ? 2 : 1; }

static uint32_t sign_bits(enum layout plain) { return plain == Q8_0 ? 0 : 0x88888888u; }

static void move_word(uint8_t *to, const uint8_t *from, uint32_t flipped) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    word ^= flipped;
    memcpy(to, &word, sizeof word);
}

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

/* One block of four rows, `stride` bytes apart in `rows`. */
static void weave_block(const uint8_t *rows, long stride, enum layout plain, uint8_t *out) {
    const int heads = heads_of(plain), bytes = block_bytes(plain), words = (bytes - 2 * heads) / 4;
    for (int row = 0; row < FOUR; row++) {
        const uint8_t *from = rows + row * stride;
        for (int head = 0; head < heads; head++) memcpy(out + 8 * head + 2 * row, from + 2 * head, 2);
        for (int word = 0; word < words; word++)
            move_word(out + 8 * heads + 16 * word + 4 * row, from + 2 * heads + 4 * word, sign_bits(plain));
    }
}

int weave_fours(uint8_t *weights, long rows, long columns, enum layout layout) {
    if (is_kquant(layout)) return weave_kquants(weights, rows, columns, layout);
    if (layout != Q8_0 && layout != Q4_0 && layout != Q4_1) return (int)layout;
    const long bytes = block_bytes(layout), blocks = columns / BLOCK_ELEMENTS, stride = blocks * bytes;
    uint8_t *woven = scratch(SCRATCH_OWN, (size_t)(FOUR * stride));
    if (woven == NULL) return -1;
    for (long row = 0; row + FOUR <= rows; row += FOUR) {
        uint8_t *four = weights + row * stride;
        for (long block = 0; block < blocks; block++)
            weave_block(four + block * bytes, stride, layout, woven + block * FOUR * bytes);
        memcpy(four, woven, (size_t)(FOUR * stride));
    }
    return (int)layout - Q8_0 + Q8_0_FOURS;
}

#else

int weave_fours(uint8_t *weights, long rows, long columns, enum layout layout) {
    (void)weights, (void)rows, (void)columns;
    return (int)layout;
}

#endif

void unweave_four(const uint8_t *four, enum layout layout, long first, long count, uint8_t *out, long stride) {
    const enum layout plain = plain_layout(layout);
    const int heads = heads_of(plain), bytes = block_bytes(plain), words = (bytes - 2 * heads) / 4;
    four += first * FOUR * bytes;
    for (long block = 0; block < count; block++, four += FOUR * bytes, out += bytes) {
        for (int row = 0; row < FOUR; row++) {
            for (int head = 0; head < heads; head++) memcpy(out + row * stride + 2 * head, four + 8 * head + 2 * row, 2);
        }
        const uint8_t *from = four + 8 * heads;
        for (int word = 0; word < words; word += FOUR, from += 16 * FOUR) {
#if defined(__aarch64__)
            uint32x4x4_t rows = vld4q_u32((const uint32_t *)from);
            for (int row = 0; row < FOUR; row++)
                vst1q_u8(out + row * stride + 2 * heads + 4 * word,
                         vreinterpretq_u8_u32(veorq_u32(rows.val[row], vdupq_n_u32(sign_bits(plain)))));
#else
            for (int i = 0; i < FOUR * FOUR; i++)
                move_word(out + i % FOUR * stride + 2 * heads + 4 * (word + i / FOUR), from + 4 * i, sign_bits(plain));
#endif
        }
    }
}
