// The weight order of the collective family, where cutlass_library's emitted source looks for it.
//
// CUTLASS computes this layout in tools/util/include/cutlass/util/mixed_dtype_utils.hpp, a header for its examples that needs
// curand. For a 4-bit weight beside a 16-bit activation the result is one constant, which is all that is needed here.
#pragma once
#include "cute/layout.hpp"

namespace marlin_cutlass {

// 16 columns (first mode) x 16 deep of codes -> place among 256. A lane of wgmma's row operand owns columns r and r + 8, depths
// c, c + 1, c + 8, c + 9 (r = lane / 4, c = 2 (lane % 4)): its eight codes are one 32-bit word, even depths in the low half, so that
// one mask and one shift give two neighbours for a 16-bit pair. Trailing modes of size 1: as CUTLASS spells it.
using CollectiveWeightAtom =
    cute::Layout<cute::Shape<cute::Shape<cute::Shape<cute::_8, cute::_2>, cute::_1>, cute::Shape<cute::Shape<cute::_2, cute::_4, cute::_2>, cute::_1>>,
                 cute::Stride<cute::Stride<cute::Stride<cute::_32, cute::_1>, cute::_0>, cute::Stride<cute::Stride<cute::_4, cute::_8, cute::_2>, cute::_0>>>;

}  // namespace marlin_cutlass

namespace cutlass {

// The name that the emitted source calls; the arguments are always the same there.
template <class Element, class AtomShape, class ValueOrder> constexpr auto compute_memory_reordering_atom(AtomShape = {}, ValueOrder = {}) {
  static_assert(sizeof(Element) == 2 && cute::size(AtomShape{}) == 1, "the constant is for 16-bit activations and one atom");
  static_assert(cute::is_same_v<ValueOrder, cute::Layout<cute::Shape<cute::_2, cute::_4>, cute::Stride<cute::_4, cute::_1>>>,
                "the constant is for the value order 0 2 4 6 1 3 5 7");
  return marlin_cutlass::CollectiveWeightAtom{};
}

}  // namespace cutlass
