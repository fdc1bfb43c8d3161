// Weights in the kernels' tiles: memory of our own, filled once from a PackedWeight's arrays
// (quant/packed.py) or a file's blocks (quant/blocks.py).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../kernels/table.h"
#include "memory.h"
#include "thread_pool.h"

namespace octavo {

// How a weight lies in tiles, whatever its numbers.
struct TileFormat {
    Code code;
    ScaleType scale_type = ScaleType::fp32;
    bool has_min = false, half_groups = false;
};

// The tiles of a weight of `num_rows` outputs and `num_inputs` inputs, without memory.
Tiles tiles_of(const TileFormat& format, int64_t num_rows, int num_inputs);

// Bytes of all of a weight's tiles.
inline size_t total_bytes(const Tiles& tiles) { return tiles.num_tiles() * tiles.tile_bytes; }

struct PackedTiles {
    Tiles tiles;
    std::shared_ptr<uint8_t> memory;
    size_t num_bytes() const { return total_bytes(tiles); }
};

// Numbers [rows][columns][per_column] with strides in bytes, those of a column side by side; `kind` says what
// one is.
//   scales6, mins6   columns of 12 bytes with 8 scales and 8 mins of six bits each, as ggml's Q4_K and Q5_K
//   have them; of mins6 the negative is meant
struct Matrix {
    enum class Kind { u8, i8, fp16, bf16, fp32, scales6, mins6 } kind = Kind::u8;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0;
    int64_t row_stride = 0, column_stride = 0;
    int per_column = 1;
    int64_t numbers() const { return columns * per_column; }
};

// Some bits of each code of a block, lower ones than those of the next plane. `run` bytes from `start` on
// hold run * 8 / bits neighbouring inputs: input i of these `bits` bits of byte i % run, from bit i / run *
// bits up. The next inputs have the run behind it.
struct Plane {
    int start, bits, run;
};

// Rows of blocks: `block_bytes` bytes hold the codes of `block_inputs` neighbouring inputs in planes, and
// perhaps other things. The last block of a row may end before its codes do.
struct CodeRows {
    const uint8_t* data = nullptr;
    int64_t rows = 0, row_stride = 0, row_bytes = 0;
    int block_inputs = 0, block_bytes = 0;
    std::vector<Plane> planes;
    bool is_signed = false;  // of 8 bits
    int bits() const;
    // Rows of nothing but codes: one a byte, or two, of which byte j of 2 * half inputs holds inputs j and j
    // + half.
    static CodeRows plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed,
                          int half = 1);
};

// Codes of up to 8 bits with the scales, and mins, of groups of `group` inputs: number i is super number i *
// supers / numbers times number i.
struct QuantisedSource {
    CodeRows codes;
    int group, zero_point, num_inputs;
    Matrix scales, mins, super_scales, super_mins;  // `data` null where there is none
    bool wide = false;  // 4-bit codes as bytes: for a product beside one that has 8 bits
    bool whole_rows = false;  // one scale an output, in scales [rows][1]; signed codes of 8 bits
};

// What is to be packed. Where each weight will lie is known at once; `run` writes their bytes. Sources must
// live until then.
class Packer {
  public:
    explicit Packer(WeightMemory& memory) : memory_(memory) {}
    PackedTiles add(const QuantisedSource& source);
    PackedTiles add(const Matrix& values, Code code);
    // Two weights that a product reads together, the last that were added, lie tile by tile in turns: one
    // stream of memory is faster than two. Where their tiles are not alike they stay as they are, and the
    // answer is false.
    bool interleave(PackedTiles& first, PackedTiles& second);
    // All that was added since the last time, shared out evenly over the threads, each of which writes
    // neighbouring tiles.
    void run(ThreadPool& pool);
    size_t num_waiting_bytes() const { return num_waiting_bytes_; }

  private:
    // Writes one of a weight's tiles.
    using PackTile = std::function<void(int tile, uint8_t* to)>;
    struct Job {
        PackedTiles packed;
        PackTile pack;
        int first;  // among the tiles of all jobs
    };
    PackedTiles add(const Tiles& tiles, PackTile pack);
    PackedTiles add_whole_rows(const QuantisedSource& source);

    WeightMemory& memory_;
    std::vector<Job> jobs_;
    int num_tiles_ = 0;
    size_t num_waiting_bytes_ = 0;
};

// One weight, at once.
template <typename... Source>
PackedTiles pack(ThreadPool& pool, WeightMemory& memory, const Source&... source) {
    Packer packer(memory);
    const PackedTiles packed = packer.add(source...);
    packer.run(pool);
    return packed;
}

}  // namespace octavo
