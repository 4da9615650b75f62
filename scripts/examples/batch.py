"""A batch from Python: three ways of asking, each reply as soon as it is there.

    .venv/bin/python scripts/examples/batch.py
    .venv/bin/python scripts/examples/batch.py LiquidAI/LFM2-350M

Needs ./scripts/setup to have run. `Model.batch` takes requests from any iterable, a generator over
a file or a queue too, as it has room for them, and yields a reply with the index of its request as
soon as it is finished. One that cannot be served has an error in place of a reply; the others go
on.
"""

import sys
import time

import lfm2

SUBJECTS = ("fox", "dog", "bear")


def requests():
    """Made when they are wanted. Options are those of `Model.stream`."""
    yield {"prompt": "What is the capital of France?"}
    for seed, subject in enumerate(SUBJECTS):
        prompt = f"Tell me a story about a {subject}."
        yield {"prompt": prompt, "temperature": 0.8, "seed": seed, "max_tokens": 60}
    yield {"messages": [{"role": "user", "content": "What is 27 + 48?"}]}
    yield {"prompt": "", "max_tokens": 5}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else None
    model = lfm2.load(name, streams=4, context=2048)
    start, num_tokens = time.monotonic(), 0
    for answer in model.batch(requests()):
        if answer.error is not None:
            print(f"{answer.index}: Error: {answer.error}")
            continue
        num_tokens += len(answer.reply.tokens)
        print(f"{answer.index}: {answer.reply.text!r} ({answer.reply.ended_by})")
    print(f"{num_tokens / (time.monotonic() - start):.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
