#define VS_VARIANT avx512_kernels
#define VS_VARIANT_NAME "avx512"
#include "cpu/variant.h"
