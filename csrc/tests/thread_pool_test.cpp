// The pool runs each item of each phase once, and no item before the previous phase is done.
#include "../runtime/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "../plan/op.h"
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

// Groups of threads that are not bound to processors.
std::vector<std::vector<int>> groups(int count) { return std::vector<std::vector<int>>(count); }

void test_runs(int threads, int num_groups, uint32_t num_runs = 300) {
    ThreadPool pool(threads, groups(num_groups));
    CHECK(pool.num_threads() == threads);
    for (uint32_t run = 0; run < num_runs; run++) {
        Recorder work(static_cast<int>(run % 50), threads, run);
        pool.run(work);
        work.verify();
        if (run % 60 == 0) std::this_thread::sleep_for(Micros(300));  // so long that the threads sleep
    }
}

void test_waiting_and_stealing(int threads, int num_groups) {
    ThreadPool pool(threads, groups(num_groups));
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

// Most tiles are packed by threads of the node whose threads read them in a matmul: on two nodes 96%, on eight
// 90%, for the matmuls of a Llama layer (8B, 1B). Without stealing.
void test_reading_packed_tiles(int threads, int nodes, double least) {
    struct Matmul {
        std::vector<int> parts;  // tiles
        int inputs;
    };
    const std::vector<Matmul> layers[] = {
        {{{256, 64, 64}, 4096}, {{256}, 4096}, {{896}, 2 * 4096}, {{256}, 14336}},
        {{{128, 32, 32}, 2048}, {{128}, 2048}, {{512}, 2 * 2048}, {{128}, 8192}},
    };
    const ThreadPool pool(threads);
    const auto node_of = [&](int num_items, int item) {
        int thread = 0;
        while (pool.first_item(num_items, thread + 1) <= item) thread++;
        return thread * nodes / threads;
    };
    for (const auto& layer : layers) {
        double near = 0, all = 0;
        for (const auto& [parts, inputs] : layer) {
            int num_tiles = 0, first = 0;
            for (const int tiles : parts) num_tiles += tiles;
            const int chunk = even_tiles_per_item(num_tiles, threads);
            const int num_items = (num_tiles + chunk - 1) / chunk;
            for (const int tiles : parts) {
                for (int tile = 0; tile < tiles; tile++) {
                    all += inputs;
                    if (node_of(tiles, tile) == node_of(num_items, (first + tile) / chunk)) near += inputs;
                }
                first += tiles;
            }
        }
        CHECK(near >= least * all, "%d threads on %d nodes: %g", threads, nodes, near / all);
    }
}

// A group's threads are bound to its processors.
void test_bound_groups() {
#ifdef __linux__
    cpu_set_t own;
    CHECK(sched_getaffinity(0, sizeof(own), &own) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &own)) cpu++;
    ThreadPool pool(3, {{}, {cpu}});
    std::atomic<int> bound{0}, arrived{0};
    pool.parallel_for(3, [&](int, int thread) {
        arrived++;
        while (arrived < 3) std::this_thread::yield();  // each thread runs one item
        cpu_set_t mask;
        if (sched_getaffinity(0, sizeof(mask), &mask) == 0 && CPU_COUNT(&mask) == 1 && CPU_ISSET(cpu, &mask))
            bound += thread >= 1;
    });
    CHECK(bound == 2 || CPU_COUNT(&own) == 1, "%d threads are bound", bound.load());
#endif
}

}  // namespace

void test_thread_pool() {
    for (int threads = 1; threads <= 8; threads++) {
        for (int num_groups : {1, 2, 3}) {
            test_runs(threads, num_groups);
            test_waiting_and_stealing(threads, num_groups);
        }
        test_parallel_for(threads);
    }
    test_runs(64, 4, 20);  // many more threads than processors
    test_bound_groups();
    test_reading_packed_tiles(96, 2, 0.96);
    test_reading_packed_tiles(192, 8, 0.9);
    test_coming_and_going();
}

}  // namespace octavo::test
