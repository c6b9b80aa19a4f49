// phi2 x + add, panel by panel.
#include "ops/gdn_segment_combine/kernel.h"

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using segment_combine::Args;

void combine(const Args& a, float* scratch) noexcept {
  float* const x = scratch;
  float* const out = scratch + a.K * kPanel;
  for (int64_t c = 0; c < a.width; c += kPanel) {
    load_panel(a.x.data, a.x.pitch, a.K, c, a.width, x);
    if (a.add.data != nullptr) {
      load_panel(a.add.data, a.add.pitch, a.K, c, a.width, out);
    } else {
      memset(out, 0, static_cast<size_t>(a.K * kPanel) * sizeof(float));
    }
    for_tiles(0, a.K, [&](int64_t i, auto rows) {
      Tile<decltype(rows)::value> t;
      load_tile(t, out + i * kPanel);
      add_product(t, {a.phi2.data + i * a.phi2.pitch, a.phi2.pitch, 1}, x, a.K);
      store_tile(t, out + i * kPanel);
    });
    store_panel(out, a.K, c, a.width, a.out.data, a.out.pitch);
  }
}

}  // namespace

extern const segment_combine::Kernels gdn_segment_combine_kernels = {kPanel, combine};

}  // namespace tidegate::TIDEGATE_ISA
