// A stage of a plan: work that the thread pool's threads share in pieces, with a barrier behind it.
#pragma once

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
// Number of rows up to which each thread converts a product's rows for itself: cheaper than a barrier.
constexpr int kFewRows = 4;
// Rows that one piece of a product takes together where threads share the product's outputs.
constexpr int kRowBlock = 256;
// Rows of one expert that a piece of its product takes together.
constexpr int kExpertRows = 128;

class StepRunner;
struct Stage;

// A stage's view of the running step.
struct View {
    const StepRunner& runner;
    const Batch& batch;
    const KvMemory& kv;
    // Row r of a block of rows lies where row r - shift of `Axis::block` does.
    int shift = 0;
    // First row and number of rows of the chunk of sampled rows that is computed.
    int first_sample = 0, num_samples = 0;
    // The product of which each row keeps the best logit instead of writing all; null: none.
    const Stage* best_only = nullptr;

    int rows(bool samples) const { return samples ? num_samples : batch.num_tokens; }
    // The slot of a row's adapter; -1: none.
    int adapter(bool samples, int64_t row) const {
        if (!batch.adapters) return -1;
        return batch.adapters[samples ? batch.sample_rows[first_sample + row] : row];
    }
    // Whether thresholds hold for each row, from this chunk's first one on.
    const uint8_t* sparse_rows(bool samples) const;
    float* at(const Place& place, int64_t row) const;
    // Floats from one row of a Value to the next.
    int64_t stride(const Place& place) const;
};

// Memory of one compute thread.
struct ThreadState {
    std::vector<float> acc[2];  // sums of two tiles
    std::vector<float> columns[2];  // sums of a run of tiles that lies by columns, and of its up projection
    std::vector<float> group;  // a group of 32 columns before its conversion
    std::vector<float> attention;  // scratch of an attention
    std::unique_ptr<Memory> product;  // scratch of products
    std::unique_ptr<Memory> rows;  // rows that this thread has converted or put together for itself
    std::vector<float> scores;  // scratch of a choice of experts
    std::unique_ptr<Memory> sampling;  // scratch of draws
    int prepared_stage = -1;  // the stage whose rows lie in `rows`
    int prepared_block = -1;  // and which of its blocks of an expert's rows
    const Stage* prefetched_stage = nullptr;  // the stage and the piece that were prefetched last
    int prefetched_piece = -1;
    std::vector<Best> best;  // for each sampled row, the best logit that this thread has made
    std::unique_ptr<Memory> adapted;  // rows of a product that adapters read
    AdapterRows block_rows;  // those with adapters of the block of rows that the thread takes
    std::vector<ExpandedRows> expanded[2];  // by run of rows: of a product's site, and of its up projection
    std::vector<ReadSoon::Part> next_reads, reads;  // of the adapters of the next product, and of a tile's
    std::unique_ptr<Memory> gathered;  // tiles that are put together from neurons' rows
    std::vector<double> seconds;  // by stage of the range that is walked, while profiling
    std::vector<float> biases;  // of one row's scores, [heads][2 * reach + 1]
};

// The work of a stage in one step: bytes of weights or of K and V, multiplications and additions.
struct Cost {
    double bytes = 0, operations = 0;
};

struct Stage {
    int chunk = -1;  // of streamed weights, which it waits for; -1: none
    virtual ~Stage() = default;
    virtual std::string name() const = 0;
    virtual const char* code() const { return ""; }
    virtual Cost cost(const View&) const { return {}; }
    virtual bool on_samples() const { return false; }
    virtual int pieces(const View& view) const = 0;
    virtual void run(const View& view, int piece, ThreadState& thread, int stage) const = 0;
    // Prefetches what a piece reads first, for the thread that waits to compute it.
    virtual void prefetch(const View&, int /*piece*/, ThreadState&) const {}
    // Whether the number of pieces is known only once the stage before is done.
    virtual bool depends_on_data(const View&) const { return false; }
    // Whether no row needs what another one computes in this stage, so that run_rows may do all of it for
    // rows row0 .. row1 - 1 (whole blocks of 16, but for the last).
    virtual bool row_local() const { return false; }
    // Whether a step without adapters goes without it.
    virtual bool only_adapters() const { return false; }
    // Throws invalid_argument where the batch lets the stage read outside the KV memory.
    virtual void check(const Batch&, const KvMemory&) const {}
    virtual void run_rows(const View&, int /*row0*/, int /*row1*/, ThreadState&) const {}
    // The weights that this thread will read first, to be fetched while it waits for the stage to begin.
    virtual Span reads_first(const View&, int /*thread*/) const { return {}; }
};

// An op of a stage of rows, which computes each row by itself.
struct RowOp {
    virtual ~RowOp() = default;
    virtual void run(const View& view, int64_t row) const = 0;
    // False where a step of so few rows does without it, since the product converts them for itself.
    virtual bool needed(int rows) const { return rows > 0; }
};

std::unique_ptr<RowOp> make_row_op(EmbeddingSpec spec);
std::unique_ptr<RowOp> make_row_op(GivenSpec spec);
std::unique_ptr<RowOp> make_row_op(RowNormSpec spec);
std::unique_ptr<RowOp> make_row_op(RopeSpec spec);
std::unique_ptr<RowOp> make_row_op(KvWriteSpec spec);
std::unique_ptr<RowOp> make_row_op(ElementwiseSpec spec);
std::unique_ptr<RowOp> make_row_op(MixSpec spec);
std::unique_ptr<RowOp> make_row_op(GatherSpec spec);
std::unique_ptr<RowOp> make_row_op(PoolSpec spec);
std::unique_ptr<RowOp> make_row_op(CombineSpec spec);
std::unique_ptr<RowOp> make_row_op(HiddenInSpec spec);
std::unique_ptr<RowOp> make_row_op(HiddenOutSpec spec);
std::unique_ptr<RowOp> make_row_op(OutputSpec spec);
// Converts a product's rows ahead of it.
std::unique_ptr<RowOp> make_row_op(const PreparedRows& rows);

// Returns the bytes of `count` converted rows of a type, `count` a multiple of 16; see place_rows_at.
size_t bytes_of_rows(const Rows& rows, size_t count);
// Lets rows whose type and strides are set lie in a piece of memory, of bytes_of_rows.
void place_rows_at(uint8_t* memory, size_t count, Rows& rows);

}  // namespace octavo
