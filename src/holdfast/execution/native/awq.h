/* Codes of an AWQ checkpoint as products read them.
 *
 * Stored: a word has eight outputs of one input; output 0, 1, ... 7 at its nibbles 0, 4, 1, 5, 2, 6, 3, 7.
 * In memory: a row for each output; of every AWQ_PIECE inputs, input i in the low half of byte i, and input i + 16 in
 * the high half. */
#ifndef HOLDFAST_AWQ_H
#define HOLDFAST_AWQ_H

#include <stdint.h>

#define AWQ_PIECE 32

/* `words`: [inputs, stride], whole pieces of inputs and an even number of words; `codes`: [8 * stride, inputs / 2]. On
 * the calling thread. */
void turn_awq(const uint32_t *words, long inputs, long stride, uint8_t *codes);

#endif
