// Operations of csrc/simd at extreme values, next to scalar arithmetic. Exits with the number of those that differ.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "simd/simd.h"

using namespace octavo;

namespace {

int num_failures = 0;

template <typename Lane, typename Vector>
void expect(const char* name, Vector found, Lane expected) {
    Lane lanes[16];
    std::memcpy(lanes, &found, sizeof(lanes));
    for (const Lane lane : lanes) {
        if (!std::memcmp(&lane, &expected, sizeof(lane))) continue;
        std::printf("%s: %g, expected %g\n", name, static_cast<double>(lane), static_cast<double>(expected));
        num_failures++;
        return;
    }
}

vi bytes_of(int value) { return splat_i((value & 0xff) * 0x01010101); }

}  // namespace

int main() {
    for (const int u : {0, 1, 127, 128, 255})
        for (const int s : {-128, -127, -1, 0, 127})
            expect<int32_t>("dot4", dot4(splat_i(-7), bytes_of(u), bytes_of(s)), -7 + 4 * u * s);
    for (const int x : {-32768, -1, 32767})
        for (const int y : {-32767, 1, 32767}) {
            const auto pair = [](int v) { return splat_i(static_cast<int>((v & 0xffffu) * 0x10001u)); };
            expect<int32_t>("dot2_int16", dot2_int16(splat_i(0), pair(x), pair(y)),
                            static_cast<int32_t>(2u * static_cast<uint32_t>(x * y)));
        }
    for (int first = -128; first < 128; first += 16) {
        int8_t numbers[16];
        float converted[16];
        int32_t widened[16];
        for (int i = 0; i < 16; i++) numbers[i] = static_cast<int8_t>(first + i);
        store(converted, to_float(load_int8(numbers)));
        store_i(widened, load_int8(numbers) & splat_i(-1));
        for (int i = 0; i < 16; i++) {
            expect<float>("load_int8", splat(converted[i]), static_cast<float>(first + i));
            expect<int32_t>("load_int8", splat_i(widened[i]), first + i);
        }
    }
    const struct {
        uint16_t bits;
        float value;
    } halves[] = {{0x7bff, 65504.0f}, {0x0001, 5.9604645e-8f}, {0xfc00, -__builtin_inff()}, {0x8000, -0.0f}};
    for (const auto& [bits, value] : halves) {
        uint16_t numbers[16];
        for (uint16_t& number : numbers) number = bits;
        expect<float>("load_fp16", load_fp16(numbers), value);
    }
    const struct {
        float value;
        uint16_t bits;
    } rounded[] = {{3.3895314e38f, 0x7f7f}, {3.4e38f, 0x7f80}, {1.00390625f, 0x3f80}, {1.01171875f, 0x3f82}};
    for (const auto& [value, bits] : rounded) {
        uint16_t numbers[16];
        store_bf16(numbers, splat(value));
        vi found;
        int32_t lanes[16];
        for (int i = 0; i < 16; i++) lanes[i] = numbers[i];
        std::memcpy(&found, lanes, sizeof(lanes));
        expect<int32_t>("store_bf16", found, bits);
    }
    expect<int32_t>("round_to_int", round_to_int(splat(-4194303.0f)), -4194303);
    expect<int32_t>("round_to_int", round_to_int(splat(2.5f)), 2);
    expect<float>("exp", exp(splat(-200.0f)), 0.0f);
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // GCC 12 writes a constant second operand with the bits of fp16 unless neon.h hides that it is constant.
    volatile int threes = 0x40404040;
    expect<float>("dot2_bf16", dot2_bf16(splat(0.5f), splat_i(threes), splat_i(0x3f803f80)), 6.5f);
#endif
    return num_failures;
}
