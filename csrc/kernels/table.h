// The interface between runtime and kernels: plain structs of pointers, and a table of functions for each
// instruction set.
//
// Each level (portable ... amx) compiles the same sources into a shared object of its own that exports one
// symbol, octavo_kernel_table. Shapes: T rows, N outputs, K inputs; a tile is 16 outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "adapters.h"
#include "attention.h"
#include "mixers.h"
#include "sampling.h"
#include "weights.h"

namespace octavo {

struct KernelTable {
    const char* name;
    // Rows that one thread computes through several ops at a time, such that their values stay in its
    // second-level cache.
    int row_block;
    // Number of rows whose matmul takes as long as reading the weight, per byte of the row type. From this
    // many rows on, each thread may read all weights itself.
    int rows_per_byte;
    // Called before a step on the calling thread: other code may have used AMX on that thread since the
    // last step.
    void (*begin_step)();
    // Converts x [K] to row `index` of `rows`, after the norm if there is one.
    void (*quantize_row)(const float* x, int k, const Norm& norm, const QuantizedRows& rows, int64_t index);
    // Multiplies the rows of x from row0 on by each of `count` tiles, 1 or 2, into acc [num_rows][16].
    // `scratch` has scratch_bytes(w) bytes.
    void (*tile_matmul)(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows,
                        uint8_t* scratch);
    size_t (*scratch_bytes)(const Tiles& w);
    // Multiplies rows by tiles tile .. tile + count - 1 of a weight stored by columns, into acc
    // [count][num_rows][16]: up to kColumnTiles tiles for up to kColumnRows rows, else up to
    // kGatheredTiles.
    void (*column_matmul)(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0,
                          int num_rows, float* acc, uint8_t* scratch);
    // Applies the epilogue to acc [num_rows][16] (and `up` if gated), the sums of rows row0 and on in
    // columns column .. column + width - 1, width <= 16, and stores them to out [num_rows][out_stride].
    void (*write_tile)(const Epilogue& e, const float* acc, const float* up, int64_t row0, int num_rows,
                       int column, int width, float* out, int64_t out_stride);
    // Converts from [num_rows][32], of which `width` columns are valid, to group g of rows row0 and on.
    void (*quantize_group)(const float* from, const QuantizedRows& rows, int64_t row0, int num_rows, int g,
                           int width);
    RowType (*row_type)(Code code);
    // Whether matmuls with weights of this code can skip zeros.
    bool (*skips_zeros)(Code code);
    // out [K] = row `row` of w, times scale.
    void (*read_row)(const Tiles& w, int row, float scale, float* out);
    void (*norm_row)(const float* x, int k, const Norm& norm, float* out);
    // Applies an activation in place to n values: 0 silu, 1 gelu, 2 gelu_tanh, 3 relu, 4 relu2, 5 sigmoid,
    // 6 tanh, 7 softplus.
    void (*activate)(int kind, float* x, int n);
    // x and out [n] may be the same.
    void (*xielu)(const XieluArgs& args, const float* x, float* out, int n);
    // Rotates one head in place. cos, sin [rotary / 2].
    void (*rope_head)(float* x, const float* cos, const float* sin, int rotary, bool interleaved);
    void (*kv_store)(const KvLayer& kv, int32_t slot, const float* k, const float* v);
    void (*attention)(const AttentionArgs& args, const AttentionItem& item, float* scratch);
    void (*attention_merge)(const AttentionArgs& args, const AttentionItem& item);
    void (*block_masses)(const BlockMassArgs& args);
    void (*short_conv)(const ShortConvArgs& args, const float* const* rows, float* out);
    // Computes a block of up to 16 columns for all rows of a scan.
    void (*scan_lanes)(const ScanArgs& args, const ScanLanes& lanes);
    // h[i][j] = scales[j] * (A x[i])[j] for rows x[i] [a.stride], padded with zeros.
    void (*shrink)(const LowRankMatrix& a, const float* const* x, int num_rows, const float* scales,
                   float* const* h);
    // Adds B h to the sums of one tile or of two neighbouring tiles, acc[i] [rows][16].
    void (*expand)(const Expansion& expansion, int tile, int num_tiles, float* const* acc);
    // h[j] = scale * scales[j] * element j of row `row` of a table.
    void (*read_ranks)(const LowRankMatrix& table, int row, const float* scales, float scale, float* h);
    // Updates each row's best logit with logits [num_rows][32], whose first `width` are outputs column and
    // on.
    void (*update_best)(const float* logits, int num_rows, int column, int width, BestLogit* best);
    // Samples one row; see sample.inl.
    void (*sample_row)(const SampleArgs& args, int row, void* scratch);
    size_t (*sample_scratch_bytes)(int vocab);
};

}  // namespace octavo
