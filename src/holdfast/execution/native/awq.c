/* Turns words over without ever holding a byte for each code: two inputs are put together at once, so that each byte
 * that is made is one of the result, and eight inputs are turned at once, in words of eight bytes. */
#include "awq.h"

#include <string.h>

#define HALF (AWQ_PIECE / 2)
#define SPAN 16 /* stored words side by side: a line of the cache of each input */
#define PAIRS (SPAN / 2)
#define LINE 64 /* bytes of a row that are written at a time */
#define EVEN 0x0F0F0F0F0F0F0F0Full

/* Which output is in each byte of two stored words' even nibbles, and of their odd ones. */
static const int EVEN_OUTPUTS[8] = {0, 4, 1, 5, 8, 12, 9, 13}, ODD_OUTPUTS[8] = {2, 6, 3, 7, 10, 14, 11, 15};

/* Of eight words the parts that `mask` has not, of the first of each two, change places with those of the second that
 * it has; the two are `apart`. */
static inline void swap(uint64_t words[8][PAIRS], int apart, uint64_t mask) {
    for (int first = 0; first < 8; first++) {
        if (first & apart) continue;
        uint64_t *low = words[first], *high = words[first + apart];
        for (int pair = 0; pair < PAIRS; pair++) {
            const uint64_t moved = ((low[pair] >> (8 * apart)) ^ high[pair]) & mask;
            high[pair] ^= moved;
            low[pair] ^= moved << (8 * apart);
        }
    }
}

/* Bytes [8 inputs, 8 outputs] of each pair become [8 outputs, 8 inputs], and go to their rows. */
static void put(uint64_t words[8][PAIRS], int pairs, uint8_t *codes, long row_bytes, const int *outputs) {
    swap(words, 4, 0x00000000FFFFFFFFull);
    swap(words, 2, 0x0000FFFF0000FFFFull);
    swap(words, 1, 0x00FF00FF00FF00FFull);
    for (int pair = 0; pair < pairs; pair++)
        for (int byte = 0; byte < 8; byte++)
            memcpy(codes + (16 * pair + outputs[byte]) * row_bytes, &words[byte][pair], 8);
}

/* One piece of inputs of `count` stored words: 16 bytes of each of their outputs. */
static void turn_piece(const uint32_t *words, long stride, int count, uint8_t *codes, long row_bytes) {
    for (int eighth = 0; eighth < HALF; eighth += 8) {
        uint64_t even[8][PAIRS], odd[8][PAIRS], first[PAIRS] = {0}, second[PAIRS] = {0};
        for (int input = 0; input < 8; input++) {
            const uint32_t *at = words + (eighth + input) * stride;
            memcpy(first, at, 4 * (size_t)count);
            memcpy(second, at + HALF * stride, 4 * (size_t)count);
            for (int pair = 0; pair < PAIRS; pair++) {
                even[input][pair] = (first[pair] & EVEN) | (second[pair] & EVEN) << 4;
                odd[input][pair] = (first[pair] >> 4 & EVEN) | (second[pair] & EVEN << 4);
            }
        }
        put(even, count / 2, codes + eighth, row_bytes, EVEN_OUTPUTS);
        put(odd, count / 2, codes + eighth, row_bytes, ODD_OUTPUTS);
    }
}

void turn_awq(const uint32_t *words, long inputs, long stride, uint8_t *codes) {
    const long row_bytes = inputs / 2;
    uint8_t tile[8 * SPAN * LINE]; /* Rows of the result are pages apart, where a cache has few lines for them. */
    for (long word = 0; word < stride; word += SPAN) {
        const int count = stride - word < SPAN ? (int)(stride - word) : SPAN;
        for (long byte = 0; byte < row_bytes; byte += LINE) {
            const long bytes = row_bytes - byte < LINE ? row_bytes - byte : LINE;
            for (long at = 0; at < bytes; at += HALF)
                turn_piece(words + 2 * (byte + at) * stride + word, stride, count, tile + at, LINE);
            for (int row = 0; row < 8 * count; row++)
                memcpy(codes + (8 * word + row) * row_bytes + byte, tile + row * LINE, (size_t)bytes);
        }
    }
}
