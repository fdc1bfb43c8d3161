#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace octavo {

float* View::at(const Place& p, int64_t row) const {
    return executor.arena(p.samples) + p.offset * executor.capacity(p.samples) + row * p.stride + p.column;
}

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

namespace {

// -- rows ----------------------------------------------------------------------------------------------------------------

struct RowStage : Stage {
    static constexpr int kRowsAPiece = 4;
    bool samples;
    std::vector<std::unique_ptr<RowOp>> ops;

    explicit RowStage(bool s) : samples(s) {}
    std::string name() const override { return samples ? "rows of samples" : "rows"; }
    bool on_samples() const override { return samples; }
    int pieces(const View& view) const override {
        const int rows = view.rows(samples);
        const bool any = std::any_of(ops.begin(), ops.end(), [&](const auto& op) { return op->needed(rows); });
        return any ? (rows + kRowsAPiece - 1) / kRowsAPiece : 0;
    }
    void run(const View& view, int piece, ThreadState&, int) const override {
        const int rows = view.rows(samples), last = std::min(rows, (piece + 1) * kRowsAPiece);
        for (int row = piece * kRowsAPiece; row < last; row++)
            for (const auto& op : ops)
                if (op->needed(rows)) op->run(view, row);
    }
};

// Converts a product's rows ahead of it, into the executor's shared rows, where there are more than a few.
struct PrepareOp : RowOp {
    Place x;
    Norm norm;
    const Rows* rows;
    PrepareOp(Place place, Norm n, const Rows* r) : x(place), norm(n), rows(r) {}
    bool needed(int count) const override { return count > kFewRows; }
    void run(const View& view, int64_t row) const override { view.executor.kernels().prepare_row(view.at(x, row), x.width, norm, *rows, row); }
};

size_t element_bytes(RowType type) { return type == RowType::fp32 ? 4 : type == RowType::bf16 ? 2 : 1; }

// -- products ------------------------------------------------------------------------------------------------------------

struct LinearStage : Stage {
    LinearSpec spec;
    const Rows* shared;      // where PrepareOp, or the stage before, puts the rows
    std::vector<int> first;  // of each part: its first tile in the stage's count
    int num_tiles = 0;

    LinearStage(LinearSpec s, const Rows* rows) : spec(std::move(s)), shared(rows) {
        const size_t counted = spec.gated ? 1 : spec.parts.size();
        for (size_t i = 0; i < counted; i++) {
            first.push_back(num_tiles);
            num_tiles += (spec.parts[i].tiles.num_rows + kTile - 1) / kTile;
        }
    }
    bool on_samples() const override { return spec.x.samples; }
    std::string name() const override {
        return "linear " + std::to_string(spec.x.width) + " to " + std::to_string(num_tiles * kTile * (spec.gated ? 2 : 1)) + " " + code();
    }
    const char* code() const override { return kCodeNames[(int)spec.parts.front().tiles.code]; }
    Cost cost(const View& view) const override {
        Cost sum;
        for (const auto& part : spec.parts) {
            const Tiles& w = part.tiles;
            sum.bytes += (double)((w.num_rows + kTile - 1) / kTile) * w.tile_bytes;
            sum.operations += 2.0 * w.num_rows * w.num_inputs * view.rows(on_samples());
        }
        return sum;
    }

    int row_blocks(int rows) const { return (rows + kRowBlock - 1) / kRowBlock; }
    int tiles_a_piece(int threads) const { return std::clamp(num_tiles / (threads * 4) / 2 * 2, 2, 16); }
    int pieces(const View& view) const override {
        const int chunk = tiles_a_piece(view.executor.pool().num_threads());
        return row_blocks(view.rows(on_samples())) * ((num_tiles + chunk - 1) / chunk);
    }

    void run(const View& view, int piece, ThreadState& thread, int stage) const override {
        const int rows = view.rows(on_samples()), chunk = tiles_a_piece(view.executor.pool().num_threads()), chunks = (num_tiles + chunk - 1) / chunk;
        const int row0 = piece / chunks * kRowBlock, rows_here = std::min(kRowBlock, rows - row0);
        const int tile0 = piece % chunks * chunk, tile1 = std::min(num_tiles, tile0 + chunk);
        const Rows x = rows <= kFewRows && !spec.converted ? own_rows(view, rows, thread, stage) : *shared;
        size_t part = 0;
        for (int tile = tile0; tile < tile1;) {
            while (part + 1 < first.size() && tile >= first[part + 1]) part++;
            const int end = part + 1 < first.size() ? std::min(tile1, first[part + 1]) : tile1;
            const int count = std::min(2, end - tile);
            write(view, thread, x, spec.parts[part], tile - first[part], count, row0, rows_here);
            tile += count;
        }
    }

    Rows own_rows(const View& view, int rows, ThreadState& thread, int stage) const {
        Rows own = *shared;
        uint8_t* memory = thread.rows->data();
        const size_t element = element_bytes(own.type);
        own.values = memory;
        memory += (kFewRows * own.stride * element + 63) / 64 * 64;
        own.scales = (float*)memory;
        own.sums = (int32_t*)(own.scales + (size_t)kTile * own.num_groups);
        own.scaled_sums = (float*)(own.sums + (size_t)kTile * own.num_groups * 2);
        if (thread.prepared_stage != stage) {
            for (int row = 0; row < rows; row++) view.executor.kernels().prepare_row(view.at(spec.x, row), spec.x.width, spec.norm, own, row);
            thread.prepared_stage = stage;
        }
        return own;
    }

    // One tile of the part or two neighbours, to the out or to the next product's rows.
    void write(const View& view, ThreadState& thread, const Rows& x, const LinearPart& part, int tile, int count, int row0, int rows) const {
        const KernelTable& k = view.executor.kernels();
        const int column = tile * kTile, width = std::min(count * kTile, part.tiles.num_rows - column);
        float* out = spec.converts ? thread.group.data() : view.at(part.out, row0) + column;
        const int64_t stride = spec.converts ? kGroup : part.out.stride;
        const Epilogue e = epilogue(view, part);
        float *acc = thread.acc[0].data(), *other = thread.acc[1].data();
        const auto finish = [&](int i, const float* sums) {
            k.write_tile(e, sums, other, row0, rows, column + i * kTile, std::min(kTile, width - i * kTile), out + i * kTile, stride);
        };
        if (spec.gated) {
            for (int i = 0; i < count; i++) {
                const TileRef refs[2] = {{&part.tiles, tile + i, acc}, {&spec.parts[1].tiles, tile + i, other}};
                k.tile_products(refs, 2, x, row0, rows, thread.product->data());
                finish(i, acc);
            }
        } else {
            const TileRef refs[2] = {{&part.tiles, tile, acc}, {&part.tiles, tile + 1, other}};
            k.tile_products(refs, count, x, row0, rows, thread.product->data());
            for (int i = 0; i < count; i++) finish(i, refs[i].acc);
        }
        if (spec.converts) k.put_rows(out, *spec.converts, row0, rows, column / kGroup, width);
    }

    Epilogue epilogue(const View& view, const LinearPart& part) const {
        Epilogue e{};
        e.bias = part.bias;
        e.up_bias = spec.gated ? spec.parts[1].bias : nullptr;
        e.activation = spec.activation;
        e.gated = spec.gated;
        e.clamp = spec.clamp, e.alpha = spec.alpha, e.up_offset = spec.up_offset;
        if (part.has_residual) e.residual = view.at(part.residual, 0), e.residual_stride = part.residual.stride;
        return e;
    }
};

// -- attention -----------------------------------------------------------------------------------------------------------

struct AttentionStage : Stage {
    AttentionSpec spec;
    int plan_index;
    bool merges;  // the second of the two stages

    AttentionStage(const AttentionSpec& s, int plan, bool m) : spec(s), plan_index(plan), merges(m) {}
    bool on_samples() const override { return false; }
    std::string name() const override { return merges ? "attention merge" : "attention"; }
    Cost cost(const View& view) const override {
        if (merges) return {};
        const KvGroup& kv = view.kv.group(spec.group);
        const Batch& b = view.batch;
        Cost sum;
        for (int r = 0; r < b.num_requests; r++) {
            const int context = b.context_lens[(int64_t)spec.group * b.num_requests + r];
            int longest = 0;
            for (int row = b.query_starts[r]; row < b.query_starts[r + 1]; row++) {
                const int last = spec.window < 0 ? context : std::min(context, b.positions[row] + 1);
                const int keys = spec.window > 0 ? std::min(last, spec.window) : last;
                longest = std::max(longest, keys);
                sum.operations += 2.0 * keys * spec.num_heads * (kv.k_width + kv.v_width);
            }
            sum.bytes += (double)longest * kv.block_bytes() / kTile;
        }
        sum.bytes -= (double)view.executor.plan(plan_index).saved_keys * kv.block_bytes() / kTile;
        return sum;
    }
    // Of one kv head after another, so that what a head's pieces share stays near.
    int pieces(const View& view) const override {
        const AttentionPlan& plan = view.executor.plan(plan_index);
        return (int)(merges ? plan.merged.size() : plan.works.size()) * view.kv.group(spec.group).num_heads;
    }

    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const AttentionPlan& plan = view.executor.plan(plan_index);
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        const AttentionArgs args{view.at(spec.q, 0), view.at(spec.out, 0), spec.converts, spec.q.stride, spec.out.stride, kv, spec.num_heads, spec.scale, spec.softcap, spec.window, spec.sinks};
        const int each = (int)(merges ? plan.merged.size() : plan.works.size()), index = piece % each;
        AttentionPiece work{};
        work.positions = view.batch.positions;
        work.kv_head = piece / each;
        if (merges) {
            const QueryRun& run = plan.runs[plan.merged[index]];
            work.first_split = run.first_split, work.last_split = run.last_split;
            add_run(view, work, run, kv);
            return view.executor.kernels().attention_merge(args, work);
        }
        const AttentionWork& todo = plan.works[index];
        work.first_split = todo.first_split, work.last_split = todo.last_split;
        if (todo.shared) {
            const SharedRun& shared = plan.shared[todo.run];
            for (int i = 0; i < shared.num_runs; i++) add_run(view, work, plan.runs[plan.sharers[shared.first + i]], kv);
            work.context_len = shared.num_splits * kSplitKeys;
        } else {
            add_run(view, work, plan.runs[todo.run], kv);
        }
        view.executor.kernels().attention(args, work, thread.attention.data());
    }

    // A run's rows, and where their states of the piece's splits go.
    void add_run(const View& view, AttentionPiece& work, const QueryRun& run, const KvLayer& kv) const {
        const Batch& b = view.batch;
        const int64_t request = (int64_t)spec.group * b.num_requests + run.request;
        work.block_table = b.block_tables + request * b.table_width;
        work.context_len = b.context_lens[request];
        const int64_t row_floats = (int64_t)(spec.num_heads / kv.num_heads) * (2 + kv.v_padded), split_floats = run.num_rows * row_floats;
        const int64_t at = run.partial + ((int64_t)work.kv_head * (run.last_split - run.first_split) + work.first_split - run.first_split) * split_floats;
        for (int i = 0; i < run.num_rows; i++)
            work.rows[work.num_rows++] = AttentionRow{run.row0 + i, run.partial < 0 ? nullptr : view.executor.partials() + at + i * row_floats, split_floats};
    }
};

// -- draws ---------------------------------------------------------------------------------------------------------------

struct SampleStage : Stage {
    Place logits;
    int vocab;
    SampleStage(Place place, int v) : logits(place), vocab(v) {}
    std::string name() const override { return "sample"; }
    bool on_samples() const override { return true; }
    int pieces(const View& view) const override { return view.batch.draws ? view.num_samples : 0; }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        SampleArgs args = view.batch.sampling;
        args.logits = view.at(logits, 0);
        args.stride = logits.stride;
        args.vocab = vocab;
        args.first = view.first_sample;
        view.executor.kernels().sample_row(args, piece, thread.sampling->data());
    }
};

}  // namespace

// The stages of a step in one row: the body, then the head once for each chunk of sampled rows.
struct Walk : ThreadPool::Work {
    Executor& executor;
    const Batch& batch;
    const KvMemory& kv;
    const int body, head, chunks;

    Walk(Executor& e, const Batch& b, const KvMemory& k)
        : executor(e), batch(b), kv(k), body((int)e.body_.size()), head((int)e.head_.size()), chunks((b.num_samples + kSampleChunk - 1) / kSampleChunk) {}
    int num_stages() const override { return body + head * chunks; }
    const Stage& stage(int index) const { return index < body ? *executor.body_[index] : *executor.head_[(index - body) % head]; }
    View view(int index) const {
        if (index < body) return View{executor, batch, kv};
        const int first = (index - body) / head * kSampleChunk;
        return View{executor, batch, kv, first, std::min(kSampleChunk, batch.num_samples - first)};
    }
    int pieces(int index) const override { return stage(index).pieces(view(index)); }
    void run(int index, int piece, int thread) override { stage(index).run(view(index), piece, executor.threads_[thread], index); }
    void finished(int index) override {
        executor.stages_done_.fetch_add(1, std::memory_order_relaxed);
        if (!executor.profiling_) return;
        const auto now = std::chrono::steady_clock::now();
        StageTime& time = executor.profiled_[stage(index).name()];
        const Cost cost = stage(index).cost(view(index));
        time.code = stage(index).code();
        time.calls++;
        time.seconds += std::chrono::duration<double>(now - since).count();
        time.cost.bytes += cost.bytes, time.cost.operations += cost.operations;
        since = std::chrono::steady_clock::now();
    }
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

Executor::Executor(ThreadPool& pool, const KernelTable& kernels, int max_tokens, int vocab)
    : pool_(pool), kernels_(kernels), max_tokens_(std::max(max_tokens, 1)), vocab_(vocab), threads_(pool.num_threads()) {}

void Executor::add_row_op(bool samples, std::unique_ptr<RowOp> op) {
    auto& list = samples ? head_ : body_;
    auto* stage = list.empty() ? nullptr : dynamic_cast<RowStage*>(list.back().get());
    if (!stage) {
        list.push_back(std::make_unique<RowStage>(samples));
        stage = static_cast<RowStage*>(list.back().get());
    }
    stage->ops.push_back(std::move(op));
}

// Rows as the product of `w` reads them; their memory is sized by finish(), which fills the pointers in.
Rows* Executor::new_rows(const Tiles& w, int area) {
    rows_.push_back(std::make_unique<PreparedRows>());
    rows_.back()->area = area;
    Rows& rows = rows_.back()->rows;
    const RowType type = kernels_.row_type(w.code);
    const int64_t stride = (int64_t)w.num_groups * kGroup * digits_of(type);
    rows = Rows{type, nullptr, stride, nullptr, nullptr, nullptr, w.num_groups};
    row_bytes_ = std::max(row_bytes_, rows.stride * element_bytes(rows.type));
    groups_ = std::max(groups_, (size_t)w.num_groups);
    return &rows;
}

void Executor::add_linear(LinearSpec spec) {
    auto& list = spec.x.samples ? head_ : body_;
    Rows* rows = new_rows(spec.parts.front().tiles, spec.converted ? 1 : 0);
    for (const auto& part : spec.parts)
        if (kernels_.row_type(part.tiles.code) != rows->type) throw std::invalid_argument("weights that read their rows in different types stand in one product");
    for (const auto& part : spec.parts) product_scratch_ = std::max(product_scratch_, kernels_.scratch_bytes(part.tiles));
    if (spec.converted)
        convert_in_last_stage(list, rows);
    else
        add_row_op(spec.x.samples, std::make_unique<PrepareOp>(spec.x, spec.norm, rows));
    list.push_back(std::make_unique<LinearStage>(std::move(spec), rows));
}

// The product or the attention before writes `rows` in place of its out.
void Executor::convert_in_last_stage(std::vector<std::unique_ptr<Stage>>& list, Rows* rows) {
    if (auto* linear = dynamic_cast<LinearStage*>(list.back().get())) {
        linear->spec.converts = rows;
        return;
    }
    for (size_t i = list.size() - 2; i < list.size(); i++) dynamic_cast<AttentionStage&>(*list[i]).spec.converts = rows;
}

void Executor::add_attention(const AttentionSpec& spec) {
    int index = 0;
    for (; index < (int)plans_.size(); index++)
        if (plans_[index].group == spec.group && plans_[index].window == spec.window && plans_[index].num_heads == spec.num_heads) break;
    if (index == (int)plans_.size()) {
        AttentionPlan plan;
        plan.group = spec.group, plan.window = spec.window, plan.num_heads = spec.num_heads;
        plans_.push_back(plan);
    }
    body_.push_back(std::make_unique<AttentionStage>(spec, index, false));
    body_.push_back(std::make_unique<AttentionStage>(spec, index, true));
}

void Executor::add_sampling(const Place& logits) {
    head_.push_back(std::make_unique<SampleStage>(logits, vocab_));
    add_row_op(true, make_logits_out(logits));
}

RopeAngles* Executor::add_angles(std::vector<double> inv_freq, double mscale) {
    angles_.push_back(std::make_unique<RopeAngles>(std::move(inv_freq), mscale));
    return angles_.back().get();
}

const float* Executor::keep(std::vector<float> values) {
    kept_.push_back(std::make_unique<std::vector<float>>(std::move(values)));
    return kept_.back()->data();
}

void Executor::finish(int64_t token_floats, int64_t sample_floats) {
    tokens_ = std::make_unique<Memory>((size_t)token_floats * max_tokens_ * sizeof(float));
    samples_ = std::make_unique<Memory>((size_t)sample_floats * kSampleChunk * sizeof(float));
    const size_t rows = (size_t)(std::max(max_tokens_, kSampleChunk) + kTile - 1) / kTile * kTile;
    for (auto& area : areas_) area = std::make_unique<Memory>(rows * (row_bytes_ + groups_ * 16));
    for (auto& prepared : rows_) {
        uint8_t* memory = areas_[prepared->area]->data();
        Rows& r = prepared->rows;
        r.values = memory;
        r.scales = (float*)(memory += rows * row_bytes_);
        r.scaled_sums = (float*)(memory += rows * groups_ * 4);
        r.sums = (int32_t*)(memory + rows * groups_ * 4);
    }
    size_thread_states();
}

void Executor::size_thread_states() {
    for (auto& thread : threads_) {
        for (auto& acc : thread.acc) acc.resize((size_t)kRowBlock * kTile);
        thread.group.resize((size_t)kRowBlock * kGroup);
        thread.product = std::make_unique<Memory>(product_scratch_);
        thread.rows = std::make_unique<Memory>(kFewRows * row_bytes_ + kTile * groups_ * 16 + 128);
        thread.sampling = std::make_unique<Memory>(kernels_.sample_scratch_bytes(vocab_));
    }
}

void Executor::make_plans(const Batch& batch, const KvMemory& kv) {
    size_t floats = 0;
    for (auto& plan : plans_) {
        const KvGroup& group = kv.group(plan.group);
        plan.make(batch, group, pool_.num_threads(), share_prefixes_);
        floats = std::max(floats, plan.partial_floats);
        attention_scratch_ = std::max(attention_scratch_, attention_scratch_floats(group.k_width, group.v_padded()));
    }
    if (!partials_ || partials_->size() < floats * sizeof(float)) partials_ = std::make_unique<Memory>(floats * sizeof(float));
    for (auto& thread : threads_)
        if (thread.attention.size() < attention_scratch_) thread.attention.resize(attention_scratch_);
}

// A slot or a block outside the KV memory would corrupt another request's keys: better an exception here.
void Executor::check(const Batch& batch, const KvMemory& kv) const {
    const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
    if (batch.num_tokens > max_tokens_) fail("a step of " + std::to_string(batch.num_tokens) + " tokens, prepared for " + std::to_string(max_tokens_));
    for (int i = 0; i < kv.num_groups() * batch.num_tokens; i++)
        if (batch.slots[i] < -1 || batch.slots[i] >= kv.group(i / batch.num_tokens).num_blocks * kTile) fail("slot " + std::to_string(batch.slots[i]) + " is outside the KV memory");
    for (const auto& plan : plans_)
        for (int r = 0; r < batch.num_requests; r++) {
            const int row = batch.query_starts[r], i = plan.group * batch.num_requests + r;
            if (row == batch.query_starts[r + 1]) continue;
            const int needed = (batch.context_lens[i] + kTile - 1) / kTile;
            if (needed > batch.table_width) fail("a context of " + std::to_string(batch.context_lens[i]) + " keys with " + std::to_string(batch.table_width) + " blocks");
            // Blocks that a window has passed may be gone from the table.
            for (int b = plan.window > 0 ? std::max(0, batch.positions[row] - plan.window + 1) / kTile : 0; b < needed; b++) {
                const int block = batch.block_tables[(int64_t)i * batch.table_width + b];
                if (!kv.has_block(plan.group, block)) fail("block " + std::to_string(block) + " is outside the KV memory");
            }
        }
    for (int s = 0; s < batch.num_samples; s++)
        if (batch.sample_rows[s] < 0 || batch.sample_rows[s] >= batch.num_tokens) fail("sampled row " + std::to_string(batch.sample_rows[s]) + " of " + std::to_string(batch.num_tokens));
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
    for (auto& thread : threads_) thread.prepared_stage = -1;
    kernels_.begin_step();
    Walk walk(*this, batch, kv);
    pool_.walk(walk);
}

}  // namespace octavo
