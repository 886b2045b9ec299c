// Kernel tables: which variants exist for which device, and the rows that choose one. Python parses and validates manifest.json and registers
// its contents through c_api.cpp; cubins are read when a kernel is first used.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "schedule.h"

namespace marlin_cutlass {

constexpr int kMaxDevices = 64;
constexpr int kFormats = 24;  // 2 dtypes x zero points x 4 group sizes, then 2:4 sparsity with 2 dtypes x 4 group sizes

inline int format_index(int dtype, bool zeros, int group_size, bool sparse) {
  const int group = group_size == 32 ? 0 : group_size == 64 ? 1 : group_size == 128 ? 2 : 3;
  if (sparse) return 16 + dtype * 4 + group;
  return dtype * 8 + (zeros ? 4 : 0) + group;
}

struct Variant {
  VariantFields fields;
  std::string name, file, sha256;
  mutable std::array<std::atomic<driver::Function>, kMaxDevices> functions{};

  int format() const { return format_index(fields.dtype, fields.zeros != 0, fields.group_size, sparse()); }
  Family family() const { return static_cast<Family>(fields.family); }
  bool sparse() const { return family() == Family::kSparse || family() == Family::kHopperSparse; }  // for 2:4-sparse weights
  bool hopper() const { return family() == Family::kHopper || family() == Family::kHopperSparse; }  // takes a tensor map
};

// One row of the dispatch table; a bound of INT32_MAX is open, sms == 0 is any device.
struct Row {
  int32_t m_low, m_high, n_low, n_high, k_low, k_high, sms;
  std::array<int32_t, kFormats> variants;  // index of the variant for each format, -1 where it does not exist

  bool matches(int64_t m, int64_t n, int64_t k, int device_sms) const {
    return m >= m_low && m <= m_high && n >= n_low && n <= n_high && k >= k_low && k <= k_high && (sms == 0 || sms == device_sms);
  }
};
constexpr int kRowFieldCount = 7;

struct Table {
  std::string arch;
  int major = 0, minor = 0;
  std::vector<std::unique_ptr<Variant>> variants;
  std::vector<Row> rows;
  std::array<int32_t, kFormats> batch_invariant{};  // the variant that serves every m, -1 where there is none
};

struct Choice {
  int64_t m, n, k;
  int group_size, dtype, sms;
  bool zeros, sparse;
  int64_t variant;  // a forced index, kAuto or kBatchInvariant
};
constexpr int64_t kAuto = -1, kBatchInvariant = -2;

// Index of the variant that serves the call: the forced one, or the first matching row whose variant exists. Throws where there is none.
int select(const Table& table, const Choice& choice);

// Tables are never changed once published: a new one replaces the old, and readers notice through `generation`.
void publish(std::unique_ptr<Table> table);
void clear_tables();
// While tables are being registered, calls that find none wait (a minute at most). True until the first set_loading(false).
void set_loading(bool value);
uint64_t generation();
// The table registered for exactly this compute capability; throws with what is built and how to build the rest.
std::shared_ptr<const Table> table_for(int major, int minor);
void set_built_archs(const std::string& text);

}  // namespace marlin_cutlass
