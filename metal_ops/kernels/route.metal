// route: the experts of each row, and their weights.
//
//   score[t, e] = 1 / (1 + exp(-sum_k x[t, k] * gate[e, k]))          with BITS: gate = fma(code, scale, bias)
//   chosen[t] = the ACTIVE experts of the largest score + expert_bias, the lowest id of equals, largest first
//   weights[t, a] = score[t, chosen[t, a]] / (sum of the chosen scores + 1e-6) * SCALE
//
// without the division unless IS_NORMALISED; all in fp32. A NaN is never chosen; with nothing left, expert 0 is.
//
// Grid: one threadgroup for ROWS rows; THREADS threads. Called once a mixture by metal_ops/route.py. One launch for
// the product and the choice, because a choice needs all experts of a row and a launch of its own would wait longer
// than it works. A SIMD-group makes the scores of EXPERTS experts at a time, its lanes side by side along K; then one
// SIMD-group chooses for each row. A row alone keeps one core busy, with 32 KB of loads in flight at 64 experts; ROWS
// rows share each load of the gate, so that a wide round reads it T / ROWS times, after the first out of a cache.
// A sum is over a lane's values in order of K and then simd_sum, whatever ROWS is: a row's bits are its own. One
// barrier; at most 16 sums and 40 values a thread, so that 512 threads fit the registers of a core; 4 KB of threadgroup
// memory at most.
#define VALUES 8
#define SIMDGROUPS (THREADS / 32)
// Of the choice: the experts of a lane.
#define SLOTS ((NUM_EXPERTS + 31) / 32)
#define NO_ID 0x7FFFFFFF
#if BITS
#define PER_WORD (32 / BITS)
#define GATE_BUFFERS device const uint *gate_codes, device const S *gate_scales, device const S *gate_biases,
#define GATE gate_codes, gate_scales, gate_biases,
#else
#define GATE_BUFFERS device const W *gate_values,
#define GATE gate_values,
#endif

inline void load_values(thread float (&values)[VALUES], device const T* from) {
  const vec<T, 4> low = *(device const vec<T, 4>*)from;
  const vec<T, 4> high = *(device const vec<T, 4>*)(from + 4);
  for (int i = 0; i < 4; i++) {
    values[i] = float(low[i]);
    values[4 + i] = float(high[i]);
  }
}

// Values of the gate from `at` on, all of one group.
inline void load_gate(thread float (&values)[VALUES], GATE_BUFFERS int at) {
#if BITS
  const float scale = float(gate_scales[at / GROUP]), bias = float(gate_biases[at / GROUP]);
  for (int i = 0; i < VALUES; i += PER_WORD) {
    const uint word = gate_codes[(at + i) / PER_WORD];
    for (int j = 0; j < PER_WORD; j++) {
      const uint code = (word >> (BITS * j)) & ((1u << BITS) - 1);
      values[i + j] = fma(float(code), scale, bias);
    }
  }
#else
  const vec<W, 4> low = *(device const vec<W, 4>*)(gate_values + at);
  const vec<W, 4> high = *(device const vec<W, 4>*)(gate_values + at + 4);
  for (int i = 0; i < 4; i++) {
    values[i] = float(low[i]);
    values[4 + i] = float(high[i]);
  }
#endif
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void route(
    device int* chosen,
    device float* weights,
    device const T* x,
    GATE_BUFFERS
#if HAS_BIAS
    device const float* expert_bias,
#endif
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scores[ROWS][NUM_EXPERTS];
  const int first_row = group * ROWS;
  // Rows and experts beyond the last are the last again, and are not kept.
  for (int first = int(simdgroup) * EXPERTS; first < NUM_EXPERTS; first += SIMDGROUPS * EXPERTS) {
    float sums[EXPERTS][ROWS];
    for (int e = 0; e < EXPERTS; e++) {
      for (int r = 0; r < ROWS; r++) sums[e][r] = 0.0f;
    }
    // Few threadgroups: loads of several steps are in flight at a time.
    UNROLL_BY_4 for (int k = int(lane) * VALUES; k < DEPTH; k += 32 * VALUES) {
      float rows[ROWS][VALUES];
      for (int r = 0; r < ROWS; r++) load_values(rows[r], x + min(first_row + r, NUM_ROWS - 1) * DEPTH + k);
      for (int e = 0; e < EXPERTS; e++) {
        float values[VALUES];
        load_gate(values, GATE min(first + e, NUM_EXPERTS - 1) * DEPTH + k);
        for (int r = 0; r < ROWS; r++) {
          for (int i = 0; i < VALUES; i++) sums[e][r] = fma(rows[r][i], values[i], sums[e][r]);
        }
      }
    }
    for (int e = 0; e < EXPERTS; e++) {
      for (int r = 0; r < ROWS; r++) {
        const float logit = simd_sum(sums[e][r]);
        if (lane == 0 && first + e < NUM_EXPERTS) scores[r][first + e] = 1 / (1 + exp(-logit));
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = simdgroup; r < ROWS && first_row + r < NUM_ROWS; r += SIMDGROUPS) {
    const int t = first_row + r;
    float left[SLOTS];
    for (int i = 0; i < SLOTS; i++) {
      const int e = 32 * i + int(lane);
      left[i] = -INFINITY;
      if (e < NUM_EXPERTS) left[i] = scores[r][e];
#if HAS_BIAS
      if (e < NUM_EXPERTS) left[i] += expert_bias[e];
#endif
    }
    float picked[ACTIVE], total = 0;
    for (int a = 0; a < ACTIVE; a++) {
      // A lane's ids rise, so the first of equals stays.
      float best = -INFINITY;
      int id = 0;
      for (int i = 0; i < SLOTS; i++) {
        if (left[i] > best) {
          best = left[i];
          id = 32 * i + int(lane);
        }
      }
      const float largest = simd_max(best);
      id = simd_min(best == largest ? id : NO_ID);
      for (int i = 0; i < SLOTS; i++) {
        if (id == 32 * i + int(lane)) left[i] = -INFINITY;
      }
      picked[a] = scores[r][id];
      total += picked[a];
      if (lane == 0) chosen[t * ACTIVE + a] = id;
    }
    const float divisor = IS_NORMALISED ? total + 1e-6f : 1.0f;
    if (lane == 0) {
      for (int a = 0; a < ACTIVE; a++) weights[t * ACTIVE + a] = picked[a] / divisor * SCALE;
    }
  }
}
