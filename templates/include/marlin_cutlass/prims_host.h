// Host side of the primitives (see prims_device.cuh for the list and the meaning): the same kernels under a host compiler,
// executed by the emulator. docs/emulation.md says what is modelled.
#pragma once
#include <cmath>
#include <cstdint>

#include "marlin_cutlass/emu_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define MC_DEVICE inline __attribute__((always_inline))

namespace marlin_cutlass {

using smem_addr_t = uint32_t;  // address inside the CTA's shared memory window

struct F16 {};
struct BF16 {};
template <class E> struct IsBf16 { static constexpr bool value = false; };
template <> struct IsBf16<BF16> { static constexpr bool value = true; };

struct alignas(8) U32x2 { uint32_t x, y; };
struct alignas(16) U32x4 { uint32_t x, y, z, w; };
struct alignas(8) F32x2 { float x, y; };
struct alignas(16) F32x4 { float x, y, z, w; };

// ---- threads ----------------------------------------------------------------------------------------------------
MC_DEVICE int thread_index() { return emu_thread->thread; }
MC_DEVICE int block_index() { return emu_thread->block; }
MC_DEVICE int grid_size() { return emu_thread->grid; }
MC_DEVICE int lane_index() { return emu_thread->thread & 31; }
MC_DEVICE int warp_index() { return emu_thread->thread >> 5; }
MC_DEVICE uint32_t uniform(uint32_t x) { return emu_shuffle(x, 0); }
template <class T> MC_DEVICE void forget(T&) {}
MC_DEVICE float approximate_quotient(float a, float b) { return a / b; }
MC_DEVICE float approximate_exp(float x) { return std::exp(x); }
MC_DEVICE void block_sync() { emu_block_sync(); }
MC_DEVICE void warp_sync() { emu_warp_sync(); }
MC_DEVICE void named_barrier_sync(int id, int threads) { emu_named_barrier_sync(id, threads); }
MC_DEVICE float shuffle_xor(float x, int mask) {
  return __builtin_bit_cast(float, emu_shuffle_xor(__builtin_bit_cast(uint32_t, x), mask));
}
[[noreturn]] MC_DEVICE void trap() { emu_trap(); }

// ---- shared memory ----------------------------------------------------------------------------------------------
MC_DEVICE smem_addr_t smem_base() { return emu_shared_base(); }
MC_DEVICE uint32_t ld_shared_u32(smem_addr_t addr) {
  uint32_t v;
  emu_ld_shared(addr, 4, &v);
  return v;
}
MC_DEVICE U32x2 ld_shared_u32x2(smem_addr_t addr) {
  U32x2 v;
  emu_ld_shared(addr, 8, &v);
  return v;
}
MC_DEVICE U32x4 ld_shared_u32x4(smem_addr_t addr) {
  U32x4 v;
  emu_ld_shared(addr, 16, &v);
  return v;
}
MC_DEVICE F32x4 ld_shared_f32x4(smem_addr_t addr) {
  F32x4 v;
  emu_ld_shared(addr, 16, &v);
  return v;
}
MC_DEVICE F32x2 ld_shared_f32x2(smem_addr_t addr) {
  F32x2 v;
  emu_ld_shared(addr, 8, &v);
  return v;
}
MC_DEVICE void st_shared_f32(smem_addr_t addr, float v) { emu_st_shared(addr, 4, &v); }
MC_DEVICE void st_shared_u32(smem_addr_t addr, uint32_t v) { emu_st_shared(addr, 4, &v); }
MC_DEVICE void st_shared_f32x4(smem_addr_t addr, F32x4 v) { emu_st_shared(addr, 16, &v); }

// ---- global memory ----------------------------------------------------------------------------------------------
MC_DEVICE float ld_global_f32(const float* p) {
  float v;
  emu_ld_global(p, 4, &v);
  return v;
}
template <class E> MC_DEVICE float ld_global_element(const void* base, int64_t index) {
  uint16_t v;
  emu_ld_global(static_cast<const uint16_t*>(base) + index, 2, &v);
  return emu_to_float(IsBf16<E>::value, v);
}
MC_DEVICE void st_global_u32(void* p, uint32_t v) { emu_st_global(p, 4, &v); }
MC_DEVICE void st_global_u32x2(void* p, U32x2 v) { emu_st_global(p, 8, &v); }
MC_DEVICE void st_global_u32x2_if(bool condition, void* p, U32x2 v) {
  if (condition) st_global_u32x2(p, v);
}
MC_DEVICE void st_global_u32_if(bool condition, void* p, uint32_t v) {
  if (condition) emu_st_global(p, 4, &v);
}
MC_DEVICE void st_global_u16(void* p, uint32_t v) { emu_st_global(p, 2, &v); }
MC_DEVICE F32x4 ld_global_cg_f32x4(const float* p) {
  F32x4 v;
  emu_ld_global(p, 16, &v);
  return v;
}
MC_DEVICE void st_global_cg_f32x4(float* p, F32x4 v) { emu_st_global(p, 16, &v); }
MC_DEVICE uint32_t ld_acquire(const uint32_t* p) { return emu_ld_acquire(p); }
MC_DEVICE void st_relaxed(uint32_t* p, uint32_t v) { emu_st_relaxed(p, v); }
MC_DEVICE void st_release(uint32_t* p, uint32_t v) { emu_st_release(p, v); }
MC_DEVICE void add_release(uint32_t* p, uint32_t v) { emu_atomic_add_release(p, v); }
MC_DEVICE uint32_t fetch_add_acq_rel(uint32_t* p, uint32_t v) { return emu_atomic_add_release(p, v); }
MC_DEVICE void wait_flag(const uint32_t* p, uint32_t value) { emu_wait_flag(p, value); }

// ---- cp.async (sm_80+) ------------------------------------------------------------------------------------------
MC_DEVICE void cp_async16_zfill(smem_addr_t dst, const void* src, int bytes) { emu_cp_async16(dst, src, bytes); }
MC_DEVICE void cp_async16_stream(smem_addr_t dst, const void* src) { emu_cp_async16(dst, src, 16); }
MC_DEVICE void cp_async_commit() { emu_cp_async_commit(); }
template <int kPending> MC_DEVICE void cp_async_wait() { emu_cp_async_wait(kPending); }

// ---- warp matrix instructions -----------------------------------------------------------------------------------
MC_DEVICE void ldmatrix_x4(uint32_t (&r)[4], smem_addr_t row) { emu_ldmatrix(r, 4, row); }
MC_DEVICE void ldmatrix_x2(uint32_t (&r)[2], smem_addr_t row) { emu_ldmatrix(r, 2, row); }
template <class E> MC_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emu_mma_m16n8k16(IsBf16<E>::value, d, a, b);
}
MC_DEVICE uint32_t movmatrix_trans(uint32_t x) { return emu_movmatrix_trans(x); }

// ---- packed 2 x 16-bit arithmetic, subnormals kept --------------------------------------------------------------
template <class E> MC_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) { return emu_fma2(IsBf16<E>::value, a, b, c); }
template <class E> MC_DEVICE uint32_t mul2(uint32_t a, uint32_t b) { return emu_fma2(IsBf16<E>::value, a, b, 0x80008000u); }
template <class E> MC_DEVICE uint32_t sub2(uint32_t a, uint32_t b) {
  return IsBf16<E>::value ? emu_fma2(true, b, 0xbf80bf80u, a) : emu_sub2_f16(a, b);
}
template <class E> MC_DEVICE uint32_t pack2(float low, float high) { return emu_pack2(IsBf16<E>::value, low, high); }
MC_DEVICE float half_to_float(uint16_t x) { return emu_to_float(false, x); }
MC_DEVICE float half_low_to_float(uint32_t x) { return emu_to_float(false, static_cast<uint16_t>(x)); }
MC_DEVICE float half_high_to_float(uint32_t x) { return emu_to_float(false, static_cast<uint16_t>(x >> 16)); }
MC_DEVICE float bfloat_low_to_float(uint32_t x) { return emu_to_float(true, static_cast<uint16_t>(x)); }
MC_DEVICE float bfloat_high_to_float(uint32_t x) { return emu_to_float(true, static_cast<uint16_t>(x >> 16)); }
template <class E> MC_DEVICE F32x2 unpack2(uint32_t x) {
  return {emu_to_float(IsBf16<E>::value, static_cast<uint16_t>(x)), emu_to_float(IsBf16<E>::value, static_cast<uint16_t>(x >> 16))};
}
MC_DEVICE uint32_t broadcast_low(uint32_t x) { return (x & 0xffffu) | (x << 16); }
MC_DEVICE uint32_t broadcast_high(uint32_t x) { return (x >> 16) | (x & 0xffff0000u); }
MC_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
MC_DEVICE uint32_t rotate_right(uint32_t x, int bits) { return (x >> (bits & 31)) | (x << (-bits & 31)); }

}  // namespace marlin_cutlass
