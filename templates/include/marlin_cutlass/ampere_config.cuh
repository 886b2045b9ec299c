// Ampere family, compile-time geometry: what one CTA holds, how its warps share a tile, what a pipeline stage contains.
//
// The product is computed transposed: weights are the 16-row operand of mma.m16n8k16, activation rows its 8 columns. The sparse family shares
// all of it, with mma.sp.m16n8k32 and blocks of half as many codes.
#pragma once
#include "marlin_cutlass/dequant.cuh"
#include "marlin_cutlass/sparse_layout.h"

namespace marlin_cutlass {

template <class ElementType, int kGroup, bool kZeroPoints, int kRows, int kColumns, int kDepth, int kWarpsAlongN, int kWarpsAlongK,
          int kPipeline, Decomposition kPartition, int kParts, int kCtas, bool kSparseWeights = false>
struct AmpereConfig {
  using Element = ElementType;
  using Dequant = Dequantizer<Element, kGroup, kZeroPoints>;
  static constexpr int kGroupSize = kGroup;
  static constexpr int kMTile = kRows, kNSm = kColumns, kKSm = kDepth;
  static constexpr int kWarpsN = kWarpsAlongN, kWarpsK = kWarpsAlongK;
  static constexpr int kStages = kPipeline;
  static constexpr Decomposition kDecomposition = kPartition;
  static constexpr int kSplit = kParts, kCtasPerSm = kCtas;
  static constexpr int kWarps = kWarpsN * kWarpsK, kThreads = 32 * kWarps;
  // Several CTAs may hold parts of the k range of one tile.
  static constexpr bool kCrossCta = kDecomposition != Decomposition::kDataParallel;

  // A warp: kAtoms atoms of 16 columns x kMTile rows, in its share of the k64 units of a stage. 128 accumulators a thread at most.
  static constexpr int kAtoms = kMTile == 128 ? 2 : 4;
  static constexpr int kWarpColumns = 16 * kAtoms;
  static constexpr int kRowGroups = kMTile / 8;        // 8-wide column operands of one k16 step
  static constexpr int kFragments = kAtoms * kRowGroups;  // m16n8 accumulators of a thread, [atom][row group]
  static constexpr int kUnitDepth = kSparseWeights ? kBlockDepth : 64;  // one 16-byte load per atom: four steps
  static constexpr int kUnits = kKSm / kUnitDepth / kWarpsK;            // units a warp takes from a stage
  static constexpr int kSteps = 4 * kUnits;                             // k16 (sparse: k32) steps a warp takes from a stage
  // Steps whose activations one batch of ldmatrix.x4 brings: four 8x8 matrices are two k16 steps of 8 rows or one of 16 rows, or a k32 step
  // of 8 rows.
  static constexpr int kBatchSteps = kMTile == 8 && !kSparseWeights ? 2 : 1;
  // Sparse: the operands of a k32 step are twice as long, so that at most 32 rows of them are in registers at a time, 16 with m_tile 64,
  // whose weights take more (ptxas spills otherwise).
  static constexpr int kRowParts = !kSparseWeights ? 1 : kMTile == 64 ? 4 : (kRowGroups + 3) / 4;
  static constexpr int kPartRowGroups = kRowGroups / kRowParts;
  static constexpr int kBatches = kSteps / kBatchSteps * kRowParts;

  // A stage: weight[n block][k block][block bytes], then activations[row][kKSm] in 16-byte chunks, chunk c of row r stored at c ^ (r & 7).
  static constexpr int kColumnBlocks = kNSm / kBlockColumns, kDepthBlocks = kKSm / kBlockDepth;
  static constexpr int kBlockBytes = kSparseWeights ? sparse_block_bytes(kGroup) : Dequant::kBlockBytes;
  static constexpr int kRunBytes = kDepthBlocks * kBlockBytes;  // contiguous in memory: the blocks of one n block
  static constexpr int kWeightBytes = kColumnBlocks * kRunBytes;
  static constexpr int kRowBytes = 2 * kKSm;
  static constexpr int kStageBytes = kWeightBytes + kMTile * kRowBytes;
  // Dynamic shared memory = stages * (n_sm/64 * k_sm/128 * block_bytes + m_tile * k_sm * 2); generator/variant.py computes the same.
  // Reductions between warps use the slot of the tile's last stage.
  static constexpr int kSharedBytes = kStages * kStageBytes;

  // Warps along k halve the fragments they hold with every exchange, down to one.
  static constexpr int kShares = kWarpsK < kFragments ? kWarpsK : kFragments;  // warps along k that end up with sums
  static constexpr int kShareFragments = kFragments / kShares;
  static constexpr int kShareAtoms = kShareFragments > kRowGroups ? kShareFragments / kRowGroups : 1;
  static constexpr int kShareRowGroups = kShareFragments / kShareAtoms;

  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128 || kGroup == -1, "group_size must be 32, 64, 128 or -1");
  static_assert(kMTile == 8 || kMTile == 16 || kMTile == 32 || kMTile == 48 || kMTile == 64 || kMTile == 128, "unsupported m_tile");
  static_assert(kNSm == 64 || kNSm == 128 || kNSm == 256, "n_sm must be 64, 128 or 256");
  static_assert(kKSm == 128 || kKSm == 256 || kKSm == 512, "k_sm must be 128, 256 or 512: a stage holds whole packed blocks");
  static_assert(kWarpsN * kWarpColumns == kNSm, "a warp covers 64 columns (32 with m_tile 128)");
  static_assert(kWarps == 4 || kWarps == 8, "4 or 8 warps");
  static_assert(kUnits >= 1, "each warp along k needs a unit of the stage: k_sm >= 64 * warps_k, sparse 128 * warps_k");
  static_assert(!kSparseWeights || (is_sparse_group(kGroup) && !kZeroPoints), "sparse: group_size 64, 128 or -1, symmetric");
  static_assert(kStages >= 2, "the pipeline needs two stages");
};

}  // namespace marlin_cutlass
