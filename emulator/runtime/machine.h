// The emulated machine: blocks of warps of lanes (one fiber per lane), their memory, and what each of them waits for.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "launch.h"
#include "marlin_cutlass/emu_api.h"
#include "races.h"

namespace emu {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xffffffffu;
constexpr uint32_t kSharedBase = 1024;  // first shared address of a block, so that address 0 is out of bounds
constexpr int kNamedBarriers = 16;      // hardware limit (PTX ISA, bar)
constexpr int kRankShift = 24;          // shared addresses of other blocks: 1 + rank above this bit

struct Block;
struct Warp;
struct Lane;

using Site = uintptr_t;  // return address into the kernel: becomes file:line in messages

// Where a lane stands, for reports: a primitive with up to two operands (their meaning depends on the primitive).
struct Activity {
  const char* primitive = "start";
  uint64_t first = 0, second = 0;
  Site site = 0;
};

struct AsyncCopy16 {  // cp.async
  uint32_t dst;
  const void* src;
  int bytes;
  Site site;
};

struct Operands {  // of the warp instruction that the lane has arrived at
  const void* in[3];
  void* out;
  uint64_t value, result;
};

struct Lane : EmuThread {
  Fiber fiber;
  Warp* warp = nullptr;
  int index = 0;
  Activity activity;
  Operands operands;
  std::vector<AsyncCopy16> open_copies;
  std::deque<std::vector<AsyncCopy16>> copy_groups;
  uint32_t shared_accesses = 0;  // since the warp last converged: pairs accesses of lanes for bank conflicts
  uint32_t cluster_phase = 0;    // cluster barrier phase this lane arrived in
  bool cluster_arrived = false;
  bool done = false;
};

using WarpOperation = void (*)(Warp&);

struct BankAccess {  // one shared memory instruction of a warp, collected lane by lane
  int kind, bytes;
  uint32_t mask;
  uint32_t address[kWarpSize];
};

struct WgmmaOperation {
  bool bf16, sparse, accumulate;
  int n;
  uint64_t descriptor;
  float* d[kWarpSize];
  const uint32_t* a[kWarpSize];
  uint32_t a_copy[kWarpSize][4], places[kWarpSize];  // places: sparse only
  const uint32_t* places_at[kWarpSize];
  Site site;
};

struct WgmmaAccumulator {  // values kept back while their registers are poisoned
  int users = 0;           // wgmma in flight that sum into it
  std::vector<float> values;
};

struct RegisterRange {  // operands of wgmma in the registers of a warp, and what they held at the last wgmma_fence
  const uint32_t* where[kWarpSize];
  size_t words;
  bool known = false;  // false: in flight at the fence
  std::vector<uint32_t> at_fence;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  uint32_t ready = 0;    // lanes that can run
  uint32_t alive = 0;    // lanes that have not returned
  uint32_t arrived = 0;  // lanes at the current warp instruction
  WarpOperation operation = nullptr;
  bool queued = false;   // in the run queue
  bool spinning = false; // last ran into a poll that failed
  int priority = 0;
  int resume_after = kWarpSize - 1;  // lane that ran last
  uint32_t agent = 0;    // index of this warp in every clock
  Clock clock;
  std::vector<BankAccess> accesses;
  // wgmma
  std::deque<WgmmaOperation> open_wgmma;
  std::deque<std::deque<WgmmaOperation>> wgmma_groups;
  std::unordered_map<const float*, WgmmaAccumulator> wgmma_held;  // by lane 0's registers
  std::vector<RegisterRange> wgmma_ranges;
  bool wgmma_fenced = false;
  uint64_t wgmma_issued = 0;
  uint32_t proxy_fence_clock = 0;  // own clock at the last fence_proxy_async
  Clock global_fence_clock;        // everybody's, as known to this warp at its last fence_proxy_async_global
  int registers = 0;
  Lane lane[kWarpSize];
};

struct WaitList {
  std::vector<Lane*> lanes;
};

struct ThreadBarrier {  // __syncthreads and bar.sync
  int expected = 0, arrived = 0;
  WaitList waiters;
};

struct MBarrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
  uint32_t address = 0;
  Block* block = nullptr;
  uint32_t agent = 0;
  Clock incoming, completed;
  uint32_t init_agent = 0, init_clock = 0;
  bool fenced = false;
  Warp* init_warp = nullptr;
  WaitList waiters;
};

struct Cluster {
  std::vector<Block*> blocks;
  int threads = 0, arrived = 0;
  uint32_t phase = 0;
  Clock incoming, completed;
  WaitList waiters;
};

struct Block {
  int index = 0, rank = 0;
  int slot = -1;  // place among the resident blocks; -1 before the start and after the end
  Cluster* cluster = nullptr;
  std::vector<uint8_t> shared;
  Shadow shadow;
  std::vector<Warp> warps;
  ThreadBarrier barriers[kNamedBarriers];
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  std::unordered_map<uint64_t, uint64_t> wgmma_stream;  // (warpgroup, sequence) -> operation, to compare its warps
  int threads_left = 0;
};

struct Flag {
  Clock clock;
  WaitList waiters;
};

struct AsyncTransfer {  // bulk copy, tensor copy or remote store on its way
  enum Kind { kBulk, kTensor, kStore } kind;
  uint32_t dst;   // offset in each destination block
  uint32_t bytes;
  std::vector<MBarrier*> barriers;  // one per destination block
  const void* src = nullptr;
  EmuTensorMap map;
  int coordinate[3];
  uint8_t value[16];
  Site site;
};

struct Random {
  uint64_t state = 0;
  uint32_t next() {  // xorshift64*
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<uint32_t>(state * 0x2545f4914f6cdd1dull >> 32);
  }
  uint32_t below(uint32_t n) { return n ? next() % n : 0; }
};

// How this launch interleaves: drawn from the seed. Seed 0 is the plain order: no preemption, copies land as late as possible.
struct Policy {
  bool random = false;
  uint32_t preempt_one_in = 0;  // at warp instructions; 0 = never
  uint32_t land_one_in = 0;     // per scheduling step; 0 = only when nothing else can run
  int leader = 0;               // lane that elect_one picks
};

struct Machine {
  const EmuLaunch* launch = nullptr;
  std::vector<Block> blocks;
  std::vector<Cluster> clusters;
  size_t next_cluster = 0;       // clusters start in order, as slots become free
  std::vector<int> free_slots;
  std::vector<Block*> finished;  // their slots are freed at the next scheduling step
  std::unordered_map<const void*, Flag> flags;
  std::vector<AsyncTransfer> transfers;
  GlobalShadow global_shadow;
  uint32_t agents = 0;  // warps, then the previous grid, then mbarriers
  uint32_t previous_grid_agent = 0;
  Random random;
  Policy policy;
  std::vector<Warp*> run_queue;
  Warp* running = nullptr;  // nullptr while the scheduler itself works
  Fiber scheduler;
  int alive_warps = 0;
  uint64_t polls = 0;  // failed polls since anything last changed
  bool failed = false;
  std::string error_kind, error_text;
  int64_t statistics[kStatisticCount] = {};
};

extern Machine machine;
inline Lane& current() { return *static_cast<Lane*>(emu_thread); }

// ---- launch.cpp
bool start_clusters();  // as many as fit; false if none was left

// ---- scheduler.cpp
void run_machine();
[[noreturn]] void leave_lane_for_ever();
void block_on(WaitList& list);               // until someone wakes the list; callers re-check their condition
void wake(WaitList& list);
void poll_failed();                          // lets others run; reports a livelock
void progress();                             // something changed that a poller may look for
// All 32 lanes meet, then `operation` runs once (nullptr: nothing to do).
void converge(WarpOperation operation);
std::string describe_waiting();

// ---- errors.cpp
void record_failure(const char* kind, const std::string& text);  // the scheduler stops at its next step
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string format_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string site_text(Site site);
std::string where(const Lane& lane);

// ---- memory.cpp
struct SharedSpan {
  Block* block;
  uint8_t* data;
  uint32_t offset;
};
SharedSpan shared_span(uint32_t address, uint32_t bytes, uint32_t alignment);
const EmuBuffer& check_global(const void* p, int64_t bytes, uint32_t alignment, uint32_t access);
// Ordinary stores become visible to bulk copies and wgmma only through fence_proxy_async (PTX ISA, proxies).
void check_proxy_fence(const Block& block, uint32_t offset, uint32_t bytes);
// The same of a bulk copy from global memory that blocks exchange data through.
void check_global_copy(const EmuBuffer& buffer, const void* p, uint32_t bytes);
void log_bank_access(int kind, uint32_t address, int bytes);
void flush_bank_accesses(Warp& warp);

std::string describe_global(const void* p);
std::string describe_conflict(const Conflict& conflict);
Access access_of(const Lane& lane);

// ---- async.cpp
bool land_one_transfer();
void check_block_exit(Block& block);

// ---- wgmma.cpp
void check_warp_exit(Warp& warp);

// Remembers the primitive and its place in the kernel.
#define EMU_ENTER(name, a, b) \
  emu::current().activity = {name, static_cast<uint64_t>(a), static_cast<uint64_t>(b), reinterpret_cast<emu::Site>(__builtin_return_address(0))}

}  // namespace emu
