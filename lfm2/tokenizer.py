"""Text to token ids and back, with the vocabulary and templates of a checkpoint folder.

Knows which token opens a text and which end it; knows nothing about the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tokenizers

from lfm2.config import Config
from lfm2.errors import RequestError, TokenizerError
from lfm2.template import ChatTemplate, checked_messages
from lfm2.tokenizer_files import (
    check_size,
    eos_token_ids,
    generation_eos_ids,
    id_of,
    read_bpe,
    read_object,
    read_templates,
    special_texts,
)


# What the chat templates of all LFM2 models write before each message.
MESSAGE_OPENING = "<|im_start|>"


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE vocabulary with the checkpoint's special tokens and chat templates.

    `eos_token_ids` is the union of config.json, generation_config.json, the `eos_token` of
    tokenizer_config.json, and `<|endoftext|>` where the vocabulary has it as a special token.
    """

    folder: Path
    bpe: tokenizers.Tokenizer
    added: dict[int, tokenizers.AddedToken]
    special_texts: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    templates: dict[str, ChatTemplate]

    @classmethod
    def from_folder(
        cls, folder: Path, config: Config, now: Callable[[], datetime] = datetime.now
    ) -> "Tokenizer":
        """Reads the folder's tokenizer files; TokenizerError names the file that is wrong.

        `now` is the clock that a chat template may ask for the date.
        """
        bpe = read_bpe(folder / "tokenizer.json")
        added = bpe.get_added_tokens_decoder()
        check_size(bpe, added, config.vocab_size, folder)
        settings_path = folder / "tokenizer_config.json"
        settings = read_object(settings_path)
        texts = special_texts(settings, bpe, config.bos_token_id)
        bos = texts.get("bos_token")
        return cls(
            folder=folder,
            bpe=bpe,
            added=added,
            special_texts=texts,
            bos_token_id=config.bos_token_id if bos is None else id_of(bos, bpe, settings_path),
            eos_token_ids=eos_token_ids(folder, config, texts.get("eos_token"), bpe, added),
            templates=read_templates(folder, settings, now),
        )

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a plain text: with exactly one BOS in front, also where the text spells it out.

        Special tokens spelled in the text become those tokens. An empty text is the BOS alone.
        With `add_bos` false the text's own tokens are all there is.
        """
        ids = self._encode(text)
        if not add_bos or self.bos_token_id is None:
            return ids
        return [self.bos_token_id, *self._without_bos(ids)]

    def render_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The chat as the model's template writes it; `variables` reach the template too."""
        if tools is not None and not isinstance(tools, list | tuple):
            raise RequestError(f"tools must be a list of dicts, got {type(tools).__name__}")
        chat = {
            "messages": checked_messages(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template(tools).render(self.special_texts | variables | chat)

    def encode_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Ids of the rendered chat; the template decides whether it opens with a BOS, never two."""
        ids = self._encode(self.render_chat(messages, tools, add_generation_prompt, **variables))
        rest = self._without_bos(ids)
        return ids if len(rest) == len(ids) else [self.bos_token_id, *rest]

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes a token stands for, none if it is special and skipped or not in the vocabulary.

        A character may spread over several tokens, so these bytes need not be whole UTF-8.
        """
        added = self.added.get(token)
        if added is not None:
            return b"" if added.special and skip_special else added.content.encode()
        letters = self.bpe.id_to_token(token)
        return b"" if letters is None else _bytes_of_letters(letters)

    def message_starts(self, ids: Sequence[int]) -> list[int]:
        """The positions of the tokens that open a chat's messages, if this vocabulary has one."""
        opening = self.bpe.token_to_id(MESSAGE_OPENING)
        return [position for position, token in enumerate(ids) if token == opening]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the ids, U+FFFD for bytes that are not UTF-8.

        NOTE: `clean_up_tokenization_spaces` is not applied: it alters what the model wrote.
        """
        return b"".join(self.token_bytes(token, skip_special) for token in ids).decode(
            errors="replace"
        )

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # A terminal's argument that is not UTF-8 arrives as unpaired surrogates.
            raise RequestError(
                f"the text is not valid Unicode at character {error.start + 1}; give UTF-8"
            ) from error
        return self.bpe.encode(text, add_special_tokens=False).ids

    def _without_bos(self, ids: list[int]) -> list[int]:
        first = 0
        while first < len(ids) and ids[first] == self.bos_token_id:
            first += 1
        return ids[first:]

    def _template(self, tools: list[dict] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        if self.templates:
            raise TokenizerError(
                f"{self.folder / 'tokenizer_config.json'} has no chat template named 'default', "
                f"only {', '.join(sorted(self.templates))}"
            )
        raise TokenizerError(
            f"{self.folder} has no chat template (chat_template.jinja, or chat_template in "
            f"tokenizer_config.json); give raw text instead of a chat"
        )


class NoTokenizer:
    """Stands in for the tokenizer of a folder that has none: ids are served, text is refused."""

    bos_token_id = None
    templates: dict[str, ChatTemplate] = {}

    def __init__(self, folder: Path, config: Config) -> None:
        self.path = folder / "tokenizer.json"
        self.eos_token_ids = frozenset({*config.eos_token_ids, *generation_eos_ids(folder)})

    def encode(self, *_, **__) -> list[int]:
        raise TokenizerError(f"{self.path} is missing: without it a prompt is a list of token ids")

    encode_chat = decode = encode

    def message_starts(self, ids: Sequence[int]) -> list[int]:
        return []

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b""


def _byte_of_letter() -> dict[int, int]:
    # A byte-level vocabulary spells each byte as one visible letter: printable bytes as themselves,
    # the others, in order, as U+0100 and up (the GPT-2 alphabet, e.g. space = U+0120).
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {0x100 + rank: byte for rank, byte in enumerate(hidden)}


BYTE_OF_LETTER = _byte_of_letter()


def _bytes_of_letters(letters: str) -> bytes:
    try:
        return letters.translate(BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return letters.encode()  # no byte spelling: the token stands for its own text
