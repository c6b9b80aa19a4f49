// What the operators' benchmarks share: aligned tensors of random numbers, one benchmark for each instruction set.
#pragma once

#include <benchmark/benchmark.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "base/element.h"
#include "tidegate/cpu.h"
#include "tidegate/tensor.h"

namespace tidegate {

// Values in [-1, 1). Every page is written, so no timing contains a page fault.
class BenchTensor {
 public:
  BenchTensor(DType dtype, std::initializer_list<std::int64_t> sizes) : view_(contiguous(nullptr, dtype, sizes)) {
    data_.reset(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes()), kLine)));
    view_.data = data_.get();
    std::uint32_t state = 1;
    for (std::int64_t i = 0; i < view_.numel(); ++i) {
      state = state * 1664525u + 1013904223u;
      write_element(view_, i, static_cast<double>(state >> 8) * 0x1p-23 - 1.0);
    }
  }
  operator const TensorView&() const { return view_; }  // NOLINT: stands for its view in every operator call
  std::int64_t bytes() const { return view_.numel() * dtype_bytes(view_.dtype); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kLine); }
  };
  TensorView view_;
  std::unique_ptr<char, Free> data_;
};

inline bool register_for_every_isa(const std::string& name, void (*run)(benchmark::State&, Isa)) {
  for (const Isa isa : available_isas()) {
    benchmark::RegisterBenchmark((name + "/" + std::string(isa_name(isa))).c_str(), run, isa)
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
  }
  return true;
}

}  // namespace tidegate
