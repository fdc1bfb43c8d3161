#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {

#ifdef __SANITIZE_ADDRESS__
// The address sanitizer detects overruns of heap blocks, but not of mapped pages.
Memory::Memory(size_t bytes, bool)
    : data_(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(4096)))), size_(bytes) {
    std::memset(data_, 0, size_);
}
Memory::~Memory() { ::operator delete(data_, std::align_val_t(4096)); }
#else
Memory::Memory(size_t bytes, [[maybe_unused]] bool small_pages) : size_(bytes < 64 ? 64 : bytes) {
    void* p =
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
    if (small_pages || size_ >= (4u << 20)) madvise(p, size_, small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
#endif
}
Memory::~Memory() { munmap(data_, size_); }
#endif

void Memory::release(size_t offset, size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data_) + offset + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_) + offset + bytes) / page * page;
    if (first >= end) return;
    void* const pages = reinterpret_cast<void*>(first);
#ifdef __linux__
    const bool released = madvise(pages, end - first, MADV_DONTNEED) == 0;
#else  // MADV_DONTNEED keeps the contents
    const bool released = mmap(pages, end - first, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
#endif
    if (!released) throw std::runtime_error("memory cannot be released");
}

void Memory::place([[maybe_unused]] size_t offset, [[maybe_unused]] size_t bytes, [[maybe_unused]] int node) {
#ifdef __linux__
    constexpr int kMaxNodes = 1024, kBits = 8 * sizeof(unsigned long);
    if (node < 0 || node >= kMaxNodes) return;
    unsigned long mask[kMaxNodes / kBits] = {};
    mask[node / kBits] = 1ul << (node % kBits);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data_) + offset) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(data_) + offset + bytes;
    // The kernel takes one bit less than it is told.
    syscall(SYS_mbind, first, end - first, MPOL_PREFERRED, mask, kMaxNodes + 1, 0);
#endif
}

std::shared_ptr<uint8_t> WeightMemory::allocate(size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    constexpr size_t kBlockBytes = 0;  // each weight in its own block, to detect overruns
#else
    constexpr size_t kBlockBytes = 32u << 20;
#endif
    bytes = (bytes + 63) / 64 * 64;
    if (!block_ || used_ + bytes > block_->size()) {
        block_ = std::make_shared<Memory>(std::max(bytes, kBlockBytes));
        used_ = 0;
    }
    used_ += bytes;
    return {block_, block_->data() + used_ - bytes};
}

}  // namespace octavo
