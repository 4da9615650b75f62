"""Random weights of an architecture, made on the device, where a checkpoint is too large to carry.

Meant for speed: knows the tensors of a config, nothing of files.
"""

from math import prod

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from lfm2.config import Config
from lfm2.shapes import can_quantize, weight_shapes
from lfm2.weights import Weights
from metal_ops.launch import copy_in, empty
from metal_ops.quantized import QuantizedMatrix

GROUP_SIZE = 64
ROUTER_BITS = 8


def random_weights(config: Config, bits: int, device: str) -> Weights:
    """Every tensor of the architecture: bf16, or its matrices in codes of so many bits."""
    weights: Weights = {}
    for seed, (name, shape) in enumerate(weight_shapes(config).items()):
        is_matrix = can_quantize(name, shape)
        if ".experts." in name:
            # The model knows the stacked ones by their path.
            name = name.removesuffix(".weight")
        if name.endswith("expert_bias"):
            weights[name] = _filled(0.0, shape, dtypes.float32, device)
        elif bits < 16 and is_matrix:
            width = ROUTER_BITS if name.endswith("gate.weight") else bits
            weights[name] = _random_codes(shape, width, seed, device)
        else:
            scale = shape[-1] ** -0.5 if is_matrix else 1.0
            uniform = (_words(shape, seed, device) >> 8).cast(dtypes.float32) * (2.0**-23) - 1
            weights[name] = _made(uniform * scale, dtypes.bfloat16, device)
    return weights


def _random_codes(shape: tuple[int, ...], bits: int, seed: int, device: str) -> QuantizedMatrix:
    *rows, depth = shape
    words, groups = (*rows, depth * bits // 32), (*rows, depth // GROUP_SIZE)
    step = 2 * depth**-0.5 / 2**bits
    codes = _made(_words(words, seed, device), dtypes.uint32, device)
    scales = _filled(step, groups, dtypes.bfloat16, device)
    biases = _filled(-step * 2 ** (bits - 1), groups, dtypes.bfloat16, device)
    return QuantizedMatrix(codes, scales, biases, bits, GROUP_SIZE)


def _words(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    """Numbers that look random, uint32."""
    # NOTE: read from a buffer: as a number in the kernel's text, each tensor compiled its own.
    offset = empty((1,), dtypes.uint32, device)
    copy_in(offset, 0, memoryview(np.array([seed * 40503], np.uint32)).cast("B"))
    x = Tensor.arange(prod(shape), dtype=dtypes.uint32) * 2654435761 + offset
    x = (x ^ (x >> 15)) * 2246822519
    return ((x ^ (x >> 13)) * 3266489917).reshape(shape)


def _filled(value: float, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
    return _made(Tensor.full(shape, value), dtype, device)


def _made(values: Tensor, dtype: DType, device: str) -> Tensor:
    """A real buffer of these values, computed on the device."""
    # NOTE: a tensor of constants alone has no device, and would be computed anew where it is used.
    return empty(values.shape, dtype, device).assign(values.cast(dtype).to(device)).realize()
