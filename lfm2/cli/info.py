"""`lfm2 info`: what a checkpoint is and takes, from its config and its files' headers alone."""

import json
import math
from collections import Counter
from pathlib import Path

import click

from lfm2.checkpoint import ITEM_BYTES
from lfm2.cli.costs import bytes_by_kind, bytes_per_token, decode_bytes
from lfm2.cli.options import json_option, model_option, options
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.config import Config
from lfm2.environment import USABLE_SHARE, cache_folder, machine_memory_bytes
from lfm2.errors import TokenizerError
from lfm2.hub import DEMO_FOLDER, resolve
from lfm2.layout import Target, plan
from lfm2.state import ring_size
from lfm2.tokenizer import Tokenizer

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@click.command()
@options(model_option, json_option)
@click.pass_obj
def info(terminal: Terminal, model: str | None, as_json: bool) -> None:
    """Shows what a checkpoint is and what it takes, without loading its weights."""
    folder = resolve(model)
    config = Config.from_folder(folder)
    found = describe(folder, config, plan(folder, config))
    terminal.write(json.dumps(found) + "\n" if as_json else table(found))


def describe(folder: Path, config: Config, targets: list[Target]) -> dict:
    """All there is to show, as numbers."""
    sizes = {target.name: math.prod(target.shape) * ITEM_BYTES[target.dtype] for target in targets}
    itemsize = COMPUTE_BYTES[config.dtype]
    weight_bytes = sum(sizes.values())
    conv_bytes = config.conv_bytes_per_slot(ring_size(config), itemsize)
    memory_bytes = machine_memory_bytes()
    fixed_bytes = weight_bytes + conv_bytes
    token_bytes = bytes_per_token(config, itemsize)
    num_fitting = (int(memory_bytes * USABLE_SHARE) - fixed_bytes) // token_bytes
    steps = list(cache_folder().glob("*.step"))
    return {
        "model": "built-in" if folder == DEMO_FOLDER else str(folder),
        "architecture": architecture(config),
        "feed_forward": feed_forward(config),
        "layers": config.num_layers,
        "layer_kinds": dict(Counter(config.layer_types)),
        "parameters": config.num_params,
        "active_parameters": config.num_active_params,
        "dtype": config.dtype,
        "stored_dtypes": sorted({target.stored for target in targets}),
        "quantisation": quantisation(config),
        "weight_bytes": weight_bytes,
        "weight_bytes_by_kind": bytes_by_kind(sizes),
        "decode_weight_bytes": decode_bytes(sizes, config),
        "kv_bytes_per_token": config.kv_bytes_per_token(itemsize),
        "conv_bytes_per_slot": conv_bytes,
        "max_context": config.max_positions,
        "memory_bytes": memory_bytes,
        "full_context_bytes": fixed_bytes + config.max_positions * token_bytes,
        "context_that_fits": max(0, min(config.max_positions, num_fitting)),
        **tokenizer_facts(folder, config),
        "cache_folder": str(cache_folder()),
        "cached_steps": len(steps),
        "cached_step_bytes": sum(path.stat().st_size for path in steps),
    }


def architecture(config: Config) -> str:
    kind = "LFM2-MoE" if config.num_experts else "LFM2"
    return (
        f"{kind}: width {config.hidden_size}, {config.num_heads} heads of {config.head_dim}, "
        f"{config.num_kv_heads} kv heads, vocabulary {config.vocab_size}"
    )


def feed_forward(config: Config) -> str:
    if not config.num_experts:
        return f"width {config.ffn_size}"
    return (
        f"{config.num_active_experts} of {config.num_experts} experts of width "
        f"{config.expert_ffn_size}; width {config.ffn_size} in the first "
        f"{config.num_dense_layers} layers"
    )


def quantisation(config: Config) -> str | None:
    found = config.quantization
    if found is None:
        return None
    others = f", {len(found.overrides)} modules otherwise" if found.overrides else ""
    return f"MLX affine, {found.bits} bits in groups of {found.group_size}{others}"


def tokenizer_facts(folder: Path, config: Config) -> dict:
    """What the tokenizer files say; a folder without them can still be shown."""
    try:
        tokenizer = Tokenizer.from_folder(folder, config)
    except TokenizerError as error:
        return {
            "tokenizer": str(error),
            "eos_token_ids": list(config.eos_token_ids),
            "has_chat_template": False,
        }
    return {
        "tokenizer": "present",
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "has_chat_template": bool(tokenizer.templates),
    }


def table(found: dict) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["layer_kinds"].items())
    active = found["active_parameters"]
    note = f", {active:,} active for a token" if active != found["parameters"] else ""
    rows = {
        "model": found["model"],
        "architecture": found["architecture"],
        "feed-forward": found["feed_forward"],
        "layers": f"{found['layers']}: {kinds}",
        "parameters": f"{found['parameters']:,}{note}",
        "quantisation": found["quantisation"] or "none",
        "weights": f"{bytes_text(found['weight_bytes'])} as {', '.join(found['stored_dtypes'])}",
        **{f"  {kind}": bytes_text(size) for kind, size in found["weight_bytes_by_kind"].items()},
        "read per token": f"{bytes_text(found['decode_weight_bytes'])} of weights",
        "keys and values": f"{bytes_text(found['kv_bytes_per_token'])} a token ({found['dtype']})",
        "conv state": f"{bytes_text(found['conv_bytes_per_slot'])} a stream",
        "context": f"up to {found['max_context']:,} tokens",
        "fits here": fitting(found),
        "tokenizer": found["tokenizer"],
        "end tokens": ", ".join(map(str, found["eos_token_ids"])),
        "chat template": "present" if found["has_chat_template"] else "none",
        "compiled steps": f"{found['cached_steps']} of all models in {found['cache_folder']}, "
        f"{bytes_text(found['cached_step_bytes'])}",
    }
    return "".join(f"{name:17}{value}\n" for name, value in rows.items())


def fitting(found: dict) -> str:
    """How much context the machine's memory has room for, weights and state included."""
    here = f"{bytes_text(found['memory_bytes'])} here"
    needed = bytes_text(found["full_context_bytes"])
    whole, fits = found["max_context"], found["context_that_fits"]
    if not fits:
        return f"nothing: the weights take {bytes_text(found['weight_bytes'])} of the {here}"
    if fits < whole:
        return f"{fits:,} of {whole:,} tokens (all would need {needed}, of the {here})"
    return f"all {whole:,} tokens (needs {needed} of the {here})"
