/* Rows of x as 16-bit whole numbers on x86. Included by digits.h alone.
 *
 * A lane of a vector of woven quants holds four columns of one output as bytes. Their even ones and their odd ones are
 * two vectors of pairs of 16-bit numbers; so are the numbers of x, whose pairs lie in the order in which quants need
 * them: columns 0 and 2, 1 and 3, 4 and 6, 5 and 7, ... One instruction multiplies pairs and adds both products to a
 * 32-bit sum (vpdpwssd), or two of them do (vpmaddwd, vpaddd). Nothing can overflow on the way: quants are unsigned
 * bytes, and a sum begins at what their offset takes from it.
 *
 * With AMX many rows are split into two 8-bit digits instead (x86_tiles.h), a tile of 16 rows at a time. */
#define SUB_ROWS (LANES == 16 ? 8 : 4) /* whose sums stay in registers */
#define PANEL_ROWS 64                  /* of x, at most */
#define PANELS_AT_ONCE 8
#define LEAST_PANELS 1
#define BUNDLES_AT_ONCE 2 /* with many rows */
#define TILE_HEIGHT 16    /* rows of x that AMX multiplies at a time */

/* Of one block of a panel: 32 numbers of each row, then this of each. */
typedef struct {
    float scale;
    float sum, second_sum; /* of all 32, and of the last 16, times the scale */
    int32_t starts[2];     /* of sums with quants: of all, or of the first 16 and of the last */
} row_head;

ALWAYS_INLINE long panel_block_bytes(int rows) {
#if defined(X86_TILES)
    if (rows > SUB_ROWS) rows = (rows + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT; /* a tile is read whole */
#endif
    return rows * (2L * BLOCK_ELEMENTS + (long)sizeof(row_head));
}

typedef vec bundle_sums;

/* Sums of a panel's rows with the outputs of `wide` bundles, of which the first begins at `bundle`: [bundle][row]. */
typedef void (*bundle_function)(const uint8_t *bundle, long bundle_bytes, int wide, const scaled_matrix *planes,
                                const uint8_t *x, long blocks, int rows, bundle_sums *totals);

struct digit_kind {
    bundle_function few[9]; /* by rows, up to SUB_ROWS */
    bundle_function many;   /* a multiple of SUB_ROWS */
    strip_function make_strip; /* NULL: quants are laid out block by block */
    long strip_block_bytes;
    int offset, short_groups; /* of codes, and whether 16 columns share a scale */
    int in_floats;            /* rows of x stay numbers: 32 of each row, then a scale of each */
    int in_tiles;             /* many rows of x are two digits, [row][digit][32] */
};

#define FEW_FOR_A_TILE 4 /* rows beyond the last tile that are faster by themselves */

/* Rows of the next panel when so many are left: whole times SUB_ROWS, then the rest; in tiles all of them, unless they
 * are few beyond the last whole tile. */
ALWAYS_INLINE int panel_rows(const digit_kind *kind, long left) {
    if (left >= PANEL_ROWS) return PANEL_ROWS;
    if (left <= SUB_ROWS) return (int)left;
    if (!kind->in_tiles) return (int)(left / SUB_ROWS * SUB_ROWS);
    return (int)(left > TILE_HEIGHT && left % TILE_HEIGHT <= FEW_FOR_A_TILE ? left / TILE_HEIGHT * TILE_HEIGHT : left);
}

ALWAYS_INLINE int in_floats(const digit_kind *kind) { return kind->in_floats; }

ALWAYS_INLINE long float_block_bytes(int rows) { return rows * (BLOCK_ELEMENTS + 1L) * (long)sizeof(float); }

ALWAYS_INLINE long input_block_bytes(const digit_kind *kind, int rows) {
    return kind->in_floats ? float_block_bytes(rows) : panel_block_bytes(rows);
}

/* Bundles that a function takes at a time, at most. */
ALWAYS_INLINE int bundles_at_once(int rows) { return rows <= SUB_ROWS ? 1 : BUNDLES_AT_ONCE; }

ALWAYS_INLINE bundle_function function_of(const digit_kind *kind, int from_strip, int rows) {
    (void)from_strip;
    return rows <= SUB_ROWS ? kind->few[rows] : kind->many;
}

typedef int32_t eight_words __attribute__((vector_size(32)));
typedef float eight_floats __attribute__((vector_size(32)));
typedef int16_t eight_shorts __attribute__((vector_size(16)));
typedef int8_t eight_bytes __attribute__((vector_size(8)));

ALWAYS_INLINE int32_t sum_of_eight(eight_words value) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}

/* Whole numbers of a block and what they are worth, to their places. */
ALWAYS_INLINE void put_block(const eight_words *whole, float scale, uint8_t *out, int row, int rows,
                             const digit_kind *kind) {
    int16_t *to = (int16_t *)out + BLOCK_ELEMENTS * row;
    const int digits = kind->in_tiles && rows > SUB_ROWS;
    UNROLL for (int i = 0; i < 4; i++) {
        if (digits) {
            eight_bytes *high = (eight_bytes *)to + i, *low = high + 4;
            *high = __builtin_convertvector((whole[i] + 128) >> 8, eight_bytes);
            *low = __builtin_convertvector(whole[i], eight_bytes);
            continue;
        }
        eight_shorts narrow = __builtin_convertvector(whole[i], eight_shorts);
        narrow = __builtin_shuffle(narrow, (eight_shorts){0, 2, 1, 3, 4, 6, 5, 7});
        _mm_storeu_si128((__m128i *)(to + 8 * i), (__m128i)narrow);
    }
    /* What is no number has any total; its scale tells. */
    const uint32_t first = (uint32_t)sum_of_eight(whole[0] + whole[1]), offset = (uint32_t)kind->offset;
    const uint32_t second = (uint32_t)sum_of_eight(whole[2] + whole[3]), all = first + second;
    row_head *head = (row_head *)(out + 2 * BLOCK_ELEMENTS * rows) + row;
    head->scale = scale;
    head->sum = (float)(int32_t)all * scale;
    head->second_sum = (float)(int32_t)second * scale;
    head->starts[0] = (int32_t)(0 - offset * (kind->short_groups ? first : all));
    head->starts[1] = (int32_t)(0 - offset * second);
}

ALWAYS_INLINE void split_block(const float *x, uint8_t *out, int row, int rows, const digit_kind *kind) {
    eight_floats part[4];
    __m256i largest = _mm256_setzero_si256(), without_sign = _mm256_set1_epi32(0x7FFFFFFF);
    UNROLL for (int i = 0; i < 4; i++) {
        part[i] = (eight_floats)_mm256_loadu_ps(x + 8 * i);
        /* Compared as whole numbers, what is no number is larger than all. */
        largest = _mm256_max_epi32(largest, _mm256_and_si256((__m256i)part[i], without_sign));
    }
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    const float peak = _mm_cvtss_f32(_mm_castsi128_ps(most));
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    const float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak, scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    eight_words whole[4];
    UNROLL for (int i = 0; i < 4; i++) whole[i] = (eight_words)_mm256_cvtps_epi32((__m256)(part[i] * inverse));
    put_block(whole, scale, out, row, rows, kind);
}

/* A block of inputs that planes were asked how they want them: codes, or numbers. */
ALWAYS_INLINE void put_prepared(const scaled_matrix *planes, const float *x, float scale, uint8_t *out, int row, int rows,
                                const digit_kind *kind) {
    if (kind->in_floats) {
        memcpy((float *)out + BLOCK_ELEMENTS * row, x, BLOCK_ELEMENTS * sizeof *x);
        ((float *)out)[BLOCK_ELEMENTS * rows + row] = scale;
    } else if (planes->input_type == PLAIN_INPUTS) {
        split_block(x, out, row, rows, kind);
    } else {
        eight_words whole[4];
        UNROLL for (int i = 0; i < 4; i++) whole[i] = (eight_words)_mm256_cvtps_epi32(_mm256_loadu_ps(x + 8 * i));
        put_block(whole, scale, out, row, rows, kind);
    }
}
