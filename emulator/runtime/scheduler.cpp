// Which warp and which lane runs next, how lanes wait, and what is said when nobody can go on.
#include <algorithm>
#include <map>

#include "machine.h"

EmuThread* emu_thread = nullptr;

namespace emu {

Machine machine;

namespace {

constexpr uint64_t kPollLimit = 200000;  // failed polls with nothing else happening: a livelock

Lane* next_ready_lane(Warp& warp, int after) {
  if (!warp.ready) return nullptr;
  const int start = machine.policy.random && machine.random.below(4) == 0 ? static_cast<int>(machine.random.below(kWarpSize)) : after + 1;
  const int turn = start & 31;
  const uint32_t rotated = turn ? (warp.ready >> turn) | (warp.ready << (kWarpSize - turn)) : warp.ready;
  return &warp.lane[(__builtin_ctz(rotated) + turn) & 31];
}

void enter_lane(Fiber& from, Lane& to) {
  emu_thread = &to;
  ++machine.statistics[kStatSwitches];
  switch_fiber(from, to.fiber);
}

// The calling lane stops here; another ready lane of its warp goes on, else the scheduler.
void leave_lane() {
  Lane& me = current();
  Lane* next = next_ready_lane(*me.warp, me.index);
  if (next == &me) return;
  if (next) {
    enter_lane(me.fiber, *next);
  } else {
    switch_fiber(me.fiber, machine.scheduler);
  }
}

void leave_warp() {
  current().warp->resume_after = current().index;
  switch_fiber(current().fiber, machine.scheduler);
}

void enqueue(Warp& warp) {
  if (warp.queued) return;
  warp.queued = true;
  machine.run_queue.push_back(&warp);
}

size_t pick_warp() {
  const std::vector<Warp*>& queue = machine.run_queue;
  if (!machine.policy.random) return 0;
  // Mostly the warps of the highest priority drawn for this launch: some warps run far ahead of others.
  const size_t first = machine.random.below(static_cast<uint32_t>(queue.size()));
  if (machine.random.below(8) == 0) return first;
  size_t best = first;
  for (size_t i = 0; i < queue.size(); ++i) {
    const size_t j = (first + i) % queue.size();
    if (queue[j]->priority - 8 * queue[j]->spinning > queue[best]->priority - 8 * queue[best]->spinning) best = j;
  }
  return best;
}

bool only_spinning() {
  return std::all_of(machine.run_queue.begin(), machine.run_queue.end(), [](const Warp* w) { return w->spinning; });
}

void maybe_land() {
  if (machine.transfers.empty()) return;
  const uint32_t one_in = machine.policy.land_one_in;
  if (one_in ? machine.random.below(one_in) == 0 : only_spinning()) land_one_transfer();
}

// The memory of blocks that have returned goes to the next ones. Not done by the last lane itself: it still stands on its stack.
void retire_blocks() {
  for (Block* block : machine.finished) {
    machine.free_slots.push_back(block->slot);
    block->slot = -1;
    block->shared = {};
    block->shadow = {};
    block->warps = {};
    block->mbarriers.clear();
    block->wgmma_stream.clear();
  }
  machine.finished.clear();
  start_clusters();
}

}  // namespace

void run_machine() {
  start_clusters();
  while (!machine.failed) {
    if (!machine.finished.empty()) retire_blocks();
    if (!machine.alive_warps && !start_clusters()) return;
    maybe_land();
    if (machine.run_queue.empty()) {
      if (!land_one_transfer()) record_failure("deadlock", "no thread can go on\n" + describe_waiting());
      continue;
    }
    const size_t index = pick_warp();
    Warp& warp = *machine.run_queue[index];
    machine.run_queue.erase(machine.run_queue.begin() + static_cast<long>(index));
    warp.queued = false;
    warp.spinning = false;
    Lane* lane = next_ready_lane(warp, warp.resume_after);
    if (!lane) continue;
    machine.running = &warp;
    enter_lane(machine.scheduler, *lane);
    machine.running = nullptr;
    emu_thread = nullptr;
    if (warp.ready) enqueue(warp);
  }
}

void leave_lane_for_ever() {
  Lane& me = current();
  me.done = true;
  me.warp->ready &= ~(1u << me.index);
  me.warp->alive &= ~(1u << me.index);
  Block& block = *me.warp->block;
  if (!me.warp->alive) {
    --machine.alive_warps;
    flush_bank_accesses(*me.warp);
    check_warp_exit(*me.warp);
  }
  if (--block.threads_left == 0) {
    check_block_exit(block);
    machine.finished.push_back(&block);
  }
  progress();
  leave_lane();
  __builtin_unreachable();
}

void block_on(WaitList& list) {
  Lane& me = current();
  list.lanes.push_back(&me);
  me.warp->ready &= ~(1u << me.index);
  leave_lane();
}

void wake(WaitList& list) {
  for (Lane* lane : list.lanes) {
    lane->warp->ready |= 1u << lane->index;
    if (lane->warp != machine.running) enqueue(*lane->warp);
  }
  list.lanes.clear();
  progress();
}

void progress() { machine.polls = 0; }

void poll_failed() {
  Lane& me = current();
  if (++machine.polls > kPollLimit) {
    if (machine.transfers.empty()) fail("deadlock", "threads poll and nothing changes\n%s", describe_waiting().c_str());
    land_one_transfer();
  }
  me.warp->spinning = true;
  leave_warp();
}

void converge(WarpOperation operation) {
  Lane& me = current();
  Warp& warp = *me.warp;
  if (warp.arrived && warp.operation != operation) {
    const Lane& other = warp.lane[__builtin_ctz(warp.arrived)];
    fail("divergence", "lanes of one warp are at different warp instructions: %s %s, and lane %d is at %s %s",
         me.activity.primitive, site_text(me.activity.site).c_str(), other.index, other.activity.primitive,
         site_text(other.activity.site).c_str());
  }
  warp.operation = operation;
  warp.arrived |= 1u << me.index;
  if (warp.arrived != kFullMask) {
    warp.ready &= ~(1u << me.index);
    leave_lane();
    return;
  }
  warp.arrived = 0;
  if (operation) operation(warp);
  flush_bank_accesses(warp);
  ++warp.clock[warp.agent];
  warp.ready = kFullMask;
  progress();
  if (machine.policy.preempt_one_in && machine.random.below(machine.policy.preempt_one_in) == 0) leave_warp();
}

namespace {

std::string waiting_for(const Activity& a) {
  const std::string primitive = a.primitive;
  std::string text = primitive;
  if (primitive == "named_barrier_sync")
    text += format_text(" id %llu among %llu threads", (unsigned long long)a.first, (unsigned long long)a.second);
  else if (primitive.rfind("mbarrier", 0) == 0)
    text += format_text(" at shared 0x%llx parity %llu", (unsigned long long)a.first, (unsigned long long)a.second);
  else if (primitive == "wait_flag" || primitive == "ld_acquire")
    text += format_text(" at %s for %llu", describe_global(reinterpret_cast<const void*>(a.first)).c_str(), (unsigned long long)a.second);
  return text + " " + site_text(a.site);
}

std::string lanes_text(uint32_t mask) {
  if (mask == kFullMask) return "all lanes";
  if (__builtin_popcount(mask) == 1) return format_text("lane %d", __builtin_ctz(mask));
  return format_text("%d lanes (mask %08x)", __builtin_popcount(mask), mask);
}

std::string describe_mbarriers(const Block& block) {
  std::string text;
  for (const auto& [address, bar] : block.mbarriers)
    if (!bar.waiters.lanes.empty())
      text += format_text("  block %d mbarrier 0x%x: phase %llu, %d of %d arrivals missing, %lld bytes outstanding\n", block.index, address,
                          (unsigned long long)bar.phase, bar.pending, bar.count, (long long)bar.bytes);
  return text;
}

// Warps of a block that stand alike share a line.
std::string describe_block(const Block& block) {
  std::map<std::string, std::vector<int>> groups;
  for (const Warp& warp : block.warps) {
    std::map<std::string, uint32_t> lanes;
    for (const Lane& lane : warp.lane)
      if (!lane.done) lanes[waiting_for(lane.activity)] |= 1u << lane.index;
    const std::string gone = warp.alive == kFullMask ? "" : " (" + lanes_text(~warp.alive) + " returned)";
    for (const auto& [what, mask] : lanes) groups[lanes_text(mask) + " at " + what + gone].push_back(warp.index);
  }
  std::string text;
  for (const auto& [what, warps] : groups) {
    text += format_text("  block %d warp", block.index);
    for (const int w : warps) text += format_text(" %d", w);
    text += ": " + what + "\n";
  }
  for (int id = 0; id < kNamedBarriers; ++id)
    if (const ThreadBarrier& b = block.barriers[id]; b.arrived)
      text += format_text("  block %d barrier %d: %d of %d threads arrived\n", block.index, id, b.arrived, b.expected);
  return text + describe_mbarriers(block);
}

}  // namespace

std::string describe_waiting() {
  constexpr int kBlocksShown = 8;
  std::string text;
  int shown = 0;
  for (const Block& block : machine.blocks)
    if (block.threads_left && ++shown <= kBlocksShown) text += describe_block(block);
  if (machine.next_cluster < machine.clusters.size())
    text += format_text("  %zu clusters of blocks have not started\n", machine.clusters.size() - machine.next_cluster);
  if (shown > kBlocksShown) text += format_text("  ... and %d more blocks\n", shown - kBlocksShown);
  return text;
}

}  // namespace emu
