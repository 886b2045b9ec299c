// Host side of Hopper's sparse tensor instruction (prims_hopper_sparse.cuh): what the emulator offers under the same name.
#pragma once
#include "marlin_cutlass/prims_hopper_host.h"

extern "C" void emu_wgmma_sparse_m64k32(bool bf16, int n, float* d, const uint32_t* a, const uint32_t* places, uint64_t b, int accumulate);

namespace marlin_cutlass {

template <class E, int kN>
MC_DEVICE void wgmma_sparse_m64k32(float (&d)[kN / 2], const uint32_t* a, const uint32_t& places, uint64_t b, int accumulate) {
  emu_wgmma_sparse_m64k32(IsBf16<E>::value, kN, d, a, &places, b, accumulate);
}

}  // namespace marlin_cutlass
