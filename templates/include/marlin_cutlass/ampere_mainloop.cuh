// Ampere family, shared memory to sums: fragments of a warp and their products.
#pragma once
#include "marlin_cutlass/ampere_config.cuh"

namespace marlin_cutlass {

// Where one lane finds its data inside a slot. Everything that depends on the k16 step is a constant added to, or (the swizzle) a constant
// XORed into these.
template <class C> class AmpereReader {
 public:
  using Dequant = typename C::Dequant;

  MC_DEVICE AmpereReader(int warp_n, int warp_k, int lane) {
    // First k64 unit of this warp: whole blocks where it takes several, half a block otherwise.
    const int unit = warp_k * C::kUnits, column = warp_n * C::kWarpColumns;
    const int block = column / kBlockColumns * C::kRunBytes + unit / 2 * C::kBlockBytes, atom = column % kBlockColumns / 16;
    words_ = block + unit % 2 * (kBlockCodeBytes / 2) + atom * 512 + lane * 16;
    entries_ = block + kBlockCodeBytes + group_of(unit % 2 * 64) * Dequant::kGroupBytes + atom * Dequant::kAtomBytes +
               lane / 4 * Dequant::kEntryBytes;
    // Lanes 8i .. 8i+7 give the rows of matrix i. m_tile 8: matrices are 4 chunks of k; else 2 chunks x 2 row groups.
    const int row = C::kMTile == 8 ? lane % 8 : lane / 16 * 8 + lane % 8, chunk = C::kMTile == 8 ? lane / 8 : lane / 8 % 2;
    activations_ = C::kWeightBytes + row * C::kRowBytes + unit * 128 + (chunk ^ (row & 7)) * 16;
  }

  // Codes of k64 unit `unit` of this warp: word s of an atom is k16 step s.
  MC_DEVICE void load_words(U32x4 (&words)[C::kAtoms], smem_addr_t slot, int unit) const {
    const smem_addr_t base = slot + words_;
    const int offset = unit / 2 * C::kBlockBytes + unit % 2 * (kBlockCodeBytes / 2);
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) words[a] = ld_shared_u32x4(base + offset + a * 512);
  }

  // Whether k16 step `step` of this warp has other scales than the step before it.
  static constexpr bool begins_group(int step) {
    return Dequant::kHasEntries && (step % 8 == 0 || group_of(step % 8 * 16) != group_of((step - 1) % 8 * 16));
  }
  MC_DEVICE void load_entries(typename Dequant::Entry (&entries)[C::kAtoms], smem_addr_t slot, int step) const {
    const smem_addr_t base = slot + entries_;
    const int offset = step / 8 * C::kBlockBytes + group_of(step % 8 * 16) * Dequant::kGroupBytes;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) entries[a] = Dequant::load(base + offset + a * Dequant::kAtomBytes);
  }

  // Column operands of batch `batch`: [k16 step][row group][2].
  MC_DEVICE void load_activations(uint32_t (&b)[C::kBatchSteps][C::kRowGroups][2], smem_addr_t slot, int batch) const {
    constexpr int kBatchChunks = 2 * C::kBatchSteps;
    const int chunk = batch * kBatchChunks;
    const smem_addr_t base = ((slot + activations_) ^ (chunk % 8 * 16)) + chunk / 8 * 128;
    uint32_t r[4];
    if constexpr (C::kMTile == 8) {
      ldmatrix_x4(r, base);
      b[0][0][0] = r[0];
      b[0][0][1] = r[1];
      b[1][0][0] = r[2];
      b[1][0][1] = r[3];
    } else {
#pragma unroll
      for (int i = 0; i < C::kRowGroups; i += 2) {
        ldmatrix_x4(r, base + i * 8 * C::kRowBytes);
        b[0][i][0] = r[0];
        b[0][i][1] = r[1];
        b[0][i + 1][0] = r[2];
        b[0][i + 1][1] = r[3];
      }
    }
  }

 private:
  // Scale group at depth `depth` of a block.
  MC_DEVICE static constexpr int group_of(int depth) { return Dequant::kGrouped ? depth / C::kGroupSize : 0; }

  int words_, entries_, activations_;
};

// What the main loops of a warp over dense and over 2:4-sparse weights share: the sums, [atom][row group][4], and the registers that feed them.
template <class C, class Reader> class WarpMainloop {
 public:
  using Dequant = typename C::Dequant;

  MC_DEVICE WarpMainloop(int warp_n, int warp_k, int lane) : reader_(warp_n, warp_k, lane) {
    if constexpr (!Dequant::kHasEntries) {
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) scales_[a] = Dequant::prepare({0u, 0u});
    }
  }

  MC_DEVICE void clear() {
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[f][i] = 0.f;
  }

  float acc[C::kFragments][4];

 protected:
  // The scales of k16 step `step` where it begins a group.
  MC_DEVICE void prepare_scales(int step) {
    if (!Reader::begins_group(step)) return;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) scales_[a] = Dequant::prepare(entries_[a]);
  }
  MC_DEVICE static uint32_t word(const U32x4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

  Reader reader_;
  U32x4 words_[C::kAtoms];
  typename Dequant::Entry entries_[C::kAtoms];
  RowScales scales_[C::kAtoms];
};

// Loads run one batch ahead of the products.
template <class C> class AmpereMainloop : public WarpMainloop<C, AmpereReader<C>> {
 public:
  using Reader = AmpereReader<C>;
  using Base = WarpMainloop<C, Reader>;
  using typename Base::Dequant;
  using Base::acc;
  using Base::Base;

  // Loads what batch `batch` of the stage in `slot` needs and the batch before it did not have. Codes and activations of the batch in use stay.
  MC_DEVICE void load(smem_addr_t slot, int batch) {
    const int step = batch * C::kBatchSteps;
    reader_.load_activations(activations_[batch % 2], slot, batch);
    if (step % 4 == 0) reader_.load_words(words_, slot, step / 4);
    if (Reader::begins_group(step)) reader_.load_entries(entries_, slot, step);
  }

  // The codes of batch `batch`, out of the way of the next load.
  struct Codes { uint32_t word[C::kBatchSteps][C::kAtoms]; };
  MC_DEVICE Codes take(int batch) {
    const int step = batch * C::kBatchSteps;
    Codes codes;
#pragma unroll
    for (int s = 0; s < C::kBatchSteps; ++s)
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) codes.word[s][a] = word(words_[a], (step + s) % 4);
    Base::prepare_scales(step);
    return codes;
  }

  MC_DEVICE void multiply(const Codes& codes, int batch) {
#pragma unroll
    for (int s = 0; s < C::kBatchSteps; ++s)
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) {
        uint32_t weight[4];
        Dequant::fragment(codes.word[s][a], scales_[a], weight);
#pragma unroll
        for (int r = 0; r < C::kRowGroups; ++r)
          mma_m16n8k16<typename C::Element>(acc[a * C::kRowGroups + r], weight, activations_[batch % 2][s][r]);
      }
  }

 private:
  using Base::entries_;
  using Base::reader_;
  using Base::scales_;
  using Base::word;
  using Base::words_;

  uint32_t activations_[2][C::kBatchSteps][C::kRowGroups][2];
};

}  // namespace marlin_cutlass
