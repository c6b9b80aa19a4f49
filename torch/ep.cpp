// Expert parallelism for Python: buffers and handles are numbers there. Contract: include/tidegate/ep.h.
//
// A namespace of their own: these have a state and wait for other processes, so they are neither traced nor faked.
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "adapter.h"

namespace tidegate::adapter {
namespace {

// Objects by number. Numbers are not used again.
template <class T>
class Registry {
 public:
  std::int64_t add(T object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(++last_, std::move(object));
    return last_;
  }
  T get(std::string_view what, std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(number);
    check(found != objects_.end(), "ep: ", what, ": expected an open one, got number ", number);
    return found->second;
  }
  void remove(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    objects_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, T> objects_;
  std::int64_t last_ = 0;
};
Registry<std::shared_ptr<ep::Buffer>> buffers;
Registry<ep::HandlePtr> handles;

template <class T>
Tensor tensor_of(const std::vector<T>& list, std::vector<std::int64_t> sizes, ScalarType type) {
  Tensor t = empty(std::move(sizes), type);
  if (!list.empty()) {
    std::memcpy(t.mutable_data_ptr(), list.data(), list.size() * sizeof(T));
  }
  return t;
}

// numbers: experts, slots, max_tokens, row_bytes, zero, copy and const experts, rank, ranks
std::int64_t open(std::vector<std::int64_t> numbers, std::vector<std::int64_t> expert_begin, std::string name,
                  double timeout_seconds, std::string node_id) {
  check(numbers.size() == 9, "ep_buffer: numbers: expected 9, got ", numbers.size());
  ep::Config c;
  c.name = std::move(name);
  c.experts = numbers[0];
  c.slots = numbers[1];
  c.max_tokens = numbers[2];
  c.row_bytes = numbers[3];
  c.zero_experts = numbers[4];
  c.copy_experts = numbers[5];
  c.const_experts = numbers[6];
  c.expert_begin = std::move(expert_begin);
  c.timeout_seconds = timeout_seconds;
  c.node_id = std::move(node_id);
  return buffers.add(std::make_shared<ep::Buffer>(c, static_cast<int>(numbers[7]), static_cast<int>(numbers[8])));
}

Tensor address(std::int64_t buffer) {
  const std::string text = buffers.get("buffer", buffer)->address();
  const auto bytes = static_cast<std::int64_t>(text.size());
  return tensor_of(std::vector<char>(text.begin(), text.end()), {bytes}, ScalarType::Char);
}

// addresses int8 [ranks, bytes]
void connect(std::int64_t buffer, Tensor addresses) {
  const TensorView a = dense("ep_buffer", "addresses", addresses);
  check(a.rank == 2 && a.dtype == DType::kI8, "ep_buffer: addresses: expected int8 [ranks, bytes], got ", Shape{a});
  std::vector<std::string> list;
  for (std::int64_t r = 0; r < a.sizes[0]; ++r) {
    list.emplace_back(a.as<const char>() + r * a.strides[0], static_cast<std::size_t>(a.sizes[1]));
  }
  buffers.get("buffer", buffer)->connect(list);
}

void close_buffer(std::int64_t buffer) { buffers.remove(buffer); }
void free_handle(std::int64_t handle) { handles.remove(handle); }
std::int64_t window_bytes(std::int64_t buffer) {
  const auto b = buffers.get("buffer", buffer);
  return ep::window_bytes(b->config(), b->ranks());
}
std::string node_name(std::string configured) { return ep::node_id(configured); }
Tensor waited(std::int64_t buffer) {
  const auto list = buffers.get("buffer", buffer)->waited_microseconds();
  return tensor_of(list, {static_cast<std::int64_t>(list.size())}, ScalarType::Long);
}

void poison(std::int64_t buffer, std::string why) { buffers.get("buffer", buffer)->poison(why); }

// Runs a call of all ranks. What it throws reaches the others also where no exchange has begun, or one is over.
template <class F>
auto collective(std::int64_t buffer, F body) {
  const auto b = buffers.get("buffer", buffer);
  try {
    return body(*b);
  } catch (const std::exception& e) {
    b->poison(e.what());
    throw;
  }
}

ep::DispatchOptions dispatch_options(std::string_view op, const Optional& weights, const Optional& mask, bool int8,
                                     bool needs_backward, const Optional& x_scale = std::nullopt,
                                     const Optional& smooth_scale = std::nullopt) {
  ep::DispatchOptions o;
  o.x_scale = view(op, "x_scale", x_scale);
  o.smooth_scale = view(op, "smooth_scale", smooth_scale);
  o.weights = view(op, "weights", weights);
  o.mask = view(op, "mask", mask);
  o.int8 = int8;
  o.needs_backward = needs_backward;
  return o;
}

// The handle, how many rows came, and how many a tensor of them has.
std::tuple<std::int64_t, std::int64_t, std::int64_t> dispatch(std::int64_t buffer, Tensor x, Tensor ids,
                                                              Optional weights, Optional mask, bool int8,
                                                              bool needs_backward, Optional x_scale,
                                                              Optional smooth_scale, bool static_shape,
                                                              std::int64_t static_tokens) {
  constexpr std::string_view op = "ep_dispatch";
  const ep::HandlePtr h = collective(buffer, [&](ep::Buffer& b) {
    ep::DispatchOptions o = dispatch_options(op, weights, mask, int8, needs_backward, x_scale, smooth_scale);
    o.static_shape = static_shape;
    o.static_tokens = static_tokens;
    return b.dispatch(dense(op, "x", x), view(op, "ids", ids), o);
  });
  return {handles.add(h), h->rows, h->shape_rows};
}
void redispatch(std::int64_t buffer, Tensor x, std::int64_t handle) {
  collective(buffer, [&](ep::Buffer& b) { b.dispatch(dense("ep_dispatch", "x", x), *handles.get("handle", handle)); });
}

std::tuple<Tensor, Tensor> expand(std::int64_t buffer, std::int64_t handle, std::int64_t width, ScalarType dtype,
                                  Optional smooth_scale) {
  const ep::HandlePtr h = handles.get("handle", handle);
  const bool int8 = dtype == ScalarType::Char;
  Tensor rows = empty({h->shape_rows, width}, dtype);
  Tensor scales = empty({int8 ? h->shape_rows : 0}, ScalarType::Float);
  buffers.get("buffer", buffer)
      ->expand(*h, view("ep_expand", "out", rows), int8 ? view("ep_expand", "scales", scales) : TensorView{},
               view("ep_expand", "smooth_scale", smooth_scale));
  return {rows, scales};
}

void expand_out(std::int64_t buffer, std::int64_t handle, Tensor out) {
  buffers.get("buffer", buffer)->expand(*handles.get("handle", handle), view("ep_expand", "out", out));
}

// A view of the window, which must not outlive the buffer.
Tensor window(std::int64_t buffer, std::int64_t rows, std::int64_t width, ScalarType dtype) {
  const TensorView v =
      buffers.get("buffer", buffer)->window_rows(rows, width, dtype_of("ep_window_rows", "dtype", dtype));
  const std::int64_t sizes[] = {rows, width};
  const std::int64_t strides[] = {v.strides[0], 1};
  return torch::stable::from_blob(v.data, {sizes, 2}, {strides, 2}, torch::headeronly::DeviceType::CPU, dtype);
}

// What is known of the received rows: how many each local expert has, the local expert and the weight of each, where it
// came from; and of my pairs: the rank and the row there; tokens of every rank; my ids. Rows of a static shape behind
// those that came have expert, rank and pair -1 and weight 0.
using Description = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Description describe(std::int64_t handle) {
  const ep::HandlePtr h = handles.get("handle", handle);
  const auto count = static_cast<std::int64_t>(h->expert_rows.size());
  std::vector<std::int32_t> expert;
  for (std::size_t e = 0; e < h->expert_rows.size(); ++e) {
    expert.insert(expert.end(), static_cast<std::size_t>(h->expert_rows[e]), static_cast<std::int32_t>(e));
  }
  std::vector<float> weights = h->row_weights;
  weights.resize(static_cast<std::size_t>(h->rows), 1.0f);
  weights.resize(static_cast<std::size_t>(h->shape_rows), 0.0f);
  const auto of_rows = [&](std::vector<std::int32_t> list, std::vector<std::int64_t> sizes) {
    list.resize(static_cast<std::size_t>(h->shape_rows), -1);
    return tensor_of(list, std::move(sizes), ScalarType::Int);
  };
  return {tensor_of(h->expert_rows, {count}, ScalarType::Long),
          of_rows(std::move(expert), {h->shape_rows, 1}),
          tensor_of(weights, {h->shape_rows, 1}, ScalarType::Float),
          of_rows(h->row_rank, {h->shape_rows}),
          of_rows(h->row_pair, {h->shape_rows}),
          tensor_of(h->rank, {h->tokens, h->slots}, ScalarType::Int),
          tensor_of(h->place, {h->tokens, h->slots}, ScalarType::Int),
          tensor_of(h->source_tokens, {static_cast<std::int64_t>(h->source_tokens.size())}, ScalarType::Long),
          tensor_of(h->ids, {h->tokens, h->slots}, ScalarType::Int)};
}

std::tuple<Tensor, Tensor> combine(std::int64_t buffer, Optional y, std::int64_t handle, bool weighted,
                                   Optional weights, Optional shared_x, Optional row_values, Optional ori_x,
                                   Optional alpha1, Optional alpha2, Optional v, bool needs_backward) {
  constexpr std::string_view op = "ep_combine";
  return collective(buffer, [&](ep::Buffer& b) {
    const ep::HandlePtr h = handles.get("handle", handle);
    const TensorView yv = dense(op, "y", y);
    ep::CombineOptions o;
    o.weighted = weighted;
    o.weights = view(op, "weights", weights);
    o.shared_x = dense(op, "shared_x", shared_x);
    o.row_values = view(op, "row_values", row_values);
    o.ori_x = dense(op, "ori_x", ori_x);
    o.alpha1 = view(op, "alpha1", alpha1);
    o.alpha2 = view(op, "alpha2", alpha2);
    o.v = dense(op, "v", v);
    o.needs_backward = needs_backward;
    const ScalarType type = yv.defined() ? scalar_type(yv.dtype) : ScalarType::Float;
    Tensor out = yv.rank == 2 ? empty({h->tokens, yv.sizes[1]}, type) : nothing(type);
    Tensor values =
        o.row_values.defined() ? empty({h->tokens, h->slots}, ScalarType::Float) : nothing(ScalarType::Float);
    if (o.row_values.defined()) {
      o.pair_values = view(op, "pair_values", values);
    }
    b.combine(yv, *h, yv.defined() ? view(op, "out", out) : TensorView{}, o);
    return std::tuple<Tensor, Tensor>{out, values};
  });
}

Tensor collect(std::int64_t buffer, Tensor y, std::int64_t handle) {
  return collective(buffer, [&](ep::Buffer& b) {
    const ep::HandlePtr h = handles.get("handle", handle);
    const TensorView yv = dense("ep_collect", "y", y);
    Tensor out = empty({h->tokens * h->slots, yv.rank == 2 ? yv.sizes[1] : 0}, scalar_type(yv.dtype));
    b.collect(yv, *h, view("ep_collect", "out", out));
    return out;
  });
}

// The whole layer without gradients: experts read the rows where the other ranks left them, and write their results
// where the other ranks look for them.
Tensor experts(std::int64_t buffer, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down,
               std::string weight_axes, Optional shared_x, Optional alpha1, Optional alpha2, Optional v) {
  constexpr std::string_view op = "ep_experts";
  return collective(buffer, [&](ep::Buffer& b) {
    const TensorView xv = dense(op, "x", x);
    Tensor out = empty_like(xv);
    const ep::HandlePtr h =
        b.dispatch(xv, view(op, "ids", ids), dispatch_options(op, Optional(weights), std::nullopt, false, false));
    const std::vector<const void*> rows = b.row_pointers(*h);
    std::vector<std::int32_t> expert;
    for (std::size_t e = 0; e < h->expert_rows.size(); ++e) {
      expert.insert(expert.end(), static_cast<std::size_t>(h->expert_rows[e]), static_cast<std::int32_t>(e));
    }
    const std::vector<float> ones(static_cast<std::size_t>(h->rows), 1.0f);
    MoeExpertsInputs in{};
    in.x = contiguous(rows.empty() ? nullptr : rows[0], xv.dtype, {h->rows, xv.sizes[1]});
    in.x_rows = rows.data();
    in.ids = contiguous(expert.data(), DType::kI32, {h->rows, 1});
    in.weights = contiguous(ones.data(), DType::kF32, {h->rows, 1});
    in.gate_up = view(op, "gate_up", gate_up);
    in.down = view(op, "down", down);
    const TensorView y = b.window_rows(h->rows, xv.sizes[1], xv.dtype);
    moe_experts_fwd(in, y, {parse_weight_axes(op, weight_axes), false, ExpertIds::kPlain, true});
    ep::CombineOptions o;
    o.shared_x = dense(op, "shared_x", shared_x);
    o.ori_x = xv;
    o.alpha1 = view(op, "alpha1", alpha1);
    o.alpha2 = view(op, "alpha2", alpha2);
    o.v = dense(op, "v", v);
    b.combine(y, *h, view(op, "out", out), o);
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(tidegate_ep, m) {
  m.def("open(int[] numbers, int[] expert_begin, str name, float timeout_seconds, str node_id) -> int");
  m.def("address(int buffer) -> Tensor");
  m.def("connect(int buffer, Tensor addresses) -> ()");
  m.def("close(int buffer) -> ()");
  m.def("poison(int buffer, str why) -> ()");
  m.def("free_handle(int handle) -> ()");
  m.def("window_bytes(int buffer) -> int");
  m.def("node_id(str configured) -> str");
  m.def("waited(int buffer) -> Tensor");
  m.def(
      "dispatch(int buffer, Tensor x, Tensor ids, Tensor? weights, Tensor? mask, bool int8, bool needs_backward, "
      "Tensor? x_scale, Tensor? smooth_scale, bool static_shape, int static_tokens) -> (int, int, int)");
  m.def("redispatch(int buffer, Tensor x, int handle) -> ()");
  m.def("expand(int buffer, int handle, int width, ScalarType dtype, Tensor? smooth_scale) -> (Tensor, Tensor)");
  m.def("expand_out(int buffer, int handle, Tensor(a!) out) -> ()");
  m.def("window(int buffer, int rows, int width, ScalarType dtype) -> Tensor");
  m.def("describe(int handle) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "combine(int buffer, Tensor? y, int handle, bool weighted, Tensor? weights, Tensor? shared_x, "
      "Tensor? row_values, Tensor? ori_x, Tensor? alpha1, Tensor? alpha2, Tensor? v, bool needs_backward) -> "
      "(Tensor, Tensor)");
  m.def("collect(int buffer, Tensor y, int handle) -> Tensor");
  m.def(
      "experts(int buffer, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, str weight_axes, "
      "Tensor? shared_x, Tensor? alpha1, Tensor? alpha2, Tensor? v) -> Tensor");
}

// Some take no tensor, so no backend key would find them.
STABLE_TORCH_LIBRARY_IMPL(tidegate_ep, CompositeExplicitAutograd, m) {
  m.impl("open", TORCH_BOX(&open));
  m.impl("address", TORCH_BOX(&address));
  m.impl("connect", TORCH_BOX(&connect));
  m.impl("close", TORCH_BOX(&close_buffer));
  m.impl("poison", TORCH_BOX(&poison));
  m.impl("free_handle", TORCH_BOX(&free_handle));
  m.impl("window_bytes", TORCH_BOX(&window_bytes));
  m.impl("node_id", TORCH_BOX(&node_name));
  m.impl("waited", TORCH_BOX(&waited));
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("redispatch", TORCH_BOX(&redispatch));
  m.impl("expand", TORCH_BOX(&expand));
  m.impl("expand_out", TORCH_BOX(&expand_out));
  m.impl("window", TORCH_BOX(&window));
  m.impl("describe", TORCH_BOX(&describe));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("collect", TORCH_BOX(&collect));
  m.impl("experts", TORCH_BOX(&experts));
}

}  // namespace tidegate::adapter
