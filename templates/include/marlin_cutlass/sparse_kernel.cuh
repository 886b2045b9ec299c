// Sparse family: the Ampere family's kernel over 2:4-sparse weights, whose products are mma.sp.
#pragma once
#include "marlin_cutlass/ampere_kernel.cuh"
#include "marlin_cutlass/sparse_mainloop.cuh"

namespace marlin_cutlass {

template <class Element, int kGroup, bool kZeroPoints, int kRows, int kColumns, int kDepth, int kWarpsAlongN, int kWarpsAlongK, int kPipeline,
          Decomposition kPartition, int kParts, int kCtas>
using SparseConfig = AmpereConfig<Element, kGroup, kZeroPoints, kRows, kColumns, kDepth, kWarpsAlongN, kWarpsAlongK, kPipeline, kPartition,
                                  kParts, kCtas, /*kSparseWeights=*/true>;

template <class C> MC_DEVICE void sparse_gemm(const GemmParams& p) { ampere_gemm<C, SparseMainloop<C>>(p); }

}  // namespace marlin_cutlass
