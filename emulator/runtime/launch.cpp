// Entry of the runtime: builds the machine for one launch, runs it, hands back errors and counts.
#include "launch.h"

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "marlin_cutlass/params.h"

namespace emu {
namespace {

using marlin_cutlass::GemmParams;

void lane_main() {
  const EmuLaunch& launch = *machine.launch;
  const GemmParams params = *static_cast<const GemmParams*>(launch.params);
  if (launch.tensor_map)
    reinterpret_cast<void (*)(EmuTensorMap, GemmParams)>(launch.kernel)(*launch.tensor_map, params);
  else
    reinterpret_cast<void (*)(GemmParams)>(launch.kernel)(params);
  leave_lane_for_ever();
}

void reset_warp(Block& block, int index, uint32_t agent) {
  Warp& warp = block.warps[static_cast<size_t>(index)];
  warp.block = &block;
  warp.index = index;
  warp.ready = warp.alive = kFullMask;
  warp.agent = agent;
  warp.clock.assign(machine.previous_grid_agent + 1, 0);
  warp.clock[agent] = 1;
  warp.priority = static_cast<int>(machine.random.below(4));
  for (int l = 0; l < kWarpSize; ++l) {
    Lane& lane = warp.lane[l];
    lane.thread = index * kWarpSize + l;
    lane.block = block.index;
    lane.grid = machine.launch->grid;
    lane.warp = &warp;
    lane.index = l;
    const size_t thread = static_cast<size_t>(block.slot * machine.launch->threads + lane.thread);
    start_fiber(lane.fiber, thread, lane_main);
  }
}

void start_block(Block& block, int slot) {
  const EmuLaunch& launch = *machine.launch;
  block.slot = slot;
  block.shared.assign(static_cast<size_t>(launch.shared_bytes), 0xff);  // NaN as fp16, bf16 and fp32
  block.shadow.reset(static_cast<size_t>(launch.shared_bytes), 4);
  block.threads_left = launch.threads;
  const int warps = launch.threads / kWarpSize;
  block.warps = std::vector<Warp>(static_cast<size_t>(warps));
  machine.alive_warps += warps;
  for (int w = 0; w < warps; ++w) {
    reset_warp(block, w, static_cast<uint32_t>(block.index * warps + w));
    Warp& warp = block.warps[static_cast<size_t>(w)];
    warp.queued = true;
    machine.run_queue.push_back(&warp);
  }
}

void draw_policy(uint64_t seed) {
  machine.random.state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (int i = 0; i < 8; ++i) machine.random.next();
  Policy& policy = machine.policy;
  policy = {};
  if (seed == 0) return;
  policy.random = true;
  const uint32_t preempt[] = {0, 4, 16, 64};
  const uint32_t land[] = {0, 1, 4, 32};
  policy.preempt_one_in = preempt[machine.random.below(4)];
  policy.land_one_in = land[machine.random.below(4)];
  policy.leader = static_cast<int>(machine.random.below(kWarpSize));
}

void reset_global_shadow() {
  const EmuLaunch& launch = *machine.launch;
  const auto count = static_cast<size_t>(launch.buffer_count);
  machine.global_shadow.ordered.assign(count, {});
  machine.global_shadow.written.assign(count, {});
  for (size_t i = 0; i < count; ++i) {
    const EmuBuffer& b = launch.buffers[i];
    if (b.flags & kEmuOrdered) machine.global_shadow.ordered[i].reset(static_cast<size_t>(b.bytes), 4);
    if (b.flags & kEmuWriteOnce) machine.global_shadow.written[i].assign(static_cast<size_t>(b.bytes) / b.element_bytes, 0);
  }
}

void reset_blocks(const EmuLaunch& launch) {
  const int resident = launch.resident ? std::min(launch.resident, launch.grid) : launch.grid;
  reserve_stacks(static_cast<size_t>(resident) * static_cast<size_t>(launch.threads));
  machine.finished.clear();
  machine.free_slots.clear();
  for (int slot = resident; slot-- > 0;) machine.free_slots.push_back(slot);
  machine.next_cluster = 0;
  machine.clusters = std::vector<Cluster>(static_cast<size_t>(launch.grid / launch.cluster));
  machine.blocks = std::vector<Block>(static_cast<size_t>(launch.grid));
  for (Cluster& cluster : machine.clusters) cluster.threads = launch.cluster * launch.threads;
  for (int b = 0; b < launch.grid; ++b) {
    Block& block = machine.blocks[static_cast<size_t>(b)];
    block.index = b;
    block.rank = b % launch.cluster;
    block.cluster = &machine.clusters[static_cast<size_t>(b / launch.cluster)];
    block.cluster->blocks.push_back(&block);
  }
}

const char* check_launch(const EmuLaunch& launch) {
  if (launch.grid < 1 || launch.threads < kWarpSize || launch.threads % kWarpSize || launch.threads > 1024)
    return "grid must be positive and threads a multiple of 32 up to 1024";
  if (launch.cluster < 1 || launch.grid % launch.cluster) return "grid must be a multiple of the cluster size";
  if (launch.resident < 0 || launch.resident % launch.cluster) return "resident must be a multiple of the cluster size";
  if (launch.shared_bytes < 0 || launch.shared_bytes > 227 * 1024) return "shared memory must fit in 227 KiB (the limit of sm_90)";
  return nullptr;
}

void reset_machine(const EmuLaunch& launch) {
  machine.launch = &launch;
  machine.failed = false;
  machine.error_kind.clear();
  machine.error_text.clear();
  machine.flags.clear();
  machine.transfers.clear();
  machine.run_queue.clear();
  machine.running = nullptr;
  machine.polls = 0;
  emu_thread = nullptr;
  std::fill(std::begin(machine.statistics), std::end(machine.statistics), 0);
  draw_policy(launch.seed);
  const auto warps = static_cast<uint32_t>(launch.grid * launch.threads / kWarpSize);
  machine.alive_warps = 0;
  machine.previous_grid_agent = warps;
  machine.agents = warps + 1;
  reset_global_shadow();
  reset_blocks(launch);
}

}  // namespace

bool start_clusters() {
  bool started = false;
  while (machine.next_cluster < machine.clusters.size()) {
    Cluster& cluster = machine.clusters[machine.next_cluster];
    if (cluster.blocks.size() > machine.free_slots.size()) break;
    for (Block* block : cluster.blocks) {
      start_block(*block, machine.free_slots.back());
      machine.free_slots.pop_back();
    }
    ++machine.next_cluster;
    started = true;
  }
  return started;
}

}  // namespace emu

using namespace emu;

extern "C" int emu_run(const EmuLaunch* launch, const char** kind, const char** text, int64_t* statistics) {
  *kind = *text = "";
  if (const char* problem = check_launch(*launch)) {
    *kind = "launch", *text = problem;
    return 1;
  }
  reset_machine(*launch);
  run_machine();
  std::copy(std::begin(machine.statistics), std::end(machine.statistics), statistics);
  *kind = machine.error_kind.c_str();
  *text = machine.error_text.c_str();
  return machine.failed;
}
