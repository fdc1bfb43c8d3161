// The native tests. `native_tests KERNELS LEVEL...` runs all of them at each level, with the shared objects
// of the directory KERNELS, where it also keeps small files for a moment. `native_tests --levels` prints the
// levels that this machine runs, best last.
#include "check.h"

using namespace octavo;

int main(int count, char** arguments) {
    if (count == 2 && !std::strcmp(arguments[1], "--levels")) {
        for (const auto& level : supported_levels()) std::printf("%s\n", level.c_str());
        return 0;
    }
    if (count < 3) {
        std::fprintf(stderr, "usage: native_tests KERNELS LEVEL... | --levels\n");
        return 2;
    }
    test::test_thread_pool();
    std::printf("thread pool: ok\n");
    test::test_walk();
    std::printf("walk: ok\n");
    test::test_weight_stream(arguments[1]);
    std::printf("weight stream: ok\n");
    test::test_neuron_cache(arguments[1]);
    std::printf("neuron cache: ok\n");
    test::test_kv_spill(arguments[1]);
    std::printf("keys in a file: ok\n");
    test::test_shared_ranks(arguments[1]);
    std::printf("shared ranks: ok\n");
    for (int i = 2; i < count; i++) {
        const KernelTable& kernels = load_level(arguments[1], arguments[i]);
        CHECK(std::string(kernels.name) == arguments[i]);
        test::test_packing(kernels);
        test::test_float_codes(kernels);
        test::test_executor(kernels);
        test::test_experts(kernels);
        std::printf("%s: ok\n", arguments[i]);
    }
    return 0;
}
