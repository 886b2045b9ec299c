// One stack per CUDA thread and a switch between them.
#pragma once
#include <cstddef>

// x86-64 has a switch of its own; elsewhere, or with EMU_UCONTEXT defined, the C library's (several times slower).
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_OWN_SWITCH 1
#endif

namespace emu {

using FiberEntry = void (*)();

struct Fiber {
#if EMU_OWN_SWITCH
  void* stack_pointer = nullptr;
#else
  void* context = nullptr;  // ucontext_t, created on first use
#endif
};

// `count` stacks that stay mapped until the next call asks for more; each ends in a guard page.
void reserve_stacks(size_t count);
// Prepares `fiber` to start in `entry` on stack `index`. `entry` must not return.
void start_fiber(Fiber& fiber, size_t index, FiberEntry entry);
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace emu
