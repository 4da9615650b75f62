"""LFM2, LFM2.5 and LFM2-MoE language models on tinygrad.

import lfm2

model = lfm2.load()  # the built-in model; or a folder, or a hub name
print(model.generate("What is the capital of France?").text)
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["BatchReply", "LFM2Error", "Model", "Reply", "Stream", "load"]

# Imported when first asked for: tinygrad takes half a second, which `lfm2 --help` need not pay.
MODULES = {
    "BatchReply": "lfm2.batch",
    "LFM2Error": "lfm2.errors",
    "Model": "lfm2.engine",
    "Reply": "lfm2.stream",
    "Stream": "lfm2.stream",
    "load": "lfm2.loading",
}


def __getattr__(name: str):
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
