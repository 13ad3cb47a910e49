// Attention over a paged pool: each request's keys are read where they lie, through its row of slot numbers.
//
// One task is one request, one key head and a block of queries; the query heads that share the key head are
// stacked as rows. Keys go by in blocks with a running softmax, so nothing is padded to the longest request
// and no mask is larger than the tree's own.
#include <algorithm>
#include <cmath>
#include <omp.h>
#include <vector>
#include "kernels.h"

namespace {

constexpr int64_t VECS = 4;            // registers per row of scores
constexpr int64_t KEYS = VECS * LANES; // keys per block
constexpr int ROWS_AT_ONCE = LANES / 4; // rows whose sums fit into the registers beside what is multiplied
constexpr int64_t MAX_TASK_ROWS = 48;  // rows (queries x heads of a group) per task

struct Scratch {
    std::vector<float> q, keys, scores, out, top, total;
    explicit Scratch(const Problem &p)
        : q(MAX_TASK_ROWS * p.dim), keys(KEYS * p.dim + LANES), scores(MAX_TASK_ROWS * KEYS),
          out(MAX_TASK_ROWS * p.value_dim), top(MAX_TASK_ROWS), total(MAX_TASK_ROWS) {}
};

// keys[d][j] = key j's element d, for the block's live keys; the rest of a row is left as it was.
template <class T>
void load_keys(const T *pool, const Problem &p, const int32_t *slots, int64_t live, float *keys) {
    for (int64_t j = 0; j < live; j += LANES) {
        const int64_t count = std::min(LANES, live - j);
        for (int64_t d = 0; d < p.dim; d += LANES) {
            vf row[LANES];
            for (int64_t i = 0; i < LANES; i++)
                row[i] = i < count ? load(pool + int64_t(slots[j + i]) * p.k_stride + d) : vf{};
            transpose(row);
            for (int64_t i = 0; i < LANES; i++) store(keys + (d + i) * KEYS + j, row[i]);
        }
    }
}

template <int ROWS> inline void score_rows(const float *q, const float *keys, int64_t dim, float *scores) {
    vf sum[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = vf{};
    for (int64_t d = 0; d < dim; d++) {
        vf key[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) key[v] = load(keys + d * KEYS + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vf x = splat(q[r * dim + d]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += x * key[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(scores + r * KEYS + v * LANES, sum[r][v]);
}

// out[r] += weights[r] . values, over the block's live keys, `DIMS` registers of the value at a time.
template <int ROWS, int DIMS, class T>
inline void add_values(const float *weights, const T *pool, const Problem &p, const int32_t *slots, int64_t live,
                       float *out) {
    vf sum[ROWS][DIMS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) sum[r][d] = load(out + r * p.value_dim + d * LANES);
    for (int64_t j = 0; j < live; j++) {
        const T *value = pool + int64_t(slots[j]) * p.v_stride;
        vf v[DIMS];
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) v[d] = load(value + d * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            vf weight = splat(weights[r * KEYS + j]);
#pragma GCC unroll 4
            for (int d = 0; d < DIMS; d++) sum[r][d] += weight * v[d];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int d = 0; d < DIMS; d++) store(out + r * p.value_dim + d * LANES, sum[r][d]);
}

template <int DIMS, class T>
void add_values_all(const float *weights, const T *pool, const Problem &p, const int32_t *slots, int64_t live,
                    int64_t rows, float *out) {
    int64_t r = 0;
    for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
        add_values<ROWS_AT_ONCE, DIMS>(weights + r * KEYS, pool, p, slots, live, out + r * p.value_dim);
    for (; r < rows; r++)
        add_values<1, DIMS>(weights + r * KEYS, pool, p, slots, live, out + r * p.value_dim);
}

// Hide what query `query` may not see of keys [first, first + live), and the block's unused places.
void hide(const Problem &p, int64_t b, int64_t query, int64_t first, int64_t live, float *scores) {
    int64_t j = live;
    if (!p.mask)
        j = std::clamp<int64_t>(p.prefix[b] + query + 1 - first, 0, live);
    else
        for (int64_t i = std::max<int64_t>(0, p.prefix[b] - first); i < live; i++)
            if (!p.mask[b * p.mask_stride + query * p.mask_width + first + i - p.prefix[b]])
                scores[i] = -INFINITY;
    for (; j < KEYS; j++) scores[j] = -INFINITY;
}

// Turn a row of scores into weights under the running maximum; rescales what the row has gathered so far.
void soften(float *scores, float &top, float &total, float *out, int64_t value_dim) {
    vf s[VECS], best = load(scores);
    for (int v = 0; v < VECS; v++) s[v] = load(scores + v * LANES);
    for (int v = 1; v < VECS; v++) best = vmax(best, s[v]);
    const float now = std::max(top, max_lanes(best));
    if (now == -INFINITY) { // nothing visible yet
        for (int v = 0; v < VECS; v++) store(scores + v * LANES, vf{});
        return;
    }
    if (now > top) {
        const float shrink = vexp(splat(top - now))[0];
        total *= shrink;
        for (int64_t d = 0; d < value_dim; d += LANES) store(out + d, load(out + d) * shrink);
        top = now;
    }
    vf sum = vf{};
    for (int v = 0; v < VECS; v++) {
        s[v] = vexp(s[v] - now);
        sum += s[v];
        store(scores + v * LANES, s[v]);
    }
    total += sum_lanes(sum);
}

template <class T>
void run_task(const Problem &p, const T *q, const T *k_pool, const T *v_pool, T *out, int64_t b, int64_t head,
              int64_t first_query, int64_t queries, Scratch &s) {
    const int64_t rows = queries * p.group;
    const int64_t token = p.query_start[b] + first_query;
    const int64_t heads = p.kv_heads * p.group;
    for (int64_t r = 0; r < rows; r++) {
        const T *from = q + (token + r / p.group) * p.q_stride + (head * p.group + r % p.group) * p.dim;
        for (int64_t d = 0; d < p.dim; d += LANES) store(&s.q[r * p.dim + d], load(from + d) * p.scale);
        s.top[r] = -INFINITY;
        s.total[r] = 0;
    }
    std::fill_n(s.out.data(), rows * p.value_dim, 0.0f);
    const int32_t *slots = p.table + p.table_rows[b] * p.table_stride;
    const T *keys = k_pool + head * p.dim, *values = v_pool + head * p.value_dim;
    const int64_t all = p.prefix[b] + p.window[b];
    const int64_t seen = p.mask ? all : std::min(all, p.prefix[b] + first_query + queries);
    for (int64_t first = 0; first < seen; first += KEYS) {
        const int64_t live = std::min(KEYS, seen - first);
        load_keys(keys, p, slots + first, live, s.keys.data());
        int64_t r = 0;
        for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
            score_rows<ROWS_AT_ONCE>(&s.q[r * p.dim], s.keys.data(), p.dim, &s.scores[r * KEYS]);
        for (; r < rows; r++) score_rows<1>(&s.q[r * p.dim], s.keys.data(), p.dim, &s.scores[r * KEYS]);
        for (r = 0; r < rows; r++) {
            float *row = &s.scores[r * KEYS];
            if (first + live > p.prefix[b] || live < KEYS)
                hide(p, b, first_query + r / p.group, first, live, row);
            soften(row, s.top[r], s.total[r], &s.out[r * p.value_dim], p.value_dim);
        }
        for (int64_t d = 0; d < p.value_dim; d += 4 * LANES) {
            float *part = s.out.data() + d;
            switch (std::min<int64_t>(4, (p.value_dim - d) / LANES)) {
            case 4: add_values_all<4>(s.scores.data(), values + d, p, slots + first, live, rows, part); break;
            case 3: add_values_all<3>(s.scores.data(), values + d, p, slots + first, live, rows, part); break;
            case 2: add_values_all<2>(s.scores.data(), values + d, p, slots + first, live, rows, part); break;
            case 1: add_values_all<1>(s.scores.data(), values + d, p, slots + first, live, rows, part); break;
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        T *to = out + ((token + r / p.group) * heads + head * p.group + r % p.group) * p.value_dim;
        const float share = s.total[r] > 0 ? 1.0f / s.total[r] : 0.0f;
        for (int64_t d = 0; d < p.value_dim; d += LANES) store(to + d, load(&s.out[r * p.value_dim + d]) * share);
    }
}

template <class T> void attend(const Problem &p, const T *q, const T *k_pool, const T *v_pool, T *out) {
    int64_t step = std::max<int64_t>(1, MAX_TASK_ROWS / p.group), longest = 0;
    for (int64_t b = 0; b < p.batch; b++) longest = std::max(longest, p.query_start[b + 1] - p.query_start[b]);
    // A few requests alone: smaller tasks, so that no thread waits long for another's last one.
    while (step > 4 && (longest + step - 1) / step * p.batch * p.kv_heads < 3 * omp_get_max_threads()) step = (step + 1) / 2;
    std::vector<int64_t> first_task(p.batch + 1, 0);
    for (int64_t b = 0; b < p.batch; b++)
        first_task[b + 1] = first_task[b] + (p.query_start[b + 1] - p.query_start[b] + step - 1) / step;
    const int64_t tasks = first_task[p.batch] * p.kv_heads;
#pragma omp parallel
    {
        Scratch scratch(p);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t block = task / p.kv_heads;
            const int64_t b = std::upper_bound(first_task.begin(), first_task.end(), block) - first_task.begin() - 1;
            const int64_t first = (block - first_task[b]) * step;
            const int64_t queries = std::min(step, p.query_start[b + 1] - p.query_start[b] - first);
            run_task(p, q, k_pool, v_pool, out, b, task % p.kv_heads, first, queries, scratch);
        }
    }
}

// keys [tokens, heads, dim] and values into the pool rows `slots`.
template <class T>
void write(const T *rows, int64_t row_stride, T *pool, int64_t width, const int64_t *slots, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++) memcpy(pool + slots[t] * width, rows + t * row_stride, width * sizeof(T));
}

} // namespace

extern "C" {

void graft_attention_fp32(const Problem *p, const float *q, const float *k, const float *v, float *out) {
    attend(*p, q, k, v, out);
}

void graft_attention_bf16(const Problem *p, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out) {
    attend(*p, q, k, v, out);
}

// Elements are `size` bytes; widths and strides are in bytes.
void graft_write_rows(const char *k, int64_t k_stride, char *k_pool, int64_t k_width, const char *v,
                      int64_t v_stride, char *v_pool, int64_t v_width, const int64_t *slots, int64_t tokens) {
    write(k, k_stride, k_pool, k_width, slots, tokens);
    write(v, v_stride, v_pool, v_width, slots, tokens);
}

}
