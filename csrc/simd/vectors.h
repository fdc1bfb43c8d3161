// Sixteen lanes as a type: `vf` of fp32, `vi` of int32, with the operators of GCC's vectors.
//
// With AVX-512 both are compiler vectors. With smaller registers the compiler would keep a 64-byte vector
// in memory, but it keeps the members of a struct in registers. So there they are structs of two 32-byte
// vectors (AVX2) or of four 16-byte vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace octavo {
namespace {

#define OCTAVO_INLINE inline __attribute__((always_inline))

template <typename T>
struct Two {
    T low, high;
};
template <typename T>
OCTAVO_INLINE Two<T> two(T low, T high) {
    return {low, high};
}

// Applies fn to the registers of one vector or several, and returns a vector of the results.
template <typename Fn, typename... T>
OCTAVO_INLINE auto each(const Fn& fn, T... v) {
    return fn(v...);
}
template <typename Fn, typename... T>
OCTAVO_INLINE auto each(const Fn& fn, Two<T>... v) {
    return two(each(fn, v.low...), each(fn, v.high...));
}

#define OCTAVO_OPERATOR(op)                              \
    template <typename T>                                \
    OCTAVO_INLINE auto operator op(Two<T> a, Two<T> b) { \
        return two(a.low op b.low, a.high op b.high);    \
    }                                                    \
    template <typename T, typename S>                    \
        requires std::is_arithmetic_v<S>                 \
    OCTAVO_INLINE auto operator op(Two<T> a, S b) {      \
        return two(a.low op b, a.high op b);             \
    }                                                    \
    template <typename T, typename S>                    \
        requires std::is_arithmetic_v<S>                 \
    OCTAVO_INLINE auto operator op(S a, Two<T> b) {      \
        return two(a op b.low, a op b.high);             \
    }
OCTAVO_OPERATOR(+)
OCTAVO_OPERATOR(-)
OCTAVO_OPERATOR(*)
OCTAVO_OPERATOR(/)
OCTAVO_OPERATOR(&)
OCTAVO_OPERATOR(|)
OCTAVO_OPERATOR(^)
OCTAVO_OPERATOR(<<)
OCTAVO_OPERATOR(>>)
OCTAVO_OPERATOR(<)
OCTAVO_OPERATOR(>)
OCTAVO_OPERATOR(>=)
OCTAVO_OPERATOR(==)
OCTAVO_OPERATOR(!=)
#undef OCTAVO_OPERATOR

template <typename T>
OCTAVO_INLINE Two<T> operator-(Two<T> a) {
    return {-a.low, -a.high};
}
template <typename T, typename Other>
OCTAVO_INLINE Two<T>& operator+=(Two<T>& a, Other b) {
    return a = a + b;
}
template <typename T, typename Other>
OCTAVO_INLINE Two<T>& operator-=(Two<T>& a, Other b) {
    return a = a - b;
}
template <typename T, typename Other>
OCTAVO_INLINE Two<T>& operator*=(Two<T>& a, Other b) {
    return a = a * b;
}
template <typename T, typename Other>
OCTAVO_INLINE Two<T>& operator|=(Two<T>& a, Other b) {
    return a = a | b;
}

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
typedef float RegisterF __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t RegisterI __attribute__((vector_size(4 * kRegisterLanes)));

template <typename Register, int kCount>
struct Doubled {
    using type = Two<typename Doubled<Register, kCount / 2>::type>;
};
template <typename Register>
struct Doubled<Register, 1> {
    using type = Register;
};
using vf = Doubled<RegisterF, 16 / kRegisterLanes>::type;
using vi = Doubled<RegisterI, 16 / kRegisterLanes>::type;

// Reinterprets the bits as lanes of the other type.
OCTAVO_INLINE vf as_float(vi v) {
    return each([](RegisterI x) { return reinterpret_cast<RegisterF>(x); }, v);
}
OCTAVO_INLINE vi as_int(vf v) {
    return each([](RegisterF x) { return reinterpret_cast<RegisterI>(x); }, v);
}

// Loads and stores, one register at a time.
template <typename Vector>
struct Memory16 {
    static OCTAVO_INLINE Vector load(const void* p) {
        Vector v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static OCTAVO_INLINE void store(void* p, Vector v) { std::memcpy(p, &v, sizeof v); }
};
template <typename T>
struct Memory16<Two<T>> {
    static OCTAVO_INLINE Two<T> load(const void* p) {
        return {Memory16<T>::load(p), Memory16<T>::load(static_cast<const char*>(p) + sizeof(T))};
    }
    static OCTAVO_INLINE void store(void* p, Two<T> v) {
        Memory16<T>::store(p, v.low);
        Memory16<T>::store(static_cast<char*>(p) + sizeof(T), v.high);
    }
};

}  // namespace
}  // namespace octavo
