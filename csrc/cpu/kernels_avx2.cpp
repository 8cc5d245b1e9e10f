#define VS_VARIANT avx2_kernels
#define VS_VARIANT_NAME "avx2"
#include "cpu/variant.h"
