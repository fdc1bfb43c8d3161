// The engine's compute threads. They live as long as the engine and run tasks together.
//
// A task is a sequence of phases; a phase is a number of independent work items. A phase starts when all
// items of the one before it are done. Each thread runs the items of its own range first and then steals
// from the others, so a thread that the operating system has preempted delays at most the item that it is
// running. A thread that wakes up after the last item is done finds the task closed, and no other thread
// has waited for it. Threads spin for at most 50 us and then sleep: on a core shared with a busy neighbour,
// spinning would slow that neighbour down.
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
    // All functions are called from every thread, except on_phase_done.
    struct Task {
        virtual ~Task() = default;
        virtual int num_phases() const = 0;
        virtual int num_items(int phase) const = 0;
        virtual void run(int phase, int item, int thread) = 0;
        // Called on a thread that has no item left in a phase, before it waits for the others. Returns
        // bytes that the thread prefetches while it waits.
        virtual Span before_wait(int /*phase*/, int /*thread*/) { return {}; }
        // Called on the thread that called `ThreadPool::run` when all items of a phase are done.
        virtual void on_phase_done(int /*phase*/) {}
    };

    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Returns the first item of a thread's own range.
    int first_item(int num_items, int thread) const {
        return static_cast<int>(static_cast<int64_t>(num_items) * thread / num_threads_);
    }
    // Returns whether the thread that runs an item runs the next one too, unless another thread steals it.
    bool runs_next_item(int num_items, int item) const {
        const int thread =
            static_cast<int>((static_cast<int64_t>(item + 1) * num_threads_ + num_items - 1) / num_items);
        return item + 1 < num_items && first_item(num_items, thread) != item + 1;
    }

    // Runs all phases in order and returns when the last is done. One caller at a time. Task::run must not
    // throw.
    void run(Task& task);

    // Calls fn(item, thread) for each item, in one phase.
    void parallel_for(int num_items, const std::function<void(int, int)>& fn);

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
    void run_as(int thread);
    int run_items(int phase, int num_items, int thread);
    static void wait_for(std::atomic<int>& counter, int goal, Span to_prefetch = {});

    const int num_threads_;
    std::vector<std::thread> threads_;
    Task* task_ = nullptr;
    int num_phases_ = 0;
    std::unique_ptr<Range[]> ranges_;  // [phases][threads]
    std::unique_ptr<Counter[]> done_;  // [phases]: items that are done
    int capacity_ = 0;  // phases that both arrays have room for
    Counter epoch_;  // counts tasks; a change wakes the threads
    Counter gate_;  // threads inside the current task, plus kClosed when no further thread may enter
    std::atomic<bool> stopping_{false};
};

}  // namespace octavo
