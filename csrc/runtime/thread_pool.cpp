#include "thread_pool.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>
#include <utility>

namespace octavo {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Time that a thread spins before it sleeps, also after a step. Longer than any wait between the phases of
// a decode step on idle cores (about 1 to 10 us).
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr size_t kLine = 64;  // bytes of a cache line

// Spins until ready() holds and prefetches one line of `to_prefetch` in each iteration. Returns false after
// kSpin.
template <typename Ready>
bool spin_until(const Ready& ready, Span to_prefetch = {}) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1;; i++) {
        if (ready()) return true;
        if (to_prefetch.first < to_prefetch.last) {
            __builtin_prefetch(to_prefetch.first, 0, 2);
            to_prefetch.first += kLine;
        } else {
            relax();
        }
        if (i % 64 == 0 && std::chrono::steady_clock::now() - start > kSpin) return false;
    }
}

// Binds the calling thread to processors, if there are any and the system allows it.
void bind_thread([[maybe_unused]] const std::vector<int>& cpus) {
#ifdef __linux__
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int cpu : cpus)
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &mask);
    if (CPU_COUNT(&mask)) sched_setaffinity(0, sizeof(mask), &mask);
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::vector<std::vector<int>> group_cpus)
    : num_threads_(std::max(num_threads, 1)),
      group_cpus_(std::move(group_cpus)),
      num_groups_(std::clamp(static_cast<int>(group_cpus_.size()), 1, num_threads_)) {
    for (int64_t group = 0; group <= num_groups_; group++)
        first_thread_.push_back(static_cast<int>(num_threads_ * group / num_groups_));
    gate_.value = kClosed;
    try {
        for (int t = 1; t < num_threads_; t++) threads_.emplace_back([this, t] { serve(t); });
    } catch (...) {  // the system's thread limit is reached: join the threads that have started
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stopping_ = true;
    epoch_.value.fetch_add(1, std::memory_order_release);
    epoch_.value.notify_all();
    for (auto& thread : threads_) thread.join();
}

void ThreadPool::serve(int thread) {
    if (!group_cpus_.empty()) bind_thread(group_cpus_[group_of(thread)]);
    int seen = 0;
    while (true) {
        if (!spin_until([&] { return epoch_.value.load(std::memory_order_acquire) != seen; }))
            epoch_.value.wait(seen, std::memory_order_acquire);
        seen = epoch_.value.load(std::memory_order_acquire);
        if (stopping_) return;
        if (!enter()) continue;
        run_as(thread);
        if (gate_.value.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) gate_.value.notify_one();
    }
}

// Enters the current task. Returns false if it is closed.
bool ThreadPool::enter() {
    int inside = gate_.value.load(std::memory_order_acquire);
    while (inside < kClosed)
        if (gate_.value.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
    return false;
}

void ThreadPool::run(Task& task) {
    task_ = &task;
    num_phases_ = task.num_phases();
    if (num_threads_ == 1) {
        for (int phase = 0; phase < num_phases_; phase++) {
            for (int item = 0, num_items = task.num_items(phase); item < num_items; item++)
                task.run(phase, item, 0);
            task.on_phase_done(phase);
        }
        return;
    }
    if (num_phases_ > capacity_) {
        capacity_ = num_phases_;
        ranges_ = std::make_unique<Range[]>(static_cast<size_t>(capacity_) * num_threads_);
        progress_ = std::make_unique<Progress[]>(static_cast<size_t>(capacity_) * (num_groups_ + 1));
    }
    run_ = static_cast<int>(static_cast<uint32_t>(run_) + 1);
    gate_.value.store(0, std::memory_order_release);
    epoch_.value.store(run_, std::memory_order_release);
    epoch_.value.notify_all();
    run_as(0);
    gate_.value.fetch_add(kClosed, std::memory_order_acq_rel);
    wait_for(gate_.value, kClosed);
}

void ThreadPool::run_as(int thread) {
    const int group = group_of(thread);
    for (int phase = 0; phase < num_phases_; phase++) {
        const int num_items = task_->num_items(phase);
        if (num_items == 0) continue;
        if (!run_items(phase, num_items, thread, group))
            wait_for(progress(phase, group).released, run_, task_->before_wait(phase, thread));
        if (thread == 0) task_->on_phase_done(phase);
    }
}

// Runs items of the phase until none is left. Returns whether the phase ended with one of them.
bool ThreadPool::run_items(int phase, int num_items, int thread, int own_group) {
    const int place = thread - first_thread_[own_group];
    bool ended = false;
    for (int g = 0; g < num_groups_; g++) {
        const int group = (own_group + g) % num_groups_, begin = first_thread_[group];
        const int size = first_thread_[group + 1] - begin;
        int count = 0;
        for (int i = 0; i < size; i++) {
            const int owner = begin + (place + i) % size;
            const int first = first_item(num_items, owner), last = first_item(num_items, owner + 1);
            Range& range = ranges_[static_cast<size_t>(phase) * num_threads_ + owner];
            for (int item; (item = take(range, last - first)) >= 0; count++)
                task_->run(phase, first + item, thread);
        }
        if (count) ended |= count_done(phase, num_items, group, count);
    }
    return ended;
}

// Returns the next item of a range, from 0 on; -1 if none is left.
int ThreadPool::take(Range& range, int size) const {
    const uint64_t start = static_cast<uint64_t>(run_) << 32;
    uint64_t seen = range.next.load(std::memory_order_relaxed);
    while (true) {
        const uint64_t next = seen >> 32 == start >> 32 ? seen : start;
        const int item = static_cast<int>(next - start);
        if (item >= size) return -1;
        if (range.next.compare_exchange_weak(seen, next + 1, std::memory_order_relaxed)) return item;
    }
}

// Counts items of a group's ranges as done. The last items of a group are counted for the phase, and the last
// of these release all groups. Returns whether the phase has ended.
bool ThreadPool::count_done(int phase, int num_items, int group, int count) {
    const auto add = [](Progress& progress, int items, int all) {
        if (progress.done.fetch_add(items, std::memory_order_acq_rel) + items < all) return false;
        progress.done.store(0, std::memory_order_relaxed);  // for the next run
        return true;
    };
    const int items =
        first_item(num_items, first_thread_[group + 1]) - first_item(num_items, first_thread_[group]);
    if (!add(progress(phase, group), count, items)) return false;
    if (items < num_items && !add(progress(phase, num_groups_), items, num_items)) return false;
    for (int g = 0; g < num_groups_; g++) {
        auto& released = progress(phase, g).released;
        released.store(run_, std::memory_order_release);
        released.notify_all();
    }
    return true;
}

void ThreadPool::wait_for(std::atomic<int>& counter, int goal, Span to_prefetch) {
    if (spin_until([&] { return counter.load(std::memory_order_acquire) == goal; }, to_prefetch)) return;
    for (int seen; (seen = counter.load(std::memory_order_acquire)) != goal;)
        counter.wait(seen, std::memory_order_acquire);
}

void ThreadPool::parallel_for(int num_items, const std::function<void(int, int)>& fn) {
    struct OnePhase : Task {
        int count;
        const std::function<void(int, int)>& fn;
        OnePhase(int n, const std::function<void(int, int)>& f) : count(n), fn(f) {}
        int num_phases() const override { return 1; }
        int num_items(int) const override { return count; }
        void run(int, int item, int thread) override { fn(item, thread); }
    } task(num_items, fn);
    run(task);
}

}  // namespace octavo
