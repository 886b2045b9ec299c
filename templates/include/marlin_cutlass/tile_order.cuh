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

// a / b for a >= 0, b > 0 and a quotient below 2^20: half of the instructions of a division, which stand before a CTA's first copy.
MC_DEVICE int small_quotient(int a, int b) {
  const int q = static_cast<int>(approximate_quotient(static_cast<float>(a), static_cast<float>(b))), rest = a - q * b;
  return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}

// A run of k steps of one tile.
struct Segment { int tile, k_begin, k_end; };

// First unit (k step of a tile) of CTA `cta` when `total` units are cut into contiguous ranges that differ by one unit at most.
MC_DEVICE int range_begin(int total, int cta, int ctas) {
  const int each = total / ctas, more = total - each * ctas;
  return each * cta + (cta < more ? cta : more);
}

// Equal shares of consecutive units for workers 0, 1, ...: `each` units, the first `more` workers one more.
struct Shares {
  int each, more;

  MC_DEVICE int begin(int worker) const { return each * worker + (worker < more ? worker : more); }
  MC_DEVICE int holder(int unit) const {
    const int longer = (each + 1) * more;  // units of the workers that take one more
    return unit < longer ? unit / (each + 1) : more + (unit - longer) / each;
  }
};
MC_DEVICE Shares shares_of(const GemmParams& p) { return {p.share_each, p.share_more}; }

// Stream-K: whole tiles, which come first in the order of tiles, and the k steps of the tiles behind them, which are cut into ranges. Each worker
// takes a range: a CTA, or the cluster of those that share activations, whose tiles lie side by side. The worker with a tile's first k step adds
// what the others hand over, which takes time to arrive: it has `owner_steps` k steps more than its share. So a tile has that many units fewer
// than k steps, and its first unit is the first owner_steps + 1 of them.
struct StreamRanges {
  int workers, whole, units;  // whole: tiles; units: of a cut tile
  Shares shares;

  MC_DEVICE StreamRanges(const GemmParams& p, int multicast) {
    workers = grid_size() / multicast;
    whole = p.whole_passes * workers;
    units = p.k_steps - p.owner_steps;
    shares = shares_of(p);
  }
  // The worker that holds the first k step of tile `tile`, one that is cut.
  MC_DEVICE int first_sharer(int tile) const { return shares.holder((tile - whole) * units); }
  // First worker behind `worker` whose range lies wholly behind tile `tile`.
  MC_DEVICE int end_of_sharers(int tile, int worker) const {
    const int tile_end = (tile - whole + 1) * units;
    int last = worker + 1;
    while (last < workers && shares.begin(last) < tile_end) ++last;
    return last;
  }
};

// The segments of this CTA, in order. Stream-K: its range, then its whole tiles: partial sums are handed over early, and nobody waits for one behind
// another CTA's whole tiles.
template <Decomposition kDecomposition, int kSplit, int kMulticast = 1> struct WorkLoop {
  MC_DEVICE WorkLoop(const GemmParams& p, int cta, int rank) : p_(p), k_steps_(p.k_steps) {
    const int tiles = p.m_tiles * p.n_tiles;
    if constexpr (kRanges) {
      if constexpr (kWholeTiles) {
        const Shares shares = shares_of(p);
        position_ = shares.begin(cta / kMulticast);
        end_ = shares.begin(cta / kMulticast + 1);
      } else {
        position_ = range_begin(tiles * k_steps_, cta, grid_size());
        end_ = range_begin(tiles * k_steps_, cta + 1, grid_size());
      }
    } else if constexpr (kDecomposition == Decomposition::kSplitK) {  // one tile for each `kSplit` CTAs
      position_ = cta / kSplit;
      end_ = position_ + 1;
      k_begin_ = k_steps_ * rank / kSplit;
      k_end_ = k_steps_ * (rank + 1) / kSplit;
    } else {
      position_ = cta / kMulticast;
      end_ = tiles;
    }
  }
  MC_DEVICE bool next(Segment& s) {
    if (position_ >= end_ + (kWholeTiles ? p_.whole_passes : 0)) return false;
    if constexpr (kRanges) {
      const int owner_steps = kWholeTiles ? p_.owner_steps : 0, units = k_steps_ - owner_steps;
      const int tile = kWholeTiles ? small_quotient(position_, units) : position_ / units, first = position_ - tile * units;
      const int left = end_ - position_, to_tile_end = units - first, taken = left < to_tile_end ? left : to_tile_end;
      s = {tile, first > 0 ? first + owner_steps : 0, first + taken + owner_steps};
      if constexpr (kWholeTiles) {
        // Behind the range a step of the position is a whole tile. Without branches: else the compiler makes a copy of the main loop for each.
        const bool whole = position_ >= end_;
        const int workers = static_cast<int>(grid_size()) / kMulticast, behind = block_index() / kMulticast + (position_ - end_) * workers;
        position_ += whole ? 1 : taken;
        s = {whole ? behind : tile + p_.whole_passes * workers, whole ? 0 : s.k_begin, whole ? k_steps_ : s.k_end};
      } else {
        position_ += taken;
      }
    } else if constexpr (kDecomposition == Decomposition::kSplitK) {
      s = {position_++, k_begin_, k_end_};
    } else {
      s = {position_, 0, k_steps_};
      position_ += grid_size() / kMulticast;
    }
    return true;
  }

 private:
  static constexpr bool kWholeTiles = kDecomposition == Decomposition::kStreamK;
  static constexpr bool kRanges = kWholeTiles || kDecomposition == Decomposition::kStriped;
  const GemmParams& p_;
  int k_steps_, position_ = 0, end_ = 0, k_begin_ = 0, k_end_ = 0;
};

// ---- hybrid: whole columns for every CTA, the remainder cut along k ------------------------------------------------
// B = n_blocks blocks of 64 columns over G CTAs of W block slots: first B / (G W) passes with W whole blocks each, then one pass in which a
// CTA takes q = rest / G whole blocks and an equal share of the k steps of the rest % G blocks that are left. A CTA sweeps k in a circle
// that starts at its share, so shares are done, and added, while the whole blocks still run.
struct HybridPass {
  int m;             // row tile
  int first_block;   // whole blocks first_block .. first_block + whole - 1
  int whole;
  int steps;         // k steps of the sweep: all, or the share alone where there is no whole block
  int start;         // k step at which the sweep starts
  int shared;        // share: the first `length0` steps of the sweep are of block `shared`, up to its end at most; the next
  int length0, length1;  // `length1` steps, which start at k step 0, of block `shared + kMulticast`
};

// Holds nothing: a pass is computed again from its index wherever it is needed, so that no register is kept for it in the main loop.
template <int kSlots, int kMulticast> struct HybridSchedule {
  const GemmParams& p;

  MC_DEVICE int passes() const { return p.m_tiles * passes_per_row(); }
  MC_DEVICE HybridPass pass(int cta, int index) const {
    int m = 0, i = index;
    if (p.m_tiles > 1) {
      m = index / passes_per_row();
      i = index - m * passes_per_row();
    }
    if (i < p.full_passes) return {m, (i * grid_size() + cta) * kSlots, kSlots, p.k_steps, 0, 0, 0, 0};
    HybridPass pass{m, p.n_blocks - p.left_over - (grid_size() - cta) * p.whole_blocks, p.whole_blocks, p.k_steps, 0, 0, 0, 0};
    if (p.left_over == 0) return pass;
    const int cluster = cta / kMulticast, begin = share_begin(cluster), end = share_begin(cluster + 1);
    const int block = small_quotient(begin, p.k_steps), block_end = (block + 1) * p.k_steps;
    pass.shared = p.n_blocks - p.left_over + block * kMulticast + cta % kMulticast;
    pass.start = begin - block * p.k_steps;
    pass.length0 = (end < block_end ? end : block_end) - begin;
    pass.length1 = end > block_end ? end - block_end : 0;
    if (pass.whole == 0) pass.steps = end - begin;
    return pass;
  }
  // pass(cta, index).steps, for a warp that needs nothing else.
  MC_DEVICE int steps(int cta, int index) const {
    const int i = p.m_tiles > 1 ? index % passes_per_row() : index;
    if (i < p.full_passes || p.whole_blocks > 0 || p.left_over == 0) return p.k_steps;
    const int cluster = cta / kMulticast;
    return share_begin(cluster + 1) - share_begin(cluster);
  }
  // The CTA that holds the first k step of left-over block `block` (index in C).
  MC_DEVICE int first_sharer(int block) const {
    const int index = block - (p.n_blocks - p.left_over);
    return shares_of(p).holder(index / kMulticast * p.k_steps) * kMulticast + index % kMulticast;
  }
  // First CTA behind `cta` whose share lies wholly behind left-over block `block` (index in C). Sharers of a block are kMulticast CTAs apart.
  MC_DEVICE int end_of_sharers(int block, int cta) const {
    const int block_end = ((block - (p.n_blocks - p.left_over)) / kMulticast + 1) * p.k_steps;
    int last = cta + kMulticast;
    while (last < grid_size() && share_begin(last / kMulticast) < block_end) last += kMulticast;
    return last;
  }

 private:
  MC_DEVICE int passes_per_row() const { return p.full_passes + (p.whole_blocks + p.left_over > 0); }
  // First unit of cluster `c` among the k steps of the left-over blocks.
  MC_DEVICE int share_begin(int c) const { return shares_of(p).begin(c); }
};

}  // namespace marlin_cutlass
