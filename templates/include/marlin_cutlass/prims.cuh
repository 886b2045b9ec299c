// One layer between kernel code and the machine: PTX and CUTLASS atoms under nvcc, an emulation under a host compiler.
#pragma once
#if defined(__CUDACC__)
#include "marlin_cutlass/prims_device.cuh"
#else
#include "marlin_cutlass/prims_host.h"
#endif
