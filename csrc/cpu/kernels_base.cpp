#define VS_VARIANT base_kernels
#define VS_VARIANT_NAME "base"
#include "cpu/variant.h"
