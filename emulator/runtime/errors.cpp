// Errors end the launch: the failing lane records the message and control goes back to the scheduler for good.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

#include "machine.h"

namespace emu {
namespace {

std::string format_list(const char* format, va_list args) {
  va_list again;
  va_copy(again, args);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, again)), ' ');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, format, args);
  return text;
}

}  // namespace

std::string format_text(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text = format_list(format, args);
  va_end(args);
  return text;
}

// "[@offset]" in the kernel's object; the Python driver turns it into file and line.
std::string site_text(Site site) {
  Dl_info info;
  if (!site || !dladdr(reinterpret_cast<void*>(site), &info)) return "";
  return format_text("[@%llx]", (unsigned long long)(site - 1 - reinterpret_cast<Site>(info.dli_fbase)));
}

std::string where(const Lane& lane) {
  return format_text("block %d warp %d lane %d", lane.block, lane.warp->index, lane.index);
}

void record_failure(const char* kind, const std::string& text) {
  if (machine.failed) return;
  machine.failed = true;
  machine.error_kind = kind;
  machine.error_text = text;
}

void fail(const char* kind, const char* format, ...) {
  va_list args;
  va_start(args, format);
  const std::string text = format_list(format, args);
  va_end(args);
  const Lane& me = current();
  record_failure(kind, where(me) + ", " + me.activity.primitive + " " + site_text(me.activity.site) + ": " + text);
  switch_fiber(current().fiber, machine.scheduler);
  __builtin_unreachable();
}

}  // namespace emu
