// What a Hopper variant fixes at compile time, and where things lie in shared memory.
#pragma once
#include "marlin_cutlass/dequant.cuh"
#include "marlin_cutlass/params.h"
#include "marlin_cutlass/sparse_layout.h"
#include "marlin_cutlass/tile_order.cuh"

namespace marlin_cutlass {

// Lanes of a warp that report a stage as read, or its activations as summed. compute-sanitizer's racecheck follows an arrival only for the lane
// that makes it: kernels built with MC_RACECHECK have all of them arrive.
#ifdef MC_RACECHECK
constexpr int kReleaseLanes = 32;
#else
constexpr int kReleaseLanes = 1;
#endif

template <class Element_, int kGroupSize_, bool kZeros_, int kMTile_, int kNSm_, int kKSm_, int kWarpgroupsN_, int kWarpgroupsK_,
          int kStages_, Decomposition kDecomposition_, int kSplit_, int kCtasPerSm_, int kMulticast_, bool kSparse_ = false>
struct HopperConfig {
  using Element = Element_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kGroupSize = kGroupSize_, kMTile = kMTile_, kNSm = kNSm_, kKSm = kKSm_;
  static constexpr int kWarpgroupsN = kWarpgroupsN_, kWarpgroupsK = kWarpgroupsK_, kStages = kStages_;
  static constexpr Decomposition kDecomposition = kDecomposition_;
  static constexpr int kSplit = kSplit_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kMulticast = kMulticast_;  // CTAs of a cluster, side by side along N, that load each activation once
  static constexpr bool kCluster = kDecomposition == Decomposition::kSplitK;
  static constexpr bool kInCluster = kCluster || kMulticast > 1;
  static constexpr bool kSparse = kSparse_;  // 2:4-sparse weights: half of the codes, and their places

  static constexpr int kColumnBlocks = kNSm / kBlockColumns;             // packed blocks across the tile
  static constexpr int kDepthBlocks = kKSm / kBlockDepth;                // packed blocks down a stage
  static constexpr int kRowBlocks = kColumnBlocks / kWarpgroupsN;        // 64-column blocks of one warpgroup
  static constexpr int kChunks = kRowBlocks * kMTile / 8;                // m16n8 accumulators of one warp
  static constexpr int kConsumerWarpgroups = kWarpgroupsN * kWarpgroupsK;
  static constexpr int kConsumerThreads = 128 * kConsumerWarpgroups;

  // Two sets of accumulators alternate where scales act on the sums over a group: a stage must hold an even number of groups.
  static constexpr bool kEvenGroups = kGroupSize == 64 || (kGroupSize == 128 && kDepthBlocks * kRowBlocks % 2 == 0);
  // Few rows: two spare producer warps sum the activations of each group, and tensor cores multiply the codes as they lie. A group's accumulators
  // start at minus zero point (symmetric: 8) times the sum. That saves the one arithmetic instruction for each pair of weights. With 16 rows and
  // narrow tiles, or with 32 rows, the two warps do not keep up (docs/performance.md).
  static constexpr bool kActivationSums = (kMTile == 8 || (kMTile == 16 && kWarpgroupsN == 4)) && kEvenGroups && kKSm / kGroupSize % 2 == 0 &&
                                          !kSparse && kMulticast == 1 && kCtasPerSm == 1 && kConsumerWarpgroups == 4;
  // Zero points and few rows: scales act on the sums over a group. Per weight that saves one instruction of two, per group it costs one for each sum.
  // Where two CTAs of two k groups share an SM there are 96 registers a thread. Data-parallel ones, which keep their place among the tiles, would
  // take 99 for such sums (fp16); CTAs of a cluster, with one tile each, 85.
  static constexpr bool kNoRegistersForSums = kCtasPerSm == 2 && kWarpgroupsK == 2 && kDecomposition == Decomposition::kDataParallel;
  static constexpr bool kScaleSums = kActivationSums || (kZeros_ && kMTile <= 32 && kEvenGroups && !kNoRegistersForSums);
  // The tile of large products keeps its sums in units of the scale of the group at hand, so that tensor cores multiply small integers, with few
  // bits set, at less power. H200, 2026-11-30, M = 1024 and 2048: 1-2 % less time; with bf16, which has few bits as it is, 0.3-2 % more.
  static constexpr bool kRunningScale = kDecomposition == Decomposition::kDataParallel && kWarpgroupsK == 1 && kMTile == 256 && kGroupSize == 128 &&
                                        !kSparse && std::is_same<Element, F16>::value;
  static constexpr int kParts = kRunningScale ? 2 : 1;  // of a wgmma's rows: sums of one are multiplied while products of the other run
  using Dequant = Dequantizer<Element_, kGroupSize_, kZeros_,
                              kRunningScale     ? Scaling::kRunning
                              : kActivationSums ? Scaling::kCodeSums
                              : kScaleSums      ? Scaling::kGroupSums
                                                : Scaling::kWeights>;

  // Registers move from the producer to the consumers where a whole producer warpgroup pays for itself. Pools are per SM quarter:
  // launch registers x threads must cover the sum (2 consumer warpgroups: 168 x 384, 4: 96 x 640).
  static constexpr bool kMoveRegisters = kCtasPerSm == 1 && (kConsumerWarpgroups == 2 || kConsumerWarpgroups == 4);
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 2 ? 232 : 112;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 40 : 32;
  static constexpr int kThreads = kConsumerThreads + (kMoveRegisters ? 128 : 64);
  static constexpr int kRegisterCap = kMoveRegisters ? kConsumerRegisters : 65536 / (kCtasPerSm * kThreads) / 8 * 8;

  // Warps that stream weights, and as many that stream activations. Where a stage is one column block, 128 deep, one of each sets the pace: a second
  // copy in each stage, some 70 cycles, shows in full. H200, 4096 x 14336, M = 64 16.3 -> 15.5 us, M = 56 18.5 -> 15.3. Elsewhere two are 0.5-1 %
  // slower: requests get in each other's way. Warps that sum activations leave none for it.
  static constexpr int kProducers = kMoveRegisters && !kActivationSums && kColumnBlocks == 1 && kDepthBlocks == 1 &&
                                            (kDecomposition == Decomposition::kDataParallel || kDecomposition == Decomposition::kSplitK)
                                        ? 2
                                        : 1;

  // Instructions of one commit group: four, or two where registers are short. Fragments alternate between two sets, so that a stage must hold an
  // even number of groups.
  static constexpr bool kFewRegisters = kDecomposition == Decomposition::kHybrid || (kCluster && kWarpgroupsK > 1 && kWarpgroupsN > 1) ||
                                        (kDecomposition == Decomposition::kStreamK && kWarpgroupsK > 1 && kWarpgroupsN > 1 && kMTile > 16 && kDepthBlocks > 1) ||
                                        (kScaleSums && (kMTile > 16 || (kWarpgroupsK > 1 && kWarpgroupsN > 1))) ||
                                        kRowBlocks * kMTile / 2 + (kSparse ? 80 : 68) > kRegisterCap;
  static constexpr bool kOddQuads = kSparse && kDepthBlocks * kRowBlocks % 2 == 1;
  static constexpr int kBatch = kFewRegisters || kOddQuads ? 2 : 4;
  // Second argument of __launch_bounds__: setmaxnreg needs the 1. Otherwise none: with a minimum of blocks ptxas 13.0 serialises wgmma
  // (C7512) though the registers suffice; build.py checks afterwards that kCtasPerSm CTAs fit.
  static constexpr int kMinBlocks = kMoveRegisters ? 1 : 0;
  // Cycles that the weights' warp adds between the stages of the first filling (wait_for_stage says why). H200, 16 and 32 rows: 4 % less time in a
  // PDL chain, the same without PDL.
  static constexpr int kStartPause = kDecomposition == Decomposition::kDataParallel && kNSm == 256 && kMTile >= 16 && kMTile <= 32 && !kSparse ? 500 : 0;
  // A warpgroup holds the stage it reads and the one before; with fewer stages it must drain before it releases.
  static constexpr bool kLookahead = kStages >= 2 * kWarpgroupsK;

  // What comes first is asked for before the other barriers are made: the lane that streams weights makes those of the first stage of each k group
  // itself. Producer warps that share the groups ask for one stage each.
  static constexpr bool kAskEarly = kDecomposition != Decomposition::kHybrid;
  static constexpr int kEarlyStages = !kAskEarly ? 0 : kProducers > 1 ? 1 : kWarpgroupsK;  // of one warp
  // These come in two halves of their depth, with a barrier each: a group begins when half as many bytes are there. H200, 4096 x 4096, M = 16-48:
  // 2-4 % less time, 1024 to 5120 columns up to 6 %, large weights 0-1 %. Two warpgroups side by side take 0-2 % more, as they do with blocks cut
  // in halves (stages of one block), those that wait for sums of activations 5-10 %. With zero points and two batches a quad the branch between the
  // halves keeps ptxas from making fragments between products: one k group takes up to 1.4 % more, stream-K up to 11 %. Data-parallel kernels and
  // clusters with several k groups take 1-4 % less all the same, and 4096 x 4096, M = 24 and 32, 11-12 %: without the branch ptxas spills there.
  static constexpr bool kZeroBatches =
      kZeros_ && (kGroupSize == 64 || kGroupSize == 128) && kMTile <= 32 && (kMTile > 16 || (kWarpgroupsK > 1 && kWarpgroupsN > 1));
  static constexpr bool kWholeZeroBatches = kZeroBatches && (kWarpgroupsK == 1 || kDecomposition == Decomposition::kStreamK);
  static constexpr bool kFirstInHalves = kAskEarly && kDepthBlocks % 2 == 0 && !(kWarpgroupsN == 2 && kWarpgroupsK == 1) && !kActivationSums &&
                                         !kWholeZeroBatches && kLookahead;
  // Multicast: the first time a stage is free in every CTA once the cluster's barriers are there. Larger tiles still wait to be told so, which
  // paces their 16 KB and more a stage (H200: M = 40-72 1-4 % less time without the wait, M = 96-128 0-12 % more, M = 256 3 % more).
  static constexpr bool kFreeAtFirst = kMTile <= 72;

  static constexpr int kReleases = 4 * kReleaseLanes;  // arrivals of a warpgroup that has read a stage

  // Shared memory: activations (1024-byte aligned for the swizzle), weights, reduction buffers, barriers.
  static constexpr int kActivationBytes = kMTile * kKSm * 2;             // of one stage: [k_sm / 64][m_tile][128 bytes]
  static constexpr int kCodeBytes = kSparse ? kSparseCodeBytes : kBlockCodeBytes;                // of a block, in front
  static constexpr int kEntryOffset = kSparse ? kSparseCodeBytes + kSparseMetaBytes : kCodeBytes;  // scale entries of a block
  static constexpr int kBlockBytes = kSparse ? sparse_block_bytes(kGroupSize) : Dequant::kBlockBytes;
  static constexpr int kBlockRowBytes = kDepthBlocks * kBlockBytes;      // one block column of a stage, contiguous in memory
  static constexpr int kWeightBytes = (kColumnBlocks * kBlockRowBytes + 127) / 128 * 128;
  static constexpr int kWeightOffset = kStages * kActivationBytes;
  static constexpr int kReduceOffset = kWeightOffset + kStages * kWeightBytes;
  static constexpr int kGroupReduceBytes = (kWarpgroupsK - 1) * kNSm * kMTile * 4;
  static constexpr int kOwnedChunks = (kChunks + kSplit - 1) / kSplit;   // chunks that one CTA of a cluster finishes
  static constexpr int kReceiveBytes = kCluster ? (kSplit - 1) * kWarpgroupsN * kOwnedChunks * 2048 : 0;
  static constexpr int kReceiveOffset = kReduceOffset + kGroupReduceBytes;
  // Sums of activations: [stage][group][activation row], fp32. Of symmetric weights -offset x sum, once for each fragment row r and r + 8 (their
  // codes have different units): [stage][group][2][activation row]. With zero points the consumer multiplies, each column by its own.
  static constexpr int kStageGroups = kActivationSums ? kKSm / kGroupSize : 0;
  static constexpr int kGroupSumBytes = (kZeros_ ? 1 : 2) * kMTile * 4;
  static constexpr int kSumsOffset = kReceiveOffset + kReceiveBytes;
  static constexpr int kSumsBytes = (kStages * kStageGroups * kGroupSumBytes + 127) / 128 * 128;
  static constexpr int kBarrierOffset = kSumsOffset + kSumsBytes;
  // Stream-K: a partial sum comes back through the ring, in the larger part of one stage or more, the weights' or the activations'. In memory it
  // lies as [chunk][warpgroup along N][2048 bytes].
  static constexpr int kChunkRowBytes = kWarpgroupsN * 2048;
  static constexpr int kPartialBytes = kChunks * kChunkRowBytes;
  static constexpr bool kPartialInWeights = kWeightBytes > kActivationBytes;
  static constexpr int kRoomChunks = (kPartialInWeights ? kWeightBytes : kActivationBytes) / kChunkRowBytes;
  static constexpr int kStageChunks = kRoomChunks < kChunks ? kRoomChunks : kChunks;
  static constexpr int kPartialStages = kDecomposition == Decomposition::kStreamK ? (kChunks + kStageChunks - 1) / kStageChunks : 0;
  static constexpr int kStageBarriers = kMulticast > 1 || kActivationSums ? 3 : 2;
  static constexpr bool kReadyBarrier = kAskEarly && kMulticast == 1;
  static constexpr int kFirstHalves = kFirstInHalves ? kWarpgroupsK : 0, kFirstBarriers = kFirstHalves + (kReadyBarrier ? kProducers : 0);
  static constexpr int kBarrierBytes = (8 * (kStageBarriers * kStages + kWarpgroupsN + kFirstBarriers) + 127) / 128 * 128;
  static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes;

  static_assert(kColumnBlocks % kWarpgroupsN == 0, "a warpgroup takes whole 64-column blocks");
  static_assert(kKSm % kBlockDepth == 0, "a stage holds whole blocks");
  static_assert(kStages % kWarpgroupsK == 0, "every stage belongs to one k group of warpgroups");
  static_assert(kActivationBytes % 1024 == 0 && kMTile % 8 == 0 && kMTile <= 256, "m_tile must be a multiple of 8 up to 256");
  static_assert(kMulticast == 1 || (!kCluster && kKSm / 64 % kMulticast == 0), "multicast needs the cluster, and an equal part of a stage per CTA");
  static_assert(kCluster || kSplit == 1, "only split_k uses a cluster");
  static_assert(kDecomposition != Decomposition::kHybrid || (kRowBlocks == 1 && kWarpgroupsK == 1), "hybrid: one block a warpgroup");
  static_assert(!kSparse || (is_sparse_group(kGroupSize) && !kZeros_), "sparse: group_size 64, 128 or -1, symmetric");
  static_assert(kDecomposition != Decomposition::kStriped, "the Hopper family calls contiguous ranges stream_k");
  static_assert(kPartialStages == 0 || (kStageChunks > 0 && !kCluster), "a stage holds a chunk of every warpgroup");
  static_assert(!kFirstInHalves || kMulticast == 1 || kMulticast % 2 == 0, "what a CTA of a cluster loads lies in one half of the activations");
  static_assert(!kRunningScale || kRowBlocks == 1, "running scale: one unit for all sums of a warpgroup");

  using Work = WorkLoop<kDecomposition, kSplit, kMulticast>;
  using Hybrid = HybridSchedule<kColumnBlocks, kMulticast>;
  // First column block of this CTA in column tile `n` of its cluster.
  MC_DEVICE static int first_block(int n) { return (n * kMulticast + block_index() % kMulticast) * kColumnBlocks; }

  // Rows outside A would arrive as zeros, but more slowly than rows that exist (H200: up to a third of the time). So the last row tile reaches
  // back over rows of the one before, and a single tile loads only the rows there are; the rest of its shared memory is garbage that
  // stays in rows nobody stores. The host makes the box of a copy to match (encode in launch.cpp).
  MC_DEVICE static int rows_loaded(const GemmParams& p) { return p.m < kMTile ? p.m : kMTile; }
  MC_DEVICE static int first_row(const GemmParams& p, int m) {
    const int last = p.m - rows_loaded(p);
    return m * kMTile < last ? m * kMTile : last;
  }

  MC_DEVICE static smem_addr_t full(smem_addr_t base, int stage) { return base + kBarrierOffset + 8 * stage; }
  MC_DEVICE static smem_addr_t empty(smem_addr_t base, int stage) { return base + kBarrierOffset + 8 * (kStages + stage); }
  // Multicast: the stage is free in every CTA of the cluster.
  MC_DEVICE static smem_addr_t cluster_empty(smem_addr_t base, int stage) { return base + kBarrierOffset + 8 * (2 * kStages + kWarpgroupsN + stage); }
  // kFirstInHalves: the first half of stage `stage` has arrived, one of the first kWarpgroupsK.
  MC_DEVICE static smem_addr_t first_half(smem_addr_t base, int stage) {
    return base + kBarrierOffset + 8 * (kStageBarriers * kStages + kWarpgroupsN + stage);
  }
  // kReadyBarrier: all barriers have been made. For the warp that streams activations from stage `first` on.
  MC_DEVICE static smem_addr_t ready(smem_addr_t base, int first) { return first_half(base, kFirstHalves + first); }
  // kActivationSums: the activations of a stage have arrived; `full` follows once they are summed.
  MC_DEVICE static smem_addr_t activations(smem_addr_t base, int stage) { return cluster_empty(base, stage); }
  MC_DEVICE static smem_addr_t sums(smem_addr_t base, int stage) { return base + kSumsOffset + stage * (kStageGroups * kGroupSumBytes); }
  // Stream-K: the partial sum of this CTA has been stored. A barrier that only clusters which split k use otherwise.
  MC_DEVICE static smem_addr_t handed_over(smem_addr_t base) { return received(base, 0); }
  // Stream-K: where stage `stage` holds chunks of a partial sum.
  MC_DEVICE static smem_addr_t partial(smem_addr_t base, int stage) {
    return kPartialInWeights ? base + kWeightOffset + stage * kWeightBytes : base + stage * kActivationBytes;
  }
  MC_DEVICE static smem_addr_t received(smem_addr_t base, int warpgroup) { return base + kBarrierOffset + 8 * (2 * kStages + warpgroup); }
};

// Position in the ring of stages.
template <int kStages> struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  bool reused = false;  // the stage has been filled before
  MC_DEVICE void advance(int by = 1) {
    stage += by;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
      reused = true;
    }
  }
  MC_DEVICE void back(int by) {
    stage -= by;
    if (stage < 0) {
      stage += kStages;
      phase ^= 1;
    }
  }
};

}  // namespace marlin_cutlass
