// A block of SpecBlock's draft in one call, what it proposes in another, and the verify tree in a third.
//
// specblock/model.py, drafting.py and tree.py have the same as torch, which the tests hold this against.
#include <algorithm>
#include <cmath>
#include <vector>
#include "kernels.h"

namespace {

struct Weight { // block_draft.py holds the same structures
    const void *data;
    int64_t narrow; // bf16 instead of fp32
};

struct BlockLayer {
    const float *input_norm, *post_norm;
    Weight qkv, out_proj, gate_up, down, shift; // shift [hidden, 2 * hidden] into this layer, null for the first
    float *k_pool, *v_pool;                     // [slots * size, kv_heads, dim]
};

struct BlockShape {
    int64_t layers, hidden, heads, kv_heads, dim, intermediate, size, features, vocab, rank_width, top, classes, shifts, broadcasts;
    const float *cos_sin; // [positions, dim]: cosines, then sines
    const float *condition_norm, *token_norm, *last_norm;
    const float *own; // [size, hidden] what a slot's query brings
    Weight condition, fuse, head, rank_in, rank_out;
    float eps;
};

void multiply(const float *x, int64_t ldx, const Weight &w, int64_t first_row, float *out, int64_t ldo, int64_t m,
              int64_t n, int64_t k) {
    if (m == 0) return;
    if (w.narrow)
        graft_linear_kept(x, ldx, (const bf16 *)w.data + first_row * k, out, ldo, m, n, k);
    else
        graft_linear_fp32(x, ldx, (const float *)w.data + first_row * k, nullptr, out, ldo, m, n, k);
}

void norm(const float *x, const float *weight, float *out, int64_t ldo, int64_t rows, int64_t width, float eps) {
    graft_rms_norm_fp32(x, width, nullptr, nullptr, weight, out, ldo, rows, width, eps);
}

// Room for one call, kept from call to call.
struct Room {
    std::vector<float> data;
    size_t used = 0;
    void begin(size_t total) {
        used = 0;
        if (data.size() < total) data.resize(total);
    }
    float *take(size_t size) {
        float *at = data.data() + used;
        used += size;
        return at;
    }
};

thread_local Room room;

} // namespace

extern "C" {

// One block of `rows` rows. `condition` [rows, features] if `first`, else [rows, hidden]; `embeds` [rows, hidden];
// `positions`, `slots` [rows * size] of every slot: rotary position, place in the pools. In the last layer only the
// rows `asked` [count] attend and go on; `last` is their problem. out [count * size, hidden] before the final norm.
void graft_block(const BlockShape *shape, const BlockLayer *layers, Problem *all, Problem *last, const float *condition,
                 int64_t first, const float *embeds, int64_t rows, const int64_t *positions, const int64_t *slots,
                 const int64_t *asked, int64_t count, float *out) {
    const BlockShape &s = *shape;
    const int64_t h = s.hidden, size = s.size, tokens = rows * size, wide = s.heads * s.dim, narrow = s.kv_heads * s.dim;
    const int64_t qkv_width = wide + 2 * narrow, kept = count * size;
    room.begin(rows * 4 * h + tokens * (6 * h + qkv_width + wide + 3 * s.intermediate));
    float *projected = room.take(rows * h), *entry = room.take(rows * 2 * h), *shared = room.take(rows * h);
    float *x = room.take(tokens * h), *normed = room.take(tokens * h), *pair = room.take(tokens * 2 * h);
    float *update = room.take(tokens * h), *sum = room.take(tokens * h), *qkv = room.take(tokens * qkv_width);
    float *attended = room.take(tokens * wide), *gate_up = room.take(tokens * 2 * s.intermediate);
    float *active = room.take(tokens * s.intermediate);

    const float *cond = condition;
    if (first) {
        multiply(condition, s.features, s.condition, 0, projected, h, rows, h, s.features);
        cond = projected;
    }
    norm(cond, s.condition_norm, entry, 2 * h, rows, h, s.eps);
    norm(embeds, s.token_norm, entry + h, 2 * h, rows, h, s.eps);
    multiply(entry, 2 * h, s.fuse, 0, shared, h, rows, h, 2 * h);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < size; k++)
            for (int64_t d = 0; d < h; d++)
                x[(r * size + k) * h + d] = (k == 0 || s.broadcasts ? shared[r * h + d] : 0.0f) + s.own[k * h + d];

    for (int64_t i = 0; i < s.layers; i++) {
        const BlockLayer &l = layers[i];
        const bool ends = i == s.layers - 1;
        if (l.shift.data) {
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < size; k++) {
                    const int64_t t = r * size + k;
                    memcpy(pair + t * 2 * h, x + t * h, h * sizeof(float));
                    memcpy(pair + t * 2 * h + h, x + (k && s.shifts ? t - 1 : t) * h, h * sizeof(float));
                }
            multiply(pair, 2 * h, l.shift, 0, x, h, tokens, h, 2 * h);
        }
        norm(x, l.input_norm, normed, h, tokens, h, s.eps);
        float *q = qkv, *k = qkv + wide, *v = k + narrow;
        int64_t live = tokens, q_stride = qkv_width;
        if (!ends) {
            multiply(normed, h, l.qkv, 0, qkv, qkv_width, tokens, qkv_width, h);
            graft_rotate_fp32(q, qkv_width, s.heads, k, qkv_width, s.kv_heads, s.dim, s.dim, s.cos_sin, positions,
                              tokens, 1);
        } else {
            multiply(normed, h, l.qkv, wide, k, qkv_width, tokens, 2 * narrow, h);
            graft_rotate_fp32(q, qkv_width, 0, k, qkv_width, s.kv_heads, s.dim, s.dim, s.cos_sin, positions, tokens, 1);
        }
        graft_write_rows((char *)k, qkv_width * 4, (char *)l.k_pool, narrow * 4, (char *)v, qkv_width * 4,
                         (char *)l.v_pool, narrow * 4, slots, tokens);
        if (ends) { // from here on only for those who are asked
            live = kept;
            if (live == 0) return;
            static thread_local std::vector<int64_t> where;
            where.resize(live);
            for (int64_t c = 0; c < count; c++)
                for (int64_t slot = 0; slot < size; slot++) {
                    const int64_t from = asked[c] * size + slot, to = c * size + slot; // to <= from: rows ascend
                    if (from != to) {
                        memcpy(x + to * h, x + from * h, h * sizeof(float));
                        memcpy(normed + to * h, normed + from * h, h * sizeof(float));
                    }
                    where[to] = positions[from];
                }
            q = attended, q_stride = wide; // the place is free until the attention writes to `update`
            multiply(normed, h, l.qkv, 0, q, wide, live, wide, h);
            graft_rotate_fp32(q, wide, s.heads, q, wide, 0, s.dim, s.dim, s.cos_sin, where.data(), live, 1);
        }
        Problem &problem = ends ? *last : *all;
        problem.q_stride = q_stride;
        float *gathered = ends ? qkv : attended;
        graft_attention_fp32(&problem, q, l.k_pool, l.v_pool, gathered);
        multiply(gathered, wide, l.out_proj, 0, update, h, live, h, wide);
        graft_rms_norm_fp32(update, h, x, sum, l.post_norm, normed, h, live, h, s.eps);
        multiply(normed, h, l.gate_up, 0, gate_up, 2 * s.intermediate, live, 2 * s.intermediate, h);
        graft_silu_mul_fp32(gate_up, 2 * s.intermediate, active, live, s.intermediate);
        multiply(active, s.intermediate, l.down, 0, update, h, live, h, s.intermediate);
        float *to = ends ? out : x;
        for (int64_t d = 0; d < live * h; d++) to[d] = sum[d] + update[d];
    }
}

// model.SpecBlockDraft.propose: hidden [rows, hidden]; ids, log_probs [rows, width], classes [rows].
void graft_block_proposals(const BlockShape *shape, const float *hidden, int64_t rows, int64_t width, int64_t *ids,
                           float *log_probs, int64_t *classes) {
    const BlockShape &s = *shape;
    const int64_t h = s.hidden, in = h + 15, k = std::max(width, s.top);
    room.begin(rows * (in + s.vocab + s.rank_width + s.classes));
    float *found = room.take(rows * in), *logits = room.take(rows * s.vocab);
    float *inner = room.take(rows * s.rank_width), *scores = room.take(rows * s.classes);
    static thread_local std::vector<int64_t> best;
    static thread_local std::vector<float> value;
    best.resize(rows * k), value.resize(rows * k);
    norm(hidden, s.last_norm, found, in, rows, h, s.eps);
    multiply(found, in, s.head, 0, logits, s.vocab, rows, s.vocab, h);
    graft_best_of_rows(logits, s.vocab, rows, s.vocab, k, best.data(), value.data(), 0);
    for (int64_t r = 0; r < rows; r++) {
        const float *top = &value[r * k];
        float sum = 0, entropy = 0;
        const float all = top[0] + std::log(graft_sum_of_exp(logits + r * s.vocab, s.vocab, top[0]));
        for (int64_t j = 0; j < width; j++) {
            ids[r * width + j] = best[r * k + j];
            log_probs[r * width + j] = top[j] - all;
        }
        float *feature = found + r * in + h;
        for (int64_t j = 0; j < s.top; j++) sum += std::exp(top[j] - top[0]);
        const float norm20 = top[0] + std::log(sum);
        for (int64_t j = 0; j < s.top; j++) {
            const float log_prob = top[j] - norm20;
            if (j < 10) feature[j] = log_prob;
            entropy -= std::exp(log_prob) * log_prob;
        }
        feature[10] = top[0] - top[1], feature[11] = top[0] - top[2], feature[12] = top[0] - top[4];
        feature[13] = std::exp(top[0] - norm20), feature[14] = entropy;
    }
    multiply(found, in, s.rank_in, 0, inner, s.rank_width, rows, s.rank_width, in);
    for (int64_t i = 0; i < rows * s.rank_width; i++) inner[i] = inner[i] / (1 + std::exp(-inner[i]));
    multiply(inner, s.rank_width, s.rank_out, 0, scores, s.classes, rows, s.classes, s.rank_width);
    for (int64_t r = 0; r < rows; r++) {
        const float *score = scores + r * s.classes;
        classes[r] = std::max_element(score, score + s.classes) - score;
    }
}

// tree.best_tree: tokens, parents, scores [batch, total]; out_tokens, out_parents [batch, slots].
void graft_best_tree(const int64_t *tokens, const int64_t *parents, const float *scores, const int64_t *roots,
                     int64_t batch, int64_t total, int64_t considered, int64_t slots, int64_t *out_tokens,
                     int64_t *out_parents) {
    std::vector<int64_t> order(total), place(total), stands_for(considered), above(considered), slot(considered);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t *token = tokens + b * total, *parent = parents + b * total;
        const float *score = scores + b * total;
        for (int64_t i = 0; i < total; i++) order[i] = i, place[i] = -1;
        // Not a number sorts first, as torch has it: whatever the scores are, this is an order.
        auto before = [&](int64_t i, int64_t j) {
            const float a = score[i], c = score[j];
            if (std::isnan(a) != std::isnan(c)) return std::isnan(a);
            return a != c && !std::isnan(a) ? a > c : i < j;
        };
        std::partial_sort(order.begin(), order.begin() + considered, order.end(), before);
        for (int64_t i = 0; i < considered; i++) place[order[i]] = i;
        int64_t *token_out = out_tokens + b * slots, *parent_out = out_parents + b * slots;
        std::fill_n(token_out, slots, 0);
        std::fill_n(parent_out, slots, -1);
        token_out[0] = roots[b];
        int64_t used = 0;
        for (int64_t i = 0; i < considered; i++) {
            const int64_t node = order[i];
            above[i] = parent[node] < 0 ? -1 : place[parent[node]];
            stands_for[i] = i;
            if (!(score[node] > -INFINITY)) continue;
            const int64_t father = above[i] < 0 ? -1 : stands_for[above[i]];
            for (int64_t j = 0; j < i; j++) // the first with the same path stands for all
                if (stands_for[j] == j && token[order[j]] == token[node] && score[order[j]] > -INFINITY &&
                    (above[j] < 0 ? -1 : stands_for[above[j]]) == father) {
                    stands_for[i] = j;
                    break;
                }
            if (stands_for[i] != i || ++used >= slots) continue;
            slot[i] = used;
            token_out[used] = token[node];
            parent_out[used] = father < 0 ? 0 : slot[father];
        }
    }
}

}
