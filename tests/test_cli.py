"""The command line: in this process where it can be, in processes and terminals of its own where
they matter.
"""

import contextlib
import io
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import lfm2
from lfm2.cli import interrupt_again, main
from lfm2.cli.chat import Chat
from lfm2.cli.compile import forms
from lfm2.cli.info import fitting, machine_memory_bytes
from lfm2.cli.loading import Compilation
from lfm2.cli.score import measure, negative_log_likelihood, table
from lfm2.cli.terminal import Bar, Terminal, bytes_text
from lfm2.hub import DEMO_FOLDER
from lfm2.sampling import Sampling
from metal_ops.table import Capacity
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"
DEADLINE_S = 120


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory, steps):
    """An XDG_CACHE_HOME whose compiled steps are those of all tests."""
    home = tmp_path_factory.mktemp("cache")
    (home / "lfm2").symlink_to(steps)
    return home


@pytest.fixture
def command(monkeypatch, capsys, cache_home):
    """Runs a command line in this process; returns its exit code, output and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))

    def run(*arguments, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return stopped.value.code, *capsys.readouterr()

    return run


def start(cache: Path, *arguments: str, **options) -> subprocess.Popen:
    """Starts a command line in a process group of its own."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | options
    command = [sys.executable, "-m", "lfm2", *arguments]
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **options)


def finish(process: subprocess.Popen, given: str | None = None) -> tuple[int, str, str]:
    with process:
        output, errors = process.communicate(given, timeout=DEADLINE_S)
    return process.returncode, output, errors


def test_help_and_version_need_no_tinygrad():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lfm2", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "generate" in shown.stdout and "tinygrad" in shown.stdout
    assert "lfm2.cli" in shown.stderr and "tinygrad" not in shown.stderr


def test_version(command):
    assert command("--version")[:2] == (0, f"lfm2, version {lfm2.__version__}\n")


def test_compile_keeps_what_generate_needs(command, steps):
    code, output, _ = command("compile", "--rows", "1,17")
    assert (
        code == 0
        and output.startswith("compiled ")
        and str(steps) in str(Path(output.split()[-1]).resolve())
    )
    assert command("compile", "--rows", "32,1")[1].startswith("compiled 0 steps")
    code, output, errors = command("generate", "--verbose", QUESTION)
    assert (code, output) == (0, ANSWER)
    assert "prompt: 17 tokens, 0 reused" in errors and "compiling for" not in errors


def test_a_process_answers(cache_home):
    code, output, errors = finish(start(cache_home, "generate", QUESTION))
    assert (code, output) == (0, ANSWER)
    assert errors == "using the built-in model (name another with -m FOLDER or -m org/name)\n"


def test_a_prompt_from_standard_input(command):
    assert command("generate", "-", stdin=f"{QUESTION}\n".encode())[:2] == (0, ANSWER)
    assert command("generate", stdin=QUESTION.encode())[:2] == (0, ANSWER)
    assert command("generate", "-p", QUESTION)[:2] == (0, ANSWER)


def test_json_tells_all_of_a_reply(command):
    code, output, _ = command("generate", QUESTION, "--json", "--logprobs", "2", "-n", "3")
    reply = json.loads(output)
    assert code == 0 and reply["text"] == "The capital of" and reply["finish_reason"] == "length"
    assert len(reply["tokens"]) == 3 and reply["prompt_tokens"] == 17
    assert "".join(entry["text"] for entry in reply["logprobs"]) == reply["text"]
    for token, entry in zip(reply["tokens"], reply["logprobs"], strict=True):
        assert entry["token"] == token == entry["top"][0]["token"]
        assert len(entry["top"]) == 2 and 0 >= entry["logprob"] >= entry["top"][1]["logprob"]
    assert reply["timings"]["prefill_tok_s"] > 0 and reply["peak_memory_bytes"] > 1e6
    assert "logprobs" not in json.loads(command("generate", QUESTION, "--json", "-n", "1")[1])


def test_options_reach_the_model(command, monkeypatch):
    loaded, asked = {}, {}

    def stream(prompt, **options):
        asked.update(options, prompt=prompt)
        raise lfm2.LFM2Error("enough")

    def load(name, **options):
        loaded.update(options, name=name)
        return SimpleNamespace(stream=stream)

    monkeypatch.setattr(lfm2, "load", load, raising=False)
    arguments = (
        "generate -m some/model --device cpu --dtype float32 -c 99 --no-cache -n 5 --stop a "
        "--stop b -sys be --temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 "
        "--repetition-window 7 --logit-bias 4=-inf --logit-bias 5=1.5 --seed 8 text"
    )
    assert command(*arguments.split())[0] == 1
    wanted = {
        "name": "some/model",
        "device": "cpu",
        "dtype": "float32",
        "context": 99,
        "cache": False,
    }
    assert {name: loaded[name] for name in wanted} == wanted
    sampling = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.2, "repetition_window": 7,
        "logit_bias": ((4, -math.inf), (5, 1.5)), "seed": 8, "num_logprobs": 0,
    }  # fmt: skip
    Sampling().override(**sampling)
    request = {"prompt": "text", "max_tokens": 5, "stop": ("a", "b"), "system": "be"}
    assert asked == sampling | request | {"raw": False}
    assert command("generate", "--raw", "--temperature", "2", "text")[0] == 1
    assert asked["raw"] and asked["temperature"] == 2


def demo_without(folder: Path, *names: str) -> Path:
    """A copy of the built-in model that lacks files."""
    return Path(
        shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns(*names, "__pycache__"))
    )


def test_a_wrong_request_is_one_line_and_code_2(command, tmp_path):
    cases = {
        ("generate", "--nope"): "No such option",
        ("generaet", "x"): "No such command 'generaet'",
        ("generate", ""): "the prompt is empty",
        ("generate",): "the prompt is empty",
        ("generate", "x", "-p", "y"): "given twice",
        ("generate", "x", "-n", "0"): "0 is not in the range",
        ("generate", "x", "-n", "x"): "not a valid integer",
        ("generate", "x", "-n", "40000"): "do not fit a context of 32768",
        ("generate", "x " * 99, "-c", "50"): "the context holds 50",
        ("generate", "x", "-c", "32769"): "takes 1 to 32768",
        ("generate", "x", "--temp", "-1"): "temperature is -1.0",
        ("generate", "x", "--stop", ""): "at least one character",
        ("generate", "x", "--dtype", "int8"): "'int8' is not one of",
        ("generate", "x", "--logprobs", "2"): "--logprobs needs --json",
        ("generate", "x", "--logit-bias", "7"): "ID=BIAS",
        ("generate", "x", "--logit-bias", "4096=1"): "ids end at 4095",
        ("generate", "x", "--raw", "--system", "y"): "without system prompt",
        ("generate", "x\udcff"): "not valid Unicode",
        ("generate", "x", "-m", tmp_path / "none"): "no such folder",
        ("generate", "x", "--device", "foo"): "there is no device FOO; tinygrad 0.14",
        ("chat", "--top-p", "0"): "top_p is 0.0",
        ("compile", "--rows", "1,0"): "numbers from 1 on",
        ("compile", "--rows", "1,513"): "--rows: a round holds at most 512 rows here, found 513",
        ("convert",): "Missing option",
        ("convert", "-o", tmp_path / "out", "--bits", "5"): "cannot write 5 bits",
        ("score", tmp_path / "none"): "cannot be read",
        ("score", "-"): "the text is empty",
        ("bench", "-c", "99"): "do not fit a context of 99",
    }
    for arguments, reason in cases.items():
        code, output, errors = command(*arguments)
        assert (code, output) == (2, ""), arguments
        assert (
            errors.splitlines()[-1].startswith("Error: ") and reason in errors.splitlines()[-1]
        ), errors
        assert len(errors.splitlines()) <= 2 and "Traceback" not in errors, errors
    # Known to be wrong before the model, which may take a minute to load, is so much as named.
    early = (
        ("generate", ""), ("generate", "x", "--temp", "-1"), ("generate", "x", "--stop", ""),
        ("generate", "x", "--raw", "--system", "y"), ("chat", "--stop", ""),
    )  # fmt: skip
    for arguments in early:
        assert command(*arguments)[2].startswith("Error: "), arguments
    code, _, errors = command("generate", "-", stdin=b"ab\xff")
    assert (
        code == 2 and errors == "Error: standard input is not valid UTF-8: byte 0xff at offset 2\n"
    )


def test_a_broken_checkpoint_is_one_line_and_code_1(command, tmp_path):
    no_config = demo_without(tmp_path / "no_config", "config.json")
    cut = demo_without(tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 1_000_000)
    other = demo_without(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "lfm3"}))
    integers = demo_without(tmp_path / "integers")
    content = (integers / "model.safetensors").read_bytes()
    (integers / "model.safetensors").write_bytes(content.replace(b'"BF16"', b'"I16" ', 1))
    no_tokenizer = demo_without(tmp_path / "no_tokenizer", "tokenizer.json")
    cases = {
        no_config: "config.json",
        cut: "truncated",
        other: "lfm3",
        integers: "I16",
        no_tokenizer: "is missing",
    }
    for folder, reason in cases.items():
        code, output, errors = command("generate", "-m", folder, "x")
        assert (code, output) == (1, ""), errors
        assert errors.startswith("Error: ") and len(errors.splitlines()) == 1 and reason in errors


def test_a_device_that_cannot_be_opened_is_one_line(command, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no driver\nis loaded")

    monkeypatch.setattr("tinygrad.device._Device.__getitem__", refuse)
    code, _, errors = command("generate", "x", "--device", "cuda")
    assert code == 1 and len(errors.splitlines()) == 2
    assert errors.endswith("CUDA cannot be opened: no driver is loaded; try --device CPU\n")


def test_an_unexpected_error_shows_its_traceback_to_who_asks(command, monkeypatch):
    def load(*_, **__):
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(lfm2, "load", load, raising=False)
    code, _, errors = command("generate", "-m", "x/y", "hello")
    assert code == 1
    assert (
        errors
        == "Error: unexpected ZeroDivisionError: by nought (run with --verbose for the traceback)\n"
    )
    assert "Traceback" in command("generate", "-m", "x/y", "-v", "hello")[2]


def test_info_counts_from_headers_alone(command, tmp_path, monkeypatch):
    folder = tiny.write_checkpoint(tmp_path / "moe", tiny.moe_config())
    monkeypatch.setattr(
        "tinygrad.device._Device.__getitem__", lambda *_: pytest.fail("a device was opened")
    )
    code, output, _ = command("info", "-m", folder, "--json")
    found = json.loads(output)
    sizes = {name: value.size for name, value in tiny.random_tensors(tiny.moe_config()).items()}
    assert code == 0 and found["parameters"] == sum(sizes.values())
    assert (
        found["weight_bytes"]
        == 4 * sum(sizes.values())
        == sum(found["weight_bytes_by_kind"].values())
    )
    # Of 8 experts of 3 matrices of 64 x 32 a token meets 2, in 3 layers.
    idle = 3 * 6 * 3 * 64 * 32
    assert found["active_parameters"] == sum(sizes.values()) - idle
    assert found["decode_weight_bytes"] == 4 * found["active_parameters"]
    # One attention layer with 2 kv heads of 16, keys and values, fp32.
    assert found["kv_bytes_per_token"] == 2 * 2 * 16 * 4
    assert (
        found["layer_kinds"] == {"conv": 3, "full_attention": 1}
        and found["context_that_fits"] == 4096
    )
    assert (
        found["eos_token_ids"] == [7]
        and not found["has_chat_template"]
        and "is missing" in found["tokenizer"]
    )
    assert found["memory_bytes"] == machine_memory_bytes()
    # Rings of 64 columns of 64 in three layers; cosine and sine of half a head for each token.
    state_bytes = 3 * 64 * 64 * 4 + 4096 * (2 * 2 * 16 * 4 + 16 * 4)
    assert found["full_context_bytes"] == found["weight_bytes"] + state_bytes
    assert "MoE" in command("info", "-m", folder)[1]


def test_info_says_what_fits():
    found = {"memory_bytes": 8e9, "weight_bytes": 2e9, "full_context_bytes": 6e9}
    sizes = {"max_context": 128000, "context_that_fits": 128000}
    assert fitting(found | sizes) == "all 128,000 tokens (needs 6 GB of the 8 GB here)"
    sizes = {"max_context": 128000, "context_that_fits": 9000}
    assert fitting(found | sizes).startswith("9,000 of 128,000 tokens (all would need 6 GB")
    sizes = {"max_context": 128000, "context_that_fits": 0}
    assert fitting(found | sizes) == "nothing: the weights take 2 GB of the 8 GB here"


def test_convert_writes_a_copy_once(command, tmp_path):
    out = tmp_path / "out"
    code, output, _ = command("convert", "-o", out, "--bits", "8", "--group-size", "32")
    assert code == 0 and "bits a weight" in output
    assert json.loads((out / "config.json").read_text())["quantization"]["group_size"] == 32
    code, _, errors = command("convert", "-o", out)
    assert code == 2 and "there already" in errors


def test_score_of_even_odds_is_the_vocabulary():
    foretold = []

    def logits_by_chunk(ids):
        foretold.append(len(ids))
        for first in range(0, len(ids), 3):
            yield first, np.zeros((len(ids[first : first + 3]), 11), np.float32)

    tokenizer = SimpleNamespace(encode=lambda text: [1, *range(2, 11)], bos_token_id=1)
    model = SimpleNamespace(context=5, tokenizer=tokenizer, logits_by_chunk=logits_by_chunk)
    found = measure(Terminal(), model, "text")
    assert found["perplexity"] == pytest.approx(11, rel=1e-12)
    # Nine tokens after the BOS in windows of 4, each token foretold once.
    assert (found["tokens"], found["windows"], foretold) == (9, 3, [4, 4, 1])
    assert table(found).endswith(" 9 in 3 windows of up to 5\n")
    assert table(found | {"windows": 1, "window_tokens": 32768}).endswith(
        "1 window of up to 32,768\n"
    )


def test_likelihood_is_kept_in_float64():
    logits = np.array([[100.0, 0.0], [0.0, -1000.0]], np.float32)
    assert negative_log_likelihood(logits, [0, 1]) == pytest.approx(
        1000 + math.exp(-100), rel=1e-15
    )


def test_score_agrees_with_the_logits(command, steps):
    text = "The capital of France is Paris."
    code, output, _ = command("score", "-", "--json", stdin=text.encode())
    model = lfm2.load(cache=steps)
    ids = model.tokenizer.encode(text)
    logits = model.logits(ids).astype(np.float64)[:-1]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = -logprobs[np.arange(len(ids) - 1), ids[1:]].mean()
    assert code == 0 and json.loads(output)["negative_log_likelihood"] == pytest.approx(
        wanted, rel=1e-6
    )


def test_bench_ends_in_one_json_object(command):
    code, output, _ = command("bench", "--prompt-tokens", "8", "--gen-tokens", "4", "--runs", "2")
    found = json.loads(output.splitlines()[-1])
    assert code == 0 and "decode of 4" in output and "first token of 8 " in output
    assert found["settings"]["first_token_prompt_tokens"] == 8
    # What scripts/bench_peers.py reads.
    assert all(
        found[name] > 0 for name in ("prefill_tok_s", "decode_tok_s", "peak_memory_bytes", "load_s")
    )
    assert found["decode_gb_s"] == pytest.approx(
        found["decode_tok_s"] * found["bytes_per_decode"] / 1e9
    )
    assert len(found["runs"]["decode_tok_s"]) == 2 and 0 < found["decode_memory_share"] < 2
    assert found["settings"]["dtype"] == "bfloat16" and found["model"]["name"] == "built-in"


def test_chat_remembers_until_reset(command):
    lines = b"My name is Anna.\nWhat is my name?\n\n/clear\nWhat is my name?\n/quit\nnever read\n"
    code, output, errors = command("chat", "-n", "6", stdin=lines)
    replies = output.splitlines()
    assert code == 0 and len(replies) == 3 and "forgotten" in errors
    assert "Anna" in replies[1] and "Anna" not in replies[2]


def test_a_turn_computes_only_what_is_new(command):
    lines = b"My name is Anna.\nWhat is my name?\n"
    errors = command("chat", "-v", "-n", "6", stdin=lines)[2]
    told = [line for line in errors.splitlines() if line.startswith("prompt: ")]
    (first, _), (second, reused) = [re.findall(r"\d+", line)[:2] for line in told]
    reply = int(re.search(r"reply: (\d+) token", errors)[1])
    assert int(reused) == int(first) + reply - 1 < int(second)


def test_kept_states_outlive_the_process(command, tmp_path):
    file = tmp_path / "states"
    story = "Tell me a story about a fox who lives by the river with an old bear."
    arguments = ("-v", "--prompt-cache", file, "-n", "8")
    code, output, errors = command("generate", *arguments, story)
    assert code == 0 and f"{file}: 2 kept states written" in errors
    code, again, errors = command("generate", *arguments, story)
    length = int(re.search(r"prompt: (\d+) tokens", errors)[1])
    assert (code, again) == (0, output) and f"{length - 1} reused" in errors
    # A chat begins with the same prompt.
    errors = command("chat", *arguments, stdin=story.encode())[2]
    assert f"{length - 1} reused" in errors
    file.write_bytes(file.read_bytes()[:-1])
    code, output, errors = command("generate", *arguments, story)
    assert (code, output) == (1, "") and f"Error: {file} is damaged" in errors
    code, _, errors = command("chat", "--prompt-cache", tmp_path / "no" / "file", stdin=b"Hi\n")
    assert code == 1 and "no is no folder one may write to" in errors


def test_steps_of_several_streams():
    """Rounds of one stream, of a row of each, and of several with a piece of a prompt."""
    assert [vars(one) for one in forms([1, 2], 1)] == [
        {"rows": 1, "segments": 1, "drawn": 1},
        {"rows": 2, "segments": 1, "drawn": 1},
    ]
    found = forms([1 << power for power in range(10)], 8)
    assert len(found) == len(set(found)) == 10 + 3 + 6
    assert Capacity(8, 8, 8) in found and Capacity(16, 16, 16) not in found
    assert Capacity(16, 8, 8) in found and Capacity(512, 8, 8) in found


def test_a_pipe_goes_on_after_a_refused_line(command):
    code, output, errors = command("chat", stdin=f"/rest\n\xff\n/?\n{QUESTION}\n".encode("latin-1"))
    assert (code, output) == (2, ANSWER)
    assert "Error: there is no command /rest" in errors and "not valid UTF-8" in errors
    assert "/exit" in errors


@pytest.fixture
def narrow(steps, monkeypatch):
    """The built-in model, whatever is loaded, with the context that the test sets."""
    model = lfm2.load(cache=steps)
    monkeypatch.setattr(lfm2, "load", lambda *_, **__: model, raising=False)
    return model


def test_a_full_context_is_told(command, narrow):
    narrow.context = 20  # of which the question takes 17
    code, output, errors = command("generate", "-v", QUESTION)
    assert (code, output) == (0, "The capital of\n")
    assert "because the context is full (-c N gives more room)" in errors
    found = json.loads(command("generate", "--json", QUESTION)[1])
    assert (found["finish_reason"], found["ended_by"]) == ("length", "context")
    code, output, errors = command(
        "chat", stdin=f"{QUESTION}\nAgain.\n/reset\n{QUESTION}\n".encode()
    )
    assert (code, output) == (2, "The capital of\n" * 2)
    assert errors.count("(the context is full: /reset starts a new conversation") == 2
    assert "Error: the conversation is full (33 of 20 tokens): /reset" in errors


def test_verbose_tells_what_ended_a_reply(command):
    endings = {"an end token": (), "a stop text": ("--stop", "tal"), "max_tokens": ("-n", "2")}
    for ending, arguments in endings.items():
        assert f"ended by {ending}\n" in command("generate", "-v", QUESTION, *arguments)[2]


def test_what_is_compiled_is_told_in_tokens(capsys):
    terminal = Terminal()
    terminal.is_verbose = True
    compilation = Compilation(terminal)
    compilation(SimpleNamespace(rows=32))
    compilation.count = "3 of 10, "
    compilation(SimpleNamespace(rows=1))
    assert capsys.readouterr().err.splitlines() == [
        "compiling for up to 32 tokens at once (first time only) ...",
        "compiling for single tokens (3 of 10, first time only) ...",
    ]


def test_a_stopped_reply_stays_in_the_conversation(capsys):
    asked, streams = [], []

    class Interrupted(list):
        reply = None
        is_cancelled = False

        def __iter__(self):
            yield from ["Once", " upon"]
            raise KeyboardInterrupt

        def cancel(self):
            self.is_cancelled = True

    def stream(messages):
        asked.append(list(messages))
        streams.append(Interrupted())
        return streams[-1]

    chat = Chat(Terminal(), SimpleNamespace(stream=stream, prepare=lambda _: None), {})
    chat.reply("A story.")
    chat.reply("Go on.")
    turns = [{"role": "user", "content": "A story."}, {"role": "assistant", "content": "Once upon"}]
    assert asked[1] == [*turns, {"role": "user", "content": "Go on."}]
    assert capsys.readouterr().out == "Once upon\n" * 2
    assert all(stream.is_cancelled for stream in streams)


def test_progress_is_for_terminals_and_wiped(capsys, monkeypatch):
    terminal = Terminal()
    terminal.show("hidden")
    terminal.is_terminal = True
    terminal.show("compiling")
    terminal.write("text")
    bar = Bar(terminal, "loading", bytes_text)
    bar(1, 2)
    monkeypatch.setattr(bar, "_next_s", 0)
    bar(10**9, 2 * 10**9)
    bar(2 * 10**9, 2 * 10**9)
    wipe = "\r\x1b[K"
    output, errors = capsys.readouterr()
    line = f"loading [{'#' * 15}{'.' * 15}] 50%, 1 GB of 2 GB"
    assert (output, errors) == ("text", f"{wipe}compiling{wipe}{wipe}{line}{wipe}")


class Keys:
    """A process on a terminal of its own: what it shows, and keys pressed on it."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        self.process = start(
            cache, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=self._adopt
        )
        os.close(theirs)
        self.shown = ""

    @staticmethod
    def _adopt() -> None:
        # Opened by the leader of a session without one, a terminal becomes its own: Ctrl-C reaches
        # it.
        os.close(os.open(os.ttyname(0), os.O_RDWR))

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.ours, keys.encode())

    def wait_for(self, text: str) -> str:
        end = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert select.select([self.ours], [], [], max(0, end - time.monotonic()))[0], self.shown
            read = os.read(self.ours, 4096)
            assert read, self.shown
            self.shown += read.decode(errors="replace")
        return self.shown

    def close(self) -> int:
        code = self.process.wait(DEADLINE_S)
        os.close(self.ours)
        return code


def test_control_c_stops_a_reply_and_not_the_chat(cache_home):
    keys = Keys(cache_home, "chat")
    keys.wait_for("\n> ")
    keys.press("Tell me a story about a dog.\n")
    keys.wait_for("ago")
    keys.press("\x03")
    assert "Traceback" not in keys.wait_for("\n> ")
    keys.press("/help\n")
    keys.wait_for("/reset")
    keys.wait_for("\n> ")
    keys.press("\x04")
    assert keys.close() == 0


def test_control_c_ends_a_reply_with_its_line(cache_home):
    keys = Keys(cache_home, "generate", "Tell me a story about a dog.")
    keys.wait_for("ago")
    keys.press("\x03")
    assert keys.process.wait(DEADLINE_S) == 130
    with contextlib.suppress(OSError):
        keys.wait_for("never shown")
    keys.close()
    assert "Traceback" not in keys.shown and keys.shown.endswith("\n")


def test_control_c_leaves_nothing_of_a_note(tmp_path):
    keys = Keys(tmp_path, "generate", "-c", "64", QUESTION)
    keys.wait_for("compiling for")
    keys.press("\x03")
    assert keys.process.wait(DEADLINE_S) == 130
    with contextlib.suppress(OSError):
        keys.wait_for("never shown")
    keys.close()
    assert keys.shown.endswith("\r\x1b[K\r\n") and "Traceback" not in keys.shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("info",), ("generate", "-v", "-"), ("chat", "-n", "3")])
def test_an_output_that_is_full_is_one_line(cache_home, arguments):
    with open("/dev/full", "w") as full:
        process = start(cache_home, *arguments, stdin=subprocess.PIPE, stdout=full)
        code, _, errors = finish(process, f"{QUESTION}\n" * 2)
    line = "Error: the output cannot be written: No space left on device"
    assert (code, errors.splitlines()[-1]) == (1, line) and "Traceback" not in errors
    assert errors.count("Error") == 1


def test_an_output_that_is_closed_is_one_line(cache_home):
    code, _, errors = finish(start(cache_home, "info", preexec_fn=lambda: os.close(1)))
    assert (code, errors) == (1, "Error: the output cannot be written: Bad file descriptor\n")


def test_a_reader_that_leaves_ends_the_program_silently(cache_home):
    process = start(cache_home, "generate", "Tell me a story about a dog.")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(DEADLINE_S) == 141 and len(errors.splitlines()) == 1


def test_works_without_a_cache_and_says_so_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    code, output, errors = finish(start(tmp_path / "file", "generate", "-n", "1", QUESTION))
    assert (code, output) == (0, "The\n")
    assert errors.count("Warning: not keeping compiled") == 1 and len(errors.splitlines()) == 2


def test_the_cache_outlives_kills_races_and_damage(tmp_path):
    arguments = ("generate", "-n", "1", "-c", "64", QUESTION)
    for stop, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(tmp_path, *arguments)
        process.stderr.readline()
        time.sleep(1)
        os.killpg(process.pid, stop)
        assert finish(process) == (code, "", "")
    racers = [start(tmp_path, *arguments) for _ in range(2)]
    assert [finish(racer)[:2] for racer in racers] == [(0, "The\n")] * 2
    kept = list((tmp_path / "lfm2").glob("*.step"))
    assert len(kept) == 1
    content = kept[0].read_bytes()
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    kept[0].write_bytes(damaged)
    assert finish(start(tmp_path, *arguments))[:2] == (0, "The\n")
    assert kept[0].read_bytes() != damaged


def test_the_comparison_names_a_missing_peer_before_it_measures(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho torch\n")
    python.chmod(0o755)
    engines = ("--engines", "lfm2", "transformers-bfloat16", "--python-peers", str(python))
    command = [sys.executable, "scripts/bench_peers.py", str(DEMO_FOLDER), *engines]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"{python} lacks torch: pip install torch transformers" in ended.stderr


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch):
    class Dying:
        def __del__(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", interrupt_again)
    with pytest.raises(KeyboardInterrupt):
        Dying()
        time.sleep(5)
