// Fusions: passes over the list of specs before the ops are made.
#pragma once

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "op.h"
#include "specs.h"

namespace octavo {

// Consecutive row ops: each row is computed through all of them.
struct FusedRowOpsSpec {
    bool samples = false;
    std::vector<std::unique_ptr<RowOp>> ops{};
    std::vector<std::pair<int, int>> kv_writes{};  // group and layer of each KV write among them
};

using OpSpec = std::variant<FusedRowOpsSpec, ShrinkSpec, LinearSpec, HeadsSpec, AttentionSpec, ShortConvSpec,
                            ScanSpec, RouteSpec, DispatchSpec, ExpertsSpec, CollectSpec, NeuronsSpec,
                            PrefetchNeuronsSpec, CollectiveSpec, SampleSpec>;
using OpSpecs = std::vector<OpSpec>;

// Lets the op before each matmul with a fused input write the quantized input instead of its own output.
// Throws logic_error if that op cannot.
void fuse_quantization(OpSpecs& ops);

// Lets a linear op that computes only the logits of a sampler keep the best logit of each row.
void fuse_argmax(OpSpecs& ops);

// Lets each linear op prefetch the adapter data of the next one.
void prefetch_next_adapters(OpSpecs& ops);

}  // namespace octavo
