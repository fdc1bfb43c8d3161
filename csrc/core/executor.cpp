#include "executor.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "collectives.h"
#include "expert_stages.h"
#include "neuron_stages.h"
#include "selection_stages.h"
#include "stages.h"
#include "walk.h"

namespace octavo {

float* View::at(const Place& p, int64_t row) const {
    const int64_t place = p.axis == Axis::block ? row - shift : row;
    return executor.arena(p.axis) + place * executor.row_floats(p.axis) + p.offset;
}

const uint8_t* View::sparse_rows(bool samples) const {
    return executor.sparse_rows(samples) + (samples ? first_sample : 0);
}

int64_t View::stride(const Place& p) const { return executor.row_floats(p.axis); }

static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

void RopeAngles::turn_from(int start, Frequencies others) {
    require(others.inv_freq.size() == size() && start > 0 && table_.empty(), "long angles of another table");
    long_start_ = start, long_ = std::move(others);
}

void RopeAngles::ensure(int positions) {
    const int n = static_cast<int>(size());
    const int have = n ? static_cast<int>(table_.size() / (2 * n)) : positions;
    if (positions <= have) return;
    const int want = std::max(positions, 2 * have);
    table_.resize(static_cast<size_t>(want) * 2 * n);
    for (int p = have; p < want; p++) {
        const bool is_long = p >= long_start_;
        const auto& [inv_freq, mscale] = is_long ? long_ : all_;
        const int at = is_long ? p - long_start_ : p;
        for (int i = 0; i < n; i++) {
            table_[(static_cast<size_t>(p) * 2) * n + i] =
                static_cast<float>(std::cos(at * inv_freq[i]) * mscale);
            table_[(static_cast<size_t>(p) * 2 + 1) * n + i] =
                static_cast<float>(std::sin(at * inv_freq[i]) * mscale);
        }
    }
}

void Executor::record(const Stage& stage, const View& view, double seconds) {
    StageTime& time = profiled_[stage.name()];
    const Cost cost = stage.cost(view);
    time.code = stage.code();
    time.calls++;
    time.seconds += seconds;
    time.cost.bytes += cost.bytes;
    time.cost.operations += cost.operations;
}

Executor::Executor(ThreadPool& pool, const KernelTable& kernels, int max_tokens, int vocab)
    : pool_(pool),
      kernels_(kernels),
      max_tokens_(std::max(max_tokens, 1)),
      vocab_(vocab),
      threads_(pool.num_threads()) {}

void Executor::begin_stage(bool samples, int range) {
    require(samples || !open_.samples, "a stage over tokens behind one over samples");
    require(range >= open_.range, "ranges that do not count up");
    open_ = {samples, range, true};
}

// One thread may be stages ahead of another in a range: what is not row-local stands alone in its own.
void Executor::push(std::unique_ptr<Stage> stage) {
    require(open_.range >= 0, "an op before the first stage");
    require(stage->on_samples() == open_.samples, "an op over other rows than its stage has");
    if (!open_.samples) {
        const bool continues = !body_.empty() && body_ranges_.back() == open_.range;
        require(!continues || body_.back()->row_local() == stage->row_local(),
                "an attention that shares its range");
        body_ranges_.push_back(open_.range);
    }
    stage->chunk = std::exchange(open_.chunk, -1);
    open_list().push_back(std::move(stage));
    open_.is_empty = false;
}

void Executor::add_row_op(std::unique_ptr<RowOp> op) {
    if (open_.is_empty) push(std::make_unique<RowStage>(open_.samples));
    auto* stage = dynamic_cast<RowStage*>(open_list().back().get());
    require(stage, "a row op in a stage of another kind");
    stage->ops.push_back(std::move(op));
}

void Executor::note_kv_write(int group, int layer) {
    require(!open_.samples, "keys written by sampled rows");
    kv_writes_.push_back({static_cast<int>(body_.size()) - 1, group, layer});
}

// Rows as the product of `w` reads them; their memory is sized by finish(), which fills the pointers and
// strides in.
PreparedRows* Executor::new_rows(const Tiles& w, const Place& x, RowArea area) {
    rows_.push_back(std::make_unique<PreparedRows>());
    const RowType type = kernels_.row_type(w.code);
    rows_.back()->x = x;
    rows_.back()->area = area;
    rows_.back()->rows = Rows{.type = type, .num_groups = w.num_groups};
    size_t &bytes = row_bytes_[static_cast<int>(area)], &groups = groups_[static_cast<int>(area)];
    bytes = std::max(bytes, row_elements(type, w.num_groups) * element_bytes(type));
    groups = std::max(groups, static_cast<size_t>(w.num_groups));
    return rows_.back().get();
}

PreparedRows* Executor::add_conversion(const Place& x, const Norm& norm, const Tiles& w,
                                       std::vector<int32_t> permutation, float threshold) {
    const bool fits = std::all_of(permutation.begin(), permutation.end(),
                                  [&](int32_t input) { return input >= 0 && input < x.width; });
    require(fits && (permutation.empty() || static_cast<int64_t>(permutation.size()) == x.width),
            "a permutation of other inputs than the rows have");
    PreparedRows* rows = new_rows(w, x, RowArea::prepared);
    rows->norm = norm;
    rows->permutation = std::move(permutation);
    rows->threshold = threshold;
    add_row_op(std::make_unique<PrepareOp>(rows));
    return rows;
}

void Executor::observe(PreparedRows& rows, float* copies) {
    require(rows.area == RowArea::prepared, "observed rows that no row op converts");
    rows.observed = copies;
}

PreparedRows* Executor::convert_in_last_stage(const Place& x, const Tiles& w, bool keeps_out) {
    Stages& list = open_list();
    require(!list.empty(), "rows that no stage converts");
    if (auto* linear = dynamic_cast<LinearStage*>(list.back().get())) {
        PreparedRows* rows = new_rows(w, x, RowArea::converted);
        linear->spec.converts = rows;
        linear->spec.keeps_out = keeps_out;
        return rows;
    }
    if (auto* experts = dynamic_cast<ExpertsStage*>(list.back().get())) {
        PreparedRows* rows = new_rows(w, x, RowArea::experts);
        experts->spec.converts = rows;
        return rows;
    }
    require(dynamic_cast<AttentionStage*>(list.back().get()), "rows that no product or attention converts");
    PreparedRows* rows = new_rows(w, x, RowArea::attended);
    for (size_t i = list.size() - 2; i < list.size(); i++) {
        auto& attention = dynamic_cast<AttentionStage&>(*list[i]);
        attention.spec.converts = rows;
        attention.spec.keeps_out = keeps_out;
    }
    return rows;
}

void Executor::add_shrink(const Place& x, const Norm& norm, std::vector<int> sites) {
    require(open_.is_empty, "adapters in a stage with other ops");
    adapted_width_ = std::max(adapted_width_, x.width);
    push(std::make_unique<ShrinkStage>(x, norm, std::move(sites)));
}

void Executor::add_linear(LinearSpec spec) {
    require(open_.is_empty, "a product in a stage with other ops");
    require(spec.rows, "a product without converted rows");
    const RowType type = spec.rows->rows.type;
    for (const auto& part : spec.parts) {
        require(kernels_.row_type(part.tiles.code) == type,
                "weights that read their rows in different types stand in one product");
        product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(part.tiles));
    }
    if (!open_.samples) {
        const int least = kernels_.rows_per_byte * static_cast<int>(element_bytes(type));
        least_rows_ = std::min(kernels_.row_block, std::max(least_rows_, least));
    }
    push(std::make_unique<LinearStage>(std::move(spec)));
}

void Executor::add_heads(HeadsSpec spec) {
    require(open_.is_empty, "a product of heads in a stage with other ops");
    for (const Tiles& tiles : spec.weights) {
        spec.rows = new_rows(tiles, spec.x, RowArea::prepared);
        product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(tiles));
    }
    has_row_blocks_ = true;
    push(std::make_unique<HeadsStage>(std::move(spec)));
}

// The plan of all attentions that are cut alike.
int Executor::plan_of(const AttentionSpec& spec) {
    for (int index = 0; index < static_cast<int>(plans_.size()); index++)
        if (plans_[index].group == spec.group && plans_[index].mask == spec.mask &&
            plans_[index].num_heads == spec.num_heads && plans_[index].latent_width == spec.latent_width)
            return index;
    AttentionPlan plan;
    plan.group = spec.group;
    plan.mask = spec.mask;
    plan.num_heads = spec.num_heads;
    plan.latent_width = spec.latent_width;
    plans_.push_back(plan);
    return static_cast<int>(plans_.size()) - 1;
}

// Two stages: the pieces, then the merge of those that are parts of a run. Two more in front of them where sparse
// rows choose the keys that they read, and where those of the next attention are guessed.
void Executor::add_attention(const AttentionSpec& spec) {
    require(open_.is_empty, "an attention in a stage with other ops");
    const int plan = plan_of(spec);
    SelectedKeys* selected = nullptr;
    if (spec.selection.budget > 0) {
        require(spec.mask == Mask{} && !spec.slopes && !spec.distances && spec.buckets.empty(),
                "chosen keys of an attention that knows their places");
        selected = &keys_of(selected_, plan, spec.selection.budget);
        push(std::make_unique<BlockMassStage>(spec, spec.selection, *selected));
        push(std::make_unique<ChooseKeysStage>(spec, *selected));
    }
    if (spec.ahead.budget > 0) {
        SelectedKeys& guess = keys_of(guessed_, plan, spec.ahead.budget);
        push(std::make_unique<BlockMassStage>(spec, spec.ahead, guess));
        push(std::make_unique<ForeseeKeysStage>(spec, guess));
    }
    push(std::make_unique<AttentionStage>(spec, plan, false, selected));
    body_.push_back(std::make_unique<AttentionStage>(spec, plan, true, selected));
    body_ranges_.push_back(open_.range);
}

SelectedKeys& Executor::keys_of(Selections& selections, int plan, double budget) {
    selections.resize(plans_.size());
    if (!selections[plan]) selections[plan] = std::make_unique<SelectedKeys>(plans_[plan], budget);
    return *selections[plan];
}

// Two stages: the choice of each row, then the order of all rows.
int Executor::add_route(const RouteSpec& spec) {
    require(open_.is_empty, "a choice of experts in a stage with other ops");
    const int experts = spec.num_experts();
    expert_plans_.push_back(std::make_unique<ExpertPlan>(experts, spec.top_k, most_expert_tokens()));
    expert_rows_ = std::max(expert_rows_, ExpertPlan::most_rows(experts, spec.top_k, most_expert_tokens()));
    num_scores_ = std::max(num_scores_, static_cast<size_t>(4) * experts);
    ExpertPlan& plan = *expert_plans_.back();
    plan.scales_rows = spec.scales_rows;
    has_row_blocks_ = true;
    push(std::make_unique<RouteStage>(spec, plan));
    push(std::make_unique<OrderStage>(plan));
    return static_cast<int>(expert_plans_.size()) - 1;
}

PreparedRows* Executor::convert_in_route(const Place& x, const Tiles& w) {
    Stages& list = open_list();
    if (auto* dispatch = list.empty() ? nullptr : dynamic_cast<DispatchRowsStage*>(list.back().get())) {
        require(!dispatch->converts, "rows of all engines that are converted twice");
        return dispatch->converts = new_rows(w, x, RowArea::attended);
    }
    auto* route = list.size() < 2 ? nullptr : dynamic_cast<RouteStage*>(list[list.size() - 2].get());
    require(route && !route->converts, "rows for experts that the stage before does not choose");
    return route->converts = new_rows(w, x, RowArea::attended);
}

PreparedRows* Executor::add_expert_conversion(const Place& x, int route, const Tiles& w, const Place* by) {
    PreparedRows* rows = new_rows(w, x, RowArea::experts);
    if (by) num_scores_ = std::max(num_scores_, static_cast<size_t>(x.width + kGroup - 1) / kGroup * kGroup);
    push(std::make_unique<ExpertRowsStage>(*rows, *expert_plan(route), by ? *by : Place{}));
    return rows;
}

void Executor::add_experts(ExpertsSpec spec) {
    require(spec.rows, "an experts' product without converted rows");
    for (const auto* list : {&spec.weights, &spec.ups})
        for (const Tiles& tiles : *list) {
            require(kernels_.row_type(tiles.code) == spec.rows->rows.type,
                    "weights that read their rows in different types stand in one product");
            product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(tiles));
        }
    push(std::make_unique<ExpertsStage>(std::move(spec)));
}

void Executor::add_neurons(NeuronsSpec spec, const Place& x, const Norm& norm, float threshold) {
    require(open_.is_empty, "neurons in a stage with other ops");
    require(!neurons_ || neurons_ == spec.cache, "neurons of two caches");
    require(spec.layer >= 0 && spec.layer < spec.cache->num_layers(), "neurons of no layer");
    const NeuronCache::Layer& layer = spec.cache->layer(spec.layer);
    require(layer.num_neurons == spec.opened.width, "another number of neurons than there are");
    neurons_ = spec.cache;
    const Tiles tiles = tiles_of({Code::i8}, NeuronUpStage::kTilesAPiece * kTile, x.width);
    if (spec.out.width) {
        require(spec.out.width == spec.opened.width, "another number of neurons than there are");
        const size_t row_bytes = static_cast<size_t>(tiles.num_groups) * kGroup;
        require(layer.up_bytes == spec.num_rows() * row_bytes, "rows of another width");
        PreparedRows* rows = new_rows(tiles, x, RowArea::attended);
        rows->norm = norm;
        rows->threshold = threshold;
        spec.rows = rows;
        product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(tiles));
        gathered_bytes_ = std::max(gathered_bytes_, total_bytes(tiles));
    }
    auto rows = std::make_unique<NeuronRowsStage>(spec);
    auto asks = std::make_unique<NeuronRequestStage>(*rows);
    push(std::move(rows));
    push(std::move(asks));
    if (!spec.out.width) return;
    Tiles gathered = tiles;
    gathered.tile_stride = tiles.tile_bytes;
    push(std::make_unique<NeuronUpStage>(std::move(spec), gathered));
}

void Executor::add_foresee(std::shared_ptr<NeuronCache> cache, int layer, const Place& scores) {
    require(open_.is_empty, "a guess of neurons in a stage with other ops");
    require(layer >= 0 && layer < cache->num_layers(), "neurons of no layer");
    require(cache->layer(layer).num_neurons == scores.width, "another number of neurons than there are");
    push(std::make_unique<ForeseeStage>(std::move(cache), layer, scores));
}

void Executor::add_collective(const CollectiveSpec& spec) {
    require(ranks_ != nullptr, "a collective of a single rank");
    require(open_.is_empty, "a collective in a stage with other ops");
    const int width = std::accumulate(spec.widths.begin(), spec.widths.end(), 0);
    const bool joins = !spec.widths.empty();
    require(!joins || (static_cast<int>(spec.widths.size()) == ranks_->num_tensor() &&
                       width == spec.out.width && spec.widths[ranks_->tensor_place()] == spec.x.width),
            "columns of other ranks than there are");
    require(joins || spec.x.width == spec.out.width, "a sum of another width");
    const int widest = joins ? *std::max_element(spec.widths.begin(), spec.widths.end()) : spec.x.width;
    const int rows = open_.samples ? kSampleChunk : max_tokens_;
    slot_bytes_ =
        std::max(slot_bytes_, sizeof(float) * static_cast<size_t>(widest) * static_cast<size_t>(rows));
    const int index = num_collectives_[open_.samples]++;
    push(std::make_unique<CollectiveStage>(spec, *ranks_, index, false));
    push(std::make_unique<CollectiveStage>(spec, *ranks_, index, true));
}

void Executor::own_experts(int route, int first, int last) {
    ExpertPlan& plan = *expert_plans_.at(route);
    require(first >= 0 && first < last && last <= plan.num_experts, "experts that there are not");
    plan.first_expert = first;
    plan.last_expert = last;
}

void Executor::meet_engines(std::shared_ptr<SharedRanks> ranks, int num_engines) {
    require(expert_plans_.empty(), "engines met behind a choice of experts");
    require(num_engines > 0 && ranks->num_experts() % num_engines == 0, "experts of no whole engines");
    engines_ = std::move(ranks);
    num_engines_ = num_engines;
}

void Executor::count_expert_exchange(size_t slot_bytes) {
    size_t& most = engines_ ? engine_slot_bytes_ : slot_bytes_;
    most = std::max(most, slot_bytes);
    (engines_ ? num_engine_exchanges_ : num_collectives_[0])++;
}

void Executor::add_dispatch(const Place& x, const Place& weights, int route) {
    require(engines_ != nullptr, "tokens of a single engine");
    require(open_.is_empty && !open_.samples, "tokens dispatched in a stage with other ops");
    ExpertPlan& plan = *expert_plans_.at(route);
    require(weights.width == plan.top_k, "weights of other choices");
    plan.gathers = true;
    plan.weights.resize(plan.ids.size());
    plan.token_rows.resize(static_cast<size_t>(most_expert_tokens()));
    const DispatchSpec spec{x, weights, &plan};
    const int index = num_engine_exchanges_;
    count_expert_exchange(DispatchSlot(spec).bytes(max_tokens_));
    push(std::make_unique<DispatchGivesStage>(spec, *engines_, index, num_engines_));
    push(std::make_unique<DispatchMeetsStage>(spec, *engines_, index, num_engines_));
    push(std::make_unique<DispatchRowsStage>(spec, *engines_, index, num_engines_));
}

void Executor::add_collect(CollectSpec spec) {
    SharedRanks* ranks = engines_ ? engines_.get() : ranks_.get();
    require(ranks && static_cast<int>(spec.firsts.size()) == ranks->num_experts(),
            "experts of other ranks than there are");
    require(open_.is_empty && !open_.samples, "experts' rows collected in a stage with other ops");
    require(spec.x.width == spec.out.width, "experts' rows of another width");
    require(spec.plan->gathers == (engines_ != nullptr), "experts' rows of tokens that no engine dispatched");
    const int index = engines_ ? num_engine_exchanges_ : num_collectives_[0];
    count_expert_exchange(sizeof(float) * static_cast<size_t>(spec.x.width) *
                          static_cast<size_t>(most_expert_tokens()) * static_cast<size_t>(spec.plan->top_k));
    push(std::make_unique<CollectStage>(spec, *ranks, index, false));
    push(std::make_unique<CollectStage>(std::move(spec), *ranks, index, true));
}

uint32_t Executor::collective(int index, const View& view) const {
    // The head's collectives come again with each chunk of sampled rows; no rows, no chunk.
    const bool samples = view.num_samples > 0;
    const int before =
        samples ? num_collectives_[0] + view.first_sample / kSampleChunk * num_collectives_[1] : 0;
    return first_collective_ + static_cast<uint32_t>(before + index);
}

int Executor::count_collectives(const Batch& batch) const {
    const int chunks = (batch.num_samples + kSampleChunk - 1) / kSampleChunk;
    return num_collectives_[0] + chunks * num_collectives_[1];
}

void Executor::add_sampling(const Place& logits) {
    require(open_.is_empty && !head_.empty(),
            "a draw without a stage of its own, behind one that makes logits");
    const auto* linear = dynamic_cast<const LinearStage*>(head_.back().get());
    if (linear && linear->writes_only(logits)) logits_product_ = linear;
    push(std::make_unique<SampleStage>(logits, vocab_));
    sampling_ = head_.back().get();
    logits_ = logits;
    push(std::make_unique<RowStage>(true));
    add_row_op(make_rows_out(logits));
}

void Executor::add_hidden_input(const Place& out) {
    hidden_width_ = out.width;
    add_row_op(make_hidden_in(out));
}

void Executor::add_output(const Place& rows) {
    require(open_.is_empty && open_.samples, "an output without a stage of its own over the head's rows");
    add_row_op(make_rows_out(rows));
}

RopeAngles* Executor::add_angles(Frequencies all) {
    angles_.push_back(std::make_unique<RopeAngles>(std::move(all)));
    return angles_.back().get();
}

Best Executor::best(int sample) const {
    Best best;
    for (const auto& thread : threads_) best.see(thread.best[sample]);
    return best;
}

const float* Executor::keep(std::vector<float> values) {
    kept_.push_back(std::make_unique<std::vector<float>>(std::move(values)));
    return kept_.back()->data();
}

// Rounds up to an odd number of cache lines, so that one place of neighbouring rows lies in different sets of
// a cache.
static int64_t odd_lines(int64_t elements, int64_t element) {
    const int64_t lines = (elements * element + 63) / 64;
    return (lines | 1) * 64 / element;
}

static size_t whole_blocks(int rows) { return static_cast<size_t>(rows + kTile - 1) / kTile * kTile; }

size_t bytes_of_rows(const Rows& rows, size_t count) {
    const size_t values = (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    return values + count * rows.group_stride * 16;
}

void place_rows_at(uint8_t* memory, size_t count, Rows& rows) {
    rows.values = memory;
    memory += (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    rows.scales = reinterpret_cast<float*>(memory);
    rows.scaled_sums = rows.scales + count * rows.group_stride;
    rows.sums = reinterpret_cast<int32_t*>(rows.scaled_sums + count * rows.group_stride);
}

void Executor::finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats,
                      int64_t expert_floats) {
    const int64_t floats[kNumAxes] = {token_floats, block_floats, sample_floats, expert_floats};
    const size_t rows[kNumAxes] = {static_cast<size_t>(max_tokens_),
                                   static_cast<size_t>(pool_.num_threads()) * kernels_.row_block,
                                   kSampleChunk, expert_rows_};
    for (int axis = 0; axis < kNumAxes; axis++) {
        row_floats_[axis] = odd_lines(floats[axis], sizeof(float));
        arenas_[axis] = std::make_unique<Memory>(row_floats_[axis] * rows[axis] * sizeof(float));
    }
    if (ranks_) ranks_->reserve(slot_bytes_);
    if (engines_) engines_->reserve(engine_slot_bytes_);
    place_rows();
    group_stages();
    link_shrinks();
    order_chunks();
    size_thread_states();
}

// The converted rows of all products share the areas: no two products' are alive at a time in one of them.
void Executor::place_rows() {
    const size_t prepared = whole_blocks(std::max(pool_.num_threads() * kernels_.row_block, kSampleChunk));
    const size_t attended = whole_blocks(most_expert_tokens());
    const size_t rows_of[kNumRowAreas] = {prepared, prepared, attended, expert_rows_};
    for (int area = 0; area < kNumRowAreas; area++) {
        row_bytes_[area] = static_cast<size_t>(odd_lines(static_cast<int64_t>(row_bytes_[area]), 1));
        areas_[area] = std::make_unique<Memory>(rows_of[area] * (row_bytes_[area] + groups_[area] * 16));
    }
    for (auto& each : rows_) {
        const int area = static_cast<int>(each->area);
        each->rows.stride = static_cast<int64_t>(row_bytes_[area] / element_bytes(each->rows.type));
        each->rows.group_stride = static_cast<int32_t>(groups_[area]);
        place_rows_at(areas_[area]->data(), rows_of[area], each->rows);
    }
}

// An attention's two stages have one range, but a barrier between them.
void Executor::group_stages() {
    for (int i = 0; i < static_cast<int>(body_.size()); i++) {
        each_.push_back({i, i + 1});
        if (!body_[i]->only_adapters()) plain_.push_back({i, i + 1});
        if (i > 0 && body_ranges_[i] == body_ranges_[i - 1] && body_[i]->row_local())
            ranges_.back().last = i + 1;
        else
            ranges_.push_back({i, i + 1});
    }
}

// A product asks for what the adapters of the next one read.
void Executor::link_shrinks() {
    LinearStage* product = nullptr;
    for (const auto& stage : body_) {
        if (const auto* shrink = dynamic_cast<const ShrinkStage*>(stage.get()); shrink && product)
            std::exchange(product, nullptr)->next_shrink = shrink;
        if (auto* next = dynamic_cast<LinearStage*>(stage.get())) product = next;
    }
}

// Chunks arrive in the order of the stages, and those of a range, which are all waited for at once, or of the
// head, which may run several times, lie in memory together.
void Executor::order_chunks() {
    if (!stream_) return;
    int last = -1;
    for (const auto* list : {&body_, &head_})
        for (const auto& stage : *list) {
            if (stage->chunk < 0) continue;
            require(stage->chunk == last || stage->chunk == last + 1, "chunks of weights out of order");
            last = stage->chunk;
        }
    require(last + 1 == static_cast<int>(stream_->streamed().size()),
            "a chunk of weights that no stage reads");
    // A stage releases the chunks before its own; the last stage of a chunk releases that one too.
    released_.assign(body_.size(), 0);
    int next = static_cast<int>(stream_->streamed().size());
    for (const auto& stage : head_)
        if (stage->chunk >= 0) next = std::min(next, stage->chunk);
    const int head_first = next;
    for (int i = static_cast<int>(body_.size()) - 1; i >= 0; i--) {
        released_[i] = next;
        if (body_[i]->chunk >= 0) next = body_[i]->chunk;
    }
    for (const StageRange& range : ranges_)
        check_places(range.first ? released_[range.first - 1] : 0, released_[range.last - 1]);
    check_places(head_first, static_cast<int>(stream_->streamed().size()));
}

void Executor::check_places(int first, int end) const {
    const auto& chunks = stream_->streamed();
    for (int a = first; a < end; a++)
        for (int b = a + 1; b < end; b++)
            require(!chunks[a].overlaps(chunks[b]), "chunks of one range in one place");
}

void Executor::size_thread_states() {
    size_t row_bytes = 0;
    for (const auto& each : rows_)
        row_bytes = std::max(row_bytes, bytes_of_rows(each->rows, has_row_blocks_ ? kExpertRows : kTile));
    for (auto& thread : threads_) {
        for (auto& acc : thread.acc) acc.resize(static_cast<size_t>(kRowBlock) * kTile);
        for (auto& sums : thread.columns)
            sums.resize(static_cast<size_t>(kTile) *
                        std::max(kColumnTiles * kColumnRows, kGatheredTiles * kRowBlock));
        thread.group.resize(static_cast<size_t>(kRowBlock) * kGroup);
        thread.product = std::make_unique<Memory>(product_scratch_);
        thread.rows = std::make_unique<Memory>(row_bytes);
        thread.scores.resize(num_scores_);
        thread.adapted =
            std::make_unique<Memory>(sizeof(float) * AdapterRows::kTogether * padded_width(adapted_width_));
        thread.gathered = std::make_unique<Memory>(gathered_bytes_);
        thread.seconds.resize(body_.size());
        thread.sampling = std::make_unique<Memory>(kernels_.sample_scratch_bytes(vocab_));
    }
}

void Executor::make_plans(const Batch& batch, const KvMemory& kv) {
    size_t floats = 0;
    for (auto& plan : plans_) {
        const KvGroup& group = kv.group(plan.group);
        plan.make(batch, group, pool_.num_threads(), share_prefixes_);
        floats = std::max(floats, plan.partial_floats);
        attention_scratch_ =
            std::max(attention_scratch_, attention_scratch_floats(group.k_width, plan.v_padded(group)));
    }
    if (!partials_ || partials_->size() < floats * sizeof(float))
        partials_ = std::make_unique<Memory>(floats * sizeof(float));
    for (auto& thread : threads_)
        if (thread.attention.size() < attention_scratch_) thread.attention.resize(attention_scratch_);
}

[[noreturn]] static void fail(const std::string& what) { throw std::invalid_argument(what); }

// A slot or a block outside the KV memory would corrupt another request's keys: better an exception here.
void Executor::check(const Batch& batch, const KvMemory& kv) const {
    if (batch.num_axes < num_axes_)
        fail("positions on " + std::to_string(batch.num_axes) + " axes, the program reads " +
             std::to_string(num_axes_));
    if (batch.given && given_width_ && batch.given_width != given_width_)
        fail("given rows of width " + std::to_string(batch.given_width) + ", the program takes " +
             std::to_string(given_width_));
    for (int t = 0; batch.limits && t < batch.num_tokens; t++)
        if (batch.limits[t] <= batch.places[t])
            fail("row " + std::to_string(t) + " sees keys up to " + std::to_string(batch.limits[t]) +
                 ", not its own at " + std::to_string(batch.places[t]));
    if (batch.hidden_width != hidden_width_)
        fail("rows of " + std::to_string(batch.hidden_width) + " numbers come from the stage before, not " +
             std::to_string(hidden_width_));
    if (batch.num_tokens > max_tokens_)
        fail("a step of " + std::to_string(batch.num_tokens) + " tokens, prepared for " +
             std::to_string(max_tokens_));
    for (int i = 0; i < kv.num_groups() * batch.num_tokens; i++)
        if (batch.slots[i] < -1 || batch.slots[i] >= kv.group(i / batch.num_tokens).num_blocks * kTile)
            fail("slot " + std::to_string(batch.slots[i]) + " is outside the KV memory");
    for (int64_t i = 0; i < static_cast<int64_t>(kv.num_groups()) * batch.num_copies; i++)
        if (batch.copy_slots[i] < -1 ||
            batch.copy_slots[i] >= kv.group(i / batch.num_copies).num_blocks * kTile)
            fail("a copy to slot " + std::to_string(batch.copy_slots[i]) + " is outside the KV memory");
    for (const auto& plan : plans_) check_tables(plan, batch, kv);
    for (const auto& stage : body_) stage->check(batch, kv);
    for (int t = 0; batch.adapters && t < batch.num_tokens; t++)
        if (batch.adapters[t] >= 0 && !adapters_.has(batch.adapters[t]))
            fail("row " + std::to_string(t) + " has the adapter of slot " +
                 std::to_string(batch.adapters[t]) + ", which is empty");
    for (int s = 0; s < batch.num_samples; s++)
        if (batch.sample_rows[s] < 0 || batch.sample_rows[s] >= batch.num_tokens)
            fail("sampled row " + std::to_string(batch.sample_rows[s]) + " of " +
                 std::to_string(batch.num_tokens));
}

void Executor::check_tables(const AttentionPlan& plan, const Batch& batch, const KvMemory& kv) const {
    for (int r = 0; r < batch.num_requests; r++) {
        const int row = batch.query_starts[r], i = plan.group * batch.num_requests + r;
        if (row == batch.query_starts[r + 1]) continue;
        const int needed = (batch.context_lens[i] + kTile - 1) / kTile;
        if (needed > batch.table_width)
            fail("a context of " + std::to_string(batch.context_lens[i]) + " keys with " +
                 std::to_string(batch.table_width) + " blocks");
        // Blocks that a window has passed may be gone from the table.
        const int first_key = plan.mask.first_key(batch.places[row]);
        for (int b = first_key / kTile; b < needed; b++) {
            const int block = batch.block_tables[static_cast<int64_t>(i) * batch.table_width + b];
            if (!kv.has_block(plan.group, block))
                fail("block " + std::to_string(block) + " is outside the KV memory");
        }
    }
}

void Executor::profile(bool on) {
    profiling_ = on;
    profiled_.clear();
}

void Executor::sort_adapters(const Batch& batch) {
    if (!batch.adapters) return;
    adapted_.sort(batch.adapters, 0, batch.num_tokens);
    std::vector<int32_t> slots(batch.num_samples);
    for (int s = 0; s < batch.num_samples; s++) slots[s] = batch.adapters[batch.sample_rows[s]];
    adapted_samples_.resize((batch.num_samples + kSampleChunk - 1) / kSampleChunk);
    for (int first = 0; first < batch.num_samples; first += kSampleChunk)
        adapted_samples_[first / kSampleChunk].sort(slots.data() + first, 0,
                                                    std::min(kSampleChunk, batch.num_samples - first));
}

void Executor::mark_sparse(const Batch& batch) {
    sparse_rows_.assign(batch.num_tokens, 0);
    sparse_samples_.assign(batch.num_samples, 0);
    for (int r = 0; batch.sparse_from && r < batch.num_requests; r++)
        for (int t = batch.query_starts[r]; t < batch.query_starts[r + 1]; t++)
            sparse_rows_[t] = batch.places[t] >= batch.sparse_from[r];
    for (int s = 0; s < batch.num_samples; s++) sparse_samples_[s] = sparse_rows_[batch.sample_rows[s]];
}

void Executor::run(const Batch& batch, const KvMemory& kv) {
    check(batch, kv);
    mark_sparse(batch);
    for (const auto& selected : selected_)
        if (selected) selected->begin(batch, kv, sparse_rows_.data());
    for (const auto& guessed : guessed_)
        if (guessed) guessed->begin(batch, kv, sparse_rows_.data(), true);
    begin_spill(batch, kv);
    num_kept_ = batch.keeps_logits ? batch.num_samples : 0;
    sort_adapters(batch);
    int last = 0;
    for (int t = 0; t < num_axes_ * batch.num_tokens; t++) last = std::max(last, batch.positions[t]);
    for (auto& angles : angles_) angles->ensure(last + 1);
    make_plans(batch, kv);
    for (auto& thread : threads_) {
        thread.prepared_stage = thread.prepared_block = -1;
        thread.best.assign(batch.num_samples, Best{});
    }
    kernels_.begin_step();
    if (neurons_) neurons_->begin_step();
    if (ranks_) first_collective_ = ranks_->next();
    if (engines_) first_engine_exchange_ = engines_->next();
    Walk walk(*this, batch, kv);
    pool_.walk(walk);
    if (ranks_) {
        ranks_->advance(count_collectives(batch));
        if (ranks_->aborted()) throw RanksAborted();
    }
    if (engines_) {
        engines_->advance(num_engine_exchanges_);
        if (engines_->aborted()) throw RanksAborted();
    }
    end_reads(kv);
}

// Tells what keeps a part of the keys in a file which blocks the step writes.
void Executor::begin_spill(const Batch& batch, const KvMemory& kv) {
    for (const auto& selected : selected_) {
        if (!selected || !kv.spill(selected->plan().group)) continue;
        const int group = selected->plan().group;
        std::map<int32_t, int> firsts;  // by block: its first token that is written
        const auto add = [&](const int32_t* slots, int count) {
            for (int i = 0; i < count; i++) {
                if (slots[i] < 0) continue;
                const auto found = firsts.try_emplace(slots[i] / kTile, slots[i] % kTile).first;
                found->second = std::min(found->second, slots[i] % kTile);
            }
        };
        add(batch.slots + static_cast<int64_t>(group) * batch.num_tokens, batch.num_tokens);
        if (batch.num_copies)
            add(batch.copy_slots + static_cast<int64_t>(group) * batch.num_copies, batch.num_copies);
        std::vector<int32_t> written, continued;
        for (const auto& [block, first] : firsts) {
            written.push_back(block);
            if (first > 0) continued.push_back(block);
        }
        kv.spill(group)->begin_step(std::move(written), continued);
    }
}

// Ends all kinds of reads before it throws what one has met.
void Executor::end_reads(const KvMemory& kv) {
    std::exception_ptr met;
    const auto end = [&](auto& reads) {
        try {
            reads.end_step();
        } catch (...) {
            met = std::current_exception();
        }
    };
    if (neurons_) end(*neurons_);
    for (const auto& selected : selected_)
        if (selected && kv.spill(selected->plan().group)) end(*kv.spill(selected->plan().group));
    if (stream_) stream_->end_step();
    if (met) std::rethrow_exception(met);
}

const float* Executor::kept_logits(int sample) const {
    if (sample < 0 || sample >= num_kept_ || num_kept_ > kSampleChunk)
        fail("sampled row " + std::to_string(sample) + " has no logits any more, of " +
             std::to_string(num_kept_));
    return arena(Axis::samples) + sample * row_floats(Axis::samples) + logits_.offset;
}

void Executor::redraw(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                      std::vector<SamplingRecord> records, const uint32_t* masks,
                      const std::vector<const float*>& replaced) {
    std::vector<const float*> given(batch.num_samples);
    for (size_t i = 0; i < samples.size(); i++) {
        kept_logits(samples[i]);
        records[samples[i]].allowed_mask = static_cast<int32_t>(i);
        given[samples[i]] = replaced[i];
    }
    Batch masked = batch;
    masked.late = nullptr;
    masked.sampling.uncut = nullptr;
    masked.sampling.records = records.data();
    masked.sampling.allowed_masks = masks;
    masked.sampling.replaced = given.data();
    draw_rows(masked, kv, samples);
}

void Executor::write_candidates(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                                int32_t* out) {
    for (const int32_t sample : samples) kept_logits(sample);
    std::vector<SamplingRecord> records(batch.sampling.records, batch.sampling.records + batch.num_samples);
    for (auto& record : records) record.num_logprobs = -1;
    std::vector<int32_t> ids(batch.num_samples),
        candidates(static_cast<size_t>(batch.num_samples) * kMostCandidates, -1);
    std::vector<uint8_t> failed(batch.num_samples);
    Batch asked = batch;
    asked.late = nullptr;
    asked.sampling.uncut = nullptr;
    asked.sampling.records = records.data();
    asked.sampling.out_ids = ids.data();
    asked.sampling.out_failed = failed.data();
    asked.sampling.out_candidates = candidates.data();
    asked.sampling.num_candidates = kMostCandidates;
    draw_rows(asked, kv, samples);
    for (const int32_t sample : samples)
        out = std::copy_n(candidates.data() + static_cast<int64_t>(sample) * kMostCandidates, kMostCandidates,
                          out);
}

void Executor::draw_rows(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples) {
    const View view{.executor = *this, .batch = batch, .kv = kv, .num_samples = batch.num_samples};
    pool_.parallel_for(static_cast<int>(samples.size()), [&](int piece, int thread) {
        sampling_->run(view, samples[piece], threads_[thread], 0);
    });
}

}  // namespace octavo
