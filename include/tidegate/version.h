#pragma once

#define TIDEGATE_VERSION "0.1.0"
