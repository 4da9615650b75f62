// embed: the rows of a weight that tokens name, plain or packed in BITS bits.
//
//   out[t, k] = T(weight[tokens[t], k])
//   out[t, k] = T(fma(code, scale, bias))          with BITS: those of row tokens[t], fma in fp32
//
// Grid: (column blocks, rows); THREADS threads. Called once a round by metal_ops/embed.py. A thread takes a vector of
// a plain row, or a word of codes, all of which share a scale. Reads the named rows and writes out once, 8 KB a row of
// 2,048 in bf16; the loads of a simdgroup lie side by side, and no thread waits for another.
#define VECTOR 4
#if BITS
#define VALUES (32 / BITS)
#define MASK ((1u << BITS) - 1)
#define WEIGHT_BUFFERS device const uint *weight_codes, device const W *weight_scales, device const W *weight_biases,
#else
#define VALUES VECTOR
#define WEIGHT_BUFFERS device const W *weight_values,
#endif

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void embed(
    device T* out,
    device const int* tokens,
    WEIGHT_BUFFERS
    uint2 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint t = block.y;
  const uint at = (block.x * THREADS + thread_index) * VALUES;
  if (at >= WIDTH) return;
  const uint place = uint(tokens[t]) * WIDTH + at;
  out += t * WIDTH + at;
#if BITS
  const uint word = weight_codes[place / VALUES];
  const float scale = float(weight_scales[place / GROUP]);
  const float bias = float(weight_biases[place / GROUP]);
#else
  const vec<W, VECTOR> loaded = *(device const vec<W, VECTOR>*)(weight_values + place);
#endif
  for (int first = 0; first < VALUES; first += VECTOR) {
    vec<T, VECTOR> values;
    for (int i = 0; i < VECTOR; i++) {
#if BITS
      const uint code = (word >> (BITS * (first + i))) & MASK;
      values[i] = T(fma(float(code), scale, bias));
#else
      values[i] = T(float(loaded[i]));
#endif
    }
    *(device vec<T, VECTOR>*)(out + first) = values;
  }
}
