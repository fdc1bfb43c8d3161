// Weights in the kernels' tiles: memory of our own, filled once from a PackedWeight's arrays (quant/packed.py).
#pragma once

#include <cstdint>
#include <memory>

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

// An array [rows][columns] with strides in bytes; `kind` says what an element is.
struct Matrix {
    enum class Kind { u8, i8, fp16, bf16, fp32 } kind = Kind::u8;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0;
    int64_t row_stride = 0, column_stride = 0;
};

// Codes of up to 8 bits with their scales, as PackedWeight holds them.
struct QuantisedSource {
    int bits;  // 4: two codes a byte. Else one
    bool halves;  // 4 bits: byte j of a group of `group` holds inputs j and j + group / 2; else inputs 2j and 2j + 1
    int group, zero_point, num_inputs;
    Matrix codes, scales, mins, super_scales, super_mins;  // `data` null where there is none
    bool wide = false;  // 4-bit codes as bytes: for a product beside one that has 8 bits
    bool whole_rows = false;  // one scale an output, in scales [rows][1]; signed codes of 8 bits
};

PackedTiles pack_quantised(const QuantisedSource& source, ThreadPool& pool, WeightMemory& memory);
PackedTiles pack_floats(const Matrix& values, Code code, ThreadPool& pool, WeightMemory& memory);

}  // namespace octavo
