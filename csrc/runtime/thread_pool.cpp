#include "thread_pool.h"

#include <sched.h>

#include <chrono>

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

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
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
        done_ = std::make_unique<Counter[]>(capacity_);
    }
    for (int i = 0; i < num_phases_ * num_threads_; i++) ranges_[i].next.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_phases_; i++) done_[i].value.store(0, std::memory_order_relaxed);
    gate_.value.store(0, std::memory_order_release);
    epoch_.value.fetch_add(1, std::memory_order_release);
    epoch_.value.notify_all();
    run_as(0);
    gate_.value.fetch_add(kClosed, std::memory_order_acq_rel);
    wait_for(gate_.value, kClosed);
}

void ThreadPool::run_as(int thread) {
    for (int phase = 0; phase < num_phases_; phase++) {
        const int num_items = task_->num_items(phase);
        if (num_items == 0) continue;
        const int own = run_items(phase, num_items, thread);
        auto& done = done_[phase].value;
        if (own && done.fetch_add(own, std::memory_order_acq_rel) + own == num_items) {
            done.notify_all();
        } else {
            wait_for(done, num_items, task_->before_wait(phase, thread));
        }
        if (thread == 0) task_->on_phase_done(phase);
    }
}

// Runs items of the phase until none is left and returns how many it has run.
int ThreadPool::run_items(int phase, int num_items, int thread) {
    int count = 0;
    for (int i = 0; i < num_threads_; i++) {
        const int owner = (thread + i) % num_threads_;
        const int first = first_item(num_items, owner), last = first_item(num_items, owner + 1);
        auto& next = ranges_[static_cast<size_t>(phase) * num_threads_ + owner].next;
        while (next.load(std::memory_order_relaxed) < last - first) {
            const int item = first + next.fetch_add(1, std::memory_order_relaxed);
            if (item >= last) break;
            task_->run(phase, item, thread);
            count++;
        }
    }
    return count;
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
