// Shared and global memory: bounds, alignment, ordering, cp.async, flags, bank conflicts.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

enum BankKind { kBankLoad, kBankStore, kBankLdmatrix, kBankCpAsync };

void check_shared_read(const SharedSpan& span, uint32_t bytes) {
  const Conflict conflict = span.block->shadow.read(span.offset, bytes, access_of(current()));
  if (conflict.found)
    fail("race", "shared 0x%x is read here but %s", span.offset + kSharedBase, describe_conflict(conflict).c_str());
}

void check_shared_write(const SharedSpan& span, uint32_t bytes, bool pending, bool same_value) {
  const Conflict conflict = span.block->shadow.write(span.offset, bytes, access_of(current()), pending, same_value);
  if (conflict.found)
    fail("race", "shared 0x%x is written here but %s", span.offset + kSharedBase, describe_conflict(conflict).c_str());
}

void check_not_barrier(const SharedSpan& span, uint32_t bytes) {
  if (span.block->mbarriers.empty()) return;
  for (uint32_t a = (span.offset + kSharedBase) & ~7u; a < span.offset + kSharedBase + bytes; a += 8)
    if (span.block->mbarriers.count(a)) fail("bounds", "shared 0x%x holds an mbarrier", a);
}

size_t buffer_index(const EmuBuffer& buffer) { return static_cast<size_t>(&buffer - machine.launch->buffers); }

void check_ordered(const EmuBuffer& buffer, uint64_t offset, int bytes, bool write) {
  Shadow& shadow = machine.global_shadow.ordered[buffer_index(buffer)];
  const Access access = access_of(current());
  const Conflict conflict = write ? shadow.write(offset, static_cast<size_t>(bytes), access, false)
                                  : shadow.read(offset, static_cast<size_t>(bytes), access);
  if (conflict.found)
    fail("race", "%s + %llu is %s here but %s", buffer.name, (unsigned long long)offset, write ? "written" : "read",
         describe_conflict(conflict).c_str());
}

void check_written_once(const EmuBuffer& buffer, uint64_t offset, int bytes) {
  std::vector<uint8_t>& written = machine.global_shadow.written[buffer_index(buffer)];
  for (uint64_t i = offset / buffer.element_bytes; i < (offset + static_cast<uint64_t>(bytes)) / buffer.element_bytes; ++i) {
    if (written[i]) fail("race", "%s element at byte %llu is stored a second time", buffer.name, (unsigned long long)offset);
    written[i] = 1;
  }
}

}  // namespace

Access access_of(const Lane& lane) { return {lane.warp->agent, lane.index, &lane.warp->clock, lane.activity.site}; }

std::string describe_conflict(const Conflict& conflict) {
  const Epoch& e = conflict.epoch;
  std::string who = "an asynchronous copy";
  if (e.agent < machine.previous_grid_agent) {
    const uint32_t per_block = static_cast<uint32_t>(machine.launch->threads / kWarpSize);
    who = format_text("block %u warp %u", e.agent / per_block, e.agent % per_block);
  }
  const std::string site = site_text(e.site);
  if (e.pending) return who + " " + site + " has a copy into it under way";
  return format_text("the %s by %s %s is not ordered before", conflict.with_write ? "write" : "read", who.c_str(), site.c_str());
}

SharedSpan shared_span(uint32_t address, uint32_t bytes, uint32_t alignment) {
  Block* block = current().warp->block;
  if (const uint32_t rank = address >> kRankShift) {
    if (rank > block->cluster->blocks.size()) fail("bounds", "shared address 0x%x: no such block in the cluster", address);
    block = block->cluster->blocks[rank - 1];
    if (block->threads_left == 0) fail("bounds", "shared memory of block %d, which has returned", block->index);
  }
  const uint32_t local = address & ((1u << kRankShift) - 1);
  if (local % alignment) fail("alignment", "shared address 0x%x is not a multiple of %u", local, alignment);
  if (local < kSharedBase || local - kSharedBase + bytes > block->shared.size())
    fail("bounds", "shared 0x%x + %u bytes is outside the block's 0x%x .. 0x%zx", local, bytes, kSharedBase,
         kSharedBase + block->shared.size());
  return {block, block->shared.data() + (local - kSharedBase), local - kSharedBase};
}

std::string describe_global(const void* p) {
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  for (int i = 0; i < machine.launch->buffer_count; ++i) {
    const EmuBuffer& b = machine.launch->buffers[i];
    if (address >= b.base && address < b.base + static_cast<uint64_t>(b.bytes))
      return format_text("%s + %llu", b.name, (unsigned long long)(address - b.base));
  }
  return format_text("%p", p);
}

const EmuBuffer& check_global(const void* p, int64_t bytes, uint32_t alignment, uint32_t access) {
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  if (address % alignment) fail("alignment", "%s is not a multiple of %u", describe_global(p).c_str(), alignment);
  const EmuBuffer* nearest = nullptr;
  for (int i = 0; i < machine.launch->buffer_count; ++i) {
    const EmuBuffer& b = machine.launch->buffers[i];
    const int64_t offset = static_cast<int64_t>(address - b.base);
    if (offset > -4096 && offset < b.bytes + 4096) nearest = &b;
    if (offset < 0 || offset + bytes > b.bytes) continue;
    if (b.row_bytes != b.pitch_bytes && offset % b.pitch_bytes + bytes > b.row_bytes)
      fail("bounds", "%s + %lld: column byte %lld + %lld is outside the row's %lld", b.name, (long long)offset,
           (long long)(offset % b.pitch_bytes), (long long)bytes, (long long)b.row_bytes);
    if (access & ~b.flags) fail("bounds", "%s must not be %s", b.name, access & kEmuSync ? "used as a flag" : access & kEmuWrite ? "written" : "read");
    if (machine.launch->programmatic && (b.flags & kEmuPrevious) && current().warp->clock[machine.previous_grid_agent] == 0)
      fail("race", "%s is touched before wait_for_previous_grid", b.name);
    return b;
  }
  if (nearest)
    fail("bounds", "%lld bytes at %s %+lld of %lld", (long long)bytes, nearest->name, (long long)(address - nearest->base),
         (long long)nearest->bytes);
  fail("bounds", "global address %p is in no buffer", p);
}

void check_proxy_fence(const Block& block, uint32_t offset, uint32_t bytes) {
  for (uint32_t at = offset; at < offset + bytes; at += 4) {
    const Epoch& e = block.shadow.last_write(at);
    // Untouched, written by a copy, or under way (which the ordering check reports).
    if (e.clock == 0 || e.pending || e.agent >= machine.previous_grid_agent) continue;
    const auto per_block = static_cast<uint32_t>(block.warps.size());
    const Warp& writer = machine.blocks[e.agent / per_block].warps[e.agent % per_block];
    if (writer.proxy_fence_clock <= e.clock)
      fail("race", "shared 0x%x was stored %s without fence_proxy_async before this asynchronous access", at + kSharedBase,
           site_text(e.site).c_str());
  }
}

void check_global_copy(const EmuBuffer& buffer, const void* p, uint32_t bytes) {
  if (!(buffer.flags & kEmuOrdered)) return;
  const uint64_t offset = reinterpret_cast<uint64_t>(p) - buffer.base;
  check_ordered(buffer, offset, static_cast<int>(bytes), false);
  const Clock& fenced = current().warp->global_fence_clock;
  const Shadow& shadow = machine.global_shadow.ordered[buffer_index(buffer)];
  for (uint64_t at = offset; at < offset + bytes; at += 4) {
    const Epoch& e = shadow.last_write(at);
    if (e.clock != 0 && (e.agent >= fenced.size() || fenced[e.agent] < e.clock))
      fail("race", "%s + %llu was stored %s without fence_proxy_async_global before this copy", buffer.name, (unsigned long long)at,
           site_text(e.site).c_str());
  }
}

// ---- bank conflicts: accesses of the lanes between two convergence points are paired by their order
void log_bank_access(int kind, uint32_t address, int bytes) {
  Lane& me = current();
  std::vector<BankAccess>& accesses = me.warp->accesses;
  const uint32_t slot = me.shared_accesses++;
  if (slot >= accesses.size()) accesses.push_back({kind, bytes, 0, {}});
  BankAccess& access = accesses[slot];
  if (access.kind != kind || access.bytes != bytes) return;  // diverged lanes: left out
  access.mask |= 1u << me.index;
  access.address[me.index] = address;
}

namespace {

// Passes over the 32 four-byte banks for one group of lanes: the most distinct words that fall into one bank.
int bank_waves(const BankAccess& access, int first, int lanes) {
  uint32_t words[kWarpSize * 4];
  int count = 0;
  for (int l = first; l < first + lanes; ++l)
    if (access.mask >> l & 1)
      for (int b = 0; b < access.bytes; b += 4) words[count++] = (access.address[l] + static_cast<uint32_t>(b)) / 4;
  std::sort(words, words + count);
  count = static_cast<int>(std::unique(words, words + count) - words);
  int load[32] = {}, most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, ++load[words[i] % 32]);
  return most;
}

}  // namespace

void flush_bank_accesses(Warp& warp) {
  for (const BankAccess& access : warp.accesses) {
    // 16-byte accesses go eight lanes at a time, 8-byte accesses sixteen, because 32 banks give 128 bytes per pass.
    const int lanes = std::min(kWarpSize, 128 / access.bytes);
    int64_t* s = &machine.statistics[kStatSharedLoads + 3 * access.kind];
    ++s[0];
    for (int first = 0; first < kWarpSize; first += lanes) {
      const int waves = bank_waves(access, first, lanes);
      s[1] += waves;
      s[2] += waves > 0;
    }
  }
  if (warp.accesses.empty()) return;
  warp.accesses.clear();
  for (Lane& lane : warp.lane) lane.shared_accesses = 0;
}

}  // namespace emu

using namespace emu;

extern "C" {

uint32_t emu_shared_base() { return kSharedBase; }

void emu_ld_shared(uint32_t addr, int bytes, void* out) {
  EMU_ENTER("ld_shared", addr, bytes);
  const SharedSpan span = shared_span(addr, static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes));
  check_not_barrier(span, static_cast<uint32_t>(bytes));
  check_shared_read(span, static_cast<uint32_t>(bytes));
  log_bank_access(kBankLoad, addr, bytes);
  std::memcpy(out, span.data, static_cast<size_t>(bytes));
}

void emu_st_shared(uint32_t addr, int bytes, const void* value) {
  EMU_ENTER("st_shared", addr, bytes);
  const SharedSpan span = shared_span(addr, static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes));
  check_not_barrier(span, static_cast<uint32_t>(bytes));
  const bool same = std::memcmp(span.data, value, static_cast<size_t>(bytes)) == 0;
  check_shared_write(span, static_cast<uint32_t>(bytes), false, same);
  log_bank_access(kBankStore, addr, bytes);
  std::memcpy(span.data, value, static_cast<size_t>(bytes));
}

void emu_ld_global(const void* p, int bytes, void* out) {
  EMU_ENTER("ld_global", reinterpret_cast<uint64_t>(p), bytes);
  const EmuBuffer& buffer = check_global(p, bytes, static_cast<uint32_t>(bytes), kEmuRead);
  if (buffer.flags & kEmuOrdered) check_ordered(buffer, reinterpret_cast<uint64_t>(p) - buffer.base, bytes, false);
  std::memcpy(out, p, static_cast<size_t>(bytes));
}

void emu_st_global(void* p, int bytes, const void* value) {
  EMU_ENTER("st_global", reinterpret_cast<uint64_t>(p), bytes);
  const EmuBuffer& buffer = check_global(p, bytes, static_cast<uint32_t>(bytes), kEmuWrite);
  const uint64_t offset = reinterpret_cast<uint64_t>(p) - buffer.base;
  if (buffer.flags & kEmuOrdered) check_ordered(buffer, offset, bytes, true);
  if (buffer.flags & kEmuWriteOnce) check_written_once(buffer, offset, bytes);
  std::memcpy(p, value, static_cast<size_t>(bytes));
  progress();
}

void emu_fence_proxy_async() {
  EMU_ENTER("fence_proxy_async", 0, 0);
  Warp& warp = *current().warp;
  warp.proxy_fence_clock = ++warp.clock[warp.agent];
}

void emu_fence_proxy_async_global() {
  EMU_ENTER("fence_proxy_async_global", 0, 0);
  Warp& warp = *current().warp;
  warp.global_fence_clock = warp.clock;
}

// ---- flags
uint32_t emu_ld_acquire(const uint32_t* p) {
  EMU_ENTER("ld_acquire", reinterpret_cast<uint64_t>(p), 0);
  check_global(p, 4, 4, kEmuSync);
  poll_failed();  // a loop around this call must let others run
  join(current().warp->clock, machine.flags[p].clock);
  return *p;
}

void emu_st_relaxed(uint32_t* p, uint32_t value) {
  EMU_ENTER("st_relaxed", reinterpret_cast<uint64_t>(p), value);
  check_global(p, 4, 4, kEmuSync);
  *p = value;
  wake(machine.flags[p].waiters);
}

void emu_st_release(uint32_t* p, uint32_t value) {
  EMU_ENTER("st_release", reinterpret_cast<uint64_t>(p), value);
  check_global(p, 4, 4, kEmuSync);
  Warp& warp = *current().warp;
  Flag& flag = machine.flags[p];
  flag.clock = warp.clock;
  ++warp.clock[warp.agent];
  *p = value;
  wake(flag.waiters);
}

uint32_t emu_atomic_add_release(uint32_t* p, uint32_t value) {
  EMU_ENTER("atomic_add_release", reinterpret_cast<uint64_t>(p), value);
  check_global(p, 4, 4, kEmuSync);
  Warp& warp = *current().warp;
  Flag& flag = machine.flags[p];
  join(flag.clock, warp.clock);
  join(warp.clock, flag.clock);
  ++warp.clock[warp.agent];
  const uint32_t before = *p;
  *p += value;
  wake(flag.waiters);
  return before;
}

void emu_wait_flag(const uint32_t* p, uint32_t value) {
  EMU_ENTER("wait_flag", reinterpret_cast<uint64_t>(p), value);
  check_global(p, 4, 4, kEmuSync);
  while (*p != value) block_on(machine.flags[p].waiters);
  join(current().warp->clock, machine.flags[p].clock);
}

// ---- cp.async: the write starts at issue and lands at the wait, as late as the hardware may
void emu_cp_async16(uint32_t dst, const void* src, int bytes) {
  EMU_ENTER("cp_async16", dst, bytes);
  ++machine.statistics[kStatCpAsync];
  const SharedSpan span = shared_span(dst, 16, 16);
  if (bytes < 0 || bytes > 16) fail("bounds", "cp.async of %d source bytes", bytes);
  if (reinterpret_cast<uint64_t>(src) % 16) fail("alignment", "source %s is not a multiple of 16", describe_global(src).c_str());
  if (bytes) check_global(src, bytes, 16, kEmuRead);
  check_not_barrier(span, 16);
  check_shared_write(span, 16, true, false);
  log_bank_access(kBankCpAsync, dst, 16);
  current().open_copies.push_back({dst, src, bytes, current().activity.site});
}

void emu_cp_async_commit() {
  Lane& me = current();
  me.copy_groups.push_back(std::move(me.open_copies));
  me.open_copies.clear();
}

void emu_cp_async_wait(int pending) {
  EMU_ENTER("cp_async_wait", pending, 0);
  Lane& me = current();
  const Warp& warp = *me.warp;
  while (static_cast<int>(me.copy_groups.size()) > pending) {
    for (const AsyncCopy16& copy : me.copy_groups.front()) {
      const SharedSpan span = shared_span(copy.dst, 16, 16);
      std::memset(span.data, 0, 16);
      if (copy.bytes) std::memcpy(span.data, copy.src, static_cast<size_t>(copy.bytes));
      span.block->shadow.land(span.offset, 16, warp.agent, warp.clock[warp.agent], me.index, copy.site);
    }
    me.copy_groups.pop_front();
  }
}

}  // extern "C"
