// What one translation unit uses of another.
#pragma once
#include "simd.h"

// Who sees which keys; kernels.py holds the same structure.
struct Problem {
    int64_t batch, kv_heads, group, dim, value_dim;
    int64_t q_stride, k_stride, v_stride; // elements from one token or slot to the next
    const int32_t *table;                 // [requests, table_stride] slot of every position
    int64_t table_stride;
    const int64_t *table_rows;  // [batch]
    const int64_t *query_start; // [batch + 1]
    const int64_t *prefix;      // [batch] keys that every query of the request sees
    const int64_t *window;      // [batch] keys behind the prefix, seen as `mask` says
    const uint8_t *mask;        // per request [queries, mask_width], or null: query i sees window keys 0..i
    int64_t mask_stride, mask_width;
    float scale;
};

#define DECLARE(T, NAME)                                                                                        \
    void graft_linear_##NAME(const T *x, int64_t ldx, const T *w, const T *bias, T *out, int64_t ldo, int64_t m, \
                             int64_t n, int64_t k);                                                             \
    void graft_rms_norm_##NAME(const T *x, int64_t ldx, const T *residual, T *sum_out, const T *weight, T *out, \
                               int64_t ldo, int64_t rows, int64_t width, float eps);                            \
    void graft_silu_mul_##NAME(const T *x, int64_t ldx, T *out, int64_t rows, int64_t width);                   \
    void graft_rotate_##NAME(T *q, int64_t q_stride, int64_t q_heads, T *k, int64_t k_stride, int64_t k_heads,  \
                             int64_t dim, int64_t rot, const float *table, const int64_t *positions,            \
                             int64_t tokens, int32_t neox);                                                     \
    void graft_attention_##NAME(const Problem *p, const T *q, const T *k, const T *v, T *out);

extern "C" {
DECLARE(float, fp32)
DECLARE(bf16, bf16)
void graft_linear_narrow(const float *x, int64_t ldx, const float *w, const bf16 *narrow, const float *bias, float *out,
                         int64_t ldo, int64_t m, int64_t n, int64_t k);
void graft_linear_kept(const float *x, int64_t ldx, const bf16 *w, float *out, int64_t ldo, int64_t m, int64_t n,
                       int64_t k);
int64_t graft_best_of_rows(const float *x, int64_t ldx, int64_t rows, int64_t n, int64_t k, int64_t *ids, float *probs,
                           int64_t softmax);
float graft_sum_of_exp(const float *x, int64_t n, float most);
void graft_write_rows(const char *k, int64_t k_stride, char *k_pool, int64_t k_width, const char *v,
                      int64_t v_stride, char *v_pool, int64_t v_width, const int64_t *slots, int64_t tokens);
}
