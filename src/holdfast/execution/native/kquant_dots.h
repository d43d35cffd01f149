/* Products of any number of rows with woven weights of the denser kinds. Returns as multiply() does. */
#ifndef HOLDFAST_KQUANT_DOTS_H
#define HOLDFAST_KQUANT_DOTS_H

#include "matmul.h"

int multiply_kquants(const product *wanted); /* woven, outputs a multiple of four */

#endif
