"""What a checkpoint is: its sizes and flags, and the cost formulas that follow from them.

Knows nothing of how a file spells them (config_json.py) nor of the weights.
"""

from dataclasses import dataclass
from pathlib import Path

from lfm2.config_json import normalize, read_config
from lfm2.quantization import Quantization


@dataclass(frozen=True)
class Config:
    """One LFM2 architecture, dense or MoE (num_experts 0 = dense)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    conv_kernel: int
    conv_bias: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embedding: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_experts: int
    num_active_experts: int
    num_dense_layers: int
    expert_ffn_size: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float
    quantization: Quantization | None

    @classmethod
    def from_folder(cls, folder: Path) -> "Config":
        """Reads `folder`/config.json. Raises ConfigError."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, values: dict) -> "Config":
        """Reads the object of a config.json. Raises ConfigError."""
        return cls(**normalize(values))

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @property
    def num_conv_layers(self) -> int:
        return self.layer_types.count("conv")

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers

    @property
    def num_params(self) -> int:
        """All parameters, a tied head counted once."""
        return self._num_params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """The parameters that one token meets: all but the experts it is not sent to."""
        return self._num_params(self.num_active_experts)

    def _num_params(self, experts_met: int) -> int:
        c = self.hidden_size
        conv = 4 * c * c + c * self.conv_kernel + (5 * c if self.conv_bias else 0)
        heads_wide = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        attention = c * heads_wide + 2 * self.head_dim
        num_moe_layers = sum(self.is_moe_layer(i) for i in range(self.num_layers))
        router = self.num_experts * (c + int(self.use_expert_bias))
        moe = router + experts_met * 3 * c * self.expert_ffn_size
        dense = 3 * c * self.ffn_size
        tables = self.vocab_size * c * (1 if self.tie_embedding else 2)
        norms = c * (2 * self.num_layers + 1)
        mixers = self.num_conv_layers * conv + self.num_attention_layers * attention
        feed_forwards = num_moe_layers * moe + (self.num_layers - num_moe_layers) * dense
        return tables + norms + mixers + feed_forwards

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one position in all attention layers, `itemsize` bytes an element."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * itemsize

    def conv_bytes_per_slot(self, ring_size: int, itemsize: int) -> int:
        """A ring of `ring_size` columns in every conv layer, `itemsize` bytes an element."""
        return self.num_conv_layers * ring_size * self.hidden_size * itemsize
