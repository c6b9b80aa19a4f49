// The stages of the chunk form, forward and backward: each gets what the fp64 path makes of the earlier ones.
#include "chunk_case.h"
#include "fuzz/drivers.h"

namespace tidegate::fuzz {
namespace {

using test::ChunkCall;
using test::ChunkCase;
using test::Input;
using test::Kind;

struct Output {
  const char* name;
  Kind kind;
  char type;   // d data, i intermediate, s sums
  char width;  // K, V, C or none
  bool keys;
};
struct Stage {
  const char* name;
  bool backward;
  double bound;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  void (*run)(const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq);
};

using I = ChunkCall;
const std::vector<Stage>& stages() {
  static const std::vector<Stage> all = {
      {"cumsum",
       false,
       1e-7,
       {&I::g},
       {{"gc", Kind::kGate, 's', ' ', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_local_cumsum(in[0], out[0], c.C, seq, {.layout = c.layout});
       }},
      {"kkt",
       false,
       1e-6,
       {&I::k, &I::gc, &I::beta},
       {{"A0", Kind::kTokens, 'i', 'C', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_scaled_dot_kkt(in[0], in[1], in[2], out[0], seq, {c.C, c.layout});
       }},
      {"solve",
       false,
       1e-6,
       {&I::A0},
       {{"A", Kind::kTokens, 'i', 'C', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         solve_tril(in[0], out[0], seq, c.layout);
       }},
      {"wu",
       false,
       1e-6,
       {&I::k, &I::v, &I::beta, &I::A, &I::gc},
       {{"w", Kind::kTokens, 'i', 'K', false}, {"u", Kind::kTokens, 'i', 'V', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         recompute_w_u(in[0], in[1], in[2], in[3], in[4], out[0], out[1], seq, c.layout);
       }},
      {"h",
       false,
       1e-6,
       {&I::k, &I::w, &I::u, &I::gc, &I::initial},
       {{"h", Kind::kChunks, 'i', ' ', false},
        {"v_new", Kind::kTokens, 'i', 'V', false},
        {"final_state", Kind::kStates, 's', ' ', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_gated_delta_rule_fwd_h(in[0], in[1], in[2], in[3], in[4], out[0], out[1], out[2], seq,
                                      {c.C, c.v_first, c.layout});
       }},
      {"o",
       false,
       1e-6,
       {&I::q, &I::k, &I::v_new, &I::h, &I::gc},
       {{"o", Kind::kTokens, 'd', 'V', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_fwd_o(in[0], in[1], in[2], in[3], in[4], out[0], seq, {test::kScale, c.C, c.layout});
       }},
      {"dv",
       true,
       1e-6,
       {&I::q, &I::k, &I::d_o, &I::gc},
       {{"dv", Kind::kTokens, 'i', 'V', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_bwd_dv_local(in[0], in[1], in[2], in[3], out[0], seq, {test::kScale, c.C, c.layout});
       }},
      {"dhu",
       true,
       1e-6,
       {&I::q, &I::k, &I::w, &I::d_o, &I::dv, &I::gc, &I::dfinal},
       {{"dh", Kind::kChunks, 'i', ' ', false},
        {"dh0", Kind::kStates, 's', ' ', false},
        {"dv2", Kind::kTokens, 'i', 'V', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_gated_delta_rule_bwd_dhu(in[0], in[1], in[2], in[3], in[4], in[5], in[6], out[0], out[1], out[2], seq,
                                        {test::kScale, c.C, c.v_first, c.layout});
       }},
      {"dqkwg",
       true,
       1e-6,
       {&I::q, &I::k, &I::v_new, &I::gc, &I::h, &I::d_o, &I::dh, &I::dv2},
       {{"dq", Kind::kTokens, 'i', 'K', true},
        {"dk", Kind::kTokens, 'i', 'K', true},
        {"dw", Kind::kTokens, 'i', 'K', false},
        {"dg", Kind::kGate, 's', ' ', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         chunk_bwd_dqkwg(in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7], out[0], out[1], out[2], out[3], seq,
                         {test::kScale, c.C, c.layout});
       }},
      {"wy",
       true,
       1e-6,
       {&I::k, &I::v, &I::beta, &I::A, &I::dw, &I::dv2, &I::gc},
       {{"dk", Kind::kTokens, 'i', 'K', true},
        {"dv", Kind::kTokens, 'i', 'V', false},
        {"dbeta", Kind::kGate, 's', ' ', false},
        {"dg", Kind::kGate, 's', ' ', false}},
       [](const ChunkCase& c, const Views& in, const Views& out, const SeqLens& seq) {
         prepare_wy_repr_bwd(in[0], in[1], in[2], in[3], in[4], in[5], in[6], out[0], out[1], out[2], out[3], seq,
                             c.layout);
       }},
  };
  return all;
}

const Stage& stage_of(const Line& line) {
  std::string known;
  for (const Stage& s : stages()) {
    if (line.is("op", s.name)) {
      return s;
    }
    known += (known.empty() ? "" : ", ") + std::string(s.name);
  }
  throw LineError("stage: op: expected one of " + known + ", got " + line.text("op"));
}

Kind kind_of(Input input) {
  return test::is_one_of(test::kGateInputs, input)    ? Kind::kGate
         : test::is_one_of(test::kTokenInputs, input) ? Kind::kTokens
         : test::is_one_of(test::kChunkInputs, input) ? Kind::kChunks
                                                      : Kind::kStates;
}
Span span_of(Kind kind) {
  return kind == Kind::kChunks ? Span::kChunks : kind == Kind::kStates ? Span::kStates : Span::kTokens;
}

// The memory of an input of a call.
Tensor tensor_of(const test::ChunkTensors& t, Input input) {
  const ChunkCall call = t.call();
  for (const Tensor* x : {&t.q, &t.k,     &t.v,       &t.g,   &t.beta,   &t.gc, &t.A0, &t.A,   &t.w,  &t.u,
                          &t.h, &t.v_new, &t.initial, &t.d_o, &t.dfinal, &t.dv, &t.dh, &t.dv2, &t.dw, &t.dA}) {
    if (x->defined() && x->view().data == (call.*input).data && x->view().numel() == (call.*input).numel() &&
        (call.*input).defined()) {
      return *x;
    }
  }
  return {};
}

Problem make_stage(const Line& line) {
  const Stage& stage = stage_of(line);
  Random random = numbers(line);
  ChunkCase c;
  const Sizes lengths = line.lengths();
  c.layout = line.layout();
  c.B = has_batch(c.layout) ? static_cast<std::int64_t>(lengths.size()) : 1;
  c.T = has_batch(c.layout) ? lengths[0] : line.list("cu").back();
  c.lengths = has_batch(c.layout) ? Sizes{} : lengths;
  c.HK = line.size("HK");
  c.G = line.size("G");
  c.K = line.size("K");
  c.V = line.size("V");
  c.C = line.integer("C", 16, 128);
  c.dtype = line.dtype();
  c.inter = line.dtype("mid");
  c.beta_type = line.flag("beta16") ? c.dtype : DType::kF32;
  c.v_first = line.flag("v_first");
  c.initial = line.flag("h0");
  c.backward = stage.backward;
  c.form = line.form();
  const test::ChunkTensors t = make_chunk(random, c);
  Problem p;
  p.seq = c.seq();
  p.chunk_size = c.C;
  for (const Input input : stage.inputs) {
    p.in.push_back({"input", tensor_of(t, input), span_of(kind_of(input)), c.token_dimension()});
  }
  for (const Output& o : stage.outputs) {
    const DType type = o.type == 'd' ? c.dtype : o.type == 'i' ? c.inter : DType::kF32;
    const std::int64_t width = o.width == 'K' ? c.K : o.width == 'V' ? c.V : o.width == 'C' ? c.C : 0;
    p.out.push_back({std::string(stage.name) + "." + o.name,
                     Tensor(type, c.sizes(o.kind, o.keys ? c.HK : c.HV(), width), c.form), span_of(o.kind),
                     c.token_dimension(), stage.bound});
  }
  const auto run = stage.run;
  p.call = [c, run](const Views& in, const Views& out, const SeqLens& seq) { run(c, in, out, seq); };
  return p;
}

}  // namespace

std::vector<Driver> stage_drivers() {
  return {{"stage",
           "one stage of the chunk form: op=cumsum, kkt, solve, wu, h, o, dv, dhu, dqkwg, wy",
           {{"op", "o"},
            {"cu", "0,33,33,70"},
            {"HK", "1"},
            {"G", "2"},
            {"K", "32"},
            {"V", "32"},
            {"C", "64"},
            {"layout", "tnd"},
            {"mid", "f32"},
            {"beta16", "0"},
            {"h0", "1"},
            {"v_first", "0"}},
           [](Random& random, Line& line) {
             line.set("op", stages()[static_cast<std::size_t>(random.integer(0, 9))].name);
             line.set("layout", pick_text(random, {"tnd", "tnd", "ntd", "bsnd", "bnsd"}));
             line.set("cu", has_batch(line.layout()) ? equal_cu(random.integer(1, 2), random.integer(1, 40))
                                                     : draw_cu(random, 90));
             line.set("HK", random.integer(1, 2));
             line.set("G", random.integer(1, 2));
             line.set("K", draw_width(random, 40, 8));
             line.set("V", draw_width(random, 40, 2));
             line.set("C", pick<std::int64_t>(random, {16, 32, 64}));
             line.set("mid", pick_text(random, {"f32", line.text("in").c_str()}));
             line.set("beta16", random.integer(0, 1));
             line.set("h0", random.integer(0, 1));
             line.set("v_first", random.integer(0, 1));
           },
           make_stage}};
}

}  // namespace tidegate::fuzz
