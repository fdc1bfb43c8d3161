#include "step_runner.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "step_run.h"

namespace octavo {

float* View::at(const ValueSlice& p, int64_t row) const {
    const int64_t at = p.axis == Axis::block ? row - shift : row;
    return runner.arena(p.axis) + at * runner.row_floats(p.axis) + p.offset;
}

const uint8_t* View::sparse_rows(bool samples) const {
    return runner.sparse_rows(samples) + (samples ? first_sample : 0);
}

int64_t View::stride(const ValueSlice& p) const { return runner.row_floats(p.axis); }

static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
}

// -- memory --

StepRunner::StepRunner(ThreadPool& pool, std::shared_ptr<const Plan> plan,
                       std::shared_ptr<WeightStream> stream, bool share_prefixes)
    : pool_(pool),
      plan_(std::move(plan)),
      stream_(std::move(stream)),
      share_prefixes_(share_prefixes),
      threads_(pool.num_threads()),
      angles_(plan_->angles.begin(), plan_->angles.end()),
      attention_plans_(plan_->attentions.begin(), plan_->attentions.end()),
      adapters_(plan_->site_groups) {
    for (const auto& [attention, budget, is_prefetch] : plan_->selections) {
        const AttentionPlan& attended = attention_plans_[attention];
        selected_.push_back(std::make_unique<SelectedKeys>(attended, budget));
        if (!is_prefetch) selected_groups_.insert(attended.group);
    }
    for (const ExpertChoice& choice : plan_->choices)
        expert_plans_.push_back(std::make_unique<ExpertPlan>(choice, plan_->max_expert_tokens()));
    allocate_arenas();
    if (plan_->options.ranks) plan_->options.ranks->reserve(plan_->sizes.rank_slot);
    if (plan_->options.engines) plan_->options.engines->reserve(plan_->sizes.engine_slot);
    allocate_quantized_rows();
    plan_chunk_releases();
    allocate_thread_states();
}

// Rounds up to an odd number of cache lines, so that the same column of neighbouring rows maps to different
// cache sets.
static int64_t odd_lines(int64_t elements, int64_t element) {
    const int64_t lines = (elements * element + 63) / 64;
    return (lines | 1) * 64 / element;
}

static size_t whole_blocks(int rows) { return static_cast<size_t>(rows + kTile - 1) / kTile * kTile; }

size_t rows_bytes(const QuantizedRows& rows, size_t count) {
    const size_t values = (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    return values + count * rows.group_stride * 16;
}

void set_rows_memory(uint8_t* memory, size_t count, QuantizedRows& rows) {
    rows.values = memory;
    memory += (count * rows.stride * element_bytes(rows.type) + 63) / 64 * 64;
    rows.scales = reinterpret_cast<float*>(memory);
    rows.scaled_sums = rows.scales + count * rows.group_stride;
    rows.sums = reinterpret_cast<int32_t*>(rows.scaled_sums + count * rows.group_stride);
}

void StepRunner::allocate_arenas() {
    const size_t rows[kNumAxes] = {static_cast<size_t>(plan_->options.max_tokens),
                                   static_cast<size_t>(pool_.num_threads()) * kernels().row_block,
                                   kSampleChunk, plan_->sizes.expert_rows};
    for (int axis = 0; axis < kNumAxes; axis++) {
        row_floats_[axis] = odd_lines(plan_->sizes.row_floats[axis], sizeof(float));
        arenas_[axis] = std::make_unique<Memory>(row_floats_[axis] * rows[axis] * sizeof(float));
    }
}

// The quantized inputs of all matmuls share the areas: at most one per area is in use at a time.
void StepRunner::allocate_quantized_rows() {
    size_t bytes[kNumRowAreas] = {}, groups[kNumRowAreas] = {};
    for (const QuantizedInput& each : plan_->inputs) {
        const int area = static_cast<int>(each.area);
        bytes[area] = std::max(bytes[area], each.row_bytes());
        groups[area] = std::max(groups[area], static_cast<size_t>(each.num_groups));
    }
    const size_t prepared = whole_blocks(std::max(pool_.num_threads() * kernels().row_block, kSampleChunk));
    const size_t attended = whole_blocks(plan_->max_expert_tokens());
    const size_t kernel[kNumRowAreas] = {prepared, prepared, attended, plan_->sizes.expert_rows};
    for (int area = 0; area < kNumRowAreas; area++) {
        bytes[area] = static_cast<size_t>(odd_lines(static_cast<int64_t>(bytes[area]), 1));
        areas_[area] = std::make_unique<Memory>(kernel[area] * (bytes[area] + groups[area] * 16));
    }
    for (const QuantizedInput& each : plan_->inputs) {
        const int area = static_cast<int>(each.area);
        QuantizedRows rows{.type = each.type, .num_groups = each.num_groups, .skips_zeros = each.skips_zeros};
        rows.stride = static_cast<int64_t>(bytes[area] / element_bytes(each.type));
        rows.group_stride = static_cast<int32_t>(groups[area]);
        set_rows_memory(areas_[area]->data(), kernel[area], rows);
        rows_.push_back(rows);
    }
}

// Checks the order of chunks and plans when they are released. Chunks arrive in the order of the ops. Those
// of a range, which are all awaited at once, and those of the head, which may run several times, must not
// overlap in memory.
void StepRunner::plan_chunk_releases() {
    if (!stream_) return;
    int last = -1;
    for (const auto* list : {&plan_->body, &plan_->head})
        for (const auto& op : *list) {
            if (op->chunk < 0) continue;
            require(op->chunk == last || op->chunk == last + 1, "chunks of weights out of order");
            last = op->chunk;
        }
    require(last + 1 == static_cast<int>(stream_->streamed().size()), "a chunk of weights that no op reads");
    // An op releases the chunks before its own; the last op of a chunk releases that chunk too.
    released_.assign(plan_->body.size(), 0);
    int next = static_cast<int>(stream_->streamed().size());
    for (const auto& op : plan_->head)
        if (op->chunk >= 0) next = std::min(next, op->chunk);
    const int head_first = next;
    for (int i = static_cast<int>(plan_->body.size()) - 1; i >= 0; i--) {
        released_[i] = next;
        if (plan_->body[i]->chunk >= 0) next = plan_->body[i]->chunk;
    }
    for (const OpRange& range : plan_->ranges)
        check_overlaps(range.first ? released_[range.first - 1] : 0, released_[range.last - 1]);
    check_overlaps(head_first, static_cast<int>(stream_->streamed().size()));
}

void StepRunner::check_overlaps(int first, int end) const {
    const auto& chunks = stream_->streamed();
    for (int a = first; a < end; a++)
        for (int b = a + 1; b < end; b++)
            require(!chunks[a].overlaps(chunks[b]), "overlapping chunks in one range");
}

void StepRunner::allocate_thread_states() {
    const BufferSizes& sizes = plan_->sizes;
    size_t row_bytes = 0;
    for (const QuantizedRows& each : rows_)
        row_bytes = std::max(row_bytes, rows_bytes(each, sizes.has_row_blocks ? kExpertRows : kTile));
    for (auto& thread : threads_) {
        for (auto& acc : thread.acc) acc.resize(static_cast<size_t>(kRowBlock) * kTile);
        for (auto& sums : thread.columns)
            sums.resize(static_cast<size_t>(kTile) *
                        std::max(kColumnTiles * kColumnRows, kGatheredTiles * kRowBlock));
        thread.group.resize(static_cast<size_t>(kRowBlock) * kGroup);
        thread.matmul_scratch = std::make_unique<Memory>(sizes.matmul_scratch);
        thread.own_rows = std::make_unique<Memory>(row_bytes);
        thread.scores.resize(sizes.num_scores);
        thread.adapter_input = std::make_unique<Memory>(sizeof(float) * AdapterRows::kMaxRunRows *
                                                        padded_width(sizes.adapted_width));
        thread.gathered = std::make_unique<Memory>(sizes.gathered_bytes);
        thread.seconds.resize(plan_->body.size());
        thread.sampling = std::make_unique<Memory>(kernels().sample_scratch_bytes(plan_->options.vocab));
    }
}

// -- running --

void StepRunner::record(const Op& op, const View& view, double seconds) {
    OpTime& time = profiled_[op.name()];
    const Cost cost = op.cost(view);
    time.code = op.code();
    time.calls++;
    time.seconds += seconds;
    time.cost.bytes += cost.bytes;
    time.cost.operations += cost.operations;
}

uint32_t StepRunner::collective(int index, const View& view) const {
    // The head's collectives are repeated for each chunk of sampled rows.
    const bool samples = view.num_samples > 0;
    const int before =
        samples ? plan_->num_collectives[0] + view.first_sample / kSampleChunk * plan_->num_collectives[1]
                : 0;
    return first_collective_ + static_cast<uint32_t>(before + index);
}

int StepRunner::count_collectives(const Batch& batch) const {
    const int chunks = (batch.num_samples + kSampleChunk - 1) / kSampleChunk;
    return plan_->num_collectives[0] + chunks * plan_->num_collectives[1];
}

BestLogit StepRunner::best(int sample) const {
    BestLogit best;
    for (const auto& thread : threads_) best.update(thread.best[sample]);
    return best;
}

void StepRunner::plan_attention(const Batch& batch, const KvMemory& kv) {
    size_t floats = 0;
    for (auto& plan : attention_plans_) {
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

// A slot or block outside the KV memory would corrupt another request's keys.
void StepRunner::check(const Batch& batch, const KvMemory& kv) const {
    if (batch.num_axes < plan_->num_axes)
        fail("positions on " + std::to_string(batch.num_axes) + " axes, the program reads " +
             std::to_string(plan_->num_axes));
    if (batch.input_rows && plan_->input_width && batch.input_width != plan_->input_width)
        fail("given rows of width " + std::to_string(batch.input_width) + ", the program takes " +
             std::to_string(plan_->input_width));
    for (int t = 0; batch.limits && t < batch.num_tokens; t++)
        if (batch.limits[t] <= batch.key_indices[t])
            fail("row " + std::to_string(t) + " sees keys up to " + std::to_string(batch.limits[t]) +
                 ", not its own at " + std::to_string(batch.key_indices[t]));
    if (batch.hidden_width != plan_->hidden_width)
        fail("rows of " + std::to_string(batch.hidden_width) +
             " hidden values come from the previous stage, not " + std::to_string(plan_->hidden_width));
    if (batch.num_tokens > plan_->options.max_tokens)
        fail("a step of " + std::to_string(batch.num_tokens) + " tokens, prepared for " +
             std::to_string(plan_->options.max_tokens));
    for (int i = 0; i < kv.num_groups() * batch.num_tokens; i++)
        if (batch.slots[i] < -1 || batch.slots[i] >= kv.group(i / batch.num_tokens).num_blocks * kTile)
            fail("slot " + std::to_string(batch.slots[i]) + " is outside the KV memory");
    for (int64_t i = 0; i < static_cast<int64_t>(kv.num_groups()) * batch.num_copies; i++)
        if (batch.copy_slots[i] < -1 ||
            batch.copy_slots[i] >= kv.group(i / batch.num_copies).num_blocks * kTile)
            fail("a copy to slot " + std::to_string(batch.copy_slots[i]) + " is outside the KV memory");
    for (const auto& plan : attention_plans_) check_tables(plan, batch, kv);
    for (const auto& op : plan_->body) op->check(batch, kv);
    for (int t = 0; batch.adapters && t < batch.num_tokens; t++)
        if (batch.adapters[t] >= 0 && !adapters_.has(batch.adapters[t]))
            fail("row " + std::to_string(t) + " has the adapter of slot " +
                 std::to_string(batch.adapters[t]) + ", which is empty");
    for (int s = 0; s < batch.num_samples; s++)
        if (batch.sample_rows[s] < 0 || batch.sample_rows[s] >= batch.num_tokens)
            fail("sampled row " + std::to_string(batch.sample_rows[s]) + " of " +
                 std::to_string(batch.num_tokens));
}

void StepRunner::check_tables(const AttentionPlan& plan, const Batch& batch, const KvMemory& kv) const {
    for (int r = 0; r < batch.num_requests; r++) {
        const int row = batch.query_starts[r], i = plan.group * batch.num_requests + r;
        if (row == batch.query_starts[r + 1]) continue;
        const int needed = (batch.context_lens[i] + kTile - 1) / kTile;
        if (needed > batch.table_width)
            fail("a context of " + std::to_string(batch.context_lens[i]) + " keys with " +
                 std::to_string(batch.table_width) + " blocks");
        // Blocks that have left the window may be missing in the table.
        const int first_key = plan.mask.first_key(batch.key_indices[row]);
        for (int b = first_key / kTile; b < needed; b++) {
            const int block = batch.block_tables[static_cast<int64_t>(i) * batch.table_width + b];
            if (!kv.has_block(plan.group, block))
                fail("block " + std::to_string(block) + " is outside the KV memory");
        }
    }
}

void StepRunner::profile(bool on) {
    profiling_ = on;
    profiled_.clear();
}

void StepRunner::group_adapter_rows(const Batch& batch) {
    if (!batch.adapters) return;
    adapter_rows_.sort(batch.adapters, 0, batch.num_tokens);
    std::vector<int32_t> slots(batch.num_samples);
    for (int s = 0; s < batch.num_samples; s++) slots[s] = batch.adapters[batch.sample_rows[s]];
    sample_adapter_rows_.resize((batch.num_samples + kSampleChunk - 1) / kSampleChunk);
    for (int first = 0; first < batch.num_samples; first += kSampleChunk)
        sample_adapter_rows_[first / kSampleChunk].sort(slots.data() + first, 0,
                                                        std::min(kSampleChunk, batch.num_samples - first));
}

void StepRunner::mark_sparse(const Batch& batch) {
    sparse_rows_.assign(batch.num_tokens, 0);
    sparse_samples_.assign(batch.num_samples, 0);
    for (int r = 0; batch.sparse_from && r < batch.num_requests; r++)
        for (int t = batch.query_starts[r]; t < batch.query_starts[r + 1]; t++)
            sparse_rows_[t] = batch.key_indices[t] >= batch.sparse_from[r];
    for (int s = 0; s < batch.num_samples; s++) sparse_samples_[s] = sparse_rows_[batch.sample_rows[s]];
}

void StepRunner::run(const Batch& batch, const KvMemory& kv) {
    check(batch, kv);
    mark_sparse(batch);
    for (size_t i = 0; i < selected_.size(); i++)
        selected_[i]->begin(batch, kv, sparse_rows_.data(), plan_->selections[i].is_prefetch);
    begin_spill(batch, kv);
    num_kept_ = batch.keeps_logits ? batch.num_samples : 0;
    group_adapter_rows(batch);
    int last = 0;
    for (int t = 0; t < plan_->num_axes * batch.num_tokens; t++) last = std::max(last, batch.positions[t]);
    for (auto& angles : angles_) angles.ensure(last + 1);
    plan_attention(batch, kv);
    for (auto& thread : threads_) {
        thread.prepared_op = thread.prepared_block = -1;
        thread.best.assign(batch.num_samples, BestLogit{});
    }
    kernels().begin_step();
    if (plan_->neurons) plan_->neurons->begin_step();
    SharedRanks *ranks = plan_->options.ranks.get(), *engines = plan_->options.engines.get();
    if (ranks) first_collective_ = ranks->next();
    if (engines) first_engine_exchange_ = engines->next();
    StepRun step_run(*this, batch, kv);
    pool_.run(step_run);
    if (ranks) ranks->advance(count_collectives(batch));
    if (engines) engines->advance(plan_->num_engine_exchanges);
    for (const SharedRanks* group : {ranks, engines})
        if (group && group->aborted()) throw RanksAborted();
    finish_reads(kv);
}

// Passes the blocks that the step writes to the spill files.
void StepRunner::begin_spill(const Batch& batch, const KvMemory& kv) {
    for (const int group : selected_groups_) {
        if (!kv.spill(group)) continue;
        std::map<int32_t, int> firsts;  // by block: first token that is written
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

// Ends all kinds of reads, then rethrows the last error.
void StepRunner::finish_reads(const KvMemory& kv) {
    std::exception_ptr error;
    const auto end = [&](auto& reads) {
        try {
            reads.end_step();
        } catch (...) {
            error = std::current_exception();
        }
    };
    if (plan_->neurons) end(*plan_->neurons);
    for (const int group : selected_groups_)
        if (kv.spill(group)) end(*kv.spill(group));
    if (stream_) stream_->end_step();
    if (error) std::rethrow_exception(error);
}

const float* StepRunner::kept_logits(int sample) const {
    if (sample < 0 || sample >= num_kept_ || num_kept_ > kSampleChunk)
        fail("sampled row " + std::to_string(sample) + " has no logits, of " + std::to_string(num_kept_));
    return arena(Axis::samples) + sample * row_floats(Axis::samples) + plan_->logits.offset;
}

void StepRunner::resample(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                          std::vector<SamplingRecord> records, const uint32_t* masks,
                          const std::vector<const float*>& replacement_logits) {
    std::vector<const float*> replacements(batch.num_samples);
    for (size_t i = 0; i < samples.size(); i++) {
        kept_logits(samples[i]);
        records[samples[i]].allowed_mask = static_cast<int32_t>(i);
        replacements[samples[i]] = replacement_logits[i];
    }
    Batch masked = batch;
    masked.deferred = nullptr;
    masked.sampling.skips_cutoffs = nullptr;
    masked.sampling.records = records.data();
    masked.sampling.allowed_masks = masks;
    masked.sampling.replacement_logits = replacements.data();
    run_sampling(masked, kv, samples);
}

void StepRunner::write_candidates(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                                  int32_t* out) {
    for (const int32_t sample : samples) kept_logits(sample);
    std::vector<SamplingRecord> records(batch.sampling.records, batch.sampling.records + batch.num_samples);
    for (auto& record : records) record.num_logprobs = -1;
    std::vector<int32_t> ids(batch.num_samples),
        candidates(static_cast<size_t>(batch.num_samples) * kMaxCandidates, -1);
    std::vector<uint8_t> failed(batch.num_samples);
    Batch sampled = batch;
    sampled.deferred = nullptr;
    sampled.sampling.skips_cutoffs = nullptr;
    sampled.sampling.records = records.data();
    sampled.sampling.out_ids = ids.data();
    sampled.sampling.out_failed = failed.data();
    sampled.sampling.out_candidates = candidates.data();
    sampled.sampling.num_candidates = kMaxCandidates;
    run_sampling(sampled, kv, samples);
    for (const int32_t sample : samples)
        out = std::copy_n(candidates.data() + static_cast<int64_t>(sample) * kMaxCandidates, kMaxCandidates,
                          out);
}

void StepRunner::run_sampling(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples) {
    const View view{.runner = *this, .batch = batch, .kv = kv, .num_samples = batch.num_samples};
    pool_.parallel_for(static_cast<int>(samples.size()), [&](int item, int thread) {
        plan_->sampling->run(view, samples[item], threads_[thread], 0);
    });
}

}  // namespace octavo
