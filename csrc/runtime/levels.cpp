#include "levels.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace octavo {

namespace {

#if defined(__x86_64__)
struct Cpu {
    uint32_t leaf1_c = 0, leaf7_b = 0, leaf7_c = 0, leaf7_d = 0, leaf71_a = 0;
    uint64_t saved_state = 0;  // XCR0: registers that the operating system saves

    Cpu() {
        uint32_t a, b, c, d;
        if (__get_cpuid(1, &a, &b, &c, &d)) leaf1_c = c;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
            leaf7_b = b;
            leaf7_c = c;
            leaf7_d = d;
        }
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) leaf71_a = a;
        if (leaf1_c & (1u << 27)) {
            uint32_t low, high;
            __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            saved_state = (static_cast<uint64_t>(high) << 32) | low;
        }
    }
    bool has(uint32_t reg, int bit) const { return reg >> bit & 1; }
    bool saves(uint64_t mask) const { return (saved_state & mask) == mask; }
    bool avx2() const { return saves(0x6) && has(leaf7_b, 5) && has(leaf1_c, 12) && has(leaf1_c, 29); }
    bool avx512() const {
        return avx2() && saves(0xe6) && has(leaf7_b, 16) && has(leaf7_b, 17) && has(leaf7_b, 30) &&
               has(leaf7_b, 31);
    }
};

// Requests permission to use AMX, which Linux requires (ARCH_REQ_XCOMP_PERM, feature 18).
bool request_tiles() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}
#elif defined(__aarch64__)
#if defined(__linux__)
// HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16, which older headers lack.
bool has_dot_products() { return getauxval(AT_HWCAP) & 1ul << 20; }
bool has_i8mm_and_bf16() {
    constexpr unsigned long kBoth = 3ul << 13;
    return (getauxval(AT_HWCAP2) & kBoth) == kBoth;
}
#elif defined(__APPLE__)
// Apple's names of the extensions; a system that is older than an extension does not know its name.
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm_and_bf16() {
    return has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#else
bool has_dot_products() { return false; }
bool has_i8mm_and_bf16() { return false; }
#endif
#endif

}  // namespace

std::vector<std::string> supported_levels() {
    std::vector<std::string> levels = {"portable"};
#if defined(__x86_64__)
    const Cpu cpu;
    if (!cpu.avx2()) return levels;
    levels.push_back("avx2");
    if (cpu.has(cpu.leaf71_a, 4)) levels.push_back("avx2_vnni");
    if (!cpu.avx512()) return levels;
    levels.push_back("avx512");
    if (!cpu.has(cpu.leaf7_c, 11)) return levels;
    levels.push_back("avx512_vnni");
    if (!cpu.has(cpu.leaf71_a, 5)) return levels;
    levels.push_back("avx512_bf16");
    const bool tiles = cpu.has(cpu.leaf7_d, 22) && cpu.has(cpu.leaf7_d, 24) && cpu.has(cpu.leaf7_d, 25) &&
                       cpu.saves(3u << 17);
    if (tiles && request_tiles()) levels.push_back("amx");
#elif defined(__aarch64__)
    levels.push_back("neon");
    if (!has_dot_products()) return levels;
    levels.push_back("neon_dotprod");
    if (has_i8mm_and_bf16()) levels.push_back("neon_i8mm");
#endif
    return levels;
}

const KernelTable& load_level(const std::string& directory, const std::string& name) {
    const auto levels = supported_levels();
    if (std::find(levels.begin(), levels.end(), name) == levels.end())
        throw std::runtime_error("this machine cannot run the level " + name);
    const std::string path = directory + "/liboctavo_" + name + ".so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("cannot load the kernels: ") + dlerror());
    using GetTable = const KernelTable* (*)();
    const auto get = reinterpret_cast<GetTable>(dlsym(library, "octavo_kernel_table"));
    if (!get) throw std::runtime_error(path + " holds no kernel table");
    return *get();
}

}  // namespace octavo
