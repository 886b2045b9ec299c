// Memory in which CTAs of one launch exchange partial sums. A stream owns its workspace, and so does each stream of a graph capture, because
// two launches that may run at the same time must never share flags.
#pragma once
#include <cstdint>

#include "driver.h"

namespace marlin_cutlass {

struct Workspace {
  float* partials = nullptr;
  uint32_t* flags = nullptr;  // zero; every launch leaves them zero
};

// Workspace of at least these sizes for launches on `stream` of device `device`, whose context is current. During capture the memory belongs
// to the graph and is used again after the graph is destroyed; outside it grows, and is kept until the process ends.
Workspace workspace(int device, driver::Stream stream, int64_t partials, int64_t flags);

// True while `stream` is being captured into a graph.
bool capturing(driver::Stream stream);

}  // namespace marlin_cutlass
