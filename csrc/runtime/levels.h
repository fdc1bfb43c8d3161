// Instruction-set levels: detects which kernel libraries this machine can run, and loads one.
#pragma once

#include <string>
#include <vector>

#include "../kernels/table.h"

namespace octavo {

// Returns the names of the levels that this machine supports, best last: portable, avx2, avx2_vnni, avx512,
// avx512_vnni, avx512_bf16, amx on x86-64; portable, neon, neon_dotprod, neon_i8mm on AArch64.
std::vector<std::string> supported_levels();

// Loads `directory`/liboctavo_<name>.so. Throws std::runtime_error if it is missing or not supported by
// this machine.
const KernelTable& load_level(const std::string& directory, const std::string& name);

}  // namespace octavo
