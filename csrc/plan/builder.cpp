#include "builder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "adapter_ops.h"
#include "attention_op.h"
#include "collective_ops.h"
#include "expert_ops.h"
#include "linear_op.h"
#include "mixers.h"
#include "neuron_ops.h"
#include "ops.h"
#include "selection_ops.h"

namespace octavo {

namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

template <typename T>
void grow(T& maximum, T value) {
    maximum = std::max(maximum, value);
}

// Returns the index of a shape in a list; appends it if it is new.
template <typename Shape>
int find_or_append(std::vector<Shape>& shapes, const Shape& shape) {
    const auto found = std::find(shapes.begin(), shapes.end(), shape);
    const auto index = static_cast<int>(found - shapes.begin());
    if (found == shapes.end()) shapes.push_back(shape);
    return index;
}

// Layout of a weight with the neurons of one work item.
Tiles neuron_tiles(int width) { return make_tiles({Code::i8}, NeuronUpOp::kTilesPerItem * kTile, width); }

// Makes the ops of one spec after another and records what they need.
class OpFactory {
  public:
    explicit OpFactory(Plan& plan) : plan_(plan), sizes_(plan.sizes), kernels_(*plan.kernels) {}

    void operator()(FusedRowOpsSpec& spec) {
        for (const auto& [group, layer] : spec.kv_writes)
            plan_.kv_writes.push_back({static_cast<int>(plan_.body.size()), group, layer});
        push(std::make_unique<FusedRowOps>(spec.samples, std::move(spec.ops)));
    }
    void operator()(ShrinkSpec& spec) {
        grow(sizes_.adapted_width, spec.x.width);
        push(std::make_unique<ShrinkOp>(std::move(spec)));
    }
    void operator()(LinearSpec& spec) {
        for (const LinearPart& part : spec.parts) note_weight(part.tiles(), *spec.input);
        if (!spec.x.on_samples()) {
            const int min_rows = kernels_.rows_per_byte * static_cast<int>(element_bytes(spec.input->type));
            plan_.min_rows_per_thread =
                std::min(kernels_.row_block, std::max(plan_.min_rows_per_thread, min_rows));
        }
        const int chunk = spec.chunk;
        push(std::make_unique<LinearOp>(std::move(spec)), chunk);
    }
    void operator()(HeadsSpec& spec) {
        for (const PackedTiles& head : spec.weights) note_weight(head.tiles, *spec.input);
        sizes_.has_row_blocks = true;
        const int chunk = spec.chunk;
        push(std::make_unique<HeadsOp>(std::move(spec)), chunk);
    }
    // The attention op and the op that merges split runs. Before them, two ops select the keys of sparse
    // rows, and two more prefetch those of the next attention, if required.
    void operator()(AttentionSpec& spec) {
        const int shape =
            find_or_append(plan_.attentions, {spec.group, spec.num_heads, spec.mask(), spec.latent_width});
        int selection = -1;
        if (spec.selection.budget > 0) {
            require(spec.mask() == Mask{} && !spec.slopes && !spec.distances && spec.buckets.empty(),
                    "key selection with a mask or position biases");
            selection = find_or_append(plan_.selections, {shape, spec.selection.budget, false});
            push(std::make_unique<BlockMassOp>(spec, spec.selection, selection));
            push(std::make_unique<SelectKeysOp>(spec, selection));
        }
        if (spec.ahead.budget > 0) {
            const int prefetched = find_or_append(plan_.selections, {shape, spec.ahead.budget, true});
            push(std::make_unique<BlockMassOp>(spec, spec.ahead, prefetched));
            push(std::make_unique<PrefetchKeysOp>(spec, prefetched));
        }
        push(std::make_unique<AttentionOp>(spec, shape, false, selection));
        push(std::make_unique<AttentionOp>(spec, shape, true, selection));
    }
    void operator()(ShortConvSpec& spec) { push(make_op(spec)); }
    void operator()(ScanSpec& spec) { push(make_op(spec)); }

    // Routes each row, then sorts the rows by expert.
    void operator()(RouteSpec& spec) {
        grow(sizes_.expert_rows, plan_.choices[spec.route].max_rows(plan_.max_expert_tokens()));
        grow(sizes_.num_scores, size_t{4} * spec.num_experts());
        sizes_.has_row_blocks = true;
        push(std::make_unique<RouteOp>(spec));
        push(std::make_unique<SortRowsByExpertOp>(spec.route));
    }
    void operator()(DispatchSpec& spec) {
        SharedRanks& engines = *plan_.options.engines;
        const int num_engines = plan_.options.num_engines;
        const int index = count_expert_exchange(DispatchSlot(spec).bytes(plan_.options.max_tokens));
        push(std::make_unique<DispatchSendOp>(spec, engines, index, num_engines));
        push(std::make_unique<DispatchReceiveOp>(spec, engines, index, num_engines));
        push(std::make_unique<DispatchQuantizeOp>(spec, engines, index, num_engines));
    }
    void operator()(ExpertsSpec& spec) {
        for (const auto* list : {&spec.weights, &spec.ups})
            for (const PackedTiles& expert : *list) note_weight(expert.tiles, *spec.input);
        if (const PackedTiles& first = spec.weights.front(); first.records) {
            ExpertChoice& choice = plan_.choices[spec.route];
            check_cache(*first.records, first.layer, choice.num_experts);
            require(static_cast<int>(spec.weights.size()) == choice.num_experts && !choice.gathers,
                    "experts of several ranks in a cache");
            use_cache(first.records);
            choice.cache_layer = first.layer;
        }
        if (spec.scaled_by.width)
            grow(sizes_.num_scores, static_cast<size_t>(spec.x.width + kGroup - 1) / kGroup * kGroup);
        if (!spec.fuses_input)
            push(std::make_unique<QuantizeExpertRowsOp>(*spec.input, spec.route, spec.scaled_by));
        const int chunk = spec.chunk;
        push(std::make_unique<ExpertsOp>(std::move(spec)), chunk);
    }
    void operator()(CollectSpec& spec) {
        const auto& [ranks, engines] = std::tie(plan_.options.ranks, plan_.options.engines);
        SharedRanks* exchange = engines ? engines.get() : ranks.get();
        const ExpertChoice& choice = plan_.choices.at(spec.route);
        require(exchange && static_cast<int>(spec.firsts.size()) == exchange->num_experts(),
                "the number of first experts is not the number of expert ranks");
        require(spec.x.width == spec.out.width, "expert rows of different widths");
        require(choice.gathers == (engines != nullptr), "expert rows of several engines without a dispatch");
        const int index = count_expert_exchange(sizeof(float) * static_cast<size_t>(spec.x.width) *
                                                plan_.max_expert_tokens() * choice.top_k);
        push(std::make_unique<CollectOp>(spec, *exchange, index, false));
        push(std::make_unique<CollectOp>(std::move(spec), *exchange, index, true));
    }

    // Selects the neurons, then computes their rows as they arrive.
    void operator()(NeuronsSpec& spec) {
        check_cache(*spec.cache, spec.layer, spec.opened.width);
        use_cache(spec.cache);
        const Tiles tiles = neuron_tiles(spec.x.width);
        if (spec.input) {
            require(spec.out.width == spec.opened.width, "the number of neurons is not that of the cache");
            const size_t row_bytes = static_cast<size_t>(tiles.num_groups) * kGroup;
            require(spec.cache->layer(spec.layer).up_bytes == spec.num_rows() * row_bytes,
                    "neuron rows of a different width");
            note_weight(tiles, *spec.input);
            grow(sizes_.gathered_bytes, total_bytes(tiles));
        }
        auto rows = std::make_unique<SelectNeuronsOp>(spec);
        auto requests = std::make_unique<RequestNeuronsOp>(*rows);
        push(std::move(rows));
        push(std::move(requests));
        if (!spec.input) return;
        Tiles gathered = tiles;
        gathered.tile_stride = tiles.tile_bytes;
        push(std::make_unique<NeuronUpOp>(std::move(spec), gathered));
    }
    void operator()(PrefetchNeuronsSpec& spec) {
        check_cache(*spec.cache, spec.layer, spec.scores.width);
        push(std::make_unique<PrefetchNeuronsOp>(std::move(spec)));
    }
    void operator()(CollectiveSpec& spec) {
        SharedRanks* ranks = plan_.options.ranks.get();
        require(ranks != nullptr, "a collective of a single rank");
        const int width = std::accumulate(spec.widths.begin(), spec.widths.end(), 0);
        const bool joins = !spec.widths.empty();
        require(!joins || (static_cast<int>(spec.widths.size()) == ranks->num_tensor() &&
                           width == spec.out.width && spec.widths[ranks->tensor_index()] == spec.x.width),
                "the widths do not match the tensor ranks");
        require(joins || spec.x.width == spec.out.width, "an all-reduce of different widths");
        const bool samples = spec.x.on_samples();
        const int widest = joins ? *std::max_element(spec.widths.begin(), spec.widths.end()) : spec.x.width;
        const int tokens = samples ? kSampleChunk : plan_.options.max_tokens;
        const size_t rows = spec.route < 0 ? static_cast<size_t>(tokens)
                                           : plan_.choices.at(spec.route).max_rows(plan_.max_expert_tokens());
        grow(sizes_.rank_slot, sizeof(float) * static_cast<size_t>(widest) * rows);
        const int index = plan_.num_collectives[samples]++;
        push(std::make_unique<CollectiveOp>(spec, *ranks, index, false));
        push(std::make_unique<CollectiveOp>(spec, *ranks, index, true));
    }
    void operator()(SampleSpec& spec) {
        require(!plan_.head.empty(), "sampling from logits that no op computes");
        if (spec.fuses_argmax) plan_.logits_linear = plan_.head.back().get();
        push(std::make_unique<SampleOp>(spec.logits, plan_.options.vocab));
        plan_.sampling = plan_.head.back().get();
        plan_.logits = spec.logits;
    }

  private:
    void push(std::unique_ptr<Op> op, int chunk = -1) {
        op->chunk = chunk;
        (op->on_samples() ? plan_.head : plan_.body).push_back(std::move(op));
    }
    void note_weight(const Tiles& weight, const QuantizedInput& rows) {
        require(kernels_.row_type(weight.code) == rows.type,
                "weights with different types of quantized rows in one matmul");
        grow(sizes_.matmul_scratch, kernels_.scratch_bytes(weight));
    }
    void use_cache(const std::shared_ptr<NeuronCache>& cache) {
        require(!plan_.neurons || plan_.neurons == cache, "records of two caches");
        plan_.neurons = cache;
    }
    static void check_cache(const NeuronCache& cache, int layer, int num_neurons) {
        require(layer >= 0 && layer < cache.num_layers(), "neurons of no layer");
        require(cache.layer(layer).num_neurons == num_neurons,
                "the number of neurons is not that of the cache");
    }
    // Returns the index of an exchange of expert rows among those of the engines or of the body.
    int count_expert_exchange(size_t slot_bytes) {
        const bool among_engines = plan_.options.engines != nullptr;
        grow(among_engines ? sizes_.engine_slot : sizes_.rank_slot, slot_bytes);
        return (among_engines ? plan_.num_engine_exchanges : plan_.num_collectives[0])++;
    }

    Plan& plan_;
    BufferSizes& sizes_;
    const KernelTable& kernels_;
};

// Consecutive row-local ops form a range. The two attention ops need a barrier between them.
void group_ops(Plan& plan) {
    const auto& body = plan.body;
    for (int i = 0; i < static_cast<int>(body.size()); i++) {
        plan.single_ops.push_back({i, i + 1});
        if (!body[i]->is_adapter_only()) plan.single_ops_without_adapters.push_back({i, i + 1});
        if (i > 0 && body[i - 1]->row_local() && body[i]->row_local())
            plan.ranges.back().last = i + 1;
        else
            plan.ranges.push_back({i, i + 1});
    }
}

}  // namespace

PlanBuilder::PlanBuilder(const KernelTable& kernels, PlanOptions options) {
    require(options.num_engines > 0 &&
                (!options.engines || options.engines->num_experts() % options.num_engines == 0),
            "the number of expert ranks is not a multiple of the number of engines");
    plan_->kernels = &kernels;
    plan_->options = std::move(options);
    grow(plan_->options.max_tokens, 1);
}

bool PlanBuilder::note_values(const auto& spec) {
    bool on_tokens = false, on_samples = false;
    for_each_slice(spec, [&](const ValueSlice& slice) {
        if (!slice.width) return;
        (slice.on_samples() ? on_samples : on_tokens) = true;
        grow(plan_->sizes.row_floats[static_cast<int>(slice.axis)], slice.offset + slice.width);
    });
    return on_samples && !on_tokens;
}

void PlanBuilder::add_op(auto spec) {
    using Added = decltype(spec);
    constexpr bool runs_on_samples = std::is_same_v<Added, ShrinkSpec> || std::is_same_v<Added, LinearSpec> ||
                                     std::is_same_v<Added, CollectiveSpec> ||
                                     std::is_same_v<Added, SampleSpec>;
    const bool samples = note_values(spec);
    require(samples ? runs_on_samples : !std::is_same_v<Added, SampleSpec>,
            "an op over rows that it does not support");
    require(samples || !in_head_, "an op over tokens after one over samples");
    in_head_ = samples;
    ops_.push_back(std::move(spec));
}

FusedRowOpsSpec& PlanBuilder::open_rows(bool samples) {
    require(samples || !in_head_, "an op over tokens after one over samples");
    in_head_ = samples;
    auto* rows = ops_.empty() ? nullptr : std::get_if<FusedRowOpsSpec>(&ops_.back());
    if (rows && rows->samples == samples) return *rows;
    return std::get<FusedRowOpsSpec>(ops_.emplace_back(FusedRowOpsSpec{samples}));
}

void PlanBuilder::add_row_op(std::unique_ptr<RowOp> op, bool samples) {
    open_rows(samples).ops.push_back(std::move(op));
}

QuantizedInput& PlanBuilder::add_input(const Tiles& weight, const ValueSlice& x) {
    const int index = static_cast<int>(plan_->inputs.size());
    const RowType type = plan_->kernels->row_type(weight.code);
    return plan_->inputs.emplace_back(
        QuantizedInput{.index = index, .x = x, .type = type, .num_groups = weight.num_groups});
}

void PlanBuilder::add_site(int site, int group) {
    require(site == static_cast<int>(plan_->site_groups.size()), "sites of adapters out of order");
    plan_->site_groups.push_back(group);
}

int PlanBuilder::add(AnglesSpec spec) {
    require(spec.long_inv_freq.empty() ||
                (spec.long_inv_freq.size() == spec.inv_freq.size() && spec.long_start > 0),
            "the long frequencies do not match the short ones");
    plan_->angles.push_back(std::move(spec));
    return static_cast<int>(plan_->angles.size()) - 1;
}

void PlanBuilder::add(EmbeddingSpec spec) {
    if (spec.by_position) grow(plan_->num_axes, spec.axis + 1);
    if (spec.site >= 0) add_site(spec.site, -1);
    const bool samples = note_values(spec);
    add_row_op(make_row_op(std::move(spec)), samples);
}

void PlanBuilder::add(InputRowsSpec spec) {
    plan_->input_width = spec.out.width;
    add_row_op(make_row_op(spec), note_values(spec));
}

void PlanBuilder::add(RowNormSpec spec) { add_row_op(make_row_op(spec), note_values(spec)); }

void PlanBuilder::add(RopeSpec spec) {
    require(spec.angles >= 0 && spec.angles < static_cast<int>(plan_->angles.size()), "unknown angles");
    for (const int axis : spec.axes) grow(plan_->num_axes, axis + 1);
    add_row_op(make_row_op(spec), note_values(spec));
}

void PlanBuilder::add(KvWriteSpec spec) {
    require(!note_values(spec), "keys written by sampled rows");
    add_row_op(make_row_op(spec), false);
    open_rows(false).kv_writes.emplace_back(spec.group, spec.layer);
}

void PlanBuilder::add(ElementwiseSpec spec) { add_row_op(make_row_op(spec), note_values(spec)); }
void PlanBuilder::add(const XieluSpec& spec) { add_row_op(make_row_op(spec), note_values(spec)); }
void PlanBuilder::add(MixSpec spec) { add_row_op(make_row_op(spec), note_values(spec)); }

// These ops make rows of samples from rows of tokens.
void PlanBuilder::add(GatherSpec spec) {
    note_values(spec);
    add_row_op(make_row_op(spec), spec.out.on_samples());
}
void PlanBuilder::add(PoolSpec spec) {
    note_values(spec);
    add_row_op(make_row_op(spec), spec.out.on_samples());
}

void PlanBuilder::add(CombineSpec spec) { add_row_op(make_row_op(spec), note_values(spec)); }

void PlanBuilder::add(HiddenInSpec spec) {
    plan_->hidden_width = spec.out.width;
    add_row_op(make_row_op(spec), note_values(spec));
}

void PlanBuilder::add(HiddenOutSpec spec) { add_row_op(make_row_op(spec), note_values(spec)); }

void PlanBuilder::add(OutputSpec spec) {
    require(note_values(spec), "an output of rows that are not sampled");
    add_row_op(make_row_op(spec), true);
}

void PlanBuilder::add(ShrinkSpec spec) {
    for (const int site : spec.sites) add_site(site, num_site_groups_);
    num_site_groups_++;
    add_op(std::move(spec));
}

void PlanBuilder::add(LinearSpec spec) {
    require(!spec.parts.empty(), "a matmul without weights");
    const auto& permutation = spec.permutation;
    const bool fits = std::all_of(permutation.begin(), permutation.end(),
                                  [&](int32_t input) { return input >= 0 && input < spec.x.width; });
    require(fits && (permutation.empty() || std::ssize(permutation) == spec.x.width),
            "the permutation does not match the inputs");
    require(!spec.observed.data ||
                (!spec.fuses_input &&
                 spec.observed.size >= static_cast<int64_t>(plan_->options.max_tokens) * spec.x.width),
            "observed rows that no row op quantizes, or a buffer that is too small");
    QuantizedInput& rows = add_input(spec.parts.front().tiles(), spec.x);
    rows.norm = spec.norm;
    rows.skips_zeros = spec.skips_zeros;
    rows.permutation = spec.permutation;
    rows.threshold = spec.threshold;
    rows.observed = spec.observed;
    spec.input = &rows;
    if (!spec.fuses_input) add_row_op(make_row_op(rows), spec.x.on_samples());
    add_op(std::move(spec));
}

void PlanBuilder::add(HeadsSpec spec) {
    require(!spec.weights.empty(), "a matmul without weights");
    spec.input = &add_input(spec.weights.front().tiles, spec.x);
    add_op(std::move(spec));
}

void PlanBuilder::add(AttentionSpec spec) { add_op(std::move(spec)); }
void PlanBuilder::add(ShortConvSpec spec) { add_op(std::move(spec)); }
void PlanBuilder::add(ScanSpec spec) { add_op(std::move(spec)); }

int PlanBuilder::add(RouteSpec spec) {
    const int experts = spec.num_experts();
    spec.route = static_cast<int>(plan_->choices.size());
    plan_->choices.push_back({.num_experts = experts,
                              .top_k = spec.top_k,
                              .last_expert = experts,
                              .scales_rows = spec.scales_rows});
    const int route = spec.route;
    add_op(std::move(spec));
    return route;
}

void PlanBuilder::add(DispatchSpec spec) {
    ExpertChoice& choice = plan_->choices.at(spec.route);
    require(spec.first >= 0 && spec.first < spec.last && spec.last <= choice.num_experts,
            "experts outside the choice");
    choice.first_expert = spec.first;
    choice.last_expert = spec.last;
    if (!spec.x.width) return;
    require(plan_->options.engines != nullptr, "a dispatch with a single engine");
    require(spec.weights.width == choice.top_k, "the width of the weights is not top_k");
    choice.gathers = true;
    add_op(std::move(spec));
}

void PlanBuilder::add(ExpertsSpec spec) {
    require(spec.route >= 0 && spec.route < static_cast<int>(plan_->choices.size()) && !spec.weights.empty(),
            "a matmul without experts");
    spec.input = &add_input(spec.weights.front().tiles, spec.x);
    spec.input->area = RowArea::experts;
    add_op(std::move(spec));
}

void PlanBuilder::add(CollectSpec spec) { add_op(std::move(spec)); }

void PlanBuilder::add(NeuronsSpec spec) {
    require((spec.up_scales != nullptr) == (spec.out.width > 0) && (spec.up_scales || !spec.gate_scales),
            "neurons: scales do not match the matrices");
    if (spec.out.width) {
        QuantizedInput& rows = add_input(neuron_tiles(spec.x.width), spec.x);
        rows.norm = spec.norm;
        rows.area = RowArea::attended;
        rows.threshold = spec.x_threshold;
        spec.input = &rows;
    }
    add_op(std::move(spec));
}

void PlanBuilder::add(PrefetchNeuronsSpec spec) { add_op(std::move(spec)); }
void PlanBuilder::add(CollectiveSpec spec) { add_op(std::move(spec)); }

void PlanBuilder::add(SampleSpec spec) {
    const ValueSlice logits = spec.logits;
    add_op(std::move(spec));
    add(OutputSpec{logits});
}

std::shared_ptr<const Plan> PlanBuilder::build() {
    fuse_quantization(ops_);
    fuse_argmax(ops_);
    prefetch_next_adapters(ops_);
    require(!ops_.empty(), "a plan without ops");
    OpFactory make(*plan_);
    for (OpSpec& op : ops_) std::visit(make, op);
    group_ops(*plan_);
    const std::shared_ptr<const Plan> built = plan_;
    *this = PlanBuilder(*built->kernels, built->options);
    return built;
}

}  // namespace octavo
