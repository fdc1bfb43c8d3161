#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "packing.h"

namespace octavo {

namespace {

// Inputs of a product: as many as in a model, so that the work after the last one weighs no more than there;
// few enough for the second-level cache.
constexpr int kInputs = 1024;
constexpr int kRepeats = 5;

template <typename Fn>
double best_seconds(const Fn& fn) {
    double best = 1e30;
    for (int i = 0; i < kRepeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        fn();
        best =
            std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// Makes tiles of zeros: no instruction here takes longer for other numbers.
PackedTiles zero_tiles(Code code, ThreadPool& pool) {
    WeightMemory memory;
    const std::vector<float> zeros((size_t)2 * kTile * kInputs);
    const auto matrix = [&](Matrix::Kind kind, int columns, int bytes) {
        Matrix m{};
        m.kind = kind;
        m.data = (const uint8_t*)zeros.data();
        m.rows = 2 * kTile;
        m.columns = columns;
        m.row_stride = (int64_t)columns * bytes;
        m.column_stride = bytes;
        return m;
    };
    if (code == Code::bf16 || code == Code::fp16 || code == Code::fp32 || is_float_code(code))
        return pack(pool, memory, matrix(Matrix::Kind::fp32, kInputs, sizeof(float)), code);
    const int low = low_bits(code), high = high_bits(code), block = kGroup * (low + high) / 8;
    const int64_t row_bytes = (int64_t)kInputs / kGroup * block;
    CodeRows codes{
        (const uint8_t*)zeros.data(), 2 * kTile, row_bytes, row_bytes, kGroup, block, {{0, low, 1}}};
    if (high) codes.planes.push_back({kGroup * low / 8, high, 1});
    codes.is_signed = low == 8;
    // Scales as the formats of these codes most often have them.
    const bool halves = code == Code::u2 || code == Code::u3 || code == Code::u6;
    const bool has_mins = code == Code::u4 || code == Code::u2;
    const Matrix half = matrix(Matrix::Kind::fp16, kInputs / kGroup, sizeof(uint16_t));
    const Matrix small = matrix(Matrix::Kind::i8, kInputs / (kGroup / 2), 1);
    const Matrix factors = matrix(Matrix::Kind::fp16, kInputs / (kSmallSpan * kGroup), sizeof(uint16_t));
    const Matrix levels = halves ? small : half, supers = halves ? factors : Matrix{};
    const QuantisedSource source{.codes = codes,
                                 .group = halves ? kGroup / 2 : kGroup,
                                 .zero_point = 0,
                                 .num_inputs = kInputs,
                                 .scales = levels,
                                 .mins = has_mins ? levels : Matrix{},
                                 .super_scales = supers,
                                 .super_mins = has_mins ? supers : Matrix{},
                                 .table = code == Code::l4 ? (const int8_t*)zeros.data() : nullptr,
                                 .small_levels = halves,
                                 .whole_rows = code == Code::i8};
    return pack(pool, memory, source);
}

// One thread's operands.
struct Bench {
    PackedTiles tiles;
    Memory values, scales, scratch;
    Rows rows;
    std::vector<float> acc;

    Bench(const KernelTable& kernels, PackedTiles t)
        : tiles(std::move(t)),
          values(2 * kTile * kInputs * sizeof(float)),
          scales(2 * kTile * (kInputs / kGroup) * 16),
          scratch(kernels.scratch_bytes(tiles.tiles)),
          acc((size_t)4 * kTile * kTile) {
        const size_t each = (size_t)2 * kTile * (kInputs / kGroup);
        float* at = (float*)scales.data();
        const RowType type = kernels.row_type(tiles.tiles.code);
        rows = Rows{.type = type,
                    .values = values.data(),
                    .stride = row_elements(type, kInputs / kGroup),
                    .scales = at,
                    .sums = (int32_t*)(at + 2 * each),
                    .scaled_sums = at + each,
                    .num_groups = kInputs / kGroup,
                    .group_stride = kInputs / kGroup};
    }
    void run(const KernelTable& kernels, int num_rows) {
        const TileRef refs[2] = {{&tiles.tiles, 0, acc.data()},
                                 {&tiles.tiles, 1, acc.data() + 2 * kTile * kTile}};
        kernels.tile_products(refs, 2, rows, 0, num_rows, scratch.data());
    }
};

}  // namespace

double read_bandwidth(ThreadPool& pool, size_t bytes) {
    const Memory memory(bytes);
    std::memset(memory.data(), 1, bytes);
    const int threads = pool.num_threads();
    const size_t words = bytes / threads / sizeof(uint64_t) / 16 * 16;
    std::vector<uint64_t> sums(threads);
    const double seconds = best_seconds([&] {
        pool.parallel_for(threads, [&](int piece, int) {
            const uint64_t* at = (const uint64_t*)memory.data() + piece * words;
            uint64_t sum[16] = {};
            for (size_t i = 0; i < words; i += 16) {
                __builtin_prefetch(at + i + 512);
                __builtin_prefetch(at + i + 520);
                for (int j = 0; j < 16; j++) sum[j] += at[i + j];
            }
            for (const uint64_t each : sum) sums[piece] += each;
        });
    });
    return (double)(words * threads * sizeof(uint64_t)) / seconds;
}

double hop_seconds(ThreadPool& pool) {
    if (pool.num_threads() < 2) return 0;
    constexpr int kHops = 2000;
    const double seconds = best_seconds([&] {
        std::atomic<int> ball{0};
        pool.parallel_for(2, [&](int piece, int) {
            for (int hop = piece; hop < kHops; hop += 2) {
                for (int tries = 1; ball.load(std::memory_order_acquire) != hop; tries++)
                    if (tries % 256 == 0)
                        std::this_thread::yield();  // the other thread may need this very processor
                ball.store(hop + 1, std::memory_order_release);
            }
        });
    });
    return seconds / kHops;
}

double product_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows) {
    std::vector<std::unique_ptr<Bench>> benches;
    for (int t = 0; t < pool.num_threads(); t++)
        benches.push_back(std::make_unique<Bench>(kernels, zero_tiles(code, pool)));
    constexpr int kCalls = 500;
    const double seconds = best_seconds([&] {
        pool.parallel_for(pool.num_threads(), [&](int piece, int) {
            kernels.begin_step();
            for (int i = 0; i < kCalls; i++) benches[piece]->run(kernels, rows);
        });
    });
    return 2.0 * rows * 2 * kTile * kInputs * kCalls * pool.num_threads() / seconds;
}

}  // namespace octavo
