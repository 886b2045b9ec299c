// Sparse tensor core instructions (sm_80 and later), beside prims.cuh.
#pragma once
#include "marlin_cutlass/prims.cuh"
#if defined(__CUDACC__)

namespace marlin_cutlass {

template <class E> struct SparseType;
template <> struct SparseType<F16> { static constexpr bool kBf16 = false; };
template <> struct SparseType<BF16> { static constexpr bool kBf16 = true; };

// d[16 x 8] += a[16 x 32] * b[32 x 8] with fp32 sums, where a keeps two of each four along its 32. a: the kept values as a 16 x 16 matrix in
// the fragment order of m16n8k16. b: two such operands, depths 0..15 and 16..31. metadata: lanes 4r + 2s and 4r + 2s + 1, s being
// kSelector, hold rows r (low half) and r + 8 (high half) of depths 0..15 and 16..31: four bits for each four, two places in rising order.
template <class E, int kSelector>
MC_DEVICE void mma_sparse_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
  static_assert(kSelector == 0 || kSelector == 1, "lanes 0 and 1 or 2 and 3 of each four");
  if constexpr (SparseType<E>::kBf16) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(kSelector));
  } else {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(kSelector));
  }
}

}  // namespace marlin_cutlass
#else
#include "marlin_cutlass/prims_sparse_host.h"
#endif
