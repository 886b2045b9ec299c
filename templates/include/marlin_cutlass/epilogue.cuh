// From fp32 sums of one 16-column atom to C: scale, bias, one rounding, full-sector stores.
#pragma once
#include "marlin_cutlass/params.h"
#include "marlin_cutlass/prims.cuh"

namespace marlin_cutlass {

// What a lane needs to finish its two fragment rows of one atom.
struct ColumnFactors { float scale[2], bias[2]; };

// Fragment rows lane/4 and lane/4 + 8 of an atom are its columns `first` and `first + 2` (row permutation of layout version 1).
MC_DEVICE int first_column(int lane) {
  const int row = lane >> 2;
  return 2 * row - (row & 1);
}

// The scales, early: their latency hides behind the main loop.
MC_DEVICE ColumnFactors load_column_scales(const GemmParams& p, int atom_column, int lane) {
  ColumnFactors f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = atom_column + first_column(lane) + 2 * i;
    f.scale[i] = column < p.n ? ld_global_f32(p.col_scale + column) : 0.f;
    f.bias[i] = 0.f;
  }
  return f;
}
template <class E> MC_DEVICE void load_column_bias(const GemmParams& p, int atom_column, int lane, ColumnFactors& f) {
  if (p.bias == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = atom_column + first_column(lane) + 2 * i;
    if (column < p.n) f.bias[i] = ld_global_element<E>(p.bias, column);
  }
}

// How a lane stores its four neighbouring columns (GemmParams::vector_store and swiglu).
enum class Store { kVectors, kElements, kSwiglu };

// Sums d of 16 columns x 8 activation rows (an m16n8 accumulator) as C takes them. A transpose gives each lane one row and four neighbouring
// columns: 8 bytes, four lanes a 32-byte sector.
template <class E> MC_DEVICE U32x2 finish_atom(const float* d, const ColumnFactors& f) {
  U32x2 v;
  v.x = movmatrix_trans(pack2<E>(d[0] * f.scale[0] + f.bias[0], d[1] * f.scale[0] + f.bias[0]));
  v.y = movmatrix_trans(pack2<E>(d[2] * f.scale[1] + f.bias[1], d[3] * f.scale[1] + f.bias[1]));
  return v;
}

MC_DEVICE void store_elements(const GemmParams& p, uint16_t* out, int column, U32x2 v) {
  const uint32_t e[4] = {v.x, v.x >> 16, v.y, v.y >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < p.n) st_global_u16(out + i, e[i]);
}

// Below -87 it is zero: the quotient's divisor exceeds 2^126 there.
MC_DEVICE float silu(float x) { return approximate_quotient(x, 1.f + approximate_exp(-x)); }
// silu(gate) * up of two columns, each step rounded as where a kernel of its own reads C.
template <class E> MC_DEVICE uint32_t swiglu2(U32x2 gate_up) {
  const F32x2 gate = unpack2<E>(gate_up.x);
  return mul2<E>(pack2<E>(silu(gate.x), silu(gate.y)), gate_up.y);
}

// Atoms of consecutive groups of 8 rows, from row0 on; rows before `first` are not stored. What the atoms share is computed once.
template <class E, Store kStore> struct AtomStores {
  const GemmParams& p;
  int column;
  uint32_t row, rows;  // of this lane, and how many there are: both from `first` on
  uint16_t* out;
  int64_t stride;  // of an atom

  MC_DEVICE AtomStores(const GemmParams& params, int row0, int first, int atom_column, int lane) : p(params) {
    column = atom_column + (lane & 3) * 4;
    row = static_cast<uint32_t>(row0 + (lane >> 2) - first);
    rows = column < p.n ? static_cast<uint32_t>(p.m - first) : 0u;
    out = static_cast<uint16_t*>(p.c) + (row0 + (lane >> 2)) * p.ldc + (kStore == Store::kSwiglu ? column / 2 : column);
    stride = 8 * p.ldc;
    forget(out);  // or the compiler multiplies by ldc again for each atom
    forget(stride);
  }
  MC_DEVICE void skip() {
    row += 8;
    out += stride;
  }
  MC_DEVICE void store(U32x2 v) {
    if constexpr (kStore == Store::kVectors) st_global_u32x2_if(row < rows, out, v);
    else if constexpr (kStore == Store::kSwiglu) st_global_u32_if(row < rows, out, swiglu2<E>(v));
    else if (row < rows) store_elements(p, out, column, v);
    skip();
  }
};

// Sums d of an atom to C rows row0 .. row0 + 7.
template <class E> MC_DEVICE void store_atom(const GemmParams& p, const float* d, const ColumnFactors& f, int row0, int atom_column, int lane) {
  const U32x2 v = finish_atom<E>(d, f);
  const int row = row0 + (lane >> 2), column = atom_column + (lane & 3) * 4;
  if (row >= p.m || column >= p.n) return;
  uint16_t* out = static_cast<uint16_t*>(p.c) + row * p.ldc;
  if (p.vector_store) st_global_u32x2(out + column, v);
  else if (p.swiglu) st_global_u32_if(true, out + column / 2, swiglu2<E>(v));
  else store_elements(p, out + column, column, v);
}

}  // namespace marlin_cutlass
