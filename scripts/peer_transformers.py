"""A checkpoint in transformers on the CPU, as goldens and benchmarks drive it.

Needs an environment with torch and transformers. Knows nothing about our engine.
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Peer:
    """One stream: reset() forgets it, feed() appends tokens to it."""

    def __init__(self, folder: Path, dtype: str, attention: str = "sdpa") -> None:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=attention
        ).eval()
        self.cache = None

    def reset(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def feed(self, ids: list[int], last_only: bool = False) -> np.ndarray:
        """Returns the logits of the new tokens, or of the last one, as float32 (rows, V)."""
        rows = self.model(
            torch.tensor([ids]), cache=self.cache, use_cache=True, logits_to_keep=int(last_only)
        ).logits[0]
        return rows.float().numpy()

    @staticmethod
    def versions() -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}
