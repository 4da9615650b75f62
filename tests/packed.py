"""MLX-packed copies of tiny checkpoints, written from the definition of the packing and from
nothing else.
"""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.tiny import random_tensors, to_layout

GROUP_SIZE = 32
ROUTER_BITS = 8


def write_packed_pair(folder: Path, config: dict, bits: Sequence[int]) -> tuple[Path, Path]:
    """Two checkpoints of one model: with every matrix packed, and with the float32 values that the
    codes stand for.

    bits: those of one matrix after the other, in turn; the router's are 8.
    """
    stored, values = {}, {}
    quantization = {"bits": 4, "group_size": GROUP_SIZE}
    turn = cycle(bits)
    for name, value in to_layout(random_tensors(config), config, "mlx").items():
        path = name.removesuffix(".weight")
        if value.ndim < 2 or path.endswith("conv.conv"):
            stored[name] = values[name] = np.ascontiguousarray(value)
            continue
        width = ROUTER_BITS if path.endswith("feed_forward.gate") else next(turn)
        quantization[path] = {"bits": width, "group_size": GROUP_SIZE}
        codes, scales, biases = packed(value, width)
        stored |= {name: words(codes, width), f"{path}.scales": scales, f"{path}.biases": biases}
        groups = codes.reshape(*scales.shape, GROUP_SIZE).astype(np.float32)
        values[name] = (groups * scales[..., None] + biases[..., None]).reshape(value.shape)
    quantized = config | {"quantization": quantization}
    return _write(folder / "packed", quantized, stored), _write(folder / "values", config, values)


def packed(value: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (..., K), scales and biases (..., K / group); every other group counts down from its
    largest value.
    """
    groups = value.reshape(*value.shape[:-1], -1, GROUP_SIZE)
    low, high = groups.min(-1), groups.max(-1)
    is_down = np.arange(low.size).reshape(low.shape) % 2 == 1
    biases = np.where(is_down, high, low)
    scales = (np.where(is_down, low, high) - biases) / np.float32(2**bits - 1)
    codes = np.rint((groups - biases[..., None]) / scales[..., None]).astype(np.uint32)
    return codes.reshape(value.shape), scales, biases


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (..., K) as uint32 words (..., K * bits / 32): each row one little-endian stream of
    bits.
    """
    stream = codes[..., None] >> np.arange(bits, dtype=np.uint32) & 1  # (..., K, bits)
    stream = stream.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def _write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
