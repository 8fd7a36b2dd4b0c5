// Conversions of float16 and bfloat16 to and from float. Rounds to nearest, ties to even; preserves
// NaN.
//
// Works on the bits, without branches or tables, so that loops vectorise on every machine.

#pragma once

#include <bit>
#include <cstdint>

namespace fddp::shm {

// IEEE binary16, as bits.
struct Half {
  uint16_t bits;
};

// Upper half of a binary32, as bits.
struct BFloat16 {
  uint16_t bits;
};

// Return `a` if `first`, else `b`, without a branch that would prevent vectorisation.
inline __attribute__((always_inline)) uint32_t select(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

inline __attribute__((always_inline)) float widen(Half half) {
  constexpr uint32_t kShiftedExponent = 0x7c00u << 13;
  constexpr uint32_t kMinNormal = 113u << 23;  // 2^-14
  const uint32_t magnitude = (half.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & kShiftedExponent;
  const uint32_t rebiased = magnitude + ((127u - 15u) << 23);
  const uint32_t special = rebiased + ((128u - 16u) << 23);
  // A subnormal float16 has no implicit leading one. It is added here and subtracted in float.
  const float subnormal =
      std::bit_cast<float>(rebiased + (1u << 23)) - std::bit_cast<float>(kMinNormal);
  const uint32_t finite = select(exponent == 0, std::bit_cast<uint32_t>(subnormal), rebiased);
  const uint32_t result = select(exponent == kShiftedExponent, special, finite);
  return std::bit_cast<float>(result | (half.bits & 0x8000u) << 16);
}

inline __attribute__((always_inline)) float widen(BFloat16 half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half.bits) << 16);
}

inline __attribute__((always_inline)) void narrow(float value, Half& half) {
  constexpr uint32_t kInfinity = 255u << 23;
  constexpr uint32_t kOverflow = (127u + 16u) << 23;                  // 2^16, rounds to infinity
  constexpr uint32_t kMinNormal = 113u << 23;                         // 2^-14
  constexpr uint32_t kAligner = (127u - 15u + 23u - 10u + 1u) << 23;  // 0.5: ulp 2^-24
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // The addition moves the bits of a subnormal float16 to the bottom of the float, and rounds.
  const float aligned = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kAligner);
  const uint32_t subnormal = std::bit_cast<uint32_t>(aligned) - kAligner;
  const uint32_t odd = magnitude >> 13 & 1u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const uint32_t special = select(magnitude > kInfinity, 0x7e00u, 0x7c00u);
  const uint32_t finite = select(magnitude < kMinNormal, subnormal, normal);
  const uint32_t result = select(magnitude >= kOverflow, special, finite);
  half.bits = static_cast<uint16_t>(result | (bits >> 16 & 0x8000u));
}

inline __attribute__((always_inline)) void narrow(float value, BFloat16& half) {
  constexpr uint32_t kInfinity = 255u << 23;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uint32_t nan = bits >> 16 | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > kInfinity;
  half.bits = static_cast<uint16_t>(select(is_nan, nan, rounded));
}

}  // namespace fddp::shm
