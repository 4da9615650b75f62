"""How a checkpoint is packed, read from the `quantization` object of its config.json."""

from dataclasses import dataclass, field

from lfm2.errors import ConfigError
from lfm2.fields import Fields
from lfm2.names import our_name
from metal_ops.quantized import BITS, GROUP_SIZES


@dataclass(frozen=True)
class Packing:
    """How the codes of one matrix are packed: bits a code, codes a scale."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True)
class Quantization:
    """MLX affine packing of the whole checkpoint; `overrides` holds the modules that differ, by our
    names, with None for one that is not quantised."""

    bits: int
    group_size: int
    overrides: dict[str, Packing | None] = field(default_factory=dict)

    def packing(self, path: str) -> Packing | None:
        """The packing of module `path`, None if it must not be quantised."""
        return self.overrides.get(path, Packing(self.bits, self.group_size))


def read_quantization(fields: Fields) -> Quantization | None:
    """What a config.json says of quantisation, None if nothing. Raises ConfigError."""
    found = fields.table("quantization") or fields.table("quantization_config")
    if found is None:
        return None
    method = found.text("quant_method", default="mlx")
    if method != "mlx":
        raise ConfigError(f"config.json: quantisation by {method!r}; only MLX affine is supported")
    packing = _packing(found)
    overrides = {}
    for path in sorted(found.values):
        value = found.values[path]
        if isinstance(value, dict):
            overrides[our_name(path)] = _packing(Fields(value, f"{found.where}: {path}"), packing)
        elif value is False:
            overrides[our_name(path)] = None
    return Quantization(packing.bits, packing.group_size, overrides)


def _packing(fields: Fields, default: Packing | None = None) -> Packing:
    mode = fields.text("mode", default="affine")
    if mode != "affine":
        raise ConfigError(f"{fields.where}: mode is {mode!r}; only 'affine' is supported")
    defaults = {} if default is None else vars(default)
    found = {}
    for key, choices in (("bits", BITS), ("group_size", GROUP_SIZES)):
        found[key] = fields.whole(key, **({"default": defaults[key]} if defaults else {}))
        if found[key] not in choices:
            raise fields.wrong(key, f"one of {', '.join(map(str, choices))}")
    return Packing(**found)
