// A CUDA driver for tests without a GPU: it records launches and computes them on host memory from the launch arguments, straight from the
// documented layout. Loaded in the place of libcuda.so.1 through MARLIN_CUTLASS_LIBCUDA.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "driver.h"
#include "marlin_cutlass/params.h"

using marlin_cutlass::GemmParams;
using namespace marlin_cutlass::driver;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// What Python reads after a launch; all fields are 64-bit so that ctypes and C++ agree.
struct Record {
  int64_t launches, grid, threads, shared_bytes, cluster, programmatic, stream, max_shared, function_count;
  int64_t allocations, allocated_bytes, encodes, memsets, synchronisations, dirty_flags, pushes, relaxed;
  int64_t partials, flags, vector_store, lda, ldc, m, n, k, k_steps, raster, whole_passes, owner_steps, share_each, share_more;
  int64_t map_rows, map_slices, map_stride, map_box_rows, map_box_slices;
} record;

struct Kernel { std::string name; int max_shared = 0; };
struct Map { const char* base; uint64_t rows, slices, stride; uint32_t box_rows, box_slices; int dtype; };
static_assert(sizeof(Map) <= sizeof(TensorMap), "a fake map fits the opaque one");

std::string last_kernel, failing;
bool compute = true;
int fail_code, sms = 132, major = 9, minor = 0, occupancy_blocks = 8, capture_mode;
void* current_context = reinterpret_cast<void*>(0x1000);
std::vector<void*> contexts;
struct CaptureState { int status; uint64_t id; Graph graph; };
std::map<Stream, CaptureState> captures;
struct Object { void* data; HostFunction destroy; };
std::multimap<Graph, Object*> graph_objects;

// ---- numbers --------------------------------------------------------------------------------------------------------------------------

float half_to_float(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float value = exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(static_cast<float>(mantissa), -24);
  return h >> 15 ? -value : value;
}
uint16_t float_to_half(float f) {
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (std::isnan(f)) return sign | 0x7e00;
  int exponent;
  std::frexp(std::fabs(f), &exponent);
  const int shift = std::max(exponent - 11, -24);  // weight of the last kept bit
  const float scaled = std::nearbyint(std::ldexp(std::fabs(f), -shift));
  const float value = std::ldexp(scaled, shift);
  if (value >= 65536.f) return sign | 0x7c00;
  if (value < 0x1p-14f) return sign | static_cast<uint16_t>(std::ldexp(value, 24));
  std::frexp(value, &exponent);
  return sign | static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(std::ldexp(value, 11 - exponent)) & 1023));
}
float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t{b} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t float_to_bfloat(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Format {
  bool half, zeros;
  int group;
  float load(uint16_t v) const { return half ? half_to_float(v) : bfloat_to_float(v); }
  uint16_t store(float v) const { return half ? float_to_half(v) : float_to_bfloat(v); }
};
Format parse(const std::string& name) {
  const size_t g = name.find("_g", 6);
  const size_t f = name.rfind('_', g - 1);
  const std::string type = name.substr(f + 1, g - f - 1), group = name.substr(g + 2, name.find('_', g + 2) - g - 2);
  return {type[0] == 'f', type.back() == 'z', group == "col" ? -1 : std::atoi(group.c_str())};
}

// ---- the documented layout ------------------------------------------------------------------------------------------------------------

uint16_t read16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

float weight(const GemmParams& p, const Format& f, int k, int n) {
  const int bytes = marlin_cutlass::block_bytes(f.group, f.zeros);
  const uint8_t* block = p.weight + (int64_t{n / 64} * p.k_blocks + k / 128) * bytes;
  const int column = n % 16, row = 2 * (column / 4) + column % 2 + 8 * (column % 4 / 2), atom = n % 64 / 16;
  const int lane = row % 8 * 4 + k % 8 / 2, pair = row / 8 + 2 * (k % 16 / 8);
  uint32_t word;
  std::memcpy(&word, block + k % 128 / 64 * 2048 + atom * 512 + lane * 16 + k % 64 / 16 * 4, 4);
  const int bit = 2 + 4 * pair + 16 * (k % 2);
  const int code = (word >> bit | word << ((32 - bit) & 31)) & 15;
  const int entry_bytes = f.group < 0 ? 4 : f.zeros ? 8 : 4, group = f.group < 0 ? 0 : k % 128 / f.group;
  const uint8_t* entry = block + 4096 + (group * 4 + atom) * 8 * entry_bytes + row % 8 * entry_bytes + row / 8 * 2;
  const float scale = f.group < 0 ? 0x1p-7f : half_to_float(read16(entry)) * (row < 8 ? 0x1p-22f : 0x1p-18f);
  const float zero = f.zeros ? half_to_float(read16(entry + (f.group < 0 ? 0 : 4))) * (row < 8 ? 0x1p22f : 0x1p18f) : 8.f;
  return f.load(f.store((code - zero) * f.load(f.store(scale))));
}

// The 2:4-sparse layout: 2048 bytes of codes, 1024 of places, scales.
float sparse_weight(const GemmParams& p, const Format& f, int k, int n) {
  const int bytes = 3072 + marlin_cutlass::block_bytes(f.group, false) - 4096;
  const uint8_t* block = p.weight + (int64_t{n / 64} * p.k_blocks + k / 128) * bytes;
  const int column = n % 16, row = 2 * (column / 4) + column % 2 + 8 * (column % 4 / 2), atom = n % 64 / 16;
  const int chunk = k % 128 / 4;
  uint32_t word;
  std::memcpy(&word, block + 2048 + atom / 2 * 512 + (row % 8 * 4 + atom % 2 * 2 + chunk % 8 / 4) * 16 + chunk / 8 * 4, 4);
  const uint32_t places = word >> (row / 8 * 16 + chunk % 4 * 4) & 15;
  const int first = places & 3, second = places >> 2, place = k % 4;
  if (place != first && place != second) return 0.f;
  const int kept = 2 * chunk + (place == second), deep = kept % 16, pair = row / 8 + 2 * (deep / 8);
  std::memcpy(&word, block + atom * 512 + (row % 8 * 4 + deep % 8 / 2) * 16 + kept / 16 * 4, 4);
  const int bit = 2 + 4 * pair + 16 * (deep % 2);
  const int code = (word >> bit | word << ((32 - bit) & 31)) & 15;
  const int group = f.group < 0 ? 0 : k % 128 / f.group;
  const uint8_t* entry = block + 3072 + (group * 4 + atom) * 32 + row % 8 * 4 + row / 8 * 2;
  const float scale = f.group < 0 ? 0x1p-7f : half_to_float(read16(entry)) * (row < 8 ? 0x1p-22f : 0x1p-18f);
  return f.load(f.store((code - 8) * f.load(f.store(scale))));
}

void multiply(const std::string& name, const GemmParams& p, const Map* map) {
  const Format f = parse(name);
  const bool sparse = name.find("_sparse_") != std::string::npos;
  const auto* a = static_cast<const uint16_t*>(map ? reinterpret_cast<const void*>(map->base) : p.a);
  const int64_t lda = map ? map->stride / 2 : p.lda;
  auto* c = static_cast<uint16_t*>(p.c);
  std::vector<float> w(p.k), gates(2 * p.m);
  for (int n = 0; n < p.n; ++n) {
    for (int k = 0; k < p.k; ++k) w[k] = sparse ? sparse_weight(p, f, k, n) : weight(p, f, k, n);
    for (int m = 0; m < p.m; ++m) {
      double sum = 0;
      for (int k = 0; k < p.k; ++k)
        if (w[k] != 0.f) sum += static_cast<double>(f.load(a[m * lda + k])) * w[k];
      const float bias = p.bias ? f.load(static_cast<const uint16_t*>(p.bias)[n]) : 0.f;
      const uint16_t value = f.store(static_cast<float>(sum) * p.col_scale[n] + bias);
      float& gate = gates[2 * m + n % 2];
      if (!p.swiglu) c[m * p.ldc + n] = value;
      else if (n % 4 < 2) gate = f.load(value);
      else c[m * p.ldc + n / 4 * 2 + n % 2] = f.store(f.load(f.store(gate / (1.f + std::exp(-gate)))) * f.load(value));
    }
  }
}

bool fails(const char* symbol) { return failing == symbol; }
#define MAYBE_FAIL(symbol) if (fails(#symbol)) return fail_code

}  // namespace

// ---- the part of the driver API that the launcher uses --------------------------------------------------------------------------------

EXPORT Result cuInit(unsigned) { MAYBE_FAIL(cuInit); return 0; }
EXPORT Result cuGetErrorString(Result, const char** text) { *text = "injected"; return 0; }
EXPORT Result cuDeviceGet(Device* device, int index) { *device = index; return 0; }
EXPORT Result cuDeviceGetCount(int* count) { *count = 1; return 0; }
EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  *value = attribute == kMultiprocessorCount ? sms : attribute == kCapabilityMajor ? major : minor;
  return 0;
}
EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device) { *context = reinterpret_cast<Context>(0x1000); return 0; }
EXPORT Result cuCtxGetCurrent(Context* context) { *context = static_cast<Context>(current_context); return 0; }
EXPORT Result cuCtxPushCurrent_v2(Context context) {
  contexts.push_back(current_context);
  current_context = context;
  ++record.pushes;
  return 0;
}
EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  *context = static_cast<Context>(current_context);
  current_context = contexts.back();
  contexts.pop_back();
  return 0;
}
EXPORT Result cuModuleLoadData(Module* module, const void*) {
  MAYBE_FAIL(cuModuleLoadData);
  *module = reinterpret_cast<Module>(0x2000);
  return 0;
}
EXPORT Result cuModuleGetFunction(Function* function, Module, const char* name) {
  *function = reinterpret_cast<Function>(new Kernel{name});
  ++record.function_count;
  return 0;
}
EXPORT Result cuFuncSetAttribute(Function function, int, int value) {
  MAYBE_FAIL(cuFuncSetAttribute);
  reinterpret_cast<Kernel*>(function)->max_shared = value;
  return 0;
}
EXPORT Result cuOccupancyMaxActiveClusters(int* clusters, Function, const LaunchConfig* config) {
  *clusters = occupancy_blocks * sms / static_cast<int>(config->attributes[0].value.cluster.x);
  return 0;
}
EXPORT Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function, int, size_t) { *blocks = occupancy_blocks; return 0; }

EXPORT Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** arguments, void**) {
  MAYBE_FAIL(cuLaunchKernelEx);
  const auto& kernel = *reinterpret_cast<Kernel*>(function);
  if (config->shared_bytes > 48 * 1024 && static_cast<int>(config->shared_bytes) > kernel.max_shared) return 1;
  const bool hopper = kernel.name.find("_hopper_") != std::string::npos;
  const auto* map = hopper ? static_cast<const Map*>(arguments[0]) : nullptr;
  const auto& p = *static_cast<const GemmParams*>(arguments[hopper ? 1 : 0]);
  last_kernel = kernel.name;
  ++record.launches;
  record.grid = config->grid_x, record.threads = config->block_x, record.shared_bytes = config->shared_bytes;
  record.stream = reinterpret_cast<int64_t>(config->stream), record.max_shared = kernel.max_shared;
  record.cluster = 1, record.programmatic = 0;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == kClusterDimension) record.cluster = attribute.value.cluster.x;
    if (attribute.id == kProgrammaticStreamSerialization) record.programmatic = attribute.value.programmatic_serialization;
  }
  record.partials = reinterpret_cast<int64_t>(p.partials), record.flags = reinterpret_cast<int64_t>(p.flags);
  record.vector_store = p.vector_store, record.lda = p.lda, record.ldc = p.ldc;
  record.m = p.m, record.n = p.n, record.k = p.k, record.k_steps = p.k_steps, record.raster = p.raster;
  record.whole_passes = p.whole_passes, record.owner_steps = p.owner_steps, record.share_each = p.share_each, record.share_more = p.share_more;
  if (map) {
    record.map_rows = map->rows, record.map_slices = map->slices, record.map_stride = map->stride;
    record.map_box_rows = map->box_rows, record.map_box_slices = map->box_slices;
  }
  if (p.flags)
    for (unsigned i = 0; i < config->grid_x; ++i) record.dirty_flags += p.flags[i] != 0;
  if (p.partials) std::memset(p.partials, 0xff, config->grid_x * sizeof(float));
  if (compute && p.c) multiply(kernel.name, p, map);
  return 0;
}

EXPORT Result cuStreamCreate(Stream* stream, unsigned) { *stream = reinterpret_cast<Stream>(0x5000); return 0; }
EXPORT Result cuStreamSynchronize(Stream) { MAYBE_FAIL(cuStreamSynchronize); ++record.synchronisations; return 0; }
EXPORT Result cuStreamGetCaptureInfo_v3(Stream stream, int* status, uint64_t* id, Graph* graph, const void**, const void**, size_t*) {
  const auto found = captures.find(stream);
  const CaptureState state = found == captures.end() ? CaptureState{} : found->second;
  *status = state.status, *id = state.id, *graph = state.graph;
  return 0;
}
EXPORT Result cuStreamGetCaptureInfo_v2(Stream stream, int* status, uint64_t* id, Graph* graph, const void** d, size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, d, nullptr, count);
}
EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  record.relaxed += capture_mode == kCaptureModeRelaxed;
  return 0;
}
EXPORT Result cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  MAYBE_FAIL(cuMemAlloc);
  // During a capture the driver allows this only in relaxed mode.
  for (const auto& capture : captures)
    if (capture.second.status == kCaptureActive && capture_mode != kCaptureModeRelaxed) return 900;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xff, bytes);
  *pointer = reinterpret_cast<DevicePointer>(memory);
  ++record.allocations;
  record.allocated_bytes += bytes;
  return 0;
}
EXPORT Result cuMemsetD32Async(DevicePointer pointer, unsigned value, size_t count, Stream) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(pointer)[i] = value;
  ++record.memsets;
  return 0;
}
EXPORT Result cuUserObjectCreate(UserObject* object, void* data, HostFunction destroy, unsigned, unsigned) {
  *object = reinterpret_cast<UserObject>(new Object{data, destroy});
  return 0;
}
EXPORT Result cuGraphRetainUserObject(Graph graph, UserObject object, unsigned, unsigned) {
  graph_objects.emplace(graph, reinterpret_cast<Object*>(object));
  return 0;
}
EXPORT Result cuTensorMapEncodeTiled(TensorMap* out, int dtype, uint32_t rank, void* base, const uint64_t* sizes, const uint64_t* strides,
                                     const uint32_t* box, const uint32_t*, int, int swizzle, int, int fill) {
  MAYBE_FAIL(cuTensorMapEncodeTiled);
  const bool aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0 && strides[0] % 16 == 0 && strides[0] > 0;
  if (rank != 3 || sizes[0] != 64 || strides[1] != 128 || box[0] != 64 || box[1] > 256 || box[2] > 256 || !aligned || swizzle != 3 || fill)
    return 1;
  const Map map{static_cast<const char*>(base), sizes[1], sizes[2], strides[0], box[1], box[2], dtype};
  std::memcpy(out, &map, sizeof(map));
  ++record.encodes;
  return 0;
}

// ---- control from tests ---------------------------------------------------------------------------------------------------------------

EXPORT Record* fake_record() { return &record; }
EXPORT const char* fake_last_kernel() { return last_kernel.c_str(); }
EXPORT void fake_reset() {
  record = Record{};
  last_kernel.clear();
  failing.clear();
  captures.clear();
}
EXPORT void fake_fail(const char* symbol, int code) { failing = symbol, fail_code = code; }
EXPORT void fake_capture(int64_t stream, int status, int64_t id, int64_t graph) {
  captures[reinterpret_cast<Stream>(stream)] = {status, static_cast<uint64_t>(id), reinterpret_cast<Graph>(graph)};
}
EXPORT void fake_destroy_graph(int64_t graph) {
  auto range = graph_objects.equal_range(reinterpret_cast<Graph>(graph));
  for (auto it = range.first; it != range.second; ++it) it->second->destroy(it->second->data);
  graph_objects.erase(range.first, range.second);
}
EXPORT void fake_compute(int on) { compute = on; }
EXPORT void fake_occupancy(int blocks) { occupancy_blocks = blocks; }
EXPORT void fake_context(int64_t context) { current_context = reinterpret_cast<void*>(context); }
