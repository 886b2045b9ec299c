// The producer warps: one streams packed weights, one streams activations, into the same ring of stages; two may sum the activations.
#pragma once
#include "marlin_cutlass/hopper_config.cuh"
#include "marlin_cutlass/hopper_reduce.cuh"
#include "marlin_cutlass/prims_hopper.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// Named barriers: the mbarriers may be used. Warps that stream activations do not take part where they begin early: they may wait for the previous
// grid first, and find out by an mbarrier of their own (ready) or the cluster's barrier.
constexpr int kBarriersReady = 8, kFirstBarriersReady = 9;
template <class C> MC_DEVICE void wait_for_barriers() {
  named_barrier_sync_unaligned(kBarriersReady, C::kThreads - (C::kAskEarly ? 32 * C::kProducers : 0));
}
// Those of the stages that producers `first` begin with, by its two warps.
MC_DEVICE void wait_for_first_barriers(int first) { named_barrier_sync_unaligned(kFirstBarriersReady + first, 64); }

// Address of stage `step` of a column block.
template <class C> MC_DEVICE const uint8_t* block_source(const GemmParams& p, int block, int step) {
  constexpr uint32_t kUnit = 128;  // blocks are multiples of 128 bytes: 32-bit arithmetic reaches 256 GiB
  const uint32_t index = static_cast<uint32_t>(block) * p.k_blocks + step * C::kDepthBlocks;
  return p.weight + static_cast<uint64_t>(index * (C::kBlockBytes / kUnit)) * kUnit;
}

// Where this warp's next stage of each column block of a tile lies, `ahead` stages behind the first.
template <class C> struct BlockSources {
  const uint8_t* at[C::kColumnBlocks];

  MC_DEVICE void find(const GemmParams& p, const Segment& s, int ahead) {
    const int first = C::first_block(tile_index(p, s.tile).n);
#pragma unroll
    for (int i = 0; i < C::kColumnBlocks; ++i) {
      const int block = first + i < p.n_blocks ? first + i : p.n_blocks - 1;  // past the edge: read, never stored
      at[i] = block_source<C>(p, block, s.k_begin + ahead);
      forget(at[i]);  // here, ahead of the wait for the barriers
    }
  }
  MC_DEVICE void advance(int stages) {
#pragma unroll
    for (int i = 0; i < C::kColumnBlocks; ++i) at[i] += stages * C::kProducers * C::kBlockRowBytes;
  }
  MC_DEVICE const uint8_t* next(int i) {
    const uint8_t* source = at[i];
    at[i] += C::kProducers * C::kBlockRowBytes;
    return source;
  }
};

// Until a stage is free to be filled, for the first time or again. Weights do not depend on the previous kernel and start before it has ended; once
// the ring is full their warp sleeps until then, so that a long previous kernel is not mistaken for a stuck pipeline.
//
// The first filling needs no wait, but the wait's cycles (some 300 a stage, when each try was counted) pace the requests: without it the later stages
// of all SMs get in the way of the first ones (H200: up to 9 % more time). 600 cycles a stage cost 8-14 %, except with the large stages of kStartPause.
template <class C> MC_DEVICE void wait_for_stage(smem_addr_t base, const RingPosition<C::kStages>& ring) {
  mbarrier_wait(C::empty(base, ring.stage), ring.phase ^ 1);
}
template <class C> MC_DEVICE void wait_for_weight_stage(smem_addr_t base, const RingPosition<C::kStages>& ring) {
  if (ring.stage / C::kProducers == 0 && ring.phase == 1) wait_for_previous_grid();  // cheap once that grid has ended
  if (C::kStartPause > 0 && !ring.reused && ring.stage > 0) spin(C::kStartPause);
  wait_for_stage<C>(base, ring);
}

// Stream-K: the partial sums of the tile of `s` into the next stages of the ring; their counter is zero again for the next launch.
template <class C>
MC_DEVICE void fetch_partials(const GemmParams& p, smem_addr_t base, const Segment& s, RingPosition<C::kStages>& ring, uint64_t policy) {
  const int worker = block_index() / C::kMulticast, last = StreamRanges(p, C::kMulticast).end_of_sharers(s.tile, worker);
  uint32_t* counter = partials_counter(p, block_index());
  wait_flag(counter, last - worker - 1);
  st_relaxed(counter, 0u);
  fence_proxy_async_global();  // ordinary stores, read by bulk copies
#pragma unroll 1
  for (int w = worker + 1; w < last; ++w) {
    const int cta = w * C::kMulticast + block_index() % C::kMulticast;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(partial_of(p, cta, C::kPartialBytes));
#pragma unroll 1
    for (int left = C::kPartialBytes; left > 0;) {
      constexpr int kStageBytes = C::kStageChunks * C::kChunkRowBytes;
      const int bytes = left < kStageBytes ? left : kStageBytes;
      wait_for_stage<C>(base, ring);
      const smem_addr_t full = C::full(base, ring.stage);
      mbarrier_arrive_expect(full, bytes);
      bulk_load(C::partial(base, ring.stage), from, bytes, full, policy);
      from += bytes;
      left -= bytes;
      ring.advance();
    }
  }
}

// How many stages a producer warp asks for early, of the first tile's `steps` from its own first on.
template <class C> MC_DEVICE int early_stages(int steps) {
  const int left = steps < 0 ? 0 : steps;
  return left < C::kEarlyStages ? left : C::kEarlyStages;
}

// The weights of the first `stages` stages from `first` on: half `kHalf` of each, or all (kHalf = -1).
template <class C, int kHalf> MC_DEVICE void load_first_weights(smem_addr_t base, const BlockSources<C>& from, int first, int stages, uint64_t policy) {
  constexpr int kBytes = kHalf < 0 ? C::kBlockRowBytes : C::kBlockRowBytes / 2, kOffset = kHalf > 0 ? kBytes : 0;
  smem_addr_t there = kHalf == 0 ? C::first_half(base, first) : C::full(base, first);
  smem_addr_t dst = base + C::kWeightOffset + first * C::kWeightBytes + kOffset;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    mbarrier_arrive_expect(there, C::kColumnBlocks * kBytes);
#pragma unroll
    for (int i = 0; i < C::kColumnBlocks; ++i)
      bulk_load(dst + i * C::kBlockRowBytes, from.at[i] + s * C::kBlockRowBytes + kOffset, kBytes, there, policy);
    there += 8;
    dst += C::kWeightBytes;
  }
}

// By a whole warp; one lane of it goes on. Where the first stage lies is found out while other warps make barriers. Of kProducers warps each
// takes every kProducers-th stage, `first` being its first.
template <class C, class Loop> MC_DEVICE void produce_weights(const GemmParams& p, smem_addr_t base, Loop loop, int first) {
  const uint64_t policy = evict_first_policy();
  RingPosition<C::kStages> ring{first};
  BlockSources<C> from;
  Segment s{};
  bool more = loop.next(s);
  from.find(p, s, first);
  const int early = early_stages<C>(s.k_end - s.k_begin - first);
  if constexpr (C::kAskEarly) {
    if constexpr (C::kReadyBarrier) wait_for_first_barriers(first);
    if (elect_one()) load_first_weights<C, C::kFirstInHalves ? 0 : -1>(base, from, first, early, policy);
    warp_sync();
  }
  wait_for_barriers<C>();
  if (!elect_one()) return;
  if constexpr (C::kAskEarly) {
    if constexpr (C::kReadyBarrier) mbarrier_arrive(C::ready(base, first));
    if constexpr (C::kFirstInHalves) load_first_weights<C, 1>(base, from, first, early, policy);
    from.advance(early);
    ring.advance(early * C::kProducers);
  }
  // Stream-K: stages until the partial sum of this CTA is reported. That happens ahead of the stage that reuses the slot of the first one behind
  // the cut tile's: when consumers free that slot they have stored the sum, so that waiting costs little. The ring has been once around by then,
  // hence the previous grid has ended (wait_for_weight_stage).
  int until_report = 0, cut_tile = 0;
  int ahead = first + early * C::kProducers;  // stages before this warp's next
  while (more) {
    int left = s.k_end - s.k_begin - ahead;
    for (; left > 0; left -= C::kProducers) {
      if (C::kPartialStages > 0 && until_report > 0 && --until_report == 0) report_partial<C>(p, base, cut_tile);
      wait_for_weight_stage<C>(base, ring);
      const smem_addr_t full = C::full(base, ring.stage);
      mbarrier_arrive_expect(full, C::kColumnBlocks * C::kBlockRowBytes);
      const smem_addr_t dst = base + C::kWeightOffset + ring.stage * C::kWeightBytes;
#pragma unroll
      for (int i = 0; i < C::kColumnBlocks; ++i) bulk_load(dst + i * C::kBlockRowBytes, from.next(i), C::kBlockRowBytes, full, policy);
      ring.advance(C::kProducers);
    }
    ahead = C::kProducers > 1 ? -left : 0;
    const Segment done = s;
    more = loop.next(s);
    if constexpr (C::kPartialStages > 0) {
      if (done.k_begin != 0) {
        until_report = C::kStages + 1;
        cut_tile = done.tile;
      }
      const bool adds = done.k_begin == 0 && done.k_end != p.k_steps;
      if (until_report > 0 && (adds || !more)) {
        wait_for_previous_grid();
        report_partial<C>(p, base, cut_tile);
        until_report = 0;
      }
      if (adds) {
        wait_for_previous_grid();
        fetch_partials<C>(p, base, done, ring, policy);
      }
    }
    from.find(p, s, ahead);
  }
}

// Until the stage is free in every CTA of the cluster that shares activations. kFirst: a stage that is asked for early, which is free in this one.
// With kFreeAtFirst nobody reports or waits for its first use, so that the phases of its barrier begin with the second.
template <class C, bool kFirst = false> MC_DEVICE void wait_for_free_stage(smem_addr_t base, const RingPosition<C::kStages>& ring) {
  if constexpr (!kFirst) wait_for_stage<C>(base, ring);
  if constexpr (C::kMulticast > 1) {
    if (C::kFreeAtFirst && (kFirst || !ring.reused)) return;
    const smem_addr_t free = C::cluster_empty(base, ring.stage);
#pragma unroll
    for (int r = 0; r < C::kMulticast; ++r) mbarrier_arrive_remote(free, r);
    mbarrier_wait(free, C::kFreeAtFirst ? ring.phase ^ 1 : ring.phase);
  }
}

template <class C> MC_DEVICE smem_addr_t activations_full(smem_addr_t base, int stage) {
  return C::kActivationSums ? C::activations(base, stage) : C::full(base, stage);
}

// Where a stage of activations comes from.
struct ActivationRows {
  int row, rows, step;  // the first row, how many, the k step
};

// Panels of a stage, each 64 deep: `begin` to `end`, those of its second half reported to `second`. A box holds a whole stage, or a CTA's part of
// it; of fewer rows than the tile has, one panel. Depth outside A arrives as zeros and counts its bytes.
template <class C>
MC_DEVICE void load_panels(const TensorMap& map_a, smem_addr_t stage, const ActivationRows& a, int begin, int end, smem_addr_t first, smem_addr_t second) {
  constexpr int kPanels = C::kKSm / 64;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const smem_addr_t dst = stage + i * (C::kMTile * 128), there = i < kPanels / 2 ? first : second;
    if constexpr (C::kMulticast == 1) tensor_load_3d(dst, &map_a, 0, a.row, a.step * kPanels + i, there);
    else tensor_load_3d_multicast(dst, &map_a, 0, a.row, a.step * kPanels + i, there, (1 << C::kMulticast) - 1);
  }
}

// One stage of activations. In a cluster every CTA loads its part of the stage for all of them, once the stage is free in all. kFirst: a stage that
// is asked for early, in halves where those are in use: without multicast, the first of them, or all of the stage if one box holds it.
template <class C, bool kFirst = false>
MC_DEVICE void load_activations(const TensorMap& map_a, smem_addr_t base, const RingPosition<C::kStages>& ring, const ActivationRows& a) {
  constexpr bool kHalves = kFirst && C::kFirstInHalves;
  constexpr int kPanels = C::kKSm / 64, kPart = kPanels / C::kMulticast;
  const smem_addr_t stage = base + ring.stage * C::kActivationBytes, second = activations_full<C>(base, ring.stage);
  const smem_addr_t first = kHalves ? C::first_half(base, ring.stage) : second;
  const bool one_box = a.rows == C::kMTile;
  wait_for_free_stage<C, kFirst>(base, ring);
  if constexpr (C::kMulticast == 1) {
    mbarrier_arrive_expect(first, a.rows * (kHalves && !one_box ? kPanels * 64 : kPanels * 128));
    if (one_box) tensor_load_3d(stage, &map_a, 0, a.row, a.step * kPanels, first);
    else load_panels<C>(map_a, stage, a, 0, kHalves ? kPanels / 2 : kPanels, first, second);
  } else {
    const int begin = static_cast<int>(cluster_rank()) * kPart;
    mbarrier_arrive_expect(first, a.rows * (kHalves ? kPanels * 64 : kPanels * 128));
    if constexpr (kHalves) mbarrier_arrive_expect(second, a.rows * (kPanels * 64));
    load_panels<C>(map_a, stage, a, begin, begin + (one_box ? 1 : kPart), first, second);
  }
}
// What load_activations leaves of a stage that is asked for early in halves, once all barriers are there.
template <class C>
MC_DEVICE void load_second_half(const TensorMap& map_a, smem_addr_t base, int stage, const ActivationRows& a) {
  constexpr int kPanels = C::kKSm / 64;
  const smem_addr_t full = C::full(base, stage);
  if (a.rows == C::kMTile) return mbarrier_arrive(full);
  mbarrier_arrive_expect(full, a.rows * (kPanels * 64));
  load_panels<C>(map_a, base + stage * C::kActivationBytes, a, kPanels / 2, kPanels, full, full);
}

// As produce_weights.
template <class C, class Loop>
MC_DEVICE void produce_activations(const GemmParams& p, const TensorMap& map_a, smem_addr_t base, Loop loop, int first) {
  forget(base);  // kept in a register: computed again it waits for a special register
  RingPosition<C::kStages> ring{first};
  Segment s{};
  bool more = loop.next(s);
  ActivationRows a{C::first_row(p, tile_index(p, s.tile).m), C::rows_loaded(p), 0};
  forget(a.row);
  if constexpr (C::kReadyBarrier) wait_for_first_barriers(first);
  if constexpr (!C::kAskEarly) wait_for_barriers<C>();
  if constexpr (C::kMulticast > 1) cluster_wait_unaligned();  // all barriers of all its CTAs are there
  if (!elect_one()) return;
  wait_for_previous_grid();
  const int early = early_stages<C>(s.k_end - s.k_begin - first);
  if constexpr (C::kAskEarly) {
    for (int i = 0; i < early; ++i) {
      a.step = s.k_begin + first + i;
      load_activations<C, true>(map_a, base, ring, a);
      ring.advance(C::kProducers);
    }
    if constexpr (C::kReadyBarrier) {
      mbarrier_wait(C::ready(base, first), 0);
      if constexpr (C::kFirstInHalves) {
        for (int i = 0; i < early; ++i) {
          a.step = s.k_begin + i;
          load_second_half<C>(map_a, base, i, a);
        }
      }
    }
  }
  int ahead = first + early * C::kProducers;
  while (more) {
    for (a.step = s.k_begin + ahead; a.step < s.k_end; a.step += C::kProducers) {
      load_activations<C>(map_a, base, ring, a);
      ring.advance(C::kProducers);
    }
    ahead = C::kProducers > 1 ? a.step - s.k_end : 0;
    for (int left = partial_stages<C>(p, s); left > 0; --left) {  // these bring no activations
      wait_for_free_stage<C>(base, ring);
      mbarrier_arrive(activations_full<C>(base, ring.stage));
      ring.advance();
    }
    more = loop.next(s);
    a.row = C::first_row(p, tile_index(p, s.tile).m);
  }
}

// Sums of the activations of each group, by two warps that share the groups of a stage. A stage is full once both have reported it and its weights
// are there. (With its own stages for each warp there are fewer waits, but sums come later. H200: up to 3 % slower.)
template <class C> struct ActivationSums {
  using E = typename C::Element;
  using D = typename C::Dequant;
  static constexpr bool kEight = C::kMTile == 8;  // rows: 32 deep are 16 "rows" of 16 then
  static constexpr int kSteps = C::kGroupSize / (kEight ? 32 : 16);
  // Accumulators: each product waits behind those of the consumers. Hybrid kernels have no registers for four.
  static constexpr int kChains = C::kDecomposition == Decomposition::kHybrid || kSteps < 4 ? 2 : 4;
  static constexpr uint32_t kOnes = std::is_same<E, F16>::value ? 0x3c003c00u : 0x3f803f80u;

  static constexpr int kGroupBytes = C::kGroupSize * C::kMTile * 2;
  static_assert(C::kStageGroups % 2 == 0, "two warps share the groups of a stage");

  MC_DEVICE ActivationSums(smem_addr_t base, int warp) : base_(base) {
    const int lane = lane_index(), matrix = lane >> 3;
    const int unit = kEight ? matrix : matrix >> 1;  // of 16 bytes, in the first step
    offset_ = (lane & 7) * 128 + (kEight ? 0 : (matrix & 1) * 1024) + ((unit ^ (lane & 7)) << 4) + warp * kGroupBytes;
    // Four lanes have the same sums: for rows r and r + 8 of the activations, and both kinds of rows of a fragment.
    to_ = warp * C::kGroupSumBytes + (lane >> 2) * 4 + (lane & 1) * 32 + (lane & 2) * (C::kMTile * 2);
  }

  // Of the next `steps` stages.
  MC_DEVICE void run(int steps) {
    for (; steps > 0; --steps) {
      mbarrier_wait(C::activations(base_, ring_.stage), ring_.phase);
#pragma unroll
      for (int group = 0; group < C::kStageGroups; group += 2) sum(group);
      warp_sync();
      if (kReleaseLanes > 1 || lane_index() == 0) mbarrier_arrive(C::full(base_, ring_.stage));
      ring_.advance();
    }
  }
  // Stages without activations.
  MC_DEVICE void pass(int stages) {
    for (; stages > 0; --stages) {
      mbarrier_wait(C::activations(base_, ring_.stage), ring_.phase);
      if (kReleaseLanes > 1 || lane_index() == 0) mbarrier_arrive(C::full(base_, ring_.stage));
      ring_.advance();
    }
  }

 private:
  // Of group `group`, or the one behind it. Products with ones: every column of the accumulator is the sum.
  MC_DEVICE void sum(int group) {
    constexpr int kStepUnits = kEight ? 4 : 2, kAhead = 2;
    const uint32_t ones[2] = {kOnes, kOnes};
    const smem_addr_t rows = base_ + ring_.stage * C::kActivationBytes + group * kGroupBytes;
    float d[kChains][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += kAhead) {
      uint32_t a[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int unit = (step + i) * kStepUnits;
        uint32_t offset = offset_;
        forget(offset);  // or those of all units are kept in registers, of which there are few
        ldmatrix_x4(a[i], rows + unit / 8 * (C::kMTile * 128) + (offset ^ (unit % 8 << 4)));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) mma_m16n8k16<E>(d[(step + i) % kChains], a[i], ones);
    }
    float low = 0.f, high = 0.f;  // rows r and r + 8
#pragma unroll
    for (int i = 0; i < kChains; ++i) low += d[i][0], high += d[i][2];
    const int lane = lane_index();
    const bool second = (lane & 1) != 0, other = (lane & 2) != 0;
    const float factor = C::kZeros ? 1.f : other ? -D::kHighOffset : -D::kLowOffset;
    const float value = (kEight ? low + high : second ? high : low) * factor;
    if (!(kEight && second) && !(C::kZeros && other)) st_shared_f32(C::sums(base_, ring_.stage) + group * C::kGroupSumBytes + to_, value);
  }

  smem_addr_t base_;
  uint32_t offset_;  // of this lane's row and unit in the first step
  uint32_t to_;      // of its sum
  RingPosition<C::kStages> ring_;
};

// A slot without a block in a stage does not wait for it: the producer arrives in its place.
template <class C> MC_DEVICE void produce_weights_hybrid(const GemmParams& p, smem_addr_t base) {
  const uint64_t policy = evict_first_policy();
  RingPosition<C::kStages> ring;
  const typename C::Hybrid schedule{p};
  HybridPass pass = schedule.pass(block_index(), 0);
  forget(pass.start);  // here, ahead of the wait for the barriers
  forget(pass.shared);
  wait_for_barriers<C>();
  if (!elect_one()) return;
#pragma unroll 1
  for (int index = 0; index < schedule.passes();) {
    int step = pass.start;
#pragma unroll 1
    for (int j = 0; j < pass.steps; ++j) {
      wait_for_weight_stage<C>(base, ring);
      const smem_addr_t full = C::full(base, ring.stage), empty = C::empty(base, ring.stage);
      const int blocks = pass.whole + (j < pass.length0 + pass.length1);
      if (blocks < C::kColumnBlocks) mbarrier_arrive_many(empty, C::kReleases * (C::kColumnBlocks - blocks));
      mbarrier_arrive_expect(full, blocks * C::kBlockRowBytes);
      smem_addr_t dst = base + C::kWeightOffset + ring.stage * C::kWeightBytes;
#pragma unroll 1
      for (int i = 0; i < blocks; ++i, dst += C::kBlockRowBytes) {
        int block = i < pass.whole ? pass.first_block + i : pass.shared + (j >= pass.length0 ? C::kMulticast : 0);
        if (C::kMulticast > 1 && block >= p.n_blocks) block = p.n_blocks - 1;  // an odd block out: read, never stored
        bulk_load(dst, block_source<C>(p, block, step), C::kBlockRowBytes, full, policy);
      }
      if (++step == p.k_steps) step = 0;
      ring.advance();
    }
    pass = schedule.pass(block_index(), ++index);
  }
}

template <class C> MC_DEVICE void produce_activations_hybrid(const GemmParams& p, const TensorMap& map_a, smem_addr_t base) {
  RingPosition<C::kStages> ring;
  const typename C::Hybrid schedule{p};
  HybridPass pass = schedule.pass(block_index(), 0);
  forget(pass.start);
  wait_for_barriers<C>();
  if constexpr (C::kMulticast > 1) cluster_wait_unaligned();
  if (!elect_one()) return;
  wait_for_previous_grid();
#pragma unroll 1
  for (int index = 0; index < schedule.passes();) {
    ActivationRows a{C::first_row(p, pass.m), C::rows_loaded(p), pass.start};
#pragma unroll 1
    for (int j = 0; j < pass.steps; ++j) {
      load_activations<C>(map_a, base, ring, a);
      if (++a.step == p.k_steps) a.step = 0;
      ring.advance();
    }
    pass = schedule.pass(block_index(), ++index);
  }
}

}  // namespace marlin_cutlass
