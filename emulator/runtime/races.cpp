#include "races.h"

#include <algorithm>

namespace emu {
namespace {

constexpr uint8_t kSeveralLanes = 0xff;

uint32_t clock_at(const Clock& clock, uint32_t agent) { return agent < clock.size() ? clock[agent] : 0; }

bool ordered_before(const Epoch& e, const Access& access) {
  if (e.clock == 0) return true;  // never touched
  if (e.pending) return false;
  // Inside a warp, accesses of different lanes are ordered by every instruction that its lanes meet at.
  if (e.agent == access.agent) return e.lane == access.lane || e.clock < (*access.clock)[access.agent];
  return e.clock <= clock_at(*access.clock, e.agent);
}

Epoch epoch_of(const Access& access) {
  return {(*access.clock)[access.agent], static_cast<uint16_t>(access.agent), static_cast<uint8_t>(access.lane), 0, access.site};
}

}  // namespace

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void Shadow::reset(size_t bytes, unsigned granule) {
  shift_ = __builtin_ctz(granule);
  cells_.assign((bytes + granule - 1) >> shift_, Cell{});
  pool_.assign(1, Read{});  // index 0 means none
  free_ = 0;
}

void Shadow::add_read(Cell& cell, const Access& access) {
  Epoch epoch = epoch_of(access);
  uint32_t* link = &cell.reads;
  while (*link) {
    Read& read = pool_[*link];
    // A read that this one is ordered after says nothing more: whoever is ordered after this one is ordered after it too.
    if (read.epoch.agent == access.agent || ordered_before(read.epoch, access)) {
      if (read.epoch.agent == access.agent && read.epoch.clock == epoch.clock) epoch.lane = kSeveralLanes;
      const uint32_t gone = *link;
      *link = read.next;
      pool_[gone].next = free_;
      free_ = gone;
    } else {
      link = &read.next;
    }
  }
  uint32_t node = free_;
  if (node) {
    free_ = pool_[node].next;
  } else {
    node = static_cast<uint32_t>(pool_.size());
    pool_.push_back({});
  }
  pool_[node] = {epoch, cell.reads};
  cell.reads = node;
}

void Shadow::free_reads(Cell& cell) {
  while (cell.reads) {
    const uint32_t node = cell.reads;
    cell.reads = pool_[node].next;
    pool_[node].next = free_;
    free_ = node;
  }
}

Conflict Shadow::check_read(size_t offset, size_t bytes, const Access& access) const {
  for (size_t i = offset >> shift_; i <= (offset + bytes - 1) >> shift_; ++i)
    if (!ordered_before(cells_[i].write, access)) return {true, true, cells_[i].write};
  return {};
}

Conflict Shadow::read(size_t offset, size_t bytes, const Access& access) {
  for (size_t i = offset >> shift_; i <= (offset + bytes - 1) >> shift_; ++i) {
    Cell& cell = cells_[i];
    if (!ordered_before(cell.write, access)) return {true, true, cell.write};
    const Read* head = cell.reads ? &pool_[cell.reads] : nullptr;
    if (head && head->epoch.agent == access.agent && head->epoch.clock == (*access.clock)[access.agent] &&
        (head->epoch.lane == access.lane || head->epoch.lane == kSeveralLanes))
      continue;
    add_read(cell, access);
  }
  return {};
}

Conflict Shadow::write(size_t offset, size_t bytes, const Access& access, bool pending, bool same_value) {
  for (size_t i = offset >> shift_; i <= (offset + bytes - 1) >> shift_; ++i) {
    Cell& cell = cells_[i];
    const bool excused = same_value && !cell.write.pending && cell.write.agent == access.agent;
    if (!excused && !ordered_before(cell.write, access)) return {true, true, cell.write};
    for (uint32_t r = cell.reads; r; r = pool_[r].next)
      if (!ordered_before(pool_[r].epoch, access)) return {true, false, pool_[r].epoch};
    free_reads(cell);
    cell.write = epoch_of(access);
    cell.write.pending = pending;
  }
  return {};
}

void Shadow::land(size_t offset, size_t bytes, uint32_t agent, uint32_t clock, int lane, uint64_t site) {
  for (size_t i = offset >> shift_; i <= (offset + bytes - 1) >> shift_; ++i)
    cells_[i].write = {clock, static_cast<uint16_t>(agent), static_cast<uint8_t>(lane), 0, site};
}

}  // namespace emu
