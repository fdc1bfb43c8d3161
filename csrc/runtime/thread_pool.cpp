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

// Upper bound on spinning before a thread sleeps: longer than any wait between the stages of a decode step on
// idle cores (about 1 to 10 us), and the most that a thread may spin after a step.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr size_t kLine = 64;  // bytes of a cache line

// Spins until ready() holds; returns false once the time for spinning is over. Prefetches the lines of
// `to_prefetch`, one each turn.
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
    } catch (
        ...) {  // the system gives no more threads; those that run must be joined before they are destroyed
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
        walk_as(thread);
        if (gate_.value.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) gate_.value.notify_one();
    }
}

bool ThreadPool::enter() {
    int inside = gate_.value.load(std::memory_order_acquire);
    while (inside < kClosed)
        if (gate_.value.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
    return false;
}

void ThreadPool::walk(Work& work) {
    work_ = &work;
    num_stages_ = work.num_stages();
    if (num_threads_ == 1) {
        for (int stage = 0; stage < num_stages_; stage++) {
            for (int piece = 0, pieces = work.pieces(stage); piece < pieces; piece++)
                work.run(stage, piece, 0);
            work.finished(stage);
        }
        return;
    }
    if (num_stages_ > capacity_) {
        capacity_ = num_stages_;
        ranges_ = std::make_unique<Range[]>(static_cast<size_t>(capacity_) * num_threads_);
        done_ = std::make_unique<Counter[]>(capacity_);
    }
    for (int i = 0; i < num_stages_ * num_threads_; i++) ranges_[i].next.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_stages_; i++) done_[i].value.store(0, std::memory_order_relaxed);
    gate_.value.store(0, std::memory_order_release);
    epoch_.value.fetch_add(1, std::memory_order_release);
    epoch_.value.notify_all();
    walk_as(0);
    gate_.value.fetch_add(kClosed, std::memory_order_acq_rel);
    wait_for(gate_.value, kClosed);
}

void ThreadPool::walk_as(int thread) {
    for (int stage = 0; stage < num_stages_; stage++) {
        const int pieces = work_->pieces(stage);
        if (pieces == 0) continue;
        const int mine = take_all(stage, pieces, thread);
        auto& done = done_[stage].value;
        if (mine && done.fetch_add(mine, std::memory_order_acq_rel) + mine == pieces) {
            done.notify_all();
        } else {
            wait_for(done, pieces, work_->waits(stage, thread));
        }
        if (thread == 0) work_->finished(stage);
    }
}

// Runs pieces of the stage until none is left to take; returns how many. Thread t of n has as its own range
// the pieces from t/n to (t+1)/n of all.
int ThreadPool::take_all(int stage, int pieces, int thread) {
    int taken = 0;
    for (int i = 0; i < num_threads_; i++) {
        const int owner = (thread + i) % num_threads_;
        const int first = first_piece(pieces, owner), last = first_piece(pieces, owner + 1);
        auto& next = ranges_[static_cast<size_t>(stage) * num_threads_ + owner].next;
        while (next.load(std::memory_order_relaxed) < last - first) {
            const int piece = first + next.fetch_add(1, std::memory_order_relaxed);
            if (piece >= last) break;
            work_->run(stage, piece, thread);
            taken++;
        }
    }
    return taken;
}

void ThreadPool::wait_for(std::atomic<int>& counter, int goal, Span to_prefetch) {
    if (spin_until([&] { return counter.load(std::memory_order_acquire) == goal; }, to_prefetch)) return;
    for (int seen; (seen = counter.load(std::memory_order_acquire)) != goal;)
        counter.wait(seen, std::memory_order_acquire);
}

void ThreadPool::parallel_for(int pieces, const std::function<void(int, int)>& fn) {
    struct One : Work {
        int count;
        const std::function<void(int, int)>& fn;
        One(int n, const std::function<void(int, int)>& f) : count(n), fn(f) {}
        int num_stages() const override { return 1; }
        int pieces(int) const override { return count; }
        void run(int, int piece, int thread) override { fn(piece, thread); }
    } one(pieces, fn);
    walk(one);
}

}  // namespace octavo
