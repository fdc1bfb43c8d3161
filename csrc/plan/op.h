// An op of a prepared program: work items that threads share, followed by a barrier.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/table.h"
#include "../runtime/adapters.h"
#include "../runtime/memory.h"
#include "../runtime/step.h"
#include "specs.h"

namespace octavo {

constexpr int kSampleChunk = 64;
// Up to this many rows each thread quantizes a matmul's input itself, which is cheaper than a barrier.
constexpr int kFewRows = 4;
// Rows per work item of a matmul if threads share its outputs.
constexpr int kRowBlock = 256;
// Rows of one expert per work item.
constexpr int kExpertRows = 128;

// Returns the tiles per work item of a matmul: four items per thread, so that all threads have the same number
// if possible, and an even number of tiles, since tiles are multiplied in pairs.
inline int even_tiles_per_item(int num_tiles, int threads) {
    const int each = (num_tiles + threads - 1) / threads;
    return std::clamp(((each + 3) / 4 + 1) / 2 * 2, 2, 16);
}

class StepRunner;
struct Op;

// An op's view of the running step.
struct View {
    const StepRunner& runner;
    const Batch& batch;
    const KvMemory& kv;
    // Row r of a block of rows is stored at row r - shift of `Axis::block`.
    int shift = 0;
    // First row and number of rows of the current chunk of sampled rows.
    int first_sample = 0, num_samples = 0;
    // The linear op that keeps the best logit of each row instead of writing all logits; null: none.
    const Op* argmax_op = nullptr;

    int num_rows(bool samples) const { return samples ? num_samples : batch.num_tokens; }
    // Returns the slot of a row's adapter; -1: none.
    int adapter(bool samples, int64_t row) const {
        if (!batch.adapters) return -1;
        return batch.adapters[samples ? batch.sample_rows[first_sample + row] : row];
    }
    // Whether each row is sparse, from this chunk's first row on.
    const uint8_t* sparse_rows(bool samples) const;
    float* at(const ValueSlice& slice, int64_t row) const;
    // Floats from one row of a Value to the next.
    int64_t stride(const ValueSlice& slice) const;
};

// Scratch memory of one compute thread.
struct ThreadState {
    std::vector<float> acc[2];  // sums of two tiles
    std::vector<float> columns[2];  // sums of a run of tiles stored by columns, and of its up projection
    std::vector<float> group;  // a group of 32 columns before quantization
    std::vector<float> attention;
    std::unique_ptr<Memory> matmul_scratch;
    std::unique_ptr<Memory> own_rows;  // rows that this thread has quantized or gathered
    std::vector<float> scores;  // of routing
    std::unique_ptr<Memory> sampling;
    int prepared_op = -1;  // op whose rows are in `own_rows`
    int prepared_block = -1;  // and the index of its block of expert rows
    const Op* prefetched_op = nullptr;  // last op and item that were prefetched
    int prefetched_item = -1;
    std::vector<BestLogit> best;  // [num_samples], best logit that this thread has computed
    std::unique_ptr<Memory> adapter_input;  // input rows of adapters
    AdapterRows block_adapter_rows;  // rows with adapters in the thread's current block of rows
    std::vector<ExpandedRows> expanded[2];  // by run of rows: of a linear op's site, and of its up projection
    std::vector<PrefetchList::Range> next_prefetch,
        prefetch;  // adapter ranges of the next linear op, and of the current tile
    std::unique_ptr<Memory> gathered;  // tiles gathered from neuron rows
    std::vector<double> seconds;  // by op of the current range, while profiling
    std::vector<float> biases;  // of one row, [heads][2 * reach + 1]
};

// Work of an op in one step: bytes of weights or of K and V, and multiplications and additions.
struct Cost {
    double bytes = 0, operations = 0;
};

struct Op {
    int chunk = -1;  // chunk of streamed weights to wait for; -1: none
    virtual ~Op() = default;
    virtual std::string name() const = 0;
    virtual const char* code() const { return ""; }
    virtual Cost cost(const View&) const { return {}; }
    virtual bool on_samples() const { return false; }
    virtual int num_items(const View& view) const = 0;
    virtual void run(const View& view, int item, ThreadState& thread, int op_index) const = 0;
    // Prefetches the data that an item reads first, on the thread that will run it.
    virtual void prefetch(const View&, int /*item*/, ThreadState&) const {}
    // Whether num_items depends on the result of the previous op.
    virtual bool depends_on_data(const View&) const { return false; }
    // Whether rows are independent within the op, so that run_rows can compute rows row0 .. row1 - 1 (whole
    // blocks of 16, except the last).
    virtual bool row_local() const { return false; }
    // Whether steps without adapters skip the op.
    virtual bool is_adapter_only() const { return false; }
    // Throws invalid_argument if the batch would make the op access memory outside the KV cache.
    virtual void check(const Batch&, const KvMemory&) const {}
    virtual void run_rows(const View&, int /*row0*/, int /*row1*/, ThreadState&) const {}
    // Returns weights that this thread reads first; it prefetches them while it waits for the op to start.
    virtual Span weights_to_prefetch(const View&, int /*thread*/) const { return {}; }
};

// An op on one row that accesses no other row. Consecutive ones are fused (FusedRowOps).
struct RowOp {
    virtual ~RowOp() = default;
    virtual void run(const View& view, int64_t row) const = 0;
    // False if the step has so few rows that the matmul quantizes them itself.
    virtual bool needed(int rows) const { return rows > 0; }
};

std::unique_ptr<RowOp> make_row_op(EmbeddingSpec spec);
std::unique_ptr<RowOp> make_row_op(InputRowsSpec spec);
std::unique_ptr<RowOp> make_row_op(RowNormSpec spec);
std::unique_ptr<RowOp> make_row_op(RopeSpec spec);
std::unique_ptr<RowOp> make_row_op(KvWriteSpec spec);
std::unique_ptr<RowOp> make_row_op(ElementwiseSpec spec);
std::unique_ptr<RowOp> make_row_op(const XieluSpec& spec);
std::unique_ptr<RowOp> make_row_op(MixSpec spec);
std::unique_ptr<RowOp> make_row_op(GatherSpec spec);
std::unique_ptr<RowOp> make_row_op(PoolSpec spec);
std::unique_ptr<RowOp> make_row_op(CombineSpec spec);
std::unique_ptr<RowOp> make_row_op(HiddenInSpec spec);
std::unique_ptr<RowOp> make_row_op(HiddenOutSpec spec);
std::unique_ptr<RowOp> make_row_op(OutputSpec spec);
// Quantizes a matmul's input.
std::unique_ptr<RowOp> make_row_op(const QuantizedInput& rows);

// Returns the bytes of `count` quantized rows, `count` a multiple of 16.
size_t rows_bytes(const QuantizedRows& rows, size_t count);
// Points rows whose type and strides are set to memory of rows_bytes(rows, count) bytes.
void set_rows_memory(uint8_t* memory, size_t count, QuantizedRows& rows);

}  // namespace octavo
