// short_conv: the gated short convolution of every segment of a round, and the ring that carries it on.
//
//   u[r] = round(B[r] * x[r])                                         B, C, x: the thirds of a row of bcx
//   v[r] = round(sum_j taps[j] * u[r - CARRIED + j] + bias)           fp32, oldest first
//   y[r] = round(C[r] * v[r])
//
// Grid: blocks of THREADS * VALUES channels x segments, the padding too x runs of RUN rows; THREADS threads, of which
// those without rows return. Called once a conv layer by metal_ops/conv.py, for the rows of all streams. A thread walks
// a run of a segment down VALUES channels, the last TAPS values of u in registers. The CARRIED values before its run it
// makes anew from bcx, so that the runs of a prompt go side by side, without a barrier; CARRIED <= RUN, so that only a
// segment's first run reaches back to the ring. Small threadgroups spread one row over the cores.
//
// Row r of a segment is kept at (start + r) % RING, the last RING rows of it. The places that the first run reads, of
// the CARRIED positions before the segment, are those of the rows of r % RING > RING - TAPS: the thread of the first
// run stores these rows' u too, when it has read. So no place is stored to by two threads, or stored to by one and read
// by another.
//
// Moves bcx and y once, B and x of CARRIED rows of each run from the cache, and of the ring CARRIED values in and at
// most RING out a segment. 8 TAPS + 16 registers a thread, so that occupancy is full at 3 taps.
#define VALUES 4
#define CARRIED (TAPS - 1)

inline float4 load_values(device const T* from) {
  const vec<T, VALUES> loaded = *(device const vec<T, VALUES>*)from;
  return float4(float(loaded[0]), float(loaded[1]), float(loaded[2]), float(loaded[3]));
}

inline void store_values(device T* to, float4 values) {
  vec<T, VALUES> stored;
  for (int i = 0; i < VALUES; i++) stored[i] = T(values[i]);
  *(device vec<T, VALUES>*)to = stored;
}

inline float4 load_u(device const T* row) {
  const float4 b = load_values(row), x = load_values(row + 2 * CHANNELS);
  float4 u;
  for (int i = 0; i < VALUES; i++) u[i] = float(T(b[i] * x[i]));
  return u;
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void short_conv(
    device T* y,
    device T* ring,
    device const T* bcx,
    device const W* taps,
#ifdef BIAS
    device const BIAS* bias,
#endif
    device const int* table,
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int c = (int(group.x) * THREADS + int(thread_index)) * VALUES;
  // Loaded before it is known whether there is such a segment: one wait for both.
  const Segment segment = load_segment(table, group.y);
  const int num_rows = segment.num_rows, first = int(group.z) * RUN;
  if ((c >= CHANNELS) | (int(group.y) >= num_segments(table)) | (first >= num_rows)) return;
  y += segment.first_row * CHANNELS + c;
  ring += segment.slot * RING * CHANNELS + c;
  bcx += segment.first_row * 3 * CHANNELS + c;

  // The taps of a channel lie side by side, so VALUES channels are TAPS vectors.
  float4 tap[TAPS], window[TAPS];
  for (int k = 0; k < TAPS; k++) {
    const vec<W, VALUES> loaded = *(device const vec<W, VALUES>*)(taps + c * TAPS + k * VALUES);
    for (int i = 0; i < VALUES; i++) tap[(k * VALUES + i) % TAPS][(k * VALUES + i) / TAPS] = float(loaded[i]);
  }
  if (first == 0) {
    for (int j = 0; j < CARRIED; j++) {
      // Loaded without a look at the position, which alone decides, never what the memory holds.
      const int position = segment.start - CARRIED + j;
      const float4 kept = load_values(ring + (position + RING) % RING * CHANNELS);
      for (int i = 0; i < VALUES; i++) window[j][i] = position < 0 ? 0.0f : kept[i];
    }
  }
  wait_for_last_launch();
  if (first > 0) {
    for (int j = 0; j < CARRIED; j++) window[j] = load_u(bcx + (first - CARRIED + j) * 3 * CHANNELS);
  }
  for (int r = first; r < min(first + RUN, num_rows); r++) {
    const float4 gate = load_values(bcx + r * 3 * CHANNELS + CHANNELS);
    window[CARRIED] = load_u(bcx + r * 3 * CHANNELS);
    float4 out;
    for (int i = 0; i < VALUES; i++) {
      float v = 0;
      for (int j = 0; j < TAPS; j++) v = fma(tap[j][i], window[j][i], v);
#ifdef BIAS
      v += float(bias[c + i]);
#endif
      out[i] = gate[i] * float(T(v));
    }
    store_values(y + r * CHANNELS, out);
    const bool is_kept = r + RING >= num_rows, is_first_runs = r % RING > RING - TAPS;
    if (is_kept && !is_first_runs) store_values(ring + (segment.start + r) % RING * CHANNELS, window[CARRIED]);
    for (int j = 0; j < CARRIED; j++) window[j] = window[j + 1];
  }
  if (first > 0) return;
  for (int j = 1; j <= CARRIED; j++) {
    // The last row at the place of the j-th position before the segment, if any.
    const int r = (num_rows - 1 + j) / RING * RING - j;
    if (r >= 0) store_values(ring + (segment.start + r) % RING * CHANNELS, load_u(bcx + r * 3 * CHANNELS));
  }
}
