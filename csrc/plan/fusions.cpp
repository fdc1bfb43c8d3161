#include "fusions.h"

#include <stdexcept>

namespace octavo {

namespace {

// The rows of a product whose input the op before converts; null: those of another op.
PreparedRows* fused_input(const PlanOp& op) {
    if (const auto* linear = std::get_if<LinearSpec>(&op); linear && linear->fuses_input) return linear->rows;
    if (const auto* experts = std::get_if<ExpertsSpec>(&op); experts && experts->fuses_input)
        return experts->rows;
    return nullptr;
}

// Lets an op write the rows of the next product.
struct ConvertsRows {
    PreparedRows* rows;
    bool keeps_out;

    void operator()(LinearSpec& spec) const {
        spec.keeps_out = keeps_out;
        convert(spec, RowArea::converted);
    }
    void operator()(AttentionSpec& spec) const {
        spec.keeps_out = keeps_out;
        convert(spec, RowArea::attended);
    }
    void operator()(ExpertsSpec& spec) const { convert(spec, RowArea::experts); }
    void operator()(RouteSpec& spec) const { convert(spec, RowArea::attended); }
    void operator()(DispatchSpec& spec) const { convert(spec, RowArea::attended); }
    void operator()(auto&) const {
        throw std::logic_error("a product's input that the op before cannot convert");
    }

  private:
    void convert(auto& spec, RowArea area) const {
        spec.converts = rows;
        rows->area = area;
    }
};

}  // namespace

void fuse_conversions(PlanOps& ops) {
    for (size_t i = 0; i < ops.size(); i++) {
        PreparedRows* rows = fused_input(ops[i]);
        if (!rows) continue;
        size_t before = i;
        while (before > 0 && std::holds_alternative<ShrinkSpec>(ops[before - 1])) before--;
        if (before == 0) throw std::logic_error("a product's input that no op converts");
        // The product's adapters read the out itself.
        std::visit(ConvertsRows{rows, before < i}, ops[before - 1]);
    }
}

void fuse_best_logits(PlanOps& ops) {
    for (size_t i = 1; i < ops.size(); i++) {
        auto* sample = std::get_if<SampleSpec>(&ops[i]);
        const auto* product = std::get_if<LinearSpec>(&ops[i - 1]);
        if (sample && product)
            sample->fuses_best = product->parts.size() == 1 && product->parts[0].out == sample->logits;
    }
}

void prefetch_adapters(PlanOps& ops) {
    LinearSpec* product = nullptr;
    for (PlanOp& op : ops) {
        const auto* shrink = std::get_if<ShrinkSpec>(&op);
        if (shrink && product && !shrink->x.on_samples())
            std::exchange(product, nullptr)->next_sites = shrink->sites;
        if (auto* next = std::get_if<LinearSpec>(&op)) product = next;
    }
}

}  // namespace octavo
