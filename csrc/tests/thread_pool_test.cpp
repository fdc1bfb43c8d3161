// The pool runs each piece of each stage once, and no piece before the stage ahead of it is done.
#include "../runtime/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

namespace octavo::test {

namespace {

using Micros = std::chrono::microseconds;

// Stages of random sizes, some of them empty. `values` are plain memory: a race on them is the pool's fault,
// which the sanitizer sees.
struct Recorder : ThreadPool::Work {
    std::vector<int> sizes;
    std::vector<std::vector<int>> values;  // [stages][pieces]
    int slow_stage = -1;  // its piece 0 lasts longer than any thread spins
    std::vector<std::atomic<int>> takers;  // pieces of the slow stage that each thread has run

    Recorder(int stages, int threads, uint32_t seed) : takers(threads) {
        std::mt19937 generator(seed);
        for (int s = 0; s < stages; s++) {
            sizes.push_back(generator() % 4 ? static_cast<int>(generator() % 40)
                                            : static_cast<int>(generator() % 2));
            values.emplace_back(sizes.back(), 0);
        }
    }
    int num_stages() const override { return static_cast<int>(sizes.size()); }
    int pieces(int stage) const override { return sizes[stage]; }
    // Names the next stage's values or no bytes: prefetching changes nothing.
    Span waits(int stage, int) override {
        const std::vector<int>& next = values[(stage + 1) % values.size()];
        const auto* first = reinterpret_cast<const uint8_t*>(next.data());
        return {first, first + (stage % 2 ? next.size() * sizeof(int) : 0)};
    }
    // Adds one to the largest value of the last stage that was not empty.
    void run(int stage, int piece, int thread) override {
        if (stage == slow_stage) {
            takers[thread]++;
            if (piece == 0) std::this_thread::sleep_for(Micros(2000));
        }
        int before = stage - 1;
        while (before >= 0 && sizes[before] == 0) before--;
        int sum = 0;
        if (before >= 0)
            for (const int value : values[before]) sum = std::max(sum, value);
        values[stage][piece] += sum + 1;
    }
    void verify() const {
        int rank = 0;
        for (int s = 0; s < num_stages(); s++) {
            rank += sizes[s] > 0;
            for (const int value : values[s])
                CHECK(value == rank, "stage %d holds %d, not %d", s, value, rank);
        }
    }
};

void test_walks(int threads) {
    ThreadPool pool(threads);
    CHECK(pool.num_threads() == threads);
    for (uint32_t walk = 0; walk < 300; walk++) {
        Recorder work(static_cast<int>(walk % 50), threads, walk);
        pool.walk(work);
        work.verify();
        if (walk % 60 == 0) std::this_thread::sleep_for(Micros(300));  // long enough that the threads sleep
    }
}

void test_waiting_and_stealing(int threads) {
    ThreadPool pool(threads);
    for (uint32_t seed = 0; seed < 5; seed++) {
        Recorder work(20, threads, seed);
        work.slow_stage = 7;
        work.sizes[7] = 64;
        work.values[7].assign(64, 0);
        pool.walk(work);
        work.verify();
        int most = 0;
        for (const auto& count : work.takers) most = std::max(most, count.load());
        if (threads > 1) CHECK(most > 64 / threads, "no thread took what the slow one left");
    }
}

void test_parallel_for(int threads) {
    ThreadPool pool(threads);
    for (int pieces : {0, 1, 7, 1000}) {
        std::vector<int> done(pieces, 0);
        pool.parallel_for(pieces, [&](int piece, int thread) {
            CHECK(thread >= 0 && thread < threads);
            done[piece]++;
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
        test_walks(threads);
        test_waiting_and_stealing(threads);
        test_parallel_for(threads);
    }
    test_coming_and_going();
}

}  // namespace octavo::test
