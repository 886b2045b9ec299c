// Launch-time numbers of one multiply: the C++ mirror of generator/schedule.py (a test compares them).
#pragma once
#include <algorithm>
#include <cstdint>

#include "error.h"
#include "marlin_cutlass/params.h"

namespace marlin_cutlass {

enum class Family { kAmpere, kHopper, kSparse, kHopperSparse };
enum class Dtype { kFloat16, kBfloat16 };

// What is fixed when a kernel is compiled; generator/variant.py. The order of the fields is that of the C interface.
struct VariantFields {
  int32_t family, dtype, zeros, group_size, m_tile, n_sm, k_sm, warps_n, warps_k, stages, decomposition, split, ctas_per_sm, multicast;
  int32_t threads, shared_bytes, cluster;
};
constexpr int kVariantFieldCount = 17;
static_assert(sizeof(VariantFields) == kVariantFieldCount * sizeof(int32_t));

// Whether the sum over k is cut the same way for every number of rows.
inline bool is_batch_invariant(const VariantFields& v) {
  const auto decomposition = static_cast<Decomposition>(v.decomposition);
  return decomposition == Decomposition::kDataParallel || (decomposition == Decomposition::kSplitK && v.cluster > 1);
}

struct Schedule {
  int64_t m_tiles, n_tiles, k_steps, raster, grid, cluster, partials, flags, whole_passes, owner_steps;
};

// CTAs of one grid that wait for each other: all of them must be resident.
inline bool waits_across_ctas(const VariantFields& v) {
  const auto decomposition = static_cast<Decomposition>(v.decomposition);
  return decomposition == Decomposition::kStriped || decomposition == Decomposition::kStreamK || decomposition == Decomposition::kHybrid;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int64_t kMaxUnits = INT32_MAX;  // kernels count tiles x k steps in int32
constexpr int64_t kRaster = 8;            // see RASTER in generator/schedule.py

// Passes of a hybrid grid over all row tiles; a CTA hands in at most two shares of blocks in each, the end of one and the start of the next.
inline int64_t hybrid_passes(const VariantFields& v, const Schedule& s, int64_t n_blocks) {
  GemmParams p{};
  p.n_blocks = static_cast<int32_t>(n_blocks);
  p.k_steps = static_cast<int32_t>(s.k_steps);
  set_hybrid_partition(p, v.n_sm / kBlockColumns, static_cast<int>(s.grid), v.multicast);
  return s.m_tiles * (p.full_passes + (p.whole_blocks + p.left_over > 0));
}

constexpr int64_t kSharedActivations = int64_t{32} << 20;  // see SHARED_ACTIVATIONS in generator/schedule.py

// Stream-K: passes in which every CTA, or cluster of those that share activations, takes a whole tile.
inline int64_t whole_passes(const VariantFields& v, const Schedule& s) {
  if (s.grid == 0) return 0;  // no rows
  const int64_t tiles = s.m_tiles * s.n_tiles, workers = s.grid / v.multicast, passes = tiles / workers, rest = tiles % workers;
  const int64_t activations = s.m_tiles * v.m_tile * s.k_steps * v.k_sm * 2;
  return passes > 0 && rest > 0 && activations <= kSharedActivations ? passes - 1 : passes;
}

constexpr int64_t kOwnerSteps = 2;  // see OWNER_STEPS in generator/schedule.py

// Stream-K: k steps that the owner of a cut tile takes beyond its share; see owner_steps in generator/schedule.py.
inline int64_t owner_steps(const VariantFields& v, const Schedule& s) {
  if (s.grid == 0) return 0;  // no rows
  const int64_t workers = s.grid / v.multicast, cut = s.m_tiles * s.n_tiles - s.whole_passes * workers;
  const bool waits = cut < workers && s.k_steps >= 4 * kOwnerSteps;
  return waits && cut * (s.k_steps - kOwnerSteps) >= workers ? kOwnerSteps : 0;
}

inline Schedule make_schedule(const VariantFields& v, int64_t m, int64_t n, int64_t k, int64_t sms) {
  Schedule s{};
  s.m_tiles = ceil_div(m, v.m_tile);
  const int64_t n_blocks = ceil_div(n, kBlockColumns), shared = v.multicast;
  s.n_tiles = ceil_div(n_blocks, v.n_sm / kBlockColumns * shared);
  s.k_steps = ceil_div(ceil_div(k, kBlockDepth) * kBlockDepth, v.k_sm);
  // CTAs that share activations stand side by side along n: a tile is as wide as their cluster.
  const int64_t tiles = s.m_tiles * s.n_tiles, clusters = std::max<int64_t>(1, sms * v.ctas_per_sm / shared);
  const int64_t tile_floats = int64_t{v.m_tile} * v.n_sm;
  if (tiles * s.k_steps > kMaxUnits)
    invalid("M=", m, ", N=", n, ", K=", k, ": ", tiles, " tiles x ", s.k_steps, " k steps exceed ", kMaxUnits, "; split the rows");
  s.raster = std::max<int64_t>(1, std::min(s.m_tiles, kRaster));
  s.cluster = v.cluster;
  switch (static_cast<Decomposition>(v.decomposition)) {
    case Decomposition::kSplitK:
      s.grid = tiles * v.split;
      if (v.cluster == 1) s.partials = s.grid * tile_floats, s.flags = s.grid;
      break;
    case Decomposition::kDataParallel:
      s.grid = std::min(tiles, clusters) * shared;
      break;
    case Decomposition::kStriped:
    case Decomposition::kStreamK:  // every CTA of the grid is resident: they wait for each other
      s.grid = std::min(tiles * s.k_steps, clusters) * shared;
      s.partials = s.grid * tile_floats, s.flags = s.grid;
      if (static_cast<Decomposition>(v.decomposition) == Decomposition::kStreamK) s.whole_passes = whole_passes(v, s), s.owner_steps = owner_steps(v, s);
      else s.flags *= v.warps_n;
      break;
    case Decomposition::kHybrid:
      s.grid = std::min(tiles * s.k_steps, clusters) * shared;
      if (s.grid > 0) s.flags = hybrid_passes(v, s, n_blocks) * s.grid, s.partials = 2 * s.flags * v.m_tile * kBlockColumns;
      break;
  }
  return s;
}

}  // namespace marlin_cutlass
