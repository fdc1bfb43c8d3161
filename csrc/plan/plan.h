// A plan: the stages of a Program, and what a StepRunner needs to run them. PlanBuilder makes it; nothing changes
// it afterwards.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "../runtime/attention_plan.h"
#include "../runtime/expert_plan.h"
#include "../runtime/neuron_cache.h"
#include "../runtime/shared_ranks.h"
#include "specs.h"
#include "stage.h"

namespace octavo {

struct PlanOptions {
    int max_tokens = 1, vocab = 0;
    std::shared_ptr<SharedRanks> ranks{};  // null where this is the only one
    // The ranks of all engines, engine by engine, where several share their experts and have tokens of their own;
    // experts' rows are exchanged there.
    std::shared_ptr<SharedRanks> engines{};
    int num_engines = 1;
};

// Stages first .. last - 1, which a block of rows goes through without a barrier.
struct StageRange {
    int first, last;
};

// A stage of the body that writes the keys and values of a group's layer.
struct KvWrite {
    int stage, group, layer;
};

// The blocks of keys that the attentions of one shape choose; `ahead`: before their layer has its queries.
struct SelectionShape {
    int attention;  // index of the shape
    double budget;
    bool ahead;
    bool operator==(const SelectionShape&) const = default;
};

// The largest that any stage needs.
struct BufferSizes {
    int64_t row_floats[kNumAxes] = {};  // behind the last float that any Value has in a row
    size_t product_scratch = 0, num_scores = 0;
    size_t gathered_bytes = 0;  // of the tiles that a thread puts together from neurons' rows
    size_t expert_rows = 0;  // rows of the largest ExpertPlan
    size_t rank_slot = 0, engine_slot = 0;  // bytes of an exchange
    int adapted_width = 0;  // numbers of the widest row that adapters read
    bool has_row_blocks = false;  // whether threads put up to kExpertRows rows together
};

struct Plan {
    Plan() = default;
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    const KernelTable* kernels = nullptr;
    PlanOptions options;
    // Stages over tokens are the body, stages over sampled rows the head, which runs in chunks of at most
    // kSampleChunk rows, so that logits never need more memory than that.
    std::vector<std::unique_ptr<const Stage>> body, head;
    std::vector<StageRange> ranges;  // of the body: row-local stages that follow one another, any other alone
    std::vector<StageRange> each;  // every stage of the body alone
    std::vector<StageRange> plain;  // and without those that only adapters need
    std::vector<KvWrite> kv_writes;
    const Stage* sampling = nullptr;  // the stage of draws
    const Stage* logits_product = nullptr;  // the product that writes just the logits, if one does
    Place logits{};
    int hidden_width = 0;  // of the rows that the batch has to bring; 0: none
    int given_width = 0;  // of the rows that may be given; 0: none
    int num_axes = 1;  // of positions that the program reads
    int least_rows = 0;  // for each thread, from which on the threads go by ranges
    int num_collectives[2] = {};  // of the body and the head
    int num_engine_exchanges = 0;
    // What the runner keeps one of each for; stages know them by their index.
    std::deque<PreparedRows> rows;
    std::vector<AnglesSpec> angles;
    std::vector<AttentionShape> attentions;
    std::vector<SelectionShape> selections;
    std::vector<ExpertChoice> choices;
    std::vector<int> site_groups;  // by site of adapters: the product whose rows it shares, -1: a table
    std::shared_ptr<NeuronCache> neurons;  // null where no weights are read neuron by neuron
    BufferSizes sizes;

    int most_expert_tokens() const { return options.max_tokens * options.num_engines; }
};

}  // namespace octavo
