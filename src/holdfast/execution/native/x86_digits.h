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

/* The 32 numbers of a block in as few vectors as there are. */
#define PARTS (BLOCK_ELEMENTS / LANES)

ALWAYS_INLINE ivec rounded(vec numbers) {
#if LANES == 16
    return (ivec)_mm512_cvtps_epi32((__m512)numbers);
#else
    return (ivec)_mm256_cvtps_epi32((__m256)numbers);
#endif
}

/* The lowest byte of each. */
ALWAYS_INLINE void put_bytes(ivec words, uint8_t *to) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)words));
#else
    typedef int8_t eight_bytes __attribute__((vector_size(8), aligned(1), may_alias));
    *(eight_bytes *)to = __builtin_convertvector(words, eight_bytes);
#endif
}

/* As 16-bit numbers, in the order of pairs: 0, 2, 1, 3 of every four. */
ALWAYS_INLINE void put_pairs(ivec words, uint8_t *to) {
#if LANES == 16
    __m256i narrow = _mm512_cvtepi32_epi16((__m512i)words);
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(narrow, _mm256_broadcastsi128_si256(order)));
#else
    typedef int16_t eight_shorts __attribute__((vector_size(16)));
    eight_shorts narrow = __builtin_convertvector(words, eight_shorts);
    narrow = __builtin_shuffle(narrow, (eight_shorts){0, 2, 1, 3, 4, 6, 5, 7});
    _mm_storeu_si128((__m128i *)to, (__m128i)narrow);
#endif
}

/* Sums of the first 16 numbers and of the last. */
ALWAYS_INLINE void sums_of_halves(const ivec *whole, uint32_t *first, uint32_t *second) {
#if LANES == 16
    const __m256i a = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)whole[0]),
                                       _mm512_extracti64x4_epi64((__m512i)whole[0], 1));
    const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)whole[1]),
                                       _mm512_extracti64x4_epi64((__m512i)whole[1], 1));
#else
    const __m256i a = (__m256i)(whole[0] + whole[1]), b = (__m256i)(whole[2] + whole[3]);
#endif
    __m256i both = _mm256_hadd_epi32(a, b); /* in each half: two of a, two of b */
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    *first = (uint32_t)_mm_cvtsi128_si32(four);
    *second = (uint32_t)_mm_extract_epi32(four, 2);
}

/* The largest of numbers without their signs. Compared as whole numbers, what is no number is larger than all. */
ALWAYS_INLINE float peak_of(const vec *part) {
    const ivec without_sign = (ivec){0} + 0x7FFFFFFF;
#if LANES == 16
    const __m512i all = _mm512_max_epi32((__m512i)((ivec)part[0] & without_sign), (__m512i)((ivec)part[1] & without_sign));
    const __m256i largest = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
    __m256i largest = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < PARTS; i++) largest = _mm256_max_epi32(largest, (__m256i)((ivec)part[i] & without_sign));
#endif
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(most));
}

/* Whole numbers of a block and what they are worth, to their places. */
ALWAYS_INLINE void put_block(const ivec *whole, float scale, uint8_t *out, int row, int rows, const digit_kind *kind) {
    uint8_t *to = out + 2 * BLOCK_ELEMENTS * row;
    const int digits = kind->in_tiles && rows > SUB_ROWS;
    UNROLL for (int i = 0; i < PARTS; i++) {
        if (digits) {
            put_bytes((whole[i] + 128) >> 8, to + LANES * i);
            put_bytes(whole[i], to + BLOCK_ELEMENTS + LANES * i);
        } else {
            put_pairs(whole[i], to + 2 * LANES * i);
        }
    }
    /* What is no number has any total; its scale tells. */
    uint32_t first, second;
    sums_of_halves(whole, &first, &second);
    const uint32_t offset = (uint32_t)kind->offset, all = first + second;
    row_head *head = (row_head *)(out + 2 * BLOCK_ELEMENTS * rows) + row;
    head->scale = scale;
    head->sum = (float)(int32_t)all * scale;
    head->second_sum = (float)(int32_t)second * scale;
    head->starts[0] = (int32_t)(0 - offset * (kind->short_groups ? first : all));
    head->starts[1] = (int32_t)(0 - offset * second);
}

ALWAYS_INLINE void split_block(const float *x, uint8_t *out, int row, int rows, const digit_kind *kind) {
    vec part[PARTS];
    ivec whole[PARTS];
    UNROLL for (int i = 0; i < PARTS; i++) part[i] = load(x + LANES * i);
    const float peak = peak_of(part);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    const float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak, scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    UNROLL for (int i = 0; i < PARTS; i++) whole[i] = rounded(part[i] * inverse);
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
        ivec whole[PARTS];
        UNROLL for (int i = 0; i < PARTS; i++) whole[i] = rounded(load(x + LANES * i));
        put_block(whole, scale, out, row, rows, kind);
    }
}
