"""The check at the door of an op: names the op, the argument, what was expected and what was
found.
"""

from tinygrad import Tensor
from tinygrad.dtype import DType


def expect(
    op: str, argument: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[DType, ...] = ()
) -> None:
    """Raises ValueError unless `tensor` has this shape and, where dtypes are given, one of them."""
    if tensor.shape != shape:
        raise ValueError(f"{op}: {argument} must have shape {shape}, found {tensor.shape}")
    if dtypes and tensor.dtype not in dtypes:
        names = " or ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"{op}: {argument} must be {names}, found {tensor.dtype.name}")
