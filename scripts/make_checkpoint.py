"""Writes a random checkpoint of a published shape, in Hugging Face layout.

    python scripts/make_checkpoint.py --shape lfm2-350m OUT
    python scripts/make_checkpoint.py --shape lfm2-24b-a2b --layers 4 OUT

The text commands run on it (it carries the built-in model's tokenizer), its text is noise.
Owns the table of published shapes, the list of tensors of a config, and the safetensors format.
"""

import argparse
import functools
import json
import os
import shutil
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DEMO = Path(__file__).resolve().parents[1] / "lfm2" / "demo"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
POOL_SIZE = 2**22 - 3  # a prime, so that no two rows of a matrix are equal


@dataclass(frozen=True)
class Shape:
    """One published model; ffn_size is the number in config.json, before any adjustment."""

    num_layers: int
    attention_layers: tuple[int, ...]
    hidden_size: int
    ffn_size: int
    adjusts_ffn: bool = False
    vocab_size: int = 65536
    rope_theta: float = 1e6
    max_positions: int = 128000
    num_experts: int = 0
    expert_ffn_size: int = 0

    @property
    def num_heads(self) -> int:
        return self.hidden_size // 64


A16 = (2, 5, 8, 10, 12, 14)
A24 = (2, 6, 10, 14, 18, 21)
A30 = (2, 5, 9, 13, 17, 21, 24, 27)
# NOTE: the indices of the 14- and 40-layer models are not published in a source we know; only
# their numbers (6 and 10) are. These patterns are plausible guesses, good enough for speed.
A14_GUESS = (2, 4, 6, 8, 10, 12)
A40_GUESS = (2, 6, 10, 14, 18, 22, 26, 30, 34, 38)

SHAPES = {
    "lfm2-350m": Shape(16, A16, 1024, 6656, adjusts_ffn=True),
    "lfm2-700m": Shape(16, A16, 1536, 10240, adjusts_ffn=True),
    "lfm2-1.2b": Shape(16, A16, 2048, 12288, adjusts_ffn=True),
    "lfm2-2.6b": Shape(30, A30, 2048, 10752),
    "lfm2.5-230m": Shape(14, A14_GUESS, 1024, 2560),
    "lfm2.5-2.6b": Shape(
        30, A30, 2048, 10752, vocab_size=128000, rope_theta=1e7, max_positions=131072
    ),
    "lfm2-8b-a1b": Shape(24, A24, 2048, 7168, num_experts=32, expert_ffn_size=1792),
    "lfm2.5-8b-a1b": Shape(
        24, A24, 2048, 7168, num_experts=32, expert_ffn_size=1792, vocab_size=128000, rope_theta=5e6
    ),
    "lfm2-24b-a2b": Shape(40, A40_GUESS, 2048, 11776, num_experts=64, expert_ffn_size=1536),
    "lfm2.5-24b-a2b": Shape(
        40, A40_GUESS, 2048, 11776, num_experts=64, expert_ffn_size=1536, vocab_size=128000
    ),
    # Not published: the small MoE of our speed tables.
    "moe-small": Shape(12, (2, 6, 10), 1024, 3584, num_experts=16, expert_ffn_size=512),
}


def config_of(shape: Shape, num_layers: int | None, vocab_size: int | None, dtype: str) -> dict:
    """Returns the config.json of a shape; a longer model repeats the pattern of layers."""
    num_layers = num_layers or shape.num_layers
    pattern = [i % shape.num_layers in shape.attention_layers for i in range(num_layers)]
    config = {
        "architectures": ["Lfm2MoeForCausalLM" if shape.num_experts else "Lfm2ForCausalLM"],
        "model_type": "lfm2_moe" if shape.num_experts else "lfm2",
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": dtype,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "layer_types": ["full_attention" if attends else "conv" for attends in pattern],
        "max_position_embeddings": shape.max_positions,
        "norm_eps": 1e-5,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": vocab_size or shape.vocab_size,
    }
    if not shape.num_experts:
        return config | {
            "block_auto_adjust_ff_dim": shape.adjusts_ffn,
            "block_dim": shape.hidden_size,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        }
    return config | {
        "moe_intermediate_size": shape.expert_ffn_size,
        "norm_topk_prob": True,
        "num_dense_layers": min(2, num_layers),
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor that a checkpoint of this config.json holds."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    kinds = config.get("layer_types")
    if kinds is None:
        attends = [i in config["full_attn_idxs"] for i in range(config["num_hidden_layers"])]
        kinds = ["full_attention" if a else "conv" for a in attends]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i, kind in enumerate(kinds):
        operator = _attention_shapes(config) if kind == "full_attention" else _conv_shapes(config)
        norms = {"operator_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        for name, shape in (norms | operator | _feed_forward_shapes(config, i)).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.embedding_norm.weight"] = (hidden,)
    if not config.get("tie_embedding", config.get("tie_word_embeddings", True)):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _conv_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    shapes = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, config["conv_L_cache"]),
        "conv.out_proj.weight": (hidden, hidden),
    }
    if config["conv_bias"]:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def _attention_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // num_heads)
    kv_width = config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj.weight": (num_heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.out_proj.weight": (hidden, num_heads * head_dim),
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }


def _feed_forward_shapes(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    if config["model_type"] == "lfm2_moe" and layer >= config["num_dense_layers"]:
        num_experts, width = config["num_experts"], config["moe_intermediate_size"]
        shapes = {"feed_forward.gate.weight": (num_experts, hidden)}
        if config["use_expert_bias"]:
            shapes["feed_forward.expert_bias"] = (num_experts,)
        for j in range(num_experts):
            shapes |= _mlp_shapes(f"feed_forward.experts.{j}", hidden, width)
        return shapes
    width = config.get("block_ff_dim", config.get("intermediate_size"))
    if config["model_type"] == "lfm2" and config["block_auto_adjust_ff_dim"]:
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return _mlp_shapes("feed_forward", hidden, width)


def _mlp_shapes(path: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.w1.weight": (width, hidden),
        f"{path}.w2.weight": (hidden, width),
        f"{path}.w3.weight": (width, hidden),
    }


def stored_dtype(name: str, dtype: str) -> str:
    """Returns the safetensors type of a tensor; published files keep expert_bias in float32."""
    return "F32" if name.endswith("expert_bias") else DTYPES[dtype]


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounds finite float32 values to a safetensors type, bfloat16 as uint16, ties to even."""
    if kind == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16 if kind == "F16" else np.float32)


def safetensors_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Returns all bytes before the data, for name -> (type, shape) in the order of the data."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in tensors.items():
        start, end = end, end + ITEM_BYTES[kind] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class RandomWeights:
    """Endless cheap weights: each tensor reads one shared pool of normals from its own start."""

    def __init__(self, seed: int, num_layers: int) -> None:
        self.pool = np.random.default_rng(seed).standard_normal(POOL_SIZE, dtype=np.float32)
        self.num_layers = num_layers
        self.encoded = functools.lru_cache(maxsize=None)(self._encode_pool)

    def pieces(self, name: str, kind: str, shape: tuple[int, ...]):
        """Yields a tensor's values as arrays, in order, without ever holding it whole."""
        pool = self.encoded(*self.mean_and_std(name, shape), kind)
        left = int(np.prod(shape, dtype=np.int64))
        start = zlib.crc32(name.encode()) % POOL_SIZE
        while left:
            piece = pool[start : start + left]
            yield piece
            left -= len(piece)
            start = 0

    def mean_and_std(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Returns numbers that keep activations near 1 and logits within a few units."""
        if name.endswith("norm.weight"):
            return 1.0, 0.1
        if name.endswith("expert_bias"):
            return 0.0, 0.1
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return 0.0, 0.04
        std = shape[-1] ** -0.5
        if name.endswith(("out_proj.weight", "w2.weight")):
            std *= (2 * self.num_layers) ** -0.5
        return 0.0, std

    def _encode_pool(self, mean: float, std: float, kind: str) -> np.ndarray:
        return encode(np.float32(mean) + np.float32(std) * self.pool, kind)


def split_shards(tensors: dict, shard_bytes: int) -> list[dict]:
    """Cuts name -> (type, shape) into consecutive groups of at most shard_bytes, where it can."""
    shards, size = [{}], 0
    for name, (kind, shape) in tensors.items():
        tensor_bytes = ITEM_BYTES[kind] * int(np.prod(shape, dtype=np.int64))
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (kind, shape)
        size += tensor_bytes
    return shards


def write_weights(folder: Path, config: dict, seed: int, shard_bytes: int) -> int:
    """Writes the weight files, and an index where there are several; returns the data's bytes."""
    kinds = {name: stored_dtype(name, config["dtype"]) for name in tensor_shapes(config)}
    tensors = {name: (kinds[name], shape) for name, shape in tensor_shapes(config).items()}
    total = sum(ITEM_BYTES[k] * int(np.prod(s, dtype=np.int64)) for k, s in tensors.values())
    shards = split_shards(tensors, shard_bytes)
    weights = RandomWeights(seed, config["num_hidden_layers"])
    weight_map, written = {}, 0
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        with open(folder / name, "wb") as file:
            file.write(safetensors_header(shard))
            for tensor, (kind, shape) in shard.items():
                for piece in weights.pieces(tensor, kind, shape):
                    written += file.write(piece)
                show_progress(written, total)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)


def make_checkpoint(out: Path, config: dict, seed: int, shard_bytes: int) -> int:
    """Writes the whole folder under a temporary name, then renames it; returns weight bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if config["vocab_size"] >= json.loads((DEMO / "config.json").read_text())["vocab_size"]:
            for name in TOKENIZER_FILES:
                shutil.copy(DEMO / name, partial / name)
        total = write_weights(partial, config, seed, shard_bytes)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to make; must not exist")
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--vocab", type=int, help="below 4096 no tokenizer is written")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists; choose another folder or remove it")
    for name in ("layers", "vocab"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    if options.seed < 0 or options.shard_gb <= 0:
        parser.error("--seed must not be negative and --shard-gb must be above 0")
    config = config_of(SHAPES[options.shape], options.layers, options.vocab, options.dtype)
    total = make_checkpoint(options.out, config, options.seed, int(options.shard_gb * 1e9))
    print(f"{options.out}: {options.shape}, {total / 1e9:.2f} GB of weights", file=sys.stderr)


if __name__ == "__main__":
    main()
