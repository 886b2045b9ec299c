// The order in which tiles of C are visited, and the share of it that one CTA takes. generator/schedule.py is the host mirror.
#pragma once
#include "marlin_cutlass/params.h"
#include "marlin_cutlass/prims.cuh"

namespace marlin_cutlass {

struct TileIndex { int m, n; };

// Tiles of `raster` consecutive row tiles are neighbours, so that the CTAs of a wave share weights and activations in L2.
MC_DEVICE TileIndex tile_index(const GemmParams& p, int tile) {
  if (p.m_tiles == 1) return {0, tile};
  const int group_tiles = p.raster * p.n_tiles;
  const int group = tile / group_tiles, local = tile - group * group_tiles;
  const int first = group * p.raster;
  const int rows = p.m_tiles - first < p.raster ? p.m_tiles - first : p.raster;
  const int n = local / rows;
  return {first + local - n * rows, n};
}

// A run of k steps of one tile.
struct Segment { int tile, k_begin, k_end; };

// First unit (k step of a tile) of CTA `cta` when `total` units are cut into equal contiguous ranges.
MC_DEVICE int range_begin(int total, int cta, int ctas) {
  return static_cast<int>(static_cast<int64_t>(total) * cta / ctas);
}

// The segments of this CTA, in order.
template <Decomposition kDecomposition, int kSplit> struct WorkLoop {
  MC_DEVICE WorkLoop(const GemmParams& p, int cta, int rank) : k_steps_(p.k_steps) {
    const int tiles = p.m_tiles * p.n_tiles;
    if constexpr (kRanges) {
      position_ = range_begin(tiles * k_steps_, cta, grid_size());
      end_ = range_begin(tiles * k_steps_, cta + 1, grid_size());
    } else if constexpr (kDecomposition == Decomposition::kSplitK) {  // one tile for each `kSplit` CTAs
      position_ = cta / kSplit;
      end_ = position_ + 1;
      k_begin_ = k_steps_ * rank / kSplit;
      k_end_ = k_steps_ * (rank + 1) / kSplit;
    } else {
      position_ = cta;
      end_ = tiles;
    }
  }
  MC_DEVICE bool next(Segment& s) {
    if (position_ >= end_) return false;
    if constexpr (kRanges) {
      s.tile = position_ / k_steps_;
      s.k_begin = position_ - s.tile * k_steps_;
      const int left = end_ - position_, to_tile_end = k_steps_ - s.k_begin;
      s.k_end = s.k_begin + (left < to_tile_end ? left : to_tile_end);
      position_ += s.k_end - s.k_begin;
    } else if constexpr (kDecomposition == Decomposition::kSplitK) {
      s = {position_++, k_begin_, k_end_};
    } else {
      s = {position_, 0, k_steps_};
      position_ += grid_size();
    }
    return true;
  }

 private:
  static constexpr bool kRanges = kDecomposition == Decomposition::kStriped || kDecomposition == Decomposition::kStreamK;
  int k_steps_, position_ = 0, end_ = 0, k_begin_ = 0, k_end_ = 0;
};

}  // namespace marlin_cutlass
