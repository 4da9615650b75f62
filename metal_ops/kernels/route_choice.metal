// The experts that a row's logits choose, and their weights: what route and route_choose share.
//
//   score[t, e] = 1 / (1 + exp(-logits[t, e]))
//   choices of t: the ACTIVE experts of the largest score + expert_bias, the lowest id of equals, largest first
//   weights[t, a] = score[t, choice a of t] / (sum of the chosen scores + 1e-6) * SCALE
//
// without the division unless IS_NORMALISED; all in fp32. A NaN is never chosen; with nothing left, expert 0 is.
//
// A SIMD-group has OWN_ROWS rows; its lane has the SLOTS experts lane, lane + 32, ... of each. A row alone waits twice
// for memory: for its logits, and for those of its choices again, out of the nearest cache. ROWS rows at a time wait
// together, for their logits and for each reduction. Scores are compared as integers, which NVIDIA's GPUs reduce in one
// instruction and floats in ten. A row's weights are summed by a lane in order of choice: their bits are its own.
// 2 * ROWS * SLOTS <= 16 scores a thread.
#define NO_ID 0x7FFFFFFF
// Less than what any number is ordered by.
#define NEVER (-0x7FFFFFFF - 1)
#if HAS_BIAS
#define BIAS_BUFFER device const float *expert_bias,
#define BIAS expert_bias,
#define BIAS_OF(expert) expert_bias[expert]
#else
#define BIAS_BUFFER
#define BIAS
#define BIAS_OF(expert) 0
#endif

// Of the lane's experts, or of the last.
inline void load_bias(thread float (&bias)[SLOTS], BIAS_BUFFER uint lane) {
  for (int i = 0; i < SLOTS; i++) bias[i] = BIAS_OF(min(32 * i + int(lane), NUM_EXPERTS - 1));
}

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

// The choices of rows, in the places of `chosen` that are theirs.
template <typename Chosen>
inline void choose_rows(
    Chosen chosen,
    device const float* logits,
    thread const float (&bias)[SLOTS],
    int first_row,
    int end_row,
    uint lane) {
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
          if (id[r] == 32 * i + int(lane)) left[r][i] = NEVER;
        }
        if (lane == 0 && row + r < end_row) chosen[(row + r) * ACTIVE + a] = id[r];
      }
    }
  }
}

// The weights of rows, each a lane's.
template <typename Chosen>
inline void weigh_rows(
    device float* weights, Chosen chosen, device const float* logits, int first_row, int end_row, uint lane) {
  for (int row = first_row + int(lane); row < end_row; row += 32) {
    float picked[ACTIVE], total = 0;
    for (int a = 0; a < ACTIVE; a++) {
      picked[a] = score_of(logits[row * NUM_EXPERTS + chosen[row * ACTIVE + a]]);
      total += picked[a];
    }
    const float divisor = IS_NORMALISED ? total + 1e-6f : 1.0f;
    for (int a = 0; a < ACTIVE; a++) weights[row * ACTIVE + a] = fast::divide(picked[a], divisor) * SCALE;
  }
}
