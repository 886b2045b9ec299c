// The few driver API entry points that the launcher uses, found at run time: the library builds without CUDA headers and loads on a machine
// without a driver. Types and values are those of cuda.h 12.3 and later; tests compare them with cuda.h where there is one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace marlin_cutlass::driver {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = struct StreamOpaque*;
using Graph = struct GraphOpaque*;
using UserObject = struct UserObjectOpaque*;
using HostFunction = void (*)(void*);

constexpr Result kSuccess = 0;

// Device attributes.
constexpr int kMultiprocessorCount = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;
// Function attributes.
constexpr int kMaxDynamicSharedBytes = 8;
// Launch attributes.
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
// Stream capture.
constexpr int kCaptureNone = 0, kCaptureActive = 1, kCaptureModeRelaxed = 2;
constexpr unsigned kStreamNonBlocking = 1, kNoDestructorSync = 1, kUserObjectMove = 1;
// Tensor maps.
constexpr int kMapFloat16 = 6, kMapBfloat16 = 9, kInterleaveNone = 0, kSwizzle128B = 3, kPromotion256B = 3, kFillZeros = 0;

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

union LaunchAttributeValue {
  char pad[64];
  struct { unsigned x, y, z; } cluster;
  int programmatic_serialization;
};

struct LaunchAttribute {
  int id;
  char pad[4];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// Name in libcuda, name here, arguments.
#define MC_DRIVER_FUNCTIONS(X)                                                                                                    \
  X(cuInit, init, (unsigned))                                                                                                     \
  X(cuGetErrorString, error_string, (Result, const char**))                                                                       \
  X(cuDeviceGet, device_get, (Device*, int))                                                                                      \
  X(cuDeviceGetCount, device_count, (int*))                                                                                       \
  X(cuDeviceGetAttribute, device_attribute, (int*, int, Device))                                                                  \
  X(cuDevicePrimaryCtxRetain, primary_context_retain, (Context*, Device))                                                         \
  X(cuCtxGetCurrent, context_get, (Context*))                                                                                     \
  X(cuCtxPushCurrent_v2, context_push, (Context))                                                                                 \
  X(cuCtxPopCurrent_v2, context_pop, (Context*))                                                                                  \
  X(cuModuleLoadData, module_load, (Module*, const void*))                                                                        \
  X(cuModuleGetFunction, module_function, (Function*, Module, const char*))                                                       \
  X(cuFuncSetAttribute, function_set_attribute, (Function, int, int))                                                             \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, occupancy, (int*, Function, int, size_t))                                        \
  X(cuLaunchKernelEx, launch, (const LaunchConfig*, Function, void**, void**))                                                    \
  X(cuStreamCreate, stream_create, (Stream*, unsigned))                                                                           \
  X(cuStreamSynchronize, stream_synchronize, (Stream))                                                                            \
  X(cuStreamGetCaptureInfo_v2, capture_info_v2, (Stream, int*, uint64_t*, Graph*, const void**, size_t*))                         \
  X(cuThreadExchangeStreamCaptureMode, exchange_capture_mode, (int*))                                                             \
  X(cuMemAlloc_v2, memory_allocate, (DevicePointer*, size_t))                                                                     \
  X(cuMemsetD32Async, memset_words, (DevicePointer, unsigned, size_t, Stream))                                                    \
  X(cuUserObjectCreate, user_object_create, (UserObject*, void*, HostFunction, unsigned, unsigned))                               \
  X(cuGraphRetainUserObject, graph_retain, (Graph, UserObject, unsigned, unsigned))

// Absent from older drivers; null there.
#define MC_DRIVER_OPTIONAL_FUNCTIONS(X)                                                                                           \
  X(cuOccupancyMaxActiveClusters, active_clusters, (int*, Function, const LaunchConfig*))                                         \
  X(cuStreamGetCaptureInfo_v3, capture_info_v3, (Stream, int*, uint64_t*, Graph*, const void**, const void**, size_t*))           \
  X(cuTensorMapEncodeTiled, encode_tiled,                                                                                         \
    (TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int))

struct Api {
#define MC_DECLARE(symbol, name, arguments) Result(*name) arguments = nullptr;
  MC_DRIVER_FUNCTIONS(MC_DECLARE)
  MC_DRIVER_OPTIONAL_FUNCTIONS(MC_DECLARE)
#undef MC_DECLARE
};

// Loads and initialises the driver at the first call; throws with the loader's own text where that fails.
const Api& api();

// Throws unless `result` is success: "<call> failed (<driver's text>): <what>".
void check(Result result, const char* call, const std::string& what = {});

// Calls that stream capture forbids (allocation, module loading) are allowed on this thread while one of these lives.
class RelaxedCapture {
 public:
  RelaxedCapture() { api().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { api().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureModeRelaxed;
};

// Makes `context` current for the lifetime of the object: a device guard that also serves threads without any context.
class ContextGuard {
 public:
  explicit ContextGuard(Context context) {
    Context current = nullptr;
    check(api().context_get(&current), "cuCtxGetCurrent");
    if (current == context) return;
    check(api().context_push(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~ContextGuard() {
    Context popped;
    if (pushed_) api().context_pop(&popped);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace marlin_cutlass::driver
