"""Tapped layers: their output rows, side by side, as the layers made them."""

import numpy as np
import pytest

from metal_ops.launch import copy_in
from tests import oracle, tiny
from tests.build import build_runner, run, segment

LAYERS = "ccacaca"


def config(num_layers):
    kinds = {"c": "conv", "a": "full_attention"}
    layers = [kinds[kind] for kind in LAYERS[:num_layers]]
    return tiny.dense_config() | {"layer_types": layers, "num_hidden_layers": num_layers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("whole"), config(len(LAYERS)))


def tapped_rows(folder, tapped, tokens):
    """The taps after a round of one stream, NaN where nothing was kept."""
    runner = build_runner(folder, tapped=tapped)
    taps = runner.model.taps
    copy_in(taps, 0, memoryview(bytearray(b"\xff" * taps.nbytes())))
    run(runner, segment(2, 40, 0, tokens))
    return taps.numpy()


@pytest.mark.parametrize("num_rows", [1, 10, 32])
def test_the_third_of_five_taps_holds_its_layers_rows(folder, tmp_path, num_rows):
    tokens = np.random.default_rng(0).integers(0, 97, num_rows)
    width = config(1)["hidden_size"]
    taps = tapped_rows(folder, (0, 1, 3, 4, 5), tokens).reshape(-1, 5, width)
    # A model that ends after that layer makes its logits of the same rows.
    shorter = build_runner(tiny.write_checkpoint(tmp_path, config(4)))
    (logits,) = run(shorter, segment(0, 0, 0, tokens))
    weights = {name: part.numpy() for name, part in shorter.model.weights.items()}
    normed = oracle.rms_norm(
        taps[:num_rows, 2], weights["embedding_norm.weight"], shorter.model.config.norm_eps
    )
    np.testing.assert_allclose(normed @ weights["embed_tokens.weight"].T, logits, atol=1e-5)
    alone = tapped_rows(folder, (3,), tokens)
    np.testing.assert_array_equal(alone[:num_rows], taps[:num_rows, 2])


def test_the_last_layer_cannot_be_tapped(folder):
    with pytest.raises(ValueError, match="layers 0 to 5 can be tapped"):
        build_runner(folder, tapped=(6,))
