// out[m, n] = x[m, k] . weight[n, k], reading the weight once and in the layout in which the model holds it.
//
// A row's result does not depend on how many rows there are: every element is the same chain of sums over k.
// So a verify of many slots and a plain decode step agree to the last bit here. While one chunk of weight rows
// is multiplied, the next is on its way from memory: a few rows cost little more than one.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <type_traits>
#include "kernels.h"

namespace {

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_mem __attribute__((vector_size(16), aligned(4), may_alias));

constexpr int64_t TILE_ROWS = 96; // rows of x that stay in a thread's second-level cache beside a chunk of the weight

// Rows of x and rows of the weight that are multiplied in registers: WIDE x 4, or TALL x 3 where that needs fewer
// passes over the weight. Their sums, one vector of each row on the shorter side and one of the other take 28 or 29
// of 32 registers on AVX-512, 16 of 16 elsewhere.
#ifdef __AVX512F__
constexpr int64_t WIDE = 6, TALL = 8, TALL_ROWS = 8; // of more rows than TALL_ROWS, all blocks are wide
#else
constexpr int64_t WIDE = 3, TALL = 4, TALL_ROWS = TILE_ROWS;
#endif
constexpr int64_t NEAR = 24576;   // bytes of x that stay in the first-level cache beside a weight group
constexpr int64_t CHUNK = 32;     // weight rows a thread takes at a time: they stay in its second-level cache
constexpr int64_t AHEAD = 64;     // elements from a product's place in a weight row to what is fetched of the row
constexpr int64_t LINE = 64;      // bytes of a cache line
constexpr int64_t PROBES = 32;    // values by which an update of a weight is noticed

// Rows [begin, begin + rows) of x as [k / LANES][rows][LANES], zero past k.
template <class T>
void pack(const T *x, int64_t ldx, int64_t rows, int64_t k, float *out) {
    for (int64_t i = 0; i < k; i += LANES)
        for (int64_t r = 0; r < rows; r++, out += LANES)
            store(out, i + LANES <= k ? load(x + r * ldx + i) : load_part(x + r * ldx + i, k - i));
}

// The lane sums of four registers, as (i + 2, i + 1), then halves, always in this order.
inline v4 sum_four(vf a, vf b, vf c, vf d) {
#if LANES_HERE == 16
    const vi even = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const vi odd = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const vi low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const vi high = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#else
    const vi even = {0, 8, 1, 9, 4, 12, 5, 13}, odd = {2, 10, 3, 11, 6, 14, 7, 15};
    const vi low = {0, 1, 8, 9, 4, 5, 12, 13}, high = {2, 3, 10, 11, 6, 7, 14, 15};
#endif
    vf ab = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    vf cd = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
    vf s = __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high);
    v4 q[LANES / 4];
    memcpy(q, &s, sizeof s);
#if LANES_HERE == 16
    return (q[0] + q[2]) + (q[1] + q[3]);
#else
    return q[0] + q[1];
#endif
}

// In a register: the compiler would rather load it again for every product, and loads are the scarcer unit.
inline vf keep(vf x) {
#ifdef __AVX2__
    asm("" : "+v"(x));
#endif
    return x;
}

inline void store_four(float *p, v4 x) { *(v4_mem *)p = x; }

inline void store_four(bf16 *p, v4 x) {
    for (int i = 0; i < 4; i++) store_one(p + i, x[i]);
}

// What a block of the product reads and where its results go.
template <class T, class W> struct Block {
    const float *x;   // packed rows
    const W *w;       // first weight row of the group
    int64_t stride;   // from one weight row to the next; 0 repeats the row
    int64_t k;
    const char *next; // what is needed next, to be fetched meanwhile
    int64_t fetches;  // steps that fetch LINES lines of it; more would take from the other threads
    const T *bias;    // of the group, or null
    T *out;           // [rows, ldo], `live` columns
    int64_t ldo, live;
};

template <int ROWS, int GROUP, int LINES, class T, class W> inline void multiply_block(const Block<T, W> &p) {
    const W *w = p.w, *w2 = p.w + 2 * p.stride;
    const int64_t stride = p.stride;
    const float *x = p.x;
    const char *next = p.next;
    vf sum[ROWS][GROUP];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) sum[m][n] = vf{};
    auto step = [&](auto get) __attribute__((always_inline)) {
        // The shorter side stays in registers, the other passes by (on AVX-512, with some to spare, always the rows).
        auto row_at = [&](int m) { return keep(load(x + m * LANES)); };
        auto column_at = [&](int n) {
            const vf column = get((n < 2 ? w : w2) + n % 2 * stride);
            return sizeof(W) == 4 ? keep(column) : column;
        };
        if constexpr (ROWS < GROUP && LANES == 8) {
            vf row[ROWS];
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) row[m] = row_at(m);
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++) {
                const vf column = column_at(n);
#pragma GCC unroll 8
                for (int m = 0; m < ROWS; m++) sum[m][n] = multiply_add(row[m], column, sum[m][n]);
            }
        } else {
            vf column[GROUP];
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++) column[n] = column_at(n);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                const vf row = row_at(m);
#pragma GCC unroll 4
                for (int n = 0; n < GROUP; n++) sum[m][n] = multiply_add(row, column[n], sum[m][n]);
            }
        }
        x += ROWS * LANES;
    };
    constexpr bool near = LANES == 8 && sizeof(W) == 4; // where the loads of a step outrun the hardware's prefetching
    const auto whole = [](const W *from) { return load(from); };
    const W *end = w + p.k / LANES * LANES, *fetching = std::min(end, w + p.fetches * LANES);
    for (; w < fetching; w += LANES, w2 += LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < LINES; i++) __builtin_prefetch(next + i * LINE, 0, 2);
        next += LINES * LINE;
        if (near) // three of the group's rows, into the first-level cache; more did not pay
            for (const W *row : {w, w + stride, w2}) __builtin_prefetch(row + AHEAD);
        step(whole);
    }
    for (; w < end; w += LANES, w2 += LANES) step(whole);
    if (const int64_t rest = p.k % LANES) step([rest](const W *from) { return load_part(from, rest); });
    v4 bias = {};
    if (p.bias)
        for (int64_t n = 0; n < p.live; n++) bias[n] = to_float(p.bias[n]);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        v4 y = sum_four(sum[m][0], sum[m][1], sum[m][2], GROUP > 3 ? sum[m][GROUP - 1] : vf{});
        if (p.bias) y += bias;
        T *out = p.out + m * p.ldo;
        if (p.live == 4)
            store_four(out, y);
        else
            for (int64_t n = 0; n < p.live; n++) store_one(out + n, y[n]);
    }
}

template <int GROUP, int LINES, class T, class W> inline void multiply_rows(int64_t rows, const Block<T, W> &p) {
    switch (rows) {
    case 1: return multiply_block<1, GROUP, LINES>(p);
    case 2: return multiply_block<2, GROUP, LINES>(p);
    case 3: return multiply_block<3, GROUP, LINES>(p);
    case 4: return multiply_block<4, LANES == 8 ? 3 : GROUP, LINES>(p); // never wide where WIDE is 3
#ifdef __AVX512F__
    case 5: return multiply_block<5, GROUP, LINES>(p);
    case 6: return multiply_block<6, GROUP, LINES>(p);
    case 7: return multiply_block<7, 3, LINES>(p);
    case 8: return multiply_block<8, 3, LINES>(p);
#endif
    }
}

// Up to TILE_ROWS rows of x; `packed` holds them block by block.
template <int GROUP, int LINES, class T, class W>
void multiply_tile(const float *packed, const W *w, const T *bias, T *out, int64_t ldo, int64_t m, int64_t n, int64_t k,
                   int64_t blocks) {
    const int64_t k_padded = (k + LANES - 1) / LANES * LANES;
    // Whole cache lines of fp32 output: two threads that write to one line take turns at it.
    constexpr int64_t wide = GROUP == 4 ? CHUNK : CHUNK * 3 / 2;
    static_assert(wide % GROUP == 0 && wide % LANES == 0);
    const int64_t chunks = (n + wide - 1) / wide;
    const int64_t shares = blocks * LINES * LINE; // the blocks of a group share the fetching of the next one
    const int64_t fetches = (GROUP * k * int64_t(sizeof(W)) + shares - 1) / shares;
    std::atomic<int64_t> taken{0};
#pragma omp parallel
    for (int64_t chunk = taken++, following; chunk < chunks; chunk = following) {
        following = taken++; // claimed early, to know what to fetch
        const int64_t first = chunk * wide, last = std::min(n, first + wide);
        const char *next = (const char *)(w + std::min(following, chunks) * wide * k);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = m * b / blocks, rows = m * (b + 1) / blocks - begin;
            for (int64_t column = first; column < last; column += GROUP) {
                // A last, short group goes column by column: each stands for all four, the others are dropped.
                const int64_t live = last - column < GROUP ? 1 : GROUP;
                for (int64_t c = column; c < std::min(last, column + GROUP); c += live) {
                    multiply_rows<GROUP, LINES, T, W>(rows, {packed + begin * k_padded, w + c * k, live == 1 ? 0 : k, k,
                                                          next, fetches, bias ? bias + c : nullptr,
                                                          out + begin * ldo + c, ldo, live});
                    next += fetches * LINES * LINE;
                }
            }
        }
    }
}

template <class T, class W>
void multiply(const T *x, int64_t ldx, const W *w, const T *bias, T *out, int64_t ldo, int64_t m, int64_t n,
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
        const bool tall = rows <= TALL_ROWS && (rows + TALL - 1) / TALL < (rows + WIDE - 1) / WIDE &&
                          std::min(rows, TALL) * k_padded * int64_t(sizeof(float)) <= NEAR;
        const int64_t high = tall ? TALL : WIDE, blocks = (rows + high - 1) / high;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
            pack(x + (top + begin) * ldx, ldx, end - begin, k, buffer + begin * k_padded);
        }
        // Cache lines that one step of a single block has to fetch; of several blocks, each has at least the steps it needs.
        constexpr int lines = LANES * sizeof(W) / (LINE / 4);
        auto run = [&](auto tile) { tile(buffer, w, bias, out + top * ldo, ldo, rows, n, k, blocks); };
        auto run_group = [&](auto group) {
            constexpr int size = decltype(group)::value, share = (lines * size + 3) / 4;
            if (blocks == 1)
                run(multiply_tile<size, share, T, W>);
            else if (blocks <= 3)
                run(multiply_tile<size, (share + 1) / 2, T, W>);
            else
                run(multiply_tile<size, 1, T, W>);
        };
        if (tall)
            run_group(std::integral_constant<int, 3>{});
        else
            run_group(std::integral_constant<int, 4>{});
    }
}

} // namespace

extern "C" {

void graft_linear_fp32(const float *x, int64_t ldx, const float *w, const float *bias, float *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
    multiply(x, ldx, w, bias, out, ldo, m, n, k);
}

// `narrow` holds the same weight in bf16, every value exactly: half the bytes, the same sums to the last bit.
// A weight that was updated since is noticed by a look at a few of its values, and used instead.
void graft_linear_narrow(const float *x, int64_t ldx, const float *w, const bf16 *narrow, const float *bias, float *out,
                         int64_t ldo, int64_t m, int64_t n, int64_t k) {
    bool same = true;
    for (int64_t i = 0; i < PROBES; i++) {
        const int64_t at = (n * k - 1) * i / (PROBES - 1);
        same &= w[at] == to_float(narrow[at]);
    }
    if (same)
        multiply(x, ldx, narrow, bias, out, ldo, m, n, k);
    else
        multiply(x, ldx, w, bias, out, ldo, m, n, k);
}

// A weight that is kept in bf16 alone, as whoever keeps it looks after its updates.
void graft_linear_kept(const float *x, int64_t ldx, const bf16 *w, float *out, int64_t ldo, int64_t m, int64_t n,
                       int64_t k) {
    multiply<float, bf16>(x, ldx, w, nullptr, out, ldo, m, n, k);
}

void graft_linear_bf16(const bf16 *x, int64_t ldx, const bf16 *w, const bf16 *bias, bf16 *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
    multiply(x, ldx, w, bias, out, ldo, m, n, k);
}

}
