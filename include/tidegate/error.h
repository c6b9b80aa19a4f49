// One way to say no: check(condition, "<op>: <tensor>: expected ..., got ...").
//
// Every public function checks all of its arguments before it writes anything, and throws
// tidegate::Error when one of them is wrong. The parts of the message are put together only then.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "tidegate/tensor.h"

namespace tidegate {

// std::invalid_argument, because bindings already know how to translate that (ValueError in Python).
// A message that says "expected dtype" is about a type; the Python layer raises it as TypeError.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Message parts. Shape(t) prints "[2, 3]", DType prints "bfloat16".
struct Shape {
  const TensorView& tensor;
};

namespace detail {
void append(std::string& out, std::string_view text);
void append(std::string& out, double value);
void append(std::string& out, DType value);
void append(std::string& out, Shape value);
void append(std::string& out, std::int64_t value);
template <class T>
  requires std::is_integral_v<T>
void append(std::string& out, T value) {
  append(out, static_cast<std::int64_t>(value));
}
}  // namespace detail

template <class... Parts>
void check(bool ok, const Parts&... parts) {
  if (ok) [[likely]] {
    return;
  }
  std::string message;
  (detail::append(message, parts), ...);
  throw Error(message);
}

}  // namespace tidegate
