#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#if !EMU_OWN_SWITCH
#include <ucontext.h>
#endif

namespace emu {
namespace {

constexpr size_t kStackBytes = 128 * 1024;  // address space; only touched pages cost memory
constexpr size_t kGuardBytes = 4096;
constexpr size_t kChunk = 256;              // stacks per mapping

std::vector<char*> chunks;

char* stack_base(size_t index) { return chunks[index / kChunk] + (index % kChunk) * kStackBytes; }

}  // namespace

void reserve_stacks(size_t count) {
  while (chunks.size() * kChunk < count) {
    void* p = mmap(nullptr, kChunk * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::perror("emulator: cannot map thread stacks");
      std::abort();
    }
    char* base = static_cast<char*>(p);
    for (size_t i = 0; i < kChunk; ++i) mprotect(base + i * kStackBytes, kGuardBytes, PROT_NONE);
    chunks.push_back(base);
  }
}

#if EMU_OWN_SWITCH

// Saves the callee-saved registers on the old stack and restores them from the new one (System V ABI).
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch_stack, .-emu_switch_stack
)");

void start_fiber(Fiber& fiber, size_t index, FiberEntry entry) {
  // NOTE: equal offsets in 128 KiB-aligned stacks share cache sets, so neighbouring threads start 128 bytes apart.
  char* top = stack_base(index) + kStackBytes - 64 - (index % 32) * 128;
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;                          // return address of `entry`: the end of a debugger's backtrace
  *--sp = reinterpret_cast<void*>(entry);   // `ret` in the switch jumps here, leaving the stack as after a call
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  fiber.stack_pointer = sp;
}

void switch_fiber(Fiber& from, Fiber& to) { emu_switch_stack(&from.stack_pointer, to.stack_pointer); }

#else

void start_fiber(Fiber& fiber, size_t index, FiberEntry entry) {
  if (!fiber.context) fiber.context = new ucontext_t;
  auto* context = static_cast<ucontext_t*>(fiber.context);
  getcontext(context);
  context->uc_stack.ss_sp = stack_base(index) + kGuardBytes;
  context->uc_stack.ss_size = kStackBytes - kGuardBytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) {
  if (!from.context) from.context = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
}

#endif

}  // namespace emu
