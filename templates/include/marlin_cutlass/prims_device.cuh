// Device side of the primitives: one short function per PTX instruction. Names and operand order follow the PTX ISA;
// prims_host.h implements the same list for the emulator, so kernels use nothing else.
//
// Neither cuda_fp16.h, cuda_bf16.h nor cuda.h: to read them would be a seventh of the time that a kernel takes to compile.
#pragma once
#include <cstdint>

#define MC_DEVICE __device__ __forceinline__

namespace marlin_cutlass {

using smem_addr_t = uint32_t;  // address inside the CTA's shared memory window

struct F16 {};
struct BF16 {};

struct alignas(8) U32x2 { uint32_t x, y; };
struct alignas(16) U32x4 { uint32_t x, y, z, w; };
struct alignas(8) F32x2 { float x, y; };
struct alignas(16) F32x4 { float x, y, z, w; };

// ---- threads ----------------------------------------------------------------------------------------------------
MC_DEVICE int thread_index() { return threadIdx.x; }
MC_DEVICE int block_index() { return blockIdx.x; }
MC_DEVICE int grid_size() { return gridDim.x; }
MC_DEVICE int lane_index() { return threadIdx.x & 31; }
// Same value in all lanes, and the compiler knows it.
MC_DEVICE int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0); }
MC_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }
// Hides from the compiler what it knows of x.
template <class T> MC_DEVICE void forget(T& x) { asm volatile("" : "+r"(x)); }
template <class T> MC_DEVICE void forget(T*& x) { asm volatile("" : "+l"(x)); }
template <> MC_DEVICE void forget(int64_t& x) { asm volatile("" : "+l"(x)); }
// a / b to some 2^-22, for |b| from 2^-126 to 2^126.
MC_DEVICE float approximate_quotient(float a, float b) { return __fdividef(a, b); }
// exp(x) to some 2 + |x| units in the last place; infinity beyond 88.7.
MC_DEVICE float approximate_exp(float x) { return __expf(x); }
MC_DEVICE void block_sync() { __syncthreads(); }
MC_DEVICE void warp_sync() { __syncwarp(); }
// Barrier `id` (1..15) among `threads` threads.
MC_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
MC_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
[[noreturn]] MC_DEVICE void trap() {
  asm volatile("trap;");
  __builtin_unreachable();
}

// ---- shared memory ----------------------------------------------------------------------------------------------
// Start of the dynamic shared memory, aligned to 1024 bytes.
MC_DEVICE smem_addr_t smem_base() {
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  return static_cast<smem_addr_t>(__cvta_generic_to_shared(dynamic_smem));
}
MC_DEVICE uint32_t ld_shared_u32(smem_addr_t addr) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr));
  return v;
}
MC_DEVICE U32x2 ld_shared_u32x2(smem_addr_t addr) {
  U32x2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr));
  return v;
}
MC_DEVICE U32x4 ld_shared_u32x4(smem_addr_t addr) {
  U32x4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}
MC_DEVICE F32x4 ld_shared_f32x4(smem_addr_t addr) {
  F32x4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr));
  return v;
}
MC_DEVICE F32x2 ld_shared_f32x2(smem_addr_t addr) {
  F32x2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(addr));
  return v;
}
MC_DEVICE void st_shared_f32(smem_addr_t addr, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory"); }
MC_DEVICE void st_shared_u32(smem_addr_t addr, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}
MC_DEVICE void st_shared_f32x4(smem_addr_t addr, F32x4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// ---- global memory ----------------------------------------------------------------------------------------------
MC_DEVICE float half_to_float(uint16_t x) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(x));
  return v;
}
MC_DEVICE float ld_global_f32(const float* p) { return __ldg(p); }
template <class E> MC_DEVICE float ld_global_element(const void* base, int64_t index);
template <> MC_DEVICE float ld_global_element<F16>(const void* base, int64_t index) {
  return half_to_float(__ldg(static_cast<const uint16_t*>(base) + index));
}
template <> MC_DEVICE float ld_global_element<BF16>(const void* base, int64_t index) {
  float v;  // the instructions of cuda_bf16.h: with a shift in their place an Ampere kernel of 128 rows spills
#if __CUDA_ARCH__ >= 900
  asm("cvt.f32.bf16 %0, %1;" : "=f"(v) : "h"(static_cast<const uint16_t*>(base)[index]));
#else
  asm("mov.b32 %0, {0, %1};" : "=f"(v) : "h"(static_cast<const uint16_t*>(base)[index]));
#endif
  return v;
}
// Two packed elements to 4 bytes / four to 8 bytes at an aligned address; one element (low half of v) at any element address.
MC_DEVICE void st_global_u32(void* p, uint32_t v) { *static_cast<uint32_t*>(p) = v; }
MC_DEVICE void st_global_u32x2(void* p, U32x2 v) { *static_cast<U32x2*>(p) = v; }
// By a predicate, not a branch: what it stores and where is computed ahead, for many stores at once.
MC_DEVICE void st_global_u32x2_if(bool condition, void* p, U32x2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(static_cast<int>(condition)), "l"(p),
               "r"(v.x), "r"(v.y) : "memory");
}
MC_DEVICE void st_global_u32_if(bool condition, void* p, uint32_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.b32 [%1], %2;\n}" ::"r"(static_cast<int>(condition)), "l"(p), "r"(v) : "memory");
}
MC_DEVICE void st_global_u16(void* p, uint32_t v) { *static_cast<uint16_t*>(p) = static_cast<uint16_t>(v); }
// Through L2 only: partial sums exchanged between CTAs.
MC_DEVICE F32x4 ld_global_cg_f32x4(const float* p) {
  const float4 v = __ldcg(reinterpret_cast<const float4*>(p));
  return {v.x, v.y, v.z, v.w};
}
MC_DEVICE void st_global_cg_f32x4(float* p, F32x4 v) {
  __stcg(reinterpret_cast<float4*>(p), make_float4(v.x, v.y, v.z, v.w));
}
MC_DEVICE uint32_t ld_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MC_DEVICE void st_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MC_DEVICE void st_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// *p += v, behind everything that this thread wrote or knows of.
MC_DEVICE void add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// *p += v; returns what was there. Orders what this thread wrote before and reads after.
MC_DEVICE uint32_t fetch_add_acq_rel(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// Spins until *p == value. Bounded: traps after about ten seconds, so that a lost flag is an error and not a hang. Under racecheck kernels
// take far longer.
#ifdef MC_RACECHECK
constexpr uint32_t kFlagTries = 1u << 31;
#else
constexpr uint32_t kFlagTries = 1u << 24;
#endif
MC_DEVICE void wait_flag(const uint32_t* p, uint32_t value) {
  for (uint32_t tries = 0; ld_acquire(p) != value; ++tries)
    if (tries > kFlagTries) trap();
}

// ---- cp.async (sm_80+) ------------------------------------------------------------------------------------------
// 16 bytes; only the first `bytes` (0 or 16) are read, the rest is zero.
MC_DEVICE void cp_async16_zfill(smem_addr_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// 16 bytes of weights: read once, so they leave L2 first. NOTE: the cache-hint form of cp.async raises 'illegal instruction' on
// sm_90 and sm_120 (field report: the original MARLIN kernel), hence the plain form there.
MC_DEVICE void cp_async16_stream(smem_addr_t dst, const void* src) {
#if __CUDA_ARCH__ < 900
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy;\n}" ::"r"(dst), "l"(src) : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
#endif
}
MC_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> MC_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// ---- warp matrix instructions -----------------------------------------------------------------------------------
MC_DEVICE void ldmatrix_x4(uint32_t (&r)[4], smem_addr_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
}
MC_DEVICE void ldmatrix_x2(uint32_t (&r)[2], smem_addr_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row));
}
// d[16 x 8] += a[16 x 16] * b[16 x 8], fp32 sums.
template <class E> MC_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> MC_DEVICE void mma_m16n8k16<F16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> MC_DEVICE void mma_m16n8k16<BF16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Transposes an 8 x 8 matrix of 16-bit elements held one row per 4 lanes.
MC_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// ---- packed 2 x 16-bit arithmetic, subnormals kept --------------------------------------------------------------
template <class E> MC_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <> MC_DEVICE uint32_t fma2<F16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
template <> MC_DEVICE uint32_t fma2<BF16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// a * b; bf16 through fma with -0 because mul.bf16x2 needs sm_90.
template <class E> MC_DEVICE uint32_t mul2(uint32_t a, uint32_t b);
template <> MC_DEVICE uint32_t mul2<F16>(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <> MC_DEVICE uint32_t mul2<BF16>(uint32_t a, uint32_t b) { return fma2<BF16>(a, b, 0x80008000u); }
// a - b; bf16 as b * -1 + a.
template <class E> MC_DEVICE uint32_t sub2(uint32_t a, uint32_t b);
template <> MC_DEVICE uint32_t sub2<F16>(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
template <> MC_DEVICE uint32_t sub2<BF16>(uint32_t a, uint32_t b) { return fma2<BF16>(b, 0xbf80bf80u, a); }
// Two fp32 to packed elements, first argument in the low half.
template <class E> MC_DEVICE uint32_t pack2(float low, float high);
template <> MC_DEVICE uint32_t pack2<F16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <> MC_DEVICE uint32_t pack2<BF16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// The low / high fp16 of x as fp32 (scales are stored as fp16 for both activation types).
MC_DEVICE float half_low_to_float(uint32_t x) { return half_to_float(static_cast<uint16_t>(x)); }
MC_DEVICE float half_high_to_float(uint32_t x) { return half_to_float(static_cast<uint16_t>(x >> 16)); }
MC_DEVICE float bfloat_low_to_float(uint32_t x) { return __uint_as_float(x << 16); }
MC_DEVICE float bfloat_high_to_float(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
// Two packed elements as fp32.
template <class E> MC_DEVICE F32x2 unpack2(uint32_t x);
template <> MC_DEVICE F32x2 unpack2<F16>(uint32_t x) { return {half_low_to_float(x), half_high_to_float(x)}; }
template <> MC_DEVICE F32x2 unpack2<BF16>(uint32_t x) { return {bfloat_low_to_float(x), bfloat_high_to_float(x)}; }
// The low / high half of x in both halves.
// By moves of halves, not PRMT: HFMA2 takes such an operand as it is (.H0_H0).
MC_DEVICE uint32_t broadcast_low(uint32_t x) {
  uint32_t v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(v) : "r"(x));
  return v;
}
MC_DEVICE uint32_t broadcast_high(uint32_t x) {
  uint32_t v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(v) : "r"(x));
  return v;
}
// (x & mask) | bits in one instruction: of two constants the compiler makes two.
MC_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(x), "r"(mask), "r"(bits));
  return v;
}
MC_DEVICE uint32_t rotate_right(uint32_t x, int bits) { return __funnelshift_r(x, x, bits); }

}  // namespace marlin_cutlass
