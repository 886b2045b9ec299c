// Hopper family (sm_90a): C^T = W^T A^T with the packed weights as wgmma's register operand. One producer warp streams weights, one streams
// activations; consumer warpgroups dequantise and multiply. Weights start before the previous kernel has ended (programmatic dependent launch).
#pragma once
#include "marlin_cutlass/epilogue.cuh"
#include "marlin_cutlass/hopper_config.cuh"
#include "marlin_cutlass/hopper_mainloop.cuh"
#include "marlin_cutlass/hopper_producer.cuh"
#include "marlin_cutlass/hopper_reduce.cuh"
#include "marlin_cutlass/prims_hopper.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

template <class C> MC_DEVICE void setup_barriers(smem_addr_t base, uint32_t rank) {
  if (thread_index() == C::kConsumerThreads) {
    if (base & 1023u) trap();  // the swizzle is a function of the address
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(C::full(base, s), 2);                       // weights and activations
      mbarrier_init(C::empty(base, s), 4 * C::kWarpgroupsN);    // the warps of one k group
    }
    for (int w = 0; w < C::kWarpgroupsN; ++w) mbarrier_init(C::received(base, w), 1);
    mbarrier_init_fence();
    if constexpr (C::kCluster) arm_receive_barriers<C>(base, rank);
  }
  if constexpr (C::kCluster) cluster_arrive();
  block_sync();
}

// Stages of a run of `steps` that starts at ring stage `first` and belong to k group `group`.
template <class C> MC_DEVICE int steps_of_group(int first, int steps, int group) {
  if constexpr (C::kWarpgroupsK == 1) return steps;
  const int offset = (group - first % C::kWarpgroupsK + C::kWarpgroupsK) % C::kWarpgroupsK;
  return steps > offset ? (steps - offset + C::kWarpgroupsK - 1) / C::kWarpgroupsK : 0;
}

template <class C> MC_DEVICE void store_tile(const GemmParams& p, HopperMainloop<C>& loop, int tile, int warpgroup_n, uint32_t rank) {
  const TileIndex t = tile_index(p, tile);
  const int lane = lane_index();
#pragma unroll
  for (int r = 0; r < C::kRowBlocks; ++r) {
    const int column = t.n * C::kNSm + (warpgroup_n * C::kRowBlocks + r) * kBlockColumns + (warp_index() & 3) * 16;
    const ColumnFactors f = load_column_factors<typename C::Element>(p, column, lane);
#pragma unroll
    for (int i = 0; i < C::kMTile / 8; ++i)
      if (owns_chunk<C>(r * (C::kMTile / 8) + i, rank))
        store_atom<typename C::Element>(p, &loop.acc[r][4 * i], f, t.m * C::kMTile + 8 * i, column, lane);
  }
}

template <class C, class Loop> MC_DEVICE void consume(const GemmParams& p, smem_addr_t base, Loop work, uint32_t rank) {
  const int warpgroup = warp_index() >> 2, group_n = warpgroup % C::kWarpgroupsN, group_k = warpgroup / C::kWarpgroupsN;
  wait_for_previous_grid();
  HopperMainloop<C> loop(base, group_n, group_k);
  int first = 0;  // ring stage, modulo the k groups, at which the segment starts
  bool reused = false;
  Segment s;
  while (work.next(s)) {
    const int steps = s.k_end - s.k_begin;
    loop.run(steps_of_group<C>(first, steps, group_k));
    first = (first + steps) % C::kWarpgroupsK;
    if constexpr (C::kWarpgroupsK > 1) {
      const bool keeps = reduce_k_groups<C>(loop.acc, base, group_n, group_k, reused);
      reused = true;
      if (!keeps) continue;
    }
    if constexpr (C::kDecomposition == Decomposition::kStreamK) {
      if (!reduce_ranges<C>(p, loop.acc, s, group_n)) continue;
    }
    if constexpr (C::kCluster) reduce_cluster<C>(loop.acc, base, group_n, rank);
    store_tile<C>(p, loop, s.tile, group_n, rank);
  }
}

template <class C> MC_DEVICE void hopper_gemm(const TensorMap& map_a, const GemmParams& p) {
  const smem_addr_t base = smem_base();
  const uint32_t rank = C::kCluster ? cluster_rank() : 0u;
  const int warp = warp_index();
  launch_dependents();
  if (thread_index() == C::kConsumerThreads + 32) tensor_map_prefetch(&map_a);
  setup_barriers<C>(base, rank);
  const WorkLoop<C::kDecomposition, C::kSplit> work(p, block_index(), static_cast<int>(rank));
  if (warp >= C::kConsumerThreads / 32) {
    if constexpr (C::kMoveRegisters) registers_decrease<C::kProducerRegisters>();
    if (warp == C::kConsumerThreads / 32) {
      if (elect_one()) produce_weights<C>(p, base, work);
    } else if (warp == C::kConsumerThreads / 32 + 1) {
      if (elect_one()) produce_activations<C>(p, map_a, base, work);
    }
    warp_sync();
    if constexpr (C::kCluster) cluster_wait_unaligned();
  } else {
    if constexpr (C::kMoveRegisters) registers_increase<C::kConsumerRegisters>();
    consume<C>(p, base, work, rank);
  }
}

}  // namespace marlin_cutlass
