// lanes.metal for NVIDIA GPUs.
#define TILE 8

typedef simdgroup_matrix<float, 8, 8> Sums;

inline int lane_output(uint lane) { return int(lane / 4); }
inline int lane_quarter(uint lane) { return int(lane % 4); }
inline int lane_row(uint lane) { return 2 * lane_quarter(lane); }
