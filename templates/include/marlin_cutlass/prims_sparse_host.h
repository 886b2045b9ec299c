// Host side of the sparse instructions (prims_sparse.cuh): what the emulator offers under the same names.
#pragma once
#include "marlin_cutlass/prims_host.h"

extern "C" void emu_mma_sparse_m16n8k32(bool bf16, int selector, float* d, const uint32_t* a, const uint32_t* b, const uint32_t* metadata);

namespace marlin_cutlass {

template <class E, int kSelector>
MC_DEVICE void mma_sparse_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
  emu_mma_sparse_m16n8k32(IsBf16<E>::value, kSelector, d, a, b, &metadata);
}

}  // namespace marlin_cutlass
