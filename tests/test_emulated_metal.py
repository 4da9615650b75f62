"""Kernels as one writes them run right on the emulator: against numpy, in both builds, in every
order of threads.
"""

import multiprocessing
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from metal_ops.emulated_metal import MetalLaunchError, build, compile, from_bfloat, run, to_bfloat
from metal_ops.emulated_metal.toolchain import find_toolchain

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="emulated on Linux; a Mac has the real METAL"
)

EXAMPLES = Path(__file__).parent / "metal_examples"
MODES = [
    ("checked", "fifo"),
    ("checked", "reverse"),
    ("checked", "random"),
    ("fast", "fifo"),
    ("fast", "random"),
]
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
POSITION = "uint i [[thread_position_in_grid]]"

STORE = {"f32": np.float32, "f16": np.float16, "bf16": to_bfloat}
LOAD = {"f32": np.asarray, "f16": np.float32, "bf16": from_bfloat}
in_all_modes = pytest.mark.parametrize("mode, order", MODES)


@cache
def example(name, mode):
    return compile((EXAMPLES / name).read_text(), name, checked=mode == "checked")


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unset(dtype, *shape):
    return STORE[dtype](np.full(shape, np.nan, np.float32))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@in_all_modes
@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-5), ("f16", 2e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("rows, width, threads", [(3, 2048, 256), (1, 100, 96)])
def test_rms_norm(mode, order, dtype, tolerance, rows, width, threads):
    x, weight = STORE[dtype](normal(0, rows, width)), STORE[dtype](normal(1, width))
    out = unset(dtype, rows, width)
    kernel = example("rms_norm.metal", mode)[f"rms_norm_{dtype}"]
    run(
        kernel,
        rows,
        threads,
        out,
        x,
        weight,
        np.int32(width),
        np.float32(1e-5),
        order=order,
        seed=3,
    )
    x, weight = LOAD[dtype](x).astype(np.float64), LOAD[dtype](weight)
    want = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(LOAD[dtype](out), want, rtol=tolerance, atol=tolerance)


@in_all_modes
@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-4), ("f16", 2e-2), ("bf16", 1e-1)])
def test_matvec_4bit(mode, order, dtype, tolerance):
    rows, outputs, width = 2, 64, 1024
    values = np.random.default_rng(0).integers(0, 16, (outputs, width)).astype(np.uint32)
    packed = (values.reshape(outputs, -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(
        -1, dtype=np.uint32
    )
    scales = STORE[dtype](normal(1, outputs, width // 64) * 0.01)
    biases = STORE[dtype](normal(2, outputs, width // 64) * 0.1)
    x, out = STORE[dtype](normal(3, rows, width)), unset(dtype, rows, outputs)
    kernel = example("matvec_4bit.metal", mode)[f"matvec_4bit_{dtype}"]
    arguments = (out, x, packed, scales, biases, np.int32(width), np.int32(outputs))
    run(kernel, (outputs // 8, rows), (32, 2), *arguments, order=order, seed=1)
    scales, biases = (
        np.repeat(LOAD[dtype](part).astype(np.float64), 64, 1) for part in (scales, biases)
    )
    want = LOAD[dtype](x) @ (scales * values + biases).T
    np.testing.assert_allclose(LOAD[dtype](out), want, rtol=tolerance, atol=tolerance)


@in_all_modes
@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-4), ("f16", 2e-2), ("bf16", 2e-1)])
def test_matmul(mode, order, dtype, tolerance):
    m, n, k = 37, 64, 96
    a, b, c = STORE[dtype](normal(0, m, k)), STORE[dtype](normal(1, n, k)), unset(dtype, m, n)
    kernel = example("matmul.metal", mode)[f"matmul_{dtype}"]
    run(
        kernel,
        (n // 32, 2),
        128,
        c,
        a,
        b,
        np.int32(m),
        np.int32(n),
        np.int32(k),
        order=order,
        seed=5,
    )
    want = LOAD[dtype](a).astype(np.float64) @ LOAD[dtype](b).T
    np.testing.assert_allclose(LOAD[dtype](c), want, rtol=tolerance, atol=tolerance)


@in_all_modes
def test_argmax(mode, order):
    kernel = example("argmax.metal", mode)["argmax"]
    x = np.round(normal(0, 6, 3001) * 2)
    x[1] = -np.inf
    x[1, 77] = x[1, 99] = 3.0
    x[4, 5] = np.nan
    out, is_bad = np.full(6, -1, np.int32), np.zeros(1, np.uint32)
    run(kernel, 6, 256, out, is_bad, x, np.int32(3001), order=order, seed=2)
    np.testing.assert_array_equal(out, np.where(np.isnan(x), -np.inf, x).argmax(1))
    assert is_bad[0] == 1
    is_bad[0] = 0
    run(kernel, 1, 1024, out[:1], is_bad, x[:1], np.int32(3001), order=order)
    assert is_bad[0] == 0


@in_all_modes
def test_attention_by_chunks(mode, order):
    heads, group, width, length, num_keys, chunk = 8, 4, 64, 512, 203, 64
    library, num_chunks = example("attention.metal", mode), length // chunk
    q = normal(0, heads, width).astype(np.float16)
    k, v = (normal(seed, heads // group, length, width).astype(np.float16) for seed in (1, 2))
    k[:, num_keys:] = v[:, num_keys:] = np.nan
    types = [
        ("num_keys", "i4"),
        ("chunk", "i4"),
        ("length", "i4"),
        ("group", "i4"),
        ("scale", "f4"),
    ]
    sizes = np.array([(num_keys, chunk, length, group, 0.125)], types)
    partial, max_and_sum = (
        unset("f32", heads, num_chunks, width),
        unset("f32", heads, num_chunks, 2),
    )
    out = unset("f16", heads, width)
    arguments = (partial, max_and_sum, q, k, v, sizes)
    run(library["attention_partial"], (heads, num_chunks), 128, *arguments, order=order, seed=9)
    run(
        library["attention_merge"],
        heads,
        64,
        out,
        partial,
        max_and_sum,
        np.int32(num_chunks),
        order=order,
    )
    keys, values = (np.repeat(part[:, :num_keys], group, 0).astype(np.float64) for part in (k, v))
    weights = softmax(np.einsum("hd,htd->ht", q.astype(np.float64), keys) * 0.125)
    np.testing.assert_allclose(out, np.einsum("ht,htd->hd", weights, values), rtol=2e-3, atol=2e-3)


# What the launches are made of.

COUNTER = f"""{HEAD}kernel void count(device int* out, device atomic_int* counter, {POSITION}) {{
  out[i] = atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}}"""


def started(order, seed=0, grid=4, threads=8):
    """When each thread ran."""
    out = np.zeros(grid * threads, np.int32)
    run(
        compile(COUNTER)["count"], grid, threads, out, np.zeros(1, np.int32), order=order, seed=seed
    )
    return out.tolist()


def test_orders():
    assert started("fifo") == list(range(32))
    assert started("reverse") == list(range(31, -1, -1))
    shuffled = started("random", seed=1, grid=1, threads=32)
    assert sorted(shuffled) == list(range(32)) != shuffled
    assert (
        shuffled
        == started("random", seed=1, grid=1, threads=32)
        != started("random", seed=2, grid=1, threads=32)
    )


def test_threadgroups_are_shuffled_too():
    orders = [np.argsort(started("random", seed, grid=7, threads=1)) for seed in range(8)]
    assert len({tuple(order) for order in orders}) > 2
    assert any(((np.diff(order) - 1) % 7).any() for order in orders), (
        "each order is fifo from another start"
    )


def test_positions():
    source = f"""{HEAD}kernel void positions(device uint* out,
      uint3 grid [[thread_position_in_grid]], ushort3 group [[threadgroup_position_in_grid]],
      uint3 thread_at [[thread_position_in_threadgroup]], uint3 threads [[threads_per_threadgroup]],
      uint3 groups [[threadgroups_per_grid]], uint3 all [[threads_per_grid]],
      uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
      uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
      uint width [[threads_per_simdgroup]]) {{
      if (group.x != 1 || group.y != 2 || index != 41) return;
      const uint seen[] = {{grid.x, grid.y, thread_at.x, thread_at.y, threads.x, threads.y, groups.x, groups.y,
                           all.x, all.y, lane, simdgroup, simdgroups, width}};
      for (int i = 0; i < 14; i++) out[i] = seen[i];
    }}"""
    out = np.zeros(14, np.uint32)
    run(compile(source)["positions"], (2, 3), (6, 8), out)
    assert out.tolist() == [11, 22, 5, 6, 6, 8, 2, 3, 12, 24, 9, 1, 2, 32]


def test_simd_functions():
    source = f"""{HEAD}kernel void simd(device float* out, device const float* x, {POSITION}) {{
      out[i] = simd_sum(x[i]);
      out[32 + i] = simd_max(x[i]);
      out[64 + i] = simd_prefix_exclusive_sum(x[i]);
      out[96 + i] = simd_shuffle_and_fill_up(x[i], -1.0f, 3);
      out[128 + i] = simd_shuffle_rotate_down(x[i], 5);
      out[160 + i] = simd_broadcast_first(x[i]);
      out[192 + i] = float(ulong(simd_ballot(x[i] > 16)));
      out[224 + i] = quad_shuffle_xor(x[i], 1);
    }}"""
    x = np.random.default_rng(0).permutation(32).astype(np.float32)
    out = np.zeros(256, np.float32)
    run(compile(source)["simd"], 1, 32, out, x, order="random", seed=4)
    lanes = np.arange(32)
    want = [
        np.full(32, x.sum()),
        np.full(32, 31),
        x.cumsum() - x,
        np.append([-1, -1, -1], x[:-3]),
        np.roll(x, -5),
    ]
    want += [np.full(32, x[0]), np.full(32, float((1 << lanes[x > 16]).sum())), x[lanes ^ 1]]
    np.testing.assert_array_equal(out, np.concatenate(want).astype(np.float32))


def test_simd_functions_of_a_smaller_simdgroup():
    source = f"""{HEAD}kernel void simd(device float* out, device const float* x, {POSITION}) {{
      out[i] = simd_sum(x[i]);
      out[21 + i] = simd_min(x[i]);
      out[42 + i] = simd_shuffle_xor(x[i], 1);
    }}"""
    x = np.arange(1, 22, dtype=np.float32)
    out = np.zeros(63, np.float32)
    run(compile(source)["simd"], 1, 21, out, x)
    # The neighbour of the last lane does not exist.
    want = [np.full(21, x.sum()), np.full(21, 1), np.append(x[np.arange(20) ^ 1], np.nan)]
    np.testing.assert_array_equal(out, np.concatenate(want).astype(np.float32))


@pytest.mark.parametrize("has_instructions", [True, False])
def test_every_half_and_the_bfloats_round_as_in_numpy(monkeypatch, has_instructions):
    if not has_instructions:
        monkeypatch.setattr(build, "_cpu_flags", lambda: ())
    source = f"""{HEAD}kernel void convert(device half* h, device bfloat* b, device float* f, device const float* x,
      device const half* y, {POSITION}) {{
      h[i] = half(x[i]);
      b[i] = bfloat(x[i]);
      f[i] = float(y[i]);
    }}"""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    # Every half, and the points halfway between two and beside them, where rounding decides.
    steps = halves.astype(np.float32).view(np.uint32)
    for offset in (0, 0x1000, 0x1001, 0x0FFF):
        x = (steps + np.uint32(offset)).view(np.float32)
        h, b, f = (
            np.zeros(1 << 16, np.float16),
            np.zeros(1 << 16, np.uint16),
            np.zeros(1 << 16, np.float32),
        )
        run(compile(source, checked=False)["convert"], 64, 1024, h, b, f, x, halves)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(h, x.astype(np.float16))
        np.testing.assert_array_equal(from_bfloat(b), from_bfloat(to_bfloat(x)))
        np.testing.assert_array_equal(f, halves.astype(np.float32))


@pytest.mark.parametrize("type, bits", [("float", 23), ("half", 10), ("bfloat", 7)])
def test_a_product_is_rounded_before_it_is_added(type, bits):
    source = f"""{HEAD}kernel void f(device float* out, device const float* x, {POSITION}) {{
      {type} a = {type}(x[0]), b = {type}(x[1]);
      out[0] = float(a * a - b);
      out[1] = fma(x[0], x[0], -x[1]);
    }}"""
    # The square of 1 + 3 * unit is 1 + 6 * unit, and a rest that a product of this type has no
    # place for.
    unit = 2.0**-bits
    x, out = np.array([1 + 3 * unit, 1 + 6 * unit], np.float32), np.zeros(2, np.float32)
    run(compile(source, checked=False)["f"], 1, 1, out, x)
    assert out.tolist() == [0, 9 * unit * unit]


def test_a_number_without_an_f_is_a_float():
    source = f"{HEAD}kernel void f(device int* out, {POSITION}) {{ out[0] = sizeof(1.5) + sizeof(1.5 * 2); }}"
    out = np.zeros(1, np.int32)
    run(compile(source)["f"], 1, 1, out)
    assert out[0] == 8


def test_buffers_with_and_without_numbers():
    source = f"""{HEAD}kernel void f(device int* a, constant int* b [[buffer(0)]], constant int& c, {POSITION}) {{
      a[i] = b[i] * 10 + c;
    }}"""
    out = np.zeros(2, np.int32)
    run(compile(source)["f"], 1, 2, np.array([1, 2], np.int32), out, np.int32(5))
    assert out.tolist() == [15, 25]


def test_several_may_store_the_same_value():
    source = f"""{HEAD}kernel void f(device float* out, {POSITION}) {{
      threadgroup float shared[1];
      shared[0] = 7;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = shared[0];
    }}"""
    out = np.zeros(64, np.float32)
    run(compile(source)["f"], 1, 64, out)
    assert (out == 7).all()


def test_one_array_may_be_given_twice_only_by_address():
    """run() copies, so two arguments never alias, and a kernel that fails changes nothing."""
    source = f"{HEAD}kernel void f(device int* out, device const int* x, {POSITION}) {{ out[i] = x[i + 1]; }}"
    x = np.arange(4, dtype=np.int32)
    with pytest.raises(MetalLaunchError, match="out-of-bounds"):
        run(compile(source)["f"], 1, 4, x, x)
    assert x.tolist() == [0, 1, 2, 3]
    run(compile(source)["f"], 1, 3, x, x)
    assert x.tolist() == [1, 2, 3, 3]


def test_a_launch_grants_more_threadgroup_memory_if_it_is_asked_to():
    source = f"{HEAD}kernel void f(device float* out, {POSITION}) {{ threadgroup float a[12 << 10]; out[i] = a[i] = 7; }}"
    kernel, out = compile(source)["f"], np.zeros(4, np.float32)
    with pytest.raises(MetalLaunchError, match="over the limit of 32768"):
        run(kernel, 1, 4, out)
    run(kernel, 1, 4, out, max_threadgroup_bytes=48 << 10)
    assert (out == 7).all()
    with pytest.raises(MetalLaunchError, match="49153 bytes of threadgroup memory, at most 49152"):
        run(kernel, 1, 4, out, max_threadgroup_bytes=(48 << 10) + 1)


def compile_and_run(source):
    out = np.zeros(4, np.int32)
    run(compile(source)["f"], 1, 4, out)
    return out.tolist()


def test_two_processes_fill_one_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = f"{HEAD}kernel void f(device int* out, {POSITION}) {{ out[i] = i * i; }}"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        got = pool.map(compile_and_run, [source] * 2, chunksize=1)
    assert got == [[0, 1, 4, 9]] * 2
    kept = (tmp_path / "lfm2" / "emulated_metal").iterdir()
    suffixes = sorted(path.suffix for path in kept if path.is_file() and path.suffix != ".sum")
    assert suffixes == [".ii", ".json", ".pch", ".pch", ".so", ".so"]


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "version, builds, is_chosen",
    [("19.1.0", True, True), ("14.0.6", True, False), ("19.1.0", False, False)],
)
def test_clang_on_the_path_if_it_is_new_and_whole(
    tmp_path, monkeypatch, version, builds, is_chosen
):
    answer = f'[ "$1" = --version ] && echo clang version {version} && exit 0'
    program(tmp_path, "clang", f"{answer}; exit {0 if builds else 1}")
    program(tmp_path, "ld.lld", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = find_toolchain.__wrapped__()
    if is_chosen:
        assert found.clang == (str(tmp_path / "clang"),) and found.linker == (
            str(tmp_path / "ld.lld"),
        )
        assert found.major == 19
    else:
        assert found.clang[0] != str(tmp_path / "clang")
