// A plan: the ops of a Program, and what a StepRunner needs to run them. PlanBuilder makes it; it is
// immutable.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "../runtime/attention_plan.h"
#include "../runtime/expert_plan.h"
#include "../runtime/neuron_cache.h"
#include "../runtime/shared_ranks.h"
#include "op.h"
#include "specs.h"

namespace octavo {

struct PlanOptions {
    int max_tokens = 1, vocab = 0;
    std::shared_ptr<SharedRanks> ranks{};  // null if there is only one rank
    // The ranks of all engines, engine by engine, if engines with their own tokens share experts. They
    // exchange expert rows.
    std::shared_ptr<SharedRanks> engines{};
    int num_engines = 1;
};

// Ops first .. last - 1, which a block of rows goes through without a barrier.
struct OpRange {
    int first, last;
};

// An op of the body that writes keys and values of a group's layer.
struct KvWrite {
    int op, group, layer;
};

// Key selection of the attentions of one shape. `is_prefetch`: before their layer has its queries.
struct SelectionShape {
    int attention;  // index in Plan::attentions
    double budget;
    bool is_prefetch;
    bool operator==(const SelectionShape&) const = default;
};

// Maximum over all ops.
struct BufferSizes {
    int64_t row_floats[kNumAxes] = {};  // end of the last Value in a row
    size_t matmul_scratch = 0, num_scores = 0;
    size_t gathered_bytes = 0;  // tiles that a thread gathers from neuron rows
    size_t expert_rows = 0;  // rows of the largest ExpertPlan
    size_t rank_slot = 0, engine_slot = 0;  // bytes of an exchange
    int adapted_width = 0;  // width of the widest input of adapters
    bool has_row_blocks = false;  // whether threads gather up to kExpertRows rows
};

struct Plan {
    Plan() = default;
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    const KernelTable* kernels = nullptr;
    PlanOptions options;
    // The body has the ops over tokens, the head those over sampled rows. The head runs in chunks of at
    // most kSampleChunk rows, which bounds the memory for logits.
    std::vector<std::unique_ptr<const Op>> body, head;
    std::vector<OpRange> ranges;  // of the body: consecutive row-local ops, and every other op alone
    std::vector<OpRange> single_ops;  // every op of the body alone
    std::vector<OpRange> single_ops_without_adapters;  // the same without ops that only adapters need
    std::vector<KvWrite> kv_writes;
    const Op* sampling = nullptr;  // the sampling op
    const Op* logits_linear = nullptr;  // the linear op that computes only the logits, if there is one
    ValueSlice logits{};
    int hidden_width = 0;  // width of the hidden rows from the previous pipeline stage; 0: none
    int input_width = 0;  // width of the input rows that a batch may replace; 0: none
    int num_axes = 1;  // axes of positions that the program reads
    int min_rows_per_thread = 0;  // from this many rows per thread on, threads run ranges
    int num_collectives[2] = {};  // of the body and of the head
    int num_engine_exchanges = 0;
    // The runner keeps state for each of these; ops refer to them by index.
    std::deque<QuantizedInput> inputs;
    std::vector<AnglesSpec> angles;
    std::vector<AttentionShape> attentions;
    std::vector<SelectionShape> selections;
    std::vector<ExpertChoice> choices;
    std::vector<int> site_groups;  // by adapter site: the linear op whose input it shares, -1: a table
    std::shared_ptr<NeuronCache> neurons;  // null if no weights are read neuron by neuron
    BufferSizes sizes;

    int max_expert_tokens() const { return options.max_tokens * options.num_engines; }
};

}  // namespace octavo
