// Reads and writes of the successor table, one request after the other; what they give is what
// `cuda_graph/retrieve.py` and `cuda_graph/table_update.py` give.
#include <algorithm>
#include <cmath>
#include <vector>
#include "kernels.h"

namespace {

constexpr uint64_t MULTIPLIER = uint64_t(-7046029254386353131); // successor_table.HASH_MULTIPLIER
constexpr int HASH_SHIFT = 36, TOKEN_FIELD = 21;
constexpr int64_t TOKEN_MASK = (int64_t(1) << TOKEN_FIELD) - 1;

struct Table { // tree_kernels.py holds the same structure
    int32_t *tokens;  // [rows, k]
    uint16_t *probs;  // [rows, k] fp16
    int64_t *tags;    // [num_tables * context_rows + 1]
    int64_t rows, k, vocab_size, num_tables, context_rows, context_mask;

    bool knows(int64_t token) const { return token >= 0 && token < vocab_size; }
    bool holds(int64_t index) const { return index >= 0 && index < num_tables; }
    int64_t next_context(int64_t context, int64_t token) const {
        return ((context << TOKEN_FIELD) | (token & TOKEN_MASK)) & context_mask;
    }
    static int64_t tag(int64_t context, int64_t token) { return (context << TOKEN_FIELD) + token; }
    int64_t place(int64_t index, int64_t tag) const {
        const int64_t hashed = (int64_t(uint64_t(tag) * MULTIPLIER) >> HASH_SHIFT) & (context_rows - 1);
        return index * context_rows + hashed;
    }
};

float half_to_float(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
    if (exponent == 31) return NAN; // infinities count like NaN here
    return h >> 15 ? -size : size;
}

struct Claim {
    int64_t row, priority, node;
    bool operator<(const Claim &other) const {
        return row != other.row ? row < other.row : priority < other.priority;
    }
};

// Calls `take` for the best claim on every row.
template <class F> void settle(std::vector<Claim> &claims, F take) {
    std::sort(claims.begin(), claims.end());
    for (size_t i = 0; i < claims.size(); i++)
        if (i == 0 || claims[i].row != claims[i - 1].row) take(claims[i]);
}

} // namespace

extern "C" {

// `fathers` and `ranks` [nodes] are the template's; tokens and probs [batch, nodes].
void graft_retrieve(const Table *t, const int64_t *fathers, const int64_t *ranks, int64_t nodes, int64_t batch,
                    const int64_t *table_index, const int64_t *roots, const int64_t *contexts, int64_t *tokens,
                    float *probs) {
    std::vector<int64_t> context(nodes);
    const int64_t empty_row = t->rows - 2;
    for (int64_t b = 0; b < batch; b++) {
        const bool rooted = t->holds(table_index[b]) && t->knows(roots[b]);
        const int64_t index = std::clamp<int64_t>(table_index[b], 0, t->num_tables - 1);
        int64_t *token = tokens + b * nodes;
        float *prob = probs + b * nodes;
        for (int64_t i = 0; i < nodes; i++) {
            const int64_t father = fathers[i];
            const int64_t last = father < 0 ? (rooted ? roots[b] : -1) : token[father];
            const int64_t before = father < 0 ? contexts[b] : context[father];
            int64_t row = empty_row;
            if (last >= 0) {
                row = index * t->vocab_size + last;
                if (t->context_rows) {
                    const int64_t tag = Table::tag(before, last), place = t->place(index, tag);
                    if (t->tags[place] == tag) row = t->num_tables * t->vocab_size + place;
                }
            }
            context[i] = t->next_context(before, last);
            const int64_t at = row * t->k + ranks[i];
            token[i] = t->knows(t->tokens[at]) ? t->tokens[at] : -1;
            const float step = half_to_float(t->probs[at]);
            prob[i] = (father < 0 ? 1.0f : prob[father]) * (step > 0 ? std::min(step, 1.0f) : 0.0f);
            if (token[i] < 0) prob[i] = 0.0f;
        }
    }
}

// ids and probs [batch * slots, k] are the target's best after every node.
void graft_write_successors(const Table *t, int64_t batch, int64_t slots, const int64_t *table_index,
                            const int64_t *tokens, const int64_t *parents, const int64_t *depths,
                            const int64_t *contexts, const uint8_t *accepted, const int32_t *ids,
                            const uint16_t *probs) {
    std::vector<Claim> rows, places;
    std::vector<int64_t> tags(batch * slots);
    for (int64_t b = 0; b < batch; b++) {
        if (!t->holds(table_index[b])) continue;
        const int64_t at = b * slots;
        auto named = [&](int64_t s) { return t->knows(tokens[at + s]) ? tokens[at + s] & TOKEN_MASK : TOKEN_MASK; };
        auto above = [&](int64_t s) { return std::clamp<int64_t>(parents[at + s], 0, slots - 1); };
        auto nearest = [&](int64_t s) { return s == 0 ? contexts[b] & TOKEN_MASK : named(above(s)); };
        for (int64_t s = 0; s < slots; s++) {
            const int64_t node = at + s, token = tokens[node];
            if ((s > 0 && parents[node] < 0) || !t->knows(token)) continue;
            const int64_t priority = (int64_t(!accepted[node]) << 48) + (depths[node] << 32) + node;
            rows.push_back({table_index[b] * t->vocab_size + token, priority, node});
            if (!t->context_rows) continue;
            const int64_t before =
                s == 0 ? contexts[b] : ((nearest(above(s)) << TOKEN_FIELD) | nearest(s)) & t->context_mask;
            if (before < 0) continue;
            tags[node] = Table::tag(before, token);
            places.push_back({t->place(table_index[b], tags[node]), priority, node});
        }
    }
    auto write = [&](int64_t row, int64_t node) {
        memcpy(t->tokens + row * t->k, ids + node * t->k, t->k * sizeof(int32_t));
        memcpy(t->probs + row * t->k, probs + node * t->k, t->k * sizeof(uint16_t));
    };
    settle(rows, [&](const Claim &c) { write(c.row, c.node); });
    settle(places, [&](const Claim &c) {
        write(t->num_tables * t->vocab_size + c.row, c.node);
        t->tags[c.row] = tags[c.node];
    });
}

}
