// How a step's rows are divided among threads: in blocks of rows if these divide evenly, else by outputs.
#include "../runtime/step_run.h"
#include "check.h"

namespace octavo::test {

namespace {

constexpr int kThreads = 2, kLeast = 16, kMost = 64;

// Returns the rows of the thread with the most rows, in whole blocks.
int max_rows(int rows, int block) {
    int most[kThreads] = {};
    for (int i = 0; i * block < rows; i++) most[i % kThreads] += std::min(block, rows - i * block);
    return std::max(most[0], most[1]);
}

}  // namespace

void test_step_run() {
    const auto choose_block = [](int rows) {
        return StepRun::choose_row_block(rows, kThreads, kLeast, kMost);
    };
    for (int rows = 1; rows < kThreads * kLeast; rows++) CHECK(choose_block(rows) == 0);
    CHECK(choose_block(32) == 16);
    CHECK(choose_block(33) == 0);
    CHECK(choose_block(64) == 32);
    CHECK(choose_block(512) == 64);
    for (int rows = kThreads * kLeast; rows <= 2048; rows++) {
        const int block = choose_block(rows);
        // Values of a range have room for kMost rows of each thread.
        CHECK(block > 0 || rows <= kThreads * kMost, "%d rows", rows);
        CHECK(block % kTile == 0 && block <= kMost, "%d rows", rows);
        CHECK(block == 0 || max_rows(rows, block) <= rows / kThreads + 48, "%d rows", rows);
        CHECK(block == 0 || rows > 96 || max_rows(rows, block) <= 0.75 * rows, "%d rows", rows);
    }
    CHECK(StepRun::choose_row_block(15, 1, kLeast, kMost) == 0);
    CHECK(StepRun::choose_row_block(100, 1, kLeast, kMost) == kMost);
    CHECK(StepRun::choose_row_block(256, kThreads, 128, 128) == 128);
}

}  // namespace octavo::test
