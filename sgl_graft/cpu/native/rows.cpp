// Whole rows of logits: where the largest stands, the best few, and how likely they are.
//
// Ties go to the lower index. One thread takes a row, which stays in its second-level cache between passes.
#include <algorithm>
#include <cmath>
#include "kernels.h"

namespace {

constexpr int64_t BLOCK = 4 * LANES; // elements that are looked at together
constexpr int64_t MOST = 64;         // largest k

// The k largest of a row, best first; false if the row holds a NaN.
struct Best {
    float value[MOST];
    int64_t index[MOST];
    int64_t k, held = 0;

    void offer(float x, int64_t i) {
        if (held == k && !(x > value[k - 1])) return;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && x > value[at - 1]; at--) value[at] = value[at - 1], index[at] = index[at - 1];
        value[at] = x, index[at] = i;
    }
};

bool best_of(const float *x, int64_t n, Best &best) {
    int64_t i = 0;
    vi unordered = vi{};
    bool ordered = true;
    for (; i < std::min(n, best.k); i++) ordered &= x[i] == x[i], best.offer(x[i], i);
    for (; i + BLOCK <= n; i += BLOCK) {
        vf a = load(x + i), b = load(x + i + LANES), c = load(x + i + 2 * LANES), d = load(x + i + 3 * LANES);
        unordered |= (a != a) | (b != b) | (c != c) | (d != d);
        vf most = vmax(vmax(a, b), vmax(c, d));
        vi above = most > splat(best.value[best.k - 1]);
        if (!any_lane(above)) continue;
        for (int64_t j = i; j < i + BLOCK; j++) best.offer(x[j], j);
    }
    for (; i < n; i++) ordered &= x[i] == x[i], best.offer(x[i], i);
    return ordered && !any_lane(unordered);
}

float sum_of_exp(const float *x, int64_t n, float most) {
    vf sum[4] = {};
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        for (int j = 0; j < 4; j++) sum[j] += vexp(load(x + i + j * LANES) - most);
    float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; i++) total += vexp(splat(x[i] - most))[0];
    return total;
}

} // namespace

extern "C" {

// ids [rows, k] and probs [rows, k] of the best k; returns how many rows hold a NaN, whose results mean nothing.
// `probs` null: not wanted. `softmax` 0: probs gets the values themselves.
int64_t graft_best_of_rows(const float *x, int64_t ldx, int64_t rows, int64_t n, int64_t k, int64_t *ids, float *probs,
                           int64_t softmax) {
    int64_t broken = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : broken) if (rows * n > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * ldx;
        Best best;
        best.k = k;
        broken += !best_of(row, n, best);
        const float most = best.value[0];
        const float share = probs && softmax ? 1.0f / sum_of_exp(row, n, most) : 0.0f;
        for (int64_t j = 0; j < k; j++) {
            ids[r * k + j] = best.index[j];
            if (probs) probs[r * k + j] = softmax ? vexp(splat(best.value[j] - most))[0] * share : best.value[j];
        }
    }
    return broken;
}

// Sum over a row of exp(x - most).
float graft_sum_of_exp(const float *x, int64_t n, float most) { return sum_of_exp(x, n, most); }

// Softmax of every row, `out` [rows, n].
void graft_softmax_rows(const float *x, int64_t ldx, int64_t rows, int64_t n, float *out) {
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * ldx;
        float most = -INFINITY;
        vf high = splat(-INFINITY);
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) high = vmax(load(row + i), high);
        for (; i < n; i++) most = std::max(most, row[i]);
        most = std::max(most, max_lanes(high));
        const float share = 1.0f / sum_of_exp(row, n, most);
        for (i = 0; i + LANES <= n; i += LANES) store(out + r * n + i, vexp(load(row + i) - most) * share);
        for (; i < n; i++) out[r * n + i] = vexp(splat(row[i] - most))[0] * share;
    }
}

// In each of `buffers`, row from[i] to row to[i] for every i: all are read before any is written.
void graft_move_rows(char **buffers, int64_t count, int64_t bytes, const int64_t *to, const int64_t *from,
                     int64_t rows) {
    char *kept = new char[rows * bytes];
    for (int64_t b = 0; b < count; b++) {
        for (int64_t i = 0; i < rows; i++)
            if (to[i] != from[i]) memcpy(kept + i * bytes, buffers[b] + from[i] * bytes, bytes);
        for (int64_t i = 0; i < rows; i++)
            if (to[i] != from[i]) memcpy(buffers[b] + to[i] * bytes, kept + i * bytes, bytes);
    }
    delete[] kept;
}

}
