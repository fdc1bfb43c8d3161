// NumPy arrays as the bindings take them: C-contiguous, on the CPU, of one type and number of axes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

namespace octavo {

template <typename T, typename... Axes>
using Array = nanobind::ndarray<const T, Axes..., nanobind::c_contig, nanobind::device::cpu>;
template <typename T, typename... Axes>
using Out = nanobind::ndarray<T, Axes..., nanobind::c_contig, nanobind::device::cpu>;

// The attribute `name` as an array. It is never a converted copy, which would not outlive the call.
template <typename A>
A array_of(const nanobind::object& object, const char* name) {
    A array;
    if (!nanobind::try_cast<A>(object.attr(name), array, false))
        throw nanobind::type_error(
            (std::string(name) + ": not a C-contiguous array of the type and axes that its field has")
                .c_str());
    return array;
}

}  // namespace octavo
