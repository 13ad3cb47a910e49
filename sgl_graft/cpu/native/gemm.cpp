// out[m, n] = x[m, k] . weight[n, k], reading the weight once and in the layout in which the model holds it.
//
// A row's result does not depend on how many rows there are: every element is the same chain of sums over k.
// So a verify of many slots and a plain decode step agree to the last bit here. While one group of weight rows
// is multiplied, the next is on its way from memory: a few rows cost little more than one.
#include <algorithm>
#include <cstdlib>
#include "kernels.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t MAX_ROWS = 6; // 6 x 4 sums, 4 weight vectors and one x: 29 of 32 registers
#else
constexpr int64_t MAX_ROWS = 2;
#endif
constexpr int64_t GROUP = 4;      // weight rows taken together
constexpr int64_t CHUNK = 16;     // groups a thread takes at a time
constexpr int64_t TILE_ROWS = 96; // rows of x that stay in the second-level cache
constexpr int64_t LINE = 64;      // bytes of a cache line

// Rows [begin, begin + rows) of x as [k / LANES][rows][LANES], zero past k.
template <class T>
void pack(const T *x, int64_t ldx, int64_t rows, int64_t k, float *out) {
    for (int64_t i = 0; i < k; i += LANES)
        for (int64_t r = 0; r < rows; r++, out += LANES)
            store(out, i + LANES <= k ? load(x + r * ldx + i) : load_part(x + r * ldx + i, k - i));
}

// The lane sums of four registers.
inline void sum_four(vf a, vf b, vf c, vf d, float *out) {
    const vi even = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const vi odd = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const vi low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const vi high = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    vf ab = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    vf cd = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
    vf s = __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high);
    for (int i = 0; i < 4; i++) out[i] = (s[i] + s[i + 8]) + (s[i + 4] + s[i + 12]);
}

// `ROWS` packed rows of x against one weight group; fetches `LINES` cache lines of the next group per step.
template <int ROWS, int LINES, class W>
inline void block(const float *x, const W *w, int64_t stride, int64_t k, const char *next, float (*out)[GROUP]) {
    const W *w2 = w + 2 * stride;
    vf sum[ROWS][GROUP];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) sum[m][n] = vf{};
    auto step = [&](vf a, vf b, vf c, vf d) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            vf row = load(x + m * LANES);
#ifdef __AVX512F__
            asm("" : "+v"(row)); // one load, not one per product: loads are the scarcer unit
#endif
            sum[m][0] += row * a;
            sum[m][1] += row * b;
            sum[m][2] += row * c;
            sum[m][3] += row * d;
        }
        x += ROWS * LANES;
    };
    const W *end = w + k / LANES * LANES;
    for (; w < end; w += LANES, w2 += LANES) {
#pragma GCC unroll 4
        for (int p = 0; p < LINES; p++) __builtin_prefetch(next + p * LINE, 0, 2);
        next += LINES * LINE;
        step(load(w), load(w + stride), load(w2), load(w2 + stride));
    }
    if (const int64_t rest = k % LANES)
        step(load_part(w, rest), load_part(w + stride, rest), load_part(w2, rest), load_part(w2 + stride, rest));
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) sum_four(sum[m][0], sum[m][1], sum[m][2], sum[m][3], out[m]);
}

template <int LINES, class W>
inline void block_of(int64_t rows, const float *x, const W *w, int64_t stride, int64_t k, const char *next,
                     float (*out)[GROUP]) {
    switch (rows) {
    case 1: return block<1, LINES>(x, w, stride, k, next, out);
    case 2: return block<2, LINES>(x, w, stride, k, next, out);
#ifdef __AVX512F__
    case 3: return block<3, LINES>(x, w, stride, k, next, out);
    case 4: return block<4, LINES>(x, w, stride, k, next, out);
    case 5: return block<5, LINES>(x, w, stride, k, next, out);
    case 6: return block<6, LINES>(x, w, stride, k, next, out);
#endif
    }
}

// Up to TILE_ROWS rows of x; `packed` holds them block by block.
template <int LINES, class W, class T>
void multiply_tile(const float *packed, const W *w, const T *bias, T *out, int64_t ldo, int64_t m, int64_t n,
                   int64_t k, int64_t blocks) {
    const int64_t k_padded = (k + LANES - 1) / LANES * LANES;
    const int64_t groups = (n + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t chunk = 0; chunk < (groups + CHUNK - 1) / CHUNK; chunk++) {
        const int64_t last = std::min(groups, (chunk + 1) * CHUNK);
        for (int64_t g = chunk * CHUNK; g < last; g++) {
            const int64_t first = g * GROUP, live = std::min(GROUP, n - first);
            // A last, short group repeats its first row; the extra columns are dropped.
            const int64_t stride = live == GROUP ? k : 0;
            const W *wg = w + first * k;
            const char *next = (const char *)(wg + GROUP * k);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t begin = m * b / blocks, rows = m * (b + 1) / blocks - begin;
                float tile[GROUP][MAX_ROWS][GROUP];
                const int64_t passes = live == GROUP ? 1 : live;
                for (int64_t p = 0; p < passes; p++)
                    block_of<LINES>(rows, packed + begin * k_padded, wg + p * k, stride, k, next, tile[p]);
                next += k / LANES * LINES * LINE;
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t c = 0; c < live; c++) {
                        float y = live == GROUP ? tile[0][r][c] : tile[c][r][0];
                        if (bias) y += to_float(bias[first + c]);
                        store_one(out + (begin + r) * ldo + first + c, y);
                    }
            }
        }
    }
}

template <class T>
void multiply(const T *x, int64_t ldx, const T *w, const T *bias, T *out, int64_t ldo, int64_t m, int64_t n,
              int64_t k) {
    static thread_local float *buffer = nullptr;
    static thread_local int64_t capacity = 0;
    const int64_t k_padded = (k + LANES - 1) / LANES * LANES;
    const int64_t needed = std::min(m, TILE_ROWS) * k_padded;
    if (needed > capacity) {
        free(buffer);
        capacity = needed;
        buffer = (float *)aligned_alloc(LINE, needed * sizeof(float));
    }
    for (int64_t top = 0; top < m; top += TILE_ROWS) {
        const int64_t rows = std::min(TILE_ROWS, m - top);
        const int64_t blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
            pack(x + (top + begin) * ldx, ldx, end - begin, k, buffer + begin * k_padded);
        }
        // The blocks share the fetching of the next group: GROUP * LANES elements per step between them.
        const int64_t lines = GROUP * LANES * int64_t(sizeof(T)) / LINE;
        T *o = out + top * ldo;
        if (blocks == 1)
            multiply_tile<GROUP * LANES * sizeof(T) / LINE>(buffer, w, bias, o, ldo, rows, n, k, blocks);
        else if (blocks < lines)
            multiply_tile<2>(buffer, w, bias, o, ldo, rows, n, k, blocks);
        else if (blocks <= 2 * lines)
            multiply_tile<1>(buffer, w, bias, o, ldo, rows, n, k, blocks);
        else
            multiply_tile<0>(buffer, w, bias, o, ldo, rows, n, k, blocks);
    }
}

} // namespace

extern "C" {

void graft_linear_fp32(const float *x, int64_t ldx, const float *w, const float *bias, float *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
    multiply(x, ldx, w, bias, out, ldo, m, n, k);
}

void graft_linear_bf16(const bf16 *x, int64_t ldx, const bf16 *w, const bf16 *bias, bf16 *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
    multiply(x, ldx, w, bias, out, ldo, m, n, k);
}

}
