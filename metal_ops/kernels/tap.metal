// tap: the rows of a layer's output, copied into one tap's columns of a packed scratch.
//
//   scratch[t, TAP * WIDTH + c] = x[t, c]          a row of the scratch is TAPS * WIDTH wide
//
// Grid: (column blocks, rows of x); THREADS threads, each of which copies VALUES columns. Called by metal_ops/tap.py
// after each tapped layer. The columns of the other taps, and the rows after those of x, are not touched. Moves the
// rows once in and once out, 8 KB a row of 2,048 in bf16, by loads and stores of 8 bytes side by side; no thread
// waits for another.
#define VALUES 4
#define ROW_SIZE (TAPS * WIDTH)

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void tap(
    device T* scratch,
    device const T* x,
    uint2 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint t = block.y;
  const uint at = (block.x * THREADS + thread_index) * VALUES;
  if (at >= WIDTH) return;
  scratch += t * ROW_SIZE + TAP * WIDTH + at;
  x += t * WIDTH + at;
  *(device vec<T, VALUES>*)scratch = *(device const vec<T, VALUES>*)x;
}
