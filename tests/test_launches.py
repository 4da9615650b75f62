"""How many kernels a round launches, counted on tinygrad's NULL device, which runs none."""

import re

import pytest

from metal_ops.table import Capacity
from tests import tiny
from tests.build import build_runner


def launches(folder, config, rows, dtype="float32"):
    """The kernels of a decode round of `rows` streams."""
    folder = tiny.write_checkpoint(folder, config, dtype=dtype)
    runner = build_runner(folder, dtype=dtype, device="NULL")
    return runner.form(Capacity(rows, rows, rows)).step.launches


def of_layers(base, kinds):
    return base | {"layer_types": [KINDS[kind] for kind in kinds], "num_hidden_layers": len(kinds)}


KINDS = {"c": "conv", "a": "full_attention"}


@pytest.mark.parametrize(
    "rows, kind, count, num_added",
    [
        *((rows, "c", 7, 2) for rows in (1, 8, 32, 128)),
        *((rows, "a", 9, 2) for rows in (1, 8, 32)),
        (129, "c", 7, 3),
        (129, "a", 8, 3),
    ],
)
@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_launches_a_layer(tmp_path, rows, kind, count, num_added, is_moe, dtype):
    """A convolution layer is 7 launches, an attention layer 9, or 8 of many rows; experts add 2, or
    3 to more than 128 rows.
    """
    base = tiny.moe_config() if is_moe else tiny.dense_config()
    shorter = launches(tmp_path / "shorter", of_layers(base, "cc"), rows, dtype)
    longer = launches(tmp_path / "longer", of_layers(base, "cc" + kind), rows, dtype)
    assert len(longer) - len(shorter) == count + num_added * is_moe
    # Each of them is hand-written: of those that tinygrad generates, no name has sizes by x.
    assert all(re.search(r"\dx\d", name) for name in longer), longer


def test_launches_around_the_layers(tmp_path):
    """One gathers the embedding, then the final norm, the head and the pick."""
    one, two = (
        launches(tmp_path / kinds, of_layers(tiny.dense_config(), kinds), 1)
        for kinds in ("c", "cc")
    )
    assert len(one) - (len(two) - len(one)) == 4
