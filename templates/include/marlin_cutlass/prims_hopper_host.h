// Host side of the Hopper primitives (prims_hopper.cuh): what the emulator offers under the same names.
#pragma once
#include "marlin_cutlass/prims_host.h"

namespace marlin_cutlass {

using TensorMap = EmuTensorMap;

// ---- mbarrier ---------------------------------------------------------------------------------------------------
MC_DEVICE void mbarrier_init(smem_addr_t bar, int arrivals) { emu_mbarrier_init(bar, arrivals); }
MC_DEVICE void mbarrier_init_fence() { emu_mbarrier_init_fence(); }
MC_DEVICE void mbarrier_arrive(smem_addr_t bar) { emu_mbarrier_arrive(bar, 1, 0); }
MC_DEVICE void mbarrier_arrive_many(smem_addr_t bar, int arrivals) { emu_mbarrier_arrive(bar, arrivals, 0); }
MC_DEVICE void mbarrier_arrive_expect(smem_addr_t bar, uint32_t bytes) { emu_mbarrier_arrive(bar, 1, bytes); }
MC_DEVICE void mbarrier_arrive_remote(smem_addr_t bar, uint32_t rank) { emu_mbarrier_arrive(emu_map_to_rank(bar, rank), 1, 0); }
MC_DEVICE bool mbarrier_try_wait(smem_addr_t bar, uint32_t parity) { return emu_mbarrier_try_wait(bar, parity); }
MC_DEVICE void mbarrier_wait(smem_addr_t bar, uint32_t parity) { emu_mbarrier_wait(bar, parity); }
MC_DEVICE bool mbarrier_try_wait_cluster(smem_addr_t bar, uint32_t parity) { return emu_mbarrier_try_wait(bar, parity); }
MC_DEVICE void mbarrier_wait_cluster(smem_addr_t bar, uint32_t parity) { emu_mbarrier_wait(bar, parity); }

// Orders ordinary stores to shared memory before bulk copies and wgmma that touch the same bytes.
MC_DEVICE void fence_proxy_async() { emu_fence_proxy_async(); }
// Orders ordinary stores to global memory, of this thread and those that it knows of, before bulk copies from there.
MC_DEVICE void fence_proxy_async_global() { emu_fence_proxy_async_global(); }

// ---- copies that complete on an mbarrier ------------------------------------------------------------------------
MC_DEVICE uint64_t evict_first_policy() { return 0; }
MC_DEVICE void bulk_load(smem_addr_t dst, const void* src, uint32_t bytes, smem_addr_t bar, uint64_t) {
  emu_bulk_load(dst, src, bytes, bar);
}
MC_DEVICE void tensor_map_prefetch(const TensorMap* map) { emu_tensor_map_prefetch(map); }
MC_DEVICE void tensor_load_3d(smem_addr_t dst, const TensorMap* map, int x, int y, int z, smem_addr_t bar) {
  emu_tensor_load_3d(dst, map, x, y, z, bar, 0);
}
MC_DEVICE void tensor_load_3d_multicast(smem_addr_t dst, const TensorMap* map, int x, int y, int z, smem_addr_t bar, uint16_t cta_mask) {
  emu_tensor_load_3d(dst, map, x, y, z, bar, cta_mask);
}

// ---- wgmma ------------------------------------------------------------------------------------------------------
MC_DEVICE void wgmma_fence() { emu_wgmma_fence(); }
MC_DEVICE void wgmma_commit() { emu_wgmma_commit(); }
template <int kPending> MC_DEVICE void wgmma_wait() { emu_wgmma_wait(kPending); }
MC_DEVICE void wgmma_pin(float& x) { asm volatile("" : "+m"(x)::"memory"); }

constexpr uint32_t kDescriptorHigh = 0x40000040u;  // stride offset 64 (x16 bytes), swizzle mode 1 = 128 bytes
MC_DEVICE uint32_t descriptor_low(smem_addr_t addr) { return (1u << 16) | ((addr & 0x3ffffu) >> 4); }
MC_DEVICE uint64_t make_descriptor(uint32_t low) { return (static_cast<uint64_t>(kDescriptorHigh) << 32) | low; }

template <class E, int kN, int kFirst = 0, int kCount> MC_DEVICE void wgmma_m64k16(float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate = 1) {
  emu_wgmma_m64k16(IsBf16<E>::value, kN, d + kFirst, a, b, accumulate);
}
template <class E, int kN>
MC_DEVICE void wgmma_sparse_m64k32(float (&d)[kN / 2], const uint32_t* a, const uint32_t& places, uint64_t b, int accumulate) {
  emu_wgmma_sparse_m64k32(IsBf16<E>::value, kN, d, a, &places, b, accumulate);
}

// ---- roles and clusters -----------------------------------------------------------------------------------------
MC_DEVICE void named_barrier_sync_unaligned(int id, int threads) { emu_named_barrier_sync(id, threads); }
MC_DEVICE void spin(uint32_t) {}
MC_DEVICE uint32_t opaque_zero() { return 0; }
MC_DEVICE uint32_t copy_of(uint32_t x, uint32_t zero) { return x ^ zero; }
MC_DEVICE bool elect_one() { return emu_elect_one(); }
template <int kRegisters> MC_DEVICE void registers_increase() { emu_set_registers(kRegisters); }
template <int kRegisters> MC_DEVICE void registers_decrease() { emu_set_registers(kRegisters); }
MC_DEVICE uint32_t cluster_rank() { return emu_cluster_rank(); }
MC_DEVICE void cluster_arrive() { emu_cluster_arrive(true); }
MC_DEVICE void cluster_wait() { emu_cluster_wait(true); }
MC_DEVICE void cluster_wait_unaligned() { emu_cluster_wait(false); }
MC_DEVICE uint32_t map_to_rank(smem_addr_t addr, uint32_t rank) { return emu_map_to_rank(addr, rank); }
MC_DEVICE void st_async_f32x4(uint32_t remote_dst, F32x4 v, uint32_t remote_bar) { emu_st_async(remote_dst, &v, remote_bar); }

// ---- programmatic dependent launch ------------------------------------------------------------------------------
MC_DEVICE void launch_dependents() { emu_launch_dependents(); }
MC_DEVICE void wait_for_previous_grid() { emu_wait_for_previous_grid(); }

}  // namespace marlin_cutlass
