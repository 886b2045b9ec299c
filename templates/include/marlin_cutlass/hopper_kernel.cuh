// Hopper family (sm_90a): C^T = W^T A^T with the packed weights as wgmma's register operand. One producer warp streams weights, one streams
// activations, two may sum these; consumer warpgroups dequantise and multiply. Weights start before the previous kernel has ended (programmatic
// dependent launch).
#pragma once
#include "marlin_cutlass/epilogue.cuh"
#include "marlin_cutlass/hopper_config.cuh"
#include "marlin_cutlass/hopper_mainloop.cuh"
#include "marlin_cutlass/hopper_producer.cuh"
#include "marlin_cutlass/hopper_reduce.cuh"
#include "marlin_cutlass/prims_hopper.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// Of one stage, for what the producers bring.
template <class C> MC_DEVICE void initialise_stage(smem_addr_t base, int stage) {
  mbarrier_init(C::full(base, stage), C::kActivationSums ? 1 + 2 * kReleaseLanes : 2);  // weights, and activations or the two warps that sum them
  if constexpr (C::kActivationSums) mbarrier_init(C::activations(base, stage), 1);
}

// By the lane that streams weights, whose first stage is `first`: what it and the lane that streams activations begin with (kAskEarly).
template <class C> MC_DEVICE void initialise_first_barriers(smem_addr_t base, int first) {
#pragma unroll
  for (int s = 0; s < C::kEarlyStages; ++s) {
    if constexpr (C::kFirstInHalves) mbarrier_init(C::first_half(base, first + s), 2);  // weights, activations
    else initialise_stage<C>(base, first + s);
  }
  if constexpr (C::kReadyBarrier) mbarrier_init(C::ready(base, first), 1);
  mbarrier_init_fence();
}

// The others, by one thread of a consumer warp (20 cycles a barrier; one lane each takes 60, four warps are no faster).
template <class C> MC_DEVICE void initialise_barriers(smem_addr_t base, uint32_t rank) {
  constexpr int kDone = C::kFirstInHalves ? 0 : C::kEarlyStages * C::kProducers;  // stages that have theirs from the producers
  if (base & 1023u) trap();  // the swizzle is a function of the address
  for (int s = 0; s < C::kStages; ++s) {
    if (s >= kDone) initialise_stage<C>(base, s);
    mbarrier_init(C::empty(base, s), C::kReleases * C::kWarpgroupsN);  // of one k group
  }
  if constexpr (C::kCluster)
    for (int w = 0; w < C::kWarpgroupsN; ++w) mbarrier_init(C::received(base, w), 1);
  if constexpr (C::kPartialStages > 0) mbarrier_init(C::handed_over(base), 128 * C::kWarpgroupsN);
  if constexpr (C::kMulticast > 1)
    for (int s = 0; s < C::kStages; ++s) mbarrier_init(C::cluster_empty(base, s), C::kMulticast);
  mbarrier_init_fence();
  if constexpr (C::kCluster) arm_receive_barriers<C>(base, rank);
}

// Stages of a run of `steps` that starts at ring stage `first` and belong to k group `group`.
template <class C> MC_DEVICE int steps_of_group(int first, int steps, int group) {
  if constexpr (C::kWarpgroupsK == 1) return steps;
  const int offset = (group - first % C::kWarpgroupsK + C::kWarpgroupsK) % C::kWarpgroupsK;
  return steps > offset ? (steps - offset + C::kWarpgroupsK - 1) / C::kWarpgroupsK : 0;
}

// First column of this warp's atom in row block `r` of a tile that starts at column block `first_block`.
template <class C> MC_DEVICE int atom_column(int first_block, int warpgroup_n, int r) {
  return (first_block + warpgroup_n * C::kRowBlocks + r) * kBlockColumns + (warp_index() & 3) * 16;
}

// Row block `r` of row tile `m`.
template <class C, Store kStore>
MC_DEVICE void store_rows_as(const GemmParams& p, HopperMainloop<C>& loop, ColumnFactors f, int r, int m, int column, uint32_t rank) {
  constexpr int kAtoms = C::kMTile / 8;
  AtomStores<typename C::Element, kStore> atoms(p, C::first_row(p, m), m * C::kMTile, column, lane_index());
#pragma unroll
  for (int owner = 0; owner < C::kSplit; ++owner) {
    if (owner != static_cast<int>(rank)) continue;
    // All transposes ahead of the stores: they have a latency of some 30 cycles.
    U32x2 v[kAtoms];
#pragma unroll
    for (int i = 0; i < kAtoms; ++i)
      if (chunk_owner<C>(r * kAtoms + i) == owner) v[i] = finish_atom<typename C::Element>(&loop.acc[r][4 * i], f);
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) {
      if (chunk_owner<C>(r * kAtoms + i) == owner) atoms.store(v[i]);
      else atoms.skip();
    }
  }
}
// One path for each kind of store: what runs is half as long, and comes from instruction memory cold.
template <class C>
MC_DEVICE void store_rows(const GemmParams& p, HopperMainloop<C>& loop, ColumnFactors f, int r, int m, int column, uint32_t rank) {
  load_column_bias<typename C::Element>(p, column, lane_index(), f);
  if (p.vector_store) store_rows_as<C, Store::kVectors>(p, loop, f, r, m, column, rank);
  else if (p.swiglu) store_rows_as<C, Store::kSwiglu>(p, loop, f, r, m, column, rank);
  else store_rows_as<C, Store::kElements>(p, loop, f, r, m, column, rank);
}

template <class C, class Loop> MC_DEVICE void consume(const GemmParams& p, smem_addr_t base, Loop work, uint32_t rank) {
  const int warpgroup = warp_index() >> 2, group_n = warpgroup % C::kWarpgroupsN, group_k = warpgroup / C::kWarpgroupsN;
  wait_for_previous_grid();
  HopperMainloop<C> loop(base, group_n, group_k);
  int first = 0;  // ring stage, modulo the k groups, at which the segment starts
  bool reused = false;
  Segment s;
  while (work.next(s)) {
    const int steps = s.k_end - s.k_begin, first_block = C::first_block(tile_index(p, s.tile).n);
    ColumnFactors factors[C::kRowBlocks];
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) factors[r] = load_column_scales(p, atom_column<C>(first_block, group_n, r), lane_index());
    loop.run(steps_of_group<C>(first, steps, group_k));
    if constexpr (C::kRunningScale) {  // sums are in units of the last group's scale
#pragma unroll
      for (int i = 0; i < 2; ++i) factors[0].scale[i] *= loop.unit.row[i];
    }
    first = (first + steps) % C::kWarpgroupsK;
    bool keeps = true;
    if constexpr (C::kWarpgroupsK > 1) {
      keeps = reduce_k_groups<C>(loop.acc, base, group_n, group_k, reused);
      reused = true;
    }
    if constexpr (C::kPartialStages > 0) {
      const int stages = partial_stages<C>(p, s);
      if (stages > 0) loop.add_partials(stages, first, group_n, group_k);
      first = (first + stages) % C::kWarpgroupsK;
      if (s.k_begin != 0) {
        if (keeps) hand_over<C>(p, loop.acc, base, group_n);
        keeps = false;
      }
    }
    if (!keeps) continue;
    if constexpr (C::kCluster) reduce_cluster<C>(loop.acc, base, group_n, rank);
    const TileIndex t = tile_index(p, s.tile);
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r)
      store_rows<C>(p, loop, factors[r], r, t.m, atom_column<C>(C::first_block(t.n), group_n, r), rank);
  }
}

// Item 0 or 1 of a warpgroup in a pass: its whole block, or its shares in the order of the sweep. Empty: k_begin == k_end.
template <class C> MC_DEVICE Segment hybrid_item(const GemmParams& p, int index, int item) {
  const int slot = warp_index() >> 2;
  const HybridPass pass = typename C::Hybrid{p}.pass(block_index(), index);
  if (slot < pass.whole) return {pass.first_block + slot, 0, item == 0 ? p.k_steps : 0};
  if (slot > pass.whole) return {0, 0, 0};
  return item == 0 ? Segment{pass.shared, pass.start, pass.start + pass.length0} : Segment{pass.shared + C::kMulticast, 0, pass.length1};
}

template <class C> MC_DEVICE void consume_hybrid(const GemmParams& p, smem_addr_t base) {
  wait_for_previous_grid();
  HopperMainloop<C> loop(base, warp_index() >> 2, 0);
  const int passes = typename C::Hybrid{p}.passes();
#pragma unroll 1
  for (int index = 0; index < passes; ++index) {
    const HybridPass pass = typename C::Hybrid{p}.pass(block_index(), index);
    int left = pass.steps;
#pragma unroll 1
    for (int item = 0; item < 2; ++item) {
      Segment s = hybrid_item<C>(p, index, item);
      if (s.k_begin == s.k_end) continue;
      const ColumnFactors factors = load_column_scales(p, atom_column<C>(s.tile, 0, 0), lane_index());
      loop.run(s.k_end - s.k_begin);
      left -= s.k_end - s.k_begin;
      if (s.k_begin != 0 || s.k_end != p.k_steps) {
        forget(index);  // computed again rather than kept in registers, or spilled, through the main loop
        s = hybrid_item<C>(p, index, item);
        if (!reduce_shares<C>(p, loop.acc, base, s, index, warp_index() >> 2)) continue;
      }
      store_rows<C>(p, loop, factors, 0, pass.m, atom_column<C>(s.tile, 0, 0), 0);
    }
    loop.skip(left);
    // A slot that left stages out must not look at a barrier that is still a phase behind.
    if (index + 1 < passes) named_barrier_sync(4, C::kConsumerThreads);
  }
}

template <class C> MC_DEVICE typename C::Work work_of(const GemmParams& p, uint32_t rank) {
  return typename C::Work(p, block_index(), static_cast<int>(rank));
}

// first: of its stages.
template <class C> MC_DEVICE void weights_warp(const GemmParams& p, smem_addr_t base, uint32_t rank, int first) {
  if constexpr (C::kMoveRegisters) registers_decrease<C::kProducerRegisters>();
  if constexpr (C::kDecomposition == Decomposition::kHybrid) produce_weights_hybrid<C>(p, base);
  else produce_weights<C>(p, base, work_of<C>(p, rank), first);
  warp_sync();
  if constexpr (C::kInCluster) cluster_wait_unaligned();
}

template <class C> MC_DEVICE void activations_warp(const GemmParams& p, const TensorMap& map_a, smem_addr_t base, uint32_t rank, int first) {
  if constexpr (C::kMoveRegisters) registers_decrease<C::kProducerRegisters>();
  if (lane_index() == 0) tensor_map_prefetch(&map_a);
  warp_sync();
  if constexpr (C::kDecomposition == Decomposition::kHybrid) produce_activations_hybrid<C>(p, map_a, base);
  else produce_activations<C>(p, map_a, base, work_of<C>(p, rank), first);
  warp_sync();
  if constexpr (C::kCluster) cluster_wait_unaligned();
}

// By two warps.
template <class C> MC_DEVICE void sum_activations(const GemmParams& p, smem_addr_t base, uint32_t rank) {
  ActivationSums<C> sums(base, warp_index() & 1);
  wait_for_previous_grid();  // asleep, not in a wait that counts its tries
  if constexpr (C::kDecomposition == Decomposition::kHybrid) {
    const typename C::Hybrid schedule{p};
    for (int index = 0; index < schedule.passes(); ++index) sums.run(schedule.steps(block_index(), index));
  } else {
    typename C::Work work = work_of<C>(p, rank);
    Segment s;
    while (work.next(s)) {
      sums.run(s.k_end - s.k_begin);
      sums.pass(partial_stages<C>(p, s));
    }
  }
  warp_sync();
}

// A producer warpgroup has four warps, since only whole warpgroups can give registers away. NOTE: each role has its own setmaxnreg, though the PTX
// ISA wants the same instruction of all warps of a warpgroup (.aligned). In SASS (nvcc 13.0) it is a give-back by each warp for itself, and every
// variant ran so on an H200; one instruction ahead of the roles makes ptxas serialise wgmma, or turn this wait into a predicated one.
template <class C> MC_DEVICE void spare_warp(const GemmParams& p, smem_addr_t base, uint32_t rank) {
  if constexpr (C::kMoveRegisters) registers_decrease<C::kProducerRegisters>();
  if constexpr (C::kActivationSums) sum_activations<C>(p, base, rank);
  if constexpr (C::kInCluster) cluster_wait_unaligned();
}

template <class C> MC_DEVICE void hopper_gemm(const TensorMap& map_a, const GemmParams& p) {
  constexpr int kConsumerWarps = C::kConsumerThreads / 32;
  const smem_addr_t base = smem_base();
  const uint32_t rank = C::kCluster ? cluster_rank() : 0u;
  const int warp = warp_index();
  launch_dependents();
  if (warp == 0) {
    if (elect_one()) initialise_barriers<C>(base, rank);
    warp_sync();
  }
  if constexpr (C::kAskEarly) {
#pragma unroll
    for (int i = 0; i < C::kProducers; ++i) {
      if (warp != kConsumerWarps + 2 * i) continue;
      if (elect_one()) initialise_first_barriers<C>(base, i);
      warp_sync();
    }
  }
  if constexpr (C::kInCluster) cluster_arrive();
#pragma unroll
  for (int i = 0; i < C::kProducers; ++i) {
    if (warp == kConsumerWarps + 2 * i) return weights_warp<C>(p, base, rank, i);
    if (warp == kConsumerWarps + 2 * i + 1) return activations_warp<C>(p, map_a, base, rank, i);
  }
  wait_for_barriers<C>();
  if (warp >= kConsumerWarps) return spare_warp<C>(p, base, rank);
  if constexpr (C::kMoveRegisters) registers_increase<C::kConsumerRegisters>();
  if constexpr (C::kMulticast > 1) cluster_wait();
  if constexpr (C::kDecomposition == Decomposition::kHybrid) consume_hybrid<C>(p, base);
  else consume<C>(p, base, work_of<C>(p, rank), rank);
}

}  // namespace marlin_cutlass
