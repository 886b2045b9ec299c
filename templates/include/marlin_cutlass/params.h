// Launch arguments of every generated kernel: plain C++, shared by kernels, launcher and emulator.
#pragma once
#include <cstdint>

namespace marlin_cutlass {

// C[m, n] = A[m, k] @ W[k, n] * col_scale[n] + bias[n]. With `swiglu` the columns of that come in fours, two of the gate and two beside them of up,
// and C[m, n / 2] = silu(gate) * up.
struct GemmParams {
  const void* a;            // [m, lda] fp16 or bf16
  const uint8_t* weight;    // packed blocks, layout version 1 (docs/layout.md)
  const float* col_scale;   // [n_blocks * 64]
  const void* bias;         // [n] in C's type, or nullptr
  void* c;                  // [m, ldc]
  float* partials;          // workspace: fp32 partial tiles (decompositions that cross CTAs)
  uint32_t* flags;          // workspace: zero before and after every launch
  int64_t lda, ldc;         // row strides in elements
  int32_t m, n, k;          // logical sizes
  int32_t n_blocks;         // ceil(n / 64)
  int32_t k_blocks;         // ceil(k / 128)
  int32_t m_tiles, n_tiles; // tiles of C (n: as wide as a cluster that shares activations)
  int32_t k_steps;          // pipeline stages that cover k
  int32_t raster;           // m-tiles per group of the tile order, >= 1
  int32_t vector_store;     // 1: aligned 8-byte stores; 0 with swiglu. Kernels ask this first, as the common case
  int32_t swiglu;           // 0 or 1; C takes aligned 4-byte stores then
  // Hybrid decomposition (tile_order.cuh); set_hybrid_partition fills them, others leave zero.
  int32_t full_passes;      // passes in which every block slot of every CTA holds a whole column block
  int32_t whole_blocks;     // whole blocks of a CTA in the pass behind them
  int32_t left_over;        // blocks cut along k in that pass
  // Hybrid and stream-K: units (k steps) of a worker's share; the first share_more workers take one more. A worker is a CTA, or the cluster of
  // those that share activations.
  int32_t share_each, share_more;
  // Stream-K, zero elsewhere; set_stream_shares makes the shares of them.
  int32_t whole_passes;     // passes in which every worker takes a whole tile; the tiles behind those are cut
  int32_t owner_steps;      // k steps that the worker with a cut tile's first one takes beyond its share
};

// Cuts what the whole passes leave of m_tiles x n_tiles into equal shares for `workers`.
inline void set_stream_shares(GemmParams& p, int workers) {
  const int units = (p.m_tiles * p.n_tiles - p.whole_passes * workers) * (p.k_steps - p.owner_steps);
  p.share_each = units / workers;
  p.share_more = units - p.share_each * workers;
}

// Cuts n_blocks columns and k_steps over `grid` CTAs of `slots` block slots each. CTAs of a cluster that share activations (`multicast` of them)
// take equal k ranges of neighbouring left-over blocks.
inline void set_hybrid_partition(GemmParams& p, int slots, int grid, int multicast) {
  p.full_passes = p.n_blocks / (grid * slots);
  const int rest = p.n_blocks - p.full_passes * grid * slots;
  p.whole_blocks = rest / grid;
  p.left_over = rest - p.whole_blocks * grid;
  const int units = (p.left_over + multicast - 1) / multicast * p.k_steps, clusters = grid / multicast;
  p.share_each = units / clusters;
  p.share_more = units - p.share_each * clusters;
}

constexpr int kBlockColumns = 64;     // columns of a packed block
constexpr int kBlockDepth = 128;      // depth of a packed block
constexpr int kBlockCodeBytes = 4096; // INT4 codes of a packed block
constexpr int kSlackBlocks = 3;       // readable blocks behind the last one

enum class Decomposition { kDataParallel, kStriped, kSplitK, kStreamK, kHybrid };

// Bytes of scales and zero points behind the codes of one block.
constexpr int scale_bytes(int group_size, bool zeros) {
  return group_size < 0 ? (zeros ? 128 : 0) : (kBlockDepth / group_size) * (zeros ? 256 : 128);
}
constexpr int block_bytes(int group_size, bool zeros) {
  return kBlockCodeBytes + scale_bytes(group_size, zeros);
}

}  // namespace marlin_cutlass
