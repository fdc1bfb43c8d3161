// The engine's compute threads. They live as long as the engine and run tasks together.
//
// A task is a sequence of phases; a phase is a number of independent work items. A phase starts when all
// items of the one before it are done. Each thread runs the items of its own range first and then steals
// from the others, so a thread that the operating system has preempted delays at most the item that it is
// running. A thread that wakes up after the last item is done finds the task closed, and no other thread
// has waited for it. Threads spin for at most 50 us and then sleep: on a core shared with a busy neighbour,
// spinning would slow that neighbour down.
//
// With many cores, the threads form groups. The items of a group's ranges are counted in a cache line of the
// group, on which its threads also wait, and groups that are done in a common one: a phase transfers one or
// two lines per group between groups, instead of one per thread. Threads steal within their group first.
//
// Counters carry the number of the run in which they were written, so that no run resets those of all phases
// and threads before it starts.
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

    // The threads are divided evenly among the groups. `group_cpus`: processors that each group's threads are
    // bound to, except the calling thread; none: any. Without it there is one group.
    explicit ThreadPool(int num_threads, std::vector<std::vector<int>> group_cpus = {});
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
        std::atomic<uint64_t> next{0};  // run, and items of it that threads have taken (the low 32 bits)
    };
    struct alignas(64) Progress {
        std::atomic<int> done{0};  // items of this run; 0 again when all are
        std::atomic<int> released{0};  // last run in which all items of the phase were done
    };
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    static constexpr int kClosed = 1 << 20;

    int group_of(int thread) const { return ((thread + 1) * num_groups_ - 1) / num_threads_; }
    // Returns a group's progress in a phase; after those of the groups, that of the phase.
    Progress& progress(int phase, int group) {
        return progress_[static_cast<size_t>(phase) * (num_groups_ + 1) + group];
    }

    void stop();
    void serve(int thread);
    bool enter();
    void run_as(int thread);
    bool run_items(int phase, int num_items, int thread, int own_group);
    int take(Range& range, int size) const;
    bool count_done(int phase, int num_items, int group, int count);
    static void wait_for(std::atomic<int>& counter, int goal, Span to_prefetch = {});

    const int num_threads_;
    const std::vector<std::vector<int>> group_cpus_;
    const int num_groups_;
    std::vector<int> first_thread_;  // [groups + 1]
    std::vector<std::thread> threads_;
    Task* task_ = nullptr;
    int num_phases_ = 0;
    int run_ = 0;  // number of the current task; equal to epoch_
    std::unique_ptr<Range[]> ranges_;  // [phases][threads]
    std::unique_ptr<Progress[]> progress_;  // [phases][groups + 1]
    int capacity_ = 0;  // phases that both arrays have room for
    Counter epoch_;  // counts tasks; a change wakes the threads
    Counter gate_;  // threads inside the current task, plus kClosed when no further thread may enter
    std::atomic<bool> stopping_{false};
};

}  // namespace octavo
