"""Trains the mixture of experts densely: every expert for every token, unrouted ones times zero.

The same function and gradients as the sparse block of transformers, without its synchronizations,
gathers and scatters, so that it compiles. Run alone, it compares the two:  python dense_experts.py
"""

import argparse
import types

import torch
import torch.nn.functional as F


def use_dense_experts(model) -> list:
    """Replace the forward of each mixture-of-experts block in place; return the blocks.

    A block counts in `load` how many tokens each of its experts got while training.
    """
    blocks = [
        layer.feed_forward for layer in model.model.layers if hasattr(layer.feed_forward, "gate")
    ]
    for block in blocks:
        load = torch.zeros(block.gate.num_experts, device=block.gate.weight.device)
        block.register_buffer("load", load, persistent=False)
        block.forward = types.MethodType(dense_forward, block)
    return blocks


def dense_forward(block, x):
    rows = x.reshape(-1, x.shape[-1])  # (T, C)
    routed = route(block, rows)  # (T, E)
    if block.training:
        with torch.no_grad():
            block.load += (routed > 0).sum(0)
    experts = block.experts
    num_experts, width = experts.num_experts, experts.intermediate_dim
    gate_up = experts.gate_up_proj.reshape(num_experts * 2 * width, -1)  # (E*2*F, C)
    gate, up = F.linear(rows, gate_up).view(-1, num_experts, 2, width).unbind(2)  # (T, E, F)
    hidden = F.silu(gate) * up * routed.to(up.dtype).unsqueeze(-1)
    down = experts.down_proj.permute(1, 0, 2).reshape(-1, num_experts * width)  # (C, E*F)
    return F.linear(hidden.reshape(-1, num_experts * width), down).view(x.shape).to(x.dtype)


def route(block, rows):
    """Weight of each expert for each row, zero where it is not chosen: (T, E), in fp32."""
    gate = block.gate
    with torch.autocast(rows.device.type, enabled=False):
        scores = F.linear(rows.float(), gate.weight.float()).sigmoid()
        chosen = torch.topk(scores + block.expert_bias, gate.top_k, dim=-1).indices
        weights = torch.gather(scores, 1, chosen)
        if gate.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        weights = weights * gate.routed_scaling_factor
        return torch.zeros_like(scores).scatter(1, chosen, weights)


def compare():
    """Print how far loss and gradients of the two forms are apart."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM  # slow to load, not for importers

    torch.manual_seed(0)
    config = Lfm2MoeConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"] * 2,
    )
    model = Lfm2MoeForCausalLM(config).float()
    for layer in model.model.layers[1:]:
        layer.feed_forward.gate.weight.data.normal_(0, 0.1)
        layer.feed_forward.expert_bias.normal_(0, 0.05)
    ids = torch.randint(3, 300, (2, 40))
    sparse_loss, sparse = loss_and_gradients(model, ids)
    use_dense_experts(model)
    dense_loss, dense = loss_and_gradients(model, ids)
    furthest = max((sparse[name] - dense[name]).abs().max().item() for name in sparse)
    print(f"loss: sparse {sparse_loss:.6f}, dense {dense_loss:.6f}")
    print(f"gradients: at most {furthest:.1e} apart")


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return loss.item(), gradients


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    compare()
