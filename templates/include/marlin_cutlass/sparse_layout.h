// The packed block of a 2:4-sparse weight, version 1: 64 columns x 128 deep like the dense one (docs/sparse.md). Plain C++.
#pragma once
#include "marlin_cutlass/params.h"

namespace marlin_cutlass {

constexpr int kSparseCodeBytes = 2048;  // INT4 codes of the kept half: [atom][lane][k32 step]
constexpr int kSparseMetaBytes = 1024;  // their places: [atom pair][lane][k32 step]

constexpr int sparse_block_bytes(int group_size) { return kSparseCodeBytes + kSparseMetaBytes + scale_bytes(group_size, false); }

// Group sizes that have a sparse layout.
constexpr bool is_sparse_group(int group_size) { return group_size == 64 || group_size == 128 || group_size == -1; }

}  // namespace marlin_cutlass
