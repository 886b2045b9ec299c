// w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1
// In cutlass_library's words: s4_f16_f32_256x16x256_1x1x1_5. Generated from templates/kernel.cu.jinja.
#include "marlin_cutlass/hopper_kernel.cuh"

#if defined(__CUDACC__)
namespace marlin_cutlass {

template <> struct Wgmma<marlin_cutlass::F16, 16> {
  MC_DEVICE static void multiply(float* d, const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
};

}  // namespace marlin_cutlass
#endif

namespace {

using Config = marlin_cutlass::HopperConfig<
    marlin_cutlass::F16,
    /*kGroupSize=*/128,
    /*kZeros=*/false,
    /*kMTile=*/16,
    /*kNSm=*/256,
    /*kKSm=*/256,
    /*kWarpsN=*/4,
    /*kWarpsK=*/1,
    /*kStages=*/5,
    marlin_cutlass::Decomposition::kStreamK,
    /*kSplit=*/1,
    /*kCtasPerSm=*/1,
    /*kMulticast=*/1>;

// The launcher takes these numbers from the manifest.
static_assert(Config::kThreads == 640, "threads: generator/variant.py and the kernel header disagree");
static_assert(Config::kSharedBytes == 211456, "shared bytes: generator/variant.py and the kernel header disagree");

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1(const __grid_constant__ marlin_cutlass::TensorMap map_a, const __grid_constant__ marlin_cutlass::GemmParams params) {
  marlin_cutlass::hopper_gemm<Config>(map_a, params);
}
