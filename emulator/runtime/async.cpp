// mbarriers, and the copies that complete on them at an unknown later time: bulk, tensor and remote stores; cluster barriers.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

constexpr int64_t kMaxTransactionBytes = (1 << 20) - 1;  // tx-count range (PTX ISA, mbarrier)
constexpr uint32_t kSwizzleRow = 128;

MBarrier& barrier_in(Block& block, uint32_t address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("mbarrier", "shared 0x%x of block %d is not an initialised mbarrier", address, block.index);
  MBarrier& bar = found->second;
  const Warp& warp = *current().warp;
  const Clock& clock = warp.clock;
  if (bar.init_warp != &warp && (bar.init_agent >= clock.size() || clock[bar.init_agent] < bar.init_clock))
    fail("race", "the initialisation of mbarrier 0x%x of block %d is not ordered before its use", address, block.index);
  return bar;
}

MBarrier& find_barrier(uint32_t address) {
  const SharedSpan span = shared_span(address, 8, 8);
  MBarrier& bar = barrier_in(*span.block, span.offset + kSharedBase);
  if (span.block != current().warp->block && !bar.fenced)
    fail("mbarrier", "0x%x is used by another block or by a copy without mbarrier_init_fence", bar.address);
  return bar;
}

MBarrier& find_fenced_barrier(Block& block, uint32_t address) {
  MBarrier& bar = barrier_in(block, address);
  if (!bar.fenced) fail("mbarrier", "0x%x is used by a copy without mbarrier_init_fence", address);
  return bar;
}

void complete_phase_if_due(MBarrier& bar) {
  if (bar.pending || bar.bytes) return;
  ++bar.phase;
  bar.pending = bar.count;
  bar.completed = bar.incoming;
  wake(bar.waiters);
}

bool phase_done(const MBarrier& bar, uint32_t parity) { return (bar.phase & 1) != parity; }

void land_in(Block& block, MBarrier& bar, const AsyncTransfer& t, const uint8_t* data) {
  if (block.threads_left == 0) {
    record_failure("race", format_text("a copy into shared 0x%x of block %d %s lands after the block returned", t.dst, block.index,
                                       site_text(t.site).c_str()));
    return;
  }
  std::memcpy(block.shared.data() + (t.dst - kSharedBase), data, t.bytes);
  const uint32_t clock = static_cast<uint32_t>(bar.phase + 1);
  block.shadow.land(t.dst - kSharedBase, t.bytes, bar.agent, clock, 0, t.site);
  if (bar.incoming.size() <= bar.agent) bar.incoming.resize(bar.agent + 1);
  bar.incoming[bar.agent] = clock;
  bar.bytes -= t.bytes;
  complete_phase_if_due(bar);
}

// The box, zero where it is outside the tensor, in the 128-byte swizzle: 16-byte chunk i of a 128-byte line goes to chunk
// i ^ (line % 8), the line being counted in the destination's address.
std::vector<uint8_t> read_box(const AsyncTransfer& t) {
  std::vector<uint8_t> box(t.bytes);
  const EmuTensorMap& map = t.map;
  uint32_t linear = 0;
  for (int z = 0; z < map.box[2]; ++z)
    for (int y = 0; y < map.box[1]; ++y)
      for (int x = 0; x < map.box[0]; ++x, linear += 2) {
        const int64_t i[3] = {t.coordinate[0] + x, t.coordinate[1] + y, t.coordinate[2] + z};
        bool inside = true;
        for (int d = 0; d < 3; ++d) inside = inside && i[d] >= 0 && i[d] < map.dim[d];
        const uint32_t address = t.dst + linear;
        const uint32_t swizzled = address ^ ((address >> 7 & 7) << 4);
        const auto* element = static_cast<const uint8_t*>(map.base) + i[0] * 2 + i[1] * map.stride[0] + i[2] * map.stride[1];
        if (inside) std::memcpy(&box[swizzled - t.dst], element, 2);
      }
  return box;
}

void check_tensor_source(const EmuTensorMap& map, const int (&c)[3]) {
  for (int64_t z = std::max(c[2], 0); z < std::min<int64_t>(c[2] + map.box[2], map.dim[2]); ++z)
    for (int64_t y = std::max(c[1], 0); y < std::min<int64_t>(c[1] + map.box[1], map.dim[1]); ++y) {
      const int64_t first = std::max(c[0], 0), last = std::min<int64_t>(c[0] + map.box[0], map.dim[0]);
      const auto* row = static_cast<const uint8_t*>(map.base) + first * 2 + y * map.stride[0] + z * map.stride[1];
      if (first < last) check_global(row, (last - first) * 2, 2, kEmuRead);
    }
}

// Claims the destination in `block` and remembers the barrier that the copy completes on.
void claim_destination(Block& block, uint32_t bar, AsyncTransfer& t) {
  t.barriers.push_back(&find_fenced_barrier(block, bar));
  if (block.threads_left == 0) fail("bounds", "block %d has returned", block.index);
  check_proxy_fence(block, t.dst - kSharedBase, t.bytes);
  const Conflict conflict = block.shadow.write(t.dst - kSharedBase, t.bytes, access_of(current()), true);
  if (conflict.found)
    fail("race", "shared 0x%x of block %d is written by this copy but %s", t.dst, block.index, describe_conflict(conflict).c_str());
}

AsyncTransfer new_transfer(AsyncTransfer::Kind kind, uint32_t dst, uint32_t bytes) {
  AsyncTransfer t{};
  t.kind = kind, t.dst = dst, t.bytes = bytes;
  t.site = current().activity.site;
  return t;
}

void send(AsyncTransfer&& t) {
  machine.transfers.push_back(std::move(t));
  progress();
}

void run_cluster(Warp&) {}
void run_set_registers(Warp&) {}

}  // namespace

bool land_one_transfer() {
  std::vector<AsyncTransfer>& transfers = machine.transfers;
  if (transfers.empty()) return false;
  const size_t i = machine.policy.random ? machine.random.below(static_cast<uint32_t>(transfers.size())) : 0;
  const AsyncTransfer t = std::move(transfers[i]);
  transfers.erase(transfers.begin() + static_cast<long>(i));
  std::vector<uint8_t> box;
  const uint8_t* data = static_cast<const uint8_t*>(t.src);
  if (t.kind == AsyncTransfer::kTensor) box = read_box(t), data = box.data();
  if (t.kind == AsyncTransfer::kStore) data = t.value;
  for (MBarrier* bar : t.barriers) land_in(*bar->block, *bar, t, data);
  return true;
}

void check_block_exit(Block& block) {
  for (const AsyncTransfer& t : machine.transfers)
    for (const MBarrier* bar : t.barriers)
      if (bar->block == &block)
        record_failure("race", format_text("block %d returned while a copy into its shared 0x%x %s is under way", block.index, t.dst,
                                           site_text(t.site).c_str()));
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_mbarrier_init(uint32_t addr, int arrivals) {
  EMU_ENTER("mbarrier_init", addr, arrivals);
  const SharedSpan span = shared_span(addr, 8, 8);
  if (arrivals < 1) fail("mbarrier", "%d arrivals: must be at least 1", arrivals);
  const Conflict conflict = span.block->shadow.write(span.offset, 8, access_of(current()), false);
  if (conflict.found) fail("race", "shared 0x%x becomes an mbarrier but %s", addr, describe_conflict(conflict).c_str());
  auto [entry, fresh] = span.block->mbarriers.try_emplace(span.offset + kSharedBase);
  if (!fresh) fail("mbarrier", "0x%x is initialised a second time", addr);
  MBarrier& bar = entry->second;
  Warp& warp = *current().warp;
  bar.count = bar.pending = arrivals;
  bar.address = span.offset + kSharedBase;
  bar.block = span.block;
  bar.agent = machine.agents++;
  bar.init_agent = warp.agent, bar.init_clock = warp.clock[warp.agent], bar.init_warp = &warp;
}

void emu_mbarrier_init_fence() {
  EMU_ENTER("mbarrier_init_fence", 0, 0);
  for (auto& [address, bar] : current().warp->block->mbarriers)
    if (bar.init_warp == current().warp) bar.fenced = true;
}

void emu_mbarrier_arrive(uint32_t addr, int arrivals, uint32_t expect_bytes) {
  EMU_ENTER("mbarrier_arrive", addr, expect_bytes);
  if (arrivals < 1) fail("mbarrier", "%d arrivals: must be at least 1", arrivals);
  MBarrier& bar = find_barrier(addr);
  Warp& warp = *current().warp;
  join(bar.incoming, warp.clock);
  ++warp.clock[warp.agent];
  bar.bytes += expect_bytes;
  if (bar.bytes > kMaxTransactionBytes) fail("mbarrier", "%lld bytes expected on 0x%x: at most 2^20 - 1", (long long)bar.bytes, addr);
  if (bar.pending < arrivals) fail("mbarrier", "0x%x gets more arrivals in one phase than its %d", addr, bar.count);
  bar.pending -= arrivals;
  complete_phase_if_due(bar);
  progress();
}

bool emu_mbarrier_try_wait(uint32_t addr, uint32_t parity) {
  EMU_ENTER("mbarrier_try_wait", addr, parity);
  if (!phase_done(find_barrier(addr), parity)) poll_failed();
  MBarrier& bar = find_barrier(addr);
  if (!phase_done(bar, parity)) return false;
  join(current().warp->clock, bar.completed);
  return true;
}

void emu_mbarrier_wait(uint32_t addr, uint32_t parity) {
  EMU_ENTER("mbarrier_wait", addr, parity);
  ++machine.statistics[kStatMbarrierWait];
  MBarrier& bar = find_barrier(addr);
  if (bar.block != current().warp->block) fail("mbarrier", "0x%x belongs to another block: only its own block can wait", addr);
  while (!phase_done(bar, parity)) block_on(bar.waiters);
  join(current().warp->clock, bar.completed);
}

void emu_bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  EMU_ENTER("bulk_load", dst, bytes);
  ++machine.statistics[kStatBulk];
  machine.statistics[kStatBulkBytes] += bytes;
  if (bytes == 0 || bytes % 16) fail("alignment", "%u bytes: must be a positive multiple of 16", bytes);
  const SharedSpan span = shared_span(dst, bytes, 16);
  check_global_copy(check_global(src, bytes, 16, kEmuRead), src, bytes);
  AsyncTransfer t = new_transfer(AsyncTransfer::kBulk, span.offset + kSharedBase, bytes);
  t.src = src;
  claim_destination(*span.block, bar & ((1u << kRankShift) - 1), t);
  send(std::move(t));
}

void emu_tensor_map_prefetch(const EmuTensorMap* map) {
  EMU_ENTER("tensor_map_prefetch", 0, 0);
  if (map->magic != kEmuTensorMapMagic) fail("bounds", "not a tensor map");
}

void emu_tensor_load_3d(uint32_t dst, const EmuTensorMap* map, int x, int y, int z, uint32_t bar, uint32_t cta_mask) {
  EMU_ENTER("tensor_load_3d", dst, bar);
  ++machine.statistics[kStatTensor];
  if (map->magic != kEmuTensorMapMagic) fail("bounds", "not a tensor map");
  if (map->box[0] * 2 > static_cast<int>(kSwizzleRow)) fail("bounds", "inner box of %d elements exceeds the 128-byte swizzle", map->box[0]);
  const uint32_t bytes = static_cast<uint32_t>(map->box[0] * map->box[1] * map->box[2] * 2);
  machine.statistics[kStatTensorBytes] += bytes;
  const SharedSpan span = shared_span(dst, bytes, kSwizzleRow);
  AsyncTransfer t = new_transfer(AsyncTransfer::kTensor, span.offset + kSharedBase, bytes);
  t.map = *map;
  t.coordinate[0] = x, t.coordinate[1] = y, t.coordinate[2] = z;
  check_tensor_source(*map, t.coordinate);
  if (cta_mask == 0) {
    claim_destination(*span.block, bar, t);
  } else {
    const std::vector<Block*>& blocks = span.block->cluster->blocks;
    if (cta_mask >> blocks.size()) fail("bounds", "mask 0x%x names blocks outside the cluster of %zu", cta_mask, blocks.size());
    for (size_t rank = 0; rank < blocks.size(); ++rank)
      if (cta_mask >> rank & 1) claim_destination(*blocks[rank], bar, t);
  }
  send(std::move(t));
}

void emu_st_async(uint32_t dst, const void* value, uint32_t bar) {
  EMU_ENTER("st_async", dst, bar);
  ++machine.statistics[kStatRemoteStore];
  if (bar >> kRankShift != dst >> kRankShift) fail("bounds", "data and mbarrier are in different blocks");
  const SharedSpan span = shared_span(dst, 16, 16);
  AsyncTransfer t = new_transfer(AsyncTransfer::kStore, span.offset + kSharedBase, 16);
  std::memcpy(t.value, value, 16);
  claim_destination(*span.block, bar & ((1u << kRankShift) - 1), t);
  send(std::move(t));
}

uint32_t emu_cluster_rank() { return static_cast<uint32_t>(current().warp->block->rank); }

uint32_t emu_map_to_rank(uint32_t addr, uint32_t rank) {
  const Block& block = *current().warp->block;
  if (rank >= block.cluster->blocks.size()) fail("bounds", "rank %u is outside the cluster of %zu", rank, block.cluster->blocks.size());
  return (addr & ((1u << kRankShift) - 1)) | (rank + 1) << kRankShift;
}

void emu_cluster_arrive(bool aligned) {
  EMU_ENTER("cluster_arrive", 0, 0);
  if (aligned) converge(run_cluster);
  Lane& me = current();
  Warp& warp = *me.warp;
  Cluster& cluster = *warp.block->cluster;
  if (me.cluster_arrived) fail("divergence", "second cluster_arrive without cluster_wait");
  me.cluster_arrived = true;
  me.cluster_phase = cluster.phase;
  join(cluster.incoming, warp.clock);
  ++warp.clock[warp.agent];
  if (++cluster.arrived == cluster.threads) {
    cluster.arrived = 0;
    ++cluster.phase;
    cluster.completed = cluster.incoming;
    wake(cluster.waiters);
  }
}

void emu_cluster_wait(bool aligned) {
  EMU_ENTER("cluster_wait", 0, 0);
  if (aligned) converge(run_cluster);
  Lane& me = current();
  Cluster& cluster = *me.warp->block->cluster;
  if (!me.cluster_arrived) fail("divergence", "cluster_wait without cluster_arrive");
  while (cluster.phase == me.cluster_phase) block_on(cluster.waiters);
  me.cluster_arrived = false;
  join(me.warp->clock, cluster.completed);
}

void emu_set_registers(int registers) {
  EMU_ENTER("set_registers", registers, 0);
  if (registers % 8 || registers < 24 || registers > 256) fail("bounds", "%d registers: must be a multiple of 8 in 24..256", registers);
  converge(run_set_registers);
  current().warp->registers = registers;
}

void emu_launch_dependents() {}

void emu_wait_for_previous_grid() { current().warp->clock[machine.previous_grid_agent] = 1; }

}  // extern "C"
