"""The forward pass of LFM2, dense and MoE, over one ragged round. Attributes bear the names of the
checkpoint.

Knows tensors and ops; knows nothing of requests, text or files. Letters: T rows of the round, N
drawn rows, C model width, H heads, K kv heads, D head width, V vocabulary.
"""

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from lfm2.config import Config
from lfm2.state import State, max_rows
from lfm2.weights import Weights
from metal_ops.argmax import argmax
from metal_ops.attention import attend
from metal_ops.conv import short_conv
from metal_ops.embed import embed
from metal_ops.experts import expert_ffn
from metal_ops.launch import empty
from metal_ops.matmul import gate_up, matmul, project
from metal_ops.norm import Delta, Mixture, add_rms_norm, rms_norm, rms_norm_drawn
from metal_ops.qk import store_qkv
from metal_ops.route import route
from metal_ops.rows import parts
from metal_ops.table import Capacity
from metal_ops.tap import tap


class ShortConv:
    def __init__(self, weights: Weights) -> None:
        self.in_proj = weights["in_proj.weight"]
        self.conv = weights["conv.weight"]
        self.out_proj = weights["out_proj.weight"]
        self.in_proj_bias = weights.get("in_proj.bias")
        self.conv_bias = weights.get("conv.bias")
        self.out_proj_bias = weights.get("out_proj.bias")

    def __call__(self, x: Tensor, ring: Tensor, table: Tensor, capacity: Capacity) -> Tensor:
        bcx = matmul(x, self.in_proj, self.in_proj_bias)  # (T, 3 C)
        y = short_conv(bcx, self.conv, self.conv_bias, ring, table, capacity)  # (T, C)
        return matmul(y, self.out_proj, self.out_proj_bias)


class Attention:
    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.q_proj = weights["q_proj.weight"]
        self.k_proj = weights["k_proj.weight"]
        self.v_proj = weights["v_proj.weight"]
        self.out_proj = weights["out_proj.weight"]
        self.q_layernorm = weights["q_layernorm.weight"]
        self.k_layernorm = weights["k_layernorm.weight"]

    def __call__(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Tensor,
        table: Tensor,
        capacity: Capacity,
    ) -> Tensor:
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, keys, values = store_qkv(
            q,
            k,
            v,
            self.q_layernorm,
            self.k_layernorm,
            angles,
            self.config.norm_eps,
            keys,
            values,
            table,
            capacity,
        )  # (T, H, D)
        mixed = attend(q, keys, values, self.config.head_dim**-0.5, table, capacity)  # (T, H D)
        return matmul(mixed, self.out_proj)


class DenseFeedForward:
    def __init__(self, weights: Weights) -> None:
        self.w1 = weights["w1.weight"]
        self.w2 = weights["w2.weight"]
        self.w3 = weights["w3.weight"]

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(gate_up(x, self.w1, self.w3), self.w2)


class MoeFeedForward:
    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.gate = weights["gate.weight"]
        self.expert_bias = weights.get("expert_bias")
        self.w1 = weights["experts.w1"]
        self.w2 = weights["experts.w2"]
        self.w3 = weights["experts.w3"]

    def __call__(self, x: Tensor) -> Mixture:
        config = self.config
        weights, lists = route(
            x,
            self.gate,
            self.expert_bias,
            config.num_active_experts,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )  # (T, A), the rows by expert
        return expert_ffn(x, weights, lists, self.w1, self.w3, self.w2)


class Layer:
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        self.layer = layer
        self.eps = config.norm_eps
        self.operator_norm = weights["operator_norm.weight"]
        self.ffn_norm = weights["ffn_norm.weight"]
        if config.layer_types[layer] == "conv":
            self.conv, self.self_attn = ShortConv(within(weights, "conv")), None
        else:
            self.conv, self.self_attn = None, Attention(config, within(weights, "self_attn"))
        feed_forward = within(weights, "feed_forward")
        is_moe = config.is_moe_layer(layer)
        self.feed_forward = (
            MoeFeedForward(config, feed_forward) if is_moe else DenseFeedForward(feed_forward)
        )

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        state: State,
        angles: Tensor,
        table: Tensor,
        capacity: Capacity,
    ) -> tuple[Tensor, Delta]:
        """x (T, C) with its operator_norm: x with the operator's output added, and the
        feed-forward's, which the next norm adds.
        """
        if self.conv is not None:
            delta = self.conv(normed, state.rings[self.layer], table, capacity)
        else:
            keys, values = state.keys[self.layer], state.values[self.layer]
            delta = self.self_attn(normed, keys, values, angles, table, capacity)
        x, normed = add_rms_norm(x, delta, self.ffn_norm, self.eps)
        return x, self.feed_forward(normed)


class LFM2:
    """The model on one device, in one compute type, for positions below `context`.

    tapped: layers whose output rows are kept in `taps` (rows of the largest round, taps * C), side
    by side in this order; not the last one, whose rows are only made where they are drawn.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        dtype: DType,
        device: str,
        context: int,
        tapped: tuple[int, ...] = (),
    ) -> None:
        if not set(tapped) <= set(range(config.num_layers - 1)):
            raise ValueError(f"layers 0 to {config.num_layers - 2} can be tapped, found {tapped}")
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.context = context
        self.embed_tokens = weights["embed_tokens.weight"]
        self.embedding_norm = weights["embedding_norm.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embed_tokens)
        self.layers = [
            Layer(config, i, within(weights, f"layers.{i}")) for i in range(config.num_layers)
        ]
        self.angles = Tensor(rope_angles(config, context), device=device).realize()
        self.tapped = tapped
        self.taps = (
            empty((max_rows(device), len(tapped) * config.hidden_size), dtype, device)
            if tapped
            else None
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Every buffer of a step but the state: the weights in the order of their names, the
        angles, the taps.
        """
        weights = [part for name in sorted(self.weights) for part in parts(self.weights[name])]
        return [*weights, self.angles, *([] if self.taps is None else [self.taps])]

    def __call__(
        self, tokens: Tensor, table: Tensor, state: State, capacity: Capacity
    ) -> tuple[Tensor, ...]:
        """One round. tokens (T) and table int32; returns logits (N, V) fp32 and picks (N, 2) int32,
        see `argmax`, and the taps, if layers are tapped.

        Updates the state and the taps in place.
        """
        x, delta, taps = embed(tokens, self.embed_tokens, self.dtype), None, self.taps  # (T, C)
        for i, layer in enumerate(self.layers):
            if delta is None:
                normed = rms_norm(x, layer.operator_norm, layer.eps)
            else:
                # The sum is what the layer before puts out.
                x, normed = add_rms_norm(x, delta, layer.operator_norm, layer.eps)
            if i - 1 in self.tapped:
                taps = tap(x, taps, self.tapped.index(i - 1))
            x, delta = layer(x, normed, state, self.angles, table, capacity)
        # The name notwithstanding, this is the final norm: nothing is normed after the embedding.
        eps = self.config.norm_eps
        x = rms_norm_drawn(x, delta, self.embedding_norm, eps, table, capacity)  # (N, C)
        logits = matmul(x, self.lm_head, dtype=dtypes.float32)  # (N, V)
        return logits, argmax(logits), *([] if taps is None else [taps])


def within(weights: Weights, prefix: str) -> Weights:
    """The weights below a dotted path, by the rest of their names."""
    start = len(prefix) + 1
    return {
        name[start:]: weight for name, weight in weights.items() if name.startswith(prefix + ".")
    }


def rope_angles(config: Config, context: int) -> np.ndarray:
    """cos, then sin, of every position's angles: (context, D) fp32; the angles are fp32 too, as in
    transformers.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32)
