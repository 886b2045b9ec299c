#include "launch.h"

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <unordered_map>

#include "error.h"
#include "sha256.h"
#include "workspace.h"

namespace marlin_cutlass {
namespace {

using driver::api;
using driver::check;

constexpr int kDefaultSharedBytes = 48 * 1024;  // above this a kernel has to ask

// ---- devices --------------------------------------------------------------------------------------------------------------------------

struct DeviceState {
  driver::Context context = nullptr;
  int sms = 0, major = 0, minor = 0;
};

DeviceState query_device(int index) {
  DeviceState d;
  driver::Device handle;
  check(api().device_get(&handle, index), "cuDeviceGet", concat("device ", index));
  check(api().device_attribute(&d.sms, driver::kMultiprocessorCount, handle), "cuDeviceGetAttribute");
  check(api().device_attribute(&d.major, driver::kCapabilityMajor, handle), "cuDeviceGetAttribute");
  check(api().device_attribute(&d.minor, driver::kCapabilityMinor, handle), "cuDeviceGetAttribute");
  check(api().primary_context_retain(&d.context, handle), "cuDevicePrimaryCtxRetain");
  return d;
}

const DeviceState& device_state(int index) {
  static std::mutex mutex;
  static DeviceState devices[kMaxDevices];
  if (index < 0 || index >= kMaxDevices) failed("device ", index, " is out of range: at most ", kMaxDevices, " devices");
  std::lock_guard<std::mutex> lock(mutex);
  if (!devices[index].context) devices[index] = query_device(index);
  return devices[index];
}

// ---- kernels --------------------------------------------------------------------------------------------------------------------------

std::string read_cubin(const Variant& v) {
  std::ifstream file(v.file, std::ios::binary);
  if (!file) failed("kernel ", v.name, ": cannot read ", v.file, "; run build.py again");
  std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::string digest = Sha256::hex(bytes);
  if (digest != v.sha256)
    failed("kernel ", v.name, ": ", v.file, " has sha256 ", digest, " and the manifest says ", v.sha256, "; run build.py again");
  return bytes;
}

driver::Function load_kernel(const Variant& v) {
  const std::string cubin = read_cubin(v);
  driver::RelaxedCapture relaxed;  // the first call may be inside a graph capture
  driver::Module module;
  driver::Function function;
  check(api().module_load(&module, cubin.data()), "cuModuleLoadData", concat("kernel ", v.name, " from ", v.file));
  check(api().module_function(&function, module, v.name.c_str()), "cuModuleGetFunction", v.name);
  if (v.fields.shared_bytes > kDefaultSharedBytes)
    check(api().function_set_attribute(function, driver::kMaxDynamicSharedBytes, v.fields.shared_bytes), "cuFuncSetAttribute",
          concat("kernel ", v.name, " asks for ", v.fields.shared_bytes, " bytes of shared memory"));
  return function;
}

driver::Function kernel(const Variant& v, int device) {
  static std::mutex mutex;
  driver::Function function = v.functions[device].load(std::memory_order_acquire);
  if (function) return function;
  std::lock_guard<std::mutex> lock(mutex);
  function = v.functions[device].load(std::memory_order_acquire);
  if (!function) v.functions[device].store(function = load_kernel(v), std::memory_order_release);
  return function;
}

// ---- plans ----------------------------------------------------------------------------------------------------------------------------

struct Key {
  int64_t m, n, k, variant;
  int32_t group_size, dtype, kind, device;  // kind: 1 zero points, 2 sparse

  bool operator==(const Key& o) const {  // without branches: every call compares one
    return ((m ^ o.m) | (n ^ o.n) | (k ^ o.k) | (variant ^ o.variant)) == 0 &&
           ((group_size ^ o.group_size) | (dtype ^ o.dtype) | (kind ^ o.kind) | (device ^ o.device)) == 0;
  }
};
static_assert(sizeof(Key) == 48, "hashed byte by byte: no padding");

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t words[6], hash = 0;
    std::memcpy(words, &key, sizeof(words));
    for (uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
    return hash;
  }
};

// Plans by key, and before them the last plan found for each of a few hashes: a model has fewer shapes than that, and calls them in turn.
struct PlanCache {
  struct Recent {
    Key key;
    const Plan* plan = nullptr;
  };
  static constexpr int kRecentBits = 6;

  static size_t place(const Key& key) {
    const uint64_t sizes = static_cast<uint64_t>(key.m) ^ static_cast<uint64_t>(key.n) << 20 ^ static_cast<uint64_t>(key.k) << 40;
    const int32_t others = 8 * key.device + 512 * key.group_size;
    return (sizes + static_cast<uint64_t>(key.variant) + static_cast<uint64_t>(others)) * 0x9e3779b97f4a7c15u >> (64 - kRecentBits);
  }
  void clear() {
    recent.fill({});
    plans.clear();
  }

  uint64_t generation = 0;
  std::unordered_map<Key, Plan, KeyHash> plans;
  std::array<Recent, size_t{1} << kRecentBits> recent;
};
constexpr int64_t kMaxPartials = int64_t{1} << 27;  // floats (512 MiB) of workspace that a stream or a graph may hold
constexpr size_t kMaxPlans = 1 << 16;  // some 30 MB a thread; a server that meets every row count stays far below

// Grid, block, shared memory and attributes of every launch of a plan.
void set_config(Plan& p) {
  const VariantFields& v = p.variant->fields;
  p.config.grid_x = static_cast<unsigned>(p.schedule.grid);
  p.config.grid_y = p.config.grid_z = p.config.block_y = p.config.block_z = 1;
  p.config.block_x = static_cast<unsigned>(v.threads);
  p.config.shared_bytes = static_cast<unsigned>(v.shared_bytes);
  if (v.cluster > 1) {
    driver::LaunchAttribute& cluster = p.attributes[p.config.attribute_count++];
    cluster.id = driver::kClusterDimension;
    cluster.value.cluster = {static_cast<unsigned>(v.cluster), 1, 1};
  }
  driver::LaunchAttribute& serialization = p.attributes[p.config.attribute_count];  // counted at the launch, where it is asked for
  serialization.id = driver::kProgrammaticStreamSerialization;
  serialization.value.programmatic_serialization = 1;
}

void set_params(Plan& p, const Call& call) {
  const Schedule& s = p.schedule;
  p.params.m = static_cast<int32_t>(call.m);
  p.params.n = static_cast<int32_t>(call.n);
  p.params.n_blocks = static_cast<int32_t>(ceil_div(call.n, kBlockColumns));
  p.params.k_blocks = static_cast<int32_t>(ceil_div(call.k, kBlockDepth));
  p.params.m_tiles = static_cast<int32_t>(s.m_tiles);
  p.params.n_tiles = static_cast<int32_t>(s.n_tiles);
  p.params.k_steps = static_cast<int32_t>(s.k_steps);
  p.params.raster = static_cast<int32_t>(s.raster);
  p.params.whole_passes = static_cast<int32_t>(s.whole_passes);
  p.params.owner_steps = static_cast<int32_t>(s.owner_steps);
  const VariantFields& v = p.variant->fields;
  if (static_cast<Decomposition>(v.decomposition) == Decomposition::kStreamK) set_stream_shares(p.params, static_cast<int>(s.grid / v.multicast));
  if (static_cast<Decomposition>(v.decomposition) == Decomposition::kHybrid)
    set_hybrid_partition(p.params, v.n_sm / kBlockColumns, static_cast<int>(s.grid), v.multicast);
}

driver::LaunchConfig launch_config(const Plan& p, driver::Stream stream) {
  driver::LaunchConfig config = p.config;
  config.stream = stream;
  config.attributes = const_cast<driver::LaunchAttribute*>(p.attributes);  // the driver only reads them
  return config;
}

// CTAs of a plan's kernel that the device holds at once.
int64_t resident_ctas(const Plan& p, int sms) {
  const VariantFields& v = p.variant->fields;
  int count = 0;
  if (v.cluster > 1 && api().active_clusters) {
    const driver::LaunchConfig config = launch_config(p, nullptr);
    check(api().active_clusters(&count, p.function, &config), "cuOccupancyMaxActiveClusters", p.variant->name);
    return int64_t{count} * v.cluster;
  }
  check(api().occupancy(&count, p.function, v.threads, v.shared_bytes), "cuOccupancyMaxActiveBlocksPerMultiprocessor", p.variant->name);
  return int64_t{count} * sms;
}

// Rows of a launch whose partial sums stay within kMaxPartials: those of a hybrid kernel grow with the row tiles. Equal launches, whole tiles.
int64_t rows_that_fit(const Plan& p) {
  const int64_t launches = ceil_div(p.schedule.partials, kMaxPartials);
  return launches <= 1 ? INT32_MAX : ceil_div(p.schedule.m_tiles, launches) * p.variant->fields.m_tile;
}

Plan make_plan(const Call& call) {
  const DeviceState& device = device_state(call.device);
  const std::shared_ptr<const Table> table = table_for(device.major, device.minor);
  const Choice choice{call.m, call.n, call.k, call.group_size, call.dtype, device.sms, call.zeros != 0, call.sparse != 0, call.variant};
  Plan p{};
  p.index = select(*table, choice);
  p.variant = table->variants[p.index].get();
  p.context = device.context;
  p.schedule = make_schedule(p.variant->fields, call.m, call.n, call.k, device.sms);
  if (p.schedule.grid > INT32_MAX) invalid("M=", call.m, ", N=", call.n, ": ", p.schedule.grid, " blocks exceed a grid; split the rows");
  set_params(p, call);
  set_config(p);
  p.k_multiple = p.variant->hopper() ? 64 : 8;
  // Shares of k that depend on the number of row tiles do not within one row tile.
  const bool by_tile = call.variant == kBatchInvariant && !is_batch_invariant(p.variant->fields);
  p.rows_per_launch = by_tile ? p.variant->fields.m_tile : rows_that_fit(p);
  driver::ContextGuard guard(device.context);
  p.function = kernel(*p.variant, call.device);
  if (waits_across_ctas(p.variant->fields)) {  // a launch whose blocks wait for one that never starts would never end
    const int64_t resident = resident_ctas(p, device.sms);
    if (resident < p.schedule.grid)
      failed("kernel ", p.variant->name, " launches ", p.schedule.grid, " blocks that wait for each other and this device holds ", resident);
  }
  return p;
}

// ---- tensor maps ----------------------------------------------------------------------------------------------------------------------

struct MapKey {
  const void* a;
  int64_t m, k, lda;
  int32_t dtype, m_tile, k_sm, multicast;

  bool operator==(const MapKey& o) const { return std::memcmp(this, &o, sizeof(MapKey)) == 0; }
};
static_assert(sizeof(MapKey) == 48, "compared byte by byte: no padding");

struct MapSlot {
  MapKey key{};
  driver::TensorMap map;
};
constexpr size_t kMapSlots = 128;

// A as [k / 64][m][64]: one box is a stage of 64-column slices of m_tile rows, each row 128 bytes, swizzled for wgmma; CTAs that share
// activations load a part of the stage each. Columns outside A arrive as zeros. Where A has fewer rows than the tile a box is one slice of
// those rows: rows outside A would arrive as zeros too, but slowly (load_activations in hopper_producer.cuh).
void encode(const Call& call, const Variant& v, driver::TensorMap* map) {
  if (!api().encode_tiled) failed("kernel ", v.name, ": the driver has no cuTensorMapEncodeTiled; a Hopper kernel needs CUDA 12");
  const uint64_t sizes[3] = {64, static_cast<uint64_t>(call.m), static_cast<uint64_t>(call.k / 64)};
  const uint64_t strides[2] = {static_cast<uint64_t>(call.lda) * 2, 128};
  const bool whole = call.m >= v.fields.m_tile;
  const uint32_t rows = static_cast<uint32_t>(whole ? v.fields.m_tile : call.m);
  const uint32_t box[3] = {64, rows, static_cast<uint32_t>(whole ? v.fields.k_sm / 64 / v.fields.multicast : 1)};
  const uint32_t steps[3] = {1, 1, 1};
  const bool half = static_cast<Dtype>(call.dtype) == Dtype::kFloat16;
  check(api().encode_tiled(map, half ? driver::kMapFloat16 : driver::kMapBfloat16, 3, const_cast<void*>(call.a), sizes, strides, box, steps,
                           driver::kInterleaveNone, driver::kSwizzle128B, driver::kPromotion256B, driver::kFillZeros),
        "cuTensorMapEncodeTiled", concat("kernel ", v.name, ", M=", call.m, ", K=", call.k, ", row stride ", call.lda));
}

const driver::TensorMap& tensor_map(const Call& call, const Variant& v) {
  static thread_local std::unique_ptr<MapSlot[]> slots(new MapSlot[kMapSlots]);
  const MapKey key{call.a, call.m, call.k, call.lda, call.dtype, v.fields.m_tile, v.fields.k_sm, v.fields.multicast};
  uint64_t hash = (reinterpret_cast<uintptr_t>(call.a) >> 4) * 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 29) ^ static_cast<uint64_t>(call.m) ^ static_cast<uint64_t>(v.fields.m_tile) << 20) * 0xbf58476d1ce4e5b9u;
  MapSlot& slot = slots[(hash >> 32) % kMapSlots];
  if (!(slot.key == key)) {
    slot.key = MapKey{};  // in case encoding throws
    encode(call, v, &slot.map);
    slot.key = key;
  }
  return slot.map;
}

// ---- launches -------------------------------------------------------------------------------------------------------------------------

GemmParams make_params(const Plan& plan, const Call& call) {
  GemmParams p = plan.params;
  p.a = call.a;
  p.weight = static_cast<const uint8_t*>(call.packed);
  p.col_scale = call.col_scale;
  p.bias = call.bias;
  p.c = call.c;
  p.lda = call.lda;
  p.ldc = call.ldc;
  p.k = static_cast<int32_t>(call.k);
  p.swiglu = call.swiglu;
  p.vector_store = !call.swiglu && reinterpret_cast<uintptr_t>(call.c) % 8 == 0 && call.ldc % 4 == 0 && call.n % 4 == 0;
  return p;
}

void check_after_launch(const Variant& v, driver::Stream stream) {
  if (!capturing(stream)) check(api().stream_synchronize(stream), "cuStreamSynchronize", concat("kernel ", v.name));
}

}  // namespace

Options& options() {
  static Options instance;
  return instance;
}

const Plan& plan(const Call& call) {
  static thread_local PlanCache cache;
  const uint64_t now = generation();
  if (cache.generation != now || cache.plans.size() > kMaxPlans) {
    cache.clear();
    cache.generation = now;
  }
  const Key key{call.m, call.n, call.k, call.variant, call.group_size, call.dtype, call.zeros + 2 * call.sparse, call.device};
  PlanCache::Recent& recent = cache.recent[PlanCache::place(key)];
  if (recent.plan && recent.key == key) return *recent.plan;
  auto found = cache.plans.find(key);
  if (found == cache.plans.end()) found = cache.plans.emplace(key, make_plan(call)).first;
  recent = {key, &found->second};  // the address of an element lasts as long as the element
  return found->second;
}

void launch(const Plan& plan, const Call& call) {
  const Variant& v = *plan.variant;
  driver::ContextGuard guard(plan.context);
  GemmParams params = make_params(plan, call);
  if (plan.schedule.flags > 0) {
    const Workspace w = workspace(call.device, call.stream, plan.schedule.partials, plan.schedule.flags);
    params.partials = w.partials;
    params.flags = w.flags;
  }
  driver::LaunchConfig config = launch_config(plan, call.stream);
  void* arguments[2] = {&params, nullptr};
  if (v.hopper()) {
    // Only Hopper kernels wait for the previous kernel themselves, so only they may start before it ends.
    config.attribute_count += options().programmatic_launch;
    arguments[0] = const_cast<driver::TensorMap*>(&tensor_map(call, v));
    arguments[1] = &params;
  }
  const driver::Result result = api().launch(&config, plan.function, arguments, nullptr);
  if (result != driver::kSuccess)
    check(result, "cuLaunchKernelEx", concat("kernel ", v.name, ", grid ", plan.schedule.grid, ", cluster ", v.fields.cluster, ", M=", call.m,
                                             ", N=", call.n, ", K=", call.k, " (or an earlier kernel on this device)"));
  if (options().debug) check_after_launch(v, call.stream);
}

}  // namespace marlin_cutlass
