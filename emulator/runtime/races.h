// Happens-before between warps: vector clocks, and the last accesses of every word of shared memory (after FastTrack, Flanagan and
// Freund, PLDI 2009). An agent is a warp or an mbarrier (for the copies that complete on it).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu {

using Clock = std::vector<uint32_t>;  // by agent; agents beyond the end are at 0

void join(Clock& into, const Clock& from);

struct Epoch {
  uint32_t clock = 0;
  uint16_t agent = 0;
  uint8_t lane = 0;
  uint8_t pending = 0;  // the write of an asynchronous copy that has not landed
  uint64_t site = 0;
};

struct Cell {
  Epoch write;
  uint32_t reads = 0;  // list of reads that no later read or write is ordered after
};

struct Access {  // who touches memory now
  uint32_t agent;
  int lane;
  const Clock* clock;
  uint64_t site;
};

// Why an access is a race: the epoch that it conflicts with.
struct Conflict {
  bool found = false, with_write = false;
  Epoch epoch;
};

class Shadow {
 public:
  void reset(size_t bytes, unsigned granule);
  Conflict read(size_t offset, size_t bytes, const Access& access);
  // `same_value`: lanes of one warp may store equal values.
  Conflict write(size_t offset, size_t bytes, const Access& access, bool pending, bool same_value = false);
  Conflict check_read(size_t offset, size_t bytes, const Access& access) const;
  const Epoch& last_write(size_t offset) const { return cells_[offset >> shift_].write; }
  void land(size_t offset, size_t bytes, uint32_t agent, uint32_t clock, int lane, uint64_t site);

 private:
  struct Read {
    Epoch epoch;
    uint32_t next;
  };
  void add_read(Cell& cell, const Access& access);
  void free_reads(Cell& cell);
  unsigned shift_ = 2;
  std::vector<Cell> cells_;
  std::vector<Read> pool_;
  uint32_t free_ = 0;
};

// Shadows of the registered global buffers that blocks exchange data through.
struct GlobalShadow {
  std::vector<Shadow> ordered;                // by buffer index; empty when not tracked
  std::vector<std::vector<uint8_t>> written;  // by buffer index: element already stored
};

}  // namespace emu
