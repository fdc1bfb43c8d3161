// The kernels of one instruction set. Compiled once for each level, with that level's flags, into a shared
// object whose symbols are hidden except octavo_kernel_table, so that no wide instruction leaks into code
// for smaller processors.
#include "../simd/simd.h"
#include "adapters.inl"
#include "attention.inl"
#include "block_masses.inl"
#include "epilogue.inl"
#include "linear.inl"
#include "linear_columns.inl"
#include "linear_skip.inl"
#include "mixers.inl"
#include "quantize.inl"
#include "read_row.inl"
#include "rope.inl"
#include "sample.inl"
#include "table.h"
#ifdef __AMX_INT8__
#include "linear_amx.inl"
#elif defined(OCTAVO_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "linear_neon.inl"
#endif

namespace octavo {
namespace {

#ifdef __AMX_INT8__
constexpr int kRowsPerBlock = 128, kRowsPerByte = 128;  // enough rows to make unpacking of codes worthwhile
constexpr auto kDenseMatmul = amx_matmul;
constexpr auto kScratch = amx_scratch_bytes;
constexpr auto kBeginStep = forget_configuration;
#else
constexpr int kRowsPerBlock = 64, kRowsPerByte = 16;
size_t no_scratch(const Tiles&) { return 0; }
#if defined(OCTAVO_NEON) && defined(__ARM_FEATURE_DOTPROD)
constexpr auto kDenseMatmul = neon_matmul;
#else
constexpr auto kDenseMatmul = [](const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0,
                                 int num_rows, uint8_t*) { vector_matmul(tiles, count, x, row0, num_rows); };
#endif
constexpr auto kScratch = no_scratch;
constexpr auto kBeginStep = [] {};
#endif

void tile_matmul(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows,
                 uint8_t* scratch) {
    if (skipping_matmul(tiles, count, x, row0, num_rows)) return Prefetcher(tiles->prefetch, 1).step();
    kDenseMatmul(tiles, count, x, row0, num_rows, scratch);
}

void column_matmul(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0, int num_rows,
                   float* acc, uint8_t* scratch) {
    multiply_columns(kDenseMatmul, w, tile, count, x, row0, num_rows, acc, scratch);
}

size_t scratch_bytes(const Tiles& w) { return kScratch(w) + (w.column_stride ? column_scratch_bytes(w) : 0); }

const KernelTable kTable = {
    .name = OCTAVO_LEVEL,
    .row_block = kRowsPerBlock,
    .rows_per_byte = kRowsPerByte,
    .begin_step = kBeginStep,
    .quantize_row = quantize_row,
    .tile_matmul = tile_matmul,
    .scratch_bytes = scratch_bytes,
    .column_matmul = column_matmul,
    .write_tile = write_tile,
    .quantize_group = quantize_group,
    .row_type = row_type,
    .skips_zeros = [](Code code) { return choose_skipping(code) != nullptr; },
    .read_row = read_row,
    .norm_row = norm_row,
    .activate = activate,
    .xielu = xielu,
    .rope_head = rope_head,
    .kv_store = kv_store,
    .attention = attention,
    .attention_merge = attention_merge,
    .block_masses = block_masses,
    .short_conv = short_conv,
    .scan_lanes = scan_lanes,
    .shrink = shrink,
    .expand = expand,
    .read_ranks = read_ranks,
    .update_best = update_best,
    .sample_row = sample_row,
    .sample_scratch_bytes = sample_scratch_bytes,
};

}  // namespace
}  // namespace octavo

extern "C" __attribute__((visibility("default"))) const octavo::KernelTable* octavo_kernel_table() {
    return &octavo::kTable;
}
