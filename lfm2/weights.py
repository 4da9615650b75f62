"""Loads a checkpoint onto a device: every tensor in its stored type, packed ones packed."""

from collections.abc import Callable
from pathlib import Path

from tinygrad import Tensor, dtypes

from lfm2.checkpoint import ITEM_BYTES, read_piece
from lfm2.config import Config
from lfm2.layout import Target, plan
from lfm2.pack import to_float32
from lfm2.quantization import Quantization
from metal_ops.launch import copy_in, empty
from metal_ops.quantized import QuantizedMatrix

DTYPES = {
    "BF16": dtypes.bfloat16,
    "F16": dtypes.float16,
    "F32": dtypes.float32,
    "U32": dtypes.uint32,
}
# All that loading takes beyond the weights; larger is no faster.
STAGING_BYTES = 16 << 20

Progress = Callable[[int, int], None]
Weights = dict[str, Tensor | QuantizedMatrix]


def load_weights(
    folder: Path, config: Config, device: str, progress: Progress | None = None
) -> Weights:
    """The weights by our names: `layers.0.conv.in_proj.weight`, `layers.3.feed_forward.experts.w1`.

    Tensors are real buffers on `device` in the stored type; expert_bias is float32; the conv weight
    is (C, L). `progress` hears of (bytes read, bytes in all). Raises WeightsError.
    """
    targets = plan(folder, config)
    parts = {target.name: empty(target.shape, DTYPES[target.dtype], device) for target in targets}
    _fill(targets, parts, progress or be_silent)
    return _assemble(parts, config.quantization)


def be_silent(done_bytes: int, total_bytes: int) -> None:
    """The progress of whoever does not want to hear of it."""


def _fill(targets: list[Target], parts: dict[str, Tensor], progress: Progress) -> None:
    """Reads all pieces in the order in which they lie on the disk, each into its tensor."""
    places = [(piece, target) for target in targets for piece in target.pieces]
    places.sort(key=lambda place: (place[0].file, place[0].offset))
    total_bytes = sum(piece.num_bytes for piece, _ in places)
    staging = memoryview(bytearray(min(STAGING_BYTES, max(p.num_bytes for p, _ in places))))
    done_bytes = 0
    for piece, target in places:
        for offset, run in read_piece(piece, staging):
            done_bytes += len(run)
            if target.dtype != target.stored:
                offset = offset * ITEM_BYTES[target.dtype] // ITEM_BYTES[target.stored]
                run = memoryview(to_float32(run, target.stored)).cast("B")
            copy_in(parts[target.name], offset, run)
            progress(done_bytes, total_bytes)


def _assemble(parts: dict[str, Tensor], quantization: Quantization | None) -> Weights:
    weights = {}
    for name, tensor in parts.items():
        path, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{path}.scales" in parts:
            packing = quantization.packing(path)
            scales, biases = parts[f"{path}.scales"], parts[f"{path}.biases"]
            tensor = QuantizedMatrix(tensor, scales, biases, packing.bits, packing.group_size)
        if path.endswith((".experts.w1", ".experts.w2", ".experts.w3")):
            name = path
        weights[name] = tensor
    return weights
