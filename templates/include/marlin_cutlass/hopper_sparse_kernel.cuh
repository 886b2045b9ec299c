// Hopper family over 2:4-sparse weights (sm_90a): the same pipeline, with wgmma.sp in the place of wgmma.
#pragma once
#include "marlin_cutlass/hopper_kernel.cuh"

namespace marlin_cutlass {

template <class Element, int kGroup, bool kZeroPoints, int kRows, int kColumns, int kDepth, int kWarpgroupsAlongN, int kWarpgroupsAlongK,
          int kPipeline, Decomposition kPartition, int kParts, int kCtas, int kSharers>
using HopperSparseConfig = HopperConfig<Element, kGroup, kZeroPoints, kRows, kColumns, kDepth, kWarpgroupsAlongN, kWarpgroupsAlongK, kPipeline,
                                        kPartition, kParts, kCtas, kSharers, /*kSparse=*/true>;

}  // namespace marlin_cutlass
