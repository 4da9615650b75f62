"""What a checkpoint's tensors take, by their names: bytes by kind, bytes a decode step reads."""

from collections.abc import Mapping

from lfm2.config import Config

# The first that occurs in a tensor's name says what the tensor is.
KINDS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".conv.", "convolution"),
    (".self_attn.", "attention"),
    (".experts.", "experts"),
    (".gate.", "router"),
    (".expert_bias", "router"),
    (".feed_forward.", "feed-forward"),
    ("norm", "norms"),
)
# The angles of the rotary embedding are fp32: cosine and sine of half a head.
ANGLE_BYTES = 4


def bytes_by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sums the bytes of tensors, given by our names, over the kinds."""
    found: dict[str, int] = {}
    for name, num_bytes in sizes.items():
        kind = next(kind for part, kind in KINDS if part in name)
        found[kind] = found.get(kind, 0) + num_bytes
    return found


def decode_bytes(sizes: Mapping[str, int], config: Config) -> int:
    """The bytes of weights that a decode step reads: of the experts the chosen, of an untied
    embedding one row.
    """
    kinds = bytes_by_kind(sizes)
    total = sum(kinds.values())
    if config.num_experts:
        idle_share = 1 - config.num_active_experts / config.num_experts
        total -= round(kinds.get("experts", 0) * idle_share)
    if not config.tie_embedding:
        total -= kinds["embedding"] - kinds["embedding"] // config.vocab_size
    return total


def bytes_per_token(config: Config, itemsize: int) -> int:
    """What a token of context takes: keys, values and the row of angles."""
    return config.kv_bytes_per_token(itemsize) + ANGLE_BYTES * config.head_dim
