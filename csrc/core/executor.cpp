#include "executor.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "expert_stages.h"
#include "stages.h"
#include "walk.h"

namespace octavo {

float* View::at(const Place& p, int64_t row) const {
    const int64_t place = p.axis == Axis::block ? row - shift : row;
    return executor.arena(p.axis) + place * executor.row_floats(p.axis) + p.offset;
}

int64_t View::stride(const Place& p) const { return executor.row_floats(p.axis); }

void RopeAngles::ensure(int positions) {
    const int n = (int)inv_freq_.size();
    const int have = n ? (int)(table_.size() / (2 * n)) : positions;
    if (positions <= have) return;
    const int want = std::max(positions, 2 * have);
    table_.resize((size_t)want * 2 * n);
    for (int p = have; p < want; p++)
        for (int i = 0; i < n; i++) {
            table_[((size_t)p * 2) * n + i] = (float)(std::cos(p * inv_freq_[i]) * mscale_);
            table_[((size_t)p * 2 + 1) * n + i] = (float)(std::sin(p * inv_freq_[i]) * mscale_);
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

static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

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
    open_list().push_back(std::move(stage));
    open_.is_empty = false;
}

void Executor::add_row_op(std::unique_ptr<RowOp> op) {
    if (open_.is_empty) push(std::make_unique<RowStage>(open_.samples));
    auto* stage = dynamic_cast<RowStage*>(open_list().back().get());
    require(stage, "a row op in a stage of another kind");
    stage->ops.push_back(std::move(op));
}

// Rows as the product of `w` reads them; their memory is sized by finish(), which fills the pointers and
// strides in.
PreparedRows* Executor::new_rows(const Tiles& w, const Place& x, RowArea area) {
    rows_.push_back(std::make_unique<PreparedRows>());
    const RowType type = kernels_.row_type(w.code);
    rows_.back()->x = x;
    rows_.back()->area = area;
    rows_.back()->rows = Rows{.type = type, .num_groups = w.num_groups};
    size_t &bytes = row_bytes_[(int)area], &groups = groups_[(int)area];
    bytes = std::max(bytes, row_elements(type, w.num_groups) * element_bytes(type));
    groups = std::max(groups, (size_t)w.num_groups);
    return rows_.back().get();
}

PreparedRows* Executor::add_conversion(const Place& x, const Norm& norm, const Tiles& w) {
    PreparedRows* rows = new_rows(w, x, RowArea::prepared);
    rows->norm = norm;
    add_row_op(std::make_unique<PrepareOp>(rows));
    return rows;
}

PreparedRows* Executor::convert_in_last_stage(const Place& x, const Tiles& w) {
    Stages& list = open_list();
    require(!list.empty(), "rows that no stage converts");
    if (auto* linear = dynamic_cast<LinearStage*>(list.back().get())) {
        PreparedRows* rows = new_rows(w, x, RowArea::converted);
        linear->spec.converts = rows;
        return rows;
    }
    if (auto* experts = dynamic_cast<ExpertsStage*>(list.back().get())) {
        PreparedRows* rows = new_rows(w, x, RowArea::experts);
        experts->spec.converts = rows;
        return rows;
    }
    require(dynamic_cast<AttentionStage*>(list.back().get()), "rows that no product or attention converts");
    PreparedRows* rows = new_rows(w, x, RowArea::attended);
    for (size_t i = list.size() - 2; i < list.size(); i++)
        dynamic_cast<AttentionStage&>(*list[i]).spec.converts = rows;
    return rows;
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
        const int least = kernels_.rows_per_byte * (int)element_bytes(type);
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
    for (int index = 0; index < (int)plans_.size(); index++)
        if (plans_[index].group == spec.group && plans_[index].window == spec.window &&
            plans_[index].num_heads == spec.num_heads && plans_[index].latent_width == spec.latent_width)
            return index;
    AttentionPlan plan;
    plan.group = spec.group;
    plan.window = spec.window;
    plan.num_heads = spec.num_heads;
    plan.latent_width = spec.latent_width;
    plans_.push_back(plan);
    return (int)plans_.size() - 1;
}

// Two stages: the pieces, then the merge of those that are parts of a run.
void Executor::add_attention(const AttentionSpec& spec) {
    require(open_.is_empty, "an attention in a stage with other ops");
    const int plan = plan_of(spec);
    push(std::make_unique<AttentionStage>(spec, plan, false));
    body_.push_back(std::make_unique<AttentionStage>(spec, plan, true));
    body_ranges_.push_back(open_.range);
}

// Two stages: the choice of each row, then the order of all rows.
int Executor::add_route(const RouteSpec& spec) {
    require(open_.is_empty, "a choice of experts in a stage with other ops");
    const int experts = spec.num_experts();
    expert_plans_.push_back(std::make_unique<ExpertPlan>(experts, spec.top_k, max_tokens_));
    expert_rows_ = std::max(expert_rows_, ExpertPlan::most_rows(experts, spec.top_k, max_tokens_));
    num_scores_ = std::max(num_scores_, (size_t)4 * experts);
    ExpertPlan& plan = *expert_plans_.back();
    has_row_blocks_ = true;
    push(std::make_unique<RouteStage>(spec, plan));
    push(std::make_unique<OrderStage>(plan));
    return (int)expert_plans_.size() - 1;
}

PreparedRows* Executor::convert_in_route(const Place& x, const Tiles& w) {
    Stages& list = open_list();
    auto* route = list.size() < 2 ? nullptr : dynamic_cast<RouteStage*>(list[list.size() - 2].get());
    require(route && !route->converts, "rows for experts that the stage before does not choose");
    return route->converts = new_rows(w, x, RowArea::attended);
}

PreparedRows* Executor::add_expert_conversion(const Place& x, int route, const Tiles& w) {
    PreparedRows* rows = new_rows(w, x, RowArea::experts);
    push(std::make_unique<ExpertRowsStage>(*rows, *expert_plan(route)));
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

void Executor::add_sampling(const Place& logits) {
    require(open_.is_empty && !head_.empty(),
            "a draw without a stage of its own, behind one that makes logits");
    const auto* linear = dynamic_cast<const LinearStage*>(head_.back().get());
    if (linear && linear->writes_only(logits)) logits_product_ = linear;
    push(std::make_unique<SampleStage>(logits, vocab_));
    sampling_ = head_.back().get();
    push(std::make_unique<RowStage>(true));
    add_row_op(make_rows_out(logits));
}

void Executor::add_output(const Place& rows) {
    require(open_.is_empty && open_.samples, "an output without a stage of its own over the head's rows");
    add_row_op(make_rows_out(rows));
}

RopeAngles* Executor::add_angles(std::vector<double> inv_freq, double mscale) {
    angles_.push_back(std::make_unique<RopeAngles>(std::move(inv_freq), mscale));
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

static size_t whole_blocks(int rows) { return (size_t)(rows + kTile - 1) / kTile * kTile; }

size_t bytes_of_rows(const Rows& rows, size_t count) {
    const size_t values = (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    return values + count * rows.group_stride * 16;
}

void place_rows_at(uint8_t* memory, size_t count, Rows& rows) {
    rows.values = memory;
    memory += (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    rows.scales = (float*)memory;
    rows.scaled_sums = rows.scales + count * rows.group_stride;
    rows.sums = (int32_t*)(rows.scaled_sums + count * rows.group_stride);
}

void Executor::finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats,
                      int64_t expert_floats) {
    const int64_t floats[kNumAxes] = {token_floats, block_floats, sample_floats, expert_floats};
    const size_t rows[kNumAxes] = {(size_t)max_tokens_, (size_t)pool_.num_threads() * kernels_.row_block,
                                   kSampleChunk, expert_rows_};
    for (int axis = 0; axis < kNumAxes; axis++) {
        row_floats_[axis] = odd_lines(floats[axis], sizeof(float));
        arenas_[axis] = std::make_unique<Memory>(row_floats_[axis] * rows[axis] * sizeof(float));
    }
    place_rows();
    group_stages();
    size_thread_states();
}

// The converted rows of all products share the areas: no two products' are alive at a time in one of them.
void Executor::place_rows() {
    const size_t prepared = whole_blocks(std::max(pool_.num_threads() * kernels_.row_block, kSampleChunk));
    const size_t rows_of[kNumRowAreas] = {prepared, prepared, whole_blocks(max_tokens_), expert_rows_};
    for (int area = 0; area < kNumRowAreas; area++) {
        row_bytes_[area] = (size_t)odd_lines((int64_t)row_bytes_[area], 1);
        areas_[area] = std::make_unique<Memory>(rows_of[area] * (row_bytes_[area] + groups_[area] * 16));
    }
    for (auto& each : rows_) {
        const int area = (int)each->area;
        each->rows.stride = (int64_t)(row_bytes_[area] / element_bytes(each->rows.type));
        each->rows.group_stride = (int32_t)groups_[area];
        place_rows_at(areas_[area]->data(), rows_of[area], each->rows);
    }
}

// An attention's two stages have one range, but a barrier between them.
void Executor::group_stages() {
    for (int i = 0; i < (int)body_.size(); i++) {
        each_.push_back({i, i + 1});
        if (i > 0 && body_ranges_[i] == body_ranges_[i - 1] && body_[i]->row_local())
            ranges_.back().last = i + 1;
        else
            ranges_.push_back({i, i + 1});
    }
}

void Executor::size_thread_states() {
    size_t row_bytes = 0;
    for (const auto& each : rows_)
        row_bytes = std::max(row_bytes, bytes_of_rows(each->rows, has_row_blocks_ ? kExpertRows : kTile));
    for (auto& thread : threads_) {
        for (auto& acc : thread.acc) acc.resize((size_t)kRowBlock * kTile);
        thread.group.resize((size_t)kRowBlock * kGroup);
        thread.product = std::make_unique<Memory>(product_scratch_);
        thread.rows = std::make_unique<Memory>(row_bytes);
        thread.scores.resize(num_scores_);
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
    if (batch.num_tokens > max_tokens_)
        fail("a step of " + std::to_string(batch.num_tokens) + " tokens, prepared for " +
             std::to_string(max_tokens_));
    for (int i = 0; i < kv.num_groups() * batch.num_tokens; i++)
        if (batch.slots[i] < -1 || batch.slots[i] >= kv.group(i / batch.num_tokens).num_blocks * kTile)
            fail("slot " + std::to_string(batch.slots[i]) + " is outside the KV memory");
    for (const auto& plan : plans_) check_tables(plan, batch, kv);
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
        const int first_key = plan.window > 0 ? std::max(0, batch.places[row] - plan.window + 1) : 0;
        for (int b = first_key / kTile; b < needed; b++) {
            const int block = batch.block_tables[(int64_t)i * batch.table_width + b];
            if (!kv.has_block(plan.group, block))
                fail("block " + std::to_string(block) + " is outside the KV memory");
        }
    }
}

void Executor::profile(bool on) {
    profiling_ = on;
    profiled_.clear();
}

void Executor::run(const Batch& batch, const KvMemory& kv) {
    check(batch, kv);
    int last = 0;
    for (int t = 0; t < batch.num_tokens; t++) last = std::max(last, batch.positions[t]);
    for (auto& angles : angles_) angles->ensure(last + 1);
    make_plans(batch, kv);
    for (auto& thread : threads_) {
        thread.prepared_stage = thread.prepared_block = -1;
        thread.best.assign(batch.num_samples, Best{});
    }
    kernels_.begin_step();
    Walk walk(*this, batch, kv);
    pool_.walk(walk);
}

void Executor::redraw(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                      const uint32_t* masks) {
    if (!batch.keeps_logits || batch.num_samples > kSampleChunk)
        fail("rows drawn again without their logits");
    std::vector<SamplingRecord> records(batch.sampling.records, batch.sampling.records + batch.num_samples);
    for (size_t i = 0; i < samples.size(); i++) {
        if (samples[i] < 0 || samples[i] >= batch.num_samples)
            fail("sampled row " + std::to_string(samples[i]) + " drawn again, of " +
                 std::to_string(batch.num_samples));
        records[samples[i]].allowed_mask = (int32_t)i;
    }
    Batch masked = batch;
    masked.sampling.records = records.data();
    masked.sampling.allowed_masks = masks;
    const View view{.executor = *this, .batch = masked, .kv = kv, .num_samples = batch.num_samples};
    pool_.parallel_for((int)samples.size(), [&](int piece, int thread) {
        sampling_->run(view, samples[piece], threads_[thread], 0);
    });
}

}  // namespace octavo
