"""Compiled steps on disk: found again by another process, and never worse than not there."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import lfm2
from lfm2.artifacts import MAGIC, Artifacts
from metal_ops.table import Capacity
from tests.build import DEMO, DEVICE, ROOT, build_runner, fail, run, segment
from tests.tiny import dense_config, write_checkpoint

ONE_ROW = Capacity(1, 1, 1)
# In a process of its own: the logits of a row, and what had to be compiled for it.
ROW_IN_A_PROCESS = """
import sys
import numpy as np
from pathlib import Path
from tests.build import build_runner, run, segment

compiled = []
runner = build_runner(Path(sys.argv[1]), Path(sys.argv[2]), compiling=compiled.append)
np.save(sys.argv[3], run(runner, segment(0, 0, 0, [5]))[0])
print(len(compiled))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("dense"), dense_config())


@pytest.fixture(scope="module")
def kept(folder, tmp_path_factory):
    """A folder of steps that two processes filled at once, what they compiled, and the row they
    computed.
    """
    steps = tmp_path_factory.mktemp("kept")
    rows = [steps.parent / f"row{i}.npy" for i in range(2)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ROW_IN_A_PROCESS, folder, steps, row],
            env=environment, cwd=steps.parent, stdout=subprocess.PIPE, text=True,
        )
        for row in rows
    ]  # fmt: skip
    compiled = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = map(np.load, rows)
    np.testing.assert_array_equal(first, second)
    return steps, compiled, first


@pytest.fixture
def steps(kept, tmp_path):
    """A copy of those steps, to be damaged."""
    copy = tmp_path / "steps"
    shutil.copytree(kept[0], copy)
    copy.chmod(0o700)
    return copy


def step_of(steps):
    """The one file among the steps."""
    (path,) = steps.iterdir()
    return path


def compiled_for_a_row(folder, steps, kept) -> int:
    """How many forms had to be compiled for the row, whose logits are those of every other
    process.
    """
    compiled = []
    row = run(build_runner(folder, steps, compiling=compiled.append), segment(0, 0, 0, [5]))[0]
    np.testing.assert_array_equal(row, kept[2])
    return len(compiled)


def test_two_processes_fill_the_folder_at_once_and_a_third_compiles_nothing(folder, kept):
    steps, compiled, _ = kept
    assert 1 in compiled
    assert [path.suffix for path in steps.iterdir()] == [".step"]
    assert compiled_for_a_row(folder, steps, kept) == 0


def test_a_step_is_private_and_holds_no_weights(folder, kept):
    path, weights = step_of(kept[0]), build_runner(folder).model.weights
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert path.stat().st_size < 2_000_000
    # 1 KiB of the largest tensor, which no kernel can need.
    assert weights["embed_tokens.weight"].numpy().tobytes()[:1024] not in path.read_bytes()


def signed(artifacts: Artifacts, payload: bytes) -> bytes:
    """A file that is whole, for the one-row form of these artifacts."""
    key = f"{artifacts.model_key}\n{ONE_ROW}".encode()
    return MAGIC + hashlib.sha256(key + payload).digest() + payload


HEAD_BYTES = len(MAGIC) + 32
DAMAGE = {
    "empty": lambda content, _: b"",
    "cut in the head": lambda content, _: content[:20],
    "cut": lambda content, _: content[: len(content) // 2],
    "a byte flipped": lambda content, _: (
        content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    ),
    "another version": lambda content, _: b"lfm2 step 0\n" + content[len(MAGIC) :],
    "no pickle": lambda _, artifacts: signed(artifacts, b"not a pickle at all"),
    "half a pickle": lambda content, artifacts: signed(artifacts, content[HEAD_BYTES:][:5000]),
    "a pickle of what is not installed": lambda _, artifacts: signed(
        artifacts, b"cno_such_module\nThing\n."
    ),
    "made for something else": lambda content, artifacts: signed(
        of_another_model(artifacts), content[HEAD_BYTES:]
    ),
}


def of_another_model(artifacts: Artifacts) -> Artifacts:
    return Artifacts(None, artifacts.model_key + " of another model", fail)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_a_miss(damage, folder, steps):
    path = step_of(steps)
    whole = path.read_bytes()
    artifacts = build_runner(folder, steps).artifacts
    assert signed(artifacts, whole[HEAD_BYTES:]) == whole
    path.write_bytes(DAMAGE[damage](whole, artifacts))
    assert artifacts.load(ONE_ROW, []) is None


def test_a_damaged_step_is_made_again(folder, steps, kept):
    step_of(steps).write_bytes(b"\0" * 1000)
    assert compiled_for_a_row(folder, steps, kept) == 1
    assert compiled_for_a_row(folder, steps, kept) == 0
    assert [path.suffix for path in steps.iterdir()] == [".step"]


def test_what_shapes_a_step_is_part_of_its_name(tmp_path):
    """The compute type, the context, any number of the config, and the capacity."""
    other = shutil.copytree(DEMO, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-6}))
    loads = [(DEMO, {}), (DEMO, {"dtype": "float32"}), (DEMO, {"context": 100}), (other, {})]
    keys = {
        lfm2.load(name, device=DEVICE, cache=False, **options).runner.artifacts.model_key
        for name, options in loads
    }
    assert len(keys) == 4
    assert lfm2.load(device=DEVICE, cache=False).runner.artifacts.model_key in keys
    capacities = (ONE_ROW, Capacity(2, 1, 1), Capacity(2, 2, 2), Capacity(2, 1, 2))
    paths = {
        Artifacts(tmp_path, key, fail).path(capacity) for key in keys for capacity in capacities
    }
    assert len(paths) == 16


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(mode, folder, steps):
    steps.chmod(mode)
    warnings = []
    artifacts = Artifacts(steps, build_runner(folder, None).artifacts.model_key, warnings.append)
    assert artifacts.load(ONE_ROW, []) is None
    artifacts.save(ONE_ROW, None)
    assert len(warnings) == 1 and "chmod go-w" in warnings[0] and str(steps) in warnings[0]


def test_without_a_folder_all_is_compiled_and_works(folder, kept, tmp_path):
    """The folder cannot be made, because its parent is a file; said once, in one line."""
    (tmp_path / "file").write_text("")
    warnings = []
    artifacts = Artifacts(tmp_path / "file" / "steps", "key", warnings.append)
    assert len(warnings) == 1 and "\n" not in warnings[0]
    runner = build_runner(folder)
    runner.artifacts = artifacts
    np.testing.assert_array_equal(run(runner, segment(0, 0, 0, [5]))[0], kept[2])
    assert len(warnings) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_not_used(steps):
    steps.chmod(0o500)
    warnings = []
    assert Artifacts(steps, "key", warnings.append).folder is None
    assert len(warnings) == 1 and "not writable" in warnings[0]


def test_a_folder_that_vanishes_is_told_of_once(folder, steps, kept):
    compiled, warnings = [], []
    runner = build_runner(folder, steps, compiling=compiled.append)
    runner.artifacts.warn = warnings.append
    shutil.rmtree(steps)
    np.testing.assert_array_equal(run(runner, segment(0, 0, 0, [5]))[0], kept[2])
    runner.artifacts.save(Capacity(2, 1, 1), None)
    assert (len(compiled), len(warnings)) == (1, 1)


def test_readers_never_see_half_a_step(folder, steps):
    """Three threads save the same step again and again while this one loads it."""
    runner = build_runner(folder, steps)
    artifacts, step = runner.artifacts, runner.form(ONE_ROW).step
    content = step.dumps()
    kept_step = SimpleNamespace(dumps=lambda: content)
    threads = [
        threading.Thread(target=lambda: [artifacts.save(ONE_ROW, kept_step) for _ in range(30)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert artifacts.load(ONE_ROW, []) is not None
    assert [path.suffix for path in steps.iterdir()] == [".step"]
