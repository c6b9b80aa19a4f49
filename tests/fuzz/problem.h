// A call of an operator on tensors that know where their sequences are, and everything that must hold for it.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/line.h"
#include "tidegate/seqlens.h"

namespace tidegate::fuzz {

using test::Tensor;
using test::Views;

// What part of a tensor belongs to a sequence.
enum class Span { kWhole, kTokens, kChunks, kStates };

struct Part {
  std::string name;
  Tensor tensor;  // absent: the operator is called without it
  Span span = Span::kWhole;
  int dimension = 0;  // of the tokens or chunks
  // Outputs: bound of the relative rms error in fp32, what elements are measured against at least (the largest one is
  // too), and the rms error of results with roundings inside (0: that of one rounding).
  double bound = 0.0;
  double scale = 0.0;
  double rms = 0.0;
  int sum_of = -1;  // number of the output whose elements it sums up: it is then measured against their norm too
};

struct Problem {
  using Call = std::function<void(const Views& in, const Views& out, const SeqLens& seq)>;

  std::vector<Part> in;
  std::vector<Part> out;  // unwritten, or what the operator changes in place
  SeqLens seq = SeqLens::dense(1, 0);
  std::int64_t chunk_size = 64;
  Call call;
  Call truth;  // in fp64; absent: the same call on fp64 tensors
  Call exact;  // gives the same bits in another way; then there is no fp64 truth
};

// Errors of all problems of an operator's result, by type. A few large elements can make up such a sum; where rounding
// the exact elements alone costs more than is usual for the type, the bound grows by as much.
class Tally {
 public:
  void add(const Line& line, const TensorView& got, const TensorView& truth, const Part& part);
  // One line a result with its rms error; false if one is above its bound, with the problem that adds most to it.
  bool print(const std::string& prefix) const;

 private:
  struct Sums {
    double error = 0.0, rounding = 0.0, truth = 0.0, bound = 0.0;
    double most = 0.0;
    std::string worst;  // the problem with this error
    DType type = DType::kF32;
    std::int64_t elements = 0;
  };
  std::map<std::string, Sums> sums_;
};

// Runs a problem on the line's instruction set and threads. Returns what is wrong, or "".
std::string judge(const Line& line, const Problem& problem, Tally& tally, std::int64_t repeats = 1);

// The results of one run in memory of their own.
std::vector<Tensor> results(const Problem& problem);
// Where two results differ, or "".
std::string different_bits(const Problem& problem, const std::vector<Tensor>& a, const std::vector<Tensor>& b);

}  // namespace tidegate::fuzz
