"""Which shapes the hand-written kernels take, and which go to reference(): pure functions."""

import pytest
from tinygrad import dtypes

from metal_ops.attention import attend_kernels, num_pair_tiles
from metal_ops.contract.limits import exceeded
from metal_ops.conv import conv_kernel
from metal_ops.experts import expert_down_kernel, expert_gate_up_kernel
from metal_ops.kernel import Target
from metal_ops.matmul import gate_up_kernel, matmul_kernel, project_kernel
from metal_ops.norm import norm_kernel
from metal_ops.product_tile import tile_of
from metal_ops.products import WeightKind, num_chunks
from metal_ops.qk import qk_kernel
from metal_ops.route import route_kernels
from metal_ops.table import Capacity

F32, F16, BF16, I32 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32
ONE = Capacity(1, 1, 1)


@pytest.mark.parametrize(
    "hidden, heads, kv_heads, ffn, vocab",
    [
        (1024, 16, 8, 4608, 65536),
        (1536, 24, 8, 6912, 65536),
        (2048, 32, 8, 8192, 65536),
        (2560, 32, 8, 10752, 128000),
        (2048, 32, 8, 7168, 128000),
        (2048, 32, 8, 11776, 124928),
    ],
)
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("rows", [1, 32, 512])
def test_published_shapes_have_kernels(hidden, heads, kv_heads, ffn, vocab, bits, rows):
    """350M to 24B-A2B, plain and in groups of 64, one row and a chunk."""

    def weight(*shape):
        return WeightKind(shape, BF16, bits, 64 if bits else 0)

    capacity, head_dim = Capacity(rows, 1, 1), hidden // heads
    pool = (262144, kv_heads, head_dim)
    q, kv = weight(hidden, hidden), weight(kv_heads * head_dim, hidden)
    kernels = [
        matmul_kernel(rows, weight(3 * hidden, hidden), BF16, BF16),
        matmul_kernel(1, weight(vocab, hidden), BF16, F32),
        matmul_kernel(rows, weight(hidden, ffn), BF16, BF16),
        gate_up_kernel(rows, weight(ffn, hidden), weight(ffn, hidden), BF16),
        project_kernel(rows, q, kv, kv, BF16),
        conv_kernel(capacity, (9, 64, hidden), 3, BF16, BF16, None),
        qk_kernel(capacity, heads, pool, 262144, 1e-5, BF16, BF16, BF16, BF16),
        norm_kernel(rows, hidden, BF16, BF16, 1e-5, True, 4, None),
        matmul_kernel(rows, weight(64, hidden), BF16, F32),
        *(route_kernels(rows, 64, 4, True, True, 1.0) or [None]),
        expert_gate_up_kernel(rows, 4, weight(64, 1536, hidden), weight(64, 1536, hidden), BF16),
        expert_down_kernel(rows * 4, weight(64, hidden, 1536), BF16),
        *(attend_kernels(capacity, heads, pool, head_dim**-0.5, BF16, BF16) or [None]),
    ]
    assert None not in kernels
    assert [fault for kernel in kernels for fault in exceeded(kernel)] == []


@pytest.mark.parametrize(
    "weight, dtype, is_served",
    [
        (WeightKind((97, 96), BF16), BF16, True),
        (WeightKind((97, 96), BF16), F32, True),
        (WeightKind((97, 67), BF16), BF16, False),  # depth is no whole blocks
        (WeightKind((97, 96), F32), BF16, True),
        (WeightKind((97, 96), BF16), F16, True),
        (WeightKind((97, 128), F16, 4, 32), BF16, True),
        (WeightKind((97, 128), BF16, 5, 64), BF16, False),
        (WeightKind((97, 128), BF16, 4, 64), I32, False),
    ],
)
def test_weights_that_products_take(weight, dtype, is_served):
    kernels = [
        matmul_kernel(5, weight, dtype, F32),
        gate_up_kernel(5, weight, weight, dtype),
        project_kernel(5, weight, weight, weight, dtype),
    ]
    assert [kernel is not None for kernel in kernels] == [is_served] * 3


def test_weights_stored_in_two_ways_are_not_joined():
    plain, packed = WeightKind((64, 64), BF16), WeightKind((64, 64), BF16, 4, 32)
    assert gate_up_kernel(1, plain, packed, BF16) is None
    assert project_kernel(1, plain, packed, packed, BF16) is None
    assert project_kernel(1, plain, plain, packed, BF16) is None


def test_the_chunks_of_a_sum_depend_on_the_weight_alone():
    assert num_chunks(WeightKind((8, 2048), BF16)) == 8
    assert num_chunks(WeightKind((8, 96), BF16)) == 3
    assert num_chunks(WeightKind((8, 256), BF16, 4, 128)) == 2
    sources = [
        matmul_kernel(rows, WeightKind((64, 2048), BF16), BF16, BF16).source
        for rows in (1, 9, 512, 4096)
    ]
    assert all("#define CHUNKS 8\n" in source for source in sources)
    assert ["#define IS_STAGED 1\n" in source for source in sources] == [False, False, False, True]


@pytest.mark.parametrize("target", Target)
def test_tiles_follow_the_rows_and_the_threadgroups_that_run_at_once(target):
    def tile(num_rows, num_outputs=2048, **options):
        return tile_of(WeightKind((num_outputs, 2048), BF16), BF16, num_rows, target, **options)

    sizes = [1, 8, 9, 16, 17, 32]
    assert [tile(rows).row_tiles for rows in sizes] == [1, 1, 2, 2, 4, 4]
    assert not any(tile(rows).is_staged for rows in sizes)
    assert tile(33).is_staged
    # Outputs are no more threadgroups than run at once, and few of them take no turns.
    assert tile(1).turns == 1
    assert tile(1, 65536).turns == 16
    assert tile(9, 65536).turns == 1
    assert tile(1, 65536, takes_turns=False).turns == 1
    assert tile(1, 65544).turns == 1
    assert tile(1, num_experts=8).turns > 1
    # Few threadgroups of many rows are smaller ones.
    assert tile(33).output_tiles < tile(512, 8192).output_tiles
    assert tile(33, num_weights=2).output_tiles >= 2


@pytest.mark.parametrize("target", Target)
def test_rows_are_staged_where_threadgroups_of_few_would_not_all_run_at_once(target):
    def is_staged(num_rows, num_outputs):
        kernel = matmul_kernel(
            num_rows, WeightKind((num_outputs, 2048), BF16), BF16, BF16, None, target
        )
        return "#define IS_STAGED 1\n" in kernel.source

    assert [is_staged(33, count) for count in (64, 1024, 8192)] == [False, False, True]
    assert [is_staged(rows, 64) for rows in (512, 4096)] == [False, True]


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("bits, group_size", [(0, 0), (4, 32), (4, 64), (8, 128)])
def test_many_rows_are_staged_where_stages_fit(target, dtype, bits, group_size):
    weight = WeightKind((2048, 2048), BF16, bits, group_size)
    assert tile_of(weight, dtype, 512, target).is_staged == (dtype is BF16 or group_size < 128)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("bits, group_size", [(0, 0), (4, 32), (4, 64), (8, 64), (8, 128)])
def test_hopper_has_products_of_its_own_for_rows_that_are_dealt(dtype, bits, group_size):
    weight = WeightKind((2048, 2048), BF16, bits, group_size)
    tiles = {target: tile_of(weight, dtype, 1024, target) for target in Target}
    assert [target for target in Target if tiles[target].is_wide] == (
        [Target.HOPPER] if dtype is not F32 and group_size == 64 else []
    )
    assert tiles[Target.METAL].num_rows == 32
    if dtype is not F32 and group_size < 128:
        assert tiles[Target.CUDA].num_rows == tiles[Target.HOPPER].num_rows == 64


def test_a_tile_is_no_higher_than_twice_the_members_of_an_expert():
    def tile(members, target):
        weight = WeightKind((64, 1536, 2048), BF16, 4, 64)
        return tile_of(weight, BF16, members, target, num_experts=64, fewest_many=16)

    for target in (Target.CUDA, Target.HOPPER):
        assert [tile(members, target).num_rows for members in (16, 32, 33, 64)] == [32, 32, 64, 64]


def test_what_other_kernels_refuse():
    ring = (3, 8, 64)
    assert conv_kernel(ONE, ring, 3, BF16, BF16, None)
    assert conv_kernel(ONE, (3, 8, 66), 3, BF16, BF16, None) is None
    assert conv_kernel(ONE, (3, 16, 64), 9, BF16, BF16, None) is None
    pool = (64, 2, 16)
    assert qk_kernel(ONE, 4, pool, 64, 1e-5, BF16, BF16, BF16, BF16)
    assert qk_kernel(ONE, 4, (64, 2, 15), 64, 1e-5, BF16, BF16, BF16, BF16) is None
    assert qk_kernel(ONE, 4, pool, 64, 1e-5, BF16, F32, BF16, BF16) is None
    assert qk_kernel(ONE, 4, pool, 64, 1e-5, BF16, BF16, BF16, F32) is None
    assert norm_kernel(1, 96, BF16, BF16, 1e-5, False, 0, None)
    assert norm_kernel(1, 97, BF16, BF16, 1e-5, False, 0, None) is None
    assert norm_kernel(1, 96, I32, BF16, 1e-5, False, 0, None) is None
    assert len(route_kernels(128, 256, 4, True, True, 1.0)) == 1
    assert len(route_kernels(129, 256, 4, True, True, 1.0)) == 2
    assert route_kernels(8, 257, 4, True, True, 1.0) == ()


@pytest.mark.parametrize("target", Target)
def test_tiles_of_attention_are_wide_where_there_are_enough(target):
    def pair_tiles(rows, heads, head_dim=64, segments=1):
        return num_pair_tiles(Capacity(rows, segments, segments), heads // 8, 8, head_dim, target)

    wide = 2 if target is Target.METAL else 4
    assert [pair_tiles(rows, 32) for rows in (32, 33, 512, 1024, 2048)] == [2, 2, 2, wide, wide]
    assert [pair_tiles(rows, 16) for rows in (1024, 2048)] == [2, wide]
    assert pair_tiles(2048, 32, head_dim=128) == wide // 2
    # No wider than a segment fills it.
    assert pair_tiles(2048, 16, segments=1024) == 1


def test_attention_takes_heads_of_multiples_of_16():
    def served(num_heads, head_dim, kv_heads=2, pool_dtype=F16):
        pool = (64, kv_heads, head_dim)
        return attend_kernels(ONE, num_heads, pool, 1.0, F16, pool_dtype) is not None

    assert [dim for dim in range(8, 161, 8) if served(4, dim)] == list(range(16, 129, 16))
    assert [n for n in (1, 2, 15, 16, 17, 32) if served(n, 64, kv_heads=1)] == [1, 2, 15, 16]
    assert not served(4, 16, pool_dtype=F32)


def test_attention_splits_few_rows_only():
    names = [
        [
            kernel.name.rpartition("_")[0].split("_")[1]
            for kernel in attend_kernels(Capacity(rows, 1, 1), 4, (64, 2, 64), 1.0, F16, F16)
        ]
        for rows in (32, 64)
    ]
    assert names == [["partial", "merge"], ["prompt"]]
