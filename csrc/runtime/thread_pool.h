// Compute threads that live as long as their engine, and the walk over stages that they do together.
//
// A stage is a number of independent pieces; the next stage starts when all are done. Each thread takes
// pieces from a range of its own and then from the others', so a thread that the operating system has
// preempted holds back at most the piece it is in. One that wakes only when all is done finds the walk
// closed; no other thread has waited for it. Waiting spins for a moment, then sleeps: beside a busy neighbour
// on the same core, a spinning thread would burn the very time its partner needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace octavo {

// Bytes first .. last - 1 in memory.
struct Span {
    const uint8_t *first = nullptr, *last = nullptr;
};

class ThreadPool {
  public:
    // Stages to walk over: stage s has pieces(s) pieces; run(s, piece, thread) computes one. Both are called
    // from every thread.
    struct Work {
        virtual ~Work() = default;
        virtual int num_stages() const = 0;
        virtual int pieces(int stage) const = 0;
        virtual void run(int stage, int piece, int thread) = 0;
        // Called by a thread that has nothing left to do in a stage, before it waits for the others. It
        // prefetches the returned bytes while it waits.
        virtual Span waits(int /*stage*/, int /*thread*/) { return {}; }
        // Called by the thread that called `walk`, once all of a stage's pieces are done.
        virtual void finished(int /*stage*/) {}
    };

    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Returns the first of a stage's pieces that a thread takes, and whether the thread that took a piece
    // goes on with the next one; both hold unless another thread takes it.
    int first_piece(int pieces, int thread) const {
        return static_cast<int>(static_cast<int64_t>(pieces) * thread / num_threads_);
    }
    bool goes_on(int pieces, int piece) const {
        const int thread =
            static_cast<int>((static_cast<int64_t>(piece + 1) * num_threads_ + pieces - 1) / pieces);
        return piece + 1 < pieces && first_piece(pieces, thread) != piece + 1;
    }

    // Runs all stages in order; returns when the last is done. One caller at a time. `run` must not throw.
    void walk(Work& work);

    // Calls fn(piece, thread) for each piece, in one stage.
    void parallel_for(int pieces, const std::function<void(int, int)>& fn);

  private:
    struct alignas(64) Range {
        std::atomic<int> next{0};
    };
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    static constexpr int kClosed = 1 << 20;

    void stop();
    void serve(int thread);
    bool enter();
    void walk_as(int thread);
    int take_all(int stage, int pieces, int thread);
    static void wait_for(std::atomic<int>& counter, int goal, Span to_prefetch = {});

    const int num_threads_;
    std::vector<std::thread> threads_;
    Work* work_ = nullptr;
    int num_stages_ = 0;
    std::unique_ptr<Range[]> ranges_;  // [stages][threads]
    std::unique_ptr<Counter[]> done_;  // [stages]: pieces finished
    int capacity_ = 0;  // stages that the two arrays have room for
    Counter epoch_;  // counts walks; a change wakes the threads
    Counter gate_;  // threads inside the current walk, plus kClosed once no further one may enter
    std::atomic<bool> stopping_{false};
};

}  // namespace octavo
