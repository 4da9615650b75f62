"""Scores a model: exact answers per task, loss under rounding and quantization, sample replies."""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Lfm2MoeForCausalLM

from chat_tasks import remember
from edit_tasks import edit, repeat
from fact_tasks import (
    animal,
    capital_city,
    define,
    explain,
    job_or_tool,
    python_function,
    word_form,
)
from number_tasks import arithmetic, told_sum
from reading_tasks import read_facts
from rows import RowSource
from story_tasks import read_story
from writer import WordNet, Writer

TASKS = (
    capital_city,
    animal,
    word_form,
    job_or_tool,
    arithmetic,
    told_sum,
    read_facts,
    edit,
    repeat,
    read_story,
    remember,
    explain,
    python_function,
    define,
)
REQUESTS = (
    "Tell me a story about a fox named Ruby.",
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "What is a mixture of experts?",
    "How do I make a cup of tea?",
    "My name is Tom. What is my name?",
)
NUM_ROWS = 24
ROW_LENGTH = 257
ROWS_AT_ONCE = 12
GROUP_SIZE = 64


def replies(model, tokenizer, chats, num_tokens: int) -> list[str]:
    """Greedy replies to chats that end with the user."""
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    tokenizer.padding_side = "left"
    # The template writes the start token itself.
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(**encoded, max_new_tokens=num_tokens, do_sample=False)
    answers = output[:, encoded["input_ids"].shape[1] :]
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


def as_chat(task, turns):
    """The messages before the asked answer. Only `remember` is about its last turn."""
    turns = turns if task is remember else turns[:1]
    messages = []
    for request, answer in turns:
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return messages[:-1], messages[-1]["content"]


def print_exact_answers(model, tokenizer, writer: Writer, num_prompts: int):
    shares = []
    for task in TASKS:
        asked = [as_chat(task, task(writer)) for _ in range(num_prompts)]
        answers = replies(model, tokenizer, [chat for chat, _ in asked], 60)
        wanted = [answer for _, answer in asked]
        num_right = sum(a.strip() == b.strip() for a, b in zip(answers, wanted))
        shares.append(num_right / num_prompts)
        print(f"{task.__name__:16} {num_right}/{num_prompts}", flush=True)
    print(f"{'mean':16} {sum(shares) / len(shares):.3f}")


@torch.no_grad()
def mean_loss(model, rows) -> float:
    losses = []
    for start in range(0, NUM_ROWS, ROWS_AT_ONCE):
        tokens = torch.from_numpy(rows.tokens[start : start + ROWS_AT_ONCE].astype("int64"))
        weights = torch.from_numpy(rows.weights[start : start + ROWS_AT_ONCE, 1:]).bool()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        losses.append(F.cross_entropy(logits[weights], tokens[:, 1:][weights]).item())
    return sum(losses) / len(losses)


def quantized(model, bits: int):
    """A copy with matrices rounded to affine codes in groups, the router always to 8 bits."""
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and "conv.conv" not in name:
            weight.data = rounded(weight.data, 8 if "gate.weight" in name else bits)
    return model


def rounded(weight, bits: int):
    groups = weight.reshape(-1, GROUP_SIZE)
    low = groups.amin(1, keepdim=True)
    high = groups.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    return (((groups - low) / scale).round() * scale + low).reshape(weight.shape)


def print_losses(model, rows):
    print(f"loss, fp32 math:  {mean_loss(model, rows):.4f}")
    in_bf16 = copy.deepcopy(model).to(torch.bfloat16)
    print(f"loss, bf16 math:  {mean_loss(in_bf16, rows):.4f}")
    for bits in (8, 4):
        loss = mean_loss(quantized(model, bits), rows)
        print(f"loss, {bits}-bit groups of {GROUP_SIZE}:  {loss:.4f}")


def main():
    parser = argparse.ArgumentParser(description="Score a model that train.py saved.")
    parser.add_argument("model", type=Path, help="the folder of the model")
    parser.add_argument("--texts", type=Path, required=True, help="the folder of extract.py")
    parser.add_argument("--prompts", type=int, default=12, help="how many for each task")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = Lfm2MoeForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    writer = Writer(99, WordNet.load(options.texts))
    print_exact_answers(model, tokenizer, writer, options.prompts)
    # A seed that no process of rows.py uses.
    source = RowSource(options.model / "tokenizer.json", options.texts, 0.0, seed=1)
    print_losses(model, source.rows(NUM_ROWS, ROW_LENGTH))
    for request in REQUESTS:
        chat = [{"role": "user", "content": request}]
        print(f"\n> {request}\n{replies(model, tokenizer, [chat], 160)[0]}")


if __name__ == "__main__":
    main()
