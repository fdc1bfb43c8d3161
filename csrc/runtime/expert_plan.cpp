#include "expert_plan.h"

#include <algorithm>

#include "../plan/stage.h"

namespace octavo {

ExpertPlan::ExpertPlan(const ExpertChoice& choice, int max_tokens)
    : ExpertChoice(choice),
      ids(static_cast<size_t>(max_tokens) * top_k),
      rows(static_cast<size_t>(max_tokens) * top_k),
      tokens(most_rows(max_tokens)),
      next(num_experts) {
    blocks.reserve(num_experts + tokens.size() / kExpertRows);
    if (!gathers) return;
    weights.resize(ids.size());
    token_rows.resize(max_tokens);
}

// Each expert that is chosen at all leaves up to 15 rows unused.
size_t ExpertChoice::most_rows(int max_tokens) const {
    const size_t chosen = static_cast<size_t>(max_tokens) * top_k;
    return (chosen + std::min(static_cast<size_t>(num_experts), chosen) * (kTile - 1) + kTile - 1) / kTile *
           kTile;
}

void ExpertPlan::order(int count) {
    const int chosen = count * top_k;
    std::fill(next.begin(), next.end(), 0);
    for (int i = 0; i < chosen; i++) next[ids[i]]++;
    blocks.clear();
    int row = 0;
    for (int e = 0; e < num_experts; e++) {
        const int rows_of_it = next[e];
        const bool is_own = e >= first_expert && e < last_expert;
        for (int first = 0; is_own && first < rows_of_it; first += kExpertRows)
            blocks.push_back({e - first_expert, row + first, std::min(kExpertRows, rows_of_it - first)});
        next[e] = row;
        row += (rows_of_it + kTile - 1) / kTile * kTile;
    }
    for (int i = 0; i < chosen; i++) {
        rows[i] = next[ids[i]]++;
        tokens[rows[i]] = i / top_k;
    }
}

}  // namespace octavo
