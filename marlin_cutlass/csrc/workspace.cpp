#include "workspace.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "error.h"
#include "schedule.h"

namespace marlin_cutlass {
namespace {

using driver::api;
using driver::check;

struct Buffer {
  int device;
  driver::DevicePointer base;
  int64_t partials, flags;  // capacities: floats and words; partials follow the flags

  Workspace view() const {
    return {reinterpret_cast<float*>(base + flags * sizeof(uint32_t)), reinterpret_cast<uint32_t*>(base)};
  }
  bool holds(int64_t want_partials, int64_t want_flags) const { return partials >= want_partials && flags >= want_flags; }
};

struct Capture {
  int status = driver::kCaptureNone;
  uint64_t id = 0;
  driver::Graph graph = nullptr;
};

// Owner of a buffer: device, capture (0 outside), stream.
using Owner = std::tuple<int, uint64_t, driver::Stream>;

struct State {
  std::mutex mutex;
  std::map<Owner, Buffer*> owners;
  std::vector<Buffer*> idle;  // of destroyed graphs
  std::map<int, driver::Stream> zeroing;
  std::mutex returned_mutex;  // the driver calls `give_back` from a thread of its own choice
  std::vector<Buffer*> returned;
};
State& state() {
  static auto* instance = new State;  // never destroyed: graphs may outlive static objects
  return *instance;
}

void give_back(void* buffer) {
  std::lock_guard<std::mutex> lock(state().returned_mutex);
  state().returned.push_back(static_cast<Buffer*>(buffer));
}

// Makes the buffers of destroyed graphs available. Called with the state locked.
void collect(State& s) {
  std::vector<Buffer*> returned;
  {
    std::lock_guard<std::mutex> lock(s.returned_mutex);
    returned.swap(s.returned);
  }
  for (Buffer* buffer : returned) {
    s.idle.push_back(buffer);
    for (auto it = s.owners.begin(); it != s.owners.end();) it = it->second == buffer ? s.owners.erase(it) : std::next(it);
  }
}

Capture capture_of(driver::Stream stream) {
  Capture c;
  const void *dependencies = nullptr, *edges = nullptr;
  size_t count = 0;
  // NOTE: the older query fails where a programmatic launch is among the dependencies.
  const driver::Result result = api().capture_info_v3
                                    ? api().capture_info_v3(stream, &c.status, &c.id, &c.graph, &dependencies, &edges, &count)
                                    : api().capture_info_v2(stream, &c.status, &c.id, &c.graph, &dependencies, &count);
  check(result, "cuStreamGetCaptureInfo");
  return c;
}

Buffer* allocate(int device, int64_t partials, int64_t flags) {
  auto* buffer = new Buffer{device, 0, round_up(std::max<int64_t>(partials, 1), 1 << 16), round_up(flags, 1 << 12)};
  const size_t bytes = buffer->flags * sizeof(uint32_t) + buffer->partials * sizeof(float);
  const driver::Result result = api().memory_allocate(&buffer->base, bytes);
  if (result != driver::kSuccess) delete buffer;
  check(result, "cuMemAlloc", concat(bytes, " bytes of workspace; torch.cuda.empty_cache() may help"));
  return buffer;
}

// Zero flags, complete before this returns and outside the graph that is being captured.
void zero_now(State& s, const Buffer& buffer) {
  driver::Stream& stream = s.zeroing[buffer.device];
  if (!stream) check(api().stream_create(&stream, driver::kStreamNonBlocking), "cuStreamCreate");
  check(api().memset_words(buffer.base, 0, buffer.flags, stream), "cuMemsetD32Async");
  check(api().stream_synchronize(stream), "cuStreamSynchronize");
}

Buffer* for_capture(State& s, int device, const Capture& capture, int64_t partials, int64_t flags) {
  driver::RelaxedCapture relaxed;
  Buffer* buffer = nullptr;
  for (auto it = s.idle.begin(); it != s.idle.end() && !buffer; ++it)
    if ((*it)->device == device && (*it)->holds(partials, flags)) {
      buffer = *it;
      s.idle.erase(it);
      break;
    }
  if (!buffer) buffer = allocate(device, partials, flags);
  zero_now(s, *buffer);
  driver::UserObject object = nullptr;
  check(api().user_object_create(&object, buffer, give_back, 1, driver::kNoDestructorSync), "cuUserObjectCreate");
  check(api().graph_retain(capture.graph, object, 1, driver::kUserObjectMove), "cuGraphRetainUserObject");
  return buffer;
}

// The outgrown buffer is not freed: launches in flight use it, and doubling bounds what is kept to the size of the last one.
Buffer* for_stream(const Buffer* old, int device, driver::Stream stream, int64_t partials, int64_t flags) {
  driver::RelaxedCapture relaxed;  // another thread may be capturing
  const int64_t floats = old && partials > old->partials ? std::max(partials, 2 * old->partials) : partials;
  const int64_t words = old && flags > old->flags ? std::max(flags, 2 * old->flags) : flags;
  Buffer* buffer = allocate(device, std::max(floats, old ? old->partials : 0), std::max(words, old ? old->flags : 0));
  check(api().memset_words(buffer->base, 0, buffer->flags, stream), "cuMemsetD32Async");
  return buffer;
}

}  // namespace

Workspace workspace(int device, driver::Stream stream, int64_t partials, int64_t flags) {
  State& s = state();
  const Capture capture = capture_of(stream);
  const bool captured = capture.status == driver::kCaptureActive;
  std::lock_guard<std::mutex> lock(s.mutex);
  const Owner owner{device, captured ? capture.id : 0, stream};
  const auto found = s.owners.find(owner);
  if (found != s.owners.end() && found->second->holds(partials, flags)) return found->second->view();
  collect(s);
  Buffer* old = found != s.owners.end() ? found->second : nullptr;
  Buffer* fresh = captured ? for_capture(s, device, capture, partials, flags) : for_stream(old, device, stream, partials, flags);
  s.owners[owner] = fresh;
  return fresh->view();
}

bool capturing(driver::Stream stream) { return capture_of(stream).status != driver::kCaptureNone; }

}  // namespace marlin_cutlass
