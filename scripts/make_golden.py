"""Writes tests/goldens with two independent engines, and fails where the two disagree.

    pip install torch transformers mlx-lm "mlx[cpu]"
    python -m scripts.make_golden

Run from the repository's root, in an environment of its own. Every file holds, under "about", a
JSON text with the engines' versions, the date and the largest difference between the engines.
"""

import json
import sys
import tempfile
from datetime import date
from pathlib import Path

import mlx.core as mx
import numpy as np
from transformers import AutoTokenizer

from scripts import peer_mlx, peer_transformers
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
DEMO = ROOT / "lfm2" / "demo"
TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 200)
GREEDY_LENGTHS = (1, 4, 9, 200)
NUM_GREEDY = 32
BF16_LENGTHS = (3, 9, 40)
TINY_MODELS = {
    "dense": (tiny.dense_config("new"), tiny.dense_config("old")),
    "moe": (tiny.moe_config("new"), tiny.moe_config("old")),
    "moe_plain": (tiny.plain_moe_config(),),
    "odd": (tiny.odd_config(),),
}
LONG_TEXT = """Once upon a time there was a small red fox called Mia. She lived by the river with
her friend Tom, an old brown bear. One day Mia found a shiny key under a stone. "What does it open?"
she asked. Tom did not know. They looked at the door of the mill, at the box of the baker and at
the gate of the garden, but the key was too small for all of them. At last the owl told them that
it was the key of the music box in the school. They ran to the school, and the teacher let them
try. The key turned, and the box played a soft song. All the children came to listen, and from that
day on Mia and Tom were invited to every lesson. In 1912 the town had 348 people and 27 shops, but
nobody there had ever seen a fox who could read. What did Mia find? She found a shiny key."""
CHATS = (
    [("user", "What is the capital of France?")],
    [("user", "Write a short story about a cat and a boat.")],
    [("user", "What is 27 + 48?")],
    [
        (
            "user",
            'Replace "red" with "blue" in this sentence: '
            "The teacher saw a red apple at the market.",
        )
    ],
    [
        ("user", "My name is Anna."),
        ("assistant", "Nice to meet you, Anna."),
        ("user", "What is my name?"),
    ],
    [("system", "You are a helpful assistant."), ("user", "Who are you?")],
)
MAX_REPLY_TOKENS = 120


class Disagreement(Exception):
    """The two engines differ by more than the tolerance."""


def about(**extra) -> np.ndarray:
    record = {"made_by": "scripts/make_golden.py", "date": date.today().isoformat()}
    record["engines"] = peer_transformers.Peer.versions() | peer_mlx.Peer.versions()
    return np.array(json.dumps(record | extra))


def load_both(folder: Path, dtype: str) -> tuple[peer_transformers.Peer, peer_mlx.Peer]:
    return peer_transformers.Peer(folder, dtype, attention="eager"), peer_mlx.Peer(folder, dtype)


def whole_logits(engine: peer_transformers.Peer | peer_mlx.Peer, ids: list[int]) -> np.ndarray:
    """Returns every row's logits of a prompt run in one pass, (len(ids), V)."""
    engine.reset()
    return engine.feed(ids)


def greedy(
    engine: peer_transformers.Peer | peer_mlx.Peer,
    ids: list[int],
    num_tokens: int,
    stops: frozenset[int] = frozenset(),
) -> tuple[list[int], float]:
    """Returns greedy tokens, a stop token included, and the smallest lead of a winner in logits."""
    engine.reset()
    row = engine.feed(ids, last_only=True)[-1]
    tokens, lead = [], float("inf")
    while True:
        second, first = np.sort(row)[-2:]
        lead = min(lead, float(first - second))
        tokens.append(int(row.argmax()))
        if len(tokens) == num_tokens or tokens[-1] in stops:
            return tokens, lead
        row = engine.feed(tokens[-1:], last_only=True)[-1]


def tiny_prompt(length: int) -> list[int]:
    """Closed form, other tokens at each length."""
    return [(37 * i + 11 * length + 5) % 97 for i in range(length)]


def demo_prompt(length: int, text_ids: list[int]) -> list[int]:
    """A piece of real text, another one at each length."""
    if length > len(text_ids):
        raise ValueError(f"the text has {len(text_ids)} tokens, a prompt needs {length}")
    start = 11 * length % (len(text_ids) - length + 1)
    return text_ids[start : start + length]


def compare(a: np.ndarray, b: np.ndarray, what: str) -> float:
    difference = float(np.abs(a - b).max())
    if not difference <= TOLERANCE:
        raise Disagreement(f"{what}: logits of the engines differ by {difference:.3g}")
    return difference


def float32_goldens(folder: Path, prompts: dict[int, list[int]], full_mlx_lengths) -> dict:
    """Returns the arrays of a fp32 golden: prompts, both engines' logits and greedy tokens."""
    torch_engine, mlx_engine = load_both(folder, "float32")
    arrays, largest, smallest_lead = {}, 0.0, float("inf")
    for length, ids in prompts.items():
        rows, mlx_rows = whole_logits(torch_engine, ids), whole_logits(mlx_engine, ids)
        largest = max(largest, compare(rows, mlx_rows, f"{folder.name}, {length} tokens"))
        arrays[f"prompt_{length}"] = np.array(ids, np.int32)
        arrays[f"logits_{length}"] = rows
        if length in full_mlx_lengths:
            arrays[f"mlx_logits_{length}"] = mlx_rows
    for length in GREEDY_LENGTHS:
        tokens, lead = greedy(torch_engine, prompts[length], NUM_GREEDY)
        if tokens != greedy(mlx_engine, prompts[length], NUM_GREEDY)[0]:
            raise Disagreement(f"{folder.name}, {length} tokens: greedy tokens differ")
        arrays[f"greedy_{length}"] = np.array(tokens, np.int32)
        smallest_lead = min(smallest_lead, lead)
    arrays["about"] = about(largest_difference=largest, smallest_greedy_lead=smallest_lead)
    return arrays


def tiny_goldens(configs: tuple[dict, ...], folder: Path) -> dict:
    """Returns one golden for all spellings of a config, which must give the same numbers."""
    prompts = {length: tiny_prompt(length) for length in LENGTHS}
    spellings = []
    for i, config in enumerate(configs):
        checkpoint = tiny.write_checkpoint(folder / str(i), config)
        spellings.append(float32_goldens(checkpoint, prompts, LENGTHS))
    for other in spellings[1:]:
        for name, array in spellings[0].items():
            if name != "about" and not np.array_equal(array, other[name]):
                raise Disagreement(f"{name} depends on the spelling of the config")
    return spellings[0]


def bfloat16_goldens(prompts: dict[int, list[int]]) -> dict:
    """Returns both engines' bf16 logits of the built-in model: the spread they show is normal."""
    torch_engine, mlx_engine = load_both(DEMO, "bfloat16")
    exact_engine = load_both(DEMO, "float32")[0]
    arrays, spread = {}, {}
    for length in BF16_LENGTHS:
        ids = prompts[length]
        rows, mlx_rows = whole_logits(torch_engine, ids), whole_logits(mlx_engine, ids)
        exact = whole_logits(exact_engine, ids)
        pairs = {"engines": (rows, mlx_rows), "torch_to_fp32": (rows, exact)}
        pairs["mlx_to_fp32"] = (mlx_rows, exact)
        spread[str(length)] = {name: _difference(*pair) for name, pair in pairs.items()}
        arrays[f"prompt_{length}"] = np.array(ids, np.int32)
        arrays[f"logits_{length}"] = rows
        arrays[f"mlx_logits_{length}"] = mlx_rows
    arrays["about"] = about(spread=spread)
    return arrays


def _difference(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    return {"max": float(np.abs(a - b).max()), "rms": float(np.sqrt(np.mean((a - b) ** 2)))}


def text_goldens(tokenizer) -> dict:
    """Returns greedy replies of the built-in model in fp32, on which both engines agree."""
    torch_engine, mlx_engine = load_both(DEMO, "float32")
    stops = frozenset({2, 7})
    replies = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        tokens, lead = greedy(torch_engine, ids, MAX_REPLY_TOKENS, stops)
        if tokens != greedy(mlx_engine, ids, MAX_REPLY_TOKENS, stops)[0]:
            raise Disagreement(f"reply to {chat[-1][1]!r}: greedy tokens differ")
        is_stopped = tokens[-1] in stops
        replies.append(
            {
                "messages": messages,
                "prompt_text": prompt,
                "prompt_ids": ids,
                "reply_ids": tokens,
                "reply_text": tokenizer.decode(tokens[:-1] if is_stopped else tokens),
                "finish_reason": "stop" if is_stopped else "length",
                "smallest_lead": lead,
            }
        )
    return {"about": json.loads(str(about(max_tokens=MAX_REPLY_TOKENS))), "replies": replies}


def quantised_goldens() -> dict:
    """Returns mx.quantize's output for every width, group size and type, and what it stands for.

    16-bit floats are stored widened to float32, which loses nothing.
    """
    mx.set_default_device(mx.cpu)
    bits = np.random.PCG64(1).random_raw(3 * 256)
    weight = mx.array(((bits >> np.uint64(11)) / 2**52 - 1).reshape(3, 256).astype(np.float32))
    arrays = {"weight": np.array(weight), "about": about()}
    for dtype in ("float32", "bfloat16", "float16"):
        typed = weight.astype(getattr(mx, dtype))
        for num_bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                codes, scales, biases = mx.quantize(typed, group_size=group, bits=num_bits)
                values = mx.dequantize(codes, scales, biases, group_size=group, bits=num_bits)
                key = f"{dtype}_{num_bits}_{group}"
                arrays[f"{key}_codes"] = np.array(codes)
                arrays[f"{key}_scales"] = np.array(scales.astype(mx.float32))
                arrays[f"{key}_biases"] = np.array(biases.astype(mx.float32))
                arrays[f"{key}_values"] = np.array(values.astype(mx.float32))
    return arrays


def save(name: str, arrays: dict) -> None:
    path = GOLDENS / name
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, {arrays['about']}", file=sys.stderr)


def main() -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    save("quantised.npz", quantised_goldens())
    with tempfile.TemporaryDirectory() as folder:
        for name, configs in TINY_MODELS.items():
            save(f"{name}.npz", tiny_goldens(configs, Path(folder) / name))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    text_ids = tokenizer.encode(LONG_TEXT.replace("\n", " "))
    prompts = {n: demo_prompt(n, text_ids) for n in sorted({*LENGTHS, *BF16_LENGTHS})}
    short = [length for length in LENGTHS if length < 100]
    save("demo.npz", float32_goldens(DEMO, {n: prompts[n] for n in LENGTHS}, short))
    save("demo_bfloat16.npz", bfloat16_goldens(prompts))
    text = json.dumps(text_goldens(tokenizer), indent=1, ensure_ascii=False)
    (GOLDENS / "demo_text.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
