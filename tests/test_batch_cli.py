"""`lfm2 batch`, on a model that needs no weights; what is killed and locked, in processes."""

import contextlib
import io
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lfm2
from lfm2.cli import main
from lfm2.cli.batch_lines import Lines
from lfm2.cli.batch_progress import Progress, clock
from lfm2.cli.batch_source import Source
from lfm2.cli.terminal import Terminal
from tests.batch_stand_in import StandIn

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60
NOTE = "using the built-in model (name another with -m FOLDER or -m org/name)\n"


class Command:
    """Runs `lfm2 batch` in this process. `loaded` and `model` are those of the last run."""

    def __init__(self, monkeypatch, capsys) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.model_class = StandIn
        monkeypatch.setattr(lfm2, "load", self.load, raising=False)

    def load(self, name, **given) -> StandIn:
        self.loaded = given | {"name": name}
        self.model = self.model_class(**given)
        return self.model

    def __call__(self, *arguments, stdin: bytes = b"") -> tuple[int, str, str]:
        """Exit code, output and standard error."""
        given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", given)
        self.loaded = None
        with pytest.raises(SystemExit) as stopped:
            main(["batch", *map(str, arguments)])
        return stopped.value.code, *self.capsys.readouterr()


@pytest.fixture
def command(monkeypatch, capsys):
    return Command(monkeypatch, capsys)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def jsonl(*objects: dict) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in objects)


def numbered(count: int) -> list[dict]:
    """Requests of which later ones are shorter, so that they finish in another order."""
    return [{"prompt": f"prompt {n}", "max_tokens": 1 + (count - n) % 4} for n in range(count)]


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def start(*arguments, step_s: float = 0.0, **options) -> subprocess.Popen:
    """Starts the command in a process of its own."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | options
    command = [sys.executable, "-m", "tests.batch_stand_in", str(step_s), "batch"]
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    with process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_record_tells_all_of_a_reply(command):
    request = {"id": "größe", "prompt": "übel", "max_tokens": 3}
    code, output, errors = command(stdin=jsonl(request))
    assert code == 0 and json.loads(output) == {
        "id": "größe",
        "text": "ÜBEL",
        "tokens": [0, 1, 2],
        "finish_reason": "length",
        "ended_by": "max_tokens",
        "usage": {"prompt_tokens": 4, "reused_tokens": 0, "completion_tokens": 3},
        "timings": {
            "prefill_s": 0.5, "decode_s": 0.25, "prefill_tok_s": 8.0, "decode_tok_s": 8.0,
        },
    }  # fmt: skip
    assert "größe" in output, "written as it is, not escaped"
    assert errors.startswith(NOTE + "1 request served in ") and ", 3 tokens, " in errors


def test_records_come_as_requests_finish_or_in_order(command, out):
    lines = jsonl({"prompt": "slow", "max_tokens": 3}, {"prompt": "quick"}) + b"nope\n"
    lines += jsonl({"prompt": "last"})
    source = out.with_name("in.jsonl")
    source.write_bytes(lines)
    assert command(source, "-o", out, "--streams", 2)[0] == 1
    assert [record.get("text", "?") for record in written(out)] == ["QUICK", "?", "LAST", "SLOW"]
    assert command(source, "-o", out, "--force", "--ordered")[0] == 1
    assert [record.get("text", "?") for record in written(out)] == ["SLOW", "QUICK", "?", "LAST"]
    assert [record["id"] for record in written(out)] == [1, 2, None, 4]
    # A refused line is the last one, and the first.
    assert command("--ordered", stdin=b"nope\n" + lines[:-1] + b"x")[1].count("error") == 3


BAD_LINES = {
    b"nope": "not JSON: expecting value at column 1",
    b'{"prompt": "cut': "not JSON: ",
    b'{"prompt": "a"} {}': "not JSON: extra data at column 17",
    b"[1, 2]": "is an array, not an object",
    b"12": "is a number, not an object",
    b'{"prompt": "\xff"}': "not valid UTF-8: byte 0xff at offset 12",
    b"[" * 100_000: "nested too deeply",
    b"9" * 5000: "too many digits",
    b"{}": 'either "prompt" or "messages"',
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}': "either",
    b'{"prompt": "a", "temprature": 1}': "unknown key 'temprature'; all keys: id, prompt, ",
    b'{"prompt": 5}': "prompt must be a text or a list of token ids",
    b'{"prompt": []}': "prompt must be",
    b'{"prompt": [1, true]}': "prompt must be",
    b'{"prompt": " "}': "the prompt is empty",
    b'{"messages": "a"}': "messages must be a list of objects",
    b'{"messages": [1, 2]}': "messages must be a list of objects",
    b'{"messages": []}': "the list of messages is empty",
    b'{"messages": [{"role": "user"}]}': "message 1 (user) has no content",
    b'{"prompt": "a", "max_tokens": 0}': "max_tokens is 0",
    b'{"prompt": "a", "max_tokens": 2.0}': "max_tokens is 2.0",
    b'{"prompt": "a", "temperature": "1"}': "temperature is '1'",
    b'{"prompt": "a", "temperature": NaN}': "temperature is nan",
    b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}": "from 0 (greedy) to 1e+09",
    b'{"prompt": "a", "seed": -1}': "seed is -1",
    b'{"prompt": "a", "stop": [1]}': "a stop string",
    b'{"prompt": "a", "stop": {}}': "stop is a text or a list",
    b'{"prompt": "a", "raw": "no"}': "raw is 'no'",
    b'{"prompt": "a", "tools": {"name": "x"}}': "tools must be",
    b'{"prompt": "a", "system": 1}': "a system prompt is text",
    b'{"prompt": "a", "logit_bias": {"x": 1}}': "logit_bias holds ('x', 1)",
    b'{"prompt": "a", "logit_bias": {"4": "x"}}': "logit_bias holds (4, 'x')",
    b'{"prompt": "a", "logit_bias": [[4]]}': "logit_bias holds (4,)",
    b'{"prompt": "a", "logit_bias": 4}': "logit_bias is 4",
    b'{"prompt": "a", "id": 1.0}': "id is 1.0; it must be a text or a whole number",
    b'{"prompt": "a", "id": true}': "id is True",
    b'{"prompt": "' + b"x" * 1001 + b'"}': "the context holds 1000",
}


def test_a_bad_line_becomes_an_error_record_and_the_run_goes_on(command):
    good = jsonl({"prompt": "good"})
    content = good + b"".join(line + b"\n" + good for line in BAD_LINES)
    code, output, errors = command("--ordered", stdin=content)
    records = [json.loads(line) for line in output.splitlines()]
    assert len(records) == 2 * len(BAD_LINES) + 1 and code == 1
    assert all(record["text"] == "GOOD" for record in records[::2])
    for i, (line, reason) in enumerate(BAD_LINES.items()):
        record, number = records[2 * i + 1], 2 * i + 2
        assert record["line"] == number and reason in record["error"], (line[:80], record)
        # An id is told where the line has one that is its own: by default its number.
        is_object = line.startswith(b"{") and "the line is not" not in record["error"]
        has_id = is_object and b'"id"' not in line
        assert record["id"] == (number if has_id else None), record
    ending = f"Error: {len(BAD_LINES)} lines became error records, whose"
    assert errors.splitlines()[-1].startswith(ending) and "Traceback" not in errors


def test_an_id_is_used_once(command):
    lines = ({"id": 3}, {"id": "3"}, {}, {"id": "3"}, {"id": None}, {"id": "\ud800"})
    code, output, _ = command("--ordered", stdin=jsonl(*({"prompt": "a"} | one for one in lines)))
    records = [json.loads(line) for line in output.splitlines()]
    # The third line's own number is taken.
    assert [record["id"] for record in records] == [3, "3", None, None, 5, "\ud800"]
    assert records[2]["error"] == "the id 3 is that of line 1 already"
    assert records[3]["error"] == "the id '3' is that of line 2 already" and code == 1


def test_blank_lines_byte_order_marks_and_missing_ends_are_no_matter(command):
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}'
    code, output, _ = command(stdin=content)
    assert code == 0
    assert [json.loads(line)["id"] for line in output.splitlines()] == [1, 4]


def test_a_line_without_end_is_not_read_whole(command, monkeypatch):
    monkeypatch.setattr("lfm2.cli.batch.MAX_LINE_BYTES", 64)
    monkeypatch.setattr("lfm2.cli.batch_lines.MAX_LINE_BYTES", 64)
    most = json.dumps({"prompt": "x" * 49}).encode() + b"\n"
    assert len(most) == 64
    content = most + b"y" * 1000 + b"\n" + b"z" * 64 + b"\n" + most + b"y" * 1000
    code, output, _ = command(stdin=content)
    records = [json.loads(line) for line in output.splitlines()]
    assert code == 1 and [record["id"] for record in records if "text" in record] == [1, 4]
    errors = {record["line"]: record["error"] for record in records if "error" in record}
    assert list(errors) == [2, 3, 5] and all("longer than" in one for one in errors.values())


def test_options_are_defaults_that_a_line_overrides(command):
    arguments = (
        "--streams 3 --max-gap-ms 50 -c 99 -m some/model --device cpu --dtype float32 --no-cache "
        "-n 5 --stop a -sys be --temp 0 --top-k 3 --logit-bias 4=-inf --seed 0 --logprobs 2"
    )
    messages = [{"role": "user", "content": "hi"}]
    lines = jsonl(
        {"prompt": "one"},
        {"messages": messages, "max_tokens": 2, "stop": ["x", "y"], "temperature": 0.5, "seed": 7,
         "system": None, "top_k": None, "logit_bias": {"5": 1.5}, "num_logprobs": 0},
        {"prompt": [1, 2], "logit_bias": [[6, 2]], "raw": True},
    )  # fmt: skip
    assert command(*arguments.split(), stdin=lines)[0] == 1
    wanted = {
        "name": "some/model", "device": "cpu", "dtype": "float32", "context": 99, "cache": False,
        "streams": 3, "max_gap_ms": 50.0,
    }  # fmt: skip
    assert {name: command.loaded[name] for name in wanted} == wanted
    defaults = {
        "max_tokens": 5, "stop": ("a",), "system": "be", "temperature": 0.0, "top_k": 3,
        "logit_bias": ((4, float("-inf")),), "seed": 0, "num_logprobs": 2,
    }  # fmt: skip
    own = {
        "messages": messages, "max_tokens": 2, "stop": ["x", "y"], "temperature": 0.5, "seed": 7,
        "logit_bias": ((5, 1.5),), "num_logprobs": 0,
    }  # fmt: skip
    # The third is refused: a system prompt is given, and nothing goes before token ids.
    assert command.model.asked == [defaults | {"prompt": "one"}, defaults | own]
    assert command("--raw", stdin=jsonl({"prompt": "a"}, {"prompt": "b", "raw": False}))[0] == 0
    assert [request["raw"] for request in command.model.asked] == [True, False]
    assert command.loaded["streams"] == 8 and command.loaded["max_gap_ms"] is None


def test_what_cannot_be_run_is_refused_before_anything_is_loaded_or_written(command, out):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl({"prompt": "a"}))
    there = out.with_name("there.jsonl")
    there.write_text("something\n")
    cases = {
        (out.with_name("none"), "-o", out): "cannot be read: No such file",
        (out.parent, "-o", out): "cannot be read: Is a directory",
        (source, "-o", out.with_name("none") / "out"): "cannot be written: No such file",
        (source, "-o", out.parent): "Is a directory",
        (source, "-o", there): "is there already: --resume goes on with it, --force replaces it",
        (source, "-o", there, "--resume"): "line 1 of",
        (source, "-o", source): "the same file",
        (source, "-o", source, "--force"): "the same file",
        (source, "-o", source.with_name("x"), "--prompt-cache", source): "name a file of its own",
        (
            source,
            "-o",
            source.with_name("x"),
            "--prompt-cache",
            source.with_name("x"),
        ): "of its own",
        (source, "-o", out, "--force", "--resume"): "give one of them",
        (source, "--resume"): "--resume needs -o FILE",
        (source, "-o", "/dev/null", "--resume"): "nothing to resume",
        (source, "-o", out, "--streams", "0"): "0 is not in the range",
        (source, "-o", out, "--max-gap-ms", "0"): "0.0 is not in the range",
        (source, "-o", out, "--temp", "-1"): "temperature is -1.0",
        (source, "-o", out, "--raw", "--system", "x"): "without system prompt",
    }
    for arguments, reason in cases.items():
        code, output, errors = command(*arguments)
        assert (code, output, command.loaded) == (2, "", None), (arguments, errors)
        assert errors.startswith("Error: ") and reason in errors and errors.count("\n") == 1
    assert not out.exists() and there.read_text() == "something\n"
    assert source.read_bytes() == jsonl({"prompt": "a"})
    assert command("/dev/null", "-o", "/dev/null")[0] == 0


def test_a_model_that_cannot_be_loaded_costs_no_results(command, out, monkeypatch):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl({"prompt": "a"}))

    def load(*_, **__):
        raise lfm2.LFM2Error("no model")

    monkeypatch.setattr(lfm2, "load", load, raising=False)
    assert command(source, "-o", out)[0] == 1 and not out.exists()
    before = b'{"id": 1, "line": 1, "error": "x"}\n{"id": "torn'
    out.write_bytes(before)
    for option in ("--force", "--resume"):
        assert command(source, "-o", out, option)[0] == 1 and out.read_bytes() == before


def test_kept_states_are_taken_over_and_written(command, out, tmp_path):
    states = tmp_path / "states"
    lines = jsonl({"prompt": "a"})
    assert command("-o", out, "--prompt-cache", states, stdin=lines)[0] == 0
    assert states.read_text() == "states"
    before = out.read_bytes()
    code, _, errors = command("-o", out, "--force", "--prompt-cache", states, stdin=lines)
    assert code == 1 and errors.endswith(f"Error: {states} is damaged\n")
    assert out.read_bytes() == before


def test_resume_serves_what_has_no_reply(command, out):
    requests = [*numbered(6), {"prompt": "wrong", "seed": -1}]
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl(*requests))
    assert command(source, "-o", out, "--resume", "--ordered")[0] == 1, "nothing to resume is fine"
    out.chmod(0o640)
    whole = written(out)
    assert [record["id"] for record in whole] == [1, 2, 3, 4, 5, 6, 7]
    requests[6]["seed"] = 1
    source.write_bytes(jsonl(*requests, {"prompt": "new"}))
    code, _, errors = command(source, "-o", out, "--resume")
    assert code == 0 and [request["prompt"] for request in command.model.asked] == ["wrong", "new"]
    assert "2 requests served" in errors and errors.endswith("; 6 served before\n")
    assert written(out)[:6] == whole[:6]
    assert [record["text"] for record in written(out)[6:]] == ["WRONG", "NEW"]
    assert out.stat().st_mode & 0o777 == 0o640 and len(list(out.parent.iterdir())) == 2
    before = out.read_bytes()
    assert command(source, "-o", out, "--resume")[0] == 0 and out.read_bytes() == before


def test_resume_goes_on_wherever_a_file_was_cut(command, out):
    source = out.with_name("in.jsonl")
    source.write_bytes(b"nope\n" + jsonl(*numbered(3)))
    command(source, "-o", out)
    whole = out.read_bytes()
    wanted = sorted(map(repr, written(out)))
    # Every byte of the first record's beginning and around its end, some of the others.
    near = {*range(12), *range(whole.index(b"\n") - 2, whole.index(b"\n") + 12)}
    for num_bytes in sorted(near | {*range(0, len(whole), 23)}):
        # Zeros are what a crash of the system can leave.
        out.write_bytes(whole[:num_bytes] + b"\0" * (num_bytes % 3))
        assert command(source, "-o", out, "--resume")[0] == 1
        assert sorted(map(repr, written(out))) == wanted, num_bytes


def test_resume_keeps_its_hands_off_other_files(command, out):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl({"prompt": "a"}))
    good = b'{"id": 9, "text": "a"}\n'
    others = (b"x", good + b"x", good + b"{}\n", b'{"id": 1}\n', good + b"\n" + good)
    for content in others:
        out.write_bytes(content)
        code, _, errors = command(source, "-o", out, "--resume")
        assert code == 2 and "is no record of lfm2 batch" in errors, content
        assert out.read_bytes() == content
    # Who has taken the last line's end away gets it back.
    out.write_bytes(good[:-1])
    assert command(source, "-o", out, "--resume")[0] == 0
    assert [record["id"] for record in written(out)] == [9, 1]


def test_a_record_is_there_once_its_request_is_served(command, out):
    class Watching(StandIn):
        def batch(self, requests, *, ordered=False):
            for count, answer in enumerate(super().batch(requests, ordered=ordered)):
                seen.append((count, out.read_bytes().count(b"\n")))
                yield answer

    seen = []
    command.model_class = Watching
    command("-o", out, stdin=jsonl(*numbered(5)))
    assert seen == [(n, n) for n in range(5)]


def test_a_reply_does_not_wait_for_the_next_request_of_a_pipe():
    process = start(stdin=subprocess.PIPE, bufsize=0)
    with process:
        for number in (1, 2):
            process.stdin.write('{"prompt": ')
            time.sleep(0.05)
            # The next line is not whole yet.
            process.stdin.write('"a"}\n  ')
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("stop, code", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_what_is_finished_outlives_an_interrupt(command, out, stop, code):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl(*numbered(40)))
    process = start(source, "-o", out, "--streams", "2", step_s=0.02)
    wait_for_lines(out, 3)
    refused, _, errors = command(source, "-o", out, "--resume")
    assert refused == 2 and "is being written by another lfm2 batch" in errors
    assert command(source, "-o", out, "--force")[0] == 2
    process.send_signal(stop)
    ended, errors = finish(process)
    assert ended == code and "Traceback" not in errors
    hint = f"interrupted; what is finished is in {out}: --resume goes on from there\n"
    assert errors == NOTE + (hint if stop == signal.SIGINT else "")
    kept = written(out)
    assert 3 <= len(kept) < 40
    assert command(source, "-o", out, "--resume")[0] == 0
    assert written(out)[: len(kept)] == kept
    assert sorted(record["id"] for record in written(out)) == list(range(1, 41))
    assert len(command.model.asked) == 40 - len(kept)


def test_an_interrupt_on_a_terminal_takes_the_progress_away(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(*numbered(40)))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tests.batch_stand_in", "0.02", "batch", source, "-o", out]
    process = subprocess.Popen(command, cwd=ROOT, stderr=theirs)
    os.close(theirs)
    wait_for_lines(out, 12)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    shown = ""
    # A terminal that nobody writes to any more is an error to read.
    with contextlib.suppress(OSError):
        while block := os.read(ours, 4096).decode():
            shown += block
    os.close(ours)
    assert " of 40 requests, " in shown and " tokens/s, 8 streams, 0:0" in shown
    assert "\r\x1b[K\r\ninterrupted; what is finished is in " in shown


def test_a_full_disk_leaves_whole_records(command, out):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl(*numbered(40)))
    most = 1000

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    code, errors = finish(start(source, "-o", out, preexec_fn=limit))
    ending = f"Error: {out} cannot be written: File too large"
    assert code == 1 and errors.splitlines()[-1] == ending
    assert "--resume goes on from there" in errors
    kept = out.read_bytes()
    assert 0 < len(kept) <= most and kept.endswith(b"\n") and 0 < len(written(out)) < 40
    assert command(source, "-o", out, "--resume")[0] == 0
    assert out.read_bytes().startswith(kept) and len(written(out)) == 40


def test_a_model_that_breaks_down_keeps_what_is_finished(command, out):
    lines = jsonl({"prompt": "a"}, {"prompt": "break"}, {"prompt": "b"})
    code, _, errors = command("-o", out, "--streams", "1", stdin=lines)
    assert code == 1 and [record["text"] for record in written(out)] == ["A"]
    assert errors.splitlines()[-2:] == [
        f"what is finished is in {out}: --resume goes on from there",
        "Error: the device is gone",
    ]


def test_a_reader_that_leaves_ends_the_run_silently(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl(*numbered(2000)))
    process = start(source, step_s=0.001)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(DEADLINE_S), errors) == (141, NOTE)


def test_records_are_utf_8_whatever_the_terminal_shows(out):
    source = out.with_name("in.jsonl")
    source.write_bytes(jsonl({"prompt": "größe"}))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = start(source, env=environment)
    assert json.loads(process.stdout.readline())["text"] == "GRÖSSE"
    assert finish(process)[0] == 0


def test_progress_tells_what_is_done_and_left(tmp_path, monkeypatch, capsys):
    lines = Lines(Source(io.BytesIO(), 64), "in", {}, frozenset())
    terminal = Terminal()
    progress = Progress(terminal, lines, 100, 8)
    assert progress.line(3, 0.0) == "0 of 100 requests, 0.0 tokens/s, 3 streams"
    lines.num_skipped = 20
    progress.num_refused = 5
    for _ in range(15):
        progress.add(40)
    # 60 are left, and 15 took a minute.
    wanted = "40 of 100 requests, 10.0 tokens/s, 8 streams, 4:00 left"
    assert progress.line(30, 60.0) == wanted
    progress.num_lines = None
    assert progress.line(1, 60.0) == "40 requests, 10.0 tokens/s, 1 stream"
    assert clock(3723.4) == "1:02:03"
    assert capsys.readouterr().err == ""
    terminal.is_terminal = True
    progress.show(1)
    progress.show(1)
    assert capsys.readouterr().err.count("requests") == 1, "not more often than one can read"


def test_of_an_endless_line_little_is_held(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 5_000_000 + b"\nnext")
    with open(path, "rb") as file:
        lengths = [len(line) for line in Source(file, 1000)]
    assert lengths[1:] == [4] and 1000 < lengths[0] < 100_000


def test_lines_are_counted_ahead_where_they_can_be(tmp_path):
    path = tmp_path / "in.jsonl"
    for content, count in ((b"", 0), (b"a\nb\n", 2), (b"a\nb", 2), (b"\n" * 200_000, 200_000)):
        path.write_bytes(content)
        with open(path, "rb") as file:
            source = Source(file, 1 << 20)
            assert source.count() == count and len(list(source)) == count
    assert Source(io.BytesIO(b"a\n"), 64).count() is None
    with open("/dev/null", "rb") as file:
        assert Source(file, 64).count() is None


def test_the_built_in_model_serves_a_batch(monkeypatch, capsys, tmp_path, steps):
    (tmp_path / "lfm2").symlink_to(steps)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "in.jsonl"
    question = "What is the capital of France?"
    source.write_bytes(
        jsonl(
            {"id": "text", "prompt": question},
            {"id": "messages", "messages": [{"role": "user", "content": question}], "stop": " is"},
            {"id": "long", "prompt": "long " * 40_000},
            {"id": "tokens", "prompt": question, "max_tokens": 2, "num_logprobs": 1},
        )
    )
    with pytest.raises(SystemExit) as stopped:
        main(["batch", str(source), "--streams", "1", "--ordered"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    text, messages, long, tokens = records
    assert stopped.value.code == 1 and "the context holds 32768" in long["error"]
    assert text["text"] == "The capital of France is Paris." and text["finish_reason"] == "stop"
    assert (messages["text"], messages["ended_by"]) == ("The capital of France", "stop text")
    assert tokens["tokens"] == text["tokens"][:2] and tokens["usage"]["prompt_tokens"] == 17
    assert [entry["token"] for entry in tokens["logprobs"]] == tokens["tokens"]
    assert all(record["timings"]["prefill_s"] > 0 for record in (text, messages, tokens))


def test_the_model_goes_on_while_there_is_no_next_request(steps):
    replies = []

    def requests():
        yield {"prompt": "What is the capital of France?", "max_tokens": 2}
        while not replies:
            yield None
        yield {"prompt": "What is the capital of Spain?", "max_tokens": 2}

    model = lfm2.load(cache=steps)
    for answer in model.batch(requests()):
        replies.append((answer.index, answer.reply.text))
    assert replies == [(0, "The capital"), (1, "The capital")]
