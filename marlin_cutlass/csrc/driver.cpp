#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>

#include "error.h"

namespace marlin_cutlass::driver {
namespace {

void* find(void* library, const char* path, const char* symbol, bool required) {
  void* address = dlsym(library, symbol);
  if (!address && required) failed(path, " has no ", symbol, ": the NVIDIA driver is older than CUDA 12");
  return address;
}

Api load() {
  // The variable lets tests record launches without a GPU.
  const char* name = std::getenv("MARLIN_CUTLASS_LIBCUDA");
  const char* path = name && *name ? name : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW);
  if (!library) failed("no NVIDIA driver: ", dlerror());
  Api api;
#define MC_FIND(symbol, name, arguments) api.name = reinterpret_cast<Result(*) arguments>(find(library, path, #symbol, true));
#define MC_TRY(symbol, name, arguments) api.name = reinterpret_cast<Result(*) arguments>(find(library, path, #symbol, false));
  MC_DRIVER_FUNCTIONS(MC_FIND)
  MC_DRIVER_OPTIONAL_FUNCTIONS(MC_TRY)
#undef MC_FIND
#undef MC_TRY
  const Result result = api.init(0);
  if (result != kSuccess) failed("cuInit failed with error ", result, ": no usable NVIDIA GPU");
  return api;
}

}  // namespace

const Api& api() {
  static const Api loaded = load();  // a failed load is tried again at the next call
  return loaded;
}

void check(Result result, const char* call, const std::string& what) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  api().error_string(result, &text);
  failed(call, " failed (error ", result, ", ", text ? text : "unknown", ")", what.empty() ? "" : ": ", what);
}

}  // namespace marlin_cutlass::driver
