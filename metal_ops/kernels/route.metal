// route: the experts that each row's logits choose, their weights, and the pairs (row, choice) grouped by expert.
// route_choice.metal says how they are chosen, route_grouping.metal how they are grouped.
//
// Grid: one threadgroup; THREADS threads. Called once a mixture by metal_ops/route.py where there are few rows: one
// threadgroup, because where an expert's pairs begin depends on the choices of all rows, and a launch of its own would
// wait longer than it works.
// A SIMD-group chooses for OWN_ROWS rows, counts their pairs, and after the barrier, when it knows how many come
// before, places them. Reads the logits once from memory. One barrier; 2 bytes of threadgroup memory for a choice and
// for a count of a SIMD-group, 3 KB at 128 rows, 4 choices and 64 experts.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void route(
    device float* weights,
    device int* lists,
    device const float* logits,
    BIAS_BUFFER
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup ushort chosen[NUM_ROWS * ACTIVE];
  threadgroup ushort counts[SIMDGROUPS * 32 * SLOTS];
  const int first_row = int(simdgroup) * OWN_ROWS;
  const int end_row = min(first_row + OWN_ROWS, NUM_ROWS);
  float bias[SLOTS];
  load_bias(bias, BIAS lane);
  wait_for_last_launch();
  choose_rows(&chosen[0], logits, bias, first_row, end_row, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  weigh_rows(weights, &chosen[0], logits, first_row, end_row, lane);
  group_pairs(lists, &counts[0], &chosen[0], first_row * ACTIVE, end_row * ACTIVE, lane, simdgroup);
}
