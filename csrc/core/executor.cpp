#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "stages.h"

namespace octavo {

float* View::at(const Place& p, int64_t row) const {
    return executor.arena(p.axis) +
           (p.axis == Axis::block ? row - shift : row) * executor.row_floats(p.axis) + p.offset;
}

int64_t View::stride(const Place& p) const { return executor.row_floats(p.axis); }

void RopeAngles::ensure(int positions) {
    const int n = (int)inv_freq_.size(), have = n ? (int)(table_.size() / (2 * n)) : positions;
    if (positions <= have) return;
    const int want = std::max(positions, 2 * have);
    table_.resize((size_t)want * 2 * n);
    for (int p = have; p < want; p++)
        for (int i = 0; i < n; i++) {
            table_[((size_t)p * 2) * n + i] = (float)(std::cos(p * inv_freq_[i]) * mscale_);
            table_[((size_t)p * 2 + 1) * n + i] = (float)(std::sin(p * inv_freq_[i]) * mscale_);
        }
}

// The stages of a step: the body, alone or in ranges that blocks of rows go through, then the head once for
// each chunk of sampled rows.
struct Walk : ThreadPool::Work {
    Executor& executor;
    const Batch& batch;
    const KvMemory& kv;
    const int block;  // rows that a thread takes through a range, or 0
    const std::vector<StageRange>& body;
    const int head, chunks;
    const bool best_only;

    Walk(Executor& e, const Batch& b, const KvMemory& k)
        : executor(e),
          batch(b),
          kv(k),
          block(row_block(b.num_tokens, e.pool().num_threads(), e.least_rows_, e.kernels().row_block)),
          body(block ? e.ranges_ : e.each_),
          head((int)e.head_.size()),
          chunks((b.num_samples + kSampleChunk - 1) / kSampleChunk),
          best_only(e.logits_from_product_ && b.draws_best()) {}

    // Threads that share a product's outputs each read a part of its weights, and all rows; threads that
    // share the rows read all weights, which costs as much as some eight rows more. The latter pays where
    // rows are many; the block is one with which they come out even.
    static int row_block(int rows, int threads, int least, int most) {
        if (rows < threads * least) return 0;
        int best = 0, lowest = 0;
        for (int block = most; block >= kTile; block -= kTile) {
            const int blocks = (rows + block - 1) / block,
                      cost = (blocks + threads - 1) / threads * (block + 8);
            if (best == 0 || cost < lowest) best = block, lowest = cost;
        }
        return best;
    }

    int num_stages() const override { return (int)body.size() + head * chunks; }
    StageRange range(int index) const {
        if (index < (int)body.size()) return body[index];
        const int stage = (index - (int)body.size()) % head;
        return {stage, stage + 1};
    }
    bool by_rows(int index) const {
        return block && index < (int)body.size() && executor.body_[body[index].first]->row_local();
    }
    const Stage& stage(int index) const {
        return *(index < (int)body.size() ? executor.body_ : executor.head_)[range(index).first];
    }
    View view(int index) const {
        if (index < (int)body.size()) return View{executor, batch, kv};
        const int first = (index - (int)body.size()) / head * kSampleChunk;
        return View{executor, batch, kv, first, std::min(kSampleChunk, batch.num_samples - first), best_only};
    }
    int pieces(int index) const override {
        return by_rows(index) ? (batch.num_tokens + block - 1) / block : stage(index).pieces(view(index));
    }
    void run(int index, int piece, int thread) override {
        if (by_rows(index))
            run_block(body[index], piece * block, std::min(batch.num_tokens, (piece + 1) * block), thread);
        else
            stage(index).run(view(index), piece, executor.threads_[thread], index);
    }
    Span waits(int index, int thread) override {
        ask_next(index, thread);
        return upcoming(index, thread);
    }
    // The next stage for the first of what its piece will read.
    void ask_next(int index, int thread) const {
        if (index + 1 >= num_stages() || by_rows(index + 1)) return;
        const View next = view(index + 1);
        const int count = stage(index + 1).pieces(next), piece = executor.pool_.first_piece(count, thread);
        if (piece < count) stage(index + 1).ask(next, piece, executor.threads_[thread]);
    }
    void run_block(const StageRange& range, int row0, int row1, int index) const {
        const View view{executor, batch, kv, 0, 0, false, row0 - index * executor.kernels().row_block};
        ThreadState& thread = executor.threads_[index];
        for (int i = range.first; i < range.last; i++) {
            const auto start = executor.profiling_ ? Clock::now() : Clock::time_point();
            executor.body_[i]->run_rows(view, row0, row1, thread);
            if (executor.profiling_) thread.seconds[i - range.first] += seconds_since(start);
        }
    }
    // Weights of the next product, which is at most three stages away, as far as they leave a second-level
    // cache room for the rest.
    Span upcoming(int index, int thread) const {
        constexpr ptrdiff_t kMost = 256 << 10;
        if (block) return {};
        for (int next = index + 1; next < std::min(num_stages(), index + 4); next++) {
            const Span span = stage(next).reads_first(view(next), thread);
            if (span.first != span.last)
                return {span.first, span.first + std::min(span.last - span.first, kMost)};
        }
        return {};
    }
    void finished(int index) override {
        executor.stages_done_.fetch_add(1, std::memory_order_relaxed);
        if (!executor.profiling_) return;
        if (by_rows(index)) {
            for (int i = body[index].first; i < body[index].last; i++)
                executor.record(*executor.body_[i], view(index), mean_seconds(i - body[index].first));
        } else {
            executor.record(stage(index), view(index), seconds_since(since));
        }
        since = Clock::now();
    }

  private:
    using Clock = std::chrono::steady_clock;
    static double seconds_since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }
    // Of a stage of the range that is done, over the threads; starts anew.
    double mean_seconds(int i) {
        double sum = 0;
        for (auto& thread : executor.threads_) sum += std::exchange(thread.seconds[i], 0.0);
        return sum / (double)executor.threads_.size();
    }
    Clock::time_point since = Clock::now();
};

void Executor::record(const Stage& stage, const View& view, double seconds) {
    StageTime& time = profiled_[stage.name()];
    const Cost cost = stage.cost(view);
    time.code = stage.code();
    time.calls++;
    time.seconds += seconds;
    time.cost.bytes += cost.bytes, time.cost.operations += cost.operations;
}

Executor::Executor(ThreadPool& pool, const KernelTable& kernels, int max_tokens, int vocab)
    : pool_(pool),
      kernels_(kernels),
      max_tokens_(std::max(max_tokens, 1)),
      vocab_(vocab),
      threads_(pool.num_threads()) {}

void Executor::add_row_op(bool samples, std::unique_ptr<RowOp> op) {
    auto& list = samples ? head_ : body_;
    auto* stage = list.empty() ? nullptr : dynamic_cast<RowStage*>(list.back().get());
    if (!stage) {
        list.push_back(std::make_unique<RowStage>(samples));
        stage = static_cast<RowStage*>(list.back().get());
    }
    stage->ops.push_back(std::move(op));
}

// Rows as the product of `w` reads them; their memory is sized by finish(), which fills the pointers and
// strides in.
PreparedRows* Executor::new_rows(const Tiles& w) {
    rows_.push_back(std::make_unique<PreparedRows>());
    const RowType type = kernels_.row_type(w.code);
    rows_.back()->rows = Rows{type, nullptr, 0, nullptr, nullptr, nullptr, w.num_groups, 0};
    row_bytes_ = std::max(row_bytes_, row_elements(type, w.num_groups) * element_bytes(type));
    groups_ = std::max(groups_, (size_t)w.num_groups);
    return rows_.back().get();
}

void Executor::add_linear(LinearSpec spec) {
    auto& list = spec.x.on_samples() ? head_ : body_;
    PreparedRows* rows = new_rows(spec.parts.front().tiles);
    for (const auto& part : spec.parts)
        if (kernels_.row_type(part.tiles.code) != rows->rows.type)
            throw std::invalid_argument(
                "weights that read their rows in different types stand in one product");
    for (const auto& part : spec.parts)
        product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(part.tiles));
    if (spec.converted)
        convert_in_last_stage(list, rows);
    else
        add_row_op(spec.x.on_samples(), std::make_unique<PrepareOp>(spec.x, spec.norm, rows));
    if (!spec.x.on_samples())
        least_rows_ =
            std::min(kernels_.row_block,
                     std::max(least_rows_, kernels_.rows_per_byte * (int)element_bytes(rows->rows.type)));
    list.push_back(std::make_unique<LinearStage>(std::move(spec), rows));
}

// The product or the attention before writes `rows` in place of its out.
void Executor::convert_in_last_stage(std::vector<std::unique_ptr<Stage>>& list, PreparedRows* rows) {
    if (auto* linear = dynamic_cast<LinearStage*>(list.back().get())) {
        rows->area = RowArea::converted;
        linear->spec.converts = rows;
        return;
    }
    rows->area = RowArea::attended;
    for (size_t i = list.size() - 2; i < list.size(); i++)
        dynamic_cast<AttentionStage&>(*list[i]).spec.converts = rows;
}

void Executor::add_attention(const AttentionSpec& spec) {
    int index = 0;
    for (; index < (int)plans_.size(); index++)
        if (plans_[index].group == spec.group && plans_[index].window == spec.window &&
            plans_[index].num_heads == spec.num_heads)
            break;
    if (index == (int)plans_.size()) {
        AttentionPlan plan;
        plan.group = spec.group, plan.window = spec.window, plan.num_heads = spec.num_heads;
        plans_.push_back(plan);
    }
    body_.push_back(std::make_unique<AttentionStage>(spec, index, false));
    body_.push_back(std::make_unique<AttentionStage>(spec, index, true));
}

void Executor::add_sampling(const Place& logits) {
    if (auto* linear = dynamic_cast<LinearStage*>(head_.back().get()))
        linear->spec.makes_logits = logits_from_product_ = linear->writes_only(logits);
    head_.push_back(std::make_unique<SampleStage>(logits, vocab_));
    add_row_op(true, make_logits_out(logits));
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

// A multiple of cache lines that is odd, so that one place of neighbouring rows lies in different sets of a
// cache.
static int64_t odd_lines(int64_t elements, int64_t element) {
    const int64_t lines = (elements * element + 63) / 64;
    return (lines | 1) * 64 / element;
}

void Executor::finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats) {
    const auto whole_blocks = [](int rows) { return (size_t)(rows + kTile - 1) / kTile * kTile; };
    const int blocks = pool_.num_threads() * kernels_.row_block;
    const int64_t floats[kNumAxes] = {token_floats, block_floats, sample_floats};
    const int rows[kNumAxes] = {max_tokens_, blocks, kSampleChunk};
    for (int axis = 0; axis < kNumAxes; axis++) {
        row_floats_[axis] = odd_lines(floats[axis], sizeof(float));
        arenas_[axis] = std::make_unique<Memory>((size_t)row_floats_[axis] * rows[axis] * sizeof(float));
    }
    row_bytes_ = (size_t)odd_lines((int64_t)row_bytes_, 1);
    const size_t prepared = whole_blocks(std::max(blocks, kSampleChunk)),
                 attended = whole_blocks(max_tokens_);
    for (int area = 0; area < kNumRowAreas; area++)
        areas_[area] = std::make_unique<Memory>((area == (int)RowArea::attended ? attended : prepared) *
                                                (row_bytes_ + groups_ * 16));
    for (auto& each : rows_) {
        const size_t count = each->area == RowArea::attended ? attended : prepared;
        uint8_t* memory = areas_[(int)each->area]->data();
        Rows& r = each->rows;
        r.stride = (int64_t)(row_bytes_ / element_bytes(r.type));
        r.group_stride = (int32_t)groups_;
        r.values = memory;
        r.scales = (float*)(memory += count * row_bytes_);
        r.scaled_sums = (float*)(memory += count * groups_ * 4);
        r.sums = (int32_t*)(memory + count * groups_ * 4);
    }
    group_stages();
    size_thread_states();
}

void Executor::group_stages() {
    const auto joins = [&](int stage) {
        return !ranges_.empty() && body_[stage]->row_local() && body_[ranges_.back().first]->row_local();
    };
    for (int i = 0; i < (int)body_.size(); i++) {
        each_.push_back({i, i + 1});
        if (joins(i))
            ranges_.back().last = i + 1;
        else
            ranges_.push_back({i, i + 1});
    }
}

void Executor::size_thread_states() {
    for (auto& thread : threads_) {
        for (auto& acc : thread.acc) acc.resize((size_t)kRowBlock * kTile);
        thread.group.resize((size_t)kRowBlock * kGroup);
        thread.product = std::make_unique<Memory>(product_scratch_);
        thread.rows = std::make_unique<Memory>(kFewRows * row_bytes_ + kTile * groups_ * 16 + 128);
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
            std::max(attention_scratch_, attention_scratch_floats(group.k_width, group.v_padded()));
    }
    if (!partials_ || partials_->size() < floats * sizeof(float))
        partials_ = std::make_unique<Memory>(floats * sizeof(float));
    for (auto& thread : threads_)
        if (thread.attention.size() < attention_scratch_) thread.attention.resize(attention_scratch_);
}

// A slot or a block outside the KV memory would corrupt another request's keys: better an exception here.
void Executor::check(const Batch& batch, const KvMemory& kv) const {
    const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
    if (batch.num_tokens > max_tokens_)
        fail("a step of " + std::to_string(batch.num_tokens) + " tokens, prepared for " +
             std::to_string(max_tokens_));
    for (int i = 0; i < kv.num_groups() * batch.num_tokens; i++)
        if (batch.slots[i] < -1 || batch.slots[i] >= kv.group(i / batch.num_tokens).num_blocks * kTile)
            fail("slot " + std::to_string(batch.slots[i]) + " is outside the KV memory");
    for (const auto& plan : plans_)
        for (int r = 0; r < batch.num_requests; r++) {
            const int row = batch.query_starts[r], i = plan.group * batch.num_requests + r;
            if (row == batch.query_starts[r + 1]) continue;
            const int needed = (batch.context_lens[i] + kTile - 1) / kTile;
            if (needed > batch.table_width)
                fail("a context of " + std::to_string(batch.context_lens[i]) + " keys with " +
                     std::to_string(batch.table_width) + " blocks");
            // Blocks that a window has passed may be gone from the table.
            for (int b = plan.window > 0 ? std::max(0, batch.positions[row] - plan.window + 1) / kTile : 0;
                 b < needed; b++) {
                const int block = batch.block_tables[(int64_t)i * batch.table_width + b];
                if (!kv.has_block(plan.group, block))
                    fail("block " + std::to_string(block) + " is outside the KV memory");
            }
        }
    for (int s = 0; s < batch.num_samples; s++)
        if (batch.sample_rows[s] < 0 || batch.sample_rows[s] >= batch.num_tokens)
            fail("sampled row " + std::to_string(batch.sample_rows[s]) + " of " +
                 std::to_string(batch.num_tokens));
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
    for (auto& thread : threads_) thread.prepared_stage = -1, thread.best.assign(batch.num_samples, Best{});
    kernels_.begin_step();
    Walk walk(*this, batch, kv);
    pool_.walk(walk);
}

}  // namespace octavo
