// What params.h wants of the driver's header.
#pragma once

struct CUtensorMap {};
