// An emulated accelerator: torch's PrivateUse1 device "emulated", whose kernels are those of the CPU.
//
// Memory     one file in memory, mapped twice: tensors hold addresses that nobody may touch (PROT_NONE); kernels run on the
//            second mapping. A caching allocator with a pool for each stream, last in first out, and a limit.
// Streams    threads. Every kernel and every copy is put into the current stream's queue; the host runs ahead. What needs a
//            value or a shape that depends on data (item, nonzero, random numbers) waits for the stream, as on a GPU.
// Delays     seconds that each copy or kernel takes longer, settable by stream, so that a missing wait shows.
// Exit       `shutdown` lets the streams finish and joins their threads; what is put into a stream later is dropped.
// Mixing     a CPU tensor with dimensions beside a device tensor is an error, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace emulated {
using c10::DeviceIndex;
using c10::StreamId;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t ARENA = size_t(1) << 38, GRAIN = 512, MAX_DEVICES = 4;
int devices = 2;
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------- streams and events
struct Unlocked {  // a thread that waits must not hold Python's lock: tasks may need it to let go of an object
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Unlocked() {
    if (state) PyEval_RestoreThread(state);
  }
};
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double time = 0;
  void set() {
    std::lock_guard<std::mutex> lock(mutex);
    time = now();
    done = true;
    changed.notify_all();
  }
  void wait() {
    Unlocked unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};
using EventPtr = std::shared_ptr<Event>;

struct Queue {  // a stream
  std::mutex mutex;
  std::condition_variable wake, idle;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  double copy_delay = 0, compute_delay = 0;
  std::string error;
  bool stopped = false;
  std::thread thread{[this] { run(); }};
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        busy = false;
        if (tasks.empty()) idle.notify_all();
        wake.wait(lock, [&] { return stopped || !tasks.empty(); });
        if (tasks.empty()) return;
        task = std::move(tasks.front());
        tasks.pop_front();
        busy = true;
      }
      try {
        task();
      } catch (const std::exception& caught) {
        std::lock_guard<std::mutex> lock(mutex);
        if (error.empty()) error = caught.what();
      }
      task = nullptr;
    }
  }
  void stop() {
    Unlocked unlocked;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (std::exchange(stopped, true)) return;
      wake.notify_one();
    }
    thread.join();
  }
  // Its thread begins once somebody asks how far it is, or so many tasks are there: to wake it costs more than a small kernel.
  static constexpr size_t ENOUGH = 32;
  void put(std::function<void()> task, bool at_once = false) {
    std::lock_guard<std::mutex> lock(mutex);
    if (stopped) return;
    tasks.push_back(std::move(task));
    if (at_once || tasks.size() >= ENOUGH) wake.notify_one();
  }
  void drain() {
    Unlocked unlocked;
    std::unique_lock<std::mutex> lock(mutex);
    idle.wait(lock, [&] {
      wake.notify_one();  // each time: another thread may have put something since the last task was done
      return tasks.empty() && !busy;
    });
    if (!error.empty()) {
      std::string what;
      std::swap(what, error);
      lock.unlock();
      throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 1, "emulated device error: " + what);
    }
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    wake.notify_one();
    return tasks.empty() && !busy;
  }
};

std::mutex queues_mutex;
std::map<std::pair<DeviceIndex, StreamId>, Queue*> queues;
Queue& queue_of(DeviceIndex device, StreamId id) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& queue = queues[{device, id}];
  if (!queue) queue = new Queue();
  return *queue;
}
std::vector<Queue*> queues_of(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : queues)
    if (key.first == device) found.push_back(queue);
  return found;
}
thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, MAX_DEVICES> current_stream{};
StreamId next_stream = 1;
Queue& current_queue(DeviceIndex device) { return queue_of(device, current_stream[device]); }
void synchronize(DeviceIndex device) {
  for (auto* queue : queues_of(device)) queue->drain();
}
EventPtr mark(Queue& queue) {
  auto event = std::make_shared<Event>();
  if (queue.stopped) event->set();
  queue.put([event] { event->set(); }, true);
  return event;
}
void pause(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < devices, "emulated device: invalid device ordinal ", int(d.index()));
    if (d.has_index()) current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current_device = d.index();
  }
  DeviceIndex at(c10::Device d) const { return d.has_index() ? d.index() : current_device; }
  c10::Stream stream(DeviceIndex d, StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, {KIND, d}, id); }
  c10::Stream getStream(c10::Device d) const override { return stream(at(d), current_stream[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(at(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    std::lock_guard<std::mutex> lock(queues_mutex);
    return stream(at(d), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr();
    *static_cast<EventPtr*>(*event) = mark(queue_of(s.device_index(), s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    auto waited = *static_cast<EventPtr*>(event);
    queue_of(s.device_index(), s.id()).put([waited] { waited->wait(); }, true);
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<EventPtr*>(event))->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<EventPtr*>(event))->wait();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto &a = *static_cast<EventPtr*>(first), &b = *static_cast<EventPtr*>(second);
    TORCH_CHECK(a->query() && b->query(), "emulated device: both events must be completed");
    return (b->time - a->time) * 1e3;
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  bool queryStream(const c10::Stream& s) const override { return queue_of(s.device_index(), s.id()).query(); }
  void synchronizeStream(const c10::Stream& s) const override { queue_of(s.device_index(), s.id()).drain(); }
  void synchronizeDevice(const DeviceIndex d) const override { synchronize(d < 0 ? current_device : d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override;
};

// ---------------------------------------------------------------- device memory
char *device_base = nullptr, *host_base = nullptr;
int arena_file = -1;
void map_arena() {
  if (device_base) return;
  arena_file = memfd_create("emulated", 0);
  TORCH_CHECK(arena_file >= 0 && ftruncate(arena_file, ARENA) == 0, "emulated device: no file in memory");
  device_base = static_cast<char*>(mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED | MAP_NORESERVE, arena_file, 0));
  host_base = static_cast<char*>(mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena_file, 0));
  TORCH_CHECK(device_base != MAP_FAILED && host_base != MAP_FAILED, "emulated device: mmap failed");
}
char* seen_by_kernels(const void* p) {
  auto* c = const_cast<char*>(static_cast<const char*>(p));
  return c >= device_base && c < device_base + ARENA ? host_base + (c - device_base) : c;
}

struct Block {
  char* p;
  size_t size;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> used_by;
  std::vector<EventPtr> pending;
};
struct DeviceMemory {
  std::map<std::pair<StreamId, size_t>, std::vector<char*>> cached;
  std::map<size_t, std::vector<char*>> released;
  std::vector<Block> waiting;  // freed, but other streams may still be at work on it
  size_t limit = size_t(64) << 30, cached_bytes = 0;
  int64_t fail_after = -1;  // this many allocations from now on one fails; -1: none
  c10::CachingDeviceAllocator::DeviceStats stats;
};
struct Mutex : std::recursive_mutex {  // who waits for it has let go of Python's lock: its holder may be waiting for that in `drain`
  void lock() {
    if (try_lock()) return;
    Unlocked unlocked;
    std::recursive_mutex::lock();
  }
};
struct Allocator final : c10::DeviceAllocator {
  Mutex mutex;
  std::array<DeviceMemory, MAX_DEVICES> memory;
  std::map<char*, Block> blocks;
  size_t top = 0;
  bool poison = true;
  bool initialized() override { return true; }
  static void remove(void* p);
  void refresh(DeviceMemory& m) {
    for (size_t i = 0; i < m.waiting.size();) {
      auto& b = m.waiting[i];
      bool done = std::all_of(b.pending.begin(), b.pending.end(), [](auto& e) { return e->query(); });
      if (!done) { ++i; continue; }
      cache(m, b);
      m.waiting.erase(m.waiting.begin() + i);
    }
  }
  void cache(DeviceMemory& m, const Block& b) {
    m.cached[{b.stream, b.size}].push_back(b.p);
    m.cached_bytes += b.size;
  }
  void release(DeviceIndex device) {  // all that is cached
    auto& m = memory[device];
    synchronize(device);
    refresh(m);
    for (auto& [key, list] : m.cached)
      for (char* p : list) {
        fallocate(arena_file, 3, p - device_base, key.second);  // FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        m.released[key.second].push_back(p);
        m.stats.reserved_bytes[0].decrease(key.second);
      }
    m.cached.clear();
    m.cached_bytes = 0;
  }
  c10::DataPtr allocate(size_t n) override {
    DeviceIndex d = current_device;
    c10::Device device(KIND, d);
    if (n == 0) return {nullptr, nullptr, &remove, device};
    map_arena();
    size_t size = (n + GRAIN - 1) / GRAIN * GRAIN;
    StreamId s = current_stream[d];
    std::lock_guard<Mutex> lock(mutex);
    auto& m = memory[d];
    bool fail = m.fail_after >= 0 && m.fail_after-- == 0;
    refresh(m);
    char* p = nullptr;
    auto& list = m.cached[{s, size}];
    if (!fail && !list.empty()) {
      p = list.back();
      list.pop_back();
      m.cached_bytes -= size;
    } else {
      if (fail || size_t(m.stats.reserved_bytes[0].current) + size > m.limit) {
        ++m.stats.num_alloc_retries;
        release(d);
      }
      if (fail || size_t(m.stats.reserved_bytes[0].current) + size > m.limit) {
        ++m.stats.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated device out of memory. Tried to allocate ", n, " bytes; ",
                         m.stats.allocated_bytes[0].current, " of ", m.limit, " are allocated.");
      }
      auto& gone = m.released[size];
      if (!gone.empty()) {
        p = gone.back();
        gone.pop_back();
      } else {
        TORCH_CHECK(top + size <= ARENA, "emulated device: the arena is used up");
        p = device_base + top;
        top += size;
      }
      m.stats.reserved_bytes[0].increase(size);
      if (poison) memset(seen_by_kernels(p), 0xff, size);
    }
    blocks[p] = Block{p, size, d, s, {}, {}};
    m.stats.allocated_bytes[0].increase(size);
    m.stats.allocation[0].increase(1);
    return {p, p, &remove, device};
  }
  void free(char* p) {
    std::lock_guard<Mutex> lock(mutex);
    auto it = blocks.find(p);
    if (it == blocks.end()) return;
    Block b = it->second;
    blocks.erase(it);
    auto& m = memory[b.device];
    m.stats.allocated_bytes[0].decrease(b.size);
    m.stats.allocation[0].decrease(1);
    for (auto id : b.used_by)
      if (id != b.stream) b.pending.push_back(mark(queue_of(b.device, id)));
    if (!b.pending.empty()) {
      m.waiting.push_back(b);
      return;
    }
    if (poison) queue_of(b.device, b.stream).put([b] { memset(seen_by_kernels(b.p), 0xff, b.size); });
    cache(m, b);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &remove; }
  void copy_data(void* to, const void* from, size_t n) const override {
    synchronize(current_device);
    memcpy(seen_by_kernels(to), seen_by_kernels(from), n);
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<Mutex> lock(mutex);
    release(current_device);
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream s) override {
    std::lock_guard<Mutex> lock(mutex);
    auto it = blocks.find(static_cast<char*>(ptr.get()));
    if (it != blocks.end()) it->second.used_by.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<Mutex> lock(mutex);
    auto s = memory[d].stats;
    s.active_bytes = s.requested_bytes = s.allocated_bytes;
    return s;
  }
  void resetAccumulatedStats(DeviceIndex d) override {}
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<Mutex> lock(mutex);
    memory[d].stats.allocated_bytes[0].reset_peak();
    memory[d].stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<Mutex> lock(mutex);
    auto& m = memory[d];
    size_t reserved = m.stats.reserved_bytes[0].current;
    return {m.limit > reserved ? m.limit - reserved : 0, m.limit};
  }
};
Allocator& allocator() {
  static auto* it = new Allocator();
  return *it;
}
void Allocator::remove(void* p) {
  if (p) allocator().free(static_cast<char*>(p));
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const { allocator().recordStream(p, s); }

// ---------------------------------------------------------------- pinned host memory
struct HostBlock {
  size_t size;
  std::vector<EventPtr> events;
};
struct PinnedAllocator final : at::HostAllocator {
  std::mutex mutex;
  std::map<char*, HostBlock> blocks;                  // in use
  std::map<size_t, std::vector<std::pair<char*, HostBlock>>> freed;
  static void remove(void* p);
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &remove, c10::Device(c10::kCPU)};
    size_t size = (n + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(mutex);
    auto& list = freed[size];
    for (size_t i = list.size(); i-- > 0;) {
      auto& events = list[i].second.events;
      if (!std::all_of(events.begin(), events.end(), [](auto& e) { return e->query(); })) continue;
      char* p = list[i].first;
      list.erase(list.begin() + i);
      blocks[p] = {size, {}};
      return {p, p, &remove, c10::Device(c10::kCPU)};
    }
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, size) == 0, "emulated device: no host memory");
    memset(p, 0xff, size);
    blocks[static_cast<char*>(p)] = {size, {}};
    return {p, p, &remove, c10::Device(c10::kCPU)};
  }
  std::map<char*, HostBlock>::iterator find(const void* p) {
    auto* c = static_cast<char*>(const_cast<void*>(p));
    auto it = blocks.upper_bound(c);
    if (it == blocks.begin()) return blocks.end();
    --it;
    return c < it->first + it->second.size ? it : blocks.end();
  }
  bool holds(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    return find(p) != blocks.end();
  }
  void used(const void* p, EventPtr event) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = find(p);
    if (it != blocks.end()) it->second.events.push_back(event);
  }
  bool record_event(void* ptr, void*, c10::Stream s) override {
    used(ptr, mark(queue_of(s.device_index(), s.id())));
    return true;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &remove; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator& pinned() {
  static auto* it = new PinnedAllocator();
  return *it;
}
void PinnedAllocator::remove(void* p) {
  auto& self = pinned();
  std::lock_guard<std::mutex> lock(self.mutex);
  auto it = self.blocks.find(static_cast<char*>(p));
  if (it == self.blocks.end()) return;
  self.freed[it->second.size].push_back({it->first, it->second});
  self.blocks.erase(it);
}

// ---------------------------------------------------------------- generators and hooks
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) : at::CPUGeneratorImpl() {
    device_ = c10::Device(KIND, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < int(MAX_DEVICES); ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*all)[index < 0 ? current_device : index];
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  bool isPinnedPtr(const void* p) const override { return pinned().holds(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator().allocate(size);
    auto* to = seen_by_kernels(fresh.get());
    auto* from = seen_by_kernels(storage.data());
    size_t n = std::min(size, storage.nbytes());
    if (n) current_queue(current_device).put([=] { memcpy(to, from, n); });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---------------------------------------------------------------- kernels: the CPU's
bool here(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }
at::Tensor view_of(const at::Tensor& t) {  // the same memory as a CPU tensor; keeps nothing alive
  auto* base = seen_by_kernels(t.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(base, c10::Device(c10::kCPU)),
                       nullptr, false);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  r._set_conj(t.is_conj());
  r._set_neg(t.is_neg());
  return r;
}
at::Tensor device_like(const at::Tensor& t, c10::Device device) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
}
const std::set<std::string> MAY_MIX = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                       "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};

struct Call {
  const c10::OperatorHandle& op;
  c10::Device device;
  std::vector<at::Tensor> given, seen;  // tensors of the device or the CPU as given, and as kernels see them
  bool async = true;

  Call(const c10::OperatorHandle& op, c10::Device device) : op(op), device(device) {}
  at::Tensor convert(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (here(t)) {
      TORCH_CHECK(t.device() == device || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
                  device, " and ", t.device(), "! (", op.schema().name(), ")");
      if (t.device() != device) current_queue(t.device().index()).drain();
      given.push_back(t);
      seen.push_back(view_of(t));
      return seen.back();
    }
    TORCH_CHECK(t.dim() == 0 || MAY_MIX.count(c10::toString(op.operator_name())) || t.is_meta(),
                "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", t.device(),
                "! (", op.schema().name(), ")");
    auto copy = t.clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  c10::IValue convert(const c10::IValue& v) {
    if (v.isTensor()) return convert(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(convert(t));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(convert(*t)) : std::nullopt);
      return list;
    }
    if (v.isDevice() && v.toDevice().type() == KIND) return c10::Device(c10::kCPU);
    return v;
  }
};
at::Tensor meta_of(const at::Tensor& t) {
  if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
}
c10::IValue meta_of(const c10::IValue& v) {
  if (v.isTensor()) return meta_of(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(meta_of(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      list.push_back(t.has_value() ? std::optional<at::Tensor>(meta_of(*t)) : std::nullopt);
    return list;
  }
  if (v.isDevice()) return c10::Device(c10::kMeta);
  return v;
}
void to_each(const c10::IValue& v, const std::function<void(const at::Tensor&)>& f) {
  if (v.isTensor()) f(v.toTensor());
  if (v.isTensorList())
    for (const at::Tensor& t : v.toTensorVector()) f(t);
  if (v.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      if (t.has_value()) f(*t);
}
bool shape_known(const c10::FunctionSchema& schema) {
  for (auto& r : schema.returns()) {
    auto kind = r.type()->kind();
    bool list = kind == c10::TypeKind::ListType && r.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) return false;
  }
  return true;
}
// The argument that a result is (in place, or out), -1 if it is a new tensor.
int which_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return -1;
  TORCH_CHECK(result.alias_info()->isWrite(), "emulated device: ", schema.name(), " returns a view and has no kernel of its own");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* info = schema.arguments()[i].alias_info();
    if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets()) return int(i);
  }
  TORCH_CHECK(false, "emulated device: ", schema.name(), " returns an argument that is not found");
}

// What an operator's meta kernel says of such arguments: its results, and the arguments that it has written to. Most meta
// kernels are Python's, and take longer than all else that the device does; a step asks the same thousands of times.
struct Shapes {
  bool known = false;
  std::vector<c10::IValue> results, args;
};
template <class T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}
bool append_to(std::string& key, const c10::IValue& v) {  // false: of a kind that is not told apart here
  key += char('A' + (v.isNone() ? 0 : v.isTensor() ? 1 : v.isBool() ? 2 : v.isInt() ? 3 : v.isDouble() ? 4 : v.isIntList() ? 5
                     : v.isBoolList() ? 6 : v.isDevice() ? 7 : v.isString() ? 8 : v.isTensorList() || v.isOptionalTensorList() ? 9 : 10));
  if (v.isNone()) return true;
  if (v.isBool()) { append(key, v.toBool()); return true; }
  if (v.isInt()) { append(key, v.toInt()); return true; }
  if (v.isDouble()) { append(key, v.toDouble()); return true; }
  if (v.isDevice()) return true;  // this one
  if (v.isString()) { append(key, v.toStringRef().size()); key += v.toStringRef(); return true; }
  if (v.isIntList()) { auto list = v.toIntVector(); append(key, list.size()); for (auto i : list) append(key, i); return true; }
  if (v.isBoolList()) { auto list = v.toBoolList(); append(key, list.size()); for (bool b : list) append(key, b); return true; }
  if (v.isTensor()) {
    const auto& t = v.toTensor();
    append(key, t.defined());
    if (!t.defined()) return true;
    append(key, t.scalar_type());
    append(key, t.unsafeGetTensorImpl()->is_wrapped_number());
    append(key, t.dim());
    for (auto i : t.sizes()) append(key, i);
    for (auto i : t.strides()) append(key, i);
    return !t.is_conj() && !t.is_neg();
  }
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    append(key, list.size());
    return std::all_of(list.begin(), list.end(), [&](const at::Tensor& t) { return append_to(key, t); });
  }
  if (v.isOptionalTensorList()) {
    auto list = v.toOptionalTensorVector();
    append(key, list.size());
    return std::all_of(list.begin(), list.end(), [&](const std::optional<at::Tensor>& t) { return append_to(key, t ? c10::IValue(*t) : c10::IValue()); });
  }
  return false;
}
Shapes shapes_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& cpu) {
  static auto* mutex = new std::mutex();
  static auto* remembered = new std::map<std::string, Shapes>();
  std::string key = c10::toString(op.operator_name());
  append(key, c10::typeMetaToScalarType(c10::get_default_dtype()));
  append(key, at::globalContext().deterministicAlgorithms());
  const bool told = std::all_of(cpu.begin(), cpu.end(), [&](const c10::IValue& v) { return append_to(key, v); });
  if (told) {
    std::lock_guard<std::mutex> lock(*mutex);
    auto it = remembered->find(key);
    if (it != remembered->end()) return it->second;
  }
  Shapes found;
  try {
    for (const auto& v : cpu) found.args.push_back(meta_of(v));
    found.results = found.args;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &found.results);
    found.known = true;
  } catch (const std::exception&) {  // no meta kernel; or a mistake, which the kernel reports again
  }
  if (told) {
    std::lock_guard<std::mutex> lock(*mutex);
    remembered->emplace(key, found);
  }
  return found;
}

// As on a GPU: the storage grows in the stream; the CPU's own `resize_` would copy what it holds on the host.
const at::Tensor& resized(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> format = std::nullopt) {
  auto* impl = t.unsafeGetTensorImpl();
  auto before = int64_t(t.storage().nbytes());
  if (t.sizes() != size) {  // else its strides stay, as torch's do
    impl->set_sizes_contiguous(size);
    auto needed = at::detail::computeStorageNbytesContiguous(size, t.dtype().itemsize(), t.storage_offset());
    if (t.numel() > 0 && int64_t(needed) > before) Hooks().resizePrivateUse1Bytes(t.storage(), needed);
  }
  if (format) impl->empty_tensor_restride(*format);
  if (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory())
    at::native::fill_resize_deterministic_(t, before);
  return t;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  std::vector<c10::IValue> args(stack->end() - n, stack->end());
  torch::jit::drop(*stack, n);
  std::optional<c10::Device> device;
  for (auto& v : args) {
    to_each(v, [&](const at::Tensor& t) {
      if (here(t) && (!device || (t.dim() > 0))) device = device && t.dim() == 0 ? device : std::optional<c10::Device>(t.device());
    });
    if (!device && v.isDevice() && v.toDevice().type() == KIND) device = v.toDevice();
  }
  if (!device) device = c10::Device(KIND, current_device);
  if (!device->has_index()) device = c10::Device(KIND, current_device);
  c10::DeviceGuard guard(*device);
  auto& queue = current_queue(device->index());
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);

  Call call(op, *device);
  std::vector<c10::IValue> cpu;
  std::optional<at::Generator> generator;
  bool empty_out = false;
  for (size_t i = 0; i < n; ++i) {
    auto& v = args[i];
    if (v.isGenerator()) {
      generator = v.toGenerator();
      TORCH_CHECK(generator->device().type() == KIND, "Expected a 'emulated' device type for generator but found '",
                  generator->device().type(), "'");
      cpu.emplace_back();
      continue;
    }
    auto* info = schema.arguments()[i].alias_info();
    if (info && info->isWrite() && v.isTensor() && here(v.toTensor()) && schema.arguments()[i].is_out()) {
      auto t = v.toTensor();
      if (t.numel() == 0) {
        empty_out = true;
        cpu.emplace_back(at::empty({0}, t.options().device(c10::kCPU)));
        continue;
      }
    }
    cpu.push_back(call.convert(v));
  }
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded) || generator;
  bool async = !random && !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output) &&
      shape_known(schema) && !call.given.empty() && !(empty_out && schema.returns().empty());
  const Shapes found = async ? shapes_of(op, cpu) : Shapes();
  const auto& shapes = found.results;
  async = found.known;
  for (size_t i = 0; i < n && async; ++i) {
    auto* info = schema.arguments()[i].alias_info();
    if (!info || !info->isWrite() || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const auto& wanted = found.args[i].toTensor();
    auto& t = args[i].toTensor();
    if (wanted.sizes() != t.sizes()) {
      if (t.numel() != 0) { async = false; break; }
      resized(t, wanted.sizes());
    }
    if (empty_out && schema.arguments()[i].is_out()) cpu[i] = view_of(t);
  }
  if (async) empty_out = false;
  auto result_of = [&](size_t i, const c10::IValue& made, const std::function<at::Tensor(const at::Tensor&)>& make) -> c10::IValue {
    int which = which_argument(schema, schema.returns()[i]);
    if (which >= 0) return args[which];
    if (made.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : made.toTensorVector()) list.push_back(make(t));
      return list;
    }
    if (made.isTensor()) return make(made.toTensor());
    return made;
  };
  if (async) {
    std::vector<at::Tensor> targets;  // in the order of new tensors
    auto make = [&](const at::Tensor& m) {
      if (!m.defined()) {
        targets.emplace_back();
        return m;
      }
      auto t = device_like(m, *device);
      targets.push_back(view_of(t));
      return t;
    };
    std::vector<bool> fresh;
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      fresh.push_back(which_argument(schema, schema.returns()[i]) < 0);
      stack->push_back(result_of(i, shapes[i], make));
    }
    double delay = queue.compute_delay;
    queue.put([op, cpu = std::move(cpu), targets = std::move(targets), fresh = std::move(fresh), delay]() mutable {
      pause(delay);
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu);
      size_t at = 0;
      auto take = [&](const at::Tensor& t) {
        auto& target = targets[at++];
        if (!t.defined() || !target.defined()) return;
        TORCH_CHECK(t.sizes() == target.sizes() && t.dtype() == target.dtype(), "emulated device: ", op.schema().name(), " made ", t.sizes(), " ",
                    t.dtype(), ", its meta kernel ", target.sizes(), " ", target.dtype());
        target.copy_(t);
      };
      for (size_t i = 0; i < fresh.size(); ++i)
        if (fresh[i]) to_each(cpu[i], take);
    });
    return;
  }
  queue.drain();
  pause(queue.compute_delay);
  std::vector<c10::IValue> results = cpu;
  if (random) {  // the device's stream of random numbers, by way of the CPU's generator
    auto mine = generator && generator->device().type() == KIND ? *generator : default_generator(device->index());
    auto cpus = at::detail::getDefaultCPUGenerator();
    auto outer = cpus.get_state();
    cpus.set_state(mine.get_state());
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
    } catch (...) {
      cpus.set_state(outer);
      throw;
    }
    mine.set_state(cpus.get_state());
    cpus.set_state(outer);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  }
  auto make = [&](const at::Tensor& made) {
    if (!made.defined()) return made;
    auto t = device_like(made, *device);
    queue.drain();  // another thread may have freed its memory since, which is overwritten in the stream
    view_of(t).copy_(made);
    return t;
  };
  if (empty_out)
    for (size_t i = 0; i < n; ++i)
      if (schema.arguments()[i].is_out() && args[i].isTensor() && args[i].toTensor().numel() == 0) {
        auto made = cpu[i].toTensor();
        resized(args[i].toTensor(), made.sizes());
        queue.drain();  // deterministic algorithms have it fill what is new, in the stream
        view_of(args[i].toTensor()).copy_(made);
      }
  for (size_t i = 0; i < schema.returns().size(); ++i) stack->push_back(result_of(i, results[i], make));
}

// ---------------------------------------------------------------- what needs a kernel of its own
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current_device)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (to.numel() == 0) return to;
  auto device = here(to) ? to.device() : from.device();
  c10::DeviceGuard guard(device);
  auto& queue = current_queue(device.index());
  double delay = queue.copy_delay;
  if (here(from) && here(to)) {
    auto a = view_of(from), b = view_of(to);
    if (from.device() != to.device()) {  // torch's order: the target's stream waits for the source's, and the other way round
      auto& other = current_queue(from.device().index());
      auto before = mark(other);
      queue.put([before] { before->wait(); }, true);
      queue.put([=]() mutable { pause(delay); b.copy_(a.expand_as(b)); });
      auto after = mark(queue);
      other.put([after] { after->wait(); }, true);
    } else {
      delay = queue.compute_delay;
      queue.put([=]() mutable { pause(delay); b.copy_(a.expand_as(b)); });
    }
    return to;
  }
  const auto& host = here(from) ? to : from;
  bool locked = pinned().holds(host.data_ptr());
  if (here(to)) {
    auto a = locked && non_blocking && from.dtype() == to.dtype() ? from.alias() : from.clone();
    auto b = view_of(to);
    bool inside = locked && non_blocking && from.dtype() == to.dtype();
    auto raw = inside ? at::from_blob(a.data_ptr(), a.sizes(), a.strides(), a.options()) : a;  // keeps nothing alive
    queue.put([=]() mutable { pause(delay); b.copy_(raw.expand_as(b)); });
    if (inside) pinned().used(from.data_ptr(), mark(queue));
    if (!non_blocking) queue.drain();
    return to;
  }
  auto a = view_of(from);
  if (non_blocking && locked) {
    auto raw = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options());
    queue.put([=]() mutable { pause(delay); raw.copy_(a.expand_as(raw)); });
    pinned().used(to.data_ptr(), mark(queue));
    return to;
  }
  queue.drain();
  pause(delay);
  to.copy_(a.expand_as(to));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& t) {
  current_queue(t.device().index()).drain();
  return at::_local_scalar_dense(view_of(t));
}
at::Tensor as_strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
at::Tensor& set_source(at::Tensor& t, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, source, offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage source) {
  int64_t n = int64_t(source.nbytes() / t.dtype().itemsize());
  return at::native::set_storage_cpu_(t, source, 0, {n}, {});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return at::native::set_storage_cpu_(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& t) {
  c10::DeviceGuard guard(t.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return at::native::set_storage_cpu_(t, none, 0, {0}, {});
}
void record_stream(at::Tensor& t, at::Stream s) { allocator().recordStream(t.storage().data_ptr(), s); }
bool may_take_data(const at::Tensor& t, const at::Tensor& from) {  // `t.data = from`, and `Module.to`: host and device alike, as on a GPU
  return t.layout() == at::kStrided && from.layout() == at::kStrided;
}
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // plain products
}
at::Tensor on_cpu(const at::Tensor& t) { return t.defined() ? view_of(t) : t; }
at::Tensor from_cpu(const at::Tensor& t, c10::Device device) {
  if (!t.defined()) return t;
  auto made = device_like(t, device);
  current_queue(device.index()).drain();
  view_of(made).copy_(t);
  return made;
}
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef out_padding,
                       c10::SymInt groups) {
  TORCH_CHECK(here(x) && here(w) && (!bias || !bias->defined() || here(*bias)), "Expected all tensors to be on the same device");
  current_queue(x.device().index()).drain();
  at::AutoDispatchBelowADInplaceOrView below;
  auto b = bias && bias->defined() ? std::optional<at::Tensor>(view_of(*bias)) : std::nullopt;
  return from_cpu(at::convolution_symint(view_of(x), view_of(w), b, stride, padding, dilation, transposed, out_padding, groups), x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef out_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  current_queue(x.device().index()).drain();
  at::AutoDispatchBelowADInplaceOrView below;
  c10::SymInt channels = transposed ? c10::SymInt(w.size(1)) * groups : c10::SymInt(w.size(0));
  std::vector<c10::SymInt> bias{channels};
  auto [a, b, c] = at::convolution_backward_symint(view_of(g), view_of(x), view_of(w), at::OptionalSymIntArrayRef(bias), stride, padding,
                                                   dilation, transposed, out_padding, groups, mask);
  return {from_cpu(a, x.device()), from_cpu(b, x.device()), from_cpu(c, x.device())};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", may_take_data);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
using at::autocast::CastPolicy;
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGH(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HIGH_OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(HIGH)
  AT_FORALL_FP32_SET_OPT_DTYPE(HIGH_OPT)
  AT_FORALL_PROMOTE(PROMOTE)
}
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace emulated

namespace py = pybind11;
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  c10::SetAllocator(KIND, &allocator());
  at::setHostAllocator(KIND, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_devices", [](int n) { devices = n; });
  m.def("device_count", [] { return devices; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) { Guard().setDevice({KIND, DeviceIndex(d)}); });
  m.def("exchange_device", [](int d) { int old = current_device; if (d >= 0) Guard().setDevice({KIND, DeviceIndex(d)}); return old; });
  m.def("set_limit", [](int d, size_t bytes) { allocator().memory[d].limit = bytes; });
  m.def("get_limit", [](int d) { return allocator().memory[d].limit; });
  m.def("fail_after", [](int d, int64_t n) { allocator().memory[d].fail_after = n; });
  m.def("set_poison", [](bool on) { allocator().poison = on; });
  m.def("reset_ooms", [](int d) { allocator().memory[d].stats.num_ooms = 0; });
  m.def("set_delays", [](int d, int64_t stream, double copy, double compute) {
    auto& queue = queue_of(DeviceIndex(d), stream);
    queue.drain();
    queue.copy_delay = copy;
    queue.compute_delay = compute;
  }, py::call_guard<py::gil_scoped_release>());
  m.def("get_rng_state", [](int d) { return default_generator(DeviceIndex(d)).get_state(); });
  m.def("set_rng_state", [](int d, const at::Tensor& s) { at::Generator g = default_generator(DeviceIndex(d)); g.set_state(s); });
  m.def("manual_seed", [](int d, int64_t seed) { at::Generator g = default_generator(DeviceIndex(d)); g.set_current_seed(uint64_t(seed)); });
  m.def("initial_seed", [](int d) { return default_generator(DeviceIndex(d)).current_seed(); });
  m.def("shutdown", [] {
    for (DeviceIndex d = 0; d < DeviceIndex(MAX_DEVICES); ++d)
      for (auto* queue : queues_of(d)) queue->stop();
  });
}
