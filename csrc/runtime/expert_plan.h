// The rows of each expert in one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

// A choice of experts (one routing op of the plan).
struct ExpertChoice {
    int num_experts, top_k;
    // The experts whose rows this rank computes. `blocks` has only those, and counts experts from
    // first_expert.
    int first_expert = 0, last_expert = 0;
    bool scales_rows = false;  // whether the weights are applied to the rows instead of their sum
    // Whether its tokens are those of all engines that share the experts, in the engines' order.
    bool gathers = false;
    int cache_layer = -1;  // layer of the cache that reads the experts; -1: they are in memory

    // Returns the rows that `max_tokens` tokens need at most.
    size_t max_rows(int max_tokens) const;
};

// Assignment of rows to experts. Rows of an expert are adjacent, from a multiple of 16 on. Each choice has
// its own plan, which is valid to the end of the step: a late thread may request the number of items of an
// op when other threads are ops ahead.
struct ExpertPlan : ExpertChoice {
    // Rows of one expert in a work item, at most kExpertRows.
    struct Block {
        int expert, row0, num_rows;
    };
    // Set by the dispatch of a choice that gathers tokens; this engine's own tokens start at `first_token`.
    int num_tokens = 0, first_token = 0;
    std::vector<float> weights{};  // [T * k], of all engines' choices
    std::vector<const float*> token_rows{};  // [T], each token's x; valid until the rows are collected
    std::vector<int32_t> ids;  // [T * k], expert of choice t * k + j
    std::vector<int32_t> rows;  // [T * k], row of the choice
    std::vector<int32_t> tokens;  // by row: token that chose it
    std::vector<int32_t> next;  // [E], next free row of each expert during the assignment
    std::vector<Block> blocks;

    ExpertPlan(const ExpertChoice& choice, int max_tokens);
    // Assigns a row to each choice of the first `count` tokens.
    void assign_rows(int count);
    // Returns the rows of the choices of one of this engine's own tokens, [k].
    const int32_t* choice_rows(int64_t token) const { return rows.data() + (first_token + token) * top_k; }
    // Returns the number of blocks in a step with this number of own tokens.
    int num_blocks(int own_tokens) const {
        return gathers || own_tokens ? static_cast<int>(blocks.size()) : 0;
    }
};

}  // namespace octavo
