// The native tests. `native_tests KERNELS LEVEL...` runs all of them at each level, with the shared objects
// in the directory KERNELS, where it also creates temporary files. `native_tests --kernels KERNELS
// LEVEL...` skips the tests that need no kernels and accepts levels that the processor does not report, for
// emulators: a missing instruction ends the tests. `native_tests --levels` prints the levels that this
// machine supports, best last.
#include <dlfcn.h>

#include "check.h"

using namespace octavo;

namespace {

void test_without_kernels(const std::string& directory) {
    test::test_thread_pool();
    std::printf("thread pool: ok\n");
    test::test_attention_plan();
    std::printf("attention plan: ok\n");
    test::test_step_run();
    std::printf("step run: ok\n");
    test::test_weight_stream(directory);
    std::printf("weight stream: ok\n");
    test::test_neuron_cache(directory);
    std::printf("neuron cache: ok\n");
    test::test_kv_spill(directory);
    std::printf("keys in a file: ok\n");
    test::test_shared_ranks(directory);
    std::printf("shared ranks: ok\n");
}

const KernelTable& load_unchecked(const std::string& directory, const std::string& level) {
    void* library = dlopen((directory + "/liboctavo_" + level + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    const auto get = reinterpret_cast<const KernelTable* (*)()>(dlsym(library, "octavo_kernel_table"));
    CHECK(get);
    return *get();
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 2 && !std::strcmp(arguments[1], "--levels")) {
        for (const auto& level : supported_levels()) std::printf("%s\n", level.c_str());
        return 0;
    }
    const bool kernels_alone = count > 1 && !std::strcmp(arguments[1], "--kernels");
    if (kernels_alone) arguments++, count--;
    if (count < 3) {
        std::fprintf(stderr, "usage: native_tests [--kernels] KERNELS LEVEL... | --levels\n");
        return 2;
    }
    if (!kernels_alone) test_without_kernels(arguments[1]);
    for (int i = 2; i < count; i++) {
        const KernelTable& kernels = kernels_alone ? load_unchecked(arguments[1], arguments[i])
                                                   : load_level(arguments[1], arguments[i]);
        CHECK(std::string(kernels.name) == arguments[i]);
        test::test_packing(kernels);
        std::printf("%s: packing ok\n", arguments[i]);
        std::fflush(stdout);
        test::test_float_codes(kernels);
        test::test_plan(kernels);
        test::test_step_runner(kernels);
        test::test_experts(kernels);
        std::printf("%s: ok\n", arguments[i]);
        std::fflush(stdout);
    }
    return 0;
}
