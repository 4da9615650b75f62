"""Packed copies: the codes are mlx's own, the layout is mlx-lm's, and a failure leaves nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tinygrad import dtypes

from lfm2.config import Config
from lfm2.convert import convert
from lfm2.errors import RequestError, WeightsError
from lfm2.pack import encode, quantize_rows, to_float32
from lfm2.quantization import Packing
from lfm2.weights import load_weights
from metal_ops.quantized import QuantizedMatrix
from tests.tiny import dense_config, moe_config, odd_config, random_tensors, write_checkpoint

GOLDENS = Path(__file__).parent / "goldens" / "quantised.npz"
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def wide_moe_config():
    """M with experts whose matrices groups of 64 divide; they do not divide its 96."""
    return moe_config() | {"moe_intermediate_size": 64}


def load(folder):
    return load_weights(folder, Config.from_folder(folder), "CPU")


def shapes_in(path):
    with safe_open(path, "numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_equal_mlx_to_the_bit(dtype, bits):
    goldens = np.load(GOLDENS)
    kind = STORED[dtype]
    weight = to_float32(encode(goldens["weight"], kind).tobytes(), kind)
    weight = weight.reshape(goldens["weight"].shape)
    for group_size in (32, 64, 128):
        found = quantize_rows(weight, Packing(bits, group_size))
        for part, value in zip(("codes", "scales", "biases"), found, strict=True):
            if part != "codes":
                value = to_float32(encode(value, kind).tobytes(), kind).reshape(value.shape)
            wanted = goldens[f"{dtype}_{bits}_{group_size}_{part}"]
            np.testing.assert_array_equal(value, wanted, err_msg=f"{part} {group_size}")


def test_bfloat16_ties_go_to_even():
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    found = to_float32(encode(halfway, "BF16").tobytes(), "BF16")
    np.testing.assert_array_equal(found, [1, 1 + 2**-6, -1])


def test_groups_of_one_value_and_of_nothing():
    rows = np.zeros((3, 64), np.float32)
    rows[1], rows[2] = 0.5, -0.25
    codes, scales, biases = quantize_rows(rows, Packing(4, 64))
    assert not codes[0].any() and biases[0] == 0
    codes = np.unpackbits(codes.view(np.uint8), axis=1, bitorder="little").reshape(3, 64, 4)
    codes = codes @ [1, 2, 4, 8]
    np.testing.assert_array_equal(codes * scales + biases, rows)


@pytest.mark.parametrize("bits, group_size", [(4, 64), (8, 32)])
@pytest.mark.parametrize("layout", ["hf", "stacked", "mlx"])
def test_copy_of_a_moe_model(tmp_path, layout, bits, group_size):
    config = wide_moe_config()
    source = write_checkpoint(tmp_path / "source", config, dtype="bfloat16", layout=layout)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "optimizer.bin").write_text("x")
    calls = []
    copy = tmp_path / "new" / "copy"
    convert(source, copy, bits, group_size, lambda done, total: calls.append((done, total)))
    files = {path.name for path in copy.iterdir()}
    assert files == {
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert calls[-1][0] == calls[-1][1] > 0 and calls == sorted(calls)
    shapes = shapes_in(copy / "model.safetensors")
    assert shapes["model.layers.0.conv.conv.weight"] == (64, 3, 1)
    path = "model.layers.3.feed_forward"
    words = 64 * bits // 32
    assert shapes[f"{path}.switch_mlp.gate_proj.weight"] == (8, 64, words)
    assert shapes[f"{path}.switch_mlp.down_proj.scales"] == (8, 64, 64 // group_size)
    assert shapes[f"{path}.gate.weight"] == (8, 16)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: "model.safetensors" for name in sorted(shapes)}
    written = json.loads((copy / "config.json").read_text())
    assert written["quantization"] == written["quantization_config"]
    assert written["quantization"][f"{path}.gate"] == {"group_size": 64, "bits": 8}
    assert_near_the_source(load(copy), load(source), bits)


def assert_near_the_source(weights, source, bits):
    """Every value lies within a step of the source, but for rounding to bfloat16.

    A whole step, not half: zero falls on a code, so that the nearer end of the range may be cut.
    """
    assert weights.keys() == source.keys()
    num_packed = 0
    for name, tensor in weights.items():
        wanted = source[name].float().numpy()
        if not isinstance(tensor, QuantizedMatrix):
            np.testing.assert_array_equal(tensor.float().numpy(), wanted, err_msg=name)
            continue
        num_packed += 1
        assert tensor.bits == (8 if name.endswith("feed_forward.gate.weight") else bits)
        found = tensor.dequantize(dtypes.float32).numpy()
        step = np.ptp(wanted) / (2**tensor.bits - 1)
        assert np.abs(found - wanted).max() < step + np.abs(wanted).max() / 64
    assert num_packed > 10


def test_copy_of_a_dense_model_keeps_what_groups_do_not_divide(tmp_path):
    source = write_checkpoint(tmp_path / "source", odd_config())
    convert(source, tmp_path / "copy", 4, 32)
    weights = load(tmp_path / "copy")
    assert_near_the_source(weights, load(source), 4)
    packed = {name for name, tensor in weights.items() if isinstance(tensor, QuantizedMatrix)}
    assert {"lm_head.weight", "layers.1.feed_forward.w1.weight"} < packed
    assert "layers.1.feed_forward.w2.weight" not in packed  # 80 wide
    assert weights["layers.1.conv.in_proj.bias"].shape == (288,)


@pytest.mark.parametrize("style", ["old", "new"])
def test_config_has_what_mlx_lm_insists_on(tmp_path, style):
    rule = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256}
    rule["block_ffn_dim_multiplier"] = 1.0
    whole = dense_config(style) | rule
    bare = {key: value for key, value in whole.items() if key not in (*rule, "block_dim")}
    tensors = random_tensors(whole)
    source = write_checkpoint(tmp_path / "source", bare, tensors=tensors)
    convert(source, tmp_path / "copy")
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (written["block_dim"], written["block_multiple_of"]) == (64, 256)
    assert written["block_auto_adjust_ff_dim"] is True
    assert written["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    names = shapes_in(tmp_path / "copy" / "model.safetensors")
    assert "model.layers.0.feed_forward.w1.scales" in names


def test_large_copies_are_cut_into_files(tmp_path):
    source = write_checkpoint(tmp_path / "source", wide_moe_config())
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "many", max_file_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert one.keys() == many.keys()
    matrix = "layers.2.feed_forward.experts.w1"
    np.testing.assert_array_equal(one[matrix].codes.numpy(), many[matrix].codes.numpy())


def test_refusals_leave_nothing_behind(tmp_path):
    source = write_checkpoint(tmp_path / "source", dense_config())
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    for out, options, word in (
        (full, {}, "is there already"),
        (source, {}, "is there already"),
        (tmp_path / "copy", {"bits": 5}, "cannot write 5 bits"),
        (tmp_path / "copy", {"group_size": 16}, "no groups of 16"),
        (full / "notes" / "copy", {}, "cannot be written"),
    ):
        with pytest.raises(RequestError, match=word):
            convert(source, out, **options)
    tensors = random_tensors(dense_config())
    tensors["model.layers.1.conv.out_proj.weight"][3, 5] = np.inf
    write_checkpoint(source, dense_config(), tensors=tensors)
    with pytest.raises(WeightsError, match="layers.1.conv.out_proj.weight has NaN or infinite"):
        convert(source, tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "full"}


def test_packed_source_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", dense_config())
    empty = tmp_path / "copy"
    empty.mkdir()
    convert(source, empty)
    with pytest.raises(WeightsError, match="quantised already .4 bits in groups of 64."):
        convert(empty, tmp_path / "again", 8)
