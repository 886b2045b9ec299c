// Hopper's sparse tensor instruction, beside prims_hopper.cuh.
#pragma once
#include "marlin_cutlass/prims_hopper.cuh"
#if defined(__CUDACC__)
#include "cute/arch/mma_sm90_gmma_sparse.hpp"

namespace marlin_cutlass {

template <class E, int kN> struct WgmmaSparseAtom;
#define MC_WGMMA_ATOM(n)                                                                                                                 \
  template <> struct WgmmaSparseAtom<F16, n> {                                                                                           \
    using type = cute::SM90::GMMA::SPARSE::GMMA_64x##n##x32_F32F16F16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;         \
  };                                                                                                                                     \
  template <> struct WgmmaSparseAtom<BF16, n> {                                                                                          \
    using type = cute::SM90::GMMA::SPARSE::GMMA_64x##n##x32_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;       \
  };
MC_WGMMA_ATOM(8) MC_WGMMA_ATOM(16) MC_WGMMA_ATOM(24) MC_WGMMA_ATOM(32) MC_WGMMA_ATOM(48) MC_WGMMA_ATOM(64)
MC_WGMMA_ATOM(96) MC_WGMMA_ATOM(128) MC_WGMMA_ATOM(192) MC_WGMMA_ATOM(256)
#undef MC_WGMMA_ATOM

template <class Atom, int kCount, int... kIndex>
MC_DEVICE void wgmma_sparse_expand(float (&d)[kCount], const uint32_t* a, uint32_t places, uint64_t b, int accumulate, Indices<kIndex...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., places, static_cast<cute::SM90::GMMA::ScaleOut>(accumulate));
}
template <class E, int kN>
MC_DEVICE void wgmma_sparse_m64k32(float (&d)[kN / 2], const uint32_t* a, const uint32_t& places, uint64_t b, int accumulate) {
  wgmma_sparse_expand<typename WgmmaSparseAtom<E, kN>::type>(d, a, places, b, accumulate, typename MakeIndices<kN / 2>::type{});
}

}  // namespace marlin_cutlass
#else
#include "marlin_cutlass/prims_hopper_sparse_host.h"
#endif
