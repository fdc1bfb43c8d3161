// Aligned memory in large pages, and the pieces of it that weights lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

// 64-byte aligned memory that costs nothing until it is touched: in huge pages where the system gives them,
// or always in small ones, so that it costs no more than what is touched.
class Memory {
  public:
    explicit Memory(size_t bytes, bool small_pages = false);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // Gives the whole pages within these bytes back to the system; read again they are zeros.
    void give_back(size_t offset, size_t bytes);

  private:
    uint8_t* data_;
    size_t size_;
};

// Memory for weights: they lie side by side in large pieces, in the order in which they are packed, which is
// that in which a step reads them. A matrix of a small model alone would be too small for a large page, and
// then a core waits for the table of pages, not for memory.
class WeightMemory {
  public:
    // Returns `bytes` zeros at a multiple of 64, which live as long as the pointer is held.
    std::shared_ptr<uint8_t> take(size_t bytes);

  private:
    std::shared_ptr<Memory> piece_;
    size_t used_ = 0;
};

}  // namespace octavo
