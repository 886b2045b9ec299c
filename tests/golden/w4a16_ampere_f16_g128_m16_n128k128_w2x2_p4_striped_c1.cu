// w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1
// In cutlass_library's words: s4_f16_f32_128x16_128x4. Generated from templates/kernel.cu.jinja.
#include "marlin_cutlass/ampere_kernel.cuh"

namespace {

using Config = marlin_cutlass::AmpereConfig<
    marlin_cutlass::F16,
    /*kGroupSize=*/128,
    /*kZeros=*/false,
    /*kMTile=*/16,
    /*kNSm=*/128,
    /*kKSm=*/128,
    /*kWarpsN=*/2,
    /*kWarpsK=*/2,
    /*kStages=*/4,
    marlin_cutlass::Decomposition::kStriped,
    /*kSplit=*/1,
    /*kCtasPerSm=*/1>;

// The launcher takes these numbers from the manifest.
static_assert(Config::kThreads == 128, "threads: generator/variant.py and the kernel header disagree");
static_assert(Config::kSharedBytes == 50176, "shared bytes: generator/variant.py and the kernel header disagree");

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1(const __grid_constant__ marlin_cutlass::GemmParams params) {
  marlin_cutlass::ampere_gemm<Config>(params);
}
