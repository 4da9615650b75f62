// rms_norm: the RMSNorm of a row, and before it the addition of what the layer's last half made of the row.
//
//   sum[t] = round(x[t] + delta[t])                                                with HAS_DELTA
//   sum[t] = round(x[t] + round(sum_a weights[t, a] * outputs[t * ACTIVE + a]))    with ACTIVE experts
//   out[t] = round(round(sum[t] / sqrt(mean(sum[t]^2) + EPS)) * weight)
//
// Grid: one threadgroup a row; THREADS threads. Called twice a layer by metal_ops/norm.py, and with IS_DRAWN for
// the rows whose logits are computed, which need no sum. A row needs a total over its whole width, so it gets one
// threadgroup: few rows wait for memory once, and one barrier is all there is. A few registers of values a thread, so
// that occupancy is full. Reads x and delta and writes sum and out once, 16 KB for a row of 2,048 in bf16. The order of
// a row's total depends on its width alone.
#define VALUES 4
#define SIMDGROUPS (THREADS / 32)
#define STRIDE (THREADS * VALUES)
// Vectors of a row that a thread takes.
#define NUM_VECTORS ((WIDTH + STRIDE - 1) / STRIDE)
#if ACTIVE
#define DELTA_BUFFERS device const float *outputs, device const float *weights,
#define DELTA outputs, weights,
#elif HAS_DELTA
#define DELTA_BUFFERS device const T *delta,
#define DELTA delta,
#else
#define DELTA_BUFFERS
#define DELTA
#endif

inline float4 load_sum(DELTA_BUFFERS device const T* x, int t, int at) {
  const vec<T, VALUES> loaded = *(device const vec<T, VALUES>*)(x + t * WIDTH + at);
  float4 sum = float4(float(loaded[0]), float(loaded[1]), float(loaded[2]), float(loaded[3]));
#if ACTIVE
  float4 mixed = float4(0.0f);
  for (int a = 0; a < ACTIVE; a++) {
    const float4 output = *(device const float4*)(outputs + (t * ACTIVE + a) * WIDTH + at);
    for (int i = 0; i < VALUES; i++) mixed[i] = fma(weights[t * ACTIVE + a], output[i], mixed[i]);
  }
  for (int i = 0; i < VALUES; i++) sum[i] = float(T(sum[i] + float(T(mixed[i]))));
#elif HAS_DELTA
  const vec<T, VALUES> added = *(device const vec<T, VALUES>*)(delta + t * WIDTH + at);
  for (int i = 0; i < VALUES; i++) sum[i] = float(T(sum[i] + float(added[i])));
#endif
  return sum;
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void rms_norm(
    device T* out,
#if HAS_SUM
    device T* sum,
#endif
    DELTA_BUFFERS
    device const T* x,
    device const W* weight,
#if IS_DRAWN
    device const int* table,
#endif
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[SIMDGROUPS];
#if IS_DRAWN
  const int t = drawn_row(table, row);
#else
  const int t = row;
#endif
  float4 values[NUM_VECTORS];
  vec<W, VALUES> factors[NUM_VECTORS];
  float squares = 0;
  for (int v = 0; v < NUM_VECTORS; v++) {
    const int at = v * STRIDE + int(thread_index) * VALUES;
    if (at >= WIDTH) break;
    values[v] = load_sum(DELTA x, t, at);
    // Not after the barrier, which would be another wait for memory.
    factors[v] = *(device const vec<W, VALUES>*)(weight + at);
    for (int i = 0; i < VALUES; i++) squares = fma(values[v][i], values[v][i], squares);
#if HAS_SUM
    vec<T, VALUES> kept;
    for (int i = 0; i < VALUES; i++) kept[i] = T(values[v][i]);
    *(device vec<T, VALUES>*)(sum + t * WIDTH + at) = kept;
#endif
  }
  squares = simd_sum(squares);
  if (lane == 0) partial[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0;
  for (int i = 0; i < SIMDGROUPS; i++) total += partial[i];
  const float scale = 1 / sqrt(total / WIDTH + EPS);
  for (int v = 0; v < NUM_VECTORS; v++) {
    const int at = v * STRIDE + int(thread_index) * VALUES;
    if (at >= WIDTH) break;
    vec<T, VALUES> normed;
    for (int i = 0; i < VALUES; i++) normed[i] = T(float(T(values[v][i] * scale)) * float(factors[v][i]));
    *(device vec<T, VALUES>*)(out + int(row) * WIDTH + at) = normed;
  }
}
