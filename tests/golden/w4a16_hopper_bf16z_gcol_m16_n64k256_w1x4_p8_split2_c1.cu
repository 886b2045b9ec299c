// w4a16_hopper_bf16z_gcol_m16_n64k256_w1x4_p8_split2_c1
// In cutlass_library's words: u4_bf16_f32_64x16x256_2x1x1_8. Generated from templates/kernel.cu.jinja.
#include "marlin_cutlass/hopper_kernel.cuh"

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
