// Ampere family, global to shared memory: the stages of a CTA's k steps, in order, with cp.async.
#pragma once
#include "marlin_cutlass/ampere_config.cuh"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// Copies one stage after the other, running ahead of the math across tile boundaries. Addresses of a thread advance by constants;
// they are computed anew only where a segment begins.
template <class C> class AmpereLoader {
 public:
  MC_DEVICE explicit AmpereLoader(const GemmParams& p, const WorkLoop<C::kDecomposition, C::kSplit>& work) : p_(p), work_(work) {
    const int thread = thread_index();
    const int run = thread / kRunThreads, row = thread / kRowChunks, chunk = thread % kRowChunks;
    run_ = run;
    run_chunk_ = thread % kRunThreads;
    row_ = row;
    chunk_ = chunk;
    weight_dst_ = run * C::kRunBytes + run_chunk_ * 16;
    activation_dst_ = C::kWeightBytes + row * C::kRowBytes + (chunk ^ (row & 7)) * 16;
    begin_segment();
  }

  // Starts the copies of the next stage into the slot at `slot` (nothing after the last stage). One commit group in any case.
  MC_DEVICE void issue(smem_addr_t slot) {
    if (steps_left_ > 0) {
      copy_weights(slot + weight_dst_);
      copy_activations(slot + activation_dst_);
      weight_ += C::kRunBytes;
      activation_ += C::kRowBytes;
      depth_left_ -= C::kKSm;
      if (--steps_left_ == 0) begin_segment();
    }
    cp_async_commit();
  }

 private:
  // Weights: the threads of a run copy the contiguous blocks of one n block.
  static constexpr int kRunThreads = C::kThreads / C::kColumnBlocks, kRunChunks = C::kRunBytes / 16;
  // Activations: consecutive threads copy consecutive chunks of a row; a pass covers kPassRows rows.
  static constexpr int kRowChunks = C::kRowBytes / 16, kPassRows = C::kThreads / kRowChunks;
  static_assert(C::kThreads % kRowChunks == 0 && C::kRunBytes % 128 == 0, "chunk mapping");

  MC_DEVICE void copy_weights(smem_addr_t dst) {
#pragma unroll
    for (int i = 0; i < kRunChunks; i += kRunThreads)
      if (i + kRunThreads <= kRunChunks || run_chunk_ < kRunChunks - i) cp_async16_stream(dst + i * 16, weight_ + i * 16);
  }

  // Rows past m and chunks past k become zeros, so that whatever the weights are there adds nothing.
  MC_DEVICE void copy_activations(smem_addr_t dst) {
    const int rows = depth_left_ > 0 ? rows_left_ : 0;
#pragma unroll
    for (int i = 0; i < C::kMTile; i += kPassRows) {
      if (i + kPassRows > C::kMTile && row_ >= C::kMTile - i) continue;
      // Row row_ + i: its swizzle differs from that of row_ in the bits of i, which row_ < kPassRows does not have.
      const smem_addr_t swizzled = kPassRows % 8 == 0 ? dst : dst ^ ((i & 7) * 16);
      cp_async16_zfill(swizzled + i * C::kRowBytes, activation_ + i * row_bytes_, i < rows ? 16 : 0);
    }
  }

  MC_DEVICE void begin_segment() {
    Segment s;
    steps_left_ = 0;
    if (!work_.next(s)) return;
    const TileIndex t = tile_index(p_, s.tile);
    steps_left_ = s.k_end - s.k_begin;
    // Blocks past the last column block are read as the last one, and not stored.
    const int block = t.n * C::kColumnBlocks + run_ < p_.n_blocks ? t.n * C::kColumnBlocks + run_ : p_.n_blocks - 1;
    weight_ = p_.weight + (static_cast<int64_t>(block) * p_.k_blocks + s.k_begin * C::kDepthBlocks) * C::kBlockBytes + run_chunk_ * 16;
    const int row = t.m * C::kMTile + row_, depth = s.k_begin * C::kKSm + chunk_ * 8;
    rows_left_ = p_.m - row;
    depth_left_ = p_.k - depth;
    row_bytes_ = 2 * p_.lda;
    activation_ = static_cast<const uint8_t*>(p_.a) + row * row_bytes_ + 2 * depth;
  }

  const GemmParams& p_;
  WorkLoop<C::kDecomposition, C::kSplit> work_;
  int run_, run_chunk_, row_, chunk_;
  int weight_dst_, activation_dst_;  // of this thread, in a slot
  int steps_left_;                   // of the segment
  int rows_left_, depth_left_;       // from this thread's row and chunk to the end of A
  int64_t row_bytes_;
  const uint8_t* weight_;
  const uint8_t* activation_;
};

}  // namespace marlin_cutlass
