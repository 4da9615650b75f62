"""Faults planted in running kernels: the emulator names each, with the line. The tester's own
test.
"""

import re
import sys

import numpy as np
import pytest

from metal_ops.emulated_metal import MetalLaunchError, compile, run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="emulated on Linux; a Mac has the real METAL"
)

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
SIGNATURE = """kernel void f(
    device float* out, device const float* x, constant int& two, device atomic_int* counter,
    uint t [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]])"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# A race between two places, whichever comes first.
EITHER = "(read at {here}, earlier write at {there}|write at {there}, earlier read at {here})"


def kernel(body):
    return f"{HEAD}{SIGNATURE} {{{body}}}\n"


def launch(source, checked=True, grid=1, threads=128, order="fifo"):
    """x and out of a run on 128 values; `two` is 2, and out starts as NaN."""
    x = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    out = np.full(128, np.nan, np.float32)
    # Strict: a planted fault must be one that Metal's compiler would take.
    library = compile(source, checked=checked)
    run(
        library["f"], grid, threads, out, x, np.int32(2), np.zeros(1, np.int32), order=order, seed=7
    )
    return x, out


def line_of(source, mark):
    return next(
        (number for number, line in enumerate(source.splitlines(), 1) if mark in line), None
    )


FAULTS = {
    # Barriers that are missing, or fence the wrong memory.
    "read of what another SIMD-group writes": (
        """
    threadgroup float sums[4];
    const float sum = simd_sum(x[t]);
    if (lane == 0) sums[simdgroup] = sum; // there
    out[t] = sums[0] + sums[1] + sums[2] + sums[3]; // here
""",
        "read of uninitialised threadgroup memory 'sums' byte offset \\d+ at {here}",
    ),
    "write over what another thread still reads": (
        f"""
    threadgroup float shared[128];
    for (int round = 0; round < 3; round++) {{
      shared[t] = x[t] + round; // there
      {BARRIER}
      out[t] = shared[127 - t]; // here
    }}
""",
        f"data race on threadgroup shared byte offset \\d+: {EITHER} by thread \\d+, no mem_threadgroup barrier",
    ),
    "write over what all threads have read": (
        f"""
    threadgroup float shared[128];
    shared[t] = x[t];
    {BARRIER}
    out[t] = shared[0]; // there
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 126) shared[0] = 0; // here
""",
        "data race on threadgroup shared byte offset 0: write at {here}, earlier read at {there} by several threads",
    ),
    "no simdgroup_barrier within a SIMD-group": (
        f"""
    threadgroup float shared[128];
    shared[t] = 0;
    {BARRIER}
    shared[t] = x[t]; // there
    out[t] = shared[t ^ 1]; // here
""",
        f"data race on threadgroup shared .*{EITHER}",
    ),
    "simdgroup_barrier that fences the other memory": (
        f"""
    threadgroup float shared[128];
    shared[t] = 0;
    {BARRIER}
    shared[t] = x[t]; // there
    simdgroup_barrier(mem_flags::mem_device);
    out[t] = shared[t ^ 1]; // here
""",
        "data race on threadgroup shared .*read at {here}, earlier write at {there} by .*no mem_threadgroup barrier",
    ),
    "simdgroup_barrier between SIMD-groups": (
        f"""
    threadgroup float shared[128];
    shared[t] = 0;
    {BARRIER}
    shared[t] = x[t]; // there
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = shared[simdgroup == 3 ? t - 96 : t]; // here
""",
        "data race on threadgroup shared .*read at {here}, earlier write at {there} by thread \\d+",
    ),
    "threadgroup_barrier that fences the other memory": (
        f"""
    out[t] = x[t]; // there
    {BARRIER}
    const float value = out[127 - t]; // here
    threadgroup_barrier(mem_flags::mem_device);
    out[t] = value;
""",
        "data race on buffer 0 .*read at {here}, earlier write at {there} by thread .*no mem_device barrier",
    ),
    "threadgroup_barrier that fences nothing": (
        """
    threadgroup float shared[128];
    shared[t] = x[t]; // there
    threadgroup_barrier(mem_flags::mem_none);
    out[t] = shared[127 - t]; // here
""",
        "data race on threadgroup shared .*read at {here}, earlier write at {there}.*no mem_threadgroup barrier",
    ),
    "simdgroup_store without a barrier before its reader": (
        f"""
    threadgroup float tile[64 * 4];
    tile[2 * t] = tile[2 * t + 1] = 0;
    {BARRIER}
    simdgroup_store(simdgroup_float8x8(1.0f), tile + 64 * simdgroup); // there
    out[t] = tile[t]; // here
""",
        f"data race on threadgroup tile .*{EITHER}",
    ),
    # Who writes what.
    "two threadgroups that write one element": (
        "\n    out[t] = x[t] + group; // here\n",
        "data race on buffer 0 byte offset 0: write at {here}, earlier write at {here} by another threadgroup",
    ),
    "a threadgroup that reads what another writes": (
        """
    float value = 0;
    if (group == 1) value = out[127 - t]; // here
    if (group == 0) out[t] = x[t]; // there
    if (value == 7) atomic_store_explicit(counter, 1, memory_order_relaxed);
""",
        "data race on buffer 0 .*read at {here}, earlier write at {there} by another threadgroup",
    ),
    "threads that write different values": (
        f"""
    threadgroup float shared[2];
    shared[0] = t % 2; // here
    {BARRIER}
    out[t] = x[t] * shared[0];
""",
        "data race on threadgroup shared byte offset 2: write at {here}, earlier write at {here} by thread 0",
    ),
    "a plain read of what others change atomically": (
        """
    if (t < 100) atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); // there
    else out[t] = *(device int*)counter; // here
""",
        "data race on buffer 3 byte offset 0: read at {here}, earlier atomic access at {there} by several threads",
    ),
    "an atomic change of what others have read": (
        """
    if (t < 100) out[t] = *(device int*)counter; // there
    else atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); // here
""",
        "data race on buffer 3 byte offset 0: atomic access at {here}, earlier read at {there} by several threads",
    ),
    # Bounds.
    "read beyond a buffer": (
        "\n    out[t] = x[t + (t == 127 ? two : 0)]; // here\n",
        "out-of-bounds read of 4 bytes at {here}: buffer 1 has 512 bytes, access at byte offset 516",
    ),
    "read before a buffer": (
        "\n    out[t] = x[int(t) - 1]; // here\n",
        "out-of-bounds read of 4 bytes at {here}: buffer 1 has 512 bytes, access at byte offset -4",
    ),
    "write beyond a buffer": (
        "\n    out[t * 2] = x[t]; // here\n",
        "out-of-bounds write of 4 bytes at {here}: buffer 0 has 512 bytes, access at byte offset 512",
    ),
    "vector read across the end of a buffer": (
        """
    const float4 loaded = *(device const packed_float4*)(x + t); // here
    out[t] = loaded.x;
""",
        "out-of-bounds read of 16 bytes at {here}: buffer 1 has 512 bytes, access at byte offset 500",
    ),
    "simdgroup_load beyond a buffer": (
        """
    simdgroup_float8x8 a;
    simdgroup_load(a, x + 32 * simdgroup, 8); // here
    simdgroup_store(a, out + 64 * (simdgroup % 2), 8);
""",
        "out-of-bounds read of 4 bytes at {here}: buffer 1 has 512 bytes, access at byte offset",
    ),
    "index beyond a threadgroup array": (
        f"""
    threadgroup float shared[127], other[8];
    if (t < 8) other[t] = 0;
    shared[t] = x[t]; // here
    {BARRIER}
    out[t] = shared[t];
""",
        "undefined behaviour at {here}|out-of-bounds write .*{here}: threadgroup shared",
    ),
    "pointer beyond a threadgroup array": (
        f"""
    threadgroup float shared[127], other[8];
    threadgroup float* pointer = shared;
    if (t < 8) other[t] = 0;
    pointer[t] = x[t]; // here
    {BARRIER}
    out[t] = pointer[t];
""",
        "out-of-bounds write of 4 bytes at {here}: threadgroup shared has 508 bytes, access at byte offset 508",
    ),
    "index beyond a private array": (
        """
    float values[4] = {1, 2, 3, 4};
    out[t] = values[two + 2]; // here
""",
        "undefined behaviour at {here}",
    ),
    "private arrays beyond the stack": (
        """
    float values[60000]; // here
    for (int i = 0; i < 60000; i++) values[i] = x[(i + t) % 128];
    out[t] = values[two * 20000] + values[t];
""",
        "stack overflow",
    ),
    "write through a pointer to const": (
        "\n    ((device float*)x)[t] = 1; // here\n",
        "write to read-only buffer 1 at {here}",
    ),
    # Memory that no one wrote.
    "read of threadgroup memory that a part wrote": (
        f"""
    threadgroup float shared[128];
    if (t < 100) shared[t] = x[t];
    {BARRIER}
    out[t] = shared[t]; // here
""",
        "read of uninitialised threadgroup memory 'shared' byte offset \\d+ at {here}",
    ),
    "read of what an earlier threadgroup left": (
        f"""
    threadgroup float shared[128];
    if (group == 0) shared[t] = x[t];
    {BARRIER}
    if (group == 1) out[t] = shared[t]; // here
""",
        "read of uninitialised threadgroup memory 'shared' byte offset \\d+ at {here}.*threadgroup \\(1, 0, 0\\)",
    ),
    "atomic counter that starts with nothing": (
        """
    threadgroup atomic_int count;
    out[t] = atomic_fetch_add_explicit(&count, 1, memory_order_relaxed); // here
""",
        "read of uninitialised threadgroup memory 'count' byte offset 0 at {here}",
    ),
    # Threads that wait for each other.
    "barrier in a branch": (
        f"""
    if (t < 64) {BARRIER} // here
    out[t] = x[t];
""",
        "divergent threadgroup_barrier .*64 threads \\(0..63\\) wait at threadgroup_barrier at {here}"
        ".*64 threads \\(64..127\\) have returned",
    ),
    "two barriers for one": (
        f"""
    if (t < 64) {BARRIER} // there
    else {BARRIER} // here
    out[t] = x[t];
""",
        "divergent threadgroup_barrier .*wait at threadgroup_barrier at {there}.*wait at threadgroup_barrier at {here}",
    ),
    "return before a barrier": (
        f"""
    if (t > 120) return;
    {BARRIER} // here
    out[t] = x[t];
""",
        "divergent threadgroup_barrier .*121 threads .*at {here}.*7 threads \\(121..127\\) have returned",
    ),
    "barrier in a loop of different lengths": (
        f"""
    for (uint i = t; i < 200; i += 128) {BARRIER} // here
    out[t] = x[t];
""",
        "divergent threadgroup_barrier .*wait at threadgroup_barrier at {here}",
    ),
    "simd_sum in a branch": (
        """
    float sum = x[t];
    if (lane < 7) sum = simd_sum(sum); // here
    out[t] = sum;
""",
        "divergent SIMD-group function .*7 threads .*wait at simd_sum at {here}",
    ),
    "return before simd_sum": (
        """
    if (lane == 3) return;
    out[t] = simd_sum(x[t]); // here
""",
        "divergent SIMD-group function .*threads .*wait at simd_sum at {here}.*threads .*have returned",
    ),
    "simd_sum in a loop of different lengths": (
        """
    float sum = 0;
    for (uint i = lane; i < 100; i += 32) sum += simd_sum(x[i]); // here
    out[t] = sum;
""",
        "divergent SIMD-group function .*wait at simd_sum at {here}",
    ),
    "two SIMD-group functions for one": (
        """
    float sum = x[t];
    if (lane < 16) sum = simd_sum(sum); // there
    else sum = simd_max(sum); // here
    out[t] = sum;
""",
        "divergent SIMD-group function .*simd_sum at {there}.*simd_max at {here}",
    ),
    "a lane missing from a matrix product": (
        """
    simdgroup_float8x8 a, b, c = simdgroup_float8x8(0.0f);
    simdgroup_load(a, x);
    simdgroup_load(b, x);
    if (lane != 3) simdgroup_multiply_accumulate(c, a, b, c); // here
    simdgroup_store(c, out);
""",
        "divergent SIMD-group function .*wait at simdgroup_multiply_accumulate at {here}",
    ),
    # Arithmetic that is undefined, and Metal's limit of threadgroup memory.
    "misaligned vector": (
        """
    const float4 loaded = *(device const float4*)(x + 1 + t % 4); // here
    out[t] = loaded.x;
""",
        "undefined behaviour at {here}",
    ),
    "division by zero": (
        "\n    out[t] = 7 / (two - 2 + (t > 9 ? 0 : 1)); // here\n",
        "undefined behaviour at {here}",
    ),
    "shift by too much": (
        "\n    out[t] = 1 << (two + int(t)); // here\n",
        "undefined behaviour at {here}",
    ),
    "float too large for int": (
        "\n    out[t] = int(x[t] * 1e30f); // here\n",
        "undefined behaviour at {here}",
    ),
    "more threadgroup memory than there is": (
        """
    threadgroup float shared[8000], more[400];
    shared[t] = more[t] = x[t];
    out[t] = shared[t] + more[t];
""",
        "threadgroup memory of 33600 bytes is over the limit of 32768",
    ),
}


@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checked_launch_names(fault, order):
    body, message = FAULTS[fault]
    source = kernel(body)
    places = {
        mark: f"kernel.metal:{line_of(source, '// ' + mark)}\\b" for mark in ("here", "there")
    }
    with pytest.raises(MetalLaunchError) as raised:
        launch(source, grid=2 if "group ==" in body or "+ group" in body else 1, order=order)
    if order == "fifo":
        assert re.search(message.format(**places), str(raised.value)), raised.value
    assert re.match(
        r"f: .*\[thread \d+ \(SIMD-group \d lane \d+\) of threadgroup \(\d, 0, 0\)\]",
        str(raised.value),
    )


def test_code_that_the_compiler_joined_is_named_by_a_line_near_it():
    body = "\n    if (t % 2) out[t + two] = 1;\n    else out[t + two] = 2;\n"
    with pytest.raises(MetalLaunchError, match=r"write of 4 bytes near kernel.metal:\d+: buffer 0"):
        launch(kernel(body))


# What no message can name shows as NaN.
UNDEFINED = {
    "private variable that one thread never sets": "float value; if (t != 5) value = x[t]; out[t] = value;",
    "lane beyond the SIMD-group": "out[t] = simd_shuffle_down(x[t], 1);",
}


@pytest.mark.parametrize("fault", UNDEFINED)
def test_undefined_values_are_nan(fault):
    x, out = launch(
        kernel(UNDEFINED[fault]).replace("float value;", "float value; if (two == 3) value = 0;")
    )
    assert np.isnan(out).any() and not np.isnan(out).all()


def test_threadgroup_memory_that_no_one_wrote_is_nan_even_unchecked():
    source = kernel(
        "threadgroup float shared[128]; if (t < 5) shared[t] = x[t]; out[t] = shared[t];"
    )
    x, out = launch(source, checked=False)
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 5, x, np.nan))


# An unchecked launch misses races, but neither faults of memory pages nor threads that never meet.
@pytest.mark.parametrize(
    "body, message",
    [
        (
            "out[t] = x[t + 128 * group];",
            "memory fault at .*byte offset 512 of buffer 1 of 512 bytes",
        ),
        (
            "out[t + 4096 * group] = x[t];",
            "memory fault at .*byte offset 16384 of buffer 0 of 512 bytes",
        ),
        (
            "float v[60000]; for (int i = 0; i < 60000; i++) v[i] = x[i % 128]; out[t] = v[two * 9];",
            "stack overflow",
        ),
        (f"if (t < 64) {BARRIER} out[t] = x[t];", "divergent threadgroup_barrier"),
        ("if (lane < 7) out[t] = simd_sum(x[t]);", "divergent SIMD-group function"),
        (
            "threadgroup float shared[9000]; shared[t] = x[t]; out[t] = shared[t];",
            "over the limit of 32768",
        ),
    ],
)
def test_an_unchecked_launch_names(body, message):
    with pytest.raises(MetalLaunchError, match=message):
        launch(
            kernel(body), checked=False, grid=2 if "group" in body.replace("threadgroup", "") else 1
        )


def test_after_a_fault_the_next_launch_is_right():
    with pytest.raises(MetalLaunchError):
        launch(kernel(f"if (t < 64) {BARRIER} out[t] = x[t];"))
    x, out = launch(kernel(f"{BARRIER} out[t] = x[t];"))
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(
    "grid, threads, message",
    [
        (1, 1025, "1025 threads in a threadgroup, at most 1024 are possible"),
        (1, (64, 4, 5), "1280 threads in a threadgroup, at most 1024"),
        (0, 32, r"grid is \(0,\), expected 1 to 3 sizes of at least 1"),
        ((1, 1, 1, 1), 32, r"grid is \(1, 1, 1, 1\), expected 1 to 3 sizes"),
        (1, (32, 0), r"threads is \(32, 0\), expected 1 to 3 sizes"),
    ],
)
def test_limits_of_a_launch(grid, threads, message):
    with pytest.raises(MetalLaunchError, match=message):
        launch(kernel("out[t % 128] = 1;"), grid=grid, threads=threads)


def test_limit_of_threads_that_a_kernel_states():
    stated = "[[kernel, max_total_threads_per_threadgroup(64)]] void f"
    source = kernel("out[t] = x[t];").replace("kernel void f", stated)
    launch(source, threads=64)
    with pytest.raises(
        MetalLaunchError, match=r"65 threads .*at most 64 .*max_total_threads_per_threadgroup"
    ):
        launch(source, threads=65)


def test_a_matrix_needs_32_lanes():
    source = kernel("simdgroup_float8x8 a; simdgroup_load(a, x); simdgroup_store(a, out);")
    with pytest.raises(
        MetalLaunchError, match="SIMD-group of less than 32 threads at kernel.metal:"
    ):
        launch(source, threads=16)


def test_arguments_are_counted():
    library = compile(kernel("out[t] = x[t];"))
    with pytest.raises(
        MetalLaunchError, match="f: 1 arguments given, expected 4: out, x, two, counter"
    ):
        run(library["f"], 1, 32, np.zeros(4))
    with pytest.raises(MetalLaunchError, match=r"no kernel 'g' in the source, which has \['f'\]"):
        library["g"]
    with pytest.raises(
        MetalLaunchError, match="order 'lifo', expected one of fifo, reverse, random"
    ):
        launch(kernel("out[t] = x[t];"), order="lifo")
