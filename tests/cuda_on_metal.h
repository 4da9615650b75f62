// What cuda.cuh has and Metal's library lacks, on the emulated Metal and as PTX defines it, so that the texts for
// NVIDIA GPUs run there. test_cuda_on_metal.py puts it before a kernel's text.
namespace metal {
MSL_INLINE uint this_lane() { return emu_lane(); }

template <int TABLE>
MSL_INLINE uint looked_up(uint a, uint b, uint c) {
  uint result = 0;
  for (uint i = 0; i < 8; i++)
    if (TABLE >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
MSL_INLINE uint chosen_bytes(uint a, uint b, uint digits) {
  ulong bytes = (ulong)b << 32 | a;
  uint result = 0;
  for (uint i = 0; i < 4; i++) result |= (uint)(bytes >> 8 * (digits >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

template <class V>
METAL_FUNC V load_in_place(const V* from) {
  return *from;
}
template <class V>
METAL_FUNC V load_with_next(const V* from) {
  return *from;
}
MSL_LIBRARY bool hold_lanes(int number, MSL_SITE) {
  msl_all_lanes("hold_lanes", &number, sizeof number, file, line, column);
  if (number < 1 || number > 15) emu_fail("a barrier has a number from 1 to 15", file, line);
  return true;
}

// 8 x 16 times 16 x 8. A lane brings two words of each: of row, or column, lane / 4 the elements 2 * (lane % 4) and the
// next of K, then those 8 further. It gets row lane / 4, columns 2 * (lane % 4) and the next. Made once, by the first
// lane that goes on.
template <class T>
MSL_LIBRARY float2 msl_product(const uint (&given)[4], const char* file, int line, int column) {
  emu_exchange* exchange = msl_all_lanes("multiply_by_16", given, sizeof given, file, line, column);
  float* product = (float*)exchange->result;
  if (!exchange->has_result) {
    using row_of_8 = float __attribute__((ext_vector_type(8)));
    float left[8][16];
    row_of_8 right[16];
    for (uint lane = 0; lane < 32; lane++) {
      const uint* words = (const uint*)(exchange->slots + 16 * lane);
      for (uint i = 0; i < 4; i++) {
        uint k = 2 * (lane % 4) + i % 2 + i / 2 * 8;
        left[lane / 4][k] = (float)as_type<vec<T, 2>>(words[i / 2])[i % 2];
        right[k][lane / 4] = (float)as_type<vec<T, 2>>(words[2 + i / 2])[i % 2];
      }
    }
    for (int row = 0; row < 8; row++) {
      row_of_8 sum = left[row][0] * right[0];
      for (int k = 1; k < 16; k++) sum += left[row][k] * right[k];
      __builtin_memcpy(product + 8 * row, &sum, sizeof sum);
    }
    exchange->has_result = 1;
  }
  product += 2 * exchange->lane;
  return float2(product[0], product[1]);
}
template <class T>
MSL_LIBRARY void load_to_cache(const T* from, MSL_SITE) {
  emu_touch(from, sizeof(T), EMU_READ, file, line);
}
// Of 16 rows of a the upper and the lower half, each by itself. Sums: anything of two floats.
template <class T, class Upper, class Lower>
MSL_LIBRARY void multiply_by_16(T, Upper& upper, Lower& lower, const uint* a_upper, const uint* a_lower, const uint* b,
                                MSL_SITE) {
  float2 above = msl_product<T>({a_upper[0], a_upper[1], b[0], b[1]}, file, line, column);
  float2 below = msl_product<T>({a_lower[0], a_lower[1], b[0], b[1]}, file, line, column);
  for (int i = 0; i < 2; i++) {
    upper[i] += above[i];
    lower[i] += below[i];
  }
}

// Products of Hopper's: those that were begun are made at the wait, of rows as they are then.
struct WideRows {
  const char* at;
  int matrix_bytes, tile_bytes;
};
template <class T>
METAL_FUNC WideRows wide_rows(const T* from, int matrix_bytes, int tile_bytes) {
  return WideRows{(const char*)from, matrix_bytes, tile_bytes};
}
METAL_FUNC WideRows rows_after(WideRows rows, int num_bytes) {
  return WideRows{rows.at + num_bytes, rows.matrix_bytes, rows.tile_bytes};
}
struct Begun {
  struct {
    uint upper[2], lower[2];
    WideRows rows;
    bool is_added, is_bfloat;
  } products[8];
  uint count;
  bool is_open;
};
static Begun begun[1024];

template <int TILES>
struct Wide {
  template <class T, class Sums>
  MSL_LIBRARY void multiply(T, Sums, const uint* a_upper, const uint* a_lower, WideRows rows, bool is_added,
                            MSL_SITE) {
    Begun& own = begun[emu_thread()];
    if (!own.is_open) emu_fail("products that were not begun", file, line);
    if (own.count == 8) emu_fail("more than 8 products before a wait", file, line);
    auto& product = own.products[own.count++];
    for (int i = 0; i < 2; i++) {
      product.upper[i] = a_upper[i];
      product.lower[i] = a_lower[i];
    }
    product.rows = rows;
    product.is_added = is_added;
    product.is_bfloat = __is_same(T, bfloat);
  }
  template <class Sums>
  MSL_LIBRARY void wait(Sums sums, MSL_SITE) {
    Begun& own = begun[emu_thread()];
    for (uint n = 0; n < own.count; n++) {
      const auto& product = own.products[n];
      for (int tile = 0; tile < TILES; tile++) {
        auto &upper = sums[tile][0].thread_elements(), &lower = sums[tile][1].thread_elements();
        uint words[2];
        for (int i = 0; i < 2; i++) {
          const WideRows& rows = product.rows;
          const char* from = rows.at + tile * rows.tile_bytes + i * rows.matrix_bytes + 4 * emu_lane();
          emu_touch(from, 4, EMU_READ, file, line);
          __builtin_memcpy(&words[i], from, 4);
        }
        for (int i = 0; i < 2 && !product.is_added; i++) upper[i] = lower[i] = 0;
        if (product.is_bfloat)
          multiply_by_16(bfloat(), upper, lower, product.upper, product.lower, words, file, line, column);
        else
          multiply_by_16(half(), upper, lower, product.upper, product.lower, words, file, line, column);
      }
    }
    own.count = 0;
    own.is_open = false;
  }
};
// Of what these order the emulator has no order.
MSL_INLINE void show_weights(uint (&words)[4]) {}
MSL_INLINE void show_to_products() {}
MSL_LIBRARY void begin_products() { begun[emu_thread()].is_open = true; }

// What a thread has started to copy: done no sooner than it waits, and NaN until then.
struct Copies {
  struct {
    void* to;
    const void* from;
  } started[8][8];
  uint counts[8];
  uint num_groups, num_done;
};
static Copies copies[1024];

template <class T>
MSL_LIBRARY void copy_ahead(T* to, const T* from, MSL_SITE) {
  Copies& own = copies[emu_thread()];
  uint group = own.num_groups % 8, &count = own.counts[group];
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) emu_fail("a copy of 16 bytes that are not aligned", file, line);
  if (count == 8) emu_fail("more than 8 copies in a group", file, line);
  own.started[group][count].to = to;
  own.started[group][count++].from = from;
  emu_touch(to, 16, EMU_WRITE, file, line);
  __builtin_memset(to, 0xff, 16);
}
MSL_LIBRARY void end_copies(MSL_SITE) {
  Copies& own = copies[emu_thread()];
  if (++own.num_groups - own.num_done == 8) emu_fail("8 groups of copies, none of which was waited for", file, line);
}
template <int NUM_LEFT>
MSL_LIBRARY void wait_for_groups_but(MSL_SITE) {
  Copies& own = copies[emu_thread()];
  for (; (int)(own.num_groups - own.num_done) > NUM_LEFT; own.num_done++) {
    uint group = own.num_done % 8;
    for (uint i = 0; i < own.counts[group]; i++) {
      emu_touch(own.started[group][i].from, 16, EMU_READ, file, line);
      emu_touch(own.started[group][i].to, 16, EMU_WRITE, file, line);
      __builtin_memcpy(own.started[group][i].to, own.started[group][i].from, 16);
    }
    own.counts[group] = 0;
  }
}
}  // namespace metal
