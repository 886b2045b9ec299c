// Instructions that the 32 lanes of a warp execute together.
#include <cstring>

#include "arithmetic.h"
#include "machine.h"

namespace emu {
namespace {

void run_shuffle(Warp& warp) {
  for (Lane& lane : warp.lane) lane.operands.result = warp.lane[lane.activity.first & 31].operands.value;
}

template <int kMatrices> void run_ldmatrix(Warp& warp) {
  ++machine.statistics[kStatLdmatrix];
  const uint8_t* row[8 * kMatrices];
  Lane* const caller = &current();
  for (int l = 0; l < 8 * kMatrices; ++l) {
    emu_thread = &warp.lane[l];  // messages name the lane that supplied the address
    const SharedSpan span = shared_span(static_cast<uint32_t>(current().activity.first), 16, 16);
    const Conflict conflict = span.block->shadow.read(span.offset, 16, access_of(current()));
    if (conflict.found) {
      emu_thread = caller;
      fail("race", "shared 0x%x is read here but %s", span.offset + kSharedBase, describe_conflict(conflict).c_str());
    }
    log_bank_access(2, static_cast<uint32_t>(current().activity.first), 16);
    row[l] = span.data;
  }
  emu_thread = caller;
  // Row r of matrix i comes from lane 8i + r; lane l receives elements 2(l % 4), 2(l % 4) + 1 of row l / 4.
  for (int i = 0; i < kMatrices; ++i)
    for (int l = 0; l < kWarpSize; ++l)
      std::memcpy(static_cast<uint32_t*>(warp.lane[l].operands.out) + i, row[8 * i + l / 4] + 4 * (l % 4), 4);
}

template <bool kBf16> void unpack_pair(uint32_t pair, float* even, float* odd) {
  *even = to_float(kBf16, static_cast<uint16_t>(pair));
  *odd = to_float(kBf16, static_cast<uint16_t>(pair >> 16));
}

template <bool kBf16> void run_mma(Warp& warp) {
  ++machine.statistics[kStatMma];
  alignas(32) float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < kWarpSize; ++l) {
    const Operands& o = warp.lane[l].operands;
    const int r = l / 4, c = 2 * (l % 4);
    const auto* ra = static_cast<const uint32_t*>(o.in[0]);
    const auto* rb = static_cast<const uint32_t*>(o.in[1]);
    const auto* rd = static_cast<const float*>(o.out);
    for (int i = 0; i < 4; ++i) unpack_pair<kBf16>(ra[i], &a[r + 8 * (i & 1)][c + 8 * (i >> 1)], &a[r + 8 * (i & 1)][c + 8 * (i >> 1) + 1]);
    for (int i = 0; i < 2; ++i) unpack_pair<kBf16>(rb[i], &b[c + 8 * i][r], &b[c + 8 * i + 1][r]);
    for (int i = 0; i < 4; ++i) d[r + 8 * (i >> 1)][c + (i & 1)] = rd[i];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int l = 0; l < kWarpSize; ++l) {
    auto* rd = static_cast<float*>(warp.lane[l].operands.out);
    for (int i = 0; i < 4; ++i) rd[i] = d[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)];
  }
}

// Sparse: in[0] kept values, in[1] two dense operands, in[2] metadata.
template <bool kBf16, int kSelector> void run_mma_sparse(Warp& warp) {
  ++machine.statistics[kStatMma];
  float a[16][32] = {}, b[32][8], d[16][8];
  for (int l = 0; l < kWarpSize; ++l) {
    const Operands& o = warp.lane[l].operands;
    const int r = l / 4, t = l % 4;
    const auto* ra = static_cast<const uint32_t*>(o.in[0]);
    const auto* rb = static_cast<const uint32_t*>(o.in[1]);
    const auto* rd = static_cast<const float*>(o.out);
    for (int i = 0; i < 4; ++i) {  // two kept values of the four at depth 4t + 16 (i / 2)
      const int row = r + 8 * (i & 1), half = i >> 1;
      const Operands& holder = warp.lane[4 * r + 2 * kSelector + half].operands;
      const uint32_t places = *static_cast<const uint32_t*>(holder.in[2]) >> (16 * (i & 1) + 4 * t) & 15;
      const int first = places & 3, second = places >> 2;
      if (first >= second) fail("instruction", "metadata 0x%x of row %d, depth %d: two places in rising order are needed", places, row, 16 * half + 4 * t);
      float* four = &a[row][16 * half + 4 * t];
      unpack_pair<kBf16>(ra[i], &four[first], &four[second]);
    }
    for (int i = 0; i < 4; ++i) unpack_pair<kBf16>(rb[i], &b[2 * t + 8 * i][r], &b[2 * t + 8 * i + 1][r]);
    for (int i = 0; i < 4; ++i) d[r + 8 * (i >> 1)][2 * t + (i & 1)] = rd[i];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int l = 0; l < kWarpSize; ++l) {
    auto* rd = static_cast<float*>(warp.lane[l].operands.out);
    for (int i = 0; i < 4; ++i) rd[i] = d[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)];
  }
}

void run_movmatrix(Warp& warp) {
  uint16_t matrix[8][8];
  for (const Lane& lane : warp.lane)
    for (int h = 0; h < 2; ++h) matrix[lane.index / 4][2 * (lane.index % 4) + h] = static_cast<uint16_t>(lane.operands.value >> 16 * h);
  for (Lane& lane : warp.lane) {
    const int row = lane.index / 4, column = 2 * (lane.index % 4);
    lane.operands.result = matrix[column][row] | static_cast<uint32_t>(matrix[column + 1][row]) << 16;
  }
}

// Nothing to compute; their addresses tell instructions apart.
void run_elect(Warp&) {}
void run_barrier(Warp&) {}

void run_block_sync(ThreadBarrier& barrier) {
  // Everything that any participant did is ordered before everything that they do next.
  std::vector<Warp*> warps;
  const auto add = [&](Warp* w) {
    for (Warp* other : warps)
      if (other == w) return;
    warps.push_back(w);
  };
  add(current().warp);
  for (Lane* lane : barrier.waiters.lanes) add(lane->warp);
  Clock all;
  for (Warp* w : warps) join(all, w->clock);
  for (Warp* w : warps) {
    w->clock = all;
    ++w->clock[w->agent];
    flush_bank_accesses(*w);
  }
}

void barrier_take_part(int id, int threads) {
  converge(run_barrier);  // bar.sync is aligned: all lanes of a warp take part together
  Block& block = *current().warp->block;
  ThreadBarrier& barrier = block.barriers[id];
  if (barrier.arrived && barrier.expected != threads)
    fail("divergence", "barrier %d is used with %d threads here and with %d by those who wait", id, threads, barrier.expected);
  barrier.expected = threads;
  if (++barrier.arrived == threads) {
    run_block_sync(barrier);
    ++machine.statistics[kStatBlockSync];
    barrier.arrived = 0;
    wake(barrier.waiters);
  } else {
    block_on(barrier.waiters);
  }
}

void named_barrier(int id, int threads) {
  if (id < 0 || id >= kNamedBarriers) fail("bounds", "barrier id %d is not in 0..15", id);
  if (threads <= 0 || threads % kWarpSize || threads > machine.launch->threads)
    fail("bounds", "%d threads: must be a multiple of 32 within the block's %d", threads, machine.launch->threads);
  barrier_take_part(id, threads);
}

}  // namespace
}  // namespace emu

using namespace emu;

extern "C" {

void emu_block_sync() {
  EMU_ENTER("block_sync", 0, 0);
  barrier_take_part(0, machine.launch->threads);
}

void emu_named_barrier_sync(int id, int threads) {
  EMU_ENTER("named_barrier_sync", id, threads);
  named_barrier(id, threads);
}

void emu_warp_sync() {
  EMU_ENTER("warp_sync", 0, 0);
  converge(nullptr);
}

uint32_t emu_shuffle(uint32_t x, int lane) {
  EMU_ENTER("shuffle", lane, 0);
  current().operands.value = x;
  converge(run_shuffle);
  return static_cast<uint32_t>(current().operands.result);
}

uint32_t emu_shuffle_xor(uint32_t x, int mask) {
  EMU_ENTER("shuffle_xor", current().index ^ mask, 0);
  current().operands.value = x;
  converge(run_shuffle);
  return static_cast<uint32_t>(current().operands.result);
}

bool emu_elect_one() {
  EMU_ENTER("elect_one", 0, 0);
  converge(run_elect);
  return current().index == machine.policy.leader;
}

void emu_trap() {
  EMU_ENTER("trap", 0, 0);
  fail("trap", "the kernel trapped");
}

void emu_ldmatrix(uint32_t* r, int matrices, uint32_t row) {
  EMU_ENTER("ldmatrix", row, matrices);
  current().operands.out = r;
  converge(matrices == 4 ? run_ldmatrix<4> : run_ldmatrix<2>);
}

void emu_mma_m16n8k16(bool bf16, float* d, const uint32_t* a, const uint32_t* b) {
  EMU_ENTER("mma_m16n8k16", 0, 0);
  Operands& o = current().operands;
  o.out = d, o.in[0] = a, o.in[1] = b;
  converge(bf16 ? run_mma<true> : run_mma<false>);
}

void emu_mma_sparse_m16n8k32(bool bf16, int selector, float* d, const uint32_t* a, const uint32_t* b, const uint32_t* metadata) {
  EMU_ENTER("mma_sparse_m16n8k32", 0, 0);
  Operands& o = current().operands;
  o.out = d, o.in[0] = a, o.in[1] = b, o.in[2] = metadata;
  // The selector is part of the instruction: lanes with different ones must not meet.
  void (*const run[2][2])(Warp&) = {{run_mma_sparse<false, 0>, run_mma_sparse<true, 0>}, {run_mma_sparse<false, 1>, run_mma_sparse<true, 1>}};
  converge(run[selector][bf16]);
}

uint32_t emu_movmatrix_trans(uint32_t x) {
  EMU_ENTER("movmatrix_trans", 0, 0);
  current().operands.value = x;
  converge(run_movmatrix);
  return static_cast<uint32_t>(current().operands.result);
}

uint32_t emu_fma2(bool bf16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int h = 0; h < 32; h += 16)
    r |= static_cast<uint32_t>(fma_element(bf16, static_cast<uint16_t>(a >> h), static_cast<uint16_t>(b >> h), static_cast<uint16_t>(c >> h))) << h;
  return r;
}

uint32_t emu_sub2_f16(uint32_t a, uint32_t b) {
  uint32_t r = 0;
  for (int h = 0; h < 32; h += 16) {
    const double x = static_cast<double>(half_to_float(static_cast<uint16_t>(a >> h))) - half_to_float(static_cast<uint16_t>(b >> h));
    r |= static_cast<uint32_t>(round_to_element(false, x)) << h;
  }
  return r;
}

uint32_t emu_pack2(bool bf16, float low, float high) {
  return round_to_element(bf16, low) | static_cast<uint32_t>(round_to_element(bf16, high)) << 16;
}

float emu_to_float(bool bf16, uint16_t x) { return to_float(bf16, x); }

}  // extern "C"
