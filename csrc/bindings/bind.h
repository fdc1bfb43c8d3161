// One function for each part of the extension module; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_device(nanobind::module_& m);
void bind_packing(nanobind::module_& m);
void bind_kv(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_runner(nanobind::module_& m);

}  // namespace octavo
