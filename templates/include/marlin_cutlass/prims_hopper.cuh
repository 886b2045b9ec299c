// Hopper primitives (sm_90a): mbarrier, bulk and tensor copies, wgmma, clusters, programmatic dependent launch.
#pragma once
#include "marlin_cutlass/prims.cuh"
#if defined(__CUDACC__)

namespace marlin_cutlass {

struct alignas(128) TensorMap { uint64_t opaque[16]; };  // CUtensorMap of cuda.h, from CUDA 13 on; before, it was aligned to 64 bytes
static_assert(sizeof(TensorMap) == 128, "what the driver encodes");

// ---- mbarrier ---------------------------------------------------------------------------------------------------
MC_DEVICE void mbarrier_init(smem_addr_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster.
MC_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MC_DEVICE void mbarrier_arrive(smem_addr_t bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
MC_DEVICE void mbarrier_arrive_many(smem_addr_t bar, int arrivals) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
MC_DEVICE void mbarrier_arrive_expect(smem_addr_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrives on the barrier at the same address in CTA `rank` of the cluster. NOTE: .release.cluster would put a GPU-wide fence before each
// arrival (0.6 us a stage); permission to overwrite needs none.
MC_DEVICE void mbarrier_arrive_remote(smem_addr_t bar, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(rank) : "memory");
}
MC_DEVICE bool mbarrier_try_wait(smem_addr_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// A try lasts up to some microseconds. Under racecheck a kernel takes a thousand times as long.
#ifdef MC_RACECHECK
constexpr int kWaitTries = 2000000000;
#else
constexpr int kWaitTries = 8000000;
#endif
// Waits for the phase of the given parity. Mostly it is over: the first try stands apart, so that nothing is counted. The bounded counter with its trap is more than a watchdog: without it ptxas serialises the
// wgmma around the wait (warning C7512).
MC_DEVICE void mbarrier_wait(smem_addr_t bar, uint32_t parity) {
  if (mbarrier_try_wait(bar, parity)) return;
  int tries = 0;
  bool done;
  do {
    done = mbarrier_try_wait(bar, parity);
    if (!done && ++tries > kWaitTries) trap();
  } while (!done);
}
MC_DEVICE bool mbarrier_try_wait_cluster(smem_addr_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// As mbarrier_wait, acquiring what other CTAs of the cluster wrote.
MC_DEVICE void mbarrier_wait_cluster(smem_addr_t bar, uint32_t parity) {
  int tries = 0;
  bool done;
  do {
    done = mbarrier_try_wait_cluster(bar, parity);
    if (!done && ++tries > kWaitTries) trap();
  } while (!done);
}

// Does nothing for so many cycles.
MC_DEVICE void spin(uint32_t cycles) {
  uint32_t start, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
  do {
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  } while (now - start < cycles);
}

// Orders ordinary stores to global memory, of this thread and those that it knows of, before its bulk copies from there.
MC_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- copies that complete on an mbarrier ------------------------------------------------------------------------
MC_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MC_DEVICE void bulk_load(smem_addr_t dst, const void* src, uint32_t bytes, smem_addr_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
MC_DEVICE void tensor_map_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
MC_DEVICE void tensor_load_3d(smem_addr_t dst, const TensorMap* map, int x, int y, int z, smem_addr_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar) : "memory");
}
// The same box into every CTA of the cluster named in `cta_mask`, completing on the barrier at the same offset in each.
MC_DEVICE void tensor_load_3d_multicast(smem_addr_t dst, const TensorMap* map, int x, int y, int z, smem_addr_t bar, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(cta_mask) : "memory");
}

// ---- wgmma ------------------------------------------------------------------------------------------------------
MC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> MC_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }
// Tells the compiler that an asynchronous wgmma may still write x.
MC_DEVICE void wgmma_pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// Descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, 8-row groups 1024 bytes apart (PTX ISA, matrix descriptor).
// `low` is the address in 16-byte units; a k16 step adds 2.
constexpr uint32_t kDescriptorHigh = 0x40000040u;  // stride offset 64 (x16 bytes), swizzle mode 1 = 128 bytes
MC_DEVICE uint32_t descriptor_low(smem_addr_t addr) { return (1u << 16) | ((addr & 0x3ffffu) >> 4); }
MC_DEVICE uint64_t make_descriptor(uint32_t low) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(kDescriptorHigh));
  return d;
}

// The instruction itself, generated with each kernel for its shape (templates/wgmma.jinja).
template <class E, int kN> struct Wgmma;

// d[64 x kN] += a[64 x 16] (registers, one row fragment per warp) * b[16 x kN] (shared memory). With accumulate = 0 the product replaces d.
// The sums are d[kFirst] and the kN / 2 - 1 behind it.
template <class E, int kN, int kFirst = 0, int kCount> MC_DEVICE void wgmma_m64k16(float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate = 1) {
  Wgmma<E, kN>::multiply(d + kFirst, a, b, accumulate);
}
// As wgmma_m64k16 for a 64 x 32 operand of which two of each four are kept: those as a 64 x 16 matrix in `a`; b[32 x kN], for which a step adds 4
// to the descriptor. places: each warp's, as mma_sparse_m16n8k32 takes them with selector 0; their register must not change
// before the wgmma has finished.
template <class E, int kN>
MC_DEVICE void wgmma_sparse_m64k32(float (&d)[kN / 2], const uint32_t* a, const uint32_t& places, uint64_t b, int accumulate) {
  Wgmma<E, kN>::multiply(d, a, b, places, accumulate);
}

// A zero that no compiler can see: grids are one-dimensional.
MC_DEVICE uint32_t opaque_zero() { return blockIdx.z; }
// x in another register, which stays x's copy: `zero` is opaque_zero().
MC_DEVICE uint32_t copy_of(uint32_t x, uint32_t zero) {
  uint32_t copy;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(copy) : "r"(x), "r"(zero));
  return copy;
}

// named_barrier_sync for warps that take part at different places of the program, which .aligned (bar.sync) rules out.
MC_DEVICE void named_barrier_sync_unaligned(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- roles and clusters -----------------------------------------------------------------------------------------
MC_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}
template <int kRegisters> MC_DEVICE void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters> MC_DEVICE void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
MC_DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Relaxed: what must be visible behind it, initialised barriers, has mbarrier_init_fence. The releasing form costs a GPU-wide fence.
MC_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
MC_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
MC_DEVICE void cluster_wait_unaligned() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The address of `addr` in CTA `rank` of the cluster.
MC_DEVICE uint32_t map_to_rank(smem_addr_t addr, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
// 16 bytes to another CTA's shared memory; counts on that CTA's barrier.
MC_DEVICE void st_async_f32x4(uint32_t remote_dst, F32x4 v, uint32_t remote_bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_dst),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_bar) : "memory");
}

// ---- programmatic dependent launch ------------------------------------------------------------------------------
MC_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
MC_DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace marlin_cutlass
#else
#include "marlin_cutlass/prims_hopper_host.h"
#endif
