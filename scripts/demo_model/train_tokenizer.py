"""Trains the byte-level BPE with the special tokens and ids of LFM2; writes its files."""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from documents import Documents
from writer import WordNet

SPECIAL_TOKENS = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|fim_pre|>",
    "<|fim_mid|>",
    "<|fim_suf|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|startoftext|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "model_input_names": ["input_ids", "attention_mask"],
}
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# Characters of each natural text: enough for common words, not so many as to crowd out the rest.
NATURAL_CHARS = {"austen": 700_000, "moby": 300_000, "wn_examples": 400_000}


def training_texts(num_documents: int, texts: Path):
    """Yield the pieces of text whose words the vocabulary should hold."""
    wordnet = WordNet.load(texts)
    documents = Documents(11, wordnet)
    for _ in range(num_documents):
        for _, text in documents.next():
            yield text
    for name, num_chars in NATURAL_CHARS.items():
        yield from (texts / f"{name}.txt").read_text(encoding="utf-8")[:num_chars].split("\n")
    for noun in wordnet.nouns:
        yield " " + noun
    for _ in range(4000):
        yield from ("assistant\n", "user\n", "system\n")


def train(texts, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A",
        pair="<|startoftext|> $A $B",
        special_tokens=[("<|startoftext|>", SPECIAL_TOKENS.index("<|startoftext|>"))],
    )
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description="Train the tokenizer of the built-in model.")
    parser.add_argument("--texts", type=Path, required=True, help="the folder of extract.py")
    parser.add_argument("--out", type=Path, required=True, help="the folder for its files")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=12_000, help="how many to generate")
    options = parser.parse_args()
    tokenizer = train(training_texts(options.documents, options.texts), options.vocab_size)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out / "tokenizer.json"))
    (options.out / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1))
    (options.out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
