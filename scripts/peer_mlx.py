"""A checkpoint in mlx-lm on the CPU, as goldens and benchmarks drive it.

Needs an environment with mlx-lm and mlx[cpu]. Knows nothing about our engine.
"""

import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class WideSwitchLinear(SwitchLinear):
    """Experts in 16 bits on the CPU, which mlx lacks: multiplies in fp32 and rounds the result."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight = self["weight"].astype(mx.float32).swapaxes(-1, -2)
        wide = x.astype(mx.float32)
        result = mx.gather_mm(wide, weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return result.astype(x.dtype)


class Peer:
    """One stream: reset() forgets it, feed() appends tokens to it.

    mlx-lm always ties the head; an own head is applied here, from a single-file checkpoint.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        mx.set_default_device(mx.cpu)
        config = json.loads((Path(folder) / "config.json").read_text())
        is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        self.model = load_model(Path(folder), strict=is_tied)[0]
        self.model.update(
            tree_map_with_path(
                lambda path, value: value if "expert_bias" in path else value.astype(DTYPES[dtype]),
                self.model.parameters(),
            )
        )
        mx.eval(self.model.parameters())
        for module in self.model.modules():
            if type(module) is SwitchLinear and dtype != "float32":
                module.__class__ = WideSwitchLinear
        self.head = None
        if not is_tied:
            weights = mx.load(str(Path(folder) / "model.safetensors"))
            self.head = weights["lm_head.weight"].astype(DTYPES[dtype])
        self.cache = None

    def reset(self) -> None:
        self.cache = make_prompt_cache(self.model)

    def feed(self, ids: list[int], last_only: bool = False) -> np.ndarray:
        """Returns the logits of the new tokens, or of the last one, as float32 (rows, V)."""
        hidden = self.model.model(mx.array([ids]), self.cache)[0]
        hidden = hidden[-1:] if last_only else hidden
        embed = self.model.model.embed_tokens
        rows = embed.as_linear(hidden) if self.head is None else hidden @ self.head.T
        return np.array(rows.astype(mx.float32))

    @staticmethod
    def versions() -> dict[str, str]:
        return {name: version(name) for name in ("mlx-lm", "mlx")}
