// Weights in the kernels' tiles: memory of our own, filled once from a PackedWeight's arrays (quant/packed.py) or a file's blocks (quant/blocks.py).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../kernels/table.h"
#include "thread_pool.h"

namespace octavo {

// 64-byte aligned memory that costs nothing until it is touched, in huge pages where the system gives them, or always in small ones, so
// that no more is given than what is touched.
class Memory {
  public:
    explicit Memory(size_t bytes, bool small_pages = false);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // The system takes back the whole pages within these bytes; read again they are zeros.
    void give_back(size_t offset, size_t bytes);

  private:
    uint8_t* data_;
    size_t size_;
};

// Where weights lie: side by side in large pieces of memory, in the order they are packed, which is that in which a step reads them. A
// matrix of a small model alone would be too small for a large page, and then a core waits for the table of pages, not for memory.
class WeightMemory {
  public:
    // `bytes` zeros at a multiple of 64; they stay as long as somebody holds them.
    std::shared_ptr<uint8_t> take(size_t bytes);

  private:
    std::shared_ptr<Memory> piece_;
    size_t used_ = 0;
};

struct PackedTiles {
    Tiles tiles;
    std::shared_ptr<uint8_t> memory;
    size_t num_bytes() const { return ((size_t)tiles.num_rows + kTile - 1) / kTile * tiles.tile_bytes; }
};

// Numbers [rows][columns][per_column] with strides in bytes, those of a column side by side; `kind` says what one is.
//   scales6, mins6   columns of 12 bytes with 8 scales and 8 mins of six bits each, as ggml's Q4_K and Q5_K have them; of mins6 the negative is meant
struct Matrix {
    enum class Kind { u8, i8, fp16, bf16, fp32, scales6, mins6 } kind = Kind::u8;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0;
    int64_t row_stride = 0, column_stride = 0;
    int per_column = 1;
    int64_t numbers() const { return columns * per_column; }
};

// Some bits of each code of a block, lower ones than those of the next plane. `run` bytes from `start` on hold run * 8 / bits neighbouring inputs:
// input i of these `bits` bits of byte i % run, from bit i / run * bits up. The next inputs have the run behind it.
struct Plane {
    int start, bits, run;
};

// Rows of blocks: `block_bytes` bytes hold the codes of `block_inputs` neighbouring inputs in planes, and perhaps other things. The last block
// of a row may end before its codes do.
struct CodeRows {
    const uint8_t* data = nullptr;
    int64_t rows = 0, row_stride = 0, row_bytes = 0;
    int block_inputs = 0, block_bytes = 0;
    std::vector<Plane> planes;
    bool is_signed = false;  // of 8 bits
    int bits() const;
    // Rows of nothing but codes: one a byte, or two, of which byte j of 2 * half inputs holds inputs j and j + half.
    static CodeRows plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed, int half = 1);
};

// Codes of up to 8 bits with the scales, and mins, of groups of `group` inputs: number i is super number i * supers / numbers times number i.
struct QuantisedSource {
    CodeRows codes;
    int group, zero_point, num_inputs;
    Matrix scales, mins, super_scales, super_mins;  // `data` null where there is none
    bool wide = false;  // 4-bit codes as bytes: for a product beside one that has 8 bits
    bool whole_rows = false;  // one scale an output, in scales [rows][1]; signed codes of 8 bits
};

PackedTiles pack_quantised(const QuantisedSource& source, ThreadPool& pool, WeightMemory& memory);
PackedTiles pack_floats(const Matrix& values, Code code, ThreadPool& pool, WeightMemory& memory);

}  // namespace octavo
