// w4a16_hopper_bf16z_gcol_m16_n64k256_w1x4_p8_split2_c1
// In cutlass_library's words: u4_bf16_f32_64x16x256_2x1x1_8. Generated from templates/kernel.cu.jinja.
#include "marlin_cutlass/hopper_kernel.cuh"

#if defined(__CUDACC__)
namespace marlin_cutlass {

template <> struct Wgmma<marlin_cutlass::BF16, 16> {
  MC_DEVICE static void multiply(float* d, const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
};

}  // namespace marlin_cutlass
#endif

namespace {

using Config = marlin_cutlass::HopperConfig<
    marlin_cutlass::BF16,
    /*kGroupSize=*/-1,
    /*kZeros=*/true,
    /*kMTile=*/16,
    /*kNSm=*/64,
    /*kKSm=*/256,
    /*kWarpsN=*/1,
    /*kWarpsK=*/4,
    /*kStages=*/8,
    marlin_cutlass::Decomposition::kSplitK,
    /*kSplit=*/2,
    /*kCtasPerSm=*/1,
    /*kMulticast=*/1>;

// The launcher takes these numbers from the manifest.
static_assert(Config::kThreads == 640, "threads: generator/variant.py and the kernel header disagree");
static_assert(Config::kSharedBytes == 147712, "shared bytes: generator/variant.py and the kernel header disagree");

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
w4a16_hopper_bf16z_gcol_m16_n64k256_w1x4_p8_split2_c1(const __grid_constant__ marlin_cutlass::TensorMap map_a, const __grid_constant__ marlin_cutlass::GemmParams params) {
  marlin_cutlass::hopper_gemm<Config>(map_a, params);
}
