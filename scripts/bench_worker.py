"""Measures one peer on one checkpoint; the last line of stdout is one JSON object.

Started by bench_peers.py in the peers' environment, one process per figure, so that load time
and peak memory are this peer's own.
"""

import argparse
import importlib
import json
import resource
import sys
import time


def measure(peer, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """Returns seconds for the prompt, first token's logits included, and for num_tokens after."""
    peer.reset()
    start = time.perf_counter()
    row = peer.feed(prompt, last_only=True)[-1]
    prefill_s = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(num_tokens):
        row = peer.feed([int(row.argmax())], last_only=True)[-1]
    return prefill_s, time.perf_counter() - start


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=("transformers", "mlx"))
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=64)
    options = parser.parse_args()
    start = time.perf_counter()
    module = importlib.import_module(f"scripts.peer_{options.peer}")
    import_s = time.perf_counter() - start
    start = time.perf_counter()
    peer = module.Peer(options.folder, options.dtype)
    load_s = time.perf_counter() - start
    prompt = [8 + 37 * i % 4000 for i in range(options.prompt_tokens)]
    start = time.perf_counter()
    measure(peer, prompt[:16], 2)
    warmup_s = time.perf_counter() - start
    prefill_s, decode_s = measure(peer, prompt, options.gen_tokens)
    print(
        json.dumps(
            {
                "prefill_tok_s": options.prompt_tokens / prefill_s,
                "decode_tok_s": options.gen_tokens / decode_s,
                "peak_memory_bytes": peak_memory_bytes(),
                "load_s": load_s,
                "import_s": import_s,
                "warmup_s": warmup_s,
                "versions": module.Peer.versions(),
            }
        )
    )


if __name__ == "__main__":
    main()
