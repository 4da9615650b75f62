"""Trains the built-in model on the rows that rows.py wrote.

The schedule follows the clock, so the result depends on the machine: a minute on one H200 is about
180 million tokens. Without a GPU it runs too, far too slowly for more than a trial.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from dense_experts import use_dense_experts
from rows import Rows

WARMUP_END = 0.02  # as shares of the time
DECAY_START = 0.4
BIAS_UPDATES_END = 0.85
LOWEST_RATE = 0.01  # of the peak learning rate


def build_model(options, vocab_size: int):
    config = Lfm2MoeConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden,
        intermediate_size=options.dense_width,
        moe_intermediate_size=options.expert_width,
        num_hidden_layers=len(options.layers),
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.kv_heads,
        num_experts=8,
        num_experts_per_tok=2,
        num_dense_layers=2,
        layer_types=["full_attention" if kind == "a" else "conv" for kind in options.layers],
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        norm_eps=1e-5,
        dtype="bfloat16",
    )
    config._attn_implementation = "sdpa"
    model = Lfm2MoeForCausalLM(config).float()
    initialize(model, len(options.layers))
    return model


@torch.no_grad()
def initialize(model, num_layers: int):
    """Scale by fan-in; what writes to the residual stream is smaller the deeper the model."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            continue
        if "embed_tokens" in name or "lm_head" in name or name.endswith("gate.weight"):
            weight.normal_(0, 0.02)
        elif name.endswith("conv.conv.weight"):
            weight.uniform_(-0.3, 0.3)
            weight[:, :, -1].add_(0.7)  # starts close to passing the current value on
        else:
            is_output = any(part in name for part in ("out_proj", ".w2.", "down_proj"))
            depth = math.sqrt(2 * num_layers) if is_output else 1
            weight.normal_(0, weight.shape[-1] ** -0.5 / depth)


def build_optimizer(model, learning_rate: float):
    decayed, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim >= 2
        is_special = any(part in name for part in ("embed", "conv.conv", "gate.weight"))
        (decayed if is_matrix and not is_special else others).append(weight)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-10, fused=True)


def rate_at(peak: float, share: float) -> float:
    """Warm up, stay, then decay in a line; `share` is the share of the time that has passed."""
    if share < DECAY_START:
        return peak * min(1, share / WARMUP_END + 1e-3)
    return peak * max(LOWEST_RATE, (1 - share) / (1 - DECAY_START))


class Batches:
    """Rows on the device, in a new random order each epoch; the last ones are held out."""

    def __init__(self, rows: Rows, batch: int, device: str):
        self.tokens = torch.from_numpy(rows.tokens.astype("int32")).to(device)
        self.weights = torch.from_numpy(rows.weights).to(device)
        self.positions = torch.from_numpy(rows.positions.astype("int32")).to(device)
        self.batch = batch
        self.num_tokens = batch * (rows.tokens.shape[1] - 1)
        num_held_out = min(256, len(self.tokens) // 20) // batch * batch
        self.num_rows = len(self.tokens) - num_held_out
        self.order = torch.empty(0, dtype=torch.long, device=device)
        if self.num_rows < batch:
            raise SystemExit(f"{self.num_rows} rows are less than one batch: write more of them")

    def next(self):
        if len(self.order) < self.batch:
            self.order = torch.randperm(self.num_rows, device=self.tokens.device)
        chosen, self.order = self.order[: self.batch], self.order[self.batch :]
        return self.get(chosen)

    def get(self, chosen):
        return self.tokens[chosen].long(), self.weights[chosen], self.positions[chosen].long()

    def held_out(self):
        for start in range(self.num_rows, len(self.tokens), self.batch):
            yield self.get(slice(start, start + self.batch))


def loss_of(model, device: str, tokens, weights, positions):
    """Mean loss of the weighted tokens; positions that restart keep documents apart."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        output = model(input_ids=tokens[:, :-1], position_ids=positions[:, :-1], use_cache=False)
    losses = F.cross_entropy(
        output.logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten().float()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def balance(blocks, rate: float):
    """Raise the bias of experts that got too little, lower the others', and count anew."""
    for block in blocks:
        direction = torch.sign(block.load.mean() - block.load)
        block.expert_bias += rate * (direction - direction.mean())
        block.load.zero_()


@torch.no_grad()
def validate(model, batches: Batches, device: str) -> float:
    model.eval()
    losses = [loss_of(model, device, *batch).item() for batch in batches.held_out()]
    model.train()
    return sum(losses) / max(1, len(losses))


def train(model, blocks, batches: Batches, options, device: str):
    optimizer = build_optimizer(model, options.learning_rate)
    step_loss = loss_of if options.no_compile else torch.compile(loss_of, dynamic=False)
    model.train()
    step_loss(model, device, *batches.next()).backward()  # compiles before the clock starts
    optimizer.zero_grad(set_to_none=True)
    start = time.time()
    step = 0
    while (share := (time.time() - start) / (60 * options.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(options.learning_rate, share)
        loss = step_loss(model, device, *batches.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance(blocks, options.bias_rate if share < BIAS_UPDATES_END else 0.0)
        step += 1
        if step % options.report_every == 0:
            tokens = step * batches.num_tokens
            speed = tokens / (time.time() - start)
            print(
                f"step {step}: loss {loss.item():.4f}, {tokens / 1e6:.1f} M tokens, "
                f"{speed / 1e6:.3f} M tokens/s",
                flush=True,
            )


def save(model, blocks, options):
    """Write the model in bf16, the expert biases in fp32, and the tokenizer's files."""
    saved = Lfm2MoeForCausalLM(model.config).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())
    layers = [layer for layer in saved.model.layers if hasattr(layer.feed_forward, "gate")]
    for layer, block in zip(layers, blocks):
        bias = block.expert_bias.detach().float().cpu().clone()
        layer.feed_forward.expert_bias = torch.nn.Buffer(bias)
    saved.generation_config.bos_token_id = 1
    saved.generation_config.eos_token_id = 7
    saved.generation_config.pad_token_id = 0
    saved.save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(options.tokenizer / name, options.out)


def parse_options():
    parser = argparse.ArgumentParser(
        description="Train the built-in model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=Path, required=True, help="the file of rows.py")
    add("--tokenizer", type=Path, required=True, help="the folder of train_tokenizer.py")
    add("--out", type=Path, required=True, help="the folder for the model")
    add("--minutes", type=float, default=6.6, help="how long to train")
    add("--batch", type=int, default=32, help="rows a step")
    add("--learning-rate", type=float, default=3e-3, help="at its peak")
    add("--bias-rate", type=float, default=1e-3, help="step of the experts' biases")
    add("--layers", default="ccacaca", help="c = short convolution, a = attention")
    add("--hidden", type=int, default=256, help="model width, a multiple of 64")
    add("--kv-heads", type=int, default=2)
    add("--dense-width", type=int, default=256, help="feed-forward width of the first two layers")
    add("--expert-width", type=int, default=64)
    add("--report-every", type=int, default=200, help="steps between lines of progress")
    add("--no-compile", action="store_true", help="skip torch.compile, for short trials")
    return parser.parse_args()


def main():
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = Rows.load(options.rows)
    vocab = json.loads((options.tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    model = build_model(options, len(vocab)).to(device)
    blocks = use_dense_experts(model)
    batches = Batches(rows, options.batch, device)
    train(model, blocks, batches, options, device)
    print(f"held-out loss {validate(model, batches, device):.4f}", flush=True)
    save(model, blocks, options)


if __name__ == "__main__":
    main()
