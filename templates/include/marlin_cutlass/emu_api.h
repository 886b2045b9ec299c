// What kernels compiled for the host call: the functions of the emulator's runtime (emulator/runtime/).
// prims_host.h and prims_hopper_host.h wrap these under the names of the device primitives. Addresses inside shared memory are
// offsets in the block's window; bits 24..31 hold 1 + rank for another block of the cluster.
#pragma once
#include <cstdint>

extern "C" {

struct EmuThread {
  int thread, block, grid;
};
extern EmuThread* emu_thread;  // the CUDA thread that runs now

// ---- threads and warps
void emu_block_sync();
void emu_named_barrier_sync(int id, int threads);
void emu_warp_sync();
uint32_t emu_shuffle(uint32_t x, int lane);
uint32_t emu_shuffle_xor(uint32_t x, int mask);
bool emu_elect_one();
[[noreturn]] void emu_trap();

// ---- shared memory
uint32_t emu_shared_base();
void emu_ld_shared(uint32_t addr, int bytes, void* out);
void emu_st_shared(uint32_t addr, int bytes, const void* value);
void emu_fence_proxy_async();
void emu_fence_proxy_async_global();

// ---- global memory
void emu_ld_global(const void* p, int bytes, void* out);
void emu_st_global(void* p, int bytes, const void* value);
uint32_t emu_ld_acquire(const uint32_t* p);
void emu_st_release(uint32_t* p, uint32_t value);
void emu_st_relaxed(uint32_t* p, uint32_t value);
uint32_t emu_atomic_add_release(uint32_t* p, uint32_t value);
void emu_wait_flag(const uint32_t* p, uint32_t value);

// ---- cp.async
void emu_cp_async16(uint32_t dst, const void* src, int bytes);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending);

// ---- warp matrix instructions; bf16 selects the element type
void emu_ldmatrix(uint32_t* r, int matrices, uint32_t row);
void emu_mma_m16n8k16(bool bf16, float* d, const uint32_t* a, const uint32_t* b);
uint32_t emu_movmatrix_trans(uint32_t x);

// ---- packed arithmetic
uint32_t emu_fma2(bool bf16, uint32_t a, uint32_t b, uint32_t c);
uint32_t emu_sub2_f16(uint32_t a, uint32_t b);
uint32_t emu_pack2(bool bf16, float low, float high);
float emu_to_float(bool bf16, uint16_t x);

// ---- mbarriers and asynchronous copies
void emu_mbarrier_init(uint32_t bar, int arrivals);
void emu_mbarrier_init_fence();
void emu_mbarrier_arrive(uint32_t bar, int arrivals, uint32_t expect_bytes);
bool emu_mbarrier_try_wait(uint32_t bar, uint32_t parity);
void emu_mbarrier_wait(uint32_t bar, uint32_t parity);
void emu_bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar);
void emu_st_async(uint32_t dst, const void* value, uint32_t bar);

struct alignas(64) EmuTensorMap {  // a 3-D tensor of 2-byte elements, boxes in the 128-byte swizzle
  const void* base;
  int64_t dim[3];     // elements, innermost first
  int64_t stride[2];  // bytes of dimensions 1 and 2
  int32_t box[3];
  uint32_t magic;     // kEmuTensorMapMagic
};
void emu_tensor_map_prefetch(const EmuTensorMap* map);
void emu_tensor_load_3d(uint32_t dst, const EmuTensorMap* map, int x, int y, int z, uint32_t bar, uint32_t cta_mask);

// ---- wgmma
void emu_wgmma_fence();
void emu_wgmma_commit();
void emu_wgmma_wait(int pending);
void emu_wgmma_m64k16(bool bf16, int n, float* d, const uint32_t* a, uint64_t b, int accumulate);
void emu_wgmma_sparse_m64k32(bool bf16, int n, float* d, const uint32_t* a, const uint32_t* places, uint64_t b, int accumulate);

// ---- clusters, register pools, programmatic dependent launch
uint32_t emu_cluster_rank();
void emu_cluster_arrive(bool aligned);
void emu_cluster_wait(bool aligned);
uint32_t emu_map_to_rank(uint32_t addr, uint32_t rank);
void emu_set_registers(int registers);
void emu_launch_dependents();
void emu_wait_for_previous_grid();

}  // extern "C"

constexpr uint32_t kEmuTensorMapMagic = 0x7e450a93u;
