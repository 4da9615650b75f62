// What the kernels use of Metal's library, for NVIDIA GPUs: types, vectors, functions of a SIMD-group, the elements of
// simdgroup matrices; and what their forms for these GPUs use, products on tensor cores among it.
//
// A threadgroup is a block of CUDA's, a SIMD-group a warp. metal_ops/cuda.py puts this text before that of a kernel and
// rewrites what no macro can. It needs no header of CUDA's: so it compiles in a fraction of their time, and where only
// the compiler is installed. Ampere or later, which have bfloat and its tensor cores; rounding to nearest everywhere,
// and no approximate functions but those of `fast`.
#define UNROLL _Pragma("unroll")
#define INFINITY __int_as_float(0x7f800000)
#define EVERY_LANE 0xffffffffu

namespace metal {
typedef unsigned int uint;
typedef unsigned short ushort;

// NOTE: rounded by the conversion of two numbers, because that of one is an instruction (F2F) of the slow unit.
struct half {
  ushort bits;
  half() = default;
  __device__ explicit half(float x) {
    uint both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    bits = ushort(both);
  }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bfloat {
  ushort bits;
  bfloat() = default;
  __device__ explicit bfloat(float x) {
    uint both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    bits = ushort(both);
  }
  __device__ explicit operator float() const { return __int_as_float(int(uint(bits) << 16)); }
};

template <typename T, int N>
struct vec;
template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  __device__ explicit vec(T every) : x(every), y(every) {}
  __device__ vec(T x, T y) : x(x), y(y) {}
  __device__ T& operator[](int i) { return (&x)[i]; }
  __device__ const T& operator[](int i) const { return (&x)[i]; }
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  __device__ vec(T x, T y, T z) : x(x), y(y), z(z) {}
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  __device__ explicit vec(T every) : x(every), y(every), z(every), w(every) {}
  __device__ vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  __device__ T& operator[](int i) { return (&x)[i]; }
  __device__ const T& operator[](int i) const { return (&x)[i]; }
};
typedef vec<uint, 2> uint2;
typedef vec<uint, 3> uint3;
typedef vec<uint, 4> uint4;
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;

template <typename To, typename From>
__device__ __forceinline__ To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  union {
    From from;
    To to;
  } bits = {from};
  return bits.to;
}

__device__ __forceinline__ float2& operator+=(float2& a, float2 b) {
  a = float2(a.x + b.x, a.y + b.y);
  return a;
}
__device__ __forceinline__ int min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max(int a, int b) { return a > b ? a : b; }
// Of a number and a NaN, the number.
__device__ __forceinline__ float min(float a, float b) { return ::fminf(a, b); }
__device__ __forceinline__ float max(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
namespace fast {
__device__ __forceinline__ float divide(float a, float b) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  return a * reciprocal;
}
__device__ __forceinline__ float exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
}  // namespace fast
__device__ __forceinline__ bool isfinite(float x) { return (as_type<uint>(x) & 0x7f800000) != 0x7f800000; }
__device__ __forceinline__ uint popcount(uint x) { return uint(::__popc(int(x))); }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { ::__syncthreads(); }
__device__ __forceinline__ void simdgroup_barrier(mem_flags) { ::__syncwarp(); }

// All 32 lanes take part, and get the same bits.
template <typename T>
__device__ __forceinline__ T simd_shuffle(T x, ushort lane) {
  return ::__shfl_sync(EVERY_LANE, x, lane);
}
template <typename T>
__device__ __forceinline__ T simd_shuffle_xor(T x, ushort mask) {
  return ::__shfl_xor_sync(EVERY_LANE, x, mask);
}
template <typename T>
__device__ __forceinline__ T simd_sum(T x) {
  for (int mask = 1; mask < 32; mask *= 2) x += simd_shuffle_xor(x, mask);
  return x;
}
template <typename T>
__device__ __forceinline__ T simd_max(T x) {
  for (int mask = 1; mask < 32; mask *= 2) x = max(x, simd_shuffle_xor(x, mask));
  return x;
}
template <typename T>
__device__ __forceinline__ T simd_min(T x) {
  for (int mask = 1; mask < 32; mask *= 2) x = min(x, simd_shuffle_xor(x, mask));
  return x;
}
// Of integers in one instruction.
__device__ __forceinline__ int simd_max(int x) { return ::__reduce_max_sync(EVERY_LANE, x); }
__device__ __forceinline__ int simd_min(int x) { return ::__reduce_min_sync(EVERY_LANE, x); }
// The sum of the lanes before.
__device__ __forceinline__ int simd_prefix_exclusive_sum(int x) {
  int sum = x;
  for (uint n = 1; n < 32; n *= 2) {
    const int before = ::__shfl_up_sync(EVERY_LANE, sum, n);
    if (threadIdx.x % 32 >= n) sum += before;
  }
  return sum - x;
}
struct simd_vote {
  typedef unsigned long long vote_t;
  vote_t bits;
  __device__ explicit operator vote_t() const { return bits; }
};
__device__ __forceinline__ simd_vote simd_ballot(bool is_so) { return {::__ballot_sync(EVERY_LANE, is_so)}; }

// 8 by 8: a lane holds row lane / 4, columns 2 * (lane % 4) and the next. That is how tensor cores take the left
// operand of a product and give the result, in each half of 16 rows.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  vec<T, 2> elements;
  __device__ vec<T, 2>& thread_elements() { return elements; }
};
template <typename T, int ROWS, int COLUMNS>
__device__ __forceinline__ simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T every) {
  simdgroup_matrix<T, ROWS, COLUMNS> filled;
  filled.elements = vec<T, 2>(every, every);
  return filled;
}

// What tile.cuh and places.cuh use, and Metal's library lacks. tests/cuda_on_metal.h has it for the emulated Metal.

// upper, lower (8 x 8 each) += 16 x 16 times 16 x 8. a: rows lane / 4 of the upper and of the lower half, b: column
// lane / 4; of both the elements 2 * (lane % 4) and the next of K, in a word, and those 8 further. Of the type named
// first.
#define MULTIPLY(type, spelled) \
  __device__ __forceinline__ void multiply_by_16( \
      type, float2& upper, float2& lower, const uint* a_upper, const uint* a_lower, const uint* b) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." spelled "." spelled ".f32 {%0, %1, %2, %3}, " \
                 "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
                 : "=f"(upper.x), "=f"(upper.y), "=f"(lower.x), "=f"(lower.y) \
                 : "r"(a_upper[0]), "r"(a_lower[0]), "r"(a_upper[1]), "r"(a_lower[1]), "r"(b[0]), "r"(b[1]), \
                   "f"(upper.x), "f"(upper.y), "f"(lower.x), "f"(lower.y)); \
  }
MULTIPLY(half, "f16")
MULTIPLY(bfloat, "bf16")
#undef MULTIPLY

__device__ __forceinline__ uint this_lane() { return threadIdx.x % 32; }

// Bit by bit what TABLE has at the number that the bits of a, b and c are: in one instruction.
template <int TABLE>
__device__ __forceinline__ uint looked_up(uint a, uint b, uint c) {
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return result;
}
// Of the 8 bytes of a, then b, lowest first, those whose numbers are the digits, lowest first.
__device__ __forceinline__ uint chosen_bytes(uint a, uint b, uint digits) { return ::__byte_perm(a, b, digits); }

// Loads that stay before the next barrier or hold_lanes. The compiler moves others to where their values are used.
// load_with_next: memory is asked for the 256 bytes around.
#define LOADS(name, hint) \
  __device__ __forceinline__ uint4 name(const uint4* from) { \
    uint4 words; \
    asm volatile("ld.global" hint ".v4.u32 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) \
                 : "l"(from) \
                 : "memory"); \
    return words; \
  } \
  __device__ __forceinline__ uint2 name(const uint2* from) { \
    uint2 words; \
    asm volatile("ld.global" hint ".v2.u32 {%0, %1}, [%2];" \
                 : "=r"(words.x), "=r"(words.y) \
                 : "l"(from) \
                 : "memory"); \
    return words; \
  }
LOADS(load_in_place, "")
LOADS(load_with_next, ".L2::256B")
#undef LOADS
__device__ __forceinline__ uint load_in_place(const uint* from) {
  uint word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ float load_in_place(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
template <typename T>
__device__ __forceinline__ T load_in_place(const T* from) {
  ushort bits;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
  return as_type<T>(bits);
}
// Of one number there is no next.
template <typename T>
__device__ __forceinline__ T load_with_next(const T* from) {
  return load_in_place(from);
}
// The 128 bytes around, to the nearest cache.
template <typename T>
__device__ __forceinline__ void load_to_cache(const T* from) {
  asm volatile("prefetch.global.L1 [%0];" : : "l"(from));
}
// A barrier of the 32 lanes, by a number from 1 to 15 that no other SIMD-group has. It says true, which the compiler
// does not know: else it would have products pass the barrier in place of the loads.
__device__ __forceinline__ bool hold_lanes(int number) {
  int is_here;
  asm volatile("{ .reg .pred is; setp.eq.u32 is, 0, 0; bar.red.and.pred is, %1, 32, is; selp.s32 %0, 1, 0, is; }"
               : "=r"(is_here)
               : "r"(number)
               : "memory");
  return is_here;
}

// Copies 16 bytes of device memory to threadgroup memory, where they are when the thread has waited for their group.
template <typename T>
__device__ __forceinline__ void copy_ahead(T* to, const T* from) {
  asm volatile("{ .reg .u64 at; cvta.to.shared.u64 at, %0; cp.async.cg.shared.global [at], [%1], 16; }"
               :
               : "l"(to), "l"(from)
               : "memory");
}
// A group: what the thread has started since the last one's end.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// For all groups but the last NUM_LEFT.
template <int NUM_LEFT>
__device__ __forceinline__ void wait_for_groups_but() {
  asm volatile("cp.async.wait_group %0;" : : "n"(NUM_LEFT) : "memory");
}

// For the end of the launch before, of which nothing is seen until then. From here on the next one may start.
__device__ __forceinline__ void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Products of Hopper's tensor cores: 16 outputs of each of the 4 SIMD-groups of a warpgroup, all of which take part,
// with up to 8 tiles of 8 rows out of threadgroup memory. They are begun, and have come after the wait.
//
// Rows lie in matrices of 8 rows by 8 of K, row by row: matrices of a tile matrix_bytes after each other, tiles
// tile_bytes. For 16 of K two are taken: a lane's weights are multiplied with elements 2 * (lane % 4) and the next of
// either.
typedef unsigned long long WideRows;
template <typename T>
__device__ __forceinline__ WideRows wide_rows(const T* from, int matrix_bytes, int tile_bytes) {
  unsigned long long at;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(at) : "l"(from));
  return (at & 0x3ffff) / 16 | (unsigned long long)(matrix_bytes / 16) << 16 |
         (unsigned long long)(tile_bytes / 16) << 32;
}
__device__ __forceinline__ WideRows rows_after(WideRows rows, int num_bytes) { return rows + num_bytes / 16; }
// Weights are in their registers before products are begun.
__device__ __forceinline__ void show_weights(uint (&words)[4]) {
  asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// What this thread has written to threadgroup memory is seen by products after the next barrier.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// multiply: sums += those of 16 of K, or = if it does not add. Sums of the upper 8 outputs are the first of a tile, of
// the lower 8 the second.
template <int TILES>
struct Wide;
#define SUMS_OF(tile) \
  "+f"(sums[tile][0].elements.x), "+f"(sums[tile][0].elements.y), "+f"(sums[tile][1].elements.x), \
      "+f"(sums[tile][1].elements.y)
#define SUMS_1 SUMS_OF(0)
#define SUMS_2 SUMS_1, SUMS_OF(1)
#define SUMS_4 SUMS_2, SUMS_OF(2), SUMS_OF(3)
#define SUMS_8 SUMS_4, SUMS_OF(4), SUMS_OF(5), SUMS_OF(6), SUMS_OF(7)
#define NAMES_1 "%0, %1, %2, %3"
#define NAMES_2 NAMES_1 ", %4, %5, %6, %7"
#define NAMES_4 NAMES_2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_8 \
  NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WIDE_MULTIPLY(type, spelled, tiles, shape, words, rows, adds) \
  template <typename Sums> \
  static __device__ __forceinline__ void multiply( \
      type, Sums (*sums)[2], const uint* a_upper, const uint* a_lower, WideRows b, bool is_added) { \
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, " adds ", 0; " \
                 "wgmma.mma_async.sync.aligned." shape ".f32." spelled "." spelled \
                 " {" NAMES_##tiles "}, {" words "}, " rows ", adds, 1, 1, 0; }" \
                 : SUMS_##tiles \
                 : "r"(a_upper[0]), "r"(a_lower[0]), "r"(a_upper[1]), "r"(a_lower[1]), "l"(b), "r"(int(is_added))); \
  }
#define WIDE(tiles, ...) \
  template <> \
  struct Wide<tiles> { \
    WIDE_MULTIPLY(half, "f16", tiles, __VA_ARGS__) \
    WIDE_MULTIPLY(bfloat, "bf16", tiles, __VA_ARGS__) \
    template <typename Sums> \
    static __device__ __forceinline__ void wait(Sums (*sums)[2]) { \
      asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" : SUMS_##tiles : : "memory"); \
    } \
  };
WIDE(1, "m64n8k16", "%4, %5, %6, %7", "%8", "%9")
WIDE(2, "m64n16k16", "%8, %9, %10, %11", "%12", "%13")
WIDE(4, "m64n32k16", "%16, %17, %18, %19", "%20", "%21")
WIDE(8, "m64n64k16", "%32, %33, %34, %35", "%36", "%37")
#undef WIDE
#undef WIDE_MULTIPLY
#undef NAMES_1
#undef NAMES_2
#undef NAMES_4
#undef NAMES_8
#undef SUMS_1
#undef SUMS_2
#undef SUMS_4
#undef SUMS_8
#undef SUMS_OF
}  // namespace metal
