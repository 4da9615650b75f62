"""The names of modules: ours, and how they are spelled in files.

Ours are those of Hugging Face files without the leading `model.`, and experts are stacked:
`layers.3.self_attn.q_proj`, `layers.3.feed_forward.experts.w1`.
"""

import re

# mlx-lm calls the three matrices so in every feed-forward layer of its MoE files.
MLX_TO_OURS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
OURS_TO_MLX = {ours: mlx for mlx, ours in MLX_TO_OURS.items()}
MLX_MATRIX = re.compile(r"(?<=\.feed_forward\.)(.*\b)(gate_proj|down_proj|up_proj)\b")
OUR_MATRIX = re.compile(r"(?<=\.feed_forward\.)(.*\b)(w[123])\b")


def our_name(name: str) -> str:
    """Our name for a module or tensor of any file: prefix off, mlx's words for ours."""
    name = name.removeprefix("model.")
    name = name.replace(".feed_forward.switch_mlp.", ".feed_forward.experts.")
    return MLX_MATRIX.sub(lambda match: match[1] + MLX_TO_OURS[match[2]], name)


def hf_name(name: str) -> str:
    """The Hugging Face spelling of our `name`."""
    return name if name.startswith("lm_head") else f"model.{name}"


def mlx_name(name: str, is_moe: bool) -> str:
    """The spelling of our `name` in mlx-lm's files, which keep w1, w2, w3 in dense models."""
    if is_moe:
        name = OUR_MATRIX.sub(lambda match: match[1] + OURS_TO_MLX[match[2]], name)
        name = name.replace(".feed_forward.experts.", ".feed_forward.switch_mlp.")
    return hf_name(name)
