// The row ops: each reads and writes one row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../runtime/step_runner.h"
#include "op.h"

namespace octavo {

void QuantizedInput::convert(const View& view, int64_t row, const QuantizedRows& to, int64_t index) const {
    const float* from = view.at(x, row);
    std::vector<float> permuted(permutation.size());
    for (size_t i = 0; i < permuted.size(); i++) permuted[i] = from[permutation[i]];
    const float* ordered = permuted.empty() ? from : permuted.data();
    Norm first = norm.args();
    first.threshold = threshold > 0 && view.sparse_rows(x.on_samples())[row] ? threshold : 0;
    view.runner.kernels().quantize_row(ordered, x.width, first, to, index);
    if (!observed.data) return;
    float* copy = observed.data + (row + (x.on_samples() ? view.first_sample : 0)) * x.width;
    std::vector<float> numbers(ordered, ordered + x.width);
    if (norm.weight) view.runner.kernels().norm_row(ordered, x.width, norm.args(), numbers.data());
    for (int i = 0; i < x.width; i++) copy[permutation.empty() ? i : permutation[i]] = numbers[i];
}

int64_t QuantizedInput::at(const View& view, int64_t row) const {
    return area == RowArea::prepared || area == RowArea::converted ? row - view.shift : row;
}

namespace {

// Quantizes a matmul's input before it, into memory that all threads read. Up to kFewRows the matmul does
// it.
struct QuantizeOp : RowOp {
    const QuantizedInput& rows;
    explicit QuantizeOp(const QuantizedInput& r) : rows(r) {}
    bool needed(int count) const override { return count > kFewRows; }
    void run(const View& view, int64_t row) const override {
        rows.convert(view, row, view.runner.quantized_rows(rows), rows.at(view, row));
    }
};

struct EmbeddingOp : RowOp {
    EmbeddingSpec spec;
    explicit EmbeddingOp(EmbeddingSpec s) : spec(std::move(s)) {}
    void run(const View& view, int64_t row) const override {
        const Batch& b = view.batch;
        const int id = spec.by_position
                           ? b.positions[static_cast<int64_t>(spec.axis) * b.num_tokens + row] + spec.offset
                           : b.token_ids[row];
        if (spec.first_row >= 0) return run_part(view, row, id - spec.first_row);
        const int safe = id < 0 || id >= spec.table.tiles.num_rows ? 0 : id;  // padding rows may hold any id
        view.runner.kernels().read_row(spec.table.tiles, safe, spec.scale, view.at(spec.out, row));
        adapt(view, row, safe);
    }
    // Reads a row of this rank's part of the table; zeros if another rank has it.
    void run_part(const View& view, int64_t row, int id) const {
        float* to = view.at(spec.out, row);
        if (id < 0 || id >= spec.table.tiles.num_rows) {
            std::fill_n(to, spec.out.width, 0.0f);
            return;
        }
        view.runner.kernels().read_row(spec.table.tiles, id, spec.scale, to);
        adapt(view, row, id);
    }
    // Adds the update of the row's adapter. Its h uses the memory of a linear op's.
    void adapt(const View& view, int64_t row, int id) const {
        const Adapters& adapters = view.runner.adapters();
        const SiteUpdate* update = adapters.update(view.adapter(false, row), spec.site);
        if (!update) return;
        const KernelTable& k = view.runner.kernels();
        float *h = adapters.h(row), *to = view.at(spec.out, row);
        k.read_ranks(update->a, id, update->scales, spec.scale, h);
        const int32_t alone = 0;
        const ExpandedRows run{update->b, h, &alone, 1, update->gain, update->bias};
        for (int column = 0; column < spec.out.width; column += kTile) {
            const int width = std::min(kTile, spec.out.width - column);
            float acc[kTile] = {};
            std::copy_n(to + column, width, acc);
            float* const tiles[] = {acc};
            k.expand(Expansion{&run, 1, 0, 0}, column / kTile, 1, tiles);
            std::copy_n(acc, width, to + column);
        }
    }
};

struct NormOp : RowOp {
    RowNormSpec spec;
    explicit NormOp(RowNormSpec s) : spec(std::move(s)) {
        if (!spec.group_width) spec.group_width = spec.x.width;
    }
    void run(const View& view, int64_t row) const override {
        Norm own = spec.norm.args();
        for (int start = 0; start < spec.x.width; start += spec.group_width) {
            if (spec.each_group) own.weight = spec.norm.weight + start;
            view.runner.kernels().norm_row(view.at(spec.x, row) + start, spec.group_width, own,
                                           view.at(spec.out, row) + start);
        }
    }
};

struct InputRowsOp : RowOp {
    InputRowsSpec spec;
    explicit InputRowsOp(const InputRowsSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        const Batch& b = view.batch;
        const auto& [base, out] = spec;
        float* to = view.at(out, row);
        const int at = b.input_rows ? b.input_row_indices[row] : -1;
        if (at >= 0)
            std::copy_n(b.input_rows + static_cast<int64_t>(at) * b.input_width, out.width, to);
        else if (!base.width)
            std::fill_n(to, out.width, 0.0f);
        else if (const float* from = view.at(base, row); from != to)
            std::copy_n(from, out.width, to);
    }
};

struct RopeOp : RowOp {
    RopeSpec spec;
    explicit RopeOp(const RopeSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        float* to = view.at(spec.out, row);
        const float* from = view.at(spec.x, row);
        if (to != from) std::memcpy(to, from, sizeof(float) * spec.num_heads * spec.head_width);
        const RopeAngles& angles = view.runner.angles(spec.angles);
        const float *cos = angles.cos(position(view, 0, row)), *sin = angles.sin(position(view, 0, row));
        std::vector<float> mixed;
        if (!spec.axes.empty()) {
            const int n = static_cast<int>(spec.axes.size());
            mixed.resize(2 * n);
            for (int i = 0; i < n; i++) {
                const int at = position(view, spec.axes[i], row);
                mixed[i] = angles.cos(at)[i];
                mixed[n + i] = angles.sin(at)[i];
            }
            cos = mixed.data(), sin = cos + n;
        }
        for (int h = 0; h < spec.num_heads; h++)
            view.runner.kernels().rope_head(to + h * spec.head_width + spec.rotary_start, cos, sin,
                                            spec.rotary_dim, spec.interleaved);
    }
    static int position(const View& view, int axis, int64_t row) {
        const Batch& b = view.batch;
        return std::max(b.positions[static_cast<int64_t>(axis) * b.num_tokens + row],
                        0);  // padding rows may hold any position
    }
};

struct KvWriteOp : RowOp {
    static constexpr int kMaxJoinedColumns = 1024;  // columns of parts that are joined
    KvWriteSpec spec;
    explicit KvWriteOp(KvWriteSpec s) : spec(std::move(s)) {
        int width = 0;
        for (const ValueSlice& part : spec.k_parts) width += part.width;
        if (spec.k_parts.empty() || (spec.k_parts.size() > 1 && width > kMaxJoinedColumns))
            throw std::invalid_argument("keys in parts of " + std::to_string(width) + " columns");
    }
    void run(const View& view, int64_t row) const override {
        const auto& [k_parts, v, group, layer] = spec;
        const int32_t slot = view.batch.slots[static_cast<int64_t>(group) * view.batch.num_tokens + row];
        if (slot < 0) return;
        const float* k = view.at(k_parts.front(), row);
        float joined[kMaxJoinedColumns];
        if (k_parts.size() > 1) {
            float* to = joined;
            for (const ValueSlice& part : k_parts) to = std::copy_n(view.at(part, row), part.width, to);
            k = joined;
        }
        const float* values = v.width ? view.at(v, row) : k;
        const KvLayer kv = view.kv.layer(group, layer);
        const auto store = [&](int32_t to) { view.runner.kernels().kv_store(kv, to, k, values); };
        store(slot);
        const Batch& b = view.batch;
        if (!b.copy_starts) return;
        for (int i = b.copy_starts[row]; i < b.copy_starts[row + 1]; i++)
            if (const int32_t to = b.copy_slots[static_cast<int64_t>(group) * b.num_copies + i]; to >= 0)
                store(to);
    }
};

struct ElementwiseOp : RowOp {
    ElementwiseSpec spec;
    explicit ElementwiseOp(ElementwiseSpec s) : spec(std::move(s)) {
        if (spec.b.width < 1 || spec.out.width % spec.b.width)
            throw std::invalid_argument("a row of " + std::to_string(spec.out.width) +
                                        " columns and one of " + std::to_string(spec.b.width));
    }
    void run(const View& view, int64_t row) const override {
        const float *x = view.at(spec.a, row), *y = view.at(spec.b, row);
        float* to = view.at(spec.out, row);
        const int width = spec.out.width;
        const float factor = spec.factor;
        switch (spec.kind) {
            case Elementwise::add: return combine(x, y, to, [](float a, float b) { return a + b; });
            case Elementwise::mul: return combine(x, y, to, [](float a, float b) { return a * b; });
            case Elementwise::scale:
                for (int i = 0; i < width; i++) to[i] = x[i] * factor;
                return;
            case Elementwise::activate:
                if (to != x) std::memmove(to, x, sizeof(float) * width);
                return view.runner.kernels().activate(spec.gate.activation, to, width);
            case Elementwise::softcap:
                for (int i = 0; i < width; i++) to[i] = factor * std::tanh(x[i] / factor);
                return;
            case Elementwise::clip:
                for (int i = 0; i < width; i++) to[i] = std::min(std::max(x[i], -factor), factor);
                return;
            case Elementwise::match: {
                const double by =
                    mean_square(y, width) / std::max(mean_square(x, width), static_cast<double>(factor));
                for (int i = 0; i < width; i++) to[i] = x[i] * static_cast<float>(std::sqrt(by));
                return;
            }
            case Elementwise::largest: {
                double mean = 0, square = 0;
                for (int i = 0; i < width; i++) mean += x[i];
                mean /= width;
                for (int i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
                const float cutoff = static_cast<float>(mean + factor * std::sqrt(square / width));
                for (int i = 0; i < width; i++) to[i] = std::max(x[i] - cutoff, 0.0f);
                return;
            }
            case Elementwise::gate: return open_gate(view, row, x, y, to);
        }
    }
    template <typename F>
    void combine(const float* x, const float* y, float* to, F f) const {
        const int width = spec.out.width, num = spec.b.width, span = width / num;
        if (span == 1) {
            for (int i = 0; i < width; i++) to[i] = f(x[i], y[i]);
            return;
        }
        for (int h = 0; h < num; h++) {
            const float by = y[h];
            for (int i = h * span; i < (h + 1) * span; i++) to[i] = f(x[i], by);
        }
    }
    static double mean_square(const float* x, int width) {
        double sum = 0;
        for (int i = 0; i < width; i++) sum += static_cast<double>(x[i]) * x[i];
        return sum / width;
    }
    // Uses the epilogue of matmuls, 16 columns at a time, so that both compute the same.
    void open_gate(const View& view, int64_t row, const float* x, const float* y, float* to) const {
        Epilogue gate = spec.gate.epilogue(true);
        if (gate.threshold > 0) gate.is_sparse = view.sparse_rows(spec.a.on_samples()) + row;
        for (int i = 0; i < spec.out.width; i += kTile) {
            const int n = std::min(spec.out.width - i, kTile);
            float g[kTile] = {}, up[kTile] = {};
            std::memcpy(g, x + i, sizeof(float) * n);
            std::memcpy(up, y + i, sizeof(float) * n);
            view.runner.kernels().write_tile(gate, g, up, 0, 1, i, n, to + i, 0);
        }
    }
};

struct XieluOp : RowOp {
    XieluSpec spec;
    explicit XieluOp(const XieluSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        view.runner.kernels().xielu({spec.positive, spec.negative, spec.beta, spec.eps}, view.at(spec.x, row),
                                    view.at(spec.out, row), spec.out.width);
    }
};

// Reads columns before it writes them: an output may be stored over an input.
struct MixOp : RowOp {
    static constexpr int kMost = 8;
    MixSpec spec;
    explicit MixOp(MixSpec s) : spec(std::move(s)) {
        const size_t num = spec.outs.size();
        if (num == 0 || num != spec.bases.size() || std::max(num, spec.xs.size()) > kMost ||
            spec.coefs.width != static_cast<int>(num * spec.xs.size()))
            throw std::invalid_argument("a mix of " + std::to_string(spec.xs.size()) + " rows to " +
                                        std::to_string(num));
    }
    void run(const View& view, int64_t row) const override {
        const int num_xs = static_cast<int>(spec.xs.size()), num_outs = static_cast<int>(spec.outs.size());
        const float *xs[kMost], *bases[kMost];
        float* outs[kMost];
        for (int k = 0; k < num_xs; k++) xs[k] = view.at(spec.xs[k], row);
        for (int i = 0; i < num_outs; i++) bases[i] = view.at(spec.bases[i], row);
        for (int i = 0; i < num_outs; i++) outs[i] = view.at(spec.outs[i], row);
        float coefs[kMost * kMost];
        std::memcpy(coefs, view.at(spec.coefs, row), sizeof(float) * num_xs * num_outs);
        for (int column = 0; column < spec.outs[0].width; column++) {
            float sums[kMost];
            for (int i = 0; i < num_outs; i++) {
                sums[i] = bases[i][column];
                for (int k = 0; k < num_xs; k++)
                    sums[i] += (coefs[i * num_xs + k] + spec.offset) * xs[k][column];
            }
            for (int i = 0; i < num_outs; i++) outs[i][column] = sums[i];
        }
    }
};

struct GatherOp : RowOp {
    GatherSpec spec;
    explicit GatherOp(const GatherSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        const auto& [x, out] = spec;
        std::memcpy(view.at(out, row), view.at(x, view.batch.sample_rows[view.first_sample + row]),
                    sizeof(float) * x.width);
    }
};

// One output row per request; the mean adds rows in order.
struct PoolOp : RowOp {
    PoolSpec spec;
    explicit PoolOp(const PoolSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        const auto& [x, out, mode] = spec;
        const int32_t* starts = view.batch.query_starts + view.first_sample + row;
        const int32_t first = starts[0], count = starts[1] - first;
        float* to = view.at(out, row);
        if (count == 0) {
            std::memset(to, 0, sizeof(float) * x.width);
            return;
        }
        const int32_t from = mode == Pooling::last ? first + count - 1 : first;
        std::memcpy(to, view.at(x, from), sizeof(float) * x.width);
        if (mode != Pooling::mean) return;
        for (int32_t r = first + 1; r < first + count; r++) {
            const float* one = view.at(x, r);
            for (int i = 0; i < x.width; i++) to[i] += one[i];
        }
        for (int i = 0; i < x.width; i++) to[i] /= static_cast<float>(count);
    }
};

struct HiddenInOp : RowOp {
    ValueSlice out;
    explicit HiddenInOp(ValueSlice p) : out(p) {}
    void run(const View& view, int64_t row) const override {
        std::memcpy(view.at(out, row), view.batch.hidden + row * out.width, sizeof(float) * out.width);
    }
};

struct HiddenOutOp : RowOp {
    ValueSlice x;
    explicit HiddenOutOp(ValueSlice p) : x(p) {}
    void run(const View& view, int64_t row) const override {
        std::memcpy(view.batch.out_rows + row * x.width, view.at(x, row), sizeof(float) * x.width);
    }
};

struct OutputOp : RowOp {
    ValueSlice rows;
    explicit OutputOp(ValueSlice p) : rows(p) {}
    void run(const View& view, int64_t row) const override {
        if (view.batch.has_sampling) return;
        std::memcpy(view.batch.out_rows + (view.first_sample + row) * static_cast<int64_t>(rows.width),
                    view.at(rows, row), sizeof(float) * rows.width);
    }
};

struct CombineOp : RowOp {
    CombineSpec spec;
    explicit CombineOp(const CombineSpec& s) : spec(s) {}
    void run(const View& view, int64_t row) const override {
        const ExpertPlan& plan = view.runner.expert_plan(spec.route);
        const int32_t* rows = plan.choice_rows(row);
        const float* weights = view.at(spec.weights, row);
        float* to = view.at(spec.out, row);
        for (int j = 0; j < plan.top_k; j++) {
            const float* from = view.at(spec.x, rows[j]);
            const float by = plan.scales_rows ? 1 : weights[j];
            for (int i = 0; i < spec.out.width; i++) to[i] = j ? to[i] + by * from[i] : by * from[i];
        }
    }
};

template <typename Derived>
std::unique_ptr<RowOp> make(auto spec) {
    return std::make_unique<Derived>(std::move(spec));
}

}  // namespace

std::unique_ptr<RowOp> make_row_op(EmbeddingSpec spec) { return make<EmbeddingOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(InputRowsSpec spec) { return make<InputRowsOp>(spec); }
std::unique_ptr<RowOp> make_row_op(RowNormSpec spec) { return make<NormOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(RopeSpec spec) { return make<RopeOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(KvWriteSpec spec) { return make<KvWriteOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(ElementwiseSpec spec) { return make<ElementwiseOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(const XieluSpec& spec) { return make<XieluOp>(spec); }
std::unique_ptr<RowOp> make_row_op(MixSpec spec) { return make<MixOp>(std::move(spec)); }
std::unique_ptr<RowOp> make_row_op(GatherSpec spec) { return make<GatherOp>(spec); }
std::unique_ptr<RowOp> make_row_op(PoolSpec spec) { return make<PoolOp>(spec); }
std::unique_ptr<RowOp> make_row_op(CombineSpec spec) { return make<CombineOp>(spec); }
std::unique_ptr<RowOp> make_row_op(HiddenInSpec spec) { return make<HiddenInOp>(spec.out); }
std::unique_ptr<RowOp> make_row_op(HiddenOutSpec spec) { return make<HiddenOutOp>(spec.x); }
std::unique_ptr<RowOp> make_row_op(OutputSpec spec) { return make<OutputOp>(spec.x); }
std::unique_ptr<RowOp> make_row_op(const QuantizedInput& rows) { return std::make_unique<QuantizeOp>(rows); }

}  // namespace octavo
