// Streams of a simulated accelerator: threads that do their work in order and late.
#pragma once
#include <torch/extension.h>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace sim {
constexpr auto KIND = c10::DeviceType::PrivateUse1;

// A thread's work and what waits for it.  `given` counts works, `done` those that have ended.
class Stream {
 public:
  explicit Stream(c10::StreamId id);
  uint64_t give(std::function<void()> work);
  void wait_here(uint64_t until);  // blocks a stream's own thread, which reports errors itself
  void synchronize(uint64_t until);  // blocks the host, and raises a kernel's error
  void synchronize();
  bool has_done(uint64_t count);
  uint64_t given_count();
  const c10::StreamId id;

 private:
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t given_ = 0, done_ = 0;
  std::string error_;
  std::mt19937 random_;
};

Stream& stream(c10::StreamId id);
Stream& current();
c10::StreamId current_id();
c10::StreamId new_stream();
void synchronize_all();

// The host's view of a tensor's memory.  It does not keep the memory alive, as a kernel does not.
at::Tensor host_view(const at::Tensor& tensor);
bool is_here(const at::Tensor& tensor);

void bind_collectives(pybind11::module_& module);
}  // namespace sim
