// Page-aligned memory, and the blocks of it that hold weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

// 64-byte aligned memory that is committed on first touch: in huge pages if the system provides them, or
// with `small_pages` always in small ones, so that only touched memory is committed.
class Memory {
  public:
    explicit Memory(size_t bytes, bool small_pages = false);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // Releases the whole pages within these bytes to the system; they read as zeros afterwards.
    void release(size_t offset, size_t bytes);
    // Lets the system commit pages of these bytes on a NUMA node, while that has room. Does nothing if the
    // system does not allow it.
    void place(size_t offset, size_t bytes, int node);

  private:
    uint8_t* data_;
    size_t size_;
};

// Memory for weights: adjacent in large blocks, in packing order, which is the order in which a step reads
// them. The matrices of a small model are too small for huge pages of their own, and would be bound by TLB
// misses.
class WeightMemory {
  public:
    // Returns `bytes` zeros, aligned to 64, which live as long as the pointer.
    std::shared_ptr<uint8_t> allocate(size_t bytes);

  private:
    std::shared_ptr<Memory> block_;
    size_t used_ = 0;
};

}  // namespace octavo
