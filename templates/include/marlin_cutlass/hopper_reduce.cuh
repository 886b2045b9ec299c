// Sums that cross warpgroups, CTAs of a cluster, or CTAs of the grid: fp32, in a fixed order.
#pragma once
#include "marlin_cutlass/hopper_config.cuh"
#include "marlin_cutlass/prims_hopper.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// Accumulators travel as chunks: 4 floats a thread, 2048 bytes a warpgroup.
constexpr int kChunkBytes = 2048;

template <class C> using Accumulators = float[C::kRowBlocks][C::kMTile / 2];

template <class C> MC_DEVICE float* chunk_of(Accumulators<C>& acc, int chunk) {
  return &acc[chunk / (C::kMTile / 8)][chunk % (C::kMTile / 8) * 4];
}
MC_DEVICE F32x4 as_vector(const float* a) { return {a[0], a[1], a[2], a[3]}; }
MC_DEVICE void add_to(float* a, F32x4 v) {
  a[0] += v.x;
  a[1] += v.y;
  a[2] += v.z;
  a[3] += v.w;
}

// ---- warpgroups along k -----------------------------------------------------------------------------------------
// Group 0 adds the others in order; returns whether this warpgroup keeps the sum.
template <class C> MC_DEVICE bool reduce_k_groups(Accumulators<C>& acc, smem_addr_t base, int group_n, int group_k, bool reused) {
  constexpr int kBarrierStored = 1, kBarrierFree = 2;
  const smem_addr_t mine = base + C::kReduceOffset + group_n * C::kChunks * kChunkBytes + (thread_index() & 127) * 16;
  constexpr int kGroupStride = C::kWarpgroupsN * C::kChunks * kChunkBytes;
  if (reused) named_barrier_sync(kBarrierFree, C::kConsumerThreads);  // the previous tile's buffers have been read
  if (group_k > 0) {
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i)
      st_shared_f32x4(mine + (group_k - 1) * kGroupStride + i * kChunkBytes, as_vector(chunk_of<C>(acc, i)));
  }
  named_barrier_sync(kBarrierStored, C::kConsumerThreads);
  if (group_k > 0) return false;
#pragma unroll
  for (int g = 0; g < C::kWarpgroupsK - 1; ++g)
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) add_to(chunk_of<C>(acc, i), ld_shared_f32x4(mine + g * kGroupStride + i * kChunkBytes));
  return true;
}

// ---- CTAs of a cluster ------------------------------------------------------------------------------------------
// Every CTA finishes a share of the chunks of each warpgroup and receives that share from the others.
template <class C> MC_DEVICE int chunk_owner(int chunk) { return chunk / C::kOwnedChunks; }
template <class C> MC_DEVICE int owned_chunks(int rank) {
  const int left = C::kChunks - rank * C::kOwnedChunks;
  return left < 0 ? 0 : left < C::kOwnedChunks ? left : C::kOwnedChunks;
}
template <class C> MC_DEVICE void arm_receive_barriers(smem_addr_t base, uint32_t rank) {
  const int bytes = (C::kSplit - 1) * owned_chunks<C>(rank) * kChunkBytes;
  if (bytes > 0)
    for (int w = 0; w < C::kWarpgroupsN; ++w) mbarrier_arrive_expect(C::received(base, w), bytes);
}
// Chunk `i` (counted within its owner's share) of sender number `sender` (ranks without the owner, ascending).
template <class C> MC_DEVICE smem_addr_t receive_slot(smem_addr_t base, int group_n, int sender, int i) {
  return base + C::kReceiveOffset + ((sender * C::kWarpgroupsN + group_n) * C::kOwnedChunks + i) * kChunkBytes + (thread_index() & 127) * 16;
}
template <class C> MC_DEVICE void reduce_cluster(Accumulators<C>& acc, smem_addr_t base, int group_n, uint32_t rank) {
  cluster_wait_unaligned();  // every CTA of the cluster runs and has armed its barriers
  const int me = static_cast<int>(rank);
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    const int owner = chunk_owner<C>(i);
    if (owner == me) continue;
    const int sender = me < owner ? me : me - 1;
    const uint32_t dst = map_to_rank(receive_slot<C>(base, group_n, sender, i % C::kOwnedChunks), owner);
    st_async_f32x4(dst, as_vector(chunk_of<C>(acc, i)), map_to_rank(C::received(base, group_n), owner));
  }
  if (owned_chunks<C>(me) == 0) return;
  mbarrier_wait_cluster(C::received(base, group_n), 0);
  // Ascending rank, whoever owns the chunk: the owner's own sum takes its place in the order.
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    if (chunk_owner<C>(i) != me) continue;
    float* mine = chunk_of<C>(acc, i);
    if constexpr (C::kSplit == 2) {
      add_to(mine, ld_shared_f32x4(receive_slot<C>(base, group_n, 0, i % C::kOwnedChunks)));
    } else {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      for (int r = 0; r < C::kSplit; ++r)
        add_to(sum, r == me ? as_vector(mine) : ld_shared_f32x4(receive_slot<C>(base, group_n, r < me ? r : r - 1, i % C::kOwnedChunks)));
#pragma unroll
      for (int j = 0; j < 4; ++j) mine[j] = sum[j];
    }
  }
}

// ---- CTAs that share a tile by contiguous ranges (stream-K) -----------------------------------------------------
// The CTA that holds a tile's first k step adds the partial sums of the CTAs behind it, ascending; the others hand theirs over through memory. A
// CTA hands over at most one, its first, and waits for nobody before that: all ranges make progress as long as the grid is resident. Consumers
// only store, and add what lies in shared memory: the lane that streams weights reports a partial sum once it is stored, waits for those of
// others, and copies them into the ring behind the stages of the tile, while products still run.
MC_DEVICE float* partial_of(const GemmParams& p, int cta, int bytes) { return p.partials + static_cast<int64_t>(cta) * (bytes / 4); }

// Stages of the ring that bring partial sums of the tile of `s` to this CTA.
template <class C> MC_DEVICE int partial_stages(const GemmParams& p, const Segment& s) {
  if (C::kPartialStages == 0 || s.k_begin != 0 || s.k_end == p.k_steps) return 0;
  const int worker = block_index() / C::kMulticast;
  return (StreamRanges(p, C::kMulticast).end_of_sharers(s.tile, worker) - worker - 1) * C::kPartialStages;
}

template <class C> MC_DEVICE void hand_over(const GemmParams& p, Accumulators<C>& acc, smem_addr_t base, int group_n) {
  float* out = partial_of(p, block_index(), C::kPartialBytes) + group_n * (kChunkBytes / 4) + (thread_index() & 127) * 4;
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) st_global_cg_f32x4(out + i * (C::kChunkRowBytes / 4), as_vector(chunk_of<C>(acc, i)));
  mbarrier_arrive(C::handed_over(base));
}

// Counts the partial sums that have been stored for CTA `cta`.
MC_DEVICE uint32_t* partials_counter(const GemmParams& p, int cta) { return p.flags + cta; }

// By the lane that streams weights, once the previous grid has ended: counts this CTA's partial sum of tile `tile`.
template <class C> MC_DEVICE void report_partial(const GemmParams& p, smem_addr_t base, int tile) {
  const int owner = StreamRanges(p, C::kMulticast).first_sharer(tile) * C::kMulticast + block_index() % C::kMulticast;
  mbarrier_wait(C::handed_over(base), 0);
  add_release(partials_counter(p, owner), 1u);
}

// ---- shares of a left-over column block (hybrid) ----------------------------------------------------------------
// Every sharer of a block hands in its sum and counts; the last one adds all of them, ascending in k, and keeps the result. Nobody waits, so any
// number of resident CTAs makes progress. One counter per CTA and pass, that of the block's first sharer; two slots, since a CTA can hold the
// end of one block and the start of the next. `s` is a part of a block's k range.
template <class C>
MC_DEVICE bool reduce_shares(const GemmParams& p, Accumulators<C>& acc, smem_addr_t base, const Segment& s, int pass, int group_n) {
  constexpr int kBarrier = 3;
  const typename C::Hybrid schedule{p};
  const int thread = thread_index() & 127, first_slot = pass * grid_size(), first = schedule.first_sharer(s.tile);
  auto slot = [&](int c) { return p.partials + (static_cast<int64_t>((first_slot + c) * 2 + (c == first)) * C::kChunks * 128 + thread) * 4; };
  float* out = slot(block_index());
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) st_global_cg_f32x4(out + i * 512, as_vector(chunk_of<C>(acc, i)));
  named_barrier_sync(kBarrier, 128);
  uint32_t* counter = p.flags + first_slot + first;
  const smem_addr_t ticket = C::received(base, group_n);  // a word that only clusters use otherwise
  if (thread == 0) st_shared_u32(ticket, fetch_add_acq_rel(counter, 1u));
  named_barrier_sync(kBarrier, 128);
  const int last = schedule.end_of_sharers(s.tile, first), sharers = (last - first + C::kMulticast - 1) / C::kMulticast;
  if (static_cast<int>(ld_shared_u32(ticket)) + 1 != sharers) return false;
  if (thread == 0) st_release(counter, 0u);
#pragma unroll
  for (int r = 0; r < C::kRowBlocks; ++r)
#pragma unroll
    for (int i = 0; i < C::kMTile / 2; ++i) acc[r][i] = 0.f;
#pragma unroll 1
  for (int c = first; c < last; c += C::kMulticast) {
    const float* in = slot(c);
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) add_to(chunk_of<C>(acc, i), ld_global_cg_f32x4(in + i * 512));
  }
  return true;
}

}  // namespace marlin_cutlass
