/* Where the scales and zero points of a bundle of woven planes lie (scaled.h), for x86_planes.c and arm_planes.c. */
#ifndef HOLDFAST_PLANE_SCALES_H
#define HOLDFAST_PLANE_SCALES_H

#include "scaled.h"
#include "weave.h"

typedef struct {
    const uint8_t *scales, *zeros;
    long step, group_blocks; /* bytes from one group to the next; blocks of 32 columns in a group */
    enum scale_type type;
    int alike; /* all outputs of the bundle have one scale */
    int signed_zeros;
} bundle_scales;

static inline bundle_scales scales_of(const scaled_matrix *planes, const uint8_t *bundle, long bundle_bytes) {
    const long number = (bundle - (const uint8_t *)planes->codes) / bundle_bytes, bytes = scale_bytes(planes);
    const long groups = planes->columns / planes->group;
    bundle_scales found = {
        .group_blocks = planes->group / BLOCK_ELEMENTS,
        .type = (enum scale_type)planes->scale_type,
        .alike = planes->group_rows > 1,
        .signed_zeros = planes->code_type == INT8_CODES,
    };
    const long line = found.alike ? number * BUNDLE / planes->group_rows : number * BUNDLE;
    found.step = found.alike ? bytes : BUNDLE * bytes;
    found.scales = (const uint8_t *)planes->scales + line * groups * bytes;
    if (planes->zeros != 0) found.zeros = (const uint8_t *)planes->zeros + number * BUNDLE * groups;
    return found;
}

/* The scales of a group, one for every output: where they lie, or in `copies`. */
static inline const uint8_t *stored_scales(const bundle_scales *from, long group, uint8_t copies[4 * BUNDLE]) {
    const uint8_t *stored = from->scales + group * from->step;
    if (!from->alike) return stored;
    for (int row = 0; row < BUNDLE; row++) memcpy(copies + row * from->step, stored, (size_t)from->step);
    return copies;
}

#endif
