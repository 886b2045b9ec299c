#include "registry.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "error.h"

namespace marlin_cutlass {
namespace {

std::mutex mutex;
// Loading this library makes its operators callable, before any table can be registered: calls of other threads wait for that.
std::condition_variable ready;
bool loading = true;
constexpr std::chrono::seconds kLongestWait{60};

std::vector<std::shared_ptr<const Table>>& tables() {
  static auto* list = new std::vector<std::shared_ptr<const Table>>;  // never destroyed: kernels may launch during exit
  return *list;
}
// Replaced tables stay: a thread may hold a plan that points into one.
std::vector<std::shared_ptr<const Table>>& retired() {
  static auto* list = new std::vector<std::shared_ptr<const Table>>;
  return *list;
}
std::string& built_archs() {
  static auto* text = new std::string("nothing");
  return *text;
}
std::atomic<uint64_t> table_generation{1};

// Names that build.py --arch takes, by capability; dispatch.BUILDABLE is the same list.
const struct {
  int capability;
  const char* name;
} kBuildable[] = {{80, "sm_80"}, {86, "sm_86"}, {89, "sm_89"}, {90, "sm_90a"}, {100, "sm_100"}, {120, "sm_120"}};

const char* const kDtypeNames[] = {"float16", "bfloat16"};

const char* kind_name(bool zeros, bool sparse) { return sparse ? ", 2:4 sparse" : zeros ? ", zero points" : ", symmetric"; }

std::string describe(const Choice& c) {
  return concat("M=", c.m, ", N=", c.n, ", K=", c.k, ", group_size=", c.group_size, ", ", kDtypeNames[c.dtype],
                kind_name(c.zeros, c.sparse));
}

int forced(const Table& table, const Choice& c, int format) {
  if (c.variant < 0 || c.variant >= static_cast<int64_t>(table.variants.size()))
    invalid("variant=", c.variant, " is not an index of the ", table.arch, " table (", table.variants.size(), " variants)");
  const Variant& v = *table.variants[c.variant];
  if (v.format() != format)
    invalid("kernel ", v.name, " is for ", kDtypeNames[v.fields.dtype], kind_name(v.fields.zeros != 0, v.sparse()), ", group_size=",
            v.fields.group_size, ": it cannot serve ", describe(c));
  return static_cast<int>(c.variant);
}

}  // namespace

int select(const Table& table, const Choice& c) {
  const int format = format_index(c.dtype, c.zeros, c.group_size, c.sparse);
  if (c.variant == kBatchInvariant) {
    const int index = table.batch_invariant[format];
    if (index < 0) invalid("the ", table.arch, " table has no kernel for batch_invariant=True: ", describe(c));
    return index;
  }
  if (c.variant != kAuto) return forced(table, c, format);
  for (const Row& row : table.rows)
    if (row.variants[format] >= 0 && row.matches(c.m, c.n, c.k, c.sms)) return row.variants[format];
  failed("no kernel of the ", table.arch, " table serves ", describe(c), "; see marlin_cutlass.explain, or build more: python build.py --arch ",
         table.arch, c.sparse ? " --family sparse" : "");
}

void publish(std::unique_ptr<Table> table) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& list = tables();
  for (auto& known : list)
    if (known->major == table->major && known->minor == table->minor) {
      retired().push_back(known);
      known = std::move(table);
      ++table_generation;
      return;
    }
  list.push_back(std::move(table));
  ++table_generation;
  ready.notify_all();
}

void clear_tables() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& known : tables()) retired().push_back(known);
  tables().clear();
  ++table_generation;
}

uint64_t generation() { return table_generation.load(std::memory_order_relaxed); }

void set_loading(bool value) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    loading = value;
  }
  ready.notify_all();
}

std::shared_ptr<const Table> table_for(int major, int minor) {
  std::unique_lock<std::mutex> lock(mutex);
  std::shared_ptr<const Table> found;
  const auto find = [&] {
    for (const auto& table : tables())
      if (table->major == major && table->minor == minor) found = table;
    return found != nullptr;
  };
  ready.wait_for(lock, kLongestWait, [&] { return find() || !loading; });
  if (found) return found;
  const int capability = major * 10 + minor;
  if (capability < 80) failed("needs sm_80 or newer, found sm_", capability, " (kernels built for [", built_archs(), "])");
  std::string known;
  for (const auto& arch : kBuildable) {
    if (arch.capability == capability)
      failed("kernels built for [", built_archs(), "], device sm_", capability, "; run python build.py --arch ", arch.name);
    known += (known.empty() ? "" : ", ") + std::string(arch.name);
  }
  failed("kernels built for [", built_archs(), "], device sm_", capability, ", which is not one of ", known);
}

void set_built_archs(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  built_archs() = text.empty() ? "nothing" : text;
}

}  // namespace marlin_cutlass
