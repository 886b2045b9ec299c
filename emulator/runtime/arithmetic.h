// fp16 and bf16 on the host: exact conversions and single-rounding operations, subnormals kept.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emu {

inline float half_to_float(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  float f;
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;  // moves the exponent bias from 15 to 127, also for subnormals
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((h & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;
  bits |= static_cast<uint32_t>(h & 0x8000u) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float to_float(bool bf16, uint16_t x) { return bf16 ? bfloat_to_float(x) : half_to_float(x); }

// Nearest-even to a format with kMantissa stored bits, smallest normal exponent kMinExponent and bias kBias.
template <int kMantissa, int kMinExponent, int kBias> inline uint16_t round_to_format(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  const uint16_t sign = static_cast<uint16_t>(bits >> 48 & 0x8000u);
  constexpr uint16_t kInfinity = static_cast<uint16_t>(((2 * kBias + 1) << kMantissa) & 0x7fff);
  if (std::isnan(x)) return 0x7fff;  // the canonical NaN of cvt and of packed arithmetic (PTX ISA)
  const int biased = static_cast<int>(bits >> 52 & 0x7ff);
  if (biased == 0x7ff) return sign | kInfinity;
  if (biased == 0) return sign;  // zero; a subnormal double is far below both formats
  int exponent = biased - 1023;
  const uint64_t mantissa = (bits & ((1ull << 52) - 1)) | (1ull << 52);
  // In units of the last place: shift away the bits below it, then round on the remainder.
  const int below = exponent < kMinExponent ? kMinExponent - exponent : 0;
  const int shift = 52 - kMantissa + below;
  if (shift > 54) return sign;
  uint64_t kept = mantissa >> shift;
  const uint64_t rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  kept += rest > half || (rest == half && (kept & 1));
  // A carry out of the mantissa runs into the exponent field, which is what rounding up needs.
  const int64_t field = exponent < kMinExponent ? 0 : exponent + kBias - 1;
  const int64_t encoded = (field << kMantissa) + static_cast<int64_t>(kept);
  return sign | static_cast<uint16_t>(encoded >= kInfinity ? kInfinity : encoded);
}

inline uint16_t round_to_element(bool bf16, double x) {
  return bf16 ? round_to_format<7, -126, 127>(x) : round_to_format<10, -14, 15>(x);
}

// product + c with the last bit made odd when inexact, so that rounding once more to a shorter format is a single rounding.
inline double add_round_to_odd(double product, double c) {
  double sum = product + c;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (c - back);
  if (error != 0 && std::isfinite(sum)) {
    uint64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (!(bits & 1)) sum = std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL);
  }
  return sum;
}

// a * b + c: the product of two 8- or 11-bit mantissas is exact in double.
inline uint16_t fma_element(bool bf16, uint16_t a, uint16_t b, uint16_t c) {
  const double product = static_cast<double>(to_float(bf16, a)) * to_float(bf16, b);
  return round_to_element(bf16, add_round_to_odd(product, to_float(bf16, c)));
}

}  // namespace emu
