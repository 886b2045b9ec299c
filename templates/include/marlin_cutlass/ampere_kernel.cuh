// Ampere family: MARLIN's scheme for sm_80 and later. cp.async fills a ring of stages; warps along N and K dequantise and multiply with mma.sync;
// warps, then CTAs, add up; each tile is scaled and stored once.
#pragma once
#include "marlin_cutlass/ampere_loads.cuh"
#include "marlin_cutlass/ampere_mainloop.cuh"
#include "marlin_cutlass/ampere_reduce.cuh"
#include "marlin_cutlass/epilogue.cuh"

namespace marlin_cutlass {

// Scales and stores the share of a warp.
template <class C> class AmpereEpilogue {
 public:
  // Starts the loads of the column scales; they are first used after the main loop.
  MC_DEVICE AmpereEpilogue(const GemmParams& p, const TileIndex& t, const AmpereShare<C>& share, int warp_n, int lane)
      : p_(p), lane_(lane), row_(t.m * C::kMTile + share.row_group * 8),
        column_(t.n * C::kNSm + warp_n * C::kWarpColumns + share.atom * 16) {
#pragma unroll
    for (int i = 0; i < 2 * C::kShareAtoms; ++i) {
      const int column = column_of(i);
      factors_[i / 2].scale[i % 2] = column < p.n ? ld_global_f32(p.col_scale + column) : 0.f;
      factors_[i / 2].bias[i % 2] = 0.f;
    }
  }
  // NOTE: after the main loop. Its conversion to fp32 waits for the load at once, wherever it stands.
  MC_DEVICE void load_bias() {
    if (p_.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2 * C::kShareAtoms; ++i) {
      const int column = column_of(i);
      if (column < p_.n) factors_[i / 2].bias[i % 2] = ld_global_element<typename C::Element>(p_.bias, column);
    }
  }
  MC_DEVICE void store(const float (&acc)[C::kFragments][4]) const {
#pragma unroll
    for (int a = 0; a < C::kShareAtoms; ++a)
#pragma unroll
      for (int r = 0; r < C::kShareRowGroups; ++r)
        store_atom<typename C::Element>(p_, acc[a * C::kShareRowGroups + r], factors_[a], row_ + r * 8, column_ + a * 16, lane_);
  }

 private:
  // Column of fragment row lane/4 (even i) or lane/4 + 8 (odd i) of atom i / 2.
  MC_DEVICE int column_of(int i) const { return column_ + i / 2 * 16 + first_column(lane_) + i % 2 * 2; }

  const GemmParams& p_;
  int lane_, row_, column_;  // first row and column of the share
  ColumnFactors factors_[C::kShareAtoms];
};

template <class C, class Mainloop = AmpereMainloop<C>> MC_DEVICE void ampere_gemm(const GemmParams& p) {
  const smem_addr_t ring = smem_base(), ring_end = ring + C::kSharedBytes;
  const int warp = warp_index(), lane = lane_index();
  const int warp_n = warp % C::kWarpsN, warp_k = warp / C::kWarpsN;
  WorkLoop<C::kDecomposition, C::kSplit> work(p, block_index(), block_index() % C::kSplit);

  // Fill the ring.
  AmpereLoader<C> loader(p, work);
#pragma unroll 1
  for (int s = 0; s < C::kStages; ++s) loader.issue(ring + s * C::kStageBytes);
  Mainloop mainloop(warp_n, warp_k, lane);
  const AmpereShare<C> share(warp_k);

  smem_addr_t slot = ring;
  for (Segment s; work.next(s);) {
    if (s.k_begin == s.k_end) continue;  // a fixed split of fewer k steps than ranks
    AmpereEpilogue<C> epilogue(p, tile_index(p, s.tile), share, warp_n, lane);
    cp_async_wait<C::kStages - 1>();
    block_sync();
    mainloop.clear();
    mainloop.load(slot, 0);
    smem_addr_t used = slot;
    for (int k = s.k_begin; k < s.k_end; ++k) {
      used = slot;
#pragma unroll
      for (int batch = 0; batch < C::kBatches; ++batch) {
        const auto codes = mainloop.take(batch);
        if (batch + 1 < C::kBatches) {
          mainloop.load(slot, batch + 1);
        } else {
          // All reads of this stage are issued: one barrier publishes the next stage and frees this slot.
          slot = slot + C::kStageBytes == ring_end ? ring : slot + C::kStageBytes;
          cp_async_wait<C::kStages - 2>();
          block_sync();
          if (k + 1 < s.k_end) {
            loader.issue(used);
            mainloop.load(slot, 0);
          }
        }
        mainloop.multiply(codes, batch);
      }
    }

    epilogue.load_bias();
    // The slot of the last stage serves the warps' reduction, then joins the ring again.
    AmpereWarpReduction<C>::run(mainloop.acc, used, warp, lane);
    if constexpr (C::kWarpsK > 1) block_sync();
    loader.issue(used);
    AmpereCtaReduction<C> reduction(p, share, warp_n, lane);
    if constexpr (C::kCrossCta)
      if (!reduction.run(mainloop.acc, s)) continue;
    if (share.any) epilogue.store(mainloop.acc);
    if constexpr (C::kCrossCta) reduction.clear_flags();
  }
}

}  // namespace marlin_cutlass
