// A pretend accelerator: torch's PrivateUse1 device with its memory on the host.
//
// Operators run on the CPU kernels through one boxed fallback, at once. What a real device would do later is modelled:
// every stream and every communicator has a timeline, waiting merges timelines (vector clocks), and an access to memory
// that no wait orders behind a conflicting one is an error. So is memory that is freed while another stream than the one
// it was allocated on may still use it, as a caching allocator would hand it out again at once. Copies between device
// and pinned host memory happen as late as a device may do them, so that host code that does not wait reads NaN, or sends
// what it wrote too early.
//
// Python reaches this through torch.ops.pretend.* (tensors) and ctypes (the extern "C" part at the end): no Python
// headers are needed to build it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;                 // every float format reads it as NaN
constexpr size_t kStagedBytes = 64 << 10;     // CUDA stages smaller pageable copies without waiting for the stream
constexpr c10::DeviceIndex kMaxDevices = 16;

thread_local c10::DeviceIndex current_device = 0;

c10::DeviceIndex device_count() {
  const char* value = std::getenv("PRETEND_DEVICES");
  return static_cast<c10::DeviceIndex>(std::clamp(value ? std::atoi(value) : 8, 1, int{kMaxDevices}));
}

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kPretend; }

// ---- counters

std::atomic<int64_t> host_syncs{0}, operators{0}, bytes_to_device{0}, bytes_to_host{0};
using SyncCallback = void (*)(const char* cause);
using DrainCallback = int (*)();
std::atomic<SyncCallback> on_sync{nullptr};   // told of every host synchronisation
std::atomic<bool> slow{false};                // events are not done before the host waits for them
std::atomic<DrainCallback> drain{nullptr};    // waits until every collective under way has finished; 0 on success

void count_sync(const char* cause) {
  host_syncs++;
  if (auto callback = on_sync.load()) callback(cause);
}

// ---- timelines: streams and communicators

using Clock = std::vector<int64_t>;  // by timeline: the last of its accesses that has been waited for

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, int64_t timeline, int64_t tick) {
  return static_cast<size_t>(timeline) < clock.size() && clock[timeline] >= tick;
}

struct Access {
  uintptr_t begin, end;
  bool writes;
  int64_t timeline, tick;
  std::string name;
  std::vector<c10::Storage> kept;   // memory that must outlive the access
  std::function<void()> deliver;    // a copy that has not been carried out yet
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Timelines {
  std::recursive_mutex mutex;
  std::vector<Clock> clocks = std::vector<Clock>(kMaxDevices);  // timeline d is device d's default stream
  std::vector<int64_t> side_streams;                            // timelines of streams that were made
  Clock host;
  std::vector<Access> accesses;
  std::string fault;  // what the allocator was told wrongly, which cannot be raised where memory is freed

  int64_t make() {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    clocks.emplace_back();
    return static_cast<int64_t>(clocks.size()) - 1;
  }

  Clock& seen_by(int64_t timeline) {
    auto& clock = clocks[timeline];
    merge(clock, host);  // what the host has waited for comes before all that it launches
    if (clock.size() <= static_cast<size_t>(timeline)) clock.resize(timeline + 1, 0);
    return clock;
  }

  int64_t advance(int64_t timeline) { return ++seen_by(timeline)[timeline]; }

  // Carry out copies and forget accesses that everything launched from now on comes after. Memory that only these keep
  // is freed at the end: freeing it changes `accesses`.
  void settle() {
    std::vector<std::function<void()>> delivered;
    for (auto& access : accesses) {
      if (access.deliver && covers(host, access.timeline, access.tick)) {
        access.deliver();
        delivered.push_back(std::exchange(access.deliver, nullptr));
      }
    }
    auto over = [&](const Access& access) {
      if (access.deliver) return false;
      if (covers(host, access.timeline, access.tick)) return true;
      for (c10::DeviceIndex d = 0; d < kMaxDevices; d++)
        if (!clocks[d].empty() && access.timeline != d && !covers(clocks[d], access.timeline, access.tick)) return false;
      for (int64_t s : side_streams)
        if (access.timeline != s && !covers(clocks[s], access.timeline, access.tick)) return false;
      return access.timeline < kMaxDevices ? side_streams.empty() : true;
    };
    const auto forgotten = take_out(over);
  }

  // The accesses of which `chosen` is true, which are no longer remembered.
  template <typename Choice>
  std::vector<Access> take_out(const Choice& chosen) {
    const auto first = std::stable_partition(accesses.begin(), accesses.end(), [&](const Access& a) { return !chosen(a); });
    std::vector<Access> taken(std::make_move_iterator(first), std::make_move_iterator(accesses.end()));
    accesses.erase(first, accesses.end());
    return taken;
  }

  bool host_knows(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    for (size_t i = 0; i < clock.size(); i++)
      if (!covers(host, static_cast<int64_t>(i), clock[i]) && clock[i] > 0) return false;
    return true;
  }

  void host_waits(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    merge(host, clock);
    settle();
  }

  // Memory is freed, or was given back by a storage that is kept: from now on its stream may use it for another tensor.
  void forget(uintptr_t begin, uintptr_t end, int64_t owner, const std::set<int64_t>& recorded) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    const auto forgotten = take_out([&](const Access& a) { return a.begin >= begin && a.end <= end; });
    const auto& clock = seen_by(owner);
    for (const auto& access : forgotten)
      if (access.timeline != owner && !covers(clock, access.timeline, access.tick) && !recorded.count(access.timeline))
        fault = "pretend: memory is freed that " + access.name + (access.writes ? " still writes" : " still reads") +
                " on another stream than the one it was allocated on: hold it until that one is waited for, or record_stream";
  }

  void raise_fault() {
    if (!fault.empty()) TORCH_CHECK(false, std::exchange(fault, ""));
  }
};
Timelines& timelines() {
  static auto* all = new Timelines();
  return *all;
}

thread_local int64_t current_stream[kMaxDevices];  // 0: the default stream, whose timeline is the device's index
int64_t timeline_of(c10::StreamId id, c10::DeviceIndex device) { return id == 0 ? device : id; }
int64_t current_timeline(c10::DeviceIndex device) { return timeline_of(current_stream[device], device); }

struct Extent {
  uintptr_t begin = 0, end = 0;
};

Extent extent(const at::Tensor& t) {  // of the addresses from the first element to the last
  if (!t.defined() || t.numel() == 0 || !t.has_storage() || t.storage().nbytes() == 0) return {};
  int64_t low = 0, high = 0;
  for (int64_t d = 0; d < t.dim(); d++) {
    const int64_t reach = (t.size(d) - 1) * t.stride(d);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<uintptr_t>(t.storage().data()) + t.storage_offset() * t.element_size();
  return {base + low * t.element_size(), base + (high + 1) * t.element_size()};
}

// An operation on `timeline` touches the tensor: copies it comes after are carried out, one it does not come after is
// an error where either writes.
void touch(const at::Tensor& t, bool writes, int64_t timeline, const std::string& name) {
  auto& lines = timelines();
  if (lines.accesses.empty()) return;
  const auto [begin, end] = extent(t);
  if (begin == end) return;
  const Clock* clock = nullptr;
  std::vector<std::function<void()>> delivered;  // what they keep is freed at the end, which changes `accesses`
  for (auto& access : lines.accesses) {
    if (access.end <= begin || end <= access.begin) continue;
    if (clock == nullptr) clock = &lines.seen_by(timeline);
    if (access.timeline == timeline || covers(*clock, access.timeline, access.tick)) {
      if (access.deliver) {
        access.deliver();
        delivered.push_back(std::exchange(access.deliver, nullptr));
      }
      continue;
    }
    TORCH_CHECK(!access.writes && !writes, "pretend: ", name, writes ? " writes" : " reads", " memory that ", access.name,
                access.writes ? " still writes" : " still reads", ": nothing has waited for it");
  }
}

void remember(const at::Tensor& t, bool writes, int64_t timeline, int64_t tick, const std::string& name) {
  const auto [begin, end] = extent(t);
  if (begin == end) return;
  auto& accesses = timelines().accesses;
  for (auto& access : accesses)
    if (access.begin == begin && access.end == end && access.writes == writes && access.timeline == timeline &&
        access.kept.empty() && !access.deliver) {
      access.tick = tick;
      return;
    }
  accesses.push_back({begin, end, writes, timeline, tick, name, {}, nullptr});
}

// Called for each operator: reads and writes of all its tensors on the current stream.
void launch(const std::vector<at::Tensor>& tensors, const std::vector<bool>& writes, const std::string& name) {
  auto& lines = timelines();
  std::lock_guard<std::recursive_mutex> guard(lines.mutex);
  lines.raise_fault();
  if (lines.accesses.empty() && lines.side_streams.empty()) return;
  c10::DeviceIndex device = current_device;
  for (auto& t : tensors)
    if (on_device(t)) device = t.device().index();
  const int64_t timeline = current_timeline(device);
  for (size_t i = 0; i < tensors.size(); i++)
    if (on_device(tensors[i])) touch(tensors[i], writes[i], timeline, name);
  if (lines.side_streams.empty()) return;
  const int64_t tick = lines.advance(timeline);
  for (size_t i = 0; i < tensors.size(); i++)
    if (on_device(tensors[i])) remember(tensors[i], writes[i], timeline, tick, name);
  lines.settle();
}

// ---- memory

struct Block {
  size_t bytes;
  c10::DeviceIndex device;
  int64_t timeline;             // of the stream that it was allocated on
  std::set<int64_t> recorded;   // other streams that the allocator was told of
};

struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  int64_t current[kMaxDevices] = {}, peak[kMaxDevices] = {}, allocated[kMaxDevices] = {};
  int64_t limit = int64_t{80} << 30;

  static Memory& instance();
  static void release(void* p) {
    auto& self = instance();
    Block block;
    {
      std::lock_guard<std::mutex> guard(self.mutex);
      const auto found = self.blocks.find(p);
      block = std::move(found->second);
      self.current[block.device] -= static_cast<int64_t>(block.bytes);
      self.blocks.erase(found);
    }
    const auto begin = reinterpret_cast<uintptr_t>(p);
    timelines().forget(begin, begin + block.bytes, block.timeline, block.recorded);
    std::free(p);
  }
  void record(const void* p, int64_t timeline) {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = blocks.find(const_cast<void*>(p));
    if (found != blocks.end()) found->second.recorded.insert(timeline);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kPretend, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> guard(mutex);
    auto& used = current[current_device];
    TORCH_CHECK_WITH(OutOfMemoryError, used + static_cast<int64_t>(bytes) <= limit, "pretend: out of memory: ", bytes,
                     " bytes on top of ", used, " exceed the limit of ", limit);
    void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK_WITH(OutOfMemoryError, p != nullptr, "pretend: the host has no ", bytes, " bytes left");
    std::memset(p, kPoison, bytes);
    blocks[p] = {bytes, current_device, current_timeline(current_device), {}};
    used += static_cast<int64_t>(bytes);
    allocated[current_device] += static_cast<int64_t>(bytes);
    peak[current_device] = std::max(peak[current_device], used);
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record(memory.get(), timeline_of(stream.id(), stream.device_index()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* figures : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*figures)[0].current = current[device];
      (*figures)[0].peak = peak[device];
      (*figures)[0].allocated = allocated[device];
      (*figures)[0].freed = allocated[device] - current[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { allocated[device] = current[device]; }
  void resetPeakStats(c10::DeviceIndex device) override { peak[device] = current[device]; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {static_cast<size_t>(limit - current[device]), static_cast<size_t>(limit)};
  }
};
Memory memory;
Memory& Memory::instance() { return memory; }
REGISTER_ALLOCATOR(kPretend, &memory);

struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::map<uintptr_t, uintptr_t> blocks;  // begin -> end

  static PinnedMemory& instance();
  static void release(void* p) {
    auto& self = instance();
    const auto begin = reinterpret_cast<uintptr_t>(p);
    uintptr_t end = begin;
    {
      std::lock_guard<std::mutex> guard(self.mutex);
      const auto found = self.blocks.find(begin);
      if (found != self.blocks.end()) {
        end = found->second;
        self.blocks.erase(found);
      }
    }
    {  // a device's allocator gives it to nobody before its copies are done; here malloc may, to a plain tensor
      auto& lines = timelines();
      std::lock_guard<std::recursive_mutex> guard(lines.mutex);
      lines.take_out([&](const Access& a) { return a.begin >= begin && a.end <= end && !a.deliver; });
    }
    std::free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64));
    std::memset(p, kPoison, bytes);
    std::lock_guard<std::mutex> guard(mutex);
    blocks[reinterpret_cast<uintptr_t>(p)] = reinterpret_cast<uintptr_t>(p) + std::max<size_t>(bytes, 1);
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  bool holds(const void* p) {
    std::lock_guard<std::mutex> guard(mutex);
    auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
    return next != blocks.begin() && reinterpret_cast<uintptr_t>(p) < std::prev(next)->second;
  }
};
PinnedMemory pinned;
PinnedMemory& PinnedMemory::instance() { return pinned; }

// ---- tensors

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor host_view(const at::Tensor& t, c10::DataPtr data) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU),
                       /*resizable=*/true);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

// The same memory as a CPU tensor.
at::Tensor as_cpu(const at::Tensor& t) {
  if (!on_device(t)) return t;
  auto* owner = new c10::Storage(t.storage());
  return host_view(t, {owner->mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::kCPU});
}

// The same, which may be freed meanwhile.
at::Tensor unowned(const at::Tensor& t) { return host_view(t, {t.storage().mutable_data(), c10::kCPU}); }

struct OnDevice {  // makes a tensor's device current, and the one before again
  c10::DeviceIndex before = current_device;
  explicit OnDevice(c10::DeviceIndex device) { current_device = device < 0 ? current_device : device; }
  ~OnDevice() { current_device = before; }
};

void replace_memory(const c10::Storage& storage, size_t bytes, const void* from, size_t count) {
  OnDevice guard(storage.device().index());
  auto fresh = memory.allocate(bytes);
  if (count) std::memcpy(fresh.get(), from, count);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// Take over what a CPU operator did to the alias of an out= tensor: it may have resized it.
void take_over(const at::Tensor& tensor, const at::Tensor& alias) {
  if (alias.storage().data() != tensor.storage().data())
    replace_memory(tensor.storage(), alias.storage().nbytes(), alias.storage().data(), alias.storage().nbytes());
  if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

c10::DeviceIndex index_of(std::optional<at::Device> device) { return device && device->has_index() ? device->index() : -1; }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(index_of(device));
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice guard(index_of(device));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(t.storage_offset()));
  return out;
}

at::Tensor view(const at::Tensor& t, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, t.numel());
  const auto stride = at::detail::computeStride(t.sizes(), t.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return as_strided(t, inferred, *stride, std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return as_strided(t, size, stride, std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t count = 1;
  for (auto extent : size) count *= extent;
  const size_t needed = (count + t.storage_offset()) * t.dtype().itemsize(), held = t.storage().nbytes();
  if (held < needed) replace_memory(t.storage(), needed, t.storage().data(), held);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (stride.empty() && !size.empty()) {
    strides.assign(size.size(), 1);
    for (int64_t d = static_cast<int64_t>(size.size()) - 2; d >= 0; d--) strides[d] = strides[d + 1] * size[d + 1];
  }
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return t;
}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // torch's operators; the device has no fused attention
}

void record_stream(at::Tensor& t, c10::Stream stream) { memory.recordStream(t.storage().data_ptr(), stream); }

// ---- copies

void wait_for_stream(const char* cause, c10::DeviceIndex device) {
  count_sync(cause);
  auto& lines = timelines();
  std::lock_guard<std::recursive_mutex> guard(lines.mutex);
  lines.host_waits(lines.seen_by(current_timeline(device)));
}

// A copy that the device carries out some time later.
void copy_later(const at::Tensor& source, const at::Tensor& target, const char* name) {
  auto& lines = timelines();
  std::lock_guard<std::recursive_mutex> guard(lines.mutex);
  const bool to_host = !on_device(target);
  const auto device = (to_host ? source : target).device().index();
  const int64_t timeline = current_timeline(device), tick = lines.advance(timeline);
  // Pinned memory is kept until the copy is done, by its allocator; the device's is not, and a copy to what is freed is lost.
  const auto from = to_host ? as_cpu(source).clone() : source;  // what the device holds now, which the host sees later
  const auto to = to_host ? target : unowned(target);
  const auto [begin, end] = extent(target);
  if (to_host && to.is_non_overlapping_and_dense()) std::memset(reinterpret_cast<void*>(begin), kPoison, end - begin);
  lines.accesses.push_back({begin, end, true, timeline, tick, name, {},
                            [from, to]() mutable { at::AutoDispatchBelowADInplaceOrView below; to.copy_(from); }});
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  const bool from_device = on_device(source), to_device = on_device(target);
  const auto bytes = static_cast<int64_t>(target.numel() * target.element_size());
  if (from_device && to_device) {
    operators++;
    launch({source, target}, {false, true}, "a copy");
    as_cpu(target).copy_(as_cpu(source));
    return target;
  }
  const auto& host = from_device ? target : source;
  const auto device = (from_device ? source : target).device().index();
  (from_device ? bytes_to_host : bytes_to_device) += bytes;
  {
    auto& lines = timelines();  // a pinned buffer may be the target of a copy that the host has not waited for
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    touch(host, from_device, current_timeline(device), from_device ? "a copy to the host" : "a copy to the device");
  }
  launch({source, target}, {false, true}, from_device ? "a copy to the host" : "a copy to the device");
  const bool is_pinned = host.numel() > 0 && pinned.holds(host.storage().data());
  if (non_blocking && is_pinned && bytes > 0) {
    copy_later(source, target, from_device ? "a non-blocking copy to the host" : "a non-blocking copy to the device");
    return target;
  }
  if (!non_blocking || from_device || static_cast<size_t>(bytes) > kStagedBytes)
    wait_for_stream(from_device ? "a copy to the host" : "a copy to the device", device);
  as_cpu(target).copy_(as_cpu(source));
  return target;
}

at::Scalar local_scalar(const at::Tensor& t) {
  launch({t}, {false}, "aten::_local_scalar_dense");
  bytes_to_host += static_cast<int64_t>(t.element_size());
  wait_for_stream("item", t.device().index());
  return as_cpu(t).item();
}

// ---- every other operator

// Their results' sizes, or the result itself, depend on values: a device has to tell the host.
const std::set<std::string> kReadByHost = {
    "aten::equal",        "aten::nonzero",       "aten::masked_select",      "aten::_unique",   "aten::_unique2",
    "aten::unique_dim",   "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::is_nonzero",
    "aten::repeat_interleave", "aten::_assert_async"};
// Indices may be masks, and may lie on the host. (aten::index calls nonzero and copies by itself.)
const std::set<std::string> kIndexing = {"aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

struct Arguments {
  std::vector<at::Tensor> tensors, aliases;
  std::vector<bool> writes;
  at::Tensor add(const at::Tensor& t, bool write) {
    tensors.push_back(t);
    writes.push_back(write);
    aliases.push_back(as_cpu(t));
    return aliases.back();
  }
};

// Replace every device tensor among the arguments by its alias on the CPU.
Arguments to_cpu(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  Arguments all;
  const auto count = schema.arguments().size(), begin = stack.size() - count;
  for (size_t i = 0; i < count; i++) {
    auto& value = stack[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = all.add(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(all.add(t, write));
      value = list;
    } else if (value.isList()) {  // of tensors of which some may be missing
      auto list = value.toList().copy();
      for (size_t k = 0; k < list.size(); k++) {
        c10::IValue item = list.get(k);
        if (item.isTensor()) list.set(k, all.add(item.toTensor(), write));
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kPretend) {
      OnDevice(value.toDevice().index());
      value = c10::Device(c10::kCPU);
    }
  }
  return all;
}

// A result of a CPU operator as a device tensor: one of the arguments, a view of one, or new memory.
at::Tensor to_device(const at::Tensor& result, const Arguments& all, c10::DeviceIndex device) {
  if (!result.defined() || on_device(result)) return result;
  for (size_t i = 0; i < all.tensors.size(); i++)
    if (on_device(all.tensors[i]) && all.aliases[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return all.tensors[i];
  for (const auto& t : all.tensors)
    if (on_device(t) && t.storage().nbytes() && result.storage().nbytes() && t.storage().data() == result.storage().data())
      return as_strided(t, result.sizes(), result.strides(), result.storage_offset());
  OnDevice guard(device);
  at::Tensor out = at::detail::empty_strided_generic(result.sizes(), result.strides(), &memory, kKeys, result.scalar_type());
  as_cpu(out).copy_(result);
  return out;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operators++;
  const auto& schema = op.schema();
  const auto& name = schema.name();
  c10::DeviceIndex device = -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& value = (*stack)[stack->size() - schema.arguments().size() + i];
    if (value.isDevice() && value.toDevice().type() == kPretend) device = value.toDevice().index();
  }
  const auto all = to_cpu(schema, *stack);
  const bool indexing = kIndexing.count(name) != 0;
  bool by_host = kReadByHost.count(name) != 0;
  for (size_t i = 0; i < all.tensors.size(); i++) {
    const auto& t = all.tensors[i];
    if (!t.defined()) continue;
    if (indexing && i > 0 && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) by_host = true;
    if (!on_device(t)) continue;
    TORCH_CHECK(device < 0 || device == t.device().index(), "pretend: ", name, " mixes tensors of devices ", int(device),
                " and ", int(t.device().index()));
    device = t.device().index();
  }
  if (device < 0) device = current_device;
  for (size_t i = 0; i < all.tensors.size(); i++) {
    const auto& t = all.tensors[i];
    if (!t.defined() || on_device(t) || t.dim() == 0) continue;
    if (name == "aten::index" && i > 0) continue;
    TORCH_CHECK(indexing && i > 0, "pretend: ", name, " mixes host and device tensors");
    bytes_to_device += static_cast<int64_t>(t.numel() * t.element_size());  // an index is copied, blocking
    wait_for_stream("an index in host memory", device);
  }
  launch(all.tensors, all.writes, name);
  if (by_host) wait_for_stream(name.c_str(), device);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < all.tensors.size(); i++)
    if (on_device(all.tensors[i])) take_over(all.tensors[i], all.aliases[i]);
  const auto count = schema.returns().size(), begin = stack->size() - count;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = to_device(value.toTensor(), all, device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : value.toTensorVector()) list.push_back(to_device(t, all, device));
      value = list;
    }
  }
}

// Convolutions have entries of their own for devices that are not torch's.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  operators++;
  at::AutoDispatchBelowADInplaceOrView below;
  launch({input, weight, bias.value_or(at::Tensor())}, {false, false, false}, "aten::convolution");
  const auto host_bias = bias ? std::optional<at::Tensor>(as_cpu(*bias)) : std::nullopt;
  const auto result = at::convolution_symint(as_cpu(input), as_cpu(weight), host_bias, stride, padding, dilation, transposed,
                                             output_padding, groups);
  return to_device(result, {}, input.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  operators++;
  at::AutoDispatchBelowADInplaceOrView below;
  launch({grad, input, weight}, {false, false, false}, "aten::convolution_backward");
  const std::vector<c10::SymInt> bias_size{weight.sym_size(0)};
  const auto [one, two, three] =
      at::convolution_backward_symint(as_cpu(grad), as_cpu(input), as_cpu(weight), c10::SymIntArrayRef(bias_size), stride,
                                      padding, dilation, transposed, output_padding, groups, mask);
  const auto device = input.device().index();
  return {to_device(one, {}, device), to_device(two, {}, device), to_device(three, {}, device)};
}

// ---- what torch asks of an accelerator

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  at::Device getDeviceFromPtr(void*) const override { return {kPretend, current_device}; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    {
      auto& lines = timelines();
      std::lock_guard<std::recursive_mutex> guard(lines.mutex);
      const auto begin = reinterpret_cast<uintptr_t>(storage.data()), end = begin + storage.nbytes();
      for (const auto& access : lines.accesses)
        TORCH_CHECK(access.end <= begin || end <= access.begin || access.deliver ||
                        covers(lines.seen_by(current_timeline(storage.device().index())), access.timeline, access.tick) ||
                        access.timeline == current_timeline(storage.device().index()),
                    "pretend: a resize frees memory that ", access.name, " still uses: nothing has waited for it");
    }
    replace_memory(storage, bytes, storage.data(), std::min(bytes, storage.nbytes()));
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(int64_t id, c10::DeviceIndex device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kPretend, device), id);
  }
  static int64_t timeline(const c10::Stream& s) { return timeline_of(s.id(), s.device_index()); }
  static Event* of(void* event) { return static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kPretend; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kPretend, std::exchange(current_device, index(device))};
  }
  c10::Device getDevice() const override { return {kPretend, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index(device) < device_count(), "pretend: there is no device ", int(index(device)));
    current_device = index(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index(device); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream(current_stream[index(device)], index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(0, index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& lines = timelines();
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    const int64_t id = lines.make();
    lines.clocks[id] = lines.seen_by(timeline_of(0, index(device)));  // what came before it was made is not tracked
    lines.side_streams.push_back(id);
    return stream(id, index(device));
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current_stream[next.device_index()], next.id()), next.device_index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    count_sync("synchronize device");
    if (auto callback = drain.load()) TORCH_CHECK(callback() == 0, "pretend: a collective under way failed");
    auto& lines = timelines();
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    lines.raise_fault();
    for (size_t i = 0; i < lines.clocks.size(); i++) lines.host_waits(Clock(lines.seen_by(static_cast<int64_t>(i))));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    count_sync("synchronize stream");
    auto& lines = timelines();
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    lines.host_waits(Clock(lines.seen_by(timeline(s))));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto& lines = timelines();
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    *of(*event) = {lines.seen_by(timeline(s)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    auto& lines = timelines();
    std::lock_guard<std::recursive_mutex> guard(lines.mutex);
    merge(lines.seen_by(timeline(s)), of(event)->clock);
  }
  void synchronizeEvent(void* event) const override {
    count_sync("synchronize event");
    if (event != nullptr) timelines().host_waits(of(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr && slow && !timelines().host_knows(of(event)->clock)) return false;
    if (event != nullptr) timelines().host_waits(of(event)->clock);  // the host knows then
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete of(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(of(to)->time - of(from)->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- collectives, as timelines see them

at::Tensor host_alias(const at::Tensor& t) { return as_cpu(t); }

// A collective is launched behind the current stream; returns its number on the communicator's timeline. A part of
// what is written may also be read in place, and may be read meanwhile.
int64_t begin(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, int64_t timeline,
              const std::string& name) {
  auto& lines = timelines();
  std::lock_guard<std::recursive_mutex> guard(lines.mutex);
  const auto& any = reads.empty() ? writes : reads;
  const int64_t stream = current_timeline(any.empty() ? current_device : any[0].device().index());
  lines.raise_fault();
  for (const auto& t : reads) touch(t, false, stream, name);
  for (const auto& t : writes) touch(t, true, stream, name);
  merge(lines.clocks[timeline], lines.seen_by(stream));
  const int64_t tick = lines.advance(timeline);
  auto add = [&](uintptr_t from, uintptr_t to, bool write, const at::Tensor& t) {
    if (from < to) lines.accesses.push_back({from, to, write, timeline, tick, name, {t.storage()}, nullptr});
  };
  for (const auto& t : reads) add(extent(t).begin, extent(t).end, false, t);
  for (const auto& t : writes) {
    auto [from, to] = extent(t);
    for (const auto& r : reads) {
      const auto own = extent(r);
      if (from <= own.begin && own.end <= to && to - from > own.end - own.begin) {
        add(from, own.begin, true, t);
        from = own.end;
      }
    }
    add(from, to, true, t);
  }
  return tick;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // CPUs and GPUs have a kernel of each. Without an entry here torch would compose them of other operators, which
  // launches more of them and rounds otherwise.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY(pretend, m) {
  m.def("host_alias(Tensor x) -> Tensor", host_alias);
  m.def("begin(Tensor[] reads, Tensor[] writes, int timeline, str name) -> int",
        [](std::vector<at::Tensor> reads, std::vector<at::Tensor> writes, int64_t timeline, std::string name) {
          return begin(reads, writes, timeline, name);
        });
}

extern "C" {
int64_t pretend_host_syncs() { return host_syncs; }
int64_t pretend_operators() { return operators; }
int64_t pretend_bytes_to_device() { return bytes_to_device; }
int64_t pretend_bytes_to_host() { return bytes_to_host; }
void pretend_count_sync(const char* cause) { count_sync(cause); }
void pretend_on_sync(SyncCallback callback) { on_sync = callback; }
void pretend_on_drain(DrainCallback callback) { drain = callback; }
void pretend_be_slow(bool yes) { slow = yes; }
void pretend_limit_memory(int64_t bytes) { memory.limit = bytes; }
int pretend_device_count() { return device_count(); }
int pretend_current_device() { return current_device; }
int64_t pretend_new_timeline() { return timelines().make(); }
// The device's current stream comes after what the timeline did up to the tick. The work, which has kept its tensors until
// now, lets go of them, as NCCL's does.
void pretend_stream_waits(int64_t timeline, int64_t tick) {
  auto& lines = timelines();
  std::vector<c10::Storage> released;  // last, once the clock is set and the lock is open
  std::lock_guard<std::recursive_mutex> guard(lines.mutex);
  auto& clock = lines.seen_by(current_timeline(current_device));
  if (clock.size() <= static_cast<size_t>(timeline)) clock.resize(timeline + 1, 0);
  clock[timeline] = std::max(clock[timeline], tick);
  for (auto& access : lines.accesses)
    if (access.timeline == timeline && access.tick <= tick)
      std::move(access.kept.begin(), access.kept.end(), std::back_inserter(released)), access.kept.clear();
  lines.settle();
}
// The host knows that what the timeline did up to the tick is done.
void pretend_host_waits(int64_t timeline, int64_t tick) {
  Clock clock(timeline + 1, 0);
  clock[timeline] = tick;
  timelines().host_waits(clock);
}
}
