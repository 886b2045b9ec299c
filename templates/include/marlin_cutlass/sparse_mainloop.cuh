// Sparse family, shared memory to sums: fragments of a warp and their products. 2:4-sparse weights are the row operand of mma.sp.m16n8k32; all
// else is the Ampere family's.
#pragma once
#include "marlin_cutlass/ampere_mainloop.cuh"
#include "marlin_cutlass/prims_sparse.cuh"

namespace marlin_cutlass {

// Where one lane finds its data inside a slot (AmpereReader for sparse blocks): a k step is 32 deep, a unit a whole block.
template <class C> class SparseReader {
 public:
  using Dequant = typename C::Dequant;

  MC_DEVICE SparseReader(int warp_n, int warp_k, int lane) {
    const int unit = warp_k * C::kUnits, column = warp_n * C::kWarpColumns;
    const int block = column / kBlockColumns * C::kRunBytes + unit * C::kBlockBytes, atom = column % kBlockColumns / 16;
    words_ = block + atom * 512 + lane * 16;
    metadata_ = block + kSparseCodeBytes + atom / 2 * 512 + lane * 16;
    entries_ = block + kSparseCodeBytes + kSparseMetaBytes + atom * Dequant::kAtomBytes + lane / 4 * Dequant::kEntryBytes;
    // Lanes 8i .. 8i+7 give the rows of matrix i: 8 rows x chunk i of the step's four.
    const int row = lane % 8, chunk = lane / 8;
    activations_ = C::kWeightBytes + row * C::kRowBytes + unit * (2 * kBlockDepth) + (chunk ^ row) * 16;
  }

  // Codes and metadata of unit `unit` of this warp: word s is k32 step s.
  MC_DEVICE void load_words(U32x4 (&words)[C::kAtoms], U32x4 (&metadata)[C::kAtoms / 2], smem_addr_t slot, int unit) const {
    const int offset = unit * C::kBlockBytes;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) words[a] = ld_shared_u32x4(slot + words_ + offset + a * 512);
#pragma unroll
    for (int i = 0; i < C::kAtoms / 2; ++i) metadata[i] = ld_shared_u32x4(slot + metadata_ + offset + i * 512);
  }

  // Whether k32 step `step` of this warp has other scales than the step before it.
  static constexpr bool begins_group(int step) {
    return Dequant::kHasEntries && (step % 4 == 0 || group_of(step % 4 * 32) != group_of((step - 1) % 4 * 32));
  }
  MC_DEVICE void load_entries(typename Dequant::Entry (&entries)[C::kAtoms], smem_addr_t slot, int step) const {
    const int offset = step / 4 * C::kBlockBytes + group_of(step % 4 * 32) * Dequant::kGroupBytes;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) entries[a] = Dequant::load(slot + entries_ + offset + a * Dequant::kAtomBytes);
  }

  // Column operands of part `part` of the rows in step `step`: [row group][4].
  MC_DEVICE void load_activations(uint32_t (&b)[C::kPartRowGroups][4], smem_addr_t slot, int step, int part) const {
    const smem_addr_t base = ((slot + activations_) ^ (step % 2 * 64)) + step / 2 * 128;
#pragma unroll
    for (int i = 0; i < C::kPartRowGroups; ++i) ldmatrix_x4(b[i], base + (part * C::kPartRowGroups + i) * 8 * C::kRowBytes);
  }

 private:
  // Scale group at depth `depth` of a block.
  MC_DEVICE static constexpr int group_of(int depth) { return Dequant::kGrouped ? depth / C::kGroupSize : 0; }

  int words_, metadata_, entries_, activations_;
};

// A batch is a part of the rows in one k step; its loads run one batch ahead of the products.
template <class C> class SparseMainloop : public WarpMainloop<C, SparseReader<C>> {
 public:
  using Reader = SparseReader<C>;
  using Base = WarpMainloop<C, Reader>;
  using typename Base::Dequant;
  using Base::acc;
  using Base::Base;

  MC_DEVICE void load(smem_addr_t slot, int batch) {
    const int step = batch / C::kRowParts;
    reader_.load_activations(activations_[batch % 2], slot, step, batch % C::kRowParts);
    if (batch % C::kRowParts != 0) return;
    if (step % 4 == 0) reader_.load_words(words_, metadata_, slot, step / 4);
    if (Reader::begins_group(step)) reader_.load_entries(entries_, slot, step);
  }

  // The codes of batch `batch`, out of the way of the next load. The first part of a step takes them for all parts.
  struct Codes { uint32_t word[C::kAtoms], metadata[C::kAtoms / 2]; };
  MC_DEVICE Codes take(int batch) {
    Codes codes{};
    if (batch % C::kRowParts != 0) return codes;
    const int step = batch / C::kRowParts;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) codes.word[a] = word(words_[a], step % 4);
#pragma unroll
    for (int i = 0; i < C::kAtoms / 2; ++i) codes.metadata[i] = word(metadata_[i], step % 4);
    Base::prepare_scales(step);
    return codes;
  }

  MC_DEVICE void multiply(const Codes& codes, int batch) {
    const int part = batch % C::kRowParts;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) {
      if (part == 0) {
        Dequant::fragment(codes.word[a], scales_[a], weight_[a]);
        if (a % 2 == 0) places_[a / 2] = codes.metadata[a / 2];
      }
#pragma unroll
      for (int r = 0; r < C::kPartRowGroups; ++r) {
        float(&sums)[4] = acc[a * C::kRowGroups + part * C::kPartRowGroups + r];
        // Two atoms share their words of metadata: lanes 0 and 1 of four hold those of the first, 2 and 3 of the second.
        if (a % 2 == 0) mma_sparse_m16n8k32<typename C::Element, 0>(sums, weight_[a], activations_[batch % 2][r], places_[a / 2]);
        else mma_sparse_m16n8k32<typename C::Element, 1>(sums, weight_[a], activations_[batch % 2][r], places_[a / 2]);
      }
    }
  }

 private:
  using Base::entries_;
  using Base::reader_;
  using Base::scales_;
  using Base::word;
  using Base::words_;

  U32x4 metadata_[C::kAtoms / 2];
  uint32_t weight_[C::kAtoms][4], places_[C::kAtoms / 2];  // of the step in use
  uint32_t activations_[2][C::kPartRowGroups][4];
};

}  // namespace marlin_cutlass
