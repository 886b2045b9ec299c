// What the Python driver passes to the runtime (mirrored in emulator/runtime.py).
#pragma once
#include <cstdint>

#include "marlin_cutlass/emu_api.h"

extern "C" {

enum EmuBufferFlags : uint32_t {
  kEmuRead = 1,
  kEmuWrite = 2,
  kEmuWriteOnce = 4,  // every element is stored exactly once
  kEmuOrdered = 8,    // conflicting accesses must be ordered by flags or barriers
  kEmuSync = 16,      // acquire / release words
  kEmuPrevious = 32,  // written or read by the launch before: untouchable until wait_for_previous_grid under PDL
};

struct EmuBuffer {
  const char* name;
  uint64_t base;
  int64_t bytes;
  int64_t row_bytes, pitch_bytes;  // accessible part of each row; equal when there are no gaps
  uint32_t flags;
  uint32_t element_bytes;
};

struct EmuLaunch {
  void* kernel;
  const void* params;            // GemmParams
  const EmuTensorMap* tensor_map;  // nullptr: the kernel takes only params
  const EmuBuffer* buffers;
  int32_t buffer_count;
  int32_t grid, threads, shared_bytes, cluster;
  int32_t resident;              // blocks that run at a time, started in order; 0: all
  int32_t programmatic;          // 1: check the rules of programmatic dependent launch
  uint64_t seed;
};

enum EmuStatistic {
  kStatMma, kStatLdmatrix, kStatWgmma, kStatCpAsync, kStatBulk, kStatTensor, kStatRemoteStore, kStatBlockSync, kStatMbarrierWait,
  kStatSharedLoads, kStatSharedLoadWaves, kStatSharedLoadIdeal,
  kStatSharedStores, kStatSharedStoreWaves, kStatSharedStoreIdeal,
  kStatLdmatrixRows, kStatLdmatrixWaves, kStatLdmatrixIdeal,
  kStatCpAsyncRows, kStatCpAsyncWaves, kStatCpAsyncIdeal,
  kStatSwitches, kStatBulkBytes, kStatTensorBytes,
  kStatisticCount
};

// 0, or 1 with *kind and *text set (valid until the next launch).
int emu_run(const EmuLaunch* launch, const char** kind, const char** text, int64_t* statistics);

}  // extern "C"
