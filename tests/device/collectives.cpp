// Collectives of the simulated device: Gloo's, run by the stream that they were given to.
//
// As with NCCL: the host does not wait; collectives of a group run in the order in which they were issued, on
// whatever stream; only so many run at once (FCDP_SIM_RESIDENT), as kernels of collectives hold processors
// until their peers come, so ranks that issue groups in different orders hang.  Every rank keeps a log of what it
// has issued, which the tests compare.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>

#include "sim.h"

namespace sim {
using Tensors = std::vector<at::Tensor>;
using Given = c10::intrusive_ptr<c10d::Work>;

static std::mutex log_mutex;
static std::vector<std::string> issued;  // "group operation elements", with the group's name on all ranks
static std::atomic<int> failing{-1}, stalling{-1}, stall_ms{0};  // collectives until one fails or stalls

// At most so many collectives at once.
class Residents {
 public:
  void enter() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return left_ > 0; });
    --left_;
  }
  void leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++left_;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = std::getenv("FCDP_SIM_RESIDENT") ? atoi(std::getenv("FCDP_SIM_RESIDENT")) : 8;
};

static Residents& residents() {
  static auto* found = new Residents();
  return *found;
}

// A collective that was issued: `wait` lets the current stream wait, and frees what it held.
class Issued final : public c10d::Work {
 public:
  Issued(Stream& on, uint64_t at, Tensors held, bool blocks)
      : on_(on), at_(at), held_(std::move(held)), blocks_(blocks) {}
  bool isCompleted() override { return on_.has_done(at_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    if (blocks_) on_.synchronize(at_);
    else synchronize();
    return true;
  }
  void synchronize() override {
    auto& mine = current();
    if (&mine != &on_) mine.give([this_on = &on_, at = at_] { this_on->wait_here(at); });
    held_.clear();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto found = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    on_.synchronize(at_);
    found->markCompleted();
    return found;
  }

 private:
  Stream& on_;
  uint64_t at_;
  Tensors held_;
  bool blocks_;
};

// The order in which the collectives of a group were issued.
struct Order {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t next = 0, turn = 0;
};

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, std::string id)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), id_(std::move(id)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("simccl");
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  Given broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto view = host_view(only(tensors));
    return issue("broadcast", tensors, options.asyncOp, [=, this]() mutable {
      Tensors sent{as_bytes(view)};
      gloo_->broadcast(sent, options)->wait();
      from_bytes(view, sent[0]);
    });
  }

  Given allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto view = host_view(only(tensors));
    return issue("allreduce", tensors, options.asyncOp, [=, this]() mutable {
      view.copy_(reduced(view, options.reduceOp));
    });
  }

  Given allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Tensors views;
    for (auto& t : tensors) views.push_back(host_view(t));
    return issue("allreduce", tensors, options.asyncOp, [=, this]() mutable {
      for (auto& view : views) view.copy_(reduced(view, options.reduceOp));
    });
  }

  Given reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto view = host_view(only(tensors));
    return issue("reduce", tensors, options.asyncOp, [=, this]() mutable {
      auto found = reduced(view, options.reduceOp);
      if (getRank() == options.rootRank) view.copy_(found);
    });
  }

  Given _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(out.numel() == in.numel() * getSize(), "an all-gather's output has a part for each rank");
    auto to = host_view(out), from = host_view(in);
    return issue("allgather", {out, in}, options.asyncOp, [=, this]() mutable { gathered(to, from); });
  }

  Given allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    Tensors to, from, held = outs;
    for (auto& t : outs) to.push_back(host_view(t));
    for (auto& t : ins) from.push_back(host_view(t)), held.push_back(t);
    return issue("allgather", held, options.asyncOp, [=, this]() mutable {
      for (size_t i = 0; i < to.size(); ++i) gathered(to[i], from[i]);
    });
  }

  Given allgather(
      std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    Tensors to, held = outs.at(0);
    for (auto& t : outs[0]) to.push_back(host_view(t));
    auto from = host_view(only(ins));
    held.push_back(ins[0]);
    return issue("allgather", held, options.asyncOp, [=, this]() mutable {
      auto all = at::empty({getSize(), from.numel()}, from.options());
      gathered(all, from);
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(all[i].view_as(to[i]));
    });
  }

  Given gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    Tensors to, held = ins;
    if (!outs.empty())
      for (auto& t : outs[0]) to.push_back(host_view(t)), held.push_back(t);
    auto from = host_view(only(ins));
    return issue("gather", held, options.asyncOp, [=, this]() mutable {
      auto all = at::empty({getSize(), from.numel()}, from.options());
      gathered(all, from);
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(all[i].view_as(to[i]));
    });
  }

  Given scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    auto to = host_view(only(outs));
    Tensors from, held = outs;
    if (!ins.empty())
      for (auto& t : ins[0]) from.push_back(host_view(t)), held.push_back(t);
    return issue("scatter", held, options.asyncOp, [=, this]() mutable {
      auto all = at::empty({getSize(), to.numel()}, to.options());
      for (size_t i = 0; i < from.size(); ++i) all[i].copy_(from[i].flatten());
      c10d::BroadcastOptions from_root;
      from_root.rootRank = options.rootRank;
      Tensors sent{as_bytes(all)};
      gloo_->broadcast(sent, from_root)->wait();
      from_bytes(all, sent[0]);
      to.copy_(all[getRank()].view_as(to));
    });
  }

  Given _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "a reduce-scatter's input has a part for each rank");
    auto to = host_view(out), from = host_view(in);
    return issue("reduce_scatter", {out, in}, options.asyncOp, [=, this]() mutable {
      scattered(to, from, options.reduceOp);
    });
  }

  Given reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    Tensors to, from, held = outs;
    for (auto& t : outs) to.push_back(host_view(t));
    for (auto& t : ins) from.push_back(host_view(t)), held.push_back(t);
    return issue("reduce_scatter", held, options.asyncOp, [=, this]() mutable {
      for (size_t i = 0; i < to.size(); ++i) scattered(to[i], from[i], options.reduceOp);
    });
  }

  Given reduce_scatter(
      Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    auto to = host_view(only(outs));
    Tensors from, held = outs;
    for (auto& t : ins.at(0)) from.push_back(host_view(t)), held.push_back(t);
    return issue("reduce_scatter", held, options.asyncOp, [=, this]() mutable {
      Tensors flat;
      for (auto& t : from) flat.push_back(t.flatten());
      scattered(to, at::cat(flat), options.reduceOp);
    });
  }

  Given alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = host_view(out), from = host_view(in);
    return issue("alltoall", {out, in}, options.asyncOp, [=, this]() mutable {
      auto rows = [](const at::Tensor& t) {
        auto bytes = as_bytes(t);
        return t.dim() && t.size(0) ? bytes.view({t.size(0), -1}) : bytes;
      };
      at::Tensor sent = rows(from), got = rows(to);
      std::vector<int64_t> got_sizes = out_sizes, sent_sizes = in_sizes;
      gloo_->alltoall_base(got, sent, got_sizes, sent_sizes, options)->wait();
      from_bytes(to, got);
    });
  }

  Given send(Tensors& tensors, int peer, int tag) override {
    auto view = host_view(only(tensors));
    return between("send", tensors, peer, [=, this]() mutable {
      Tensors sent{as_bytes(view)};
      gloo_->send(sent, peer, tag)->wait();
    });
  }

  Given recv(Tensors& tensors, int peer, int tag) override {
    auto view = host_view(only(tensors));
    return between("recv", tensors, peer, [=, this]() mutable {
      Tensors got{as_bytes(view)};
      gloo_->recv(got, peer, tag)->wait();
      from_bytes(view, got[0]);
    });
  }

  Given barrier(const c10d::BarrierOptions& options) override {
    auto given = issue("barrier", {}, true, [=, this] { gloo_->barrier(options)->wait(); }, true);
    if (!options.asyncOp) given->wait();
    return given;
  }

 private:
  static at::Tensor& only(Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1 && is_here(tensors[0]), "this group sends one tensor of its device");
    TORCH_CHECK(tensors[0].is_contiguous(), "this group sends contiguous tensors");
    return tensors[0];
  }

  // A copy of a tensor's bytes: Gloo knows few dtypes, and its threads may not touch the device's memory.
  static at::Tensor as_bytes(const at::Tensor& t) {
    return t.contiguous().clone().view(-1).view(at::kByte);
  }
  static void from_bytes(at::Tensor to, const at::Tensor& bytes) {
    to.copy_(bytes.view(-1).view(to.scalar_type()).view_as(to));
  }

  void gathered(at::Tensor to, const at::Tensor& from) {
    if (!from.numel()) return;
    at::Tensor sent = as_bytes(from), all = at::empty({getSize() * sent.numel()}, sent.options());
    gloo_->_allgather_base(all, sent)->wait();
    from_bytes(to, all);
  }

  at::Tensor reduced(const at::Tensor& from, const c10d::ReduceOp& op) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    bool is_narrow = from.scalar_type() == at::kBFloat16 || from.scalar_type() == at::kHalf;
    Tensors sent{is_narrow ? from.to(at::kFloat) : from.clone()};
    if (from.scalar_type() == at::kBool) sent[0] = from.to(at::kByte);
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    if (sent[0].numel()) gloo_->allreduce(sent, options)->wait();
    return is_mean ? sent[0].div_(getSize()) : sent[0];
  }

  void scattered(at::Tensor to, const at::Tensor& from, const c10d::ReduceOp& op) {
    auto all = reduced(from, op).view({getSize(), -1});
    to.copy_(all[getRank()].view_as(to));
  }

  void note(const char* name, const Tensors& tensors) {
    int64_t count = 0;
    for (auto& t : tensors) count += t.numel();
    std::lock_guard<std::mutex> lock(log_mutex);
    issued.push_back(id_ + " " + name + " " + std::to_string(count));
  }

  static void disturbed() {
    if (stalling >= 0 && stalling-- == 0) std::this_thread::sleep_for(std::chrono::milliseconds(stall_ms));
    TORCH_CHECK(failing < 0 || failing-- != 0, "a collective was told to fail");
  }

  // On the current stream, or on the group's own if the caller will wait for it later, as NCCL's.
  Given issue(
      const char* name, Tensors held, bool is_async, std::function<void()> act, bool blocks = false) {
    note(name, held);
    auto& here = current();
    auto& on = is_async ? stream(own_) : here;
    if (&on != &here)
      on.give([here = &here, at = here.given_count()] { here->wait_here(at); });
    uint64_t ticket = order_->next++;
    auto at = on.give([act = std::move(act), order = order_, ticket] {
      {
        std::unique_lock<std::mutex> lock(order->mutex);
        order->changed.wait(lock, [&] { return order->turn == ticket; });
      }
      residents().enter();
      std::exception_ptr error;
      try {
        disturbed();
        act();
      } catch (...) {
        error = std::current_exception();
      }
      residents().leave();
      {
        std::lock_guard<std::mutex> lock(order->mutex);
        ++order->turn;
        order->changed.notify_all();
      }
      if (error) std::rethrow_exception(error);
    });
    if (!is_async) held.clear();
    return c10::make_intrusive<Issued>(on, at, std::move(held), blocks);
  }

  // Between two ranks: each pair and direction has a stream of its own, so that ranks may send first.
  Given between(const char* name, Tensors held, int peer, std::function<void()> act) {
    note(name, held);
    auto found = pairs_.try_emplace({peer, name[0]}, 0).first;
    if (!found->second) found->second = new_stream();
    auto &here = current(), &on = stream(found->second);
    on.give([here = &here, at = here.given_count()] { here->wait_here(at); });
    auto at = on.give(std::move(act));
    return c10::make_intrusive<Issued>(on, at, std::move(held), false);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string id_;
  c10::StreamId own_ = new_stream();
  std::shared_ptr<Order> order_ = std::make_shared<Order>();
  std::map<std::pair<int, char>, c10::StreamId> pairs_;
};

void bind_collectives(pybind11::module_& m) {
  m.def("make_group", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string id) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(std::move(gloo), std::move(id)));
  });
  m.def("issued", [] {
    std::lock_guard<std::mutex> lock(log_mutex);
    return issued;
  });
  m.def("fail_after", [](int count) { failing = count; });
  m.def("stall_after", [](int count, int milliseconds) {
    stall_ms = milliseconds;
    stalling = count;
  });
}
}  // namespace sim
