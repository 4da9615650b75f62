"""Tiny random checkpoints for tests: configs as dictionaries, weights as numpy arrays.

    config = dense_config()
    write_checkpoint(tmp_path / "dense", config)

Weights depend only on (seed, tensor name), never on numpy's version or on the order of tensors;
the goldens in tests/goldens were made from seed 1.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from scripts.make_checkpoint import encode, safetensors_header, stored_dtype, tensor_shapes

GOLDEN_SEED = 1
MLX_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def dense_config(style: str = "new") -> dict:
    """The model T: conv, conv, attention, conv; 4 heads of 16; feed-forward 96 adjusted to 64.

    style: "new" spells it as files of 2026 do, "old" as files of 2025 do.
    """
    config = _common("lfm2", style) | {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
    }
    if style == "old":
        return config | {"block_ff_dim": 96, "full_attn_idxs": [2], "num_heads": 4}
    return config | {"intermediate_size": 96, "layer_types": _layer_types("ccac")}


def moe_config(style: str = "new") -> dict:
    """The model M: T with one dense layer, then 8 experts of width 32, top-2, expert_bias.

    The old spelling has layer_types too: transformers cannot derive them for this family.
    """
    config = _common("lfm2_moe", style) | {
        "intermediate_size": 96,
        "layer_types": _layer_types("ccac"),
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }
    if style == "old":
        config |= {"full_attn_idxs": [2], "num_heads": 4}
    return config


def plain_moe_config() -> dict:
    """M without expert_bias and normalisation, top-3, scaled by 2.5: all flags the other way."""
    flags = {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5}
    return moe_config() | flags | {"num_experts_per_tok": 3}


def odd_config() -> dict:
    """The model O: attention first, 3 heads of 32 and 1 kv head, 4 taps, biases, own head."""
    return _common("lfm2", "new") | {
        "block_auto_adjust_ff_dim": False,
        "block_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 4,
        "conv_bias": True,
        "hidden_size": 96,
        "intermediate_size": 80,
        "layer_types": _layer_types("acca"),
        "norm_eps": 1e-3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
        "tie_word_embeddings": False,
    }


def _common(model_type: str, style: str) -> dict:
    config = {
        "architectures": ["Lfm2MoeForCausalLM" if "moe" in model_type else "Lfm2ForCausalLM"],
        "model_type": model_type,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 7,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "vocab_size": 97,
    }
    if style == "old":
        old = {"block_norm_eps": 1e-5, "rope_theta": 1e6, "tie_embedding": True}
        return config | old | {"torch_dtype": "float32"}
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    return config | {"rope_parameters": rope, "tie_word_embeddings": True, "dtype": "float32"}


def _layer_types(letters: str) -> list[str]:
    return [{"c": "conv", "a": "full_attention"}[letter] for letter in letters]


def random_tensors(config: dict, seed: int = GOLDEN_SEED) -> dict[str, np.ndarray]:
    """Returns float32 weights under Hugging Face names, large enough that a fault shows."""
    shapes = tensor_shapes(config)
    return {name: _random_tensor(name, shape, seed) for name, shape in shapes.items()}


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Uniform values; only raw generator bits are used, which numpy promises never to change."""
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    unit = (bits >> np.uint64(11)).astype(np.float64) / 2**52 - 1  # in [-1, 1)
    if name.endswith("norm.weight"):
        values = 1.2 + 0.5 * unit
    elif name.endswith("expert_bias"):
        values = unit
    elif name.endswith("bias"):
        values = 0.5 * unit
    elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
        values = 0.4 * unit
    elif name.endswith("gate.weight"):
        values = 5 * shape[-1] ** -0.5 * unit
    else:
        values = 2 * shape[-1] ** -0.5 * unit  # grows a unit input by 1.15
    return values.reshape(shape).astype(np.float32)


def to_layout(tensors: dict[str, np.ndarray], config: dict, layout: str) -> dict[str, np.ndarray]:
    """Renames and regroups Hugging Face tensors.

    layout: "hf" as they are (one w1, w2, w3 per expert); "stacked" with gate_up_proj (E, 2I, C)
    and down_proj (E, C, I); "mlx" with switch_mlp and conv weights (C, L, 1), unquantised.
    """
    if layout == "hf":
        return dict(tensors)
    if layout not in ("stacked", "mlx"):
        raise ValueError(f"unknown layout {layout!r}")
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for i in range(config["num_hidden_layers"]):
        path = f"model.layers.{i}.feed_forward"
        if f"{path}.experts.0.w1.weight" in tensors:
            w1, w2, w3 = (_stack_experts(tensors, path, w) for w in ("w1", "w2", "w3"))
            if layout == "stacked":
                result[f"{path}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
                result[f"{path}.experts.down_proj"] = w2
            else:
                result[f"{path}.switch_mlp.gate_proj.weight"] = w1
                result[f"{path}.switch_mlp.down_proj.weight"] = w2
                result[f"{path}.switch_mlp.up_proj.weight"] = w3
    if layout == "mlx":
        result = {_mlx_name(name, config): _mlx_value(name, v) for name, v in result.items()}
    return result


def _stack_experts(tensors: dict[str, np.ndarray], path: str, which: str) -> np.ndarray:
    names = [name for name in tensors if name.startswith(f"{path}.experts.")]
    num_experts = sum(name.endswith(f".{which}.weight") for name in names)
    return np.stack([tensors[f"{path}.experts.{j}.{which}.weight"] for j in range(num_experts)])


def _mlx_name(name: str, config: dict) -> str:
    if config["model_type"] == "lfm2_moe":
        for old, new in MLX_NAMES.items():
            name = name.replace(f"feed_forward.{old}.", f"feed_forward.{new}.")
    return name


def _mlx_value(name: str, value: np.ndarray) -> np.ndarray:
    return value.transpose(0, 2, 1) if name.endswith("conv.conv.weight") else value


def write_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Writes float32 arrays as one safetensors file of a type; expert_bias stays float32."""
    kinds = {name: stored_dtype(name, dtype) for name in tensors}
    header = {name: (kinds[name], value.shape) for name, value in tensors.items()}
    with open(path, "wb") as file:
        file.write(safetensors_header(header))
        for name, value in tensors.items():
            file.write(encode(np.ascontiguousarray(value), kinds[name]).tobytes())


def write_checkpoint(
    folder: Path,
    config: dict,
    seed: int = GOLDEN_SEED,
    dtype: str = "float32",
    layout: str = "hf",
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes config.json and model.safetensors; returns the folder.

    dtype: "float32", "bfloat16" or "float16", also put into the config under its own key.
    tensors: Hugging Face names to use in place of random_tensors(config, seed).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (folder / "config.json").write_text(json.dumps(config | {key: dtype}, indent=2))
    if tensors is None:
        tensors = random_tensors(config, seed)
    write_tensors(folder / "model.safetensors", to_layout(tensors, config, layout), dtype)
    return folder
