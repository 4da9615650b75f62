// Products of a unit of packed weights on Hopper's tensor cores, which take the rows out of threadgroup memory: 4
// SIMD-groups at a time, of 16 outputs each, with all rows of the tile. What many_rows.metal stages is dealt to where
// they take it, in matrices of 8 rows by 8 of K. The sums are those of tile.cuh to the bit: 16 of K at a time, in the
// same order.
#define STAGE_MATRICES (STAGE_UNITS * UNIT / 8)
#define MATRIX_WORDS 32
#define MATRIX_BYTES (4 * MATRIX_WORDS)

// A lane's words of a tile's block of a unit: those of a SIMD-group are a matrix each, one after the other.
inline void store_wide(thread const RowsBlock& block, T* dealt, int tile, int number, uint lane) {
  uint* to = (uint*)dealt + (tile * STAGE_MATRICES + 4 * number) * MATRIX_WORDS + lane;
  UNROLL for (int j = 0; j < 4; j++) to[j * MATRIX_WORDS] = block.steps[j];
}

// Products of the first TILES tiles of rows, `dealt` from the unit on, with the weights of two tiles of outputs.
template <int TILES>
inline void multiply_unit(
    thread Sums (*products)[TILES_AT_ONCE], thread WeightsBlock (*blocks)[OUTPUT_TILES], int output, T* dealt) {
  const WideRows rows = wide_rows(dealt, MATRIX_BYTES, STAGE_MATRICES * MATRIX_BYTES);
  UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
    UNROLL for (int t = 0; t < TILES_AT_ONCE; t++) show_weights(blocks[b][output + t].steps);
  }
  begin_products();
  UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
    UNROLL for (int j = 0; j < 4; j += 2) {
      Wide<TILES>::multiply(
          T(),
          products,
          blocks[b][output].steps + j,
          blocks[b][output + 1].steps + j,
          rows_after(rows, (4 * b + j) * MATRIX_BYTES),
          b || j);
    }
  }
  Wide<TILES>::wait(products);
}
