#include "fusions.h"

#include <stdexcept>

namespace octavo {

namespace {

// Returns the input of a matmul that the op before quantizes, or null.
QuantizedInput* fused_input(const OpSpec& op) {
    if (const auto* linear = std::get_if<LinearSpec>(&op); linear && linear->fuses_input)
        return linear->input;
    if (const auto* experts = std::get_if<ExpertsSpec>(&op); experts && experts->fuses_input)
        return experts->input;
    return nullptr;
}

// Lets an op write the input of the next matmul.
struct QuantizesNextInput {
    QuantizedInput* rows;
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
    void operator()(auto&) const { throw std::logic_error("the op before cannot quantize the fused input"); }

  private:
    void convert(auto& spec, RowArea area) const {
        spec.next_input = rows;
        rows->area = area;
    }
};

}  // namespace

void fuse_quantization(OpSpecs& ops) {
    for (size_t i = 0; i < ops.size(); i++) {
        QuantizedInput* rows = fused_input(ops[i]);
        if (!rows) continue;
        size_t before = i;
        while (before > 0 && std::holds_alternative<ShrinkSpec>(ops[before - 1])) before--;
        if (before == 0) throw std::logic_error("no op quantizes the fused input");
        // The adapters of the matmul read the unquantized output.
        std::visit(QuantizesNextInput{rows, before < i}, ops[before - 1]);
    }
}

void fuse_argmax(OpSpecs& ops) {
    for (size_t i = 1; i < ops.size(); i++) {
        auto* sample = std::get_if<SampleSpec>(&ops[i]);
        const auto* linear = std::get_if<LinearSpec>(&ops[i - 1]);
        if (sample && linear)
            sample->fuses_argmax = linear->parts.size() == 1 && linear->parts[0].out == sample->logits;
    }
}

void prefetch_next_adapters(OpSpecs& ops) {
    LinearSpec* linear = nullptr;
    for (OpSpec& op : ops) {
        const auto* shrink = std::get_if<ShrinkSpec>(&op);
        if (shrink && linear && !shrink->x.on_samples())
            std::exchange(linear, nullptr)->next_sites = shrink->sites;
        if (auto* next = std::get_if<LinearSpec>(&op)) linear = next;
    }
}

}  // namespace octavo
