// How a step's rows are shared among threads: blocks of rows where they come out even, else outputs.
#include "../runtime/walk.h"
#include "check.h"

namespace octavo::test {

namespace {

constexpr int kThreads = 2, kLeast = 16, kMost = 64;

// Rows that the thread with the most of them takes, where each takes whole blocks.
int most_rows(int rows, int block) {
    int most[kThreads] = {};
    for (int i = 0; i * block < rows; i++) most[i % kThreads] += std::min(block, rows - i * block);
    return std::max(most[0], most[1]);
}

}  // namespace

void test_walk() {
    const auto block_of = [](int rows) { return Walk::row_block(rows, kThreads, kLeast, kMost); };
    for (int rows = 1; rows < kThreads * kLeast; rows++) CHECK(block_of(rows) == 0);
    CHECK(block_of(32) == 16);
    CHECK(block_of(33) == 0);
    CHECK(block_of(64) == 32);
    CHECK(block_of(512) == 64);
    for (int rows = kThreads * kLeast; rows <= 2048; rows++) {
        const int block = block_of(rows);
        // Values that a range keeps for itself have room for kMost rows of each thread.
        CHECK(block > 0 || rows <= kThreads * kMost, "%d rows", rows);
        CHECK(block % kTile == 0 && block <= kMost, "%d rows", rows);
        CHECK(block == 0 || most_rows(rows, block) <= rows / kThreads + 48, "%d rows", rows);
        CHECK(block == 0 || rows > 96 || most_rows(rows, block) <= 0.75 * rows, "%d rows", rows);
    }
    CHECK(Walk::row_block(15, 1, kLeast, kMost) == 0);
    CHECK(Walk::row_block(100, 1, kLeast, kMost) == kMost);
    CHECK(Walk::row_block(256, kThreads, 128, 128) == 128);
}

}  // namespace octavo::test
