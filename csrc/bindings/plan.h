// Binds PlanBuilder, the specs of its ops and Plan.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_plan(nanobind::module_& m);

}  // namespace octavo
