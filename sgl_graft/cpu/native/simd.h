// One register of fp32 lanes, loads and stores of fp32 and bf16, and the few functions the kernels share.
// Written with GCC's vector extensions. A vector wider than a register would be kept in memory, at a tenth of
// the speed, so its width is the machine's: sixteen lanes on AVX-512, eight elsewhere.
#pragma once
#include <cstdint>
#include <cstring>
#if defined __AVX2__ || defined __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES_HERE 16
#else
#define LANES_HERE 8
#endif

constexpr int64_t LANES = LANES_HERE;

typedef float vf __attribute__((vector_size(4 * LANES_HERE)));
typedef int32_t vi __attribute__((vector_size(4 * LANES_HERE)));
typedef float vf_mem __attribute__((vector_size(4 * LANES_HERE), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES_HERE)));
typedef uint16_t vh_mem __attribute__((vector_size(2 * LANES_HERE), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline void store_one(float *p, float x) { *p = x; }

// Round to nearest even, as torch does. Not-a-number keeps its payload's top bit.
static inline void store_one(bf16 *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        p->bits = uint16_t(bits >> 16) | 0x40;
    else
        p->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vf load(const float *p) { return *(const vf_mem *)p; }

// By name, as GCC widens a vector of integers in halves.
static inline vf load(const bf16 *p) {
#ifdef __AVX512F__
    return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#elif defined __AVX2__
    return (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_mem *)p, vi) << 16);
#endif
}

static inline void store(float *p, vf x) { *(vf_mem *)p = x; }

static inline void store(bf16 *p, vf x) {
    for (int i = 0; i < LANES; i++) store_one(p + i, x[i]);
}

// The first `count` lanes of a row that ends inside the register; the others are zero.
template <class T> static inline vf load_part(const T *p, int64_t count) {
    float lanes[LANES] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = to_float(p[i]);
    return load(lanes);
}

template <class T> static inline void store_part(T *p, vf x, int64_t count) {
    for (int64_t i = 0; i < count; i++) store_one(p + i, x[i]);
}

static inline vf splat(float x) { return x - vf{}; }

// a * b + c, rounded once with AVX-512 or FMA3: left to the compiler, it would depend on the code around it.
static inline vf multiply_add(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

static inline float sum_lanes(vf v) {
    float t[LANES];
    store(t, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}

static inline float max_lanes(vf v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// Whether a comparison holds in any lane.
static inline bool any_lane(vi v) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined __AVX2__
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= v[i];
    return found != 0;
#endif
}

// e^x, relative error below 2e-7; exactly 0 under the smallest normal result, so a hidden key weighs nothing.
static inline vf vexp(vf x) {
    const vf top = splat(88.0f), bottom = splat(-87.0f);
    vf c = x > top ? top : x;
    c = c < bottom ? bottom : c;
    vf rounded = c * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 leaves the nearest integer in the low bits
    vi power = (vi)rounded - (vi)splat(12582912.0f);
    vf n = rounded - 12582912.0f;
    vf r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf out = p * (vf)((power + 127) << 23);
    return x < bottom ? vf{} : out;
}

// Exchange rows and columns of as many registers as a register has lanes.
#if LANES_HERE == 16
static inline void transpose(vf r[LANES]) {
    vf t[LANES];
    for (int i = 0; i < 16; i += 2) { // pairs of lanes
        t[i] = __builtin_shuffle(r[i], r[i + 1], (vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30});
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], (vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
    }
    for (int i = 0; i < 16; i += 4) // groups of four
        for (int j = 0; j < 2; j++) {
            vf a = t[i + j], b = t[i + j + 2];
            r[i + j] = __builtin_shuffle(a, b, (vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
            r[i + j + 2] = __builtin_shuffle(a, b, (vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
        }
    for (int i = 0; i < 16; i += 8) // groups of eight
        for (int j = 0; j < 4; j++) {
            vf a = r[i + j], b = r[i + j + 4];
            t[i + j] = __builtin_shuffle(a, b, (vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27});
            t[i + j + 4] = __builtin_shuffle(a, b, (vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
        }
    for (int j = 0; j < 8; j++) {
        vf a = t[j], b = t[j + 8];
        r[j] = __builtin_shuffle(a, b, (vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
        r[j + 8] = __builtin_shuffle(a, b, (vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    }
}
#else
static inline void transpose(vf r[LANES]) {
    vf t[LANES];
    for (int i = 0; i < 8; i += 2) { // pairs of lanes
        t[i] = __builtin_shuffle(r[i], r[i + 1], (vi){0, 8, 2, 10, 4, 12, 6, 14});
        t[i + 1] = __builtin_shuffle(r[i], r[i + 1], (vi){1, 9, 3, 11, 5, 13, 7, 15});
    }
    for (int i = 0; i < 8; i += 4) // groups of four
        for (int j = 0; j < 2; j++) {
            vf a = t[i + j], b = t[i + j + 2];
            r[i + j] = __builtin_shuffle(a, b, (vi){0, 1, 8, 9, 4, 5, 12, 13});
            r[i + j + 2] = __builtin_shuffle(a, b, (vi){2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int j = 0; j < 4; j++) {
        vf a = r[j], b = r[j + 4];
        r[j] = __builtin_shuffle(a, b, (vi){0, 1, 2, 3, 8, 9, 10, 11});
        r[j + 4] = __builtin_shuffle(a, b, (vi){4, 5, 6, 7, 12, 13, 14, 15});
    }
}
#endif
