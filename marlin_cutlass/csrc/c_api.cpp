// What Python calls through ctypes: registering tables, and the numbers that tests compare with their Python mirrors.
#include <cstring>
#include <exception>
#include <limits>

#include "error.h"
#include "launch.h"
#include "registry.h"
#include "sha256.h"

using namespace marlin_cutlass;

#define MC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

// Runs `body`; on an exception keeps its text for mc_error and returns `failure`.
template <class Result, class Body> Result guarded(Result failure, Body body) {
  try {
    last_error.clear();
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return failure;
  }
}

std::unique_ptr<Table> pending;  // between mc_table_begin and mc_table_commit; Python holds a lock

Table& open_table() {
  if (!pending) failed("mc_table_begin was not called");
  return *pending;
}

}  // namespace

MC_EXPORT const char* mc_error() { return last_error.c_str(); }

MC_EXPORT void mc_set_option(const char* name, int value) {
  if (!std::strcmp(name, "pdl")) options().programmatic_launch = value != 0;
  if (!std::strcmp(name, "debug")) options().debug = value != 0;
}

// 0 if the NVIDIA driver can be used.
MC_EXPORT int mc_load_driver() {
  return guarded(-1, [] {
    driver::api();
    return 0;
  });
}

MC_EXPORT void mc_set_built_archs(const char* text) { set_built_archs(text); }
MC_EXPORT void mc_clear_tables() { clear_tables(); }
MC_EXPORT void mc_set_loading(int value) { set_loading(value != 0); }

MC_EXPORT int mc_table_begin(const char* arch, int major, int minor) {
  pending = std::make_unique<Table>();
  pending->arch = arch;
  pending->major = major;
  pending->minor = minor;
  pending->batch_invariant.fill(-1);
  return 0;
}

// Returns the index of the variant in its table.
MC_EXPORT int mc_table_variant(const char* name, const char* file, const char* sha256, const int32_t* fields) {
  return guarded(-1, [&] {
    auto v = std::make_unique<Variant>();
    std::memcpy(&v->fields, fields, sizeof(VariantFields));
    v->name = name;
    v->file = file;
    v->sha256 = sha256;
    open_table().variants.push_back(std::move(v));
    return static_cast<int>(open_table().variants.size()) - 1;
  });
}

MC_EXPORT int mc_table_row(const int32_t* ranges, const int32_t* variants) {
  return guarded(-1, [&] {
    Row row{ranges[0], ranges[1], ranges[2], ranges[3], ranges[4], ranges[5], ranges[6], {}};
    std::memcpy(row.variants.data(), variants, sizeof(row.variants));
    open_table().rows.push_back(row);
    return 0;
  });
}

MC_EXPORT int mc_table_batch_invariant(const int32_t* variants) {
  return guarded(-1, [&] {
    std::memcpy(open_table().batch_invariant.data(), variants, sizeof(open_table().batch_invariant));
    return 0;
  });
}

MC_EXPORT int mc_table_commit() {
  return guarded(-1, [&] {
    open_table();
    publish(std::move(pending));
    return 0;
  });
}

// Index of the variant that a call would use on a device with `sms` SMs, without a GPU; -1 and mc_error where there is none.
MC_EXPORT int mc_select(int major, int minor, const int64_t* shape, int sms, int64_t variant) {
  return guarded(-1, [&] {
    const auto table = table_for(major, minor);
    const Choice choice{shape[0], shape[1], shape[2], static_cast<int>(shape[3]), static_cast<int>(shape[4]), sms, shape[5] != 0, shape[6] != 0,
                        variant};
    return select(*table, choice);
  });
}

// m_tiles, n_tiles, k_steps, raster, grid, cluster, partials, flags, whole_passes, owner_steps of a launch.
MC_EXPORT int mc_schedule(const int32_t* fields, int64_t m, int64_t n, int64_t k, int64_t sms, int64_t* out) {
  return guarded(-1, [&] {
    VariantFields v;
    std::memcpy(&v, fields, sizeof(v));
    const Schedule s = make_schedule(v, m, n, k, sms);
    std::memcpy(out, &s, sizeof(s));
    return 0;
  });
}

// Launches one multiply from addresses, unchecked: pointers a, packed, col_scale, bias, c, stream; numbers lda, ldc, m, n, k, group_size,
// dtype, kind (1 zero points, 2 sparse), device, variant. For tests and for tools that own their memory.
MC_EXPORT int mc_launch(void* const* pointers, const int64_t* numbers) {
  return guarded(-1, [&] {
    Call call{};
    call.a = pointers[0];
    call.packed = pointers[1];
    call.col_scale = static_cast<const float*>(pointers[2]);
    call.bias = pointers[3];
    call.c = pointers[4];
    call.stream = static_cast<driver::Stream>(pointers[5]);
    call.lda = numbers[0], call.ldc = numbers[1];
    call.m = numbers[2], call.n = numbers[3], call.k = numbers[4];
    call.group_size = static_cast<int32_t>(numbers[5]), call.dtype = static_cast<int32_t>(numbers[6]);
    call.zeros = numbers[7] == 1, call.sparse = numbers[7] == 2, call.device = static_cast<int32_t>(numbers[8]);
    call.variant = numbers[9];
    launch(plan(call), call);
    return 0;
  });
}

// Writes 64 hexadecimal digits and a terminating zero to `out`.
MC_EXPORT void mc_sha256(const char* data, size_t size, char* out) {
  const std::string digest = Sha256::hex(std::string(data, size));
  std::memcpy(out, digest.c_str(), digest.size() + 1);
}

static_assert(std::numeric_limits<int>::max() == INT32_MAX);
