// Stages that mix a request's rows without attention: short convolutions, whose earlier rows lie in a cache
// group of their own, and selective scans, whose states do. octavo/program/mixers.py has the formulas.
#pragma once

#include <memory>

#include "specs.h"
#include "stage.h"

namespace octavo {

std::unique_ptr<Stage> make_stage(const ShortConvSpec& spec);
std::unique_ptr<Stage> make_stage(const ScanSpec& spec);

}  // namespace octavo
