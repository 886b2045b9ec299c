// Errors of the launcher: exceptions inside, Python exceptions (ValueError, RuntimeError) outside.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace marlin_cutlass {

template <class... Parts> std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// The caller's operands are wrong: ValueError.
template <class... Parts> [[noreturn]] void invalid(const Parts&... parts) {
  throw std::invalid_argument(concat(parts...));
}

// The machine, the driver or the kernel table is at fault: RuntimeError.
template <class... Parts> [[noreturn]] void failed(const Parts&... parts) {
  throw std::runtime_error(concat(parts...));
}

}  // namespace marlin_cutlass
