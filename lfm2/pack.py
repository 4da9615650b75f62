"""Packs rows of numbers as mlx does (affine), and turns stored bytes into numbers and back."""

import numpy as np

from lfm2.quantization import Packing

MIN_SCALE = np.float32(1e-7)


def to_float32(run: memoryview, dtype: str) -> np.ndarray:
    """The values of stored bytes (dtype BF16, F16 or F32) as a new float32 array."""
    if dtype == "BF16":
        return (np.frombuffer(run, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(run, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to nearest even in BF16 (as uint16), F16 or F32."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype])


def quantize_rows(rows: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs float32 rows (N, K).

    Returns codes (N, K * bits / 32) uint32, scales and biases (N, K / group_size) float32.

    The same numbers as mx.quantize, bit for bit, for codes of 4 or 8 bits: the end of the group's
    range that is farther from zero is met exactly, and zero falls on a code. The scale is negative
    where that end is the upper one. NaN or infinity in a group shows in its scale or bias.
    """
    num_rows, width = rows.shape
    most = np.float32(2**packing.bits - 1)
    groups = rows.reshape(num_rows, width // packing.group_size, packing.group_size)
    with np.errstate(invalid="ignore", over="ignore"):
        scales, biases = _scales(groups.min(-1), groups.max(-1), most)
        steps = groups - biases[..., None]
        steps /= scales[..., None]
        np.clip(np.rint(steps, out=steps), 0, most, out=steps)
        codes = steps.astype(np.uint8).reshape(num_rows, width)
    if packing.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.view("<u4"), scales, biases


def _scales(low: np.ndarray, high: np.ndarray, most: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The scale and bias of each group, from the ends of its range and its largest code."""
    is_low_far = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / most, MIN_SCALE)
    scales = np.where(is_low_far, scales, -scales)
    edges = np.where(is_low_far, low, high)
    edge_codes = np.rint(edges / scales)
    has_codes = edge_codes != 0
    scales = np.where(has_codes, edges / np.where(has_codes, edge_codes, 1), scales)
    return scales, np.where(has_codes, edges, np.float32(0))
