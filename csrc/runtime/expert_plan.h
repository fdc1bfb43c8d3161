// The rows of each expert in one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

// A choice of experts, as a plan has it.
struct ExpertChoice {
    int num_experts, top_k;
    // The experts whose rows this rank computes: `blocks` has those of no other, and counts experts from the
    // first of these.
    int first_expert = 0, last_expert = 0;
    bool scales_rows = false;  // whether the weights are in the rows, and none in their sum
    // Whether its tokens are those of all engines that share the experts, side by side in the engines' order.
    bool gathers = false;

    // Returns the rows that any choices of `max_tokens` tokens need.
    size_t most_rows(int max_tokens) const;
};

// Rows of expert e lie side by side from a multiple of 16 on. Each choice of experts has a plan of its own, which
// stays as it is to the step's end: a thread that is late asks for a stage's pieces when other threads are stages
// ahead.
struct ExpertPlan : ExpertChoice {
    // Rows of one expert that a piece takes, at most kExpertRows.
    struct Block {
        int expert, row0, num_rows;
    };
    // Of a choice that gathers tokens, filled in by the dispatch of their rows; this engine's own tokens begin at
    // `first_token`.
    int num_tokens = 0, first_token = 0;
    std::vector<float> weights{};  // [T * k], of all engines' choices
    std::vector<const float*> token_rows{};  // [T]: each token's x, until the rows are collected
    std::vector<int32_t> ids;  // [T * k]: the expert of choice t * k + j
    std::vector<int32_t> rows;  // [T * k]: the row that the choice has
    std::vector<int32_t> tokens;  // by row: the token that chose it
    std::vector<int32_t> next;  // [E]: the row that an expert's next choice gets, while rows are given out
    std::vector<Block> blocks;

    ExpertPlan(const ExpertChoice& choice, int max_tokens);
    // Gives each choice of the first `count` tokens its row.
    void order(int count);
    // Returns the rows of choices of one of this engine's own tokens, [k].
    const int32_t* rows_of(int64_t token) const { return rows.data() + (first_token + token) * top_k; }
    // Returns the blocks of a step with this number of own tokens.
    int num_blocks(int own_tokens) const {
        return gathers || own_tokens ? static_cast<int>(blocks.size()) : 0;
    }
};

}  // namespace octavo
