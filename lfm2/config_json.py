"""How a `config.json` spells things, old and new: the only place that knows.

The table of spellings: block_ff_dim before intermediate_size, layer_types before full_attn_idxs,
tie_embedding before tie_word_embeddings, a nested rope_theta before one at the top.
"""

import json
from pathlib import Path

from lfm2.errors import ConfigError
from lfm2.fields import Fields
from lfm2.names import mlx_name
from lfm2.quantization import Quantization, read_quantization

ARCHITECTURES = {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}
LAYER_KINDS = ("conv", "full_attention")
DTYPES = ("bfloat16", "float16", "float32")
# Beyond these a config is damaged, and looking for its tensors by name would take minutes.
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000


def read_config(folder: Path) -> dict:
    """The object in `folder`/config.json, as it is written there. Raises ConfigError."""
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder" if folder.exists() else f"no folder {folder}")
    if not path.is_file():
        inside = sorted(found.parent.name for found in folder.glob("*/config.json"))
        hint = f"; did you mean its subfolder {' or '.join(inside[:3])}?" if inside else ""
        raise ConfigError(
            f"{folder} holds no config.json (a checkpoint has config.json, *.safetensors and "
            f"tokenizer.json){hint}"
        )
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def normalize(values: dict) -> dict:
    """The arguments of `Config` from the object of a config.json. Raises ConfigError."""
    fields = Fields(values)
    is_moe = _model_type(fields) == "lfm2_moe"
    num_layers = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    heads = _heads(fields)
    return dict(
        vocab_size=fields.whole("vocab_size"),
        num_layers=num_layers,
        layer_types=_layer_types(fields, num_layers, is_moe),
        ffn_size=fields.whole("intermediate_size") if is_moe else _dense_ffn_size(fields),
        conv_kernel=fields.whole("conv_L_cache", default=3),
        conv_bias=fields.flag("conv_bias", default=False),
        norm_eps=fields.positive("norm_eps", "block_norm_eps", "rms_norm_eps", default=1e-5),
        rope_theta=_rope_theta(fields),
        max_positions=fields.whole("max_position_embeddings", default=128_000),
        tie_embedding=fields.flag("tie_embedding", "tie_word_embeddings", default=True),
        bos_token_id=fields.whole("bos_token_id", default=None, least=0),
        eos_token_ids=_eos_token_ids(fields),
        dtype=_dtype(fields),
        quantization=read_quantization(fields),
        **heads,
        **(_experts(fields, num_layers) if is_moe else NO_EXPERTS),
    )


NO_EXPERTS = dict(
    num_experts=0,
    num_active_experts=0,
    num_dense_layers=0,
    expert_ffn_size=0,
    use_expert_bias=False,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
)


def _model_type(fields: Fields) -> str:
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        found = "names no model_type" if model_type is None else f"has model_type {model_type!r}"
        raise ConfigError(f"config.json {found}; supported are {' and '.join(ARCHITECTURES)}")
    wanted = ARCHITECTURES[model_type]
    named = fields.array("architectures", str)
    if named and wanted not in named:
        # Encoders, embedding models and drafters share the model_type, not the forward pass.
        raise ConfigError(
            f"config.json names the architecture {', '.join(named)}; of {model_type} only {wanted} "
            f"is supported"
        )
    return model_type


def _heads(fields: Fields) -> dict[str, int]:
    hidden_size = fields.whole("hidden_size")
    num_heads = fields.whole("num_attention_heads", "num_heads")
    twin = fields.whole("num_heads", default=num_heads)
    if twin != num_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {num_heads} but num_heads is {twin}"
        )
    num_kv_heads = fields.whole("num_key_value_heads", default=num_heads)
    head_dim = fields.whole("head_dim", default=None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden_size} is no multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: {num_heads} heads are no multiple of {num_kv_heads} key-value heads"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} is odd; RoPE turns pairs")
    return dict(
        hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def _layer_types(fields: Fields, num_layers: int, is_moe: bool) -> tuple[str, ...]:
    kinds = fields.array("layer_types", str)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ConfigError(
                f"config.json: layer_types has {len(kinds)} entries but num_hidden_layers is "
                f"{num_layers}"
            )
        for kind in kinds:
            if kind not in LAYER_KINDS:
                raise ConfigError(
                    f"config.json: layer_types names {kind!r}; known are conv and full_attention"
                )
        return tuple(kinds)
    attention = fields.array("full_attn_idxs", int)
    if attention is None:
        if is_moe:
            raise ConfigError("config.json has no layer_types or full_attn_idxs, which MoE needs")
        attention = list(range(num_layers))
    for i in attention:
        if not 0 <= i < num_layers:
            raise ConfigError(f"config.json: full_attn_idxs names layer {i} of {num_layers}")
    return tuple("full_attention" if i in attention else "conv" for i in range(num_layers))


def _dense_ffn_size(fields: Fields) -> int:
    """The width of w1 and w3: as given, or two thirds of it, scaled and rounded up."""
    width = fields.whole("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    multiplier = fields.positive("block_ffn_dim_multiplier", default=1.0)
    multiple = fields.whole("block_multiple_of", default=256)
    # NOTE: transformers rounds only if the multiplier is not null, mlx always; no file has a null.
    return -(-int(multiplier * width) // multiple) * multiple


def _rope_theta(fields: Fields) -> float:
    theta = fields.positive("rope_theta", default=1e6)
    for key in ("rope_scaling", "rope_parameters"):
        nested = fields.table(key)
        if nested is None:
            continue
        kind = nested.text("rope_type", "type")
        unknown = sorted(nested.values.keys() - {"rope_theta", "rope_type", "type"})
        if kind not in ("default", None) or kind is None and unknown:
            found = f"RoPE type {kind!r}" if kind else f"no RoPE type beside {', '.join(unknown)}"
            raise ConfigError(f"config.json: {key} has {found}; only 'default' is supported")
        if nested.positive("partial_rotary_factor", default=1.0) != 1.0:
            raise ConfigError(f"config.json: {key} has a partial_rotary_factor; it must be 1")
        theta = nested.positive("rope_theta", default=theta)
    return theta


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    if isinstance(fields.values.get("eos_token_id"), list):
        return tuple(dict.fromkeys(fields.array("eos_token_id", int)))
    token_id = fields.whole("eos_token_id", default=None, least=0)
    return () if token_id is None else (token_id,)


def _dtype(fields: Fields) -> str:
    key, _ = fields.find("dtype", "torch_dtype")
    dtype = fields.text(key, default="bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.wrong(key, f"one of {', '.join(DTYPES)}")
    return dtype


def _experts(fields: Fields, num_layers: int) -> dict:
    num_experts = fields.whole("num_experts", "num_local_experts", default=32, most=MOST_EXPERTS)
    num_active = fields.whole("num_experts_per_tok", default=4)
    num_dense = fields.whole("num_dense_layers", default=2, least=0)
    if num_active > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {num_active} but there are {num_experts} experts"
        )
    if num_dense > num_layers:
        raise ConfigError(f"config.json: num_dense_layers is {num_dense} of {num_layers} layers")
    return dict(
        num_experts=num_experts,
        num_active_experts=num_active,
        num_dense_layers=num_dense,
        expert_ffn_size=fields.whole("moe_intermediate_size", default=1792),
        use_expert_bias=fields.flag("use_expert_bias", default=True),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        routed_scaling_factor=fields.positive("routed_scaling_factor", default=1.0),
    )


def quantized_values(values: dict, quantization: Quantization) -> dict:
    """The config.json of an MLX-layout packed copy: `values`, the packing, and what mlx-lm needs.

    mlx-lm has no defaults for many keys that other writers leave out.
    """
    found = normalize(values)
    is_moe = found["num_experts"] > 0
    needed = dict(
        num_attention_heads=found["num_heads"],
        num_key_value_heads=found["num_kv_heads"],
        max_position_embeddings=found["max_positions"],
        norm_eps=found["norm_eps"],
        conv_bias=found["conv_bias"],
        conv_L_cache=found["conv_kernel"],
        layer_types=list(found["layer_types"]),
    )
    if is_moe:
        needed |= dict(
            num_experts=found["num_experts"],
            num_experts_per_tok=found["num_active_experts"],
            num_dense_layers=found["num_dense_layers"],
            moe_intermediate_size=found["expert_ffn_size"],
            use_expert_bias=found["use_expert_bias"],
            norm_topk_prob=found["norm_topk_prob"],
        )
    else:
        needed |= dict(
            block_dim=found["hidden_size"],
            block_auto_adjust_ff_dim=True,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=256,
        )
    packing = dict(group_size=quantization.group_size, bits=quantization.bits, mode="affine")
    for path, override in quantization.overrides.items():
        packing[mlx_name(path, is_moe)] = override is not None and vars(override)
    given = {key: value for key, value in values.items() if value is not None}
    return needed | given | dict(quantization=packing, quantization_config=packing)
