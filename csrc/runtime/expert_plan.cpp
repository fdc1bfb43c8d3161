#include "expert_plan.h"

#include <algorithm>

#include "../plan/op.h"

namespace octavo {

ExpertPlan::ExpertPlan(const ExpertChoice& choice, int max_tokens)
    : ExpertChoice(choice),
      ids(static_cast<size_t>(max_tokens) * top_k),
      rows(static_cast<size_t>(max_tokens) * top_k),
      tokens(max_rows(max_tokens)),
      next(num_experts) {
    blocks.reserve(num_experts + tokens.size() / kExpertRows);
    if (!gathers) return;
    weights.resize(ids.size());
    token_rows.resize(max_tokens);
}

// Each expert that is chosen leaves up to 15 rows of its last block unused.
size_t ExpertChoice::max_rows(int max_tokens) const {
    const size_t chosen = static_cast<size_t>(max_tokens) * top_k;
    return (chosen + std::min(static_cast<size_t>(num_experts), chosen) * (kTile - 1) + kTile - 1) / kTile *
           kTile;
}

void ExpertPlan::assign_rows(int count) {
    const int chosen = count * top_k;
    std::fill(next.begin(), next.end(), 0);
    for (int i = 0; i < chosen; i++) next[ids[i]]++;
    blocks.clear();
    int row = 0;
    for (int e = 0; e < num_experts; e++) {
        const int num_rows = next[e];
        const bool is_own = e >= first_expert && e < last_expert;
        for (int first = 0; is_own && first < num_rows; first += kExpertRows)
            blocks.push_back({e - first_expert, row + first, std::min(kExpertRows, num_rows - first)});
        next[e] = row;
        row += (num_rows + kTile - 1) / kTile * kTile;
    }
    for (int i = 0; i < chosen; i++) {
        rows[i] = next[ids[i]]++;
        tokens[rows[i]] = i / top_k;
    }
}

}  // namespace octavo
