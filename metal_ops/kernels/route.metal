// route: the experts that each row's logits choose, their weights, and the pairs (row, choice) grouped by expert.
//
//   score[t, e] = 1 / (1 + exp(-logits[t, e]))
//   choices of t: the ACTIVE experts of the largest score + expert_bias, the lowest id of equals, largest first
//   weights[t, a] = score[t, choice a of t] / (sum of the chosen scores + 1e-6) * SCALE
//   lists = how many experts have pairs; those experts; the first place and the number of each one's pairs; the pairs
//
// without the division unless IS_NORMALISED; all in fp32. A NaN is never chosen; with nothing left, expert 0 is. The
// pairs are in order of expert, then of pair, in the layout of `Lists` in metal_ops/route.py. What lies beyond the
// experts that have pairs, and the spare place, is not written.
//
// Grid: one threadgroup; THREADS threads. Called once a mixture by metal_ops/route.py. One threadgroup, because where
// an expert's pairs begin depends on the choices of all rows, and a launch of its own would wait longer than it works.
// A SIMD-group has OWN_ROWS rows; its lane has the experts lane, lane + 32, ... in all that is done: it scores them and
// counts their pairs, and after the barrier, when it knows how many come before, places them. A row alone waits twice
// for memory: for its logits, and for those of its choices again, out of the nearest cache. ROWS rows at a time wait
// together, for their logits and for each reduction. A round of 512 rows, 64 experts and 4 choices is some 5,000
// instructions of each of 16 SIMD-groups. Scores are compared as integers, which NVIDIA's GPUs reduce in one
// instruction and floats in ten.
// Reads the logits once from memory. A row's weights are summed by a lane in order of choice: their bits are its own.
// One barrier; 2 * ROWS * SLOTS <= 16 scores and 3 * SLOTS counts a thread; 2 bytes of threadgroup memory for a choice
// and for a count of a SIMD-group, 6 KB at 512 rows, 4 choices and 64 experts.
#define SIMDGROUPS (THREADS / 32)
// The experts of a lane.
#define SLOTS ((NUM_EXPERTS + 31) / 32)
#define NO_ID 0x7FFFFFFF
// Less than what any number is ordered by.
#define NEVER (-0x7FFFFFFF - 1)

// Other divisions branch on NVIDIA's GPUs, and a score's loads would wait for the score before. These end at 2^126.
inline float score_of(float logit) {
  const float divisor = 1 + exp(-logit);
  return divisor > 8.5e37f ? 0.0f : fast::divide(1.0f, divisor);
}

// Two numbers compare as these do; what must not be chosen is the least. No sum with a score is -0.
inline int ordered(float x) {
  const int bits = as_type<int>(x);
  return x > -INFINITY ? bits ^ ((bits >> 31) & 0x7FFFFFFF) : NEVER;
}

inline uint lanes_where(bool is_so) { return uint(simd_vote::vote_t(simd_ballot(is_so))); }

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void route(
    device float* weights,
    device int* lists,
    device const float* logits,
#if HAS_BIAS
    device const float* expert_bias,
#endif
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup ushort chosen[NUM_ROWS * ACTIVE];
  threadgroup ushort counts[SIMDGROUPS][32 * SLOTS];
  const int first_row = int(simdgroup) * OWN_ROWS;
  const int end_row = min(first_row + OWN_ROWS, NUM_ROWS);
  float bias[SLOTS];
  int count[SLOTS];
  for (int i = 0; i < SLOTS; i++) {
    bias[i] = 0;
#if HAS_BIAS
    bias[i] = expert_bias[min(32 * i + int(lane), NUM_EXPERTS - 1)];
#endif
    count[i] = 0;
  }

  for (int row = first_row; row < end_row; row += ROWS) {
    // Rows and experts beyond the last are the last again; these are never chosen, and those not kept.
    float values[ROWS][SLOTS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      device const float* of_row = logits + min(row + r, end_row - 1) * NUM_EXPERTS;
      for (int i = 0; i < SLOTS; i++) values[r][i] = of_row[min(32 * i + int(lane), NUM_EXPERTS - 1)];
    }
    int left[ROWS][SLOTS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      for (int i = 0; i < SLOTS; i++) {
        left[r][i] = 32 * i + int(lane) < NUM_EXPERTS ? ordered(score_of(values[r][i]) + bias[i]) : NEVER;
      }
    }
    for (int a = 0; a < ACTIVE; a++) {
      int best[ROWS], id[ROWS], largest[ROWS];
      UNROLL for (int r = 0; r < ROWS; r++) {
        // A lane's ids rise, so the first of equals stays. With nothing left, all lanes have their first: 0 is least.
        best[r] = left[r][0];
        id[r] = lane;
        for (int i = 1; i < SLOTS; i++) {
          if (left[r][i] > best[r]) {
            best[r] = left[r][i];
            id[r] = 32 * i + int(lane);
          }
        }
      }
      UNROLL for (int r = 0; r < ROWS; r++) largest[r] = simd_max(best[r]);
      UNROLL for (int r = 0; r < ROWS; r++) id[r] = simd_min(best[r] == largest[r] ? id[r] : NO_ID);
      UNROLL for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < SLOTS; i++) {
          const bool is_it = id[r] == 32 * i + int(lane);
          if (is_it) left[r][i] = NEVER;
          count[i] += int(is_it && row + r < end_row);
        }
        if (lane == 0 && row + r < end_row) chosen[(row + r) * ACTIVE + a] = ushort(id[r]);
      }
    }
  }
  for (int i = 0; i < SLOTS; i++) counts[simdgroup][32 * i + int(lane)] = ushort(count[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // The weights of a row are a lane's.
  for (int row = first_row + int(lane); row < end_row; row += 32) {
    float picked[ACTIVE], total = 0;
    for (int a = 0; a < ACTIVE; a++) {
      picked[a] = score_of(logits[row * NUM_EXPERTS + chosen[row * ACTIVE + a]]);
      total += picked[a];
    }
    const float divisor = IS_NORMALISED ? total + 1e-6f : 1.0f;
    for (int a = 0; a < ACTIVE; a++) weights[row * ACTIVE + a] = fast::divide(picked[a], divisor) * SCALE;
  }

  const uint before_lane = (1u << lane) - 1;
  // Where the next pair of each of the lane's experts goes.
  int place[SLOTS], num_listed = 0, num_used = 0;
  for (int i = 0; i < SLOTS; i++) {
    const int expert = 32 * i + int(lane);
    int before = 0, total = 0;
    for (int s = 0; s < SIMDGROUPS; s++) {
      const int of_s = counts[s][expert];
      total += of_s;
      if (s < int(simdgroup)) before += of_s;
    }
    const int first = num_listed + simd_prefix_exclusive_sum(total);
    place[i] = PAIRS_OFFSET + first + before;
    const uint used = lanes_where(total > 0);
    if (simdgroup == 0 && total > 0) {
      const int at = num_used + int(popcount(used & before_lane));
      lists[EXPERTS_OFFSET + at] = expert;
      lists[FIRSTS_OFFSET + at] = first;
      lists[COUNTS_OFFSET + at] = total;
    }
    num_listed = simd_shuffle(first + total, 31);
    num_used += int(popcount(used));
  }
  if (simdgroup == 0 && lane == 0) lists[0] = num_used;
  for (int from = first_row * ACTIVE; from < end_row * ACTIVE; from += 32) {
    const int pair = from + int(lane);
    const bool is_pair = pair < end_row * ACTIVE;
    const int expert = is_pair ? chosen[pair] : 0;
    // Which of these pairs are of the same expert, and which of each of the lane's: all bits of the ids agree. What is
    // beyond the last pair comes after all of them, and nothing after it.
    uint alike = ~0u, own[SLOTS];
    for (int i = 0; i < SLOTS; i++) own[i] = ~0u;
    for (int bit = 0; (NUM_EXPERTS - 1) >> bit; bit++) {
      const uint ones = lanes_where((expert >> bit) & 1);
      alike &= (expert >> bit) & 1 ? ones : ~ones;
      for (int i = 0; i < SLOTS; i++) own[i] &= ((32 * i + int(lane)) >> bit) & 1 ? ones : ~ones;
    }
    int to = 0;
    for (int i = 0; i < SLOTS; i++) {
      const int of_slot = simd_shuffle(place[i], ushort(expert % 32));
      if (expert / 32 == i) to = of_slot;
      place[i] += int(popcount(own[i]));
    }
    if (is_pair) lists[to + int(popcount(alike & before_lane))] = pair;
  }
}
