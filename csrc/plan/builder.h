// Makes a plan of a Program's ops: collects them, fuses them, and makes their stages.
#pragma once

#include <cstdint>
#include <memory>

#include "fusions.h"
#include "plan.h"

namespace octavo {

// The lowering (octavo/executor/native/lower.py) adds the ops in the Program's order, those over tokens first.
class PlanBuilder {
  public:
    PlanBuilder(const KernelTable& kernels, PlanOptions options);
    PlanBuilder(PlanBuilder&&) = default;
    PlanBuilder& operator=(PlanBuilder&&) = default;

    // Returns the index that RopeSpec takes.
    int add(AnglesSpec spec);

    // -- row ops: those that follow one another share a stage --
    void add(EmbeddingSpec spec);
    void add(GivenSpec spec);
    void add(RowNormSpec spec);
    void add(RopeSpec spec);
    void add(KvWriteSpec spec);
    void add(ElementwiseSpec spec);
    void add(MixSpec spec);
    void add(GatherSpec spec);
    void add(PoolSpec spec);
    void add(CombineSpec spec);
    void add(HiddenInSpec spec);
    void add(HiddenOutSpec spec);
    void add(OutputSpec spec);

    // -- others: one stage or several --
    // The sites of embeddings and of these are numbered in the order in which they are added.
    void add(ShrinkSpec spec);
    void add(LinearSpec spec);
    void add(HeadsSpec spec);
    void add(AttentionSpec spec);
    void add(ShortConvSpec spec);
    void add(ScanSpec spec);
    // Returns the index by which other ops name the choice.
    int add(RouteSpec spec);
    void add(DispatchSpec spec);
    void add(ExpertsSpec spec);
    void add(CollectSpec spec);
    void add(NeuronsSpec spec);
    void add(ForeseeSpec spec);
    void add(CollectiveSpec spec);
    void add(SampleSpec spec);

    // Ends the building. logic_error where ops contradict one another.
    std::shared_ptr<const Plan> build();

  private:
    // Notes the Values of an op, which are all over the same rows. Returns whether these are sampled ones.
    bool see(const auto& spec);
    void add_op(auto spec);
    void add_row_op(std::unique_ptr<RowOp> op, bool samples);
    RowsSpec& open_rows(bool samples);
    PreparedRows& add_rows(const Tiles& weight, const Place& x);
    void add_site(int site, int group);

    std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
    PlanOps ops_;
    bool in_head_ = false;  // whether an op over sampled rows has been added
    int num_site_groups_ = 0;
};

}  // namespace octavo
