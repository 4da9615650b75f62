"""Reads the tokenizer files of a checkpoint folder and refuses what does not fit together.

Reads `tokenizer.json` itself, so the class that `tokenizer_config.json` names does not matter.
Every error is a TokenizerError that names the file.
"""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import tokenizers

from lfm2.config import Config
from lfm2.errors import TokenizerError
from lfm2.template import ChatTemplate

# Ends a plain document, so it ends a raw completion too, though published configs name only
# <|im_end|> (its id in the 65k vocabulary, 2, is the default EOS of transformers' Lfm2Config).
# Looked up by its text, because ids differ by vocabulary.
END_OF_DOCUMENT = "<|endoftext|>"

TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_bpe(path: Path) -> tokenizers.Tokenizer:
    """The vocabulary of a tokenizer.json, which must be byte-level BPE."""
    check_there(path)
    try:
        bpe = tokenizers.Tokenizer.from_file(str(path))
    # The library raises the bare Exception for every kind of damage.
    except Exception as error:
        raise TokenizerError(
            f"{path} is damaged ({' '.join(str(error).split())}); download it again"
        ) from error
    if bpe.decoder is None or bpe.decoder.decode(["\u0120a"]) != " a":
        raise TokenizerError(
            f"{path} is not a byte-level vocabulary; take the file of an LFM2 checkpoint"
        )
    # A file saved after training may hold that run's limits, which would cut or pad prompts.
    bpe.no_truncation()
    bpe.no_padding()
    return bpe


def check_size(
    bpe: tokenizers.Tokenizer,
    added: dict[int, tokenizers.AddedToken],
    vocab_size: int,
    folder: Path,
) -> None:
    """Refuses a vocabulary whose ids would not fit the model's embedding."""
    num_tokens = max(bpe.get_vocab_size(), 1 + max(added, default=-1))
    if num_tokens > vocab_size:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} has {num_tokens} tokens but config.json a vocab_size "
            f"of {vocab_size}; the files belong to different models"
        )


def read_object(path: Path) -> dict:
    """The values of a JSON file."""
    check_there(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is damaged ({error}); download it again") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} holds {type(values).__name__}, not an object")
    return values


def check_there(path: Path) -> None:
    """Raises TokenizerError if there is no file at `path`."""
    if not path.is_file():
        raise TokenizerError(f"{path} is missing; copy it from the original checkpoint")


def special_texts(
    settings: dict, bpe: tokenizers.Tokenizer, bos_token_id: int | None
) -> dict[str, str]:
    """The texts of the special tokens, by the names that chat templates use."""
    texts = {}
    for name in TEMPLATE_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    if "bos_token" not in texts and bos_token_id is not None:
        text = bpe.id_to_token(bos_token_id)
        if text is not None:
            texts["bos_token"] = text
    return texts


def id_of(text: str, bpe: tokenizers.Tokenizer, path: Path) -> int:
    """The id of a special token that the file at `path` names."""
    token = bpe.token_to_id(text)
    if token is None:
        raise TokenizerError(f"{path} names the token {text!r}, which tokenizer.json lacks")
    return token


def eos_token_ids(
    folder: Path,
    config: Config,
    eos_text: str | None,
    bpe: tokenizers.Tokenizer,
    added: dict[int, tokenizers.AddedToken],
) -> frozenset[int]:
    """Every id that ends a text: see `Tokenizer`."""
    ids = set(config.eos_token_ids) | generation_eos_ids(folder)
    if eos_text is not None:
        ids.add(id_of(eos_text, bpe, folder / "tokenizer_config.json"))
    for token, entry in added.items():
        if entry.special and entry.content == END_OF_DOCUMENT:
            ids.add(token)
    return frozenset(ids)


def generation_eos_ids(folder: Path) -> set[int]:
    """The eos_token_id of generation_config.json, one or several, if it names any."""
    value = read_generation_config(folder).get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in values):
        path = folder / "generation_config.json"
        raise TokenizerError(f"{path}: eos_token_id must be integers, got {value!r}")
    return set(values)


def read_generation_config(folder: Path) -> dict:
    """The object of generation_config.json; a folder without one has no defaults."""
    path = folder / "generation_config.json"
    return read_object(path) if path.exists() else {}


def read_templates(
    folder: Path, settings: dict, now: Callable[[], datetime]
) -> dict[str, ChatTemplate]:
    """The chat templates by name: chat_template.jinja, else what the settings hold."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path} is damaged ({error}); download it again") from error
        return {"default": ChatTemplate(source, path, now)}
    path = folder / "tokenizer_config.json"
    entries = settings.get("chat_template")
    if entries is None:
        return {}
    if isinstance(entries, str):
        entries = [{"name": "default", "template": entries}]
    try:
        sources = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"{path}: chat_template must be a string or a list of name and template"
        ) from error
    return {name: ChatTemplate(source, path, now) for name, source in sources.items()}
