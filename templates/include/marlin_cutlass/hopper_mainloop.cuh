// The consumer's main loop: packed codes from shared memory to fragments to wgmma, one 64 x 64 piece of weights (a "quad": four k16 steps)
// after the other, with the next quad's codes already on their way. Of 2:4-sparse weights a quad is 64 x 128, as many codes, and four k32 steps.
#pragma once
#include "marlin_cutlass/hopper_config.cuh"
#include "marlin_cutlass/hopper_reduce.cuh"
#include "marlin_cutlass/prims_hopper.cuh"

namespace marlin_cutlass {

template <class C> struct HopperMainloop {
  using D = typename C::Dequant;
  static constexpr int kHalves = C::kSparse ? 1 : 2;                        // quads of a block
  static constexpr int kQuads = C::kDepthBlocks * C::kRowBlocks * kHalves;  // quads of one stage, order: depth block, row block, half
  static constexpr int kBatches = 4 / C::kBatch;  // of a quad
  static constexpr int kQuadDepth = kBlockDepth / kHalves;
  static constexpr int kEntriesPerQuad = C::kGroupSize > 0 && C::kGroupSize < kQuadDepth ? 2 : 1;
  // Addresses of a stage are kept, but for where registers are short.
  static constexpr bool kAddresses = !C::kScaleSums || C::kActivationSums;
  static_assert(kAddresses || !C::kSparse, "places are loaded from an address that is kept");
  static constexpr int kSliceUnits = C::kMTile * 8;  // 16-byte units of a 64-deep slice of activations
  // kScaleSums: quads, and so halves of a block, with the same scales; groups of a stage.
  static constexpr int kGroupQuads = C::kGroupSize == 128 ? 2 : 1, kGroups = kQuads / kGroupQuads;

  // Where quad `kQuad` of a stage lies, and the set of fragments that its first batch takes.
  template <int kQuad> struct Place {
    static constexpr int kDepth = kQuad / (kHalves * C::kRowBlocks), kRow = kQuad / kHalves % C::kRowBlocks, kHalf = kQuad % kHalves;
    static constexpr int kBuffer = kQuad * (4 / C::kBatch) % 2;
  };

  float acc[C::kRowBlocks][C::kMTile / 2];
  typename D::Factors unit{{1.f, 1.f}};  // kRunningScale: of the sums in acc

  MC_DEVICE HopperMainloop(smem_addr_t base, int warpgroup_n, int warpgroup_k) : base_(base) {
    const int warp = warp_index() & 3, lane = lane_index();
    // Without kWeightOffset, which goes into the loads: ptxas would add it, and keep the sum, in every stage.
    const smem_addr_t weights = base + warpgroup_n * C::kRowBlocks * C::kBlockRowBytes;
    codes_ = weights + warp * 512 + lane * 16;
    entries_ = weights + warp * D::kAtomBytes + (lane >> 2) * D::kEntryBytes;
    // Two atoms, and so two warps, share their words of places: lanes 0 and 1 of four hold those of the first, 2 and 3 of the second. The
    // instruction takes them from lanes 0 and 1.
    if constexpr (C::kSparse) places_address_ = weights + warp / 2 * 512 + (lane ^ warp % 2 * 2) * 16;
    if constexpr (C::kSparse) zero_ = opaque_zero();
    lane_ = lane;
    forget(lane_);  // or it is read from a special register again in every stage
    forget(codes_);  // kept in registers: computed again they are three instructions of sixty in every quad
    if constexpr (D::kHasEntries) forget(entries_);
    if constexpr (C::kActivationSums) {
      sums_ = C::sums(base, 0) + (lane & 3) * 8;
      forget(sums_);
    }
    descriptor_ = make_descriptor(uniform(descriptor_low(base)));
    ring_.stage = warpgroup_k;
    if constexpr (C::kFirstInHalves) first_half_ = C::first_half(base, warpgroup_k);
  }

  // The sum of `steps` stages of this warpgroup in acc. Tensor cores stand still for about each instruction that is issued beside them
  // (docs/performance.md), so the loop has as few as can be.
  MC_DEVICE void run(int steps) {
    begin_sums();
    if (steps <= 0) {
      first_half_ = 0;  // this group has no stage of the first tile: none of its stages comes in halves
      return;
    }
    await_stage(C::kFirstInHalves && first_half_ != 0 ? first_half_ : C::full(base_, ring_.stage));
    int left = steps;
    bool more;
    do {
      const int current = ring_.stage;
      more = left > 1;
      quads<0>(descriptor_ + static_cast<uint32_t>(current * (C::kActivationBytes / 16)));
      ring_.advance(C::kWarpgroupsK);
      if constexpr (C::kLookahead) {
        held_ = current;
        if (more) await_stage(C::full(base_, ring_.stage));
        settle<kQuads - 1>(kBatches - 1);
      } else {
        settle<kQuads - 1>(kBatches - 1);
        wgmma_wait<0>();
        release(current);
        if (more) await_stage(C::full(base_, ring_.stage));
      }
      --left;
    } while (more);
    wgmma_wait<0>();
    end_sums();
    if constexpr (C::kLookahead) {
      release(held_);
      held_ = -1;
    }
  }

  // Adds the partial sums in the next `stages` stages of the ring, the first of which is one of k group `first`. Group 0 has the sum. The others
  // wait until it is done: a group that left a stage of its own out must not look at a barrier that is still a phase behind.
  MC_DEVICE void add_partials(int stages, int first, int warpgroup_n, int warpgroup_k) {
    constexpr int kGroups = C::kWarpgroupsK, kBarrier = 3;
    const int ahead = (warpgroup_k - first + kGroups) % kGroups;  // stages between the first and this group's first
    if (warpgroup_k == 0) {
      RingPosition<C::kStages> at = ring_;
      at.back(ahead);
#pragma unroll 1
      for (int i = 0; i < stages; i += C::kPartialStages) {
#pragma unroll
        for (int part = 0; part < C::kPartialStages; ++part) {
          mbarrier_wait(C::full(base_, at.stage), at.phase);
          const smem_addr_t from = C::partial(base_, at.stage) + warpgroup_n * kChunkBytes + (thread_index() & 127) * 16;
#pragma unroll
          for (int j = 0; j < C::kStageChunks; ++j) {
            const int chunk = part * C::kStageChunks + j;
            if (chunk < C::kChunks) add_to(chunk_of<C>(acc, chunk), ld_shared_f32x4(from + j * C::kChunkRowBytes));
          }
          warp_sync();
          release(at.stage);
          at.advance();
        }
      }
    }
    if constexpr (kGroups > 1) named_barrier_sync(kBarrier, C::kConsumerThreads);
    for (int i = ahead; i < stages; i += kGroups) ring_.advance(kGroups);
  }

  // Leaves out `steps` stages, for which the producer has arrived.
  MC_DEVICE void skip(int steps) {
    const int to = ring_.stage + steps;
    ring_.phase ^= (to / C::kStages) & 1;
    ring_.stage = to % C::kStages;
  }

 private:
  // Clears the sums, mostly while data are on their way: a flag for the first product costs instructions in every stage.
  MC_DEVICE void begin_sums() {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < C::kMTile / 2; ++i) acc[r][i] = 0.f;
    if constexpr (C::kRunningScale) {
      unit = {{1.f, 1.f}};  // a scale that is not finite stays in its column
    } else if constexpr (C::kScaleSums) {  // a group with sums of zero is what the first group of the tile finds before it
#pragma unroll
      for (int i = 0; i < C::kMTile / 2; ++i) group_sums_[1][i] = 0.f;
      factors_[1] = {};
    }
  }
  MC_DEVICE void end_sums() {
    if constexpr (C::kScaleSums) {
      add_group<kGroups - 1>();
    } else {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < C::kMTile / 2; ++i) wgmma_pin(acc[r][i]);
    }
  }

  // One lane releases for its warp: what the lanes read was issued ahead of a warp-wide wgmma, and is in use. (With a __syncwarp here ptxas
  // serialises wgmma, C7513.)
  MC_DEVICE void release(int stage) {
    if (kReleaseLanes > 1 || lane_ == 0) mbarrier_arrive(C::empty(base_, stage));
  }

  // Waits for the next stage, or the first half of it, on barrier `there` and asks for its first quad.
  MC_DEVICE void await_stage(smem_addr_t there) {
    mbarrier_wait(there, ring_.phase);
    stage_offset_ = ring_.stage * C::kWeightBytes;
    if constexpr (kAddresses) {
      codes_at_ = codes_ + stage_offset_;
      forget(codes_at_);
      if constexpr (D::kHasEntries) {
        entries_at_ = entries_ + stage_offset_;
        forget(entries_at_);
      }
      if constexpr (C::kSparse) places_at_ = places_address_ + stage_offset_;
    }
    load_quad<0>();
  }

  // kFirstInHalves: waits for the second half of the first stage.
  MC_DEVICE void await_second_half() {
    if (first_half_ == 0) return;
    mbarrier_wait(C::full(base_, ring_.stage), ring_.phase);
    first_half_ = 0;
  }

  template <int kQuad> MC_DEVICE void load_quad() {
    using At = Place<kQuad>;
    constexpr int kBlock = C::kWeightOffset + At::kRow * C::kBlockRowBytes + At::kDepth * C::kBlockBytes;
    const smem_addr_t codes = kAddresses ? codes_at_ : codes_ + stage_offset_, entries = kAddresses ? entries_at_ : entries_ + stage_offset_;
    codes_next_ = ld_shared_u32x4(codes + kBlock + At::kHalf * 2048);
    if constexpr (C::kSparse) places_next_ = ld_shared_u32x4(places_at_ + kSparseCodeBytes + kBlock);
    if constexpr (D::kHasEntries) {
      if constexpr (kEntriesPerQuad == 2) {
        entry_next_[0] = D::load(entries + C::kEntryOffset + kBlock + (2 * At::kHalf) * D::kGroupBytes);
        entry_next_[1] = D::load(entries + C::kEntryOffset + kBlock + (2 * At::kHalf + 1) * D::kGroupBytes);
      } else if constexpr (C::kGroupSize == kQuadDepth) {
        entry_next_[0] = D::load(entries + C::kEntryOffset + kBlock + At::kHalf * D::kGroupBytes);
      } else if constexpr (At::kHalf == 0) {  // one group, or per-column zero points, for the whole block
        entry_next_[0] = D::load(entries + C::kEntryOffset + kBlock);
      }
    }
  }

  // The quads of a stage. The last batch is issued, not settled: the next stage's first quad is asked for ahead of that.
  template <int kQuad> MC_DEVICE void quads(uint64_t activations) {
    if constexpr (kQuad < kQuads) {
      quad<kQuad>(activations);
      quads<kQuad + 1>(activations);
    }
  }

  template <int kQuad> MC_DEVICE void quad(uint64_t activations) {
    using At = Place<kQuad>;
    const U32x4 codes = codes_next_;
    if constexpr (C::kActivationSums && kQuad % kGroupQuads == 0) begin_group<kQuad>(ring_.stage);
    if constexpr (At::kHalf == 0 || C::kGroupSize == 64 || C::kGroupSize == 32) {
      scales_[0] = D::prepare(entry_next_[0]);
      if constexpr (C::kScaleSums) factors_[kQuad / kGroupQuads % 2] = D::factors(entry_next_[0]);
      if constexpr (C::kRunningScale) next_unit(D::factors(entry_next_[0]));
      if constexpr (kEntriesPerQuad == 2) scales_[1] = D::prepare(entry_next_[1]);
    }
    const uint32_t places[4] = {places_next_.x, places_next_.y, places_next_.z, places_next_.w};  // sparse only
    // The second half is asked for behind the products: a wait ahead of them makes ptxas serialise wgmma (C7513).
    constexpr bool kHalfEnds = C::kFirstInHalves && kQuad + 1 == kQuads / 2;
    if constexpr (kQuad + 1 < kQuads && !kHalfEnds) load_quad<kQuad + 1>();
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    // In 64 bits: a pair of uniform registers then takes one add of a constant for each wgmma.
    const uint64_t descriptor = activations + (At::kDepth * 2 + At::kHalf) * kSliceUnits;
#pragma unroll
    for (int b = 0; b < 4 / C::kBatch; ++b) {
      constexpr int kBatch = C::kBatch;
      uint32_t(&fragments)[4 * kBatch] = fragments_[(At::kBuffer + b) % 2];
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        const int step = b * kBatch + s;
        D::fragment(words[step], scales_[kEntriesPerQuad == 2 ? step / 2 : 0], &fragments[4 * s]);
        // In a register of their own while the wgmma runs: it reads them when it executes, as it does the fragments, but ptxas does not know
        // and would put the next load into the same register.
        if constexpr (C::kSparse) places_[(At::kBuffer + b) % 2][s] = copy_of(places[step], zero_);
      }
      issue<kQuad, 0>(b, descriptor);
      if constexpr (C::kParts == 2) issue<kQuad, 1>(b, descriptor);
      if constexpr (kHalfEnds) {
        if (b + 1 == kBatches) {
          await_second_half();
          load_quad<kQuad + 1>();
        }
      }
      if (kQuad + 1 < kQuads || b + 1 < kBatches) settle<kQuad>(b);
    }
  }

  // Behind batch `b` of a quad: waits for the batch before it.
  template <int kQuad> MC_DEVICE void settle(int b) {
    wgmma_wait<C::kParts>();
    if (C::kLookahead && kQuad == 0 && b == 0 && held_ >= 0) release(held_);  // every wgmma of the stage before has finished
    if constexpr (C::kScaleSums && kQuad % kGroupQuads == 0) {  // and of the group before
      if (b == 0) add_group<(kQuad / kGroupQuads + kGroups - 1) % kGroups>();
    }
  }

  // Batch `b` of a quad: one commit group, of part `kPart` of the rows.
  template <int kQuad, int kPart> MC_DEVICE void issue(int b, uint64_t descriptor) {
    using At = Place<kQuad>;
    constexpr int kBatch = C::kBatch;
    const uint32_t(&fragments)[4 * kBatch] = fragments_[(At::kBuffer + b) % 2];
    if constexpr (C::kRunningScale && At::kHalf == 0) {
      if (b == 0) change_unit<kPart>();
    }
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      const int step = b * kBatch + s;
      if constexpr (C::kRunningScale) {
        constexpr int kRows = C::kMTile / C::kParts;
        wgmma_m64k16<typename C::Element, kRows, kPart * kRows / 2>(acc[0], &fragments[4 * s], descriptor + 2 * step + kPart * kRows * 8);
      } else if constexpr (C::kScaleSums) {
        const int add = !C::kActivationSums && kQuad % kGroupQuads == 0 && step == 0 ? 0 : 1;
        multiply(group_sums_[kQuad / kGroupQuads % 2], &fragments[4 * s], 0u, descriptor, step, add);
      } else {
        multiply(acc[At::kRow], &fragments[4 * s], places_[(At::kBuffer + b) % 2][s], descriptor, step, 1);
      }
    }
    wgmma_commit();
  }

  // Running scale: `unit` becomes the scale of the next group; sums follow by the ratio, those of each part when they are at rest.
  MC_DEVICE void next_unit(typename D::Factors scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float to = scale.row[i] == 0.f ? unit.row[i] : scale.row[i];
      ratio_.row[i] = approximate_quotient(unit.row[i], to);
      unit.row[i] = to;
    }
  }
  template <int kPart> MC_DEVICE void change_unit() {
    constexpr int kSums = C::kMTile / 2 / C::kParts;
    wgmma_wait<1>();  // the other part's products may run on; without a wait here ptxas adds its own (C7517)
#pragma unroll
    for (int i = kPart * kSums; i < (kPart + 1) * kSums; ++i) {
      wgmma_pin(acc[0][i]);
      acc[0][i] *= ratio_.row[i / 2 % 2];
    }
  }

  // kActivationSums: starts the accumulators of the group that begins with quad `kQuad` at -offset x (sum of its activations).
  template <int kQuad> MC_DEVICE void begin_group(int stage) {
    using At = Place<kQuad>;
    constexpr int kGroup = C::kGroupSize == 128 ? At::kDepth : At::kDepth * 2 + At::kHalf;
    const smem_addr_t at = sums_ + stage * (C::kStageGroups * C::kGroupSumBytes) + kGroup * C::kGroupSumBytes;
    float(&sums)[C::kMTile / 2] = group_sums_[kQuad / kGroupQuads % 2];
    const typename D::Factors offset = D::offsets(entry_next_[0]);
#pragma unroll
    for (int i = 0; i < C::kMTile / 8; ++i) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        F32x2 v = ld_shared_f32x2(at + i * 32 + (C::kZeros ? 0 : high * C::kMTile * 4));
        if constexpr (C::kZeros) v = {-offset.row[high] * v.x, -offset.row[high] * v.y};
        sums[4 * i + 2 * high] = v.x;
        sums[4 * i + 2 * high + 1] = v.y;
      }
    }
  }

  // Adds the sums over group `kGroup` of a stage, whose wgmma have finished, times its scales.
  template <int kGroup> MC_DEVICE void add_group() {
    constexpr int kRow = kGroup * kGroupQuads / kHalves % C::kRowBlocks;
    float(&sums)[C::kMTile / 2] = group_sums_[kGroup % 2];
#pragma unroll
    for (int i = 0; i < C::kMTile / 2; ++i) {
      wgmma_pin(sums[i]);
      acc[kRow][i] += sums[i] * factors_[kGroup % 2].row[i / 2 % 2];
    }
  }

  // Step `step` of the quad whose activations begin at `descriptor`.
  MC_DEVICE static void multiply(float (&sums)[C::kMTile / 2], const uint32_t* fragment, const uint32_t& places, uint64_t descriptor, int step,
                                 int accumulate) {
    using E = typename C::Element;
    if constexpr (C::kSparse) {
      const int offset = step / 2 * kSliceUnits + step % 2 * 4;
      wgmma_sparse_m64k32<E, C::kMTile>(sums, fragment, places, descriptor + offset, accumulate);
    } else {
      wgmma_m64k16<E, C::kMTile>(sums, fragment, descriptor + 2 * step, accumulate);
    }
  }

  smem_addr_t base_, codes_, entries_, places_address_ = 0, sums_ = 0;
  // The stage that is loaded from: an offset, or addresses.
  int stage_offset_;
  smem_addr_t codes_at_, entries_at_, places_at_ = 0;
  uint64_t descriptor_;
  RingPosition<C::kStages> ring_;
  smem_addr_t first_half_ = 0;  // the stage at hand, or the next, is this group's first: the barrier of its first half
  int held_ = -1, lane_;  // held: the stage before
  U32x4 codes_next_, places_next_{};
  typename D::Entry entry_next_[kEntriesPerQuad];
  RowScales scales_[kEntriesPerQuad];
  float group_sums_[2][C::kScaleSums ? C::kMTile / 2 : 1];
  typename D::Factors factors_[2], ratio_;
  uint32_t fragments_[2][4 * C::kBatch], places_[2][C::kBatch] = {}, zero_ = 0;
};

}  // namespace marlin_cutlass
