// The small operations between matrix products, one pass over memory each.
#include <cmath>
#include "kernels.h"

namespace {

constexpr int64_t WORTH_THREADS = 1 << 15; // elements under which waking the other threads costs more

// residual += x; out = residual / rms(residual) * weight. `sum_out` null: no residual, x is normalised.
template <class T>
void rms_norm(const T *x, int64_t ldx, const T *residual, T *sum_out, const T *weight, T *out, int64_t ldo,
              int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) {
        const T *xr = x + r * ldx;
        vf squares = vf{};
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t n = width - i;
            vf v = n >= LANES ? load(xr + i) : load_part(xr + i, n);
            if (residual) v += n >= LANES ? load(residual + r * width + i) : load_part(residual + r * width + i, n);
            squares += v * v;
            if (sum_out) {
                T *s = sum_out + r * width + i;
                if (n >= LANES) store(s, v); else store_part(s, v, n);
            }
        }
        const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps);
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t n = width - i;
            vf v = n >= LANES ? load(xr + i) : load_part(xr + i, n);
            if (residual) v += n >= LANES ? load(residual + r * width + i) : load_part(residual + r * width + i, n);
            v = v * scale * (n >= LANES ? load(weight + i) : load_part(weight + i, n));
            if (n >= LANES) store(out + r * ldo + i, v); else store_part(out + r * ldo + i, v, n);
        }
    }
}

// out = silu(x[:, :width]) * x[:, width:]
template <class T> void silu_mul(const T *x, int64_t ldx, T *out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = x + r * ldx, *up = gate + width;
        T *o = out + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            vf g = load(gate + i);
            store(o + i, g / (1.0f + vexp(-g)) * load(up + i));
        }
        if (const int64_t n = width - i) {
            vf g = load_part(gate + i, n);
            store_part(o + i, g / (1.0f + vexp(-g)) * load_part(up + i, n), n);
        }
    }
}

// Turn the first `rot` elements of each head by its token's angle, in place. `table` [positions, rot]: cos | sin.
template <class T>
void rotate(T *x, int64_t stride, int64_t heads, int64_t dim, int64_t rot, const float *table,
            const int64_t *positions, int64_t tokens, bool neox) {
    const int64_t half = rot / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * dim > WORTH_THREADS)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cos = table + positions[t] * rot, *sin = cos + half;
        for (int64_t h = 0; h < heads; h++) {
            T *v = x + t * stride + h * dim;
            int64_t i = 0;
            if (neox)
                for (; i + LANES <= half; i += LANES) {
                    vf a = load(v + i), b = load(v + half + i), c = load(cos + i), s = load(sin + i);
                    store(v + i, a * c - b * s);
                    store(v + half + i, b * c + a * s);
                }
            for (; i < half; i++) {
                T *first = neox ? v + i : v + 2 * i, *second = neox ? v + half + i : v + 2 * i + 1;
                const float a = to_float(*first), b = to_float(*second);
                store_one(first, a * cos[i] - b * sin[i]);
                store_one(second, b * cos[i] + a * sin[i]);
            }
        }
    }
}

} // namespace

#define FOR_TYPE(T, NAME)                                                                                       \
    void graft_rms_norm_##NAME(const T *x, int64_t ldx, const T *residual, T *sum_out, const T *weight, T *out, \
                               int64_t ldo, int64_t rows, int64_t width, float eps) {                           \
        rms_norm(x, ldx, residual, sum_out, weight, out, ldo, rows, width, eps);                                \
    }                                                                                                           \
    void graft_silu_mul_##NAME(const T *x, int64_t ldx, T *out, int64_t rows, int64_t width) {                  \
        silu_mul(x, ldx, out, rows, width);                                                                     \
    }                                                                                                           \
    void graft_rotate_##NAME(T *q, int64_t q_stride, int64_t q_heads, T *k, int64_t k_stride, int64_t k_heads,  \
                             int64_t dim, int64_t rot, const float *table, const int64_t *positions,            \
                             int64_t tokens, int32_t neox) {                                                    \
        rotate(q, q_stride, q_heads, dim, rot, table, positions, tokens, neox);                                 \
        rotate(k, k_stride, k_heads, dim, rot, table, positions, tokens, neox);                                 \
    }

extern "C" {
FOR_TYPE(float, fp32)
FOR_TYPE(bf16, bf16)
}
