// One step as a task of the thread pool. Its phases are the ops of the body, one by one or in ranges that
// blocks of rows go through, then the ops of the head, once for each chunk of sampled rows.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "step_runner.h"

namespace octavo {

struct StepRun : ThreadPool::Task {
    StepRunner& runner;
    const Batch& batch;
    const KvMemory& kv;
    const int block;  // rows that a thread computes through a whole range; 0: the body runs op by op
    const std::vector<OpRange>& body;
    const int head, chunks;
    const Op* const argmax_op;

    StepRun(StepRunner& r, const Batch& b, const KvMemory& k)
        : runner(r),
          batch(b),
          kv(k),
          block(choose_row_block(b.num_tokens, r.pool().num_threads(), r.plan().min_rows_per_thread,
                                 r.kernels().row_block)),
          body(block        ? r.plan().ranges
               : b.adapters ? r.plan().single_ops
                            : r.plan().single_ops_without_adapters),
          head(static_cast<int>(r.plan().head.size())),
          chunks((b.num_samples + kSampleChunk - 1) / kSampleChunk),
          argmax_op(b.is_greedy() ? r.plan().logits_linear : nullptr) {
        const uint64_t runs = (runner.kv_written_.load(std::memory_order_relaxed) >> 32) + 1;
        runner.kv_written_.store(runs << 32, std::memory_order_release);
    }

    // Returns the rows of a block, or 0 if the threads share the outputs of each op instead.
    //
    // Threads that share outputs read a part of the weights each, and all rows. Threads that share rows
    // read all weights, which costs about as much as kRowsOfWeights more rows. Sharing rows pays if there
    // are many rows and a block size divides them evenly: with 33 rows in blocks of 16 on two threads, one
    // thread would compute two blocks. Values of `Axis::block` have room for `max_block` rows of each
    // thread.
    static int choose_row_block(int rows, int threads, int min_rows_per_thread, int max_block) {
        if (rows < threads * min_rows_per_thread) return 0;
        int best = 0;
        double lowest = rows <= threads * max_block ? cost_of_shared_outputs(rows, threads) : INFINITY;
        for (int block = max_block; block >= kTile; block -= kTile) {
            const int cost = cost_of_blocks(rows, threads, block);
            if (cost < lowest) best = block, lowest = cost;
        }
        return best;
    }
    // Cost in rows of one thread. The factor covers what threads exchange through memory and the barriers.
    static double cost_of_shared_outputs(int rows, int threads) {
        return 1.35 * rows / threads + kRowsOfWeights;
    }
    // Rows of the thread that computes the most; the last block may be smaller.
    static int cost_of_blocks(int rows, int threads, int block) {
        const int blocks = (rows + block - 1) / block, rounds = (blocks + threads - 1) / threads;
        const bool ends_alone = blocks % threads == 1 || threads == 1;
        const int last = ends_alone ? rows - (blocks - 1) * block : block;
        return (rounds - 1) * (block + kRowsOfWeights) + last + kRowsOfWeights;
    }
    static constexpr int kRowsOfWeights = 8;

    int num_phases() const override { return static_cast<int>(body.size()) + head * chunks; }
    OpRange range(int phase) const {
        if (phase < static_cast<int>(body.size())) return body[phase];
        const int index = (phase - static_cast<int>(body.size())) % head;
        return {index, index + 1};
    }
    // Whether the items of a phase are blocks of rows.
    bool by_rows(int phase) const {
        return block && phase < static_cast<int>(body.size()) &&
               runner.plan().body[body[phase].first]->row_local();
    }
    // Returns the first op of a phase.
    const Op& op(int phase) const {
        return *(phase < static_cast<int>(body.size()) ? runner.plan().body
                                                       : runner.plan().head)[range(phase).first];
    }
    View view(int phase) const {
        if (phase < static_cast<int>(body.size())) return View{.runner = runner, .batch = batch, .kv = kv};
        const int first = (phase - static_cast<int>(body.size())) / head * kSampleChunk;
        return View{.runner = runner,
                    .batch = batch,
                    .kv = kv,
                    .first_sample = first,
                    .num_samples = std::min(kSampleChunk, batch.num_samples - first),
                    .argmax_op = argmax_op};
    }
    int num_items(int phase) const override {
        return by_rows(phase) ? (batch.num_tokens + block - 1) / block : op(phase).num_items(view(phase));
    }
    void run(int phase, int item, int thread) override {
        if (runner.stream_ && !wait_for_weights(phase)) return;
        if (runner.plan().neurons && runner.plan().neurons->failed()) return;
        if (by_rows(phase))
            run_block(body[phase], item * block, std::min(batch.num_tokens, (item + 1) * block), thread);
        else
            op(phase).run(view(phase), item, runner.threads_[thread], phase);
    }
    // Waits for the streamed weights of all ops of a phase. Returns false if they cannot be read; no op
    // computes anything after that.
    bool wait_for_weights(int phase) const {
        WeightStream& stream = *runner.stream_;
        int chunk = op(phase).chunk;
        if (by_rows(phase))
            for (int i = body[phase].first; i < body[phase].last; i++)
                chunk = std::max(chunk, runner.plan().body[i]->chunk);
        return (chunk < 0 || stream.await(chunk)) && !stream.failed();
    }
    Span before_wait(int phase, int thread) override {
        prefetch_next(phase, thread);
        return next_weights(phase, thread);
    }
    // Prefetches the data that this thread's first item of the next phase reads first.
    void prefetch_next(int phase, int thread) const {
        if (phase + 1 >= num_phases() || by_rows(phase + 1)) return;
        const View next = view(phase + 1);
        if (op(phase + 1).depends_on_data(next)) return;
        const int count = op(phase + 1).num_items(next), item = runner.pool_.first_item(count, thread);
        if (item < count) op(phase + 1).prefetch(next, item, runner.threads_[thread]);
    }
    // Computes rows row0 .. row1 - 1 through all ops of a range.
    void run_block(const OpRange& range, int row0, int row1, int index) const {
        const int shift = row0 - index * runner.kernels().row_block;
        const View view{.runner = runner, .batch = batch, .kv = kv, .shift = shift};
        ThreadState& thread = runner.threads_[index];
        if (batch.adapters) thread.block_adapter_rows.sort(batch.adapters, row0, row1);
        for (int i = range.first; i < range.last; i++) {
            const auto start = runner.profiling_ ? Clock::now() : Clock::time_point();
            runner.plan().body[i]->run_rows(view, row0, row1, thread);
            if (runner.profiling_) thread.seconds[i - range.first] += seconds_since(start);
        }
    }
    // Returns weights of the next linear op, at most three phases ahead, and no more than fit into a
    // second-level cache beside the data of the running op.
    Span next_weights(int phase, int thread) const {
        constexpr ptrdiff_t kMaxBytes = 256 << 10;
        if (block) return {};
        for (int next = phase + 1; next < std::min(num_phases(), phase + 4); next++) {
            const Span span = op(next).weights_to_prefetch(view(next), thread);
            if (span.first != span.last)
                return {span.first, span.first + std::min(span.last - span.first, kMaxBytes)};
        }
        return {};
    }
    void on_phase_done(int phase) override {
        runner.ops_done_.fetch_add(1, std::memory_order_relaxed);
        if (phase < static_cast<int>(body.size())) count_kv_writes(body[phase].last);
        if (runner.stream_ && phase < static_cast<int>(body.size()))
            runner.stream_->release(runner.released_[body[phase].last - 1]);
        if (!runner.profiling_) return;
        if (by_rows(phase)) {
            for (int i = body[phase].first; i < body[phase].last; i++)
                runner.record(*runner.plan().body[i], view(phase), mean_seconds(i - body[phase].first));
        } else {
            runner.record(op(phase), view(phase), seconds_since(since));
        }
        since = Clock::now();
    }

    // Counts the KV writes of the ops before `end`, which all threads have completed.
    void count_kv_writes(int end) {
        const auto& writes = runner.plan().kv_writes;
        int done = 0;
        for (; next_write < writes.size() && writes[next_write].op < end; next_write++) done++;
        if (done) runner.kv_written_.fetch_add(done, std::memory_order_release);
    }

  private:
    using Clock = std::chrono::steady_clock;
    static double seconds_since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }
    // Returns the threads' mean time in op `i` of the range that is done, and resets their sums.
    double mean_seconds(int i) {
        double sum = 0;
        for (auto& thread : runner.threads_) sum += std::exchange(thread.seconds[i], 0.0);
        return sum / static_cast<double>(runner.threads_.size());
    }
    size_t next_write = 0;  // first of the plan's kv_writes that is not counted yet
    Clock::time_point since = Clock::now();
};

}  // namespace octavo
