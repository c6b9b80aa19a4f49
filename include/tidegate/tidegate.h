// Everything that Tidegate offers to C++.
#pragma once

#include "tidegate/chunk.h"
#include "tidegate/chunk_backward.h"
#include "tidegate/conv.h"
#include "tidegate/cpu.h"
#include "tidegate/decode.h"
#include "tidegate/delta_rule.h"
#include "tidegate/error.h"
#include "tidegate/gating.h"
#include "tidegate/moe.h"
#include "tidegate/norm.h"
#include "tidegate/parallel.h"
#include "tidegate/recurrent.h"
#include "tidegate/rope.h"
#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"
#include "tidegate/version.h"
