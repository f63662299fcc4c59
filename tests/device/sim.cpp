// A device of torch's kind PrivateUse1 on host memory, which behaves like a card:
//   streams    threads; each kernel starts after a random delay (FCDP_SIM_DELAY_US, FCDP_SIM_SEED)
//   memory     belongs to the stream that allocated it.  Freed memory is overwritten with NaN in that stream's
//              order and in no other's, so use without order shows in the numbers.  The host cannot read it: code
//              that does, as Gloo's all-gather, dies of SIGSEGV
//   copies     to or from pageable host memory block the host, as CUDA's do; registered memory does not
//   kernels    the CPU's, queued with addresses alone
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <set>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::StreamId;

static int from_environment(const char* name, int otherwise) {
  const char* found = std::getenv(name);
  return found ? atoi(found) : otherwise;
}

// --- streams -----------------------------------------------------------------------------------------------

Stream::Stream(StreamId id) : id(id), random_(id + 17 + from_environment("FCDP_SIM_SEED", 0)) {
  std::thread([this] { loop(); }).detach();
}

uint64_t Stream::give(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
  return ++given_;
}

void Stream::loop() {
  static const int delay_us = from_environment("FCDP_SIM_DELAY_US", 0);
  at::NoGradGuard no_grad;
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    if (delay_us) usleep(random_() % delay_us);
    std::string error;
    try {
      work();
    } catch (const std::exception& found) {
      error = found.what();
    }
    work = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = error;
    ++done_;
    changed_.notify_all();
  }
}

void Stream::wait_here(uint64_t until) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= until; });
}

void Stream::synchronize(uint64_t until) {
  // A work that ends may need the interpreter, to free what it held.
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= until; });
  if (error_.empty()) return;
  std::string error = std::exchange(error_, "");
  lock.unlock();
  TORCH_CHECK(false, "a kernel of the simulated device failed: ", error);
}

void Stream::synchronize() { synchronize(given_count()); }

uint64_t Stream::given_count() {
  std::lock_guard<std::mutex> lock(mutex_);
  return given_;
}

bool Stream::has_done(uint64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= count;
}

static std::mutex streams_mutex;
static std::map<StreamId, Stream*> streams;  // never freed: their threads never end
static StreamId last_stream = 0;
static thread_local StreamId current_stream = 0;

Stream& stream(StreamId id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto& found = streams[id];
  if (!found) found = new Stream(id);
  return *found;
}

Stream& current() { return stream(current_stream); }
StreamId current_id() { return current_stream; }

StreamId new_stream() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return ++last_stream;
}

void synchronize_all() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (auto& [id, found] : streams) all.push_back(found);
  }
  for (auto* found : all) found->synchronize();
}

// --- memory of the device ----------------------------------------------------------------------------------

// The memory is mapped twice: at the addresses of the device, which nobody may read, and at those of kernels.
constexpr size_t ADDRESSES = size_t(1) << 40;

static char* mapped_memory(int protection) {
  static const int file = memfd_create("sim", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, ADDRESSES) == 0, "no memory for the simulated device");
  void* found = mmap(nullptr, ADDRESSES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(found != MAP_FAILED, "no addresses for the simulated device");
  madvise(found, ADDRESSES, MADV_DONTDUMP);  // a core file would have a terabyte
  return static_cast<char*>(found);
}

static char* device_memory() {
  static char* const found = mapped_memory(PROT_NONE);
  return found;
}

// Where kernels find an address of the device; an address of the host is the same for them.
static void* in_kernels(const void* address) {
  static char* const found = mapped_memory(PROT_READ | PROT_WRITE);
  size_t place = uintptr_t(address) - uintptr_t(device_memory());
  return place < ADDRESSES ? found + place : const_cast<void*>(address);
}

struct Block {
  void* address;
  size_t bytes;
  StreamId owner;
};

static std::mutex memory_mutex;
static std::map<std::pair<StreamId, size_t>, std::vector<void*>> free_blocks;
static size_t used_bytes = 0, peak_bytes = 0, aside_bytes = 0, mapped_bytes = 0;

static size_t total_bytes() {
  static const size_t found = size_t(from_environment("FCDP_SIM_MEMORY_MB", 4096)) << 20;
  return found;
}

static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (void* address = block->address) {
    size_t bytes = block->bytes;
    stream(block->owner).give([address, bytes] { memset(in_kernels(address), 0xff, bytes); });
    std::lock_guard<std::mutex> lock(memory_mutex);
    free_blocks[{block->owner, bytes}].push_back(address);
    used_bytes -= bytes;
  }
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    size_t bytes = (asked + 511) / 512 * 512;
    void* address = nullptr;
    bool is_new = false;
    if (bytes) {
      std::lock_guard<std::mutex> lock(memory_mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, used_bytes + bytes <= total_bytes(), "the simulated device is out of memory");
      auto& found = free_blocks[{current_stream, bytes}];
      if (!found.empty()) {
        address = found.back();
        found.pop_back();
      } else {
        address = device_memory() + std::exchange(mapped_bytes, mapped_bytes + bytes);
        is_new = true;
        TORCH_CHECK(mapped_bytes <= ADDRESSES, "the simulated device has no addresses left");
      }
      used_bytes += bytes;
      peak_bytes = std::max(peak_bytes, used_bytes);
      if (current_stream) aside_bytes += bytes;  // memory that the first stream never gets
    }
    if (is_new) memset(in_kernels(address), 0xff, bytes);
    return {address, new Block{address, bytes, current_stream}, &free_block, Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(in_kernels(to), in_kernels(from), bytes);
  }
};

static DeviceAllocator* allocator() {
  static auto* found = new DeviceAllocator();
  return found;
}

// --- registered memory of the host -------------------------------------------------------------------------

static std::mutex registered_mutex;
static std::map<uintptr_t, size_t> registered;

static bool is_registered(const void* address) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  auto found = registered.upper_bound(uintptr_t(address));
  if (found == registered.begin()) return false;
  --found;
  return uintptr_t(address) < found->first + found->second;
}

static void register_host(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  registered[address] = bytes;
}

static void unregister_host(uintptr_t address) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  registered.erase(address);
}

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* address) {
    // As torch's allocator of pinned memory: it is free when the streams have done what they were given.
    unregister_host(uintptr_t(address));
    auto left = std::make_shared<std::atomic<int>>(0);
    std::vector<Stream*> all;
    {
      std::lock_guard<std::mutex> lock(streams_mutex);
      for (auto& [id, found] : streams) all.push_back(found);
    }
    if (all.empty()) return free(address);
    left->store(int(all.size()));
    for (auto* found : all)
      found->give([left, address] {
        if (--*left == 0) free(address);
      });
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    if (bytes) {
      TORCH_CHECK(posix_memalign(&address, 512, bytes) == 0);
      register_host(uintptr_t(address), bytes);
    }
    return {address, address, bytes ? &drop : [](void*) {}, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// --- events and the guard ----------------------------------------------------------------------------------

struct Event {
  Stream* stream = nullptr;
  uint64_t at = 0;
  std::shared_ptr<std::atomic<double>> time_s = std::make_shared<std::atomic<double>>(0.0);
};

static double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(KIND, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream made(StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(Device) const override { return made(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return made(0); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return made(new_stream()); }
  c10::Stream getNewStream(Device, int) const override { return made(new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return made(std::exchange(current_stream, s.id()));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* made = static_cast<Event*>(*event);
    made->stream = &stream(s.id());
    made->time_s = std::make_shared<std::atomic<double>>(0.0);
    made->at = made->stream->give([time_s = made->time_s] { *time_s = now_s(); });
  }
  void block(void* event, const c10::Stream& s) const override {
    auto* found = static_cast<Event*>(event);
    auto* mine = &stream(s.id());
    if (!found || !found->stream || mine == found->stream) return;
    mine->give([other = found->stream, at = found->at] { other->wait_here(at); });
  }
  bool queryEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    return !found || !found->stream || found->stream->has_done(found->at);
  }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found && found->stream) found->stream->synchronize(found->at);
  }
  bool queryStream(const c10::Stream& s) const override {
    auto& found = stream(s.id());
    return found.has_done(found.given_count());
  }
  void synchronizeStream(const c10::Stream& s) const override { stream(s.id()).synchronize(); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize_all(); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    synchronizeEvent(begin);
    synchronizeEvent(end);
    return 1e3 * (*static_cast<Event*>(end)->time_s - *static_cast<Event*>(begin)->time_s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The device's generators, which are the CPU's but for this.  They live for ever.
static std::set<at::Generator, bool (*)(const at::Generator&, const at::Generator&)>& generators() {
  static std::set<at::Generator, bool (*)(const at::Generator&, const at::Generator&)> found(
      [](const at::Generator& one, const at::Generator& other) {
        return one.unsafeGetGeneratorImpl() < other.unsafeGetGeneratorImpl();
      });
  return found;
}

static at::Generator& generator() {
  static at::Generator found = at::detail::createCPUGenerator(0);
  generators().insert(found);
  return found;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_registered(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* found = new PinnedAllocator();
    return found;
  }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, 0); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    auto made = at::detail::createCPUGenerator(0);
    generators().insert(made);
    return made;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocator()->allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    void* to = in_kernels(fresh.get());
    const void* from = in_kernels(storage.data());
    if (kept) current().give([to, from, kept] { memcpy(to, from, kept); });
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// --- kernels -----------------------------------------------------------------------------------------------

static std::atomic<long> kernels{0}, blocking_kernels{0}, pageable_copies{0};
static std::mutex blocking_mutex;
static std::map<std::string, long> blocking_names;

at::Tensor host_view(const at::Tensor& t) {
  c10::InferenceMode off(false);  // a stream's thread writes, whatever mode the host is in
  return at::from_blob(
      in_kernels(t.unsafeGetTensorImpl()->mutable_data()), t.sizes(), t.strides(),
      at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

template <class F>
static c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (at::Tensor t : value.toTensorList()) found.push_back(f(t));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList())
      found.push_back(t ? std::optional<at::Tensor>(f(*t)) : t);
    return found;
  }
  return value;
}

static at::Tensor on_meta(const at::Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
}
static at::Tensor on_host(const at::Tensor& t) { return is_here(t) ? host_view(t) : t; }
static at::Tensor like(const at::Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(Device(KIND, 0))) : t;
}

static bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Arguments of an operator, on another device.  The device's own generator stands in for none.
static torch::jit::Stack given_on(
    Device device, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& args) {
  torch::jit::Stack found;
  bool is_host = device.is_cpu();
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& kind = *schema.arguments()[i].type();
    TORCH_CHECK(
        !args[i].isGenerator() || generators().count(args[i].toGenerator()),
        "Expected a 'sim' device type for generator but found 'cpu'");
    if (args[i].isDevice()) found.emplace_back(device);
    else if (is_host && args[i].isNone() && kind.str() == "Generator?") found.emplace_back(generator());
    else found.push_back(mapped(args[i], is_host ? on_host : on_meta));
  }
  return found;
}

// The argument that an operator returns as a result because it has written to it; none for a new result.
static const c10::IValue* written_as(
    const c10::FunctionSchema& schema, size_t result, const std::vector<c10::IValue>& args) {
  const auto* alias = schema.returns()[result].alias_info();
  if (!alias) return nullptr;
  for (size_t i = 0; i < args.size(); ++i)
    if (is_written(schema.arguments()[i]) &&
        schema.arguments()[i].alias_info()->beforeSets() == alias->beforeSets())
      return &args[i];
  return nullptr;
}

static const at::Tensor& resized(
    const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> = {}) {
  int64_t bytes =
      at::detail::computeStorageNbytesContiguous(size, t.dtype().itemsize(), t.storage_offset());
  if (int64_t(t.storage().nbytes()) < bytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

// Kernels of the CPU may resize what they write to, so `out=` gets the values from tensors of their own.
static void make_results(const c10::FunctionSchema& schema, torch::jit::Stack& given) {
  c10::InferenceMode off(false);
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (is_written(argument) && argument.kwarg_only() && given[i].isTensor())
      given[i] = at::empty({0}, given[i].toTensor().options());
  }
}

// A card keeps a layer norm's statistics in fp32; kernels of the CPU want them in the dtype of all else.
static void lower_statistics(const c10::OperatorHandle& op, torch::jit::Stack& args) {
  if (op.operator_name().name != "aten::native_layer_norm_backward") return;
  auto dtype = args[1].toTensor().scalar_type();
  if (args[5].isTensor() && args[5].toTensor().defined() && args[5].toTensor().scalar_type() != dtype) return;
  for (int i : {3, 4}) args[i] = args[i].toTensor().to(dtype);
}

static void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  try {
    lower_statistics(op, *stack);
    op.callBoxed(stack);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, c10::toString(op.operator_name()), ": ", error.what());
  }
}

// For an operator of whose results nothing is known before it has run: on the stream's thread, awaited.
static void run_blocking(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& args, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  ++blocking_kernels;
  {
    std::lock_guard<std::mutex> lock(blocking_mutex);
    ++blocking_names[c10::toString(op.operator_name())];
  }
  auto found = std::make_shared<torch::jit::Stack>(given_on(at::kCPU, schema, args));
  make_results(schema, *found);
  current().give([found, &op] { call(op, found.get()); });
  current().synchronize();
  for (size_t i = 0; i < found->size(); ++i) {
    if (const auto* argument = written_as(schema, i, args)) {
      if (argument->isTensor() && (*found)[i].toTensor().data_ptr() != in_kernels(argument->toTensor().data_ptr()))
        host_view(resized(argument->toTensor(), (*found)[i].toTensor().sizes())).copy_((*found)[i].toTensor());
      stack->push_back(*argument);
      continue;
    }
    stack->push_back(mapped((*found)[i], [](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto made = like(t);
      host_view(made).copy_(t);
      return made;
    }));
  }
}

// Run an operator on meta, for the shapes of its results; false if that is not possible.
static bool on_meta(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& args, torch::jit::Stack& results,
    torch::jit::Stack& given) {
  results = given_on(at::kMeta, op.schema(), args);
  given.assign(results.begin(), results.end());
  try {
    op.callBoxed(&results);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  std::vector<c10::IValue> args(stack->end() - parameters.size(), stack->end());
  torch::jit::drop(*stack, args.size());
  bool has_out = false, has_new = false;
  for (const auto& parameter : parameters) has_out |= is_written(parameter) && parameter.kwarg_only();
  for (const auto& result : schema.returns()) has_new |= !result.alias_info();
  torch::jit::Stack meta, given;
  std::vector<c10::IValue> results;
  if (has_new) {
    if (!on_meta(op, args, meta, given)) return run_blocking(op, args, stack);
    for (const auto& value : meta)
      if (!value.isTensor() && !value.isTensorList()) return run_blocking(op, args, stack);
  } else if (has_out) {
    if (!on_meta(op, args, meta, given)) return run_blocking(op, args, stack);
    for (size_t i = 0; i < args.size(); ++i) {
      if (!is_written(parameters[i]) || !args[i].isTensor() || !is_here(args[i].toTensor())) continue;
      auto size = given[i].toTensor().sizes();
      if (args[i].toTensor().sizes() != size) resized(args[i].toTensor(), size);
    }
  }
  torch::jit::Stack cpu = given_on(at::kCPU, schema, args);
  make_results(schema, cpu);
  std::vector<c10::IValue> into;  // for each result: where its values go, if they are not there already
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* argument = written_as(schema, i, args);
    results.push_back(argument ? *argument : mapped(meta[i], like));
    into.push_back(argument && !has_out ? c10::IValue() : mapped(results.back(), on_host));
  }
  ++kernels;
  current().give([op, cpu = std::move(cpu), into = std::move(into)]() mutable {
    call(op, &cpu);
    for (size_t i = 0; i < into.size(); ++i) {
      if (into[i].isTensorList()) {
        auto to = into[i].toTensorList(), from = cpu[i].toTensorList();
        for (size_t k = 0; k < to.size(); ++k) to.get(k).copy_(from.get(k));
      } else if (into[i].isTensor() && into[i].toTensor().defined() && cpu[i].toTensor().defined()) {
        into[i].toTensor().copy_(cpu[i].toTensor());
      }
    }
  });
  for (auto& value : results) stack->push_back(std::move(value));
}

static c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch asks a device like this one for convolutions of its own.
static void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  fallback(operator_named("aten::convolution"), keys, stack);
}

static void convolution_backward(
    const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  stack->insert(stack->end() - 7, c10::IValue());  // the sizes of the bias
  fallback(operator_named("aten::convolution_backward"), keys, stack);
}

// Cards count integers; the CPU's kernel does not.
static void histc(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::IValue& counted = *(stack->end() - 4);
  counted = counted.toTensor().to(at::kFloat);
  fallback(op, keys, stack);
}

static at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(dtype));
}

static at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const at::Tensor* on_host_side = !is_here(self) ? &self : !is_here(to) ? &to : nullptr;
  at::Tensor source = on_host(self), result = on_host(to);
  if (!on_host_side) {
    current().give([source, result]() mutable { result.copy_(source); });
    return to;
  }
  bool is_pinned = is_registered(on_host_side->storage().data());
  if (non_blocking && !is_pinned) ++pageable_copies;
  // A copy does not keep the host's memory alive either.
  (is_here(self) ? result : source) = host_view(*on_host_side);
  current().give([source, result]() mutable { result.copy_(source); });
  if (!non_blocking || !is_pinned) current().synchronize();
  return to;
}

static at::Scalar item(const at::Tensor& t) {
  at::Scalar found;
  current().give([&found, view = host_view(t)] { found = view.item(); });
  current().synchronize();
  return found;
}

static void record_stream(at::Tensor& t, c10::Stream s) {
  // As the caching allocator: the block is not reused before the other stream has come here.
  auto storage = std::make_shared<c10::Storage>(t.storage());
  stream(s.id()).give([storage] {});
}

static at::Tensor& set_storage(
    at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}

static at::Tensor& set_whole_storage(at::Tensor& t, at::Storage storage) {
  int64_t count = storage.nbytes() / t.dtype().itemsize();
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {count}, {});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resized);
  m.impl("record_stream", record_stream);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
}
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(sim::KIND, sim::allocator());
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks());
  m.def("register_host", &sim::register_host);
  m.def("unregister_host", &sim::unregister_host);
  m.def("synchronize", [] {
    pybind11::gil_scoped_release released;
    sim::synchronize_all();
  });
  m.def("memory", [] {
    std::lock_guard<std::mutex> lock(sim::memory_mutex);
    return std::map<std::string, size_t>{
        {"used", sim::used_bytes},
        {"peak", sim::peak_bytes},
        {"aside", sim::aside_bytes},
        {"total", sim::total_bytes()}};
  });
  m.def("reset_peak", [] {
    std::lock_guard<std::mutex> lock(sim::memory_mutex);
    sim::peak_bytes = sim::used_bytes;
  });
  m.def("counts", [] {
    return std::map<std::string, long>{
        {"kernels", sim::kernels},
        {"blocking_kernels", sim::blocking_kernels},
        {"pageable_copies", sim::pageable_copies}};
  });
  m.def("blocking_names", [] {
    std::lock_guard<std::mutex> lock(sim::blocking_mutex);
    return sim::blocking_names;
  });
  // Kernels draw when they run, so those that were given before must have run.
  m.def("seed", [](uint64_t seed) {
    sim::synchronize_all();
    sim::generator().set_current_seed(seed);
  });
  m.def("rng_state", [] {
    sim::synchronize_all();
    return sim::generator().get_state();
  });
  m.def("set_rng_state", [](const at::Tensor& state) {
    sim::synchronize_all();
    sim::generator().set_state(state);
  });
  sim::bind_collectives(m);
}
