// argmax: the pick of a greedy row, and whether every logit of the row is finite.
//
//   out[n] = (the lowest id of the largest logit, a NaN counting as -inf; 1 if all are finite, else 0)
//
// Grid: one threadgroup a row; THREADS threads. Called once a round by metal_ops/argmax.py, right after the product
// with the head: reads the logits once, 256 KB for a row of 65,536, mostly out of the last cache. A round of one row
// keeps one core busy and the others idle. To spread a row over threadgroups would take a second launch, which waits
// for the first, to join what each found. 512 threads with LOADS loads in flight, 32 KB, are through such a row in 8
// waits for memory, so there is less to win than that launch costs (reckoned, not measured). More rows fill more cores.
// One barrier, some 24 registers a thread, 192 bytes of threadgroup memory: full occupancy. Logits and ids are
// compared and nothing is added, so the order in which that happens does not show.
#define VALUES 4
#define LOADS 4
#define STEP (THREADS * VALUES)
#define SIMDGROUPS (THREADS / 32)
// A load that would begin after this one repeats it: what is seen twice changes nothing.
#define LAST (VOCAB_SIZE - VALUES)
#define NO_ID 0x7FFFFFFF

struct Pick {
  float logit;
  int id, is_finite;
};

inline float4 load_logits(device const float* logits, int at) {
#if VOCAB_SIZE % VALUES
  return float4(logits[at], logits[at + 1], logits[at + 2], logits[at + 3]);
#else
  return *(device const float4*)(logits + at);
#endif
}

inline Pick simd_pick(Pick mine) {
  Pick pick;
  pick.logit = simd_max(mine.logit);
  pick.id = simd_min(mine.logit == pick.logit ? mine.id : NO_ID);
  pick.is_finite = simd_min(mine.is_finite);
  return pick;
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void argmax(
    device int* out,
    device const float* logits,
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float logit_of[SIMDGROUPS];
  threadgroup int id_of[SIMDGROUPS];
  threadgroup int is_finite_of[SIMDGROUPS];
  logits += row * VOCAB_SIZE;
  out += row * 2;
  Pick pick;
  pick.logit = -INFINITY;
  pick.id = 0;
  pick.is_finite = 1;
  for (int first = int(thread_index) * VALUES; first < VOCAB_SIZE; first += LOADS * STEP) {
    float4 values[LOADS];
    for (int i = 0; i < LOADS; i++) values[i] = load_logits(logits, min(first + i * STEP, LAST));
    for (int i = 0; i < LOADS; i++) {
      const int id = min(first + i * STEP, LAST);
      for (int j = 0; j < VALUES; j++) {
        // Ids rise, so the first of equals stays. A NaN is not larger than anything.
        if (values[i][j] > pick.logit) {
          pick.logit = values[i][j];
          pick.id = id + j;
        }
        pick.is_finite &= int(isfinite(values[i][j]));
      }
    }
  }
  pick = simd_pick(pick);
  if (lane == 0) {
    logit_of[simdgroup] = pick.logit;
    id_of[simdgroup] = pick.id;
    is_finite_of[simdgroup] = pick.is_finite;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int from = min(int(lane), SIMDGROUPS - 1);
  pick.logit = logit_of[from];
  pick.id = id_of[from];
  pick.is_finite = is_finite_of[from];
  pick = simd_pick(pick);
  if (thread_index == 0) {
    out[0] = pick.id;
    out[1] = pick.is_finite;
  }
}
