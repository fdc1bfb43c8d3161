// The pool runs each item of each phase once, and no item before the previous phase is done.
#include "../runtime/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

namespace octavo::test {

namespace {

using Micros = std::chrono::microseconds;

// Phases of random sizes, some of them empty. `values` is plain memory, so that the thread sanitizer
// detects races.
struct Recorder : ThreadPool::Task {
    std::vector<int> sizes;
    std::vector<std::vector<int>> values;  // [phases][items]
    int slow_phase = -1;  // its item 0 takes longer than a thread spins
    std::vector<std::atomic<int>> items_by_thread;  // items of the slow phase that each thread has run

    Recorder(int phases, int threads, uint32_t seed) : items_by_thread(threads) {
        std::mt19937 generator(seed);
        for (int s = 0; s < phases; s++) {
            sizes.push_back(generator() % 4 ? static_cast<int>(generator() % 40)
                                            : static_cast<int>(generator() % 2));
            values.emplace_back(sizes.back(), 0);
        }
    }
    int num_phases() const override { return static_cast<int>(sizes.size()); }
    int num_items(int phase) const override { return sizes[phase]; }
    // Returns the next phase's values or no bytes: prefetching must not change results.
    Span before_wait(int phase, int) override {
        const std::vector<int>& next = values[(phase + 1) % values.size()];
        const auto* first = reinterpret_cast<const uint8_t*>(next.data());
        return {first, first + (phase % 2 ? next.size() * sizeof(int) : 0)};
    }
    // Adds one to the largest value of the last phase that was not empty.
    void run(int phase, int item, int thread) override {
        if (phase == slow_phase) {
            items_by_thread[thread]++;
            if (item == 0) std::this_thread::sleep_for(Micros(2000));
        }
        int before = phase - 1;
        while (before >= 0 && sizes[before] == 0) before--;
        int sum = 0;
        if (before >= 0)
            for (const int value : values[before]) sum = std::max(sum, value);
        values[phase][item] += sum + 1;
    }
    void verify() const {
        int rank = 0;
        for (int s = 0; s < num_phases(); s++) {
            rank += sizes[s] > 0;
            for (const int value : values[s])
                CHECK(value == rank, "stage %d holds %d, not %d", s, value, rank);
        }
    }
};

void test_runs(int threads) {
    ThreadPool pool(threads);
    CHECK(pool.num_threads() == threads);
    for (uint32_t run = 0; run < 300; run++) {
        Recorder work(static_cast<int>(run % 50), threads, run);
        pool.run(work);
        work.verify();
        if (run % 60 == 0) std::this_thread::sleep_for(Micros(300));  // so long that the threads sleep
    }
}

void test_waiting_and_stealing(int threads) {
    ThreadPool pool(threads);
    for (uint32_t seed = 0; seed < 5; seed++) {
        Recorder work(20, threads, seed);
        work.slow_phase = 7;
        work.sizes[7] = 64;
        work.values[7].assign(64, 0);
        pool.run(work);
        work.verify();
        int most = 0;
        for (const auto& count : work.items_by_thread) most = std::max(most, count.load());
        if (threads > 1) CHECK(most > 64 / threads, "no thread took what the slow one left");
    }
}

void test_parallel_for(int threads) {
    ThreadPool pool(threads);
    for (int items : {0, 1, 7, 1000}) {
        std::vector<int> done(items, 0);
        pool.parallel_for(items, [&](int item, int thread) {
            CHECK(thread >= 0 && thread < threads);
            done[item]++;
        });
        for (const int count : done) CHECK(count == 1);
    }
}

void test_coming_and_going() {
    for (int i = 0; i < 40; i++) {
        ThreadPool pool(1 + i % 8);
        if (i % 3) test_parallel_for(2);
    }
}

}  // namespace

void test_thread_pool() {
    for (int threads = 1; threads <= 8; threads++) {
        test_runs(threads);
        test_waiting_and_stealing(threads);
        test_parallel_for(threads);
    }
    test_coming_and_going();
}

}  // namespace octavo::test
