"""Loads a model: its files, its device, room for its streams."""

from collections.abc import Callable
from pathlib import Path

from tinygrad import dtypes
from tinygrad.dtype import DType

from lfm2.artifacts import Artifacts, model_key
from lfm2.checkpoint import stored_tensors
from lfm2.config import Config
from lfm2.device import opened_device
from lfm2.engine import Model
from lfm2.environment import (
    USABLE_SHARE,
    cache_folder,
    machine_memory_bytes,
    settle_tinygrad,
)
from lfm2.errors import LFM2Error, RequestError
from lfm2.hub import resolve
from lfm2.model import LFM2
from lfm2.request import check_count
from lfm2.round_cost import gap_chunk
from lfm2.runner import Compiling, Runner
from lfm2.sampling import Sampling
from lfm2.service import DEFAULT_CACHE_BYTES, Service
from lfm2.state import State, max_rows, ring_size
from lfm2.tokenizer import NoTokenizer, Tokenizer
from lfm2.tokenizer_files import read_generation_config
from lfm2.weights import Progress, load_weights

DEFAULT_CONTEXT = 32768
DTYPES = {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16, "float32": dtypes.float32}
# What the keys and values of several streams may take if nobody says how much.
POOL_SHARE = 0.25


def load(
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    cache: str | Path | bool = True,
    needs_text: bool = False,
    streams: int = 1,
    pool_tokens: int | None = None,
    max_gap_ms: float | None = None,
    prompt_cache_bytes: int = DEFAULT_CACHE_BYTES,
    progress: Progress | None = None,
    compiling: Compiling | None = None,
    warn: Callable[[str], None] | None = None,
) -> Model:
    """Loads a folder, a hub name `org/name[@revision]`, or, without a name, the built-in model.

    device: a tinygrad device. dtype: the compute type, by default the checkpoint's own; weights
    stay as they are stored. context: how many tokens prompt and reply may have together. cache: the
    folder of compiled steps, or False for none. needs_text: a folder without a tokenizer, which
    could serve token ids, is refused. streams: how many replies are made at once. pool_tokens: how
    many tokens they may have together; by default the context for each, as far as a quarter of the
    memory goes. max_gap_ms: how long the next token of a reply may be kept waiting by the prompts
    of others, which decides how many tokens of a prompt go through at once. prompt_cache_bytes:
    what the states of earlier prompts may take, which later ones that begin alike go on from; 0 for
    none. progress hears of bytes read, compiling of each form that has to be compiled, warn of what
    works less well than it could. Raises LFM2Error, for too little memory before any work.
    """
    warn = warn or (lambda message: None)
    check_serving(streams, pool_tokens, max_gap_ms, prompt_cache_bytes)
    folder = resolve(name)
    config = Config.from_folder(folder)
    has_tokenizer = needs_text or (folder / "tokenizer.json").exists()
    tokenizer = (Tokenizer.from_folder if has_tokenizer else NoTokenizer)(folder, config)
    sampling = Sampling.from_generation_config(read_generation_config(folder))
    compute = compute_dtype(dtype or config.dtype)
    is_asked = context is not None or streams > 1 or pool_tokens is not None
    context = checked_context(context, config)
    settle_tinygrad()
    device = opened_device(device, warn)
    room = Room(folder, config, compute, device, streams, prompt_cache_bytes)
    num_tokens = pool_tokens or room.default_tokens(context)
    if is_asked:
        room.check(num_tokens)
    if num_tokens < context:
        context = num_tokens
    weights = load_weights(folder, config, device, progress)
    model = LFM2(config, weights, compute, device, context)
    state = State.create(config, streams, num_tokens, compute, device)
    root = cache_folder() if cache is True else Path(cache) if cache else None
    artifacts = Artifacts(root, model_key(model, state, device), warn)
    runner = Runner(model, state, device, artifacts, compiling)
    chunk = None if max_gap_ms is None else gap_chunk(runner, streams, max_gap_ms, warn)
    service = Service(runner, streams, chunk, prompt_cache_bytes)
    return Model(config, tokenizer, service, sampling, context)


class Room:
    """What a model and its streams take, from the headers of its files, and what there is."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        dtype: DType,
        device: str,
        streams: int,
        cache_bytes: int,
    ) -> None:
        self.streams = streams
        self.weight_bytes = sum(tensor.num_bytes for tensor in stored_tensors(folder).values())
        ring_bytes = config.conv_bytes_per_slot(ring_size(config), dtype.itemsize)
        self.ring_bytes = (streams + 1) * ring_bytes
        self.max_rows = max_rows(device)
        self.token_bytes = config.kv_bytes_per_token(dtype.itemsize)
        self.cache_bytes = cache_bytes
        # Only where a device has no memory of its own is it known how much there is.
        is_shared = device.split(":")[0] in ("CPU", "METAL")
        self.memory_bytes = machine_memory_bytes() if is_shared else None

    def default_tokens(self, context: int) -> int:
        """Tokens of the pool if nobody says how many."""
        wanted = self.streams * context
        if self.memory_bytes is None or not self.token_bytes:
            return wanted
        num_fitting = int(self.memory_bytes * POOL_SHARE) // self.token_bytes
        return max(context, min(wanted, num_fitting))

    def check(self, num_tokens: int) -> None:
        """Raises LFM2Error with the numbers if that many tokens do not fit."""
        if self.memory_bytes is None:
            return
        pool_bytes = (num_tokens + self.max_rows) * self.token_bytes
        state_bytes = pool_bytes + self.ring_bytes
        needed = self.weight_bytes + state_bytes + self.cache_bytes
        usable = int(self.memory_bytes * USABLE_SHARE)
        if needed > usable:
            raise LFM2Error(
                f"{needed / 1e9:.3g} GB are needed and {usable / 1e9:.3g} GB can be had: weights "
                f"{self.weight_bytes / 1e9:.3g}, {self.streams} streams of {num_tokens} tokens "
                f"together {state_bytes / 1e9:.3g}, kept states {self.cache_bytes / 1e9:.3g}; ask "
                "for fewer streams or a smaller context"
            )


def check_serving(
    streams: int, pool_tokens: int | None, max_gap_ms: float | None, prompt_cache_bytes: int
) -> None:
    """Raises RequestError for numbers that make no sense."""
    check_count("streams", streams)
    if pool_tokens is not None:
        check_count("pool_tokens", pool_tokens)
    if max_gap_ms is not None and not (isinstance(max_gap_ms, int | float) and max_gap_ms > 0):
        raise RequestError(f"max_gap_ms is {max_gap_ms!r}; it must be a number above 0")
    if not isinstance(prompt_cache_bytes, int) or prompt_cache_bytes < 0:
        raise RequestError(f"prompt_cache_bytes is {prompt_cache_bytes!r}; it must be 0 or more")


def compute_dtype(name: str) -> DType:
    if name not in DTYPES:
        raise RequestError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def checked_context(context: int | None, config: Config) -> int:
    if context is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    check_count("context", context)
    if context > config.max_positions:
        raise RequestError(f"context is {context}; this model takes 1 to {config.max_positions}")
    return int(context)
