// The gated delta rule token by token. The state stays in its own memory: a token reads it where the last one wrote it,
// so what lies there, in its storage type, is all that passes from token to token.
//
// kTokens tokens at a time pass over a tile of the state while it is in the first cache.
#include "ops/recurrent_gated_delta_rule/kernel.h"

#include "ops/recurrent_gated_delta_rule/tile.kernel.h"
#include "simd/gates.h"
#include "simd/row_sums.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace recurrence;

constexpr float kEps = 1e-6f;  // inside the root of the l2norm

// One cache line more than needed: rows and blocks 4096 bytes apart would collide in the first cache.
inline int64_t pitch_of(int64_t K) { return (K + 15) / 16 * 16 + 16; }
inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// T: type of the data, S: of the states, Rows: what a row of a state is.
template <class T, class S, class Rows>
struct Run {
  const Args& a;
  const Unit& u;
  int64_t tiles, pitch;
  float *key, *query;                          // [kTokens][pitch] of the key head
  float *decay, *decayed_key, *decayed_query;  // [kTokens][pitch] of one value head
  S* spare;                                    // [group][K][V]: states that are not stored
  float key_query[kTokens], g[kTokens], beta[kTokens];
  Old old[kTokens];

  Run(const Args& args, const Unit& unit, float* memory)
      : a(args), u(unit), tiles((a.V + kColumns - 1) / kColumns), pitch(pitch_of(a.K)) {
    const int64_t block = kTokens * pitch;
    key = memory;
    query = key + block;
    decay = query + block;
    decayed_key = decay + block;
    decayed_query = decayed_key + block;
    spare = reinterpret_cast<S*>(decayed_query + block);
  }
  static int64_t floats(const Args& a) { return 5 * kTokens * pitch_of(a.K) + a.group * a.K * a.V; }

  // One row as fp32, divided by its length if asked for.
  void load_row(const T* from, float* to) {
    F32 inverse = set1(1.0f);
    if (a.use_qk_l2norm) {
      inverse = set1(1.0f / __builtin_sqrtf(sum_squares(from, a.K) + kEps));
    }
    for_lanes(a.K, [&](int64_t c, auto lanes) { lanes.put(to + c, lanes.get(from + c) * inverse); });
  }

  void open_keys(int64_t begin, int64_t L) {
    for (int64_t i = 0; i < L; ++i) {
      float* const k = key + i * pitch;
      float* const q = query + i * pitch;
      load_row(at<const T>(a.k, u.row, begin + i, u.key_head), k);
      load_row(at<const T>(a.q, u.row, begin + i, u.key_head), q);
      key_query[i] = sum_lanes(a.K, [&](int64_t c, auto lanes) { return lanes.get(k + c) * lanes.get(q + c); });
    }
  }

  int64_t offset(const Gate& gate, int64_t token, int64_t head) {
    return u.row * gate.at.row + token * gate.at.token + head * gate.at.head;
  }

  // The decay of every key channel, from one gate of the head and, if there are any, those of the channels.
  void open_head(int64_t begin, int64_t L, int64_t head) {
    for (int64_t i = 0; i < L; ++i) {
      g[i] = 0.0f;
    }
    if (a.g.at.data != nullptr) {
      read_gates(a.g.at.data, a.g.type, offset(a.g, begin, head), a.g.at.token, L, g);
      if (a.rate != nullptr) {
        open_decays(g, L, a.rate[head], a.dt_bias[head]);
      }
    }
    for_lanes(L, [&](int64_t i, auto lanes) { lanes.put(g + i, exp(lanes.get(g + i))); });
    if (!a.beta_per_channel) {
      read_gates(a.beta.at.data, a.beta.type, offset(a.beta, begin, head), a.beta.at.token, L, beta);
      if (a.beta_sigmoid) {
        open_betas(beta, L, a.beta_scale);
      }
    }
    for (int64_t i = 0; i < L; ++i) {
      float* const d = decay + i * pitch;
      if (a.gk.at.data != nullptr) {
        read_gates(a.gk.at.data, a.gk.type, offset(a.gk, begin + i, head), 1, a.K, d);
      }
      bool some = false;
      for_lanes(a.K, [&](int64_t c, auto lanes) {
        const F32 x = a.gk.at.data != nullptr ? set1(g[i]) * exp(lanes.get(d + c)) : set1(g[i]);
        lanes.put(d + c, x);
        lanes.put(decayed_key + i * pitch + c, x * lanes.get(key + i * pitch + c));
        lanes.put(decayed_query + i * pitch + c, x * lanes.get(query + i * pitch + c));
      });
      for (int64_t c = 0; a.gk.at.data != nullptr && c < a.K; ++c) {
        some = some || d[c] == 0.0f;
      }
      old[i] = g[i] == 0.0f ? Old::kNone : some ? Old::kSome : Old::kAll;
    }
  }

  S* state(const States& s, int64_t slot, int64_t head) {
    return static_cast<S*>(s.data) + slot * s.slot + head * s.head;
  }
  // The tile that begins at column c of the state that token t leaves behind; t = -1: of the start.
  Place<S> tile_after(int64_t t, int64_t head, int64_t c) {
    if (t < 0) {
      return Rows::tile(state(a.from, u.start, head), a.from.row, c);
    }
    const int64_t slot = u.slots[t * u.slot_step];
    if (slot >= 0) {
      return Rows::tile(state(a.to, slot, head), a.to.row, c);
    }
    return Rows::tile(spare + (head - u.key_head * a.group) * a.K * a.V, a.v_first ? a.K : a.V, c);
  }

  void load_betas(int64_t token, int64_t i, int64_t head, int64_t c, int64_t n, float* to) {
    if (!a.beta_per_channel) {
      for_lanes(n, [&](int64_t j, auto lanes) { lanes.put(to + j, set1(beta[i])); });
      return;
    }
    read_gates(a.beta.at.data, a.beta.type, offset(a.beta, token, head) + c, 1, n, to);
    if (a.beta_sigmoid) {
      open_betas(to, n, a.beta_scale);
    }
  }

  // Token i of the block, which is token t of the sequence, on the tile of n columns that begins at c.
  void step(int64_t i, int64_t t, int64_t head, int64_t c, int64_t n, const char* ahead) {
    alignas(64) float seen[kColumns], read[kColumns], d[kColumns], betas[kColumns];
    const Token token{key + i * pitch, decayed_key + i * pitch, decayed_query + i * pitch, decay + i * pitch,
                      key_query[i]};
    const Old keep = t == 0 && u.start < 0 ? Old::kNone : old[i];
    Place<const S> from{nullptr, 0};
    if (keep != Old::kNone) {
      const Place<S> last = tile_after(t - 1, head, c);
      from = {last.data, last.step};
      if (keep == Old::kAll) {
        Rows::template read<Old::kAll>(from, a.K, n, token, seen, read, ahead);
      } else {
        Rows::template read<Old::kSome>(from, a.K, n, token, seen, read, ahead);
      }
    } else {
      memset(seen, 0, sizeof seen);
      memset(read, 0, sizeof read);
    }
    const T* v = at<const T>(a.v, u.row, u.begin + t, head) + c;
    T* o = at<T>(a.o, u.row, u.begin + t, head) + c;
    load_betas(u.begin + t, i, head, c, n, betas);
    for_lanes(n, [&](int64_t j, auto lanes) {
      const F32 write = lanes.get(betas + j) * (lanes.get(v + j) - load(seen + j));
      store(d + j, write);
      lanes.put(o + j, set1(a.scale) * fma(set1(token.key_query), write, load(read + j)));
    });
    if (u.begin + t + 1 == u.end && u.slots[t * u.slot_step] < 0) {
      return;  // nobody wants the last state
    }
    const Place<S> to = tile_after(t, head, c);
    ahead = ahead == nullptr ? nullptr : ahead + kColumns * a.K * static_cast<int64_t>(sizeof(S)) / 2;
    if (keep == Old::kAll) {
      Rows::template write<Old::kAll>(from, to, a.K, n, token, d, ahead);
    } else if (keep == Old::kSome) {
      Rows::template write<Old::kSome>(from, to, a.K, n, token, d, ahead);
    } else {
      Rows::template write<Old::kNone>(from, to, a.K, n, token, d, ahead);
    }
  }

  // Where the tile's share of the next state begins: of the unit's next head, or of the next unit.
  const char* ahead_of(int64_t tile) {
    if (u.start < 0 || a.from.row != (a.v_first ? a.K : a.V)) {
      return nullptr;
    }
    const int64_t head = tile / tiles + 1;
    const void* next = head * tiles < u.last ? state(a.from, u.start, u.key_head * a.group + head) : u.ahead;
    return next == nullptr ? nullptr : static_cast<const char*>(next) + tile % tiles * kColumns * a.K * sizeof(S);
  }

  void run() {
    for (int64_t begin = u.begin; begin < u.end; begin += kTokens) {
      const int64_t L = min_of(u.end - begin, kTokens);
      open_keys(begin, L);
      int64_t open = -1;
      for (int64_t tile = u.first; tile < u.last; ++tile) {
        const int64_t head = u.key_head * a.group + tile / tiles;
        const int64_t c = tile % tiles * kColumns;
        if (head != open) {
          open_head(begin, L, head);
          open = head;
        }
        for (int64_t i = 0; i < L; ++i) {
          const int64_t t = begin - u.begin + i;
          step(i, t, head, c, min_of(a.V - c, kColumns), t == 0 ? ahead_of(tile) : nullptr);
        }
      }
    }
  }
};

template <class T, class S>
void run(const Args& a, const Unit& u, float* memory) noexcept {
  if (a.v_first) {
    Run<T, S, ValueRows>(a, u, memory).run();
  } else {
    Run<T, S, KeyRows>(a, u, memory).run();
  }
}
int64_t workspace(const Args& a) noexcept { return Run<float, float, KeyRows>::floats(a); }

}  // namespace

extern const recurrence::Kernels recurrent_gated_delta_rule_kernels = {
    workspace,
    {{run<float, float>, run<float, bf16>}, {run<bf16, float>, run<bf16, bf16>}, {run<f16, float>, run<f16, bf16>}}};

}  // namespace tidegate::TIDEGATE_ISA
