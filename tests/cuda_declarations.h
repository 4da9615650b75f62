// What NVRTC declares by itself of CUDA, and the kernels use: for clang's front end, which then needs no CUDA.
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads)))
typedef unsigned long size_t;
struct Place {
  unsigned int x, y, z;
};
extern __device__ const Place threadIdx, blockIdx;
extern "C" {
__device__ float fmaf(float, float, float);
__device__ float expf(float);
__device__ float sqrtf(float);
__device__ float fminf(float, float);
__device__ float fmaxf(float, float);
__device__ float __int_as_float(int);
__device__ int __popc(unsigned int);
__device__ void __syncthreads();
__device__ void __syncwarp();
__device__ unsigned int __byte_perm(unsigned int, unsigned int, unsigned int);
__device__ unsigned int __ballot_sync(unsigned int, int);
__device__ int __reduce_max_sync(unsigned int, int);
__device__ int __reduce_min_sync(unsigned int, int);
}
template <typename T>
__device__ T __shfl_sync(unsigned int, T, int);
template <typename T>
__device__ T __shfl_xor_sync(unsigned int, T, int);
template <typename T>
__device__ T __shfl_up_sync(unsigned int, T, unsigned int);
