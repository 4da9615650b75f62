"""Loading: layouts, types, packing, strictness, damaged files and memory."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes

from lfm2.config import Config
from lfm2.errors import WeightsError
from lfm2.layout import plan
from lfm2.shapes import weight_shapes
from lfm2.weights import load_weights
from metal_ops.quantized import QuantizedMatrix
from tests.tiny import (
    dense_config,
    moe_config,
    odd_config,
    plain_moe_config,
    random_tensors,
    to_layout,
    write_checkpoint,
)

GOLDENS = Path(__file__).parent / "goldens"
KINDS = {np.dtype(np.float32): "F32", np.dtype(np.uint32): "U32", np.dtype(np.uint16): "BF16"}
LAYER = "model.layers.1.feed_forward"


def write_file(path, tensors):
    """Writes arrays as safetensors; uint16 arrays hold the bits of BF16."""
    header, end = {}, 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        kind = KINDS[value.dtype]
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": (begin, end)}
    write_raw(path, json.dumps(header).encode(), b"".join(v.tobytes() for v in tensors.values()))


def write_raw(path, header, body):
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder


def load(folder, **options):
    return load_weights(folder, Config.from_folder(folder), "CPU", **options)


def refusal(folder):
    """The one line with which loading `folder` is refused."""
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(weights, tensors, config):
    """`weights` are exactly the arrays of `tensors`, which have Hugging Face names."""
    wanted = {name.removeprefix("model."): value for name, value in tensors.items()}
    for i in range(config["num_hidden_layers"]):
        path = f"layers.{i}.feed_forward.experts"
        for matrix in ("w1", "w2", "w3"):
            names = [f"{path}.{j}.{matrix}.weight" for j in range(config.get("num_experts", 0))]
            if names and names[0] in wanted:
                wanted[f"{path}.{matrix}"] = np.stack([wanted.pop(name) for name in names])
        conv = f"layers.{i}.conv.conv.weight"
        if conv in wanted:
            wanted[conv] = wanted[conv][:, 0]
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(weights[name].numpy(), value, err_msg=name)


@pytest.mark.parametrize("layout", ["hf", "stacked", "mlx"])
@pytest.mark.parametrize("make", [dense_config, moe_config, plain_moe_config, odd_config])
def test_every_layout_gives_the_same_weights(tmp_path, make, layout):
    config = make()
    write_checkpoint(tmp_path, config, layout=layout)
    assert_holds(load(tmp_path), random_tensors(config), config)


@pytest.mark.parametrize("make", [dense_config, moe_config, odd_config])
def test_num_params_is_the_sum_of_the_shapes(make):
    config = Config.from_dict(make())
    total = sum(int(np.prod(shape)) for shape in weight_shapes(config).values())
    assert config.num_params == total


def test_conv_taps_of_square_shapes_keep_their_order(tmp_path):
    config = dense_config() | {"hidden_size": 4, "num_attention_heads": 2, "conv_L_cache": 4}
    tensors = random_tensors(config)
    name = "model.layers.0.conv.conv.weight"
    taps = np.arange(16, dtype=np.float32).reshape(4, 4)
    for shape in ((4, 1, 4), (4, 4, 1), (4, 4)):
        found = load(write(tmp_path, config, tensors | {name: taps.reshape(shape)}))
        np.testing.assert_array_equal(found["layers.0.conv.conv.weight"].numpy(), taps)
    message = refusal(write(tmp_path, config, tensors | {name: taps.reshape(1, 4, 4)}))
    assert f"{name} is (1, 4, 4), not (4, 1, 4)" in message


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_stay_in_the_stored_type(tmp_path, dtype):
    weights = load(write_checkpoint(tmp_path, moe_config(), dtype=dtype))
    types = {name: tensor.dtype for name, tensor in weights.items()}
    assert types.pop("layers.1.feed_forward.expert_bias") == dtypes.float32
    assert set(types[name] for name in types if "expert_bias" not in name) == {
        getattr(dtypes, dtype)
    }


def test_large_bfloat16_values_stay_finite(tmp_path):
    tensors = random_tensors(dense_config())
    tensors["model.embedding_norm.weight"][5] = 1e5
    write_checkpoint(tmp_path, dense_config(), dtype="bfloat16", tensors=tensors)
    norm = load(tmp_path)["embedding_norm.weight"].float().numpy()
    assert abs(norm[5] / 1e5 - 1) < 1 / 256


def test_weights_are_inputs_of_a_captured_step(tmp_path):
    config = moe_config()
    weights = load(write_checkpoint(tmp_path, config))
    total = TinyJit(lambda *tensors: sum((t.float().sum() for t in tensors), Tensor(0.0)).realize())
    names = ["layers.1.feed_forward.experts.w1", "layers.0.conv.conv.weight"]
    for matrix in ("w1", "w1", "w1", "w3"):
        names[0] = f"layers.1.feed_forward.experts.{matrix}"
        wanted = sum(weights[name].numpy().sum() for name in names)
        found = total(*(weights[name] for name in names)).item()
        assert found == pytest.approx(wanted, abs=1e-3)


def test_expert_bias_keeps_differences_that_bfloat16_loses(tmp_path):
    config = moe_config()
    tensors = random_tensors(config)
    name = f"{LAYER}.expert_bias"
    tensors[name] = np.linspace(0.9, 0.9007, 8, dtype=np.float32)
    write_checkpoint(tmp_path, config, tensors=tensors, dtype="bfloat16")
    bias = load(tmp_path)[name.removeprefix("model.")]
    assert (bias.dtype, len(set(bias.tolist()))) == (dtypes.float32, 8)
    tensors = to_layout(tensors, config, "hf")
    tensors[name] = (tensors[name].view(np.uint32) >> 16).astype(np.uint16)
    with pytest.warns(UserWarning, match="expert_bias is BF16"):
        bias = load(write(tmp_path, config, tensors))[name.removeprefix("model.")]
    assert bias.dtype == dtypes.float32
    np.testing.assert_allclose(bias.numpy(), 0.9, atol=0.004)


def test_expert_bias_is_needed_only_if_the_config_says_so(tmp_path):
    config = moe_config()
    name = f"{LAYER}.expert_bias"
    tensors = {key: v for key, v in random_tensors(config).items() if "expert_bias" not in key}
    assert f"3 missing: {name} (8,)" in refusal(write(tmp_path, config, tensors))
    load(write(tmp_path, config | {"use_expert_bias": False}, tensors))


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path):
    config = moe_config()
    tensors = random_tensors(config)
    lost = f"{LAYER}.experts.5.w3.weight"
    less = {name: value for name, value in tensors.items() if name != lost}
    assert f"1 missing: {lost} (32, 64)" in refusal(write(tmp_path, config, less))
    more = tensors | {"model.layers.4.ffn_norm.weight": np.ones(64, np.float32)}
    message = refusal(write(tmp_path, config, more))
    assert "no place for: model.layers.4.ffn_norm.weight" in message
    more = tensors | {f"{LAYER}.experts.8.w1.weight": tensors[f"{LAYER}.experts.7.w1.weight"]}
    assert f"no place for: {LAYER}.experts.8.w1.weight" in refusal(write(tmp_path, config, more))
    name = "model.layers.0.feed_forward.w2.weight"
    turned = tensors | {name: tensors[name].T}
    assert f"{name} is (96, 64), not (64, 96)" in refusal(write(tmp_path, config, turned))
    nothing = refusal(write(tmp_path, config, {"a": np.ones(1, np.float32)}))
    assert "missing" in nothing and "more" in nothing and "no place for: a" in nothing
    assert len(nothing) < 500


def test_ffn_size_that_was_adjusted_twice_is_refused(tmp_path):
    write_checkpoint(tmp_path, dense_config())
    config = dense_config() | {"intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "layers.0.feed_forward.w1.weight is (64, 64), not (48, 64)" in refusal(tmp_path)


def test_mixed_and_doubled_experts_are_refused(tmp_path):
    config = moe_config()
    tensors = random_tensors(config)
    stacked = to_layout(tensors, config, "stacked")
    second = "model.layers.2."
    mixed = {name: value for name, value in tensors.items() if not name.startswith(second)}
    mixed |= {name: value for name, value in stacked.items() if name.startswith(second)}
    message = refusal(write(tmp_path, config, mixed))
    assert "mixture" in message and "gate_up_proj" in message
    assert "mixture" in refusal(write(tmp_path, config, tensors | stacked))
    name = "model.embedding_norm.weight"
    doubled = tensors | {name.removeprefix("model."): tensors[name]}
    assert "there twice: embedding_norm.weight, model." in refusal(write(tmp_path, config, doubled))


def test_head_that_repeats_the_embedding_is_dropped(tmp_path):
    config = dense_config()
    tensors = random_tensors(config)
    table = tensors["model.embed_tokens.weight"]
    write(tmp_path, config, tensors | {"lm_head.weight": table})
    with pytest.warns(UserWarning, match="lm_head.weight repeats"):
        assert "lm_head.weight" not in load(tmp_path)
    write(tmp_path, config, tensors | {"lm_head.weight": table + 1e-3})
    assert "lm_head.weight differs" in refusal(tmp_path)
    write(tmp_path, config | {"tie_word_embeddings": False}, tensors)
    assert "missing: lm_head.weight (97, 64)" in refusal(tmp_path)


def test_other_types_are_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, dense_config())
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"F32"', b'"I32"', 1))
    assert "(I32)" in refusal(tmp_path) and "BF16, F16, F32" in refusal(tmp_path)
    path.write_bytes(raw.replace(b'"F32"', b'"F9_"', 1))
    assert "(F9_)" in refusal(tmp_path)
    path.write_bytes(raw.replace(b'"F32"', b'"U32"', 1))
    assert "is U32, not BF16 or F16 or F32" in refusal(tmp_path)


def test_shards_with_and_without_an_index(tmp_path):
    config = moe_config()
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = list(tensors)
    for file, part in zip(files, (names[::2], names[1::2])):
        write_file(tmp_path / file, {name: tensors[name] for name in part})
    assert_holds(load(tmp_path), tensors, config)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_holds(load(tmp_path), tensors, config)
    (tmp_path / files[1]).rename(tmp_path / "other.safetensors")
    assert f"{files[1]} is missing" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "../up.safetensors"}}))
    assert "'../up.safetensors'" in refusal(tmp_path)
    index.write_text("{")
    assert "index.json is damaged" in refusal(tmp_path)
    index.unlink()
    assert_holds(load(tmp_path), tensors, config)
    write_file(tmp_path / "zero.safetensors", {names[0]: tensors[names[0]]})
    assert f"{names[0]} is both in" in refusal(tmp_path)


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dense_config()))
    message = refusal(tmp_path)
    assert "holds no weights" in message and "*.safetensors" in message


def test_damaged_files_are_refused(tmp_path):
    write_checkpoint(tmp_path, dense_config())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for damaged, word in (
        (b"", "truncated"),
        (whole[:5], "truncated"),
        (whole[:100], "truncated"),
        (whole[:-1], "truncated"),
        (whole + b"\0", "1 bytes after"),
        ((1 << 60).to_bytes(8, "little") + whole[8:], "truncated"),
        (whole[:8] + b"x" + whole[9:], "damaged header"),
        (whole[:8] + b"\xff" + whole[9:], "damaged header"),
    ):
        path.write_bytes(damaged)
        message = refusal(tmp_path)
        assert word in message and "model.safetensors" in message


@pytest.mark.parametrize(
    "entries, word",
    [
        ('"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1', "a is named twice"),
        ('"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}', "takes 12 bytes"),
        ('"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}', "damaged header: a"),
        ('"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}', "damaged header: a"),
        ('"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}', "follows a gap"),
        ('"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}', "is truncated"),
        (
            '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            ' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}',
            "b overlaps",
        ),
        ('"a": [1]', "damaged header: a"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, entries, word):
    write(tmp_path, dense_config(), {})
    write_raw(tmp_path / "model.safetensors", f"{{{entries}}}".encode(), bytes(8))
    assert word in refusal(tmp_path)


def test_progress_counts_every_byte(tmp_path):
    write_checkpoint(tmp_path, moe_config())
    calls = []
    load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    tensors = random_tensors(moe_config())
    total = sum(value.nbytes for value in tensors.values())
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def pack(codes, bits):
    """Rows of codes as uint32 words, from the definition: one little-endian stream a row."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << (i * bits) for i, code in enumerate(row))
        rows.append(np.frombuffer(stream.to_bytes(len(row) * bits // 8, "little"), np.uint32))
    return np.stack(rows)


def packed_tensors(config, bits, group_size, router=(8, 64)):
    """A checkpoint in the MLX layout with random codes; also the values that they stand for."""
    rng = np.random.default_rng(bits)
    stored, values = {}, {}
    for name, value in to_layout(random_tensors(config), config, "mlx").items():
        if value.ndim < 2 or "conv.conv" in name:
            stored[name] = values[name] = value
            continue
        b, g = router if name.endswith("feed_forward.gate.weight") else (bits, group_size)
        path, (*lead, width) = name.removesuffix(".weight"), value.shape
        codes = rng.integers(0, 2**b, (int(np.prod(lead)), width))
        scales = rng.normal(size=(*lead, width // g)).astype(np.float32)
        biases = rng.normal(size=(*lead, width // g)).astype(np.float32)
        words = pack(codes, b).reshape(*lead, width * b // 32)
        stored |= {name: words, f"{path}.scales": scales, f"{path}.biases": biases}
        codes = codes.reshape(*lead, width // g, g).astype(np.float32)
        values[name] = (codes * scales[..., None] + biases[..., None]).reshape(value.shape)
    return stored, values


def packed_config(bits, group_size, router={"bits": 8, "group_size": 64}):
    config = moe_config() | {"intermediate_size": 128, "moe_intermediate_size": 64}
    quantization = {"bits": bits, "group_size": group_size}
    for i in (1, 2, 3):
        quantization[f"model.layers.{i}.feed_forward.gate"] = router
    return config | {"quantization": quantization}


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packed_checkpoint_stays_packed(tmp_path, bits):
    config = packed_config(bits, 32)
    stored, values = packed_tensors(config, bits, 32)
    weights = load(write(tmp_path, config, stored))
    gate = weights["layers.2.feed_forward.gate.weight"]
    assert (gate.bits, gate.group_size, gate.shape) == (8, 64, (8, 64))
    experts = weights["layers.2.feed_forward.experts.w2"]
    assert (experts.bits, experts.group_size, experts.shape) == (bits, 32, (8, 64, 64))
    assert experts.codes.dtype == dtypes.uint32
    assert experts.codes.shape == (8, 64, 64 * bits // 32)
    for ours, theirs in (
        ("embed_tokens.weight", "embed_tokens.weight"),
        ("layers.0.conv.in_proj.weight", "layers.0.conv.in_proj.weight"),
        ("layers.0.feed_forward.w3.weight", "layers.0.feed_forward.up_proj.weight"),
        ("layers.2.feed_forward.experts.w2", "layers.2.feed_forward.switch_mlp.down_proj.weight"),
        ("layers.2.feed_forward.gate.weight", "layers.2.feed_forward.gate.weight"),
    ):
        found = weights[ours].dequantize().numpy()
        np.testing.assert_array_equal(found, values[f"model.{theirs}"], err_msg=ours)


def test_packing_that_the_config_does_not_name_is_refused(tmp_path):
    config = packed_config(4, 32)
    stored, _ = packed_tensors(config, 4, 32)
    write(tmp_path, config, stored)

    def refused(**changes):
        quantization = {key: v for key, v in changes.items() if v is not None}
        changed = config | {"quantization": quantization}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return refusal(tmp_path)

    # Without its own entry the router would be read with 4 bits.
    message = refused(bits=4, group_size=32)
    assert "layers.1.feed_forward.gate.weight is (8, 16), not (8, 8)" in message
    assert "config.json: 4 bits in groups of 32; the file: 8 bits in groups of 64" in message
    named = config["quantization"]
    assert "the file: 4 bits in groups of 32" in refused(**named | {"bits": 8})
    assert "the file: 4 bits in groups of 32" in refused(**named | {"group_size": 64})
    path = "model.layers.0.conv.in_proj"
    assert f"{path}.scales is there" in refused(**named, **{path: False})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": None}))
    assert "embed_tokens.scales is there" in refusal(tmp_path)
    less = {name: value for name, value in stored.items() if name != f"{path}.scales"}
    message = refusal(write(tmp_path, config, less))
    assert f"no place for: {path}.biases" in message
    less = {name: value for name, value in stored.items() if name != f"{path}.biases"}
    assert f"1 missing: {path}.biases (192, 2)" in refusal(write(tmp_path, config, less))


def golden_values():
    return dict(np.load(GOLDENS / "quantised.npz"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_dequantized_values_equal_mlx_to_the_bit(dtype, bits):
    goldens = golden_values()
    for group_size in (32, 64, 128):
        key = f"{dtype}_{bits}_{group_size}"
        codes = Tensor(goldens[f"{key}_codes"])
        scales = stored_as(goldens[f"{key}_scales"], dtype)
        biases = stored_as(goldens[f"{key}_biases"], dtype)
        assert (goldens[f"{key}_scales"] < 0).any()
        matrix = QuantizedMatrix(codes, scales, biases, bits, group_size)
        found = matrix.dequantize(dtypes.float32).numpy()
        np.testing.assert_array_equal(found, goldens[f"{key}_values"], err_msg=key)


def stored_as(values, dtype):
    return Tensor(values).cast(getattr(dtypes, dtype)).realize()


PEAK = """
import sys
from pathlib import Path
from lfm2.config import Config
from lfm2.weights import load_weights

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
config = Config.from_folder(folder)
before = peak_kib()
weights = load_weights(folder, config, "CPU")
print((peak_kib() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_stacking_experts_does_not_double_them(tmp_path):
    config = moe_config() | {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    }
    shapes = weight_shapes(Config.from_dict(config))
    tensors = {}
    for name, shape in shapes.items():
        path, _, matrix = name.partition(".experts.")
        if matrix:
            for j in range(64):
                name = f"model.{path}.experts.{j}.{matrix}"
                tensors[name] = np.zeros(shape[1:], np.float32)
        else:
            tensors[f"model.{name}"] = np.zeros(shape, np.float32)
    write(tmp_path, config, tensors)
    total = sum(value.nbytes for value in tensors.values())
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert total > 200e6
    assert int(done.stdout) < total + 60e6


def test_plan_is_silent_on_a_clean_checkpoint(tmp_path):
    write_checkpoint(tmp_path, moe_config(), dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(tmp_path, Config.from_folder(tmp_path))
