// The small operations on draft trees, one request after the other: what `cuda_graph/` does with a few dozen
// tensor calls each costs microseconds here. Every function gives what its reference there gives.
#include <algorithm>
#include <cmath>
#include <vector>
#include "kernels.h"

namespace {

constexpr int64_t FROM_DRAFT = 1, FROM_TABLE = 2;
constexpr int64_t TOKEN_BITS = 26, DEPTH_BITS = 5;

float between_0_and_1(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; } // NaN counts as 0

} // namespace

extern "C" {

// value_rule.value_weights: x and y [depths, knots] are one source's maps.
void graft_value_weights(const float *x, const float *y, int64_t map_depths, int64_t knots, const int64_t *depths,
                         const float *probs, const int64_t *tokens, int64_t batch, int64_t nodes, int64_t *out) {
    for (int64_t i = 0; i < batch * nodes; i++) {
        if (tokens[i] < 0) {
            out[i] = -1;
            continue;
        }
        const int64_t row = std::clamp<int64_t>(depths[i % nodes] - 1, 0, map_depths - 1) * knots;
        const float p = std::isnan(probs[i]) ? 0.0f : std::isinf(probs[i]) ? float(probs[i] > 0) : probs[i];
        int64_t above = 0;
        for (int64_t j = 1; j < knots - 1; j++) above += p >= x[row + j];
        const float x0 = x[row + above], x1 = x[row + above + 1], y0 = y[row + above], y1 = y[row + above + 1];
        const float share = std::clamp((p - x0) / (x1 - x0), 0.0f, 1.0f);
        float rise = share * (y1 - y0);
        asm("" : "+x"(rise)); // rounded by itself, as the reference rounds it
        const float value = between_0_and_1(y0 + rise);
        int32_t bits;
        memcpy(&bits, &value, 4);
        out[i] = bits;
    }
}

// merge.merge_trie: `bounds` [levels, 3] as in TrieLayout; `order`, `shift` and `fathers` are its tensors.
void graft_merge_trie(const int64_t *bounds, int64_t levels, const int64_t *order, const int64_t *shift,
                      const int64_t *fathers, int64_t pool, int64_t retrieved, int64_t batch,
                      const int64_t *draft_tokens, const int64_t *draft_parents, const int64_t *draft_weights,
                      const int64_t *retrieved_tokens, const int64_t *retrieved_weights, int64_t *tokens,
                      int64_t *parents, int64_t *weights, int64_t *sources) {
    const int64_t nodes = pool + retrieved;
    std::vector<int64_t> stands_for(nodes), merged(nodes);
    for (int64_t b = 0; b < batch; b++) {
        int64_t *token = tokens + b * nodes, *parent = parents + b * nodes, *weight = weights + b * nodes;
        int64_t *source = sources + b * nodes, above = 0;
        for (int64_t level = 0; level < levels; level++) {
            const int64_t start = bounds[3 * level], end = bounds[3 * level + 2];
            for (int64_t i = start; i < end; i++) {
                const int64_t from = order[i];
                const bool drafted = from < pool;
                token[i] = drafted ? draft_tokens[b * pool + from] : retrieved_tokens[b * retrieved + from - pool];
                int64_t own = drafted ? draft_weights[b * pool + from] : retrieved_weights[b * retrieved + from - pool];
                own = token[i] < 0 ? -1 : std::max<int64_t>(own, -1);
                if (level == 0) {
                    parent[i] = -1;
                } else {
                    int64_t link = drafted ? draft_parents[b * pool + from] + shift[from] : fathers[from - pool];
                    link = std::clamp<int64_t>(link, above, start - 1); // garbage stays within the level above
                    parent[i] = stands_for[link];
                    own = std::min(own, merged[link]);
                }
                source[i] = own < 0 ? 0 : drafted ? FROM_DRAFT : FROM_TABLE;
                merged[i] = own;
                stands_for[i] = i;
                if (own < 0) continue;
                for (int64_t j = start; j < i; j++) // the first of equals stands for all
                    if (merged[j] >= 0 && token[j] == token[i] && parent[j] == parent[i]) {
                        stands_for[i] = j;
                        source[j] |= source[i] & FROM_TABLE;
                        merged[j] = std::max(merged[j], own);
                        break;
                    }
            }
            for (int64_t i = start; i < end; i++) {
                merged[i] = merged[stands_for[i]];
                weight[i] = stands_for[i] == i ? merged[i] : -1;
                if (stands_for[i] != i) source[i] = 0;
            }
            above = start;
        }
    }
}

// select.select_tree: outputs are [batch, slots].
void graft_select_tree(const int64_t *tokens, const int64_t *parents, const int64_t *weights, const int64_t *sources,
                       const int64_t *depths, int64_t batch, int64_t nodes, const int64_t *roots, int64_t slots,
                       int64_t *out_tokens, int64_t *out_parents, int64_t *out_depths, int64_t *out_sources,
                       int64_t *out_weights) {
    const int64_t kept = std::min(slots - 1, nodes);
    std::vector<int64_t> keys(nodes), best(nodes), slot_of(nodes + 1);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t at = b * nodes, to = b * slots;
        for (int64_t i = 0; i < nodes; i++) {
            const int64_t deep = (int64_t(1) << DEPTH_BITS) - 1 - depths[i], late = (int64_t(1) << TOKEN_BITS) - 1 - tokens[at + i];
            const int64_t w = weights[at + i];
            keys[i] = w < 0 ? -1 : int64_t((uint64_t(w) << (DEPTH_BITS + TOKEN_BITS)) + uint64_t((deep << TOKEN_BITS) + late));
            best[i] = i;
        }
        std::partial_sort(best.begin(), best.begin() + kept, best.end(),
                          [&](int64_t i, int64_t j) { return keys[i] != keys[j] ? keys[i] > keys[j] : i < j; });
        std::fill(slot_of.begin(), slot_of.end(), 0);
        for (int64_t s = 0; s < kept; s++) slot_of[best[s] + 1] = s + 1;
        for (int64_t s = 0; s < slots; s++) {
            const int64_t node = s > 0 && s <= kept ? best[s - 1] : -1;
            const bool there = node >= 0 && keys[node] >= 0;
            out_tokens[to + s] = s == 0 ? roots[b] : there ? tokens[at + node] : 0;
            out_parents[to + s] = there ? slot_of[parents[at + node] + 1] : -1;
            out_depths[to + s] = there ? depths[node] : 0;
            out_sources[to + s] = there ? sources[at + node] : 0;
            out_weights[to + s] = there ? weights[at + node] : -1;
        }
    }
}

// tree_links.tree_links in mode QLEN_ONLY: mask [batch, slots, slots], the others [batch, slots].
void graft_tree_links(const int64_t *parents, const int64_t *seq_lens, int64_t batch, int64_t slots, uint8_t *mask,
                      int64_t *positions, int64_t *index, int64_t *next_token, int64_t *next_sibling) {
    for (int64_t b = 0; b < batch; b++) {
        const int64_t *parent = parents + b * slots, at = b * slots;
        for (int64_t s = 0; s < slots; s++) {
            uint8_t *row = mask + (at + s) * slots;
            memset(row, 0, slots);
            int64_t depth = -1;
            for (int64_t up = s, hops = 0; hops <= slots; hops++) { // an empty slot hangs under the root
                if (!row[up]) row[up] = 1, depth++;
                if (up == 0) break;
                up = std::clamp<int64_t>(parent[up], 0, slots - 1);
            }
            positions[at + s] = seq_lens[b] + depth;
            index[at + s] = at + s;
            next_token[at + s] = next_sibling[at + s] = -1;
        }
        for (int64_t s = slots - 1; s > 0; s--) {
            if (parent[s] >= 0 && parent[s] < slots) next_token[at + parent[s]] = s;
            for (int64_t later = s + 1; later < slots && parent[s] >= 0; later++)
                if (parent[later] == parent[s]) {
                    next_sibling[at + s] = later;
                    break;
                }
        }
    }
}

// coupled.parents_from_links: parents [batch, slots].
void graft_parents_from_links(const int64_t *next_token, const int64_t *next_sibling, int64_t batch, int64_t slots,
                              int64_t *parents) {
    std::fill_n(parents, batch * slots, -1);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t s = 0; s < slots; s++) {
            const int64_t at = b * slots;
            int64_t child = next_token[at + s];
            for (int64_t hops = 0; hops < slots && child >= 0 && child < slots; hops++) {
                parents[at + child] = std::max(parents[at + child], s);
                child = next_sibling[at + child];
            }
        }
}

// coupled.walk_accepted: predicts [batch, slots] int32, accept_index [batch, max_path] int32.
void graft_walk_accepted(const int64_t *tokens, const int64_t *parents, const int64_t *drawn, int64_t batch,
                         int64_t slots, int64_t max_path, int32_t *predicts, int32_t *accept_index, int32_t *correct,
                         int64_t *bonus) {
    std::fill_n(predicts, batch * slots, 0);
    std::fill_n(accept_index, batch * max_path, -1);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t at = b * slots;
        int64_t current = 0, length = 0;
        while (true) {
            accept_index[b * max_path + length++] = int32_t(at + current);
            predicts[at + current] = int32_t(drawn[at + current]);
            if (length == max_path) break;
            int64_t child = 1;
            while (child < slots && !(parents[at + child] == current && tokens[at + child] == drawn[at + current])) child++;
            if (child == slots) break;
            current = child;
        }
        correct[b] = int32_t(length - 1);
        bonus[b] = drawn[at + current];
    }
}

}
