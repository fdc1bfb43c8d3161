// The fusions of a plan: each is a pass over the list of its ops, before their stages are made.
#pragma once

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "specs.h"
#include "stage.h"

namespace octavo {

// Row ops that follow one another: each row is taken through all of them.
struct RowsSpec {
    bool samples = false;
    std::vector<std::unique_ptr<RowOp>> ops{};
    std::vector<std::pair<int, int>> kv_writes{};  // the group and layer of those that write keys and values
};

using PlanOp = std::variant<RowsSpec, ShrinkSpec, LinearSpec, HeadsSpec, AttentionSpec, ShortConvSpec,
                            ScanSpec, RouteSpec, DispatchSpec, ExpertsSpec, CollectSpec, NeuronsSpec,
                            ForeseeSpec, CollectiveSpec, SampleSpec>;
using PlanOps = std::vector<PlanOp>;

// Lets the op before each product that fuses its input write the product's rows in place of its own out.
// logic_error where that op cannot.
void fuse_conversions(PlanOps& ops);

// Lets a product that writes just the logits of a draw keep the best of them.
void fuse_best_logits(PlanOps& ops);

// Lets each product prefetch what the adapters of the next one read.
void prefetch_adapters(PlanOps& ops);

}  // namespace octavo
