"""The state of all streams: pooled keys and values of every attention layer, a ring of every
convolution.
"""

from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.dtype import DType

from lfm2.config import Config
from metal_ops.launch import empty

# Rows of the largest round.
MAX_ROWS = 512
# On NVIDIA's GPUs, which are not busy with fewer: the experts of a mixture share them.
MAX_ROWS_ON_CUDA = 2048
# How many of a stream's last rows can be dropped and written again: the widest window of drafted
# tokens.
MAX_WINDOW = 32


@dataclass(frozen=True)
class State:
    """Real buffers that rounds update in place.

    keys, values: layer -> (num_tokens + max_rows, K, D). rings: layer -> (num_slots + 1, R, C),
    addressed by position modulo R. max_rows: of the largest round. The last max_rows tokens and the
    last slot are scratch for padding rows. Nothing is cleared for a new stream: positions decide
    what is read.
    """

    num_slots: int
    num_tokens: int
    max_rows: int
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    rings: dict[int, Tensor]

    @classmethod
    def create(
        cls, config: Config, num_slots: int, num_tokens: int, dtype: DType, device: str
    ) -> "State":
        """Room for `num_slots` streams that hold `num_tokens` tokens together."""
        rows = max_rows(device)
        pool = (num_tokens + rows, config.num_kv_heads, config.head_dim)
        ring = (num_slots + 1, ring_size(config), config.hidden_size)
        attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        conv = [i for i, kind in enumerate(config.layer_types) if kind == "conv"]
        return cls(
            num_slots=num_slots,
            num_tokens=num_tokens,
            max_rows=rows,
            keys={layer: empty(pool, dtype, device) for layer in attention},
            values={layer: empty(pool, dtype, device) for layer in attention},
            rings={layer: empty(ring, dtype, device) for layer in conv},
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values(), *self.rings.values()]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes() for tensor in self.tensors)


def max_rows(device: str) -> int:
    """Rows of the largest round on a device: padding is less than that, and each padding row has a
    scratch token.
    """
    return MAX_ROWS_ON_CUDA if device.split(":")[0] == "CUDA" else MAX_ROWS


def ring_size(config: Config) -> int:
    """R: the power of two that holds a window and the columns it reads before its first row."""
    return 1 << (MAX_WINDOW + config.conv_kernel - 2).bit_length()
