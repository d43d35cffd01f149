/* Vectors of floats as wide as the machine has them, and the few operations the kernels are made of.
 * GNU vector extensions, so one source serves NEON, AVX2 and AVX-512. Knows nothing of matrices or models. */
#ifndef HOLDFAST_VECTOR_H
#define HOLDFAST_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Rows of x in a register tile; four rows of weights stand against them. AVX2 has half the registers of the others. */
#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE_ROWS 2
#else
#define TILE_ROWS 4
#endif
#define TILE_COLUMNS 4

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

/* A vector wherever floats may lie. Not memcpy: gcc would take 16 bytes through two integer registers. */
typedef float placed_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

ALWAYS_INLINE vec load(const float *from) { return *(const placed_vec *)from; }

ALWAYS_INLINE void store(float *to, vec value) { *(placed_vec *)to = value; }

ALWAYS_INLINE vec spread(float value) { return value - (vec){0}; }

/* A NaN in b stays NaN; one in a need not. */
ALWAYS_INLINE vec larger(vec a, vec b) {
#if LANES == 4 && defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec takes_a = a > b;
    return (vec)(((ivec)a & takes_a) | ((ivec)b & ~takes_a));
#endif
}

/* Four numbers that are multiplied with vectors one after the other, as four[lane]: NEON takes each from its lane of
 * one register, the others from memory. */
#if LANES == 4 && defined(__aarch64__)
typedef vec four;
ALWAYS_INLINE four load_four(const float *from) {
    vec value = load(from);
    __asm__("" : "+w"(value)); /* Else gcc loads every lane by itself, through the integer registers. */
    return value;
}
#else
typedef const float *four;
ALWAYS_INLINE four load_four(const float *from) { return from; }
#endif

#if defined(__AVX__)
/* The sums of lanes that are four apart. gcc takes lanes one by one where it is left to add them up. */
ALWAYS_INLINE __m128 folded(vec value) {
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)value),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)value, 1)));
#else
    __m256 half = (__m256)value;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

ALWAYS_INLINE float sum_of(vec value) {
#if LANES == 4 && defined(__aarch64__)
    return vaddvq_f32((float32x4_t)value);
#elif defined(__AVX__)
    __m128 four = folded(value);
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float total = 0;
    UNROLL for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
#endif
}

ALWAYS_INLINE float largest_of(vec value) {
#if LANES == 4 && defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)value);
#else
    float largest = value[0];
    UNROLL for (int lane = 1; lane < LANES; lane++) largest = value[lane] > largest ? value[lane] : largest;
    return largest;
#endif
}

/* e to the power of x within 2e-7 of the true value, for x in [-87, 88]; beyond, the value at the bound; NaN stays NaN.
 * x = n ln 2 + r, with a polynomial for e^r times 2^n. */
ALWAYS_INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number. */
    x = larger(spread(-87.0f), x);
    x = -larger(spread(-88.0f), -x);
    vec whole = x * 1.44269504f + magic;
    ivec power = (ivec)whole - (ivec)spread(magic);
    whole -= magic;
    /* ln 2 in two parts, the first with few enough bits that its product with n is exact. */
    vec r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vec p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (vec)((power + 127) << 23);
}

/* Each of four vectors summed, side by side. */
ALWAYS_INLINE void sums_of_four(const vec *total, float *sums) {
#if LANES == 4 && defined(__aarch64__)
    float32x4_t low = vpaddq_f32((float32x4_t)total[0], (float32x4_t)total[1]);
    float32x4_t high = vpaddq_f32((float32x4_t)total[2], (float32x4_t)total[3]);
    vst1q_f32(sums, vpaddq_f32(low, high));
#elif defined(__AVX__)
    __m128 low = _mm_hadd_ps(folded(total[0]), folded(total[1]));
    __m128 high = _mm_hadd_ps(folded(total[2]), folded(total[3]));
    _mm_storeu_ps(sums, _mm_hadd_ps(low, high));
#else
    UNROLL for (int i = 0; i < 4; i++) sums[i] = sum_of(total[i]);
#endif
}

/* sums[row * stride + column] = dot product of x row and w column over `length` floats, a multiple of LANES.
 * `rows` is a constant where it is inlined, so that all sums live in registers. */
ALWAYS_INLINE void dot_tile(int rows, const float *const *x, const float *const *w, long length, float *sums,
                            long stride) {
    vec total[TILE_ROWS][TILE_COLUMNS];
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int column = 0; column < TILE_COLUMNS; column++) total[row][column] = (vec){0};
    }
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    const float *rows_of_x[TILE_ROWS];
    UNROLL for (int row = 0; row < rows; row++) rows_of_x[row] = x[row];
    for (long i = 0; i < length; i += LANES) {
        vec b0 = load(w0 + i), b1 = load(w1 + i), b2 = load(w2 + i), b3 = load(w3 + i);
        UNROLL for (int row = 0; row < rows; row++) {
            vec a = load(rows_of_x[row] + i);
            total[row][0] += a * b0;
            total[row][1] += a * b1;
            total[row][2] += a * b2;
            total[row][3] += a * b3;
        }
    }
    UNROLL for (int row = 0; row < rows; row++) sums_of_four(total[row], sums + row * stride);
}

/* The same for a number of rows known only when it runs. */
static inline void dot_tile_of(int rows, const float *const *x, const float *const *w, long length, float *sums,
                               long stride) {
    switch (rows) {
    case 1: dot_tile(1, x, w, length, sums, stride); break;
#if TILE_ROWS == 4
    case 2: dot_tile(2, x, w, length, sums, stride); break;
    case 3: dot_tile(3, x, w, length, sums, stride); break;
#endif
    default: dot_tile(TILE_ROWS, x, w, length, sums, stride); break;
    }
}

#endif
