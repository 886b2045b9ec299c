// From packed codes to tensor-core fragments: weights of one thread, one 16-column atom, one k16 step.
//
// A code masked in place is a subnormal number of the activation type, so one fused multiply-add gives (q - 8) * s with a single
// rounding: no integer conversion, no bias subtraction. See docs/layout.md for the bit positions and stored scales.
#pragma once
#include <type_traits>
#include "marlin_cutlass/params.h"
#include "marlin_cutlass/prims.cuh"

namespace marlin_cutlass {

// Scales (and zero points) of fragment rows r and r + 8, both halves of each word equal.
struct RowScales {
  uint32_t scale[2];
  uint32_t bias[2];  // symmetric: -8 * scale in weight units; zero points, and Scaling::kRunning: the zero as a subnormal code
  uint32_t mask[2];  // Scaling::kRunning: of a code; 0 where the scale is
};

// Where the scales of a group act: on the weights, or (factors) on fp32 accumulators. Then fragments are codes minus zero point, but for kCodeSums.
enum class Scaling {
  kWeights,
  kGroupSums,  // on the sums over a group
  kCodeSums,   // the same, of the codes as they lie: accumulators start at -offset x (sum of the group's activations)
  kRunning,    // on all sums so far, which are in units of the scale: times its ratio to the next group's
};

template <class E, int kGroupSize, bool kZeros, Scaling kScaling = Scaling::kWeights> struct Dequantizer {
  static_assert(kScaling == Scaling::kWeights || kGroupSize > 0, "one scale a column acts in the epilogue");
  static_assert(kScaling != Scaling::kGroupSums || kZeros, "symmetric weights have their scale and offset in one instruction");
  static_assert(kScaling != Scaling::kRunning || std::is_same<E, F16>::value, "bf16 weights have few bits set as they are");
  static constexpr bool kScaledSums = kScaling != Scaling::kWeights;  // fragments are not scaled
  static constexpr bool kRawCodes = kScaling == Scaling::kCodeSums;   // nor is the zero point subtracted
  static constexpr bool kRunning = kScaling == Scaling::kRunning;
  static constexpr bool kGrouped = kGroupSize > 0;
  static constexpr bool kHasEntries = kGrouped || kZeros;
  static constexpr int kGroupsPerBlock = kGrouped ? kBlockDepth / kGroupSize : 1;
  static constexpr int kEntryBytes = kGrouped && kZeros ? 8 : 4;  // per fragment row pair
  static constexpr int kAtomBytes = 8 * kEntryBytes;              // 8 row pairs of one atom
  static constexpr int kGroupBytes = 4 * kAtomBytes;              // 4 atoms: entries of one group in one block
  static constexpr int kBlockBytes = block_bytes(kGroupSize, kZeros);
  // Codes of one thread per k64 half and per scale group: groups of 32 change scale every second k16 step.
  static constexpr int kStepsPerGroup = kGrouped ? kGroupSize / 16 : 8;

  struct Entry { uint32_t scales, zeros; };

  MC_DEVICE static Entry load(smem_addr_t addr) {
    if constexpr (!kHasEntries) return {0u, 0u};
    else if constexpr (kEntryBytes == 8) {
      const U32x2 v = ld_shared_u32x2(addr);
      return {v.x, v.y};
    } else {
      const uint32_t v = ld_shared_u32(addr);
      return {kGrouped ? v : 0u, kGrouped ? 0u : v};
    }
  }

  MC_DEVICE static RowScales prepare(Entry e) {
    if constexpr (kRawCodes) return {};
    if constexpr (kRunning && !kZeros) e.zeros = 8 << 2 | 8 << 22;  // 8 * 2^-22 and 8 * 2^-18, as zero points are stored
    RowScales s = prepare(e, Tag<E>{});
    if constexpr (kRunning) {  // sums cannot be in units of nothing: such weights are nothing
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool none = (e.scales & (i == 0 ? 0x00007fffu : 0x7fff0000u)) == 0;
        s.mask[i] = none ? 0u : code_mask(i);
        if (none) s.bias[i] = 0u;
      }
    }
    return s;
  }

  // Fragment a[0..3] of m16n8k16 / wgmma from the 8 codes in `w`.
  MC_DEVICE static void fragment(uint32_t w, const RowScales& s, uint32_t* a) {
    if constexpr (kRawCodes) {
      raw_fragment(w, a, Tag<E>{});
#pragma unroll
      for (int i = 0; i < 4; ++i) forget(a[i]);  // or ptxas serialises wgmma
    } else {
      fragment(w, s, a, Tag<E>{});
    }
  }

  // The scales of sums, rows r and r + 8: as the activation type holds them, over the unit of the codes.
  struct Factors { float row[2]; };
  MC_DEVICE static Factors factors(Entry e) { return factors(e, Tag<E>{}); }

  // kRawCodes: by how much fragments exceed codes minus zero point, rows r and r + 8. Symmetric weights have the same everywhere.
  static constexpr float kLowUnit = 0x1p-22f, kHighUnit = 0x1p-18f;  // of the codes of rows r and r + 8
  static constexpr float kExcess = std::is_same<E, BF16>::value ? 32.f : 0.f;
  static constexpr float kLowOffset = (8.f + kExcess) * kLowUnit, kHighOffset = (8.f + kExcess) * kHighUnit;
  MC_DEVICE static Factors offsets(Entry e) {
    if constexpr (!kZeros) return {{kLowOffset, kHighOffset}};
    else return {{half_low_to_float(e.zeros) + kExcess * kLowUnit, half_high_to_float(e.zeros) + kExcess * kHighUnit}};
  }

 private:
  MC_DEVICE static uint32_t convert(uint32_t x, uint32_t scale, uint32_t bias) {
    if constexpr (kScaledSums) return subtract(x, scale, bias, Tag<E>{});
    else if constexpr (kZeros) return mul2<E>(sub2<E>(x, bias), scale);
    else return fma2<E>(x, scale, bias);
  }
  template <class T> struct Tag {};
  // Of the codes of rows r and r + 8.
  MC_DEVICE static uint32_t code_mask(int row) { return row == 0 ? 0x003c003cu : 0x03c003c0u; }
  MC_DEVICE static uint32_t mask(const RowScales& s, int row) { return kRunning ? s.mask[row] : code_mask(row); }
  // Tensor cores take subnormal fp16 operands as they are; bf16 ones would leave the sums subnormal, so they move to the units 2^-22 and 2^-18.
  MC_DEVICE static uint32_t subtract(uint32_t x, uint32_t, uint32_t bias, Tag<F16>) { return sub2<F16>(x, bias); }
  MC_DEVICE static uint32_t subtract(uint32_t x, uint32_t unit, uint32_t bias, Tag<BF16>) { return fma2<BF16>(x, unit, bias); }
  MC_DEVICE static Factors factors(Entry e, Tag<F16>) { return {{half_low_to_float(e.scales), half_high_to_float(e.scales)}}; }
  MC_DEVICE static Factors factors(Entry e, Tag<BF16>) {
    const uint32_t rounded = pack2<BF16>(half_low_to_float(e.scales), half_high_to_float(e.scales));
    return {{bfloat_low_to_float(rounded), bfloat_high_to_float(rounded)}};
  }
  MC_DEVICE static RowScales prepare(Entry e, Tag<F16>) {
    RowScales s;
    // Stored scales are s_n * 2^22 and s_n * 2^18; per column s_n is 2^-7 (the column scale acts in the epilogue).
    s.scale[0] = kGrouped ? broadcast_low(e.scales) : 0x78007800u;
    s.scale[1] = kGrouped ? broadcast_high(e.scales) : 0x68006800u;
    if constexpr (kZeros || kScaledSums) {
      s.bias[0] = broadcast_low(e.zeros);
      s.bias[1] = broadcast_high(e.zeros);
    } else if constexpr (kGrouped) {
      s.bias[0] = mul2<F16>(s.scale[0], 0x80208020u);  // * -2^-19
      s.bias[1] = mul2<F16>(s.scale[1], 0x82008200u);  // * -2^-15
    } else {
      s.bias[0] = s.bias[1] = 0xac00ac00u;  // -8 * 2^-7
    }
    return s;
  }
  MC_DEVICE static RowScales prepare(Entry e, Tag<BF16>) {
    RowScales s;
    if constexpr (kScaledSums) {  // from 2^-131, the weight of the lowest code bit position, to 2^-22 and 2^-18
      s.scale[0] = 0x76007600u;
      s.scale[1] = 0x78007800u;
      s.bias[0] = mul2<BF16>(broadcast_low(e.zeros), 0xf600f600u);
      s.bias[1] = mul2<BF16>(broadcast_high(e.zeros) >> 4, 0xf800f800u);
      return s;
    }
    if constexpr (kGrouped) {  // to bf16(s_n) * 2^131, the weight of the lowest code bit position being 2^-131
      const float low = half_low_to_float(e.scales) * 0x1p109f, high = half_high_to_float(e.scales) * 0x1p113f;
      s.scale[0] = pack2<BF16>(low, low);
      s.scale[1] = pack2<BF16>(high, high);
    } else {
      s.scale[0] = s.scale[1] = 0x7d807d80u;  // 2^-7 * 2^131
    }
    if constexpr (kZeros) {  // z << 2 and z << 6 as stored; both codes sit at bit 2 here
      s.bias[0] = broadcast_low(e.zeros);
      s.bias[1] = broadcast_high(e.zeros) >> 4;
    } else if constexpr (kGrouped) {
      s.bias[0] = mul2<BF16>(s.scale[0], 0x80208020u);  // * -2^-128
      s.bias[1] = mul2<BF16>(s.scale[1], 0x80208020u);
    } else {
      s.bias[0] = s.bias[1] = 0xbd80bd80u;  // -8 * 2^-7
    }
    return s;
  }
  MC_DEVICE static void raw_fragment(uint32_t w, uint32_t* a, Tag<F16>) {
    const uint32_t t = rotate_right(w, 8);
    a[0] = w & code_mask(0);
    a[1] = w & code_mask(1);
    a[2] = t & code_mask(0);
    a[3] = t & code_mask(1);
  }
  // A bf16 number 32 + code, in the units 2^-22 and 2^-18.
  MC_DEVICE static void raw_fragment(uint32_t w, uint32_t* a, Tag<BF16>) {
    uint32_t low = 0x37003700u, high = 0x39003900u;
    forget(low);  // a LOP3 takes one constant: these are kept in registers
    forget(high);
    a[0] = and_or(w, code_mask(0), low);
    a[1] = and_or(w >> 4, code_mask(0), high);
    a[2] = and_or(rotate_right(w, 8), code_mask(0), low);
    a[3] = and_or(rotate_right(w, 12), code_mask(0), high);
  }
  MC_DEVICE static void fragment(uint32_t w, const RowScales& s, uint32_t* a, Tag<F16>) {
    const uint32_t t = rotate_right(w, 8);
    a[0] = convert(w & mask(s, 0), s.scale[0], s.bias[0]);
    a[1] = convert(w & mask(s, 1), s.scale[1], s.bias[1]);
    a[2] = convert(t & mask(s, 0), s.scale[0], s.bias[0]);
    a[3] = convert(t & mask(s, 1), s.scale[1], s.bias[1]);
  }
  MC_DEVICE static void fragment(uint32_t w, const RowScales& s, uint32_t* a, Tag<BF16>) {
    a[0] = convert(w & 0x003c003cu, s.scale[0], s.bias[0]);
    a[1] = convert((w >> 4) & 0x003c003cu, s.scale[1], s.bias[1]);
    a[2] = convert(rotate_right(w, 8) & 0x003c003cu, s.scale[0], s.bias[0]);
    a[3] = convert(rotate_right(w, 12) & 0x003c003cu, s.scale[1], s.bias[1]);
  }
};

}  // namespace marlin_cutlass
