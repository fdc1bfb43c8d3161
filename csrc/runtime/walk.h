// The stages of one step as the thread pool walks them: the body, stage by stage or in ranges that blocks of
// rows go through, then the head once for each chunk of sampled rows.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "step_runner.h"

namespace octavo {

struct Walk : ThreadPool::Work {
    StepRunner& runner;
    const Batch& batch;
    const KvMemory& kv;
    const int block;  // rows that a thread takes through a range; 0: the body goes stage by stage
    const std::vector<StageRange>& body;
    const int head, chunks;
    const Stage* const best_only;

    Walk(StepRunner& r, const Batch& b, const KvMemory& k)
        : runner(r),
          batch(b),
          kv(k),
          block(row_block(b.num_tokens, r.pool().num_threads(), r.plan().least_rows, r.kernels().row_block)),
          body(block        ? r.plan().ranges
               : b.adapters ? r.plan().each
                            : r.plan().plain),
          head(static_cast<int>(r.plan().head.size())),
          chunks((b.num_samples + kSampleChunk - 1) / kSampleChunk),
          best_only(b.draws_best() ? r.plan().logits_product : nullptr) {
        const uint64_t walks = (runner.kv_written_.load(std::memory_order_relaxed) >> 32) + 1;
        runner.kv_written_.store(walks << 32, std::memory_order_release);
    }

    // Threads that share a product's outputs each read a part of its weights, and all rows; threads that
    // share the rows read all weights, which costs as much as some eight rows more. The latter pays where
    // rows are many and a block is found with which they come out even: one row behind two threads' blocks
    // of 16 would make one of them take 32. Values of `Axis::block` have room for `most` rows of each thread.
    static int row_block(int rows, int threads, int least, int most) {
        if (rows < threads * least) return 0;
        int best = 0;
        double lowest = rows <= threads * most ? cost_of_shared_outputs(rows, threads) : INFINITY;
        for (int block = most; block >= kTile; block -= kTile) {
            const int cost = cost_of_blocks(rows, threads, block);
            if (cost < lowest) best = block, lowest = cost;
        }
        return best;
    }
    // The unit is a row of one thread. What all threads write and read again lies in no thread's own cache,
    // and they meet behind each stage.
    static double cost_of_shared_outputs(int rows, int threads) {
        return 1.35 * rows / threads + kRowsOfWeights;
    }
    // The rows of the thread that takes the most; the last block may be a small one.
    static int cost_of_blocks(int rows, int threads, int block) {
        const int blocks = (rows + block - 1) / block, turns = (blocks + threads - 1) / threads;
        const bool ends_alone = blocks % threads == 1 || threads == 1;
        const int last = ends_alone ? rows - (blocks - 1) * block : block;
        return (turns - 1) * (block + kRowsOfWeights) + last + kRowsOfWeights;
    }
    static constexpr int kRowsOfWeights = 8;

    int num_stages() const override { return static_cast<int>(body.size()) + head * chunks; }
    StageRange range(int index) const {
        if (index < static_cast<int>(body.size())) return body[index];
        const int stage = (index - static_cast<int>(body.size())) % head;
        return {stage, stage + 1};
    }
    bool by_rows(int index) const {
        return block && index < static_cast<int>(body.size()) &&
               runner.plan().body[body[index].first]->row_local();
    }
    const Stage& stage(int index) const {
        return *(index < static_cast<int>(body.size()) ? runner.plan().body
                                                       : runner.plan().head)[range(index).first];
    }
    View view(int index) const {
        if (index < static_cast<int>(body.size())) return View{.runner = runner, .batch = batch, .kv = kv};
        const int first = (index - static_cast<int>(body.size())) / head * kSampleChunk;
        return View{.runner = runner,
                    .batch = batch,
                    .kv = kv,
                    .first_sample = first,
                    .num_samples = std::min(kSampleChunk, batch.num_samples - first),
                    .best_only = best_only};
    }
    int pieces(int index) const override {
        return by_rows(index) ? (batch.num_tokens + block - 1) / block : stage(index).pieces(view(index));
    }
    void run(int index, int piece, int thread) override {
        if (runner.stream_ && !weights_arrive(index)) return;
        if (runner.plan().neurons && runner.plan().neurons->failed()) return;
        if (by_rows(index))
            run_block(body[index], piece * block, std::min(batch.num_tokens, (piece + 1) * block), thread);
        else
            stage(index).run(view(index), piece, runner.threads_[thread], index);
    }
    // Waits for the weights of a stage, or of all stages of a range; false where they cannot be read, and then
    // no stage computes any more.
    bool weights_arrive(int index) const {
        WeightStream& stream = *runner.stream_;
        int chunk = stage(index).chunk;
        if (by_rows(index))
            for (int i = body[index].first; i < body[index].last; i++)
                chunk = std::max(chunk, runner.plan().body[i]->chunk);
        return (chunk < 0 || stream.await(chunk)) && !stream.failed();
    }
    Span waits(int index, int thread) override {
        prefetch_next(index, thread);
        return upcoming(index, thread);
    }
    // Prefetches what this thread's piece of the next stage will read first.
    void prefetch_next(int index, int thread) const {
        if (index + 1 >= num_stages() || by_rows(index + 1)) return;
        const View next = view(index + 1);
        if (stage(index + 1).depends_on_data(next)) return;
        const int count = stage(index + 1).pieces(next), piece = runner.pool_.first_piece(count, thread);
        if (piece < count) stage(index + 1).prefetch(next, piece, runner.threads_[thread]);
    }
    void run_block(const StageRange& range, int row0, int row1, int index) const {
        const int shift = row0 - index * runner.kernels().row_block;
        const View view{.runner = runner, .batch = batch, .kv = kv, .shift = shift};
        ThreadState& thread = runner.threads_[index];
        if (batch.adapters) thread.block_rows.sort(batch.adapters, row0, row1);
        for (int i = range.first; i < range.last; i++) {
            const auto start = runner.profiling_ ? Clock::now() : Clock::time_point();
            runner.plan().body[i]->run_rows(view, row0, row1, thread);
            if (runner.profiling_) thread.seconds[i - range.first] += seconds_since(start);
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
        runner.stages_done_.fetch_add(1, std::memory_order_relaxed);
        if (index < static_cast<int>(body.size())) count_kv_writes(body[index].last);
        if (runner.stream_ && index < static_cast<int>(body.size()))
            runner.stream_->release(runner.released_[body[index].last - 1]);
        if (!runner.profiling_) return;
        if (by_rows(index)) {
            for (int i = body[index].first; i < body[index].last; i++)
                runner.record(*runner.plan().body[i], view(index), mean_seconds(i - body[index].first));
        } else {
            runner.record(stage(index), view(index), seconds_since(since));
        }
        since = Clock::now();
    }

    // Counts the writes of keys and values before a stage, once all threads have passed it.
    void count_kv_writes(int end) {
        const auto& writes = runner.plan().kv_writes;
        int done = 0;
        for (; next_write < writes.size() && writes[next_write].stage < end; next_write++) done++;
        if (done) runner.kv_written_.fetch_add(done, std::memory_order_release);
    }

  private:
    using Clock = std::chrono::steady_clock;
    static double seconds_since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }
    // Seconds in a stage of the range that is done, the threads' mean; sets their sums back to zero.
    double mean_seconds(int i) {
        double sum = 0;
        for (auto& thread : runner.threads_) sum += std::exchange(thread.seconds[i], 0.0);
        return sum / static_cast<double>(runner.threads_.size());
    }
    size_t next_write = 0;  // the first of the plan's kv_writes that is not counted
    Clock::time_point since = Clock::now();
};

}  // namespace octavo
