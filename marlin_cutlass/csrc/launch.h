// From a checked call to a kernel on a stream.
#pragma once
#include <cstdint>

#include "driver.h"
#include "registry.h"

namespace marlin_cutlass {

// One multiply whose operands have been checked. m >= 1.
struct Call {
  const void* a;  // [m, lda]
  const void* packed;
  const float* col_scale;
  const void* bias;  // or nullptr
  void* c;           // [m, ldc]
  int64_t lda, ldc;
  int64_t m, n, k;
  int32_t group_size;  // as stored: 32, 64, 128 or -1
  int32_t dtype;       // Dtype
  int32_t zeros;
  int32_t sparse;      // 2:4-sparse weight
  int32_t swiglu;      // C is [m, n / 2]
  int32_t device;
  int64_t variant;  // index, kAuto or kBatchInvariant
  driver::Stream stream;
};

// What is known about a call before its operands: the kernel and its launch-time numbers. Valid until the tables change.
struct Plan {
  const Variant* variant;
  int64_t index;  // of the variant in its table
  driver::Function function;
  driver::Context context;
  Schedule schedule;
  int64_t k_multiple;                     // A must have a multiple of this many columns
  int64_t rows_per_launch;                // more rows than this take several launches
  GemmParams params;                      // without what differs between calls: addresses, row strides, padded k
  driver::LaunchConfig config;            // without stream and attributes: those are the plan's own
  driver::LaunchAttribute attributes[2];  // config.attribute_count of them, then the programmatic launch of a Hopper kernel
};

// Chosen once for each shape and thread, then found again at its place in a small table, or else by one hash lookup.
const Plan& plan(const Call& call);

// Launches on call.stream. A's base is 16-byte aligned, lda a multiple of 8 (of 64 columns on Hopper), call.k padded accordingly.
void launch(const Plan& plan, const Call& call);

struct Options {
  bool programmatic_launch = true;  // MARLIN_CUTLASS_PDL
  bool debug = false;               // MARLIN_CUTLASS_DEBUG: synchronise and check after each launch
};
Options& options();

}  // namespace marlin_cutlass
