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
  warp.clock.assign(machine.agents, 0);
  warp.clock[agent] = 1;
  warp.priority = static_cast<int>(machine.random.below(4));
  for (int l = 0; l < kWarpSize; ++l) {
    Lane& lane = warp.lane[l];
    lane.thread = index * kWarpSize + l;
    lane.block = block.index;
    lane.grid = machine.launch->grid;
    lane.warp = &warp;
    lane.index = l;
    start_fiber(lane.fiber, agent * kWarpSize + static_cast<uint32_t>(l), lane_main);
  }
}

void reset_block(Block& block, int index) {
  const EmuLaunch& launch = *machine.launch;
  block.index = index;
  block.rank = index % launch.cluster;
  block.cluster = &machine.clusters[static_cast<size_t>(index / launch.cluster)];
  block.cluster->blocks.push_back(&block);
  block.shared.assign(static_cast<size_t>(launch.shared_bytes), 0xff);  // NaN as fp16, bf16 and fp32
  block.shadow.reset(static_cast<size_t>(launch.shared_bytes), 4);
  block.threads_left = launch.threads;
  const int warps = launch.threads / kWarpSize;
  block.warps = std::vector<Warp>(static_cast<size_t>(warps));
  for (int w = 0; w < warps; ++w) reset_warp(block, w, static_cast<uint32_t>(index * warps + w));
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

const char* check_launch(const EmuLaunch& launch) {
  if (launch.grid < 1 || launch.threads < kWarpSize || launch.threads % kWarpSize || launch.threads > 1024)
    return "grid must be positive and threads a multiple of 32 up to 1024";
  if (launch.cluster < 1 || launch.grid % launch.cluster) return "grid must be a multiple of the cluster size";
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
  machine.alive_warps = static_cast<int>(warps);
  machine.previous_grid_agent = warps;
  machine.agents = warps + 1;
  reset_global_shadow();
  reserve_stacks(static_cast<size_t>(warps) * kWarpSize);
  machine.clusters = std::vector<Cluster>(static_cast<size_t>(launch.grid / launch.cluster));
  for (Cluster& cluster : machine.clusters) cluster.threads = launch.cluster * launch.threads;
  machine.blocks = std::vector<Block>(static_cast<size_t>(launch.grid));
  for (int b = 0; b < launch.grid; ++b) reset_block(machine.blocks[static_cast<size_t>(b)], b);
  for (Block& block : machine.blocks)
    for (Warp& warp : block.warps) {
      warp.queued = true;
      machine.run_queue.push_back(&warp);
    }
}

}  // namespace
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
