// Ops that mix a request's rows without attention: short convolutions, whose previous rows are stored in a
// cache group, and selective scans, whose states are. Formulas: octavo/program/mixers.py.
#pragma once

#include <memory>

#include "op.h"
#include "specs.h"

namespace octavo {

std::unique_ptr<Op> make_op(const ShortConvSpec& spec);
std::unique_ptr<Op> make_op(const ScanSpec& spec);

}  // namespace octavo
