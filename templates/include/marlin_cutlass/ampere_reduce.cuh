// Ampere family, sums that cross warps or CTAs: fp32, in a fixed order.
#pragma once
#include "marlin_cutlass/ampere_config.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// What a warp holds once the warps along k have added up: fragments `atom` .. of row groups `row_group` .., at the front of its accumulators.
template <class C> struct AmpereShare {
  bool any;              // false: nothing is left to this warp
  int index;             // among the kShares warps of the same columns
  int atom, row_group;   // first of the share, inside the warp's columns and the tile's rows

  MC_DEVICE explicit AmpereShare(int warp_k) {
    constexpr int kWarpsPerShare = C::kWarpsK / C::kShares;
    any = warp_k % kWarpsPerShare == 0;
    index = warp_k / kWarpsPerShare;
    if constexpr (C::kShareFragments >= C::kRowGroups) {
      atom = index * C::kShareAtoms;
      row_group = 0;
    } else {
      constexpr int kSharesPerAtom = C::kRowGroups / C::kShareFragments;
      atom = index / kSharesPerAtom;
      row_group = index % kSharesPerAtom * C::kShareFragments;
    }
  }
};

// ---- warps along k ----------------------------------------------------------------------------------------------
// A log tree in which no warp idles: at distance kWarpsK / 2, then half of it ..., two warps swap halves of what they hold and each adds the half
// it keeps. `slot` is a pipeline slot that nobody reads.
template <class C> class AmpereWarpReduction {
 public:
  MC_DEVICE static void run(float (&acc)[C::kFragments][4], smem_addr_t slot, int warp, int lane) {
    if constexpr (C::kWarpsK > 1) {
      int buffer = 0;
      exchange<C::kWarpsK / 2, C::kFragments>(acc, slot + lane * 16, warp, buffer);
    }
  }

 private:
  static constexpr int kVectorBytes = 512;  // one fragment of a warp
  // Fragments per exchange: two buffers of them, for all warps, fit the slot.
  static constexpr int chunk_fragments() {
    int n = 1;
    while (2 * n <= C::kFragments / 2 && 2 * C::kWarps * 2 * n * kVectorBytes <= C::kStageBytes) n *= 2;
    return n;
  }
  static constexpr int kChunk = chunk_fragments();
  static_assert(C::kWarpsK == 1 || 2 * C::kWarps * kChunk * kVectorBytes <= C::kStageBytes, "a stage holds the exchange buffers");

  MC_DEVICE static F32x4 pick(bool upper, const float* low, const float* high) {
    return {upper ? high[0] : low[0], upper ? high[1] : low[1], upper ? high[2] : low[2], upper ? high[3] : low[3]};
  }
  MC_DEVICE static smem_addr_t buffer_of(smem_addr_t base, int buffer, int warp) {
    return base + (buffer * C::kWarps + warp) * kChunk * kVectorBytes;
  }

  // One level: kCount fragments before, kCount / 2 after. With one fragment left the lower warp keeps it.
  template <int kDistance, int kCount>
  MC_DEVICE static void exchange(float (&acc)[C::kFragments][4], smem_addr_t base, int warp, int& buffer) {
    constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
    const int partner = warp ^ (kDistance * C::kWarpsN);
    const bool upper = (warp & (kDistance * C::kWarpsN)) != 0;
#pragma unroll
    for (int first = 0; first < kHalf; first += kChunk) {
      const smem_addr_t mine = buffer_of(base, buffer, warp), theirs = buffer_of(base, buffer, partner);
#pragma unroll
      for (int i = first; i < first + kChunk && i < kHalf; ++i)
        st_shared_f32x4(mine + (i - first) * kVectorBytes, pick(upper, acc[kCount > 1 ? kHalf + i : i], acc[i]));
      block_sync();  // one per chunk: the other buffer is written next, and this one only after the next barrier
#pragma unroll
      for (int i = first; i < first + kChunk && i < kHalf; ++i) {
        const F32x4 kept = pick(upper, acc[i], acc[kCount > 1 ? kHalf + i : i]);
        const F32x4 v = ld_shared_f32x4(theirs + (i - first) * kVectorBytes);
        acc[i][0] = kept.x + v.x;
        acc[i][1] = kept.y + v.y;
        acc[i][2] = kept.z + v.z;
        acc[i][3] = kept.w + v.w;
      }
      buffer ^= 1;
    }
    if constexpr (kDistance > 1) exchange<kDistance / 2, kHalf>(acc, base, warp, buffer);
  }
};

// ---- CTAs that share a tile -------------------------------------------------------------------------------------
// Partial sums travel through one slot per CTA: fp32, kMTile x kNSm, [fragment][thread][4]. A CTA writes it at most once.
template <class C> class AmpereCtaReduction {
 public:
  MC_DEVICE AmpereCtaReduction(const GemmParams& p, const AmpereShare<C>& share, int warp_n, int lane)
      : p_(p), any_(share.any), offset_(((warp_n * C::kShares + share.index) * 32 + lane) * 4) {}

  // Adds up the tile of `s`; true in the CTA that stores it. Contiguous ranges: the CTA with the tile's first k step, which reaches this tile
  // last, while the others began with it. Fixed splits: the last rank, which is launched last. So nobody waits for a CTA that waits.
  MC_DEVICE bool run(float (&acc)[C::kFragments][4], const Segment& s) {
    const bool owner = C::kDecomposition == Decomposition::kSplitK ? s.k_end == p_.k_steps : s.k_begin == 0;
    if (!owner) {
      publish(acc);
      return false;
    }
    if (s.k_begin == 0 && s.k_end == p_.k_steps) return true;
    find_contributors(s);
    for (int c = first_ + thread_index(); c < last_; c += C::kThreads)
      if (contributes(c)) wait_flag(p_.flags + c, 1u);
    block_sync();
    for (int c = first_; c < last_; ++c)
      if (contributes(c)) add(acc, c);
    return true;
  }

  // Flags this thread waited for, back to zero for the next launch. After the stores: a release waits for them.
  MC_DEVICE void clear_flags() const {
    for (int c = first_ + thread_index(); c < last_; c += C::kThreads)
      if (contributes(c)) st_release(p_.flags + c, 0u);
  }

 private:
  static constexpr int kSlotFloats = C::kMTile * C::kNSm, kVectorFloats = C::kWarpsN * C::kShares * 128;

  MC_DEVICE float* slot_of(int cta) const { return p_.partials + static_cast<int64_t>(cta) * kSlotFloats + offset_; }

  MC_DEVICE void publish(const float (&acc)[C::kFragments][4]) const {
    float* out = slot_of(block_index());
    if (any_) {
#pragma unroll
      for (int i = 0; i < C::kShareFragments; ++i)
        st_global_cg_f32x4(out + i * kVectorFloats, {acc[i][0], acc[i][1], acc[i][2], acc[i][3]});
    }
    block_sync();
    if (thread_index() == 0) st_release(p_.flags + block_index(), 1u);
  }

  MC_DEVICE void add(float (&acc)[C::kFragments][4], int cta) const {
    if (!any_) return;
    const float* in = slot_of(cta);
#pragma unroll
    for (int i = 0; i < C::kShareFragments; ++i) {
      const F32x4 v = ld_global_cg_f32x4(in + i * kVectorFloats);
      acc[i][0] += v.x;
      acc[i][1] += v.y;
      acc[i][2] += v.z;
      acc[i][3] += v.w;
    }
  }

  // CTAs first_ .. last_ - 1 hold the rest of the tile, in ascending k.
  MC_DEVICE void find_contributors(const Segment& s) {
    if constexpr (C::kDecomposition == Decomposition::kSplitK) {
      last_ = block_index();
      first_ = last_ - (C::kSplit - 1);
    } else {
      // The CTAs behind this one whose range begins inside the tile.
      const int ctas = grid_size(), total = p_.m_tiles * p_.n_tiles * p_.k_steps, tile_end = (s.tile + 1) * p_.k_steps;
      int next = block_index() + 1;
      first_ = next;
      while (next < ctas && range_begin(total, next, ctas) < tile_end) ++next;
      last_ = next;
    }
  }
  // Fixed splits of fewer steps than ranks leave some ranks without work.
  MC_DEVICE bool contributes(int cta) const {
    if constexpr (C::kDecomposition != Decomposition::kSplitK) return true;
    const int rank = cta % C::kSplit;
    return p_.k_steps * rank / C::kSplit < p_.k_steps * (rank + 1) / C::kSplit;
  }

  const GemmParams& p_;
  bool any_;
  int offset_;  // of this thread in a slot, floats
  int first_ = 0, last_ = 0;
};

}  // namespace marlin_cutlass
