// The Metal Shading Language 3.1 library for clang: what compute kernels use of it, and nothing that Metal lacks.
//
// Freestanding, so that a kernel compiles in a fraction of a second. Compiled in two ways: with -DMSL_STRICT the
// address spaces are types of their own, for a check of the syntax only; without, they are erased, and the code runs.
// With -DMSL_CHECKED the accesses that library functions make for the kernel are reported to the runtime.
#pragma once
#pragma clang system_header

#include "interface.h"

#ifdef MSL_STRICT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))

// Functions on values. They are part of the line that calls them.
#define MSL_INLINE static inline __attribute__((always_inline, nodebug))
// Functions that talk to the runtime: not instrumented, so not inlined into code that is.
#ifdef MSL_CHECKED
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
#define MSL_LIBRARY static inline __attribute__((noinline)) MSL_UNCHECKED
#else
#define MSL_UNCHECKED
#define MSL_LIBRARY MSL_INLINE
#endif
// The call site, as default arguments.
#define MSL_SITE \
  const char *file = __builtin_FILE(), int line = __builtin_LINE(), int column = __builtin_COLUMN()

#include "types.h"
#include "vectors.h"
#include "math.h"
#include "integers.h"
#include "simdgroup.h"
#include "matrix.h"
#include "atomics.h"
#include "kernels.h"

// Last: the library itself needs the word for its literals.
#ifdef MSL_STRICT
#define double error_Metal_has_no_double
#endif
