"""One run of `lfm2 batch`: requests go to the model as it takes them, records come back.

Knows neither where lines come from nor where records go.
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import lfm2
from lfm2.cli.batch_lines import Asked, Id, Lines, Refused
from lfm2.cli.batch_progress import Progress
from lfm2.cli.batch_results import ResultFile, ResultStream
from lfm2.cli.generate import logprobs, speeds


class Run:
    """The requests of one run: asked of the model in turn, and what became of them written.

    Their numbers are those that `Model.batch` gives them, in the order in which it takes them.
    """

    def __init__(
        self,
        model: "lfm2.Model",
        lines: Lines,
        results: ResultFile | ResultStream,
        progress: "Progress",
        is_ordered: bool,
    ) -> None:
        self.model = model
        self.lines = lines
        self.results = results
        self.progress = progress
        self.is_ordered = is_ordered
        self.num_asked = 0
        # What the model has taken and not yet answered, by number.
        self.waiting: dict[int, Asked] = {}
        # Refused lines whose records wait for those of earlier lines.
        self.held: deque[Refused] = deque()

    def finish(self) -> None:
        """Serves all requests."""
        answers = self.model.batch(self.requests(), ordered=self.is_ordered)
        with contextlib.closing(answers):
            for answer in answers:
                # Before it is taken off: the next one takes its place at once.
                self.progress.show(len(self.waiting))
                self.settle(self.waiting.pop(answer.index), answer)
        self.write_held(None)

    def requests(self) -> Iterator[dict | None]:
        """What the model takes; None where it should not wait for the next one."""
        for line in self.lines:
            if line is None:
                if self.waiting:
                    yield None
                else:
                    self.lines.source.wait()
                continue
            if isinstance(line, Refused):
                self.held.append(line)
                if not self.is_ordered or not self.waiting:
                    self.write_held(None)
                continue
            self.waiting[self.num_asked] = line
            self.num_asked += 1
            self.progress.show(len(self.waiting))
            yield line.request

    def settle(self, asked: Asked, answer: "lfm2.BatchReply") -> None:
        self.write_held(asked.line)
        if answer.error is None:
            self.results.write(reply_record(self.model, asked.id, answer.reply))
            self.progress.add(len(answer.reply.tokens))
        else:
            self.write_error(Refused(asked.id, asked.line, str(answer.error)))

    def write_held(self, before: int | None) -> None:
        """Writes the records of refused lines, those before a line if one is given."""
        while self.held and (before is None or self.held[0].line < before):
            self.write_error(self.held.popleft())

    def write_error(self, line: Refused) -> None:
        self.results.write({"id": line.id, "line": line.line, "error": line.reason})
        self.progress.num_refused += 1


def reply_record(model: "lfm2.Model", own: Id, reply: "lfm2.Reply") -> dict:
    record = {
        "id": own,
        "text": reply.text,
        "tokens": reply.tokens,
        "finish_reason": reply.finish_reason,
        "ended_by": reply.ended_by,
        "usage": {
            "prompt_tokens": reply.num_prompt_tokens,
            "reused_tokens": reply.num_reused_tokens,
            "completion_tokens": len(reply.tokens),
        },
        "timings": {"prefill_s": reply.prefill_s, "decode_s": reply.decode_s} | speeds(reply),
    }
    if reply.draws:
        record["logprobs"] = [logprobs(model, draw) for draw in reply.draws]
    return record
