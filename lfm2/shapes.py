"""The tensors of an architecture: their names, their shapes, and their parts when packed."""

from lfm2.config import Config
from lfm2.quantization import Packing
from metal_ops.quantized import WORD_BITS

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: Config) -> Shapes:
    """The name and shape of every tensor of the architecture, as if nothing were quantised."""
    c = config.hidden_size
    shapes = {"embed_tokens.weight": (config.vocab_size, c), "embedding_norm.weight": (c,)}
    if not config.tie_embedding:
        shapes["lm_head.weight"] = (config.vocab_size, c)
    for i, kind in enumerate(config.layer_types):
        mixer = _conv_shapes(config) if kind == "conv" else _attention_shapes(config)
        feed_forward = _moe_shapes(config) if config.is_moe_layer(i) else _dense_shapes(config)
        norms = {"operator_norm.weight": (c,), "ffn_norm.weight": (c,)}
        layer = norms | mixer | feed_forward
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _conv_shapes(config: Config) -> Shapes:
    c = config.hidden_size
    shapes = {
        "conv.in_proj.weight": (3 * c, c),
        "conv.conv.weight": (c, config.conv_kernel),
        "conv.out_proj.weight": (c, c),
    }
    if config.conv_bias:
        shapes |= {
            "conv.in_proj.bias": (3 * c,),
            "conv.conv.bias": (c,),
            "conv.out_proj.bias": (c,),
        }
    return shapes


def _attention_shapes(config: Config) -> Shapes:
    c, d = config.hidden_size, config.head_dim
    return {
        "self_attn.q_proj.weight": (config.num_heads * d, c),
        "self_attn.k_proj.weight": (config.num_kv_heads * d, c),
        "self_attn.v_proj.weight": (config.num_kv_heads * d, c),
        "self_attn.out_proj.weight": (c, config.num_heads * d),
        "self_attn.q_layernorm.weight": (d,),
        "self_attn.k_layernorm.weight": (d,),
    }


def _dense_shapes(config: Config) -> Shapes:
    c, f = config.hidden_size, config.ffn_size
    return {
        "feed_forward.w1.weight": (f, c),
        "feed_forward.w2.weight": (c, f),
        "feed_forward.w3.weight": (f, c),
    }


def _moe_shapes(config: Config) -> Shapes:
    c, e, f = config.hidden_size, config.num_experts, config.expert_ffn_size
    shapes = {
        "feed_forward.gate.weight": (e, c),
        "feed_forward.experts.w1.weight": (e, f, c),
        "feed_forward.experts.w2.weight": (e, c, f),
        "feed_forward.experts.w3.weight": (e, f, c),
    }
    if config.use_expert_bias:
        shapes["feed_forward.expert_bias"] = (e,)
    return shapes


def can_quantize(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be packed: every matrix but the taps of the convolution."""
    return len(shape) >= 2 and not name.endswith(".conv.conv.weight")


def packed_shapes(name: str, shape: tuple[int, ...], packing: Packing) -> Shapes:
    """The parts that stand for the weight `name` (..., N, K) when it is packed."""
    path, width = name.removesuffix(".weight"), shape[-1]
    groups = (*shape[:-1], width // packing.group_size)
    return {
        f"{path}.weight": (*shape[:-1], width * packing.bits // WORD_BITS),
        f"{path}.scales": groups,
        f"{path}.biases": groups,
    }
