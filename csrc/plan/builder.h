// Builds a plan from the ops of a Program: collects their specs, fuses them and makes the plan's ops.
#pragma once

#include <cstdint>
#include <memory>

#include "fusions.h"
#include "plan.h"

namespace octavo {

// The lowering (octavo/executor/native/lower.py) adds the specs in the Program's order, those over tokens
// first.
class PlanBuilder {
  public:
    PlanBuilder(const KernelTable& kernels, PlanOptions options);
    PlanBuilder(PlanBuilder&&) = default;
    PlanBuilder& operator=(PlanBuilder&&) = default;

    // Returns the index for RopeSpec::angles.
    int add(AnglesSpec spec);

    // -- row ops: consecutive ones are fused --
    void add(EmbeddingSpec spec);
    void add(InputRowsSpec spec);
    void add(RowNormSpec spec);
    void add(RopeSpec spec);
    void add(KvWriteSpec spec);
    void add(ElementwiseSpec spec);
    void add(const XieluSpec& spec);
    void add(MixSpec spec);
    void add(GatherSpec spec);
    void add(PoolSpec spec);
    void add(CombineSpec spec);
    void add(HiddenInSpec spec);
    void add(HiddenOutSpec spec);
    void add(OutputSpec spec);

    // -- other ops --
    // Sites of embeddings and of linear ops are numbered in the order in which they are added.
    void add(ShrinkSpec spec);
    void add(LinearSpec spec);
    void add(HeadsSpec spec);
    void add(AttentionSpec spec);
    void add(ShortConvSpec spec);
    void add(ScanSpec spec);
    // Returns the index by which other specs refer to this choice of experts.
    int add(RouteSpec spec);
    void add(DispatchSpec spec);
    void add(ExpertsSpec spec);
    void add(CollectSpec spec);
    void add(NeuronsSpec spec);
    void add(PrefetchNeuronsSpec spec);
    void add(CollectiveSpec spec);
    void add(SampleSpec spec);

    // Ends the building. Throws logic_error if the specs contradict each other.
    std::shared_ptr<const Plan> build();

  private:
    // Records the Values of a spec, which all have rows of the same kind. Returns whether these are sampled
    // rows.
    bool note_values(const auto& spec);
    void add_op(auto spec);
    void add_row_op(std::unique_ptr<RowOp> op, bool samples);
    FusedRowOpsSpec& open_rows(bool samples);
    QuantizedInput& add_input(const Tiles& weight, const ValueSlice& x);
    void add_site(int site, int group);

    std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
    OpSpecs ops_;
    bool in_head_ = false;  // whether an op over sampled rows has been added
    int num_site_groups_ = 0;
};

}  // namespace octavo
