// A run of Llama-like decoder layers in one call: the same kernels in the same order, with nothing in between.
#include <algorithm>
#include <memory>
#include <vector>
#include "kernels.h"

namespace {

struct Layer { // layer_stack.py holds the same structure
    const void *input_norm, *qkv, *qkv_bias, *out_proj, *post_norm, *gate_up, *down;
    void *k_pool, *v_pool;
    void *capture; // where the layer's input goes, or null. [tokens, hidden]
    const void *qkv_narrow, *out_proj_narrow, *gate_up_narrow, *down_narrow; // exact bf16 copies, or null
};

struct Stack { // layer_stack.py holds the same structure
    int64_t layers, hidden, qkv_input, heads, kv_heads, dim, intermediate, rotary_dim;
    const float *cos_sin;
    int64_t neox;
    float eps;
};

struct Fp32 {
    using T = float;
    static void linear(const T *x, int64_t ldx, const void *w, const void *narrow, const void *bias, T *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
        if (narrow)
            graft_linear_narrow(x, ldx, (const T *)w, (const bf16 *)narrow, (const T *)bias, out, ldo, m, n, k);
        else
            graft_linear_fp32(x, ldx, (const T *)w, (const T *)bias, out, ldo, m, n, k);
    }
    static constexpr auto rms_norm = graft_rms_norm_fp32;
    static constexpr auto silu_mul = graft_silu_mul_fp32;
    static constexpr auto rotate = graft_rotate_fp32;
    static constexpr auto attention = graft_attention_fp32;
};

struct Bf16 {
    using T = bf16;
    static void linear(const T *x, int64_t ldx, const void *w, const void *, const void *bias, T *out, int64_t ldo,
                       int64_t m, int64_t n, int64_t k) {
        graft_linear_bf16(x, ldx, (const T *)w, (const T *)bias, out, ldo, m, n, k);
    }
    static constexpr auto rms_norm = graft_rms_norm_bf16;
    static constexpr auto silu_mul = graft_silu_mul_bf16;
    static constexpr auto rotate = graft_rotate_bf16;
    static constexpr auto attention = graft_attention_bf16;
};

// `hidden` [tokens, hidden] enters the first layer; `first_input` [tokens, qkv_input] replaces what the first
// layer's norm would make of it, if not null. `sum_out` gets the sum before the last norm, if not null.
template <class Ops, class T = typename Ops::T>
void run(const Stack &s, const Layer *layers, Problem &problem, const T *hidden, const T *first_input,
         const int64_t *positions, const int64_t *slots, int64_t tokens, const T *last_norm, T *sum_out, T *out) {
    const int64_t q_width = s.heads * s.dim, kv_width = s.kv_heads * s.dim, qkv_width = q_width + 2 * kv_width;
    const int64_t bytes = sizeof(T);
    static thread_local std::vector<T> kept;
    std::unique_ptr<T[]> passing; // a long prefill's room is not kept
    const int64_t sizes[] = {s.hidden, s.hidden, s.hidden,           s.hidden,
                             qkv_width, q_width, 2 * s.intermediate, s.intermediate};
    int64_t total = 0;
    for (int64_t size : sizes) total += size * tokens;
    if (tokens > 512)
        passing.reset(new T[total]);
    else if (int64_t(kept.size()) < total)
        kept.resize(total);
    T *part[8], *at = passing ? passing.get() : kept.data();
    for (int i = 0; i < 8; i++) part[i] = at, at += sizes[i] * tokens;
    T *normed = part[0], *update = part[1], *next = part[2], *spare = part[3];
    T *qkv = part[4], *attended = part[5], *gate_up = part[6], *active = part[7];
    problem.q_stride = qkv_width;
    const T *residual = hidden;
    for (int64_t i = 0; i < s.layers; i++) {
        const Layer &l = layers[i];
        const auto *input_norm = (const T *)l.input_norm;
        const bool given = i == 0 && first_input;
        if (i > 0) {
            Ops::rms_norm(update, s.hidden, residual, next, input_norm, normed, s.hidden, tokens, s.hidden, s.eps);
            residual = next, std::swap(next, spare);
        } else if (!given) {
            Ops::rms_norm(hidden, s.hidden, nullptr, nullptr, input_norm, normed, s.hidden, tokens, s.hidden, s.eps);
        }
        if (l.capture) memcpy(l.capture, residual, tokens * s.hidden * bytes);
        const int64_t width = i == 0 ? s.qkv_input : s.hidden;
        Ops::linear(given ? first_input : normed, width, l.qkv, l.qkv_narrow, l.qkv_bias, qkv, qkv_width,
                    tokens, qkv_width, width);
        T *k = qkv + q_width, *v = k + kv_width;
        Ops::rotate(qkv, qkv_width, s.heads, k, qkv_width, s.kv_heads, s.dim, s.rotary_dim, s.cos_sin, positions,
                    tokens, int32_t(s.neox));
        graft_write_rows((char *)k, qkv_width * bytes, (char *)l.k_pool, kv_width * bytes, (char *)v,
                         qkv_width * bytes, (char *)l.v_pool, kv_width * bytes, slots, tokens);
        Ops::attention(&problem, qkv, (const T *)l.k_pool, (const T *)l.v_pool, attended);
        Ops::linear(attended, q_width, l.out_proj, l.out_proj_narrow, nullptr, update, s.hidden, tokens, s.hidden,
                    q_width);
        Ops::rms_norm(update, s.hidden, residual, next, (const T *)l.post_norm, normed, s.hidden, tokens, s.hidden,
                      s.eps);
        residual = next, std::swap(next, spare);
        Ops::linear(normed, s.hidden, l.gate_up, l.gate_up_narrow, nullptr, gate_up, 2 * s.intermediate, tokens,
                    2 * s.intermediate, s.hidden);
        Ops::silu_mul(gate_up, 2 * s.intermediate, active, tokens, s.intermediate);
        Ops::linear(active, s.intermediate, l.down, l.down_narrow, nullptr, update, s.hidden, tokens, s.hidden,
                    s.intermediate);
    }
    Ops::rms_norm(update, s.hidden, residual, sum_out, last_norm, out, s.hidden, tokens, s.hidden, s.eps);
}

} // namespace

extern "C" {

void graft_layers_fp32(const Stack *s, const Layer *layers, Problem *problem, const float *hidden,
                       const float *first_input, const int64_t *positions, const int64_t *slots, int64_t tokens,
                       const float *last_norm, float *sum_out, float *out) {
    run<Fp32>(*s, layers, *problem, hidden, first_input, positions, slots, tokens, last_norm, sum_out, out);
}

void graft_layers_bf16(const Stack *s, const Layer *layers, Problem *problem, const bf16 *hidden,
                       const bf16 *first_input, const int64_t *positions, const int64_t *slots, int64_t tokens,
                       const bf16 *last_norm, bf16 *sum_out, bf16 *out) {
    run<Bf16>(*s, layers, *problem, hidden, first_input, positions, slots, tokens, last_norm, sum_out, out);
}

}
