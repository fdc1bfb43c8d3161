// PlanBuilder: which specs share an op or a range, which are fused, and which are rejected.
#include <functional>

#include "../plan/builder.h"
#include "matrices.h"

namespace octavo::test {

namespace {

constexpr int kWidth = 32;

// Ops over a few Values of the same width.
struct Ops {
    const KernelTable& kernels;
    ThreadPool pool{1};
    TestMatrix matrix{kWidth, kWidth, 5, Format::fp32, pool};
    ValueSlice x{Axis::tokens, 0, kWidth}, y{Axis::tokens, kWidth, kWidth},
        z{Axis::tokens, 2 * kWidth, kWidth};
    ValueSlice sampled{Axis::samples, 0, kWidth}, logits{Axis::samples, kWidth, kWidth};

    PlanBuilder builder() const { return PlanBuilder(kernels, {.max_tokens = 8, .vocab = kWidth}); }
    EmbeddingSpec embedding() const { return {.table = matrix.packed, .out = x}; }
    LinearSpec linear(const ValueSlice& from, const ValueSlice& to, bool fuses_input = false) const {
        return {.x = from, .parts = {part(matrix, to)}, .fuses_input = fuses_input};
    }
    AttentionSpec attention(const ValueSlice& from, const ValueSlice& to) const {
        return {.q = from, .out = to, .num_heads = 1};
    }
};

bool is_rejected(const std::function<void()>& build) {
    try {
        build();
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

std::vector<std::pair<int, int>> get_ranges(const Plan& plan) {
    std::vector<std::pair<int, int>> ranges;
    for (const OpRange& range : plan.ranges) ranges.emplace_back(range.first, range.last);
    return ranges;
}

// Consecutive row ops share an op, consecutive row-local ops a range; the two attention ops have a barrier
// between them.
void test_ranges(const Ops& ops) {
    PlanBuilder builder = ops.builder();
    builder.add(ops.embedding());
    builder.add(ElementwiseSpec{.kind = Elementwise::add, .a = ops.x, .b = ops.x, .out = ops.x});
    builder.add(ops.linear(ops.x, ops.y));
    builder.add(KvWriteSpec{.k_parts = {ops.y}, .v = ops.y, .layer = 3});
    builder.add(ops.attention(ops.y, ops.z));
    builder.add(ops.linear(ops.z, ops.x));
    builder.add(GatherSpec{ops.x, ops.sampled});
    builder.add(OutputSpec{ops.sampled});
    const auto plan = builder.build();
    using Ranges = std::vector<std::pair<int, int>>;
    CHECK((get_ranges(*plan) == Ranges{{0, 3}, {3, 4}, {4, 5}, {5, 7}}));
    CHECK(plan->head.size() == 1);
    CHECK(plan->kv_writes.size() == 1 && plan->kv_writes[0].op == 2 && plan->kv_writes[0].layer == 3);
}

// A linear or attention op writes the input of the next matmul, and no row op quantizes it.
void test_fused_conversions(const Ops& ops) {
    PlanBuilder builder = ops.builder();
    builder.add(ops.embedding());
    builder.add(ops.attention(ops.x, ops.y));
    builder.add(ops.linear(ops.y, ops.z, true));
    builder.add(ShrinkSpec{.x = ops.z, .norm = {}, .sites = {0}});
    builder.add(ops.linear(ops.z, ops.x, true));
    builder.add(ops.linear(ops.x, ops.y));
    const auto plan = builder.build();
    CHECK(plan->body.size() == 8);
    CHECK(plan->single_ops_without_adapters.size() == 7, "steps without adapters skip their op");
    const RowArea areas[] = {RowArea::attended, RowArea::converted, RowArea::prepared};
    CHECK(plan->inputs.size() == 3);
    for (int i = 0; i < 3; i++) CHECK(plan->inputs[i].area == areas[i], "rows %d", i);
}

void test_fused_argmax(const Ops& ops) {
    const auto plan_with = [&](auto... between) {
        PlanBuilder builder = ops.builder();
        builder.add(ops.embedding());
        builder.add(GatherSpec{ops.x, ops.sampled});
        builder.add(ops.linear(ops.sampled, ops.logits));
        (builder.add(between), ...);
        builder.add(SampleSpec{ops.logits});
        return builder.build();
    };
    const auto plain = plan_with();
    CHECK(plain->logits_linear && plain->logits_linear == plain->head[1].get());
    const auto capped = plan_with(
        ElementwiseSpec{.kind = Elementwise::softcap, .a = ops.logits, .b = ops.logits, .out = ops.logits});
    CHECK(!capped->logits_linear && capped->sampling, "logits that a row op changes");
}

// Specs that contradict each other are rejected, before any memory is accessed.
void test_rejections(const Ops& ops) {
    const auto rejects = [&](const char* what, const std::function<void(PlanBuilder&)>& add) {
        CHECK(is_rejected([&] {
                  PlanBuilder builder = ops.builder();
                  add(builder);
                  builder.build();
              }),
              "%s", what);
    };
    rejects("no op", [&](PlanBuilder&) {});
    rejects("an op over tokens behind one over samples", [&](PlanBuilder& b) {
        b.add(GatherSpec{ops.x, ops.sampled});
        b.add(ops.embedding());
    });
    rejects("an attention over samples",
            [&](PlanBuilder& b) { b.add(ops.attention(ops.sampled, ops.logits)); });
    rejects("keys of samples",
            [&](PlanBuilder& b) { b.add(KvWriteSpec{.k_parts = {ops.sampled}, .v = {}}); });
    rejects("a fused input that no op makes", [&](PlanBuilder& b) { b.add(ops.linear(ops.x, ops.y, true)); });
    rejects("a fused input that row ops make", [&](PlanBuilder& b) {
        b.add(ops.embedding());
        b.add(ops.linear(ops.x, ops.y, true));
    });
    rejects("a draw of logits that no op makes", [&](PlanBuilder& b) { b.add(SampleSpec{ops.logits}); });
    rejects("angles that there are not",
            [&](PlanBuilder& b) { b.add(RopeSpec{.x = ops.x, .out = ops.x, .num_heads = 1}); });
    rejects("a permutation of other inputs", [&](PlanBuilder& b) {
        LinearSpec spec = ops.linear(ops.x, ops.y);
        spec.permutation = {0, 1};
        b.add(std::move(spec));
    });
    rejects("sites out of order",
            [&](PlanBuilder& b) { b.add(ShrinkSpec{.x = ops.x, .norm = {}, .sites = {1}}); });
    rejects("a collective of a single rank",
            [&](PlanBuilder& b) { b.add(CollectiveSpec{.x = ops.x, .out = ops.y}); });
    rejects("tokens of a single engine", [&](PlanBuilder& b) {
        const int route = b.add(RouteSpec{.logits = ops.x, .weights = {Axis::tokens, 96, 2}, .top_k = 2});
        b.add(DispatchSpec{.route = route, .last = kWidth, .x = ops.x, .weights = {Axis::tokens, 96, 2}});
    });
}

}  // namespace

void test_plan(const KernelTable& kernels) {
    const Ops ops{kernels};
    test_ranges(ops);
    test_fused_conversions(ops);
    test_fused_argmax(ops);
    test_rejections(ops);
}

}  // namespace octavo::test
