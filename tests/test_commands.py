"""A captured step on the CPU's threads: the same bits as kernel by kernel, on any number of
threads, also interrupted.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes

from lfm2.environment import default_device
from metal_ops.commands import KERNELS_IN_PIECE
from metal_ops.launch import Step, copy_in, empty
from metal_ops.loops import loop_kernel
from metal_ops.matmul import matmul
from metal_ops.norm import rms_norm

pytestmark = pytest.mark.skipif(default_device() != "CPU", reason="command lists are the CPU's")


def step_of(num_layers, rows=8, width=48):
    """A chain of divided and undivided kernels, each of which needs all of the one before; its
    input and its step.
    """
    rng = np.random.default_rng(0)
    x = empty((rows, width), dtypes.float32, "CPU")
    weights = [
        Tensor(rng.standard_normal((width, width)).astype(np.float32)).realize()
        for _ in range(num_layers)
    ]
    ones = Tensor(np.ones(width, np.float32)).realize()

    def mixed(y):
        """Every element becomes a sum over all of them: one part, for it cannot be divided."""

        def body(loops, out, y):
            total = loops.local(1)
            total[0] = 0.0
            with loops.over(rows) as t, loops.over(width) as c:
                total[0] = total[0] + y[t, c]
            with loops.over(rows) as t, loops.over(width) as c:
                out[t, c] = y[t, c] + total[0]

        return loop_kernel("mixed", body, [Tensor.empty(rows, width, device="CPU")], [y])[0]

    def function():
        y = x
        for weight in weights:
            y = mixed(rms_norm(matmul(y, weight), ones, 1e-5))
        return (y,)

    return x, Step.capture(function, [x, *weights, ones])


def feed(x, values):
    copy_in(x, 0, memoryview(values.copy()).cast("B"))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(num_threads):
    values = np.random.default_rng(1).standard_normal((8, 48)).astype(np.float32)
    with Context(NUM_CPU_THREADS=1):
        x, step = step_of(2 * KERNELS_IN_PIECE // 3)
        feed(x, values)
        want = step._captured(list(step._inputs), {})[0].numpy()
    with Context(NUM_CPU_THREADS=num_threads):
        x, step = step_of(2 * KERNELS_IN_PIECE // 3)
        for _ in range(20):
            feed(x, values)
            np.testing.assert_array_equal(step()[0].numpy(), want)


def test_an_interrupt_leaves_the_threads_in_step():
    values = np.random.default_rng(2).standard_normal((8, 48)).astype(np.float32)
    x, step = step_of(8)
    feed(x, values)
    want = step()[0].numpy()
    for delay_s in (0.0, 0.002, 0.02, 0.05):
        timer = threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            end = time.monotonic() + 10
            while time.monotonic() < end:
                step()
        timer.join()
        feed(x, values)
        np.testing.assert_array_equal(step()[0].numpy(), want)


def test_an_interrupt_as_a_piece_is_handed_out_is_raised_when_it_is_done(monkeypatch):
    """The threads are at work by then; a caller that left would overwrite what they read."""
    values = np.random.default_rng(4).standard_normal((8, 48)).astype(np.float32)
    x, step = step_of(8)
    feed(x, values)
    want = step()[0].numpy()
    lock = step._commands.threads._lock
    notify_all = lock.notify_all

    def interrupted():
        notify_all()
        signal.raise_signal(signal.SIGINT)

    for _ in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(lock, "notify_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step()
            assert step._commands.threads._num_running == 0
        np.testing.assert_array_equal(step()[0].numpy(), want)


def test_a_forked_process_is_told_that_it_has_no_threads():
    x, step = step_of(2)
    step()
    child = os.fork()
    if not child:
        try:
            step()
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_callers_take_turns():
    values = np.random.default_rng(3).standard_normal((8, 48)).astype(np.float32)
    steps = [step_of(6) for _ in range(2)]
    wrong: list[int] = []
    for x, _ in steps:
        feed(x, values)
    want = steps[0][1]()[0].numpy()

    def call(step: Step) -> None:
        for _ in range(100):
            step()
        wrong.append(int((step()[0].numpy() != want).sum()))

    callers = [threading.Thread(target=call, args=(step,), daemon=True) for _, step in steps]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert wrong == [0, 0]
