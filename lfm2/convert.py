"""Writes an MLX-layout packed copy of a checkpoint, which both lfm2 and mlx-lm load.

Goes through the files a run of rows at a time: memory does not grow with the model.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lfm2.checkpoint import INDEX_FILE, ITEM_BYTES, SINGLE_FILE, read_piece
from lfm2.config import Config
from lfm2.config_json import quantized_values, read_config
from lfm2.errors import RequestError, WeightsError
from lfm2.layout import CODES, Target, plan
from lfm2.names import mlx_name
from lfm2.pack import encode, quantize_rows, to_float32
from lfm2.quantization import Packing, Quantization
from lfm2.shapes import Shapes, can_quantize, packed_shapes
from lfm2.weights import Progress, be_silent
from metal_ops.quantized import GROUP_SIZES

BITS_WRITTEN = (4, 8)
# Routing is a choice between near ties: fewer bits would send tokens to other experts.
ROUTER_PACKING = Packing(8, 64)
# Small enough for the arrays of a run to stay in the processor's cache.
RUN_BYTES = 256 << 10
MAX_FILE_BYTES = 5 << 30
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class Module:
    """A tensor to write: what it is made of, how it is packed (None: not), its parts."""

    target: Target
    packing: Packing | None
    shapes: Shapes

    def dtype(self, part: str) -> str:
        return CODES if self.packing and part.endswith(".weight") else self.target.dtype

    def num_bytes(self, part: str) -> int:
        return int(np.prod(self.shapes[part])) * ITEM_BYTES[self.dtype(part)]

    @property
    def file_bytes(self) -> int:
        return sum(self.num_bytes(part) for part in self.shapes)


def convert(
    folder: Path,
    out: Path,
    bits: int = 4,
    group_size: int = 64,
    progress: Progress | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Packs the checkpoint in `folder` into the new folder `out`, which appears when it is whole.

    `progress` hears of (bytes read, bytes in all). Raises RequestError on options and an `out` that
    is not empty, ConfigError and WeightsError on a checkpoint that cannot be read or is packed.
    """
    folder, out = Path(folder), Path(out)
    if bits not in BITS_WRITTEN:
        raise RequestError(f"cannot write {bits} bits; choose from {_listed(BITS_WRITTEN)}")
    if group_size not in GROUP_SIZES:
        raise RequestError(f"no groups of {group_size}; choose from {_listed(GROUP_SIZES)}")
    values = read_config(folder)
    config = Config.from_dict(values)
    if config.quantization:
        packing = Packing(config.quantization.bits, config.quantization.group_size)
        raise WeightsError(f"{folder} is quantised already ({packing}): convert from the original")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RequestError(f"{out} is there already: name a folder that is new or empty")
    if out.exists() and out.samefile(Path.cwd()):
        raise RequestError(f"{out} is the working folder, which cannot be replaced: name another")
    modules = [_module(target, bits, group_size) for target in plan(folder, config)]
    routers = {_path(m): m.packing for m in modules if _is_router(m.target.name) and m.packing}
    values = quantized_values(values, Quantization(bits, group_size, routers))
    is_moe = config.num_experts > 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            _write_weights(made, modules, is_moe, max_file_bytes, progress or be_silent)
            _write_json(made / "config.json", values)
            _copy_others(folder, made)
            os.replace(made, out)
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror}") from None


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices))


def _module(target: Target, bits: int, group_size: int) -> Module:
    packing = ROUTER_PACKING if _is_router(target.name) else Packing(bits, group_size)
    if not can_quantize(target.name, target.shape) or target.shape[-1] % packing.group_size:
        # mlx keeps an axis of one in the taps of the convolution: (C, L, 1).
        is_taps = target.name.endswith(".conv.conv.weight")
        shape = (*target.shape, 1) if is_taps else target.shape
        return Module(target, None, {target.name: shape})
    return Module(target, packing, packed_shapes(target.name, target.shape, packing))


def _path(module: Module) -> str:
    return module.target.name.removesuffix(".weight")


def _is_router(name: str) -> bool:
    return name.endswith(".feed_forward.gate.weight")


def _write_weights(
    made: Path, modules: list[Module], is_moe: bool, max_file_bytes: int, progress: Progress
) -> None:
    shards = _shards(modules, max_file_bytes)
    total_bytes = sum(piece.num_bytes for module in modules for piece in module.target.pieces)
    done_bytes = 0
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        with open(made / name, "wb") as file:
            starts = _write_header(file, shard, is_moe)
            for module in shard:
                for run_bytes in _write_module(file, module, starts):
                    done_bytes += run_bytes
                    progress(done_bytes, total_bytes)
        for module in shard:
            weight_map |= {mlx_name(part, is_moe): name for part in module.shapes}
    size = sum(module.file_bytes for module in modules)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(made / INDEX_FILE, index)


def _shards(modules: list[Module], max_file_bytes: int) -> list[list[Module]]:
    """The modules in order, cut into files; the parts of a module stay together."""
    shards, room = [[]], max_file_bytes
    for module in modules:
        if shards[-1] and module.file_bytes > room:
            shards.append([])
            room = max_file_bytes
        shards[-1].append(module)
        room -= module.file_bytes
    return shards


def _write_header(file, shard: list[Module], is_moe: bool) -> dict[str, int]:
    """Writes the header of a shard; returns where in the file each part starts."""
    header = {"__metadata__": {"format": "mlx"}}
    starts, end = {}, 0
    for module in shard:
        for part, shape in module.shapes.items():
            starts[part], begin, end = end, end, end + module.num_bytes(part)
            header[mlx_name(part, is_moe)] = {
                "dtype": module.dtype(part),
                "shape": shape,
                "data_offsets": (begin, end),
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {part: start + 8 + len(text) for part, start in starts.items()}


def _write_module(file, module: Module, starts: dict[str, int]):
    """Writes the parts of a module run by run; yields the bytes read for each run."""
    target, packing = module.target, module.packing
    itemsize = ITEM_BYTES[target.stored]
    row_bytes = target.shape[-1] * itemsize
    staging = memoryview(bytearray(max(RUN_BYTES, row_bytes)))
    for piece in target.pieces:
        for offset, run in read_piece(piece, staging, row_bytes):
            if packing is None:
                data = run if target.dtype == target.stored else to_float32(run, target.stored)
                file.seek(starts[target.name] + offset * ITEM_BYTES[target.dtype] // itemsize)
                file.write(data)
            else:
                rows = to_float32(run, target.stored).reshape(-1, target.shape[-1])
                _write_rows(file, module, starts, offset // row_bytes, rows)
            yield len(run)


def _write_rows(
    file, module: Module, starts: dict[str, int], first_row: int, rows: np.ndarray
) -> None:
    codes, scales, biases = quantize_rows(rows, module.packing)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise WeightsError(f"{module.target.name} has NaN or infinite values: it cannot be packed")
    values = codes, encode(scales, module.target.dtype), encode(biases, module.target.dtype)
    for part, data in zip(module.shapes, values, strict=True):
        file.seek(starts[part] + first_row * data.nbytes // len(rows))
        file.write(data)


def _copy_others(folder: Path, made: Path) -> None:
    """Copies what lies beside the weights: tokenizer, template, generation defaults, licence."""
    for path in sorted(folder.iterdir()):
        is_wanted = path.suffix in COPIED_SUFFIXES or path.name.startswith(("LICENSE", "NOTICE"))
        is_ours = (made / path.name).exists() or path.name == INDEX_FILE
        if path.is_file() and is_wanted and not is_ours:
            shutil.copyfile(path, made / path.name)


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
