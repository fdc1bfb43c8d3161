#include "builder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "collective_stages.h"
#include "expert_stages.h"
#include "mixers.h"
#include "neuron_stages.h"
#include "selection_stages.h"
#include "stages.h"

namespace octavo {

namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

template <typename T>
void grow(T& most, T value) {
    most = std::max(most, value);
}

// Returns the index of a shape among those of a list, at its end where it is new.
template <typename Shape>
int index_of(std::vector<Shape>& shapes, const Shape& shape) {
    const auto found = std::find(shapes.begin(), shapes.end(), shape);
    const auto index = static_cast<int>(found - shapes.begin());
    if (found == shapes.end()) shapes.push_back(shape);
    return index;
}

// A weight of the neurons that a piece of their product takes, without memory.
Tiles neuron_tiles(int width) { return tiles_of({Code::i8}, NeuronUpStage::kTilesAPiece * kTile, width); }

// Makes the stages of one op after another, and notes what they need.
class StageMaker {
  public:
    explicit StageMaker(Plan& plan) : plan_(plan), sizes_(plan.sizes), kernels_(*plan.kernels) {}

    void operator()(RowsSpec& spec) {
        for (const auto& [group, layer] : spec.kv_writes)
            plan_.kv_writes.push_back({static_cast<int>(plan_.body.size()), group, layer});
        push(std::make_unique<RowStage>(spec.samples, std::move(spec.ops)));
    }
    void operator()(ShrinkSpec& spec) {
        grow(sizes_.adapted_width, spec.x.width);
        push(std::make_unique<ShrinkStage>(std::move(spec)));
    }
    void operator()(LinearSpec& spec) {
        for (const LinearPart& part : spec.parts) see_weight(part.tiles(), *spec.rows);
        if (!spec.x.on_samples()) {
            const int least = kernels_.rows_per_byte * static_cast<int>(element_bytes(spec.rows->type));
            plan_.least_rows = std::min(kernels_.row_block, std::max(plan_.least_rows, least));
        }
        const int chunk = spec.chunk;
        push(std::make_unique<LinearStage>(std::move(spec)), chunk);
    }
    void operator()(HeadsSpec& spec) {
        for (const PackedTiles& head : spec.weights) see_weight(head.tiles, *spec.rows);
        sizes_.has_row_blocks = true;
        const int chunk = spec.chunk;
        push(std::make_unique<HeadsStage>(std::move(spec)), chunk);
    }
    // The pieces, then the merge of those that are parts of a run. In front of them two stages where sparse rows
    // choose the keys that they read, and two where those of the next attention are guessed.
    void operator()(AttentionSpec& spec) {
        const int shape =
            index_of(plan_.attentions, {spec.group, spec.num_heads, spec.mask(), spec.latent_width});
        int selection = -1;
        if (spec.selection.budget > 0) {
            require(spec.mask() == Mask{} && !spec.slopes && !spec.distances && spec.buckets.empty(),
                    "chosen keys of an attention that knows their places");
            selection = index_of(plan_.selections, {shape, spec.selection.budget, false});
            push(std::make_unique<BlockMassStage>(spec, spec.selection, selection));
            push(std::make_unique<ChooseKeysStage>(spec, selection));
        }
        if (spec.ahead.budget > 0) {
            const int guess = index_of(plan_.selections, {shape, spec.ahead.budget, true});
            push(std::make_unique<BlockMassStage>(spec, spec.ahead, guess));
            push(std::make_unique<ForeseeKeysStage>(spec, guess));
        }
        push(std::make_unique<AttentionStage>(spec, shape, false, selection));
        push(std::make_unique<AttentionStage>(spec, shape, true, selection));
    }
    void operator()(ShortConvSpec& spec) { push(make_stage(spec)); }
    void operator()(ScanSpec& spec) { push(make_stage(spec)); }

    // The choice of each row, then the order of all rows.
    void operator()(RouteSpec& spec) {
        grow(sizes_.expert_rows, plan_.choices[spec.route].most_rows(plan_.most_expert_tokens()));
        grow(sizes_.num_scores, size_t{4} * spec.num_experts());
        sizes_.has_row_blocks = true;
        push(std::make_unique<RouteStage>(spec));
        push(std::make_unique<OrderStage>(spec.route));
    }
    void operator()(DispatchSpec& spec) {
        SharedRanks& engines = *plan_.options.engines;
        const int num_engines = plan_.options.num_engines;
        const int index = count_expert_exchange(DispatchSlot(spec).bytes(plan_.options.max_tokens));
        push(std::make_unique<DispatchGivesStage>(spec, engines, index, num_engines));
        push(std::make_unique<DispatchMeetsStage>(spec, engines, index, num_engines));
        push(std::make_unique<DispatchRowsStage>(spec, engines, index, num_engines));
    }
    void operator()(ExpertsSpec& spec) {
        for (const auto* list : {&spec.weights, &spec.ups})
            for (const PackedTiles& expert : *list) see_weight(expert.tiles, *spec.rows);
        if (spec.scaled_by.width)
            grow(sizes_.num_scores, static_cast<size_t>(spec.x.width + kGroup - 1) / kGroup * kGroup);
        if (!spec.fuses_input)
            push(std::make_unique<ExpertRowsStage>(*spec.rows, spec.route, spec.scaled_by));
        const int chunk = spec.chunk;
        push(std::make_unique<ExpertsStage>(std::move(spec)), chunk);
    }
    void operator()(CollectSpec& spec) {
        const auto& [ranks, engines] = std::tie(plan_.options.ranks, plan_.options.engines);
        SharedRanks* met = engines ? engines.get() : ranks.get();
        const ExpertChoice& choice = plan_.choices.at(spec.route);
        require(met && static_cast<int>(spec.firsts.size()) == met->num_experts(),
                "experts of other ranks than there are");
        require(spec.x.width == spec.out.width, "experts' rows of another width");
        require(choice.gathers == (engines != nullptr), "experts' rows of tokens that no engine dispatched");
        const int index = count_expert_exchange(sizeof(float) * static_cast<size_t>(spec.x.width) *
                                                plan_.most_expert_tokens() * choice.top_k);
        push(std::make_unique<CollectStage>(spec, *met, index, false));
        push(std::make_unique<CollectStage>(std::move(spec), *met, index, true));
    }

    // The choice of the neurons, then their rows as they arrive.
    void operator()(NeuronsSpec& spec) {
        see_cache(*spec.cache, spec.layer, spec.opened.width);
        require(!plan_.neurons || plan_.neurons == spec.cache, "neurons of two caches");
        plan_.neurons = spec.cache;
        const Tiles tiles = neuron_tiles(spec.x.width);
        if (spec.rows) {
            require(spec.out.width == spec.opened.width, "another number of neurons than there are");
            const size_t row_bytes = static_cast<size_t>(tiles.num_groups) * kGroup;
            require(spec.cache->layer(spec.layer).up_bytes == spec.num_rows() * row_bytes,
                    "rows of another width");
            see_weight(tiles, *spec.rows);
            grow(sizes_.gathered_bytes, total_bytes(tiles));
        }
        auto rows = std::make_unique<NeuronRowsStage>(spec);
        auto asks = std::make_unique<NeuronRequestStage>(*rows);
        push(std::move(rows));
        push(std::move(asks));
        if (!spec.rows) return;
        Tiles gathered = tiles;
        gathered.tile_stride = tiles.tile_bytes;
        push(std::make_unique<NeuronUpStage>(std::move(spec), gathered));
    }
    void operator()(ForeseeSpec& spec) {
        see_cache(*spec.cache, spec.layer, spec.scores.width);
        push(std::make_unique<ForeseeStage>(std::move(spec)));
    }
    void operator()(CollectiveSpec& spec) {
        SharedRanks* ranks = plan_.options.ranks.get();
        require(ranks != nullptr, "a collective of a single rank");
        const int width = std::accumulate(spec.widths.begin(), spec.widths.end(), 0);
        const bool joins = !spec.widths.empty();
        require(!joins || (static_cast<int>(spec.widths.size()) == ranks->num_tensor() &&
                           width == spec.out.width && spec.widths[ranks->tensor_place()] == spec.x.width),
                "columns of other ranks than there are");
        require(joins || spec.x.width == spec.out.width, "a sum of another width");
        const bool samples = spec.x.on_samples();
        const int widest = joins ? *std::max_element(spec.widths.begin(), spec.widths.end()) : spec.x.width;
        const int rows = samples ? kSampleChunk : plan_.options.max_tokens;
        grow(sizes_.rank_slot, sizeof(float) * static_cast<size_t>(widest) * static_cast<size_t>(rows));
        const int index = plan_.num_collectives[samples]++;
        push(std::make_unique<CollectiveStage>(spec, *ranks, index, false));
        push(std::make_unique<CollectiveStage>(spec, *ranks, index, true));
    }
    void operator()(SampleSpec& spec) {
        require(!plan_.head.empty(), "a draw of logits that no op makes");
        if (spec.fuses_best) plan_.logits_product = plan_.head.back().get();
        push(std::make_unique<SampleStage>(spec.logits, plan_.options.vocab));
        plan_.sampling = plan_.head.back().get();
        plan_.logits = spec.logits;
    }

  private:
    void push(std::unique_ptr<Stage> stage, int chunk = -1) {
        stage->chunk = chunk;
        (stage->on_samples() ? plan_.head : plan_.body).push_back(std::move(stage));
    }
    void see_weight(const Tiles& weight, const PreparedRows& rows) {
        require(kernels_.row_type(weight.code) == rows.type,
                "weights that read their rows in different types stand in one product");
        grow(sizes_.product_scratch, kernels_.scratch_bytes(weight));
    }
    static void see_cache(const NeuronCache& cache, int layer, int num_neurons) {
        require(layer >= 0 && layer < cache.num_layers(), "neurons of no layer");
        require(cache.layer(layer).num_neurons == num_neurons, "another number of neurons than there are");
    }
    // Returns the index of an exchange of experts' rows, among those of the engines or of the body.
    int count_expert_exchange(size_t slot_bytes) {
        const bool of_engines = plan_.options.engines != nullptr;
        grow(of_engines ? sizes_.engine_slot : sizes_.rank_slot, slot_bytes);
        return (of_engines ? plan_.num_engine_exchanges : plan_.num_collectives[0])++;
    }

    Plan& plan_;
    BufferSizes& sizes_;
    const KernelTable& kernels_;
};

// Row-local stages that follow one another are a range; an attention's two stages have a barrier between them.
void group_stages(Plan& plan) {
    const auto& body = plan.body;
    for (int i = 0; i < static_cast<int>(body.size()); i++) {
        plan.each.push_back({i, i + 1});
        if (!body[i]->only_adapters()) plan.plain.push_back({i, i + 1});
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
            "experts of no whole engines");
    plan_->kernels = &kernels;
    plan_->options = std::move(options);
    grow(plan_->options.max_tokens, 1);
}

bool PlanBuilder::see(const auto& spec) {
    bool on_tokens = false, on_samples = false;
    each_place(spec, [&](const Place& place) {
        if (!place.width) return;
        (place.on_samples() ? on_samples : on_tokens) = true;
        grow(plan_->sizes.row_floats[static_cast<int>(place.axis)], place.offset + place.width);
    });
    return on_samples && !on_tokens;
}

void PlanBuilder::add_op(auto spec) {
    using Op = decltype(spec);
    constexpr bool runs_on_samples = std::is_same_v<Op, ShrinkSpec> || std::is_same_v<Op, LinearSpec> ||
                                     std::is_same_v<Op, CollectiveSpec> || std::is_same_v<Op, SampleSpec>;
    const bool samples = see(spec);
    require(samples ? runs_on_samples : !std::is_same_v<Op, SampleSpec>,
            "an op over other rows than it takes");
    require(samples || !in_head_, "an op over tokens behind one over samples");
    in_head_ = samples;
    ops_.push_back(std::move(spec));
}

RowsSpec& PlanBuilder::open_rows(bool samples) {
    require(samples || !in_head_, "an op over tokens behind one over samples");
    in_head_ = samples;
    auto* rows = ops_.empty() ? nullptr : std::get_if<RowsSpec>(&ops_.back());
    if (rows && rows->samples == samples) return *rows;
    return std::get<RowsSpec>(ops_.emplace_back(RowsSpec{samples}));
}

void PlanBuilder::add_row_op(std::unique_ptr<RowOp> op, bool samples) {
    open_rows(samples).ops.push_back(std::move(op));
}

PreparedRows& PlanBuilder::add_rows(const Tiles& weight, const Place& x) {
    const int index = static_cast<int>(plan_->rows.size());
    const RowType type = plan_->kernels->row_type(weight.code);
    return plan_->rows.emplace_back(
        PreparedRows{.index = index, .x = x, .type = type, .num_groups = weight.num_groups});
}

void PlanBuilder::add_site(int site, int group) {
    require(site == static_cast<int>(plan_->site_groups.size()), "sites of adapters out of order");
    plan_->site_groups.push_back(group);
}

int PlanBuilder::add(AnglesSpec spec) {
    require(spec.long_inv_freq.empty() ||
                (spec.long_inv_freq.size() == spec.inv_freq.size() && spec.long_start > 0),
            "long angles of another table");
    plan_->angles.push_back(std::move(spec));
    return static_cast<int>(plan_->angles.size()) - 1;
}

void PlanBuilder::add(EmbeddingSpec spec) {
    if (spec.by_position) grow(plan_->num_axes, spec.axis + 1);
    if (spec.site >= 0) add_site(spec.site, -1);
    const bool samples = see(spec);
    add_row_op(make_row_op(std::move(spec)), samples);
}

void PlanBuilder::add(GivenSpec spec) {
    plan_->given_width = spec.out.width;
    add_row_op(make_row_op(spec), see(spec));
}

void PlanBuilder::add(RowNormSpec spec) { add_row_op(make_row_op(spec), see(spec)); }

void PlanBuilder::add(RopeSpec spec) {
    require(spec.angles >= 0 && spec.angles < static_cast<int>(plan_->angles.size()),
            "angles that there are not");
    for (const int axis : spec.axes) grow(plan_->num_axes, axis + 1);
    add_row_op(make_row_op(spec), see(spec));
}

void PlanBuilder::add(KvWriteSpec spec) {
    require(!see(spec), "keys written by sampled rows");
    add_row_op(make_row_op(spec), false);
    open_rows(false).kv_writes.emplace_back(spec.group, spec.layer);
}

void PlanBuilder::add(ElementwiseSpec spec) { add_row_op(make_row_op(spec), see(spec)); }
void PlanBuilder::add(MixSpec spec) { add_row_op(make_row_op(spec), see(spec)); }

// Rows of samples, made of rows of tokens.
void PlanBuilder::add(GatherSpec spec) {
    see(spec);
    add_row_op(make_row_op(spec), spec.out.on_samples());
}
void PlanBuilder::add(PoolSpec spec) {
    see(spec);
    add_row_op(make_row_op(spec), spec.out.on_samples());
}

void PlanBuilder::add(CombineSpec spec) { add_row_op(make_row_op(spec), see(spec)); }

void PlanBuilder::add(HiddenInSpec spec) {
    plan_->hidden_width = spec.out.width;
    add_row_op(make_row_op(spec), see(spec));
}

void PlanBuilder::add(HiddenOutSpec spec) { add_row_op(make_row_op(spec), see(spec)); }

void PlanBuilder::add(OutputSpec spec) {
    require(see(spec), "an output of other rows than the head's");
    add_row_op(make_row_op(spec), true);
}

void PlanBuilder::add(ShrinkSpec spec) {
    for (const int site : spec.sites) add_site(site, num_site_groups_);
    num_site_groups_++;
    add_op(std::move(spec));
}

void PlanBuilder::add(LinearSpec spec) {
    require(!spec.parts.empty(), "a product without weights");
    const auto& permutation = spec.permutation;
    const bool fits = std::all_of(permutation.begin(), permutation.end(),
                                  [&](int32_t input) { return input >= 0 && input < spec.x.width; });
    require(fits && (permutation.empty() || std::ssize(permutation) == spec.x.width),
            "a permutation of other inputs than the rows have");
    require(!spec.observed.data ||
                (!spec.fuses_input &&
                 spec.observed.size >= static_cast<int64_t>(plan_->options.max_tokens) * spec.x.width),
            "observed rows that no row op converts, or that have no room");
    PreparedRows& rows = add_rows(spec.parts.front().tiles(), spec.x);
    rows.norm = spec.norm;
    rows.skips_zeros = spec.skips_zeros;
    rows.permutation = spec.permutation;
    rows.threshold = spec.threshold;
    rows.observed = spec.observed;
    spec.rows = &rows;
    if (!spec.fuses_input) add_row_op(make_row_op(rows), spec.x.on_samples());
    add_op(std::move(spec));
}

void PlanBuilder::add(HeadsSpec spec) {
    require(!spec.weights.empty(), "a product without weights");
    spec.rows = &add_rows(spec.weights.front().tiles, spec.x);
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
            "experts that there are not");
    choice.first_expert = spec.first;
    choice.last_expert = spec.last;
    if (!spec.x.width) return;
    require(plan_->options.engines != nullptr, "tokens of a single engine");
    require(spec.weights.width == choice.top_k, "weights of other choices");
    choice.gathers = true;
    add_op(std::move(spec));
}

void PlanBuilder::add(ExpertsSpec spec) {
    require(spec.route >= 0 && spec.route < static_cast<int>(plan_->choices.size()) && !spec.weights.empty(),
            "a product of no experts");
    spec.rows = &add_rows(spec.weights.front().tiles, spec.x);
    spec.rows->area = RowArea::experts;
    add_op(std::move(spec));
}

void PlanBuilder::add(CollectSpec spec) { add_op(std::move(spec)); }

void PlanBuilder::add(NeuronsSpec spec) {
    require((spec.up_scales != nullptr) == (spec.out.width > 0) && (spec.up_scales || !spec.gate_scales),
            "neurons: not the scales of each matrix");
    if (spec.out.width) {
        PreparedRows& rows = add_rows(neuron_tiles(spec.x.width), spec.x);
        rows.norm = spec.norm;
        rows.area = RowArea::attended;
        rows.threshold = spec.x_threshold;
        spec.rows = &rows;
    }
    add_op(std::move(spec));
}

void PlanBuilder::add(ForeseeSpec spec) { add_op(std::move(spec)); }
void PlanBuilder::add(CollectiveSpec spec) { add_op(std::move(spec)); }

void PlanBuilder::add(SampleSpec spec) {
    const Place logits = spec.logits;
    add_op(std::move(spec));
    add(OutputSpec{logits});
}

std::shared_ptr<const Plan> PlanBuilder::build() {
    fuse_conversions(ops_);
    fuse_best_logits(ops_);
    prefetch_adapters(ops_);
    require(!ops_.empty(), "a plan without ops");
    StageMaker make(*plan_);
    for (PlanOp& op : ops_) std::visit(make, op);
    group_stages(*plan_);
    const std::shared_ptr<const Plan> built = plan_;
    *this = PlanBuilder(*built->kernels, built->options);
    return built;
}

}  // namespace octavo
