"""LFM2, LFM2.5 and LFM2-MoE language models on tinygrad.

    import lfm2

    model = lfm2.load()  # the built-in model; or a folder, or a hub name
    print(model.generate("What is the capital of France?").text)
"""

from lfm2.engine import Model, load
from lfm2.errors import LFM2Error
from lfm2.stream import Reply, Stream

__all__ = ["LFM2Error", "Model", "Reply", "Stream", "load"]
