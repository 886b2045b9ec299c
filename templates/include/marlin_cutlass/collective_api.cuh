// What a unit of the collective family exports: a C interface around CUTLASS's device adapter (marlin_cutlass/collective.py calls it).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "marlin_cutlass/collective_reorder.cuh"

namespace marlin_cutlass {

constexpr int kCollectiveAbi = 1;  // of CollectiveCall and of the functions below

// One multiply C[m, n] = alpha * A[m, k] W[k, n]; addresses on the device, 16-byte aligned; strides in elements, multiples of 8.
struct CollectiveCall {
  const void* weights;  // int4 in CollectiveWeightAtom order: [k / 16][ceil(n / 16)][256]
  const void* scales;   // [k / group_size][n], type of the activations
  const void* a;        // [m, k]
  void* c;              // [m, n]
  int64_t lda, ldc;
  int32_t m, n, k, group_size;
  int32_t device, sms;
  float alpha;
};

template <class Kernel> class CollectiveLauncher {
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Arguments = typename Gemm::Arguments;
  using Mainloop = typename Kernel::CollectiveMainloop;

 public:
  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;

  static int64_t workspace_bytes(const CollectiveCall& call) {
    return static_cast<int64_t>(Gemm::get_workspace_size(arguments(call)));
  }

  // 0, or a status with its reason in `error`.
  static int launch(const CollectiveCall& call, void* workspace, cudaStream_t stream, std::string& error) {
    if (const cudaError_t set = cudaSetDevice(call.device); set != cudaSuccess) return failed(static_cast<int>(set), cudaGetErrorString(set), error);
    const Arguments args = arguments(call);
    Gemm gemm;
    cutlass::Status status = Gemm::can_implement(args);
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, workspace, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    if (status == cutlass::Status::kSuccess) return 0;
    const cudaError_t cuda = cudaGetLastError();
    std::string text = cutlassGetStatusString(status);
    if (cuda != cudaSuccess) text += std::string(", ") + cudaGetErrorString(cuda);
    return failed(static_cast<int>(status), text, error);
  }

 private:
  static int failed(int status, const std::string& text, std::string& error) {
    error = text;
    return status;
  }

  // CUTLASS gets the transposed product: its M is our n, its N our m.
  static Arguments arguments(const CollectiveCall& call) {
    using Output = typename Kernel::ElementD;
    const int columns = cute::ceil_div(call.n, 16) * 16;  // of the padded weight
    typename Kernel::StrideD stride_c{};
    typename Mainloop::StrideB stride_a{};
    typename Mainloop::StrideScale stride_scale{};
    cute::get<1>(stride_c) = call.ldc;
    cute::get<0>(stride_a) = call.lda;
    cute::get<1>(stride_scale) = call.n;

    Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = cute::make_shape(call.n, call.m, call.k, 1);
    args.mainloop.ptr_A = static_cast<const typename Mainloop::ElementA*>(call.weights);
    args.mainloop.dA = cute::tile_to_shape(CollectiveWeightAtom{}, cute::make_shape(columns, call.k, 1));
    args.mainloop.ptr_B = static_cast<const typename Mainloop::ElementB*>(call.a);
    args.mainloop.dB = stride_a;
    args.mainloop.ptr_S = static_cast<const typename Mainloop::ElementScale*>(call.scales);
    args.mainloop.dS = stride_scale;
    args.mainloop.group_size = call.group_size;
    args.epilogue.thread.alpha = call.alpha;
    args.epilogue.thread.beta = 0.0f;
    args.epilogue.ptr_C = static_cast<const Output*>(call.c);  // never read, but its descriptor must be valid
    args.epilogue.dC = stride_c;
    args.epilogue.ptr_D = static_cast<Output*>(call.c);
    args.epilogue.dD = stride_c;
    args.hw_info.device_id = call.device;
    args.hw_info.sm_count = call.sms;
    return args;
  }
};

}  // namespace marlin_cutlass

#define MARLIN_CUTLASS_COLLECTIVE_EXPORT extern "C" __attribute__((visibility("default")))

// threads, shared bytes and pipeline stages go to `out`.
#define MARLIN_CUTLASS_COLLECTIVE_API(KERNEL)                                                                                                     \
  namespace {                                                                                                                                     \
  using Launcher = marlin_cutlass::CollectiveLauncher<KERNEL>;                                                                                    \
  thread_local std::string last_error;                                                                                                            \
  }                                                                                                                                               \
  MARLIN_CUTLASS_COLLECTIVE_EXPORT int mc_collective_abi() { return marlin_cutlass::kCollectiveAbi; }                                             \
  MARLIN_CUTLASS_COLLECTIVE_EXPORT const char* mc_collective_error() { return last_error.c_str(); }                                               \
  MARLIN_CUTLASS_COLLECTIVE_EXPORT void mc_collective_facts(int32_t* out) {                                                                       \
    out[0] = Launcher::kThreads, out[1] = Launcher::kSharedBytes, out[2] = Launcher::kStages;                                                     \
  }                                                                                                                                               \
  MARLIN_CUTLASS_COLLECTIVE_EXPORT int64_t mc_collective_workspace(const marlin_cutlass::CollectiveCall* call) {                                  \
    return Launcher::workspace_bytes(*call);                                                                                                      \
  }                                                                                                                                               \
  MARLIN_CUTLASS_COLLECTIVE_EXPORT int mc_collective_launch(const marlin_cutlass::CollectiveCall* call, void* workspace, void* stream) {          \
    return Launcher::launch(*call, workspace, static_cast<cudaStream_t>(stream), last_error);                                                     \
  }
