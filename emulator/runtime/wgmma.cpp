// wgmma: a warp's 16 of the 64 rows, A in registers, B in swizzled shared memory. The sums are computed at wgmma_wait, as late as the
// hardware may; until then the accumulator registers hold a poison pattern.
#include <algorithm>
#include <cstring>

#include "arithmetic.h"
#include "machine.h"

namespace emu {
namespace {

constexpr uint32_t kPoison = 0xffdeadffu;  // a NaN
constexpr int kMaxN = 256;

int depth(const WgmmaOperation& op) { return op.sparse ? 32 : 16; }

struct Descriptor {  // PTX ISA, matrix descriptor of wgmma
  uint32_t start, stride, base_offset, swizzle;
  explicit Descriptor(uint64_t d)
      : start(static_cast<uint32_t>(d & 0x3fff) << 4),
        stride(static_cast<uint32_t>(d >> 32 & 0x3fff) << 4),
        base_offset(static_cast<uint32_t>(d >> 49 & 7)),
        swizzle(static_cast<uint32_t>(d >> 62)) {}
  // Address of 16-byte chunk c (k 8c .. 8c + 7) of row n.
  uint32_t chunk(int n, int c) const {
    const uint32_t address = start + static_cast<uint32_t>(n / 8) * stride + static_cast<uint32_t>(n % 8) * 128 + static_cast<uint32_t>(c) * 16;
    return address ^ ((address >> 7 & 7) << 4);
  }
};

void check_descriptor(const Descriptor& d, int n) {
  if (d.swizzle != 1) fail("wgmma", "descriptor has swizzle mode %u, not 128 bytes (1)", d.swizzle);
  if (d.base_offset || (d.start >> 7 & 7)) fail("wgmma", "B at shared 0x%x: the swizzle pattern must start at a multiple of 1024 bytes", d.start);
  const uint32_t last = d.start + static_cast<uint32_t>(n / 8 - 1) * d.stride + 1023;
  shared_span(d.start & ~1023u, (last | 1023u) + 1 - (d.start & ~1023u), 1024);
}

// Reads B; `record` also remembers the read, so that later writes must be ordered after it.
void check_operand(Warp& warp, const WgmmaOperation& op, bool record) {
  const Descriptor descriptor(op.descriptor);
  Shadow& shadow = warp.block->shadow;
  Access access = access_of(current());
  access.site = op.site;
  for (int n = 0; n < op.n; ++n)
    for (int c = 0; c < depth(op) / 8; ++c) {
      const uint32_t offset = descriptor.chunk(n, c) - kSharedBase;
      if (!record) check_proxy_fence(*warp.block, offset, 16);
      const Conflict conflict = record ? shadow.read(offset, 16, access) : shadow.check_read(offset, 16, access);
      if (conflict.found)
        fail("race", "shared 0x%x is read by wgmma %s but %s", offset + kSharedBase, site_text(op.site).c_str(), describe_conflict(conflict).c_str());
    }
}

bool poisoned(const float* d, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, d + i, 4);
    if (bits != kPoison) return false;
  }
  return true;
}

void check_poison(const WgmmaOperation& op) {
  for (int l = 0; l < kWarpSize; ++l)
    if (!poisoned(op.d[l], op.n / 2))
      fail("race", "lane %d changed accumulators of wgmma %s before wgmma_wait", l, site_text(op.site).c_str());
}

// Takes the accumulators out of the registers, unless an earlier wgmma in flight already did.
void take_accumulators(Warp& warp, const WgmmaOperation& op) {
  WgmmaAccumulator& held = warp.wgmma_held[op.d[0]];
  if (held.users++ > 0) {
    if (!op.accumulate) fail("race", "wgmma %s replaces a sum that another one in flight adds to", site_text(op.site).c_str());
    return check_poison(op);
  }
  const size_t count = static_cast<size_t>(op.n) / 2;
  held.values.resize(kWarpSize * count);
  for (int l = 0; l < kWarpSize; ++l) {
    if (op.accumulate) std::memcpy(&held.values[static_cast<size_t>(l) * count], op.d[l], count * 4);
    else std::fill_n(&held.values[static_cast<size_t>(l) * count], count, 0.f);
    for (size_t i = 0; i < count; ++i) std::memcpy(op.d[l] + i, &kPoison, 4);
  }
}

void return_accumulators(Warp& warp, const WgmmaOperation& op) {
  const auto held = warp.wgmma_held.find(op.d[0]);
  check_poison(op);
  if (--held->second.users > 0) return;
  const size_t count = static_cast<size_t>(op.n) / 2;
  for (int l = 0; l < kWarpSize; ++l) std::memcpy(op.d[l], &held->second.values[static_cast<size_t>(l) * count], count * 4);
  warp.wgmma_held.erase(held);
}

// Registers may not be written between the fence and the wgmma that uses them. Ranges are known from their first use on.
void check_unchanged_since_fence(Warp& warp, const uint32_t* const (&where)[kWarpSize], size_t words, const char* what) {
  for (const RegisterRange& range : warp.wgmma_ranges) {
    if (range.where[0] != where[0] || range.words != words) continue;
    for (int l = 0; l < kWarpSize && range.known; ++l)
      if (std::memcmp(&range.at_fence[static_cast<size_t>(l) * words], where[l], words * 4))
        fail("wgmma", "lane %d wrote %s between wgmma_fence and this wgmma", l, what);
    return;
  }
  RegisterRange range;
  std::copy(std::begin(where), std::end(where), std::begin(range.where));
  range.words = words;
  warp.wgmma_ranges.push_back(std::move(range));
}

void check_registers(Warp& warp, const WgmmaOperation& op) {
  check_unchanged_since_fence(warp, op.a, 4, "A registers");
  if (warp.wgmma_held.count(op.d[0])) return;  // guarded by the poison
  const uint32_t* accumulators[kWarpSize];
  for (int l = 0; l < kWarpSize; ++l) accumulators[l] = reinterpret_cast<const uint32_t*>(op.d[l]);
  check_unchanged_since_fence(warp, accumulators, static_cast<size_t>(op.n) / 2, "accumulators");
}

void compare_with_warpgroup(Warp& warp, const WgmmaOperation& op) {
  const uint64_t key = static_cast<uint64_t>(warp.index / 4) << 48 | warp.wgmma_issued++;
  const uint64_t what = op.descriptor * 1099511628211ull + static_cast<uint64_t>(op.n) * 8 + op.accumulate * 4 + op.sparse * 2 + op.bf16;
  const auto [entry, fresh] = warp.block->wgmma_stream.try_emplace(key, what);
  if (!fresh && entry->second != what) fail("wgmma", "the warps of warpgroup %d issue different operations", warp.index / 4);
}

// Places of the two kept values of the four at depth 4f of row m, four bits: lane 4 (m % 8) has depths 0..15, the next one 16..31; rows 8..15 are
// in the upper halves. Lanes 2 and 3 of each four are not read.
uint32_t places_of(const WgmmaOperation& op, int m, int f) { return op.places[m % 8 * 4 + f / 4] >> (m / 8 * 16 + f % 4 * 4) & 15; }

void check_places(const WgmmaOperation& op) {
  for (int m = 0; m < 16; ++m)
    for (int f = 0; f < 8; ++f) {
      const uint32_t places = places_of(op, m, f);
      if ((places & 3) >= places >> 2)
        fail("instruction", "metadata 0x%x of row %d, depth %d: two places in rising order are needed", places, m, 4 * f);
    }
}

void run_issue(Warp& warp) {
  ++machine.statistics[kStatWgmma];
  const Operands& first = warp.lane[0].operands;
  WgmmaOperation op;
  op.bf16 = warp.lane[0].activity.second & 1;
  op.sparse = warp.lane[0].activity.second & 2;
  op.accumulate = warp.lane[0].activity.second & 4;
  op.n = static_cast<int>(warp.lane[0].activity.second >> 3);
  op.descriptor = first.value;
  op.site = current().activity.site;
  for (int l = 0; l < kWarpSize; ++l) {
    const Operands& o = warp.lane[l].operands;
    if (o.value != op.descriptor) fail("divergence", "lanes 0 and %d give different descriptors", l);
    op.d[l] = static_cast<float*>(o.out);
    op.a[l] = static_cast<const uint32_t*>(o.in[0]);
    op.places_at[l] = static_cast<const uint32_t*>(o.in[1]);
    op.places[l] = op.sparse ? *op.places_at[l] : 0;
    std::memcpy(op.a_copy[l], op.a[l], 16);
  }
  if (!warp.wgmma_fenced) fail("wgmma", "no wgmma_fence between the last commit and this wgmma with operands in registers");
  check_descriptor(Descriptor(op.descriptor), op.n);
  check_operand(warp, op, false);
  if (op.sparse) check_places(op);
  check_registers(warp, op);
  compare_with_warpgroup(warp, op);
  take_accumulators(warp, op);
  warp.open_wgmma.push_back(op);
}

void unpack(bool bf16, uint32_t pair, float* out) {
  out[0] = to_float(bf16, static_cast<uint16_t>(pair));
  out[1] = to_float(bf16, static_cast<uint16_t>(pair >> 16));
}

// The row operand as the instruction sees it: sparse, with the zeros between the kept values.
void unpack_rows(const WgmmaOperation& op, float (&a)[16][32]) {
  std::memset(a, 0, sizeof a);
  for (int l = 0; l < kWarpSize; ++l)
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + 8 * (i & 1), column = 2 * (l % 4) + 8 * (i >> 1);
      float pair[2];
      unpack(op.bf16, op.a_copy[l][i], pair);
      const uint32_t places = op.sparse ? places_of(op, row, column / 2) : 0;
      a[row][op.sparse ? 2 * column + static_cast<int>(places & 3) : column] = pair[0];
      a[row][op.sparse ? 2 * column + static_cast<int>(places >> 2) : column + 1] = pair[1];
    }
}

// d[16 x n] += a[16 x depth] * b[depth x n] on the values held back.
void compute(Warp& warp, const WgmmaOperation& op) {
  alignas(64) static float a[16][32], b[32][kMaxN], d[16][kMaxN];
  const Descriptor descriptor(op.descriptor);
  const uint8_t* shared = warp.block->shared.data();
  for (int n = 0; n < op.n; ++n)
    for (int c = 0; c < depth(op) / 8; ++c) {
      uint16_t k8[8];
      std::memcpy(k8, shared + (descriptor.chunk(n, c) - kSharedBase), 16);
      for (int k = 0; k < 8; ++k) b[8 * c + k][n] = to_float(op.bf16, k8[k]);
    }
  std::vector<float>& values = warp.wgmma_held[op.d[0]].values;
  const int count = op.n / 2;
  unpack_rows(op, a);
  for (int l = 0; l < kWarpSize; ++l) {
    const int r = l / 4, c = 2 * (l % 4);
    for (int i = 0; i < count; ++i) d[r + 8 * (i >> 1 & 1)][8 * (i / 4) + c + (i & 1)] = values[static_cast<size_t>(l * count + i)];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < depth(op); ++k)
      for (int n = 0; n < op.n; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int l = 0; l < kWarpSize; ++l)
    for (int i = 0; i < count; ++i)
      values[static_cast<size_t>(l * count + i)] = d[l / 4 + 8 * (i >> 1 & 1)][8 * (i / 4) + 2 * (l % 4) + (i & 1)];
}

void finish(Warp& warp, const WgmmaOperation& op) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (std::memcmp(op.a[l], op.a_copy[l], 16))
      fail("race", "lane %d changed A registers of wgmma %s before wgmma_wait", l, site_text(op.site).c_str());
    if (op.sparse && *op.places_at[l] != op.places[l])
      fail("race", "lane %d changed the places of wgmma %s before wgmma_wait", l, site_text(op.site).c_str());
  }
  check_operand(warp, op, true);
  compute(warp, op);
  return_accumulators(warp, op);
}

void run_fence(Warp& warp) {
  warp.wgmma_fenced = true;
  for (RegisterRange& range : warp.wgmma_ranges) {
    range.known = !warp.wgmma_held.count(reinterpret_cast<const float*>(range.where[0]));
    range.at_fence.resize(kWarpSize * range.words);
    for (size_t l = 0; l < kWarpSize; ++l) std::memcpy(&range.at_fence[l * range.words], range.where[l], range.words * 4);
  }
}

void run_commit(Warp& warp) {
  warp.wgmma_groups.push_back(std::move(warp.open_wgmma));
  warp.open_wgmma.clear();
  warp.wgmma_fenced = false;
}

void run_wait(Warp& warp) {
  while (warp.wgmma_groups.size() > current().activity.first) {
    for (const WgmmaOperation& op : warp.wgmma_groups.front()) finish(warp, op);
    warp.wgmma_groups.pop_front();
  }
}

void issue(int n, float* d, const uint32_t* a, const uint32_t* places, uint64_t b) {
  if (n < 8 || n > kMaxN || n % 8) fail("wgmma", "n = %d: must be a multiple of 8 up to 256", n);
  Operands& o = current().operands;
  o.out = d, o.in[0] = a, o.in[1] = places, o.value = b;
  converge(run_issue);
}

}  // namespace

void check_warp_exit(Warp& warp) {
  if (!warp.open_wgmma.empty() || !warp.wgmma_groups.empty())
    record_failure("wgmma", format_text("block %d warp %d returned with wgmma in flight", warp.block->index, warp.index));
  if (warp.block->threads_left > 1) return;
  for (const Warp& other : warp.block->warps) {
    const Warp& leader = warp.block->warps[static_cast<size_t>(other.index / 4 * 4)];
    if (other.wgmma_issued != leader.wgmma_issued)
      record_failure("wgmma", format_text("block %d: warps %d and %d of one warpgroup issued %llu and %llu wgmma", warp.block->index,
                                          leader.index, other.index, (unsigned long long)leader.wgmma_issued, (unsigned long long)other.wgmma_issued));
  }
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_wgmma_fence() {
  EMU_ENTER("wgmma_fence", 0, 0);
  converge(run_fence);
}

void emu_wgmma_commit() {
  EMU_ENTER("wgmma_commit", 0, 0);
  converge(run_commit);
}

void emu_wgmma_wait(int pending) {
  EMU_ENTER("wgmma_wait", pending, 0);
  converge(run_wait);
}

void emu_wgmma_m64k16(bool bf16, int n, float* d, const uint32_t* a, uint64_t b, int accumulate) {
  EMU_ENTER("wgmma_m64k16", 0, n * 8 + (accumulate != 0) * 4 + bf16);
  issue(n, d, a, nullptr, b);
}

void emu_wgmma_sparse_m64k32(bool bf16, int n, float* d, const uint32_t* a, const uint32_t* places, uint64_t b, int accumulate) {
  EMU_ENTER("wgmma_sparse_m64k32", 0, n * 8 + (accumulate != 0) * 4 + 2 + bf16);
  issue(n, d, a, places, b);
}

}  // extern "C"
