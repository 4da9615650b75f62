"""transformers at a published shape on a GPU, random bf16 weights; the last line is JSON.

    python -m scripts.peer_gpu lfm2-350m

Needs torch with CUDA and transformers. Started by bench_gpu.py in a process of its own.
"""

import argparse
import json
import time
from importlib.metadata import version
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from scripts.make_checkpoint import SHAPES, config_of

NUM_ROUNDS = 33


def measure(model, streams: int, num_tokens: int) -> tuple[float, float]:
    """Seconds for the prompts of so many streams, first tokens included, and for a decode round."""
    cache = DynamicCache(config=model.config)
    prompt = torch.tensor([[8 + 37 * i % 4000 for i in range(num_tokens)]] * streams, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    tokens = out.logits[:, -1].argmax(-1, keepdim=True)
    torch.cuda.synchronize()
    prefill_s = time.perf_counter() - start
    times = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return prefill_s, median(times[3:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    shape = parser.parse_args().shape
    values = config_of(SHAPES[shape], None, None, "bfloat16")
    config = AutoConfig.for_model(**values)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tok_s = {}
    measure(model, 1, 512)
    for num_tokens in (512, 2048, 16384):
        times = [measure(model, 1, num_tokens)[0] for _ in range(3)]
        tok_s[f"prefill {num_tokens}"] = num_tokens / median(times)
    for streams in (1, 8, 32):
        tok_s[f"decode {streams}"] = streams / measure(model, streams, 512)[1]
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({"tok_s": tok_s, "versions": versions}))


if __name__ == "__main__":
    main()
