"""scripts/bench_rounds.py: what runs in each case, and what its figures are made of. No times."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lfm2.runner import Drawn
from lfm2.service import Service
from lfm2.state import State
from scheduler.rounds import Round, Segment
from scripts.bench_rounds import parse_options
from scripts.rounds.cases import middle, sharings
from scripts.rounds.trial import (
    NUM_AFTER,
    NUM_BEFORE,
    Stall,
    pieces,
    run_stall,
    run_streams,
)
from tests import tiny
from tests.build import ROOT

PROMPT = 1300
# Few forms to compile.
SMALL = "--streams 1 2 --prompt-tokens 32 --gen-tokens 2 --stall-streams 2 --long-prompts 32"
SMALL += " --shared-tokens 32 --runs 1"


class RecordingRunner:
    """In place of the engine's runner: computes nothing, keeps the rounds it was given."""

    def __init__(self, num_slots: int) -> None:
        self.state = State(num_slots, 65536, 512, {}, {}, {})
        self.model = SimpleNamespace(config=SimpleNamespace(conv_kernel=3))
        self.device = "CPU"
        self.rounds: list[Round] = []

    def run(self, round: Round) -> Drawn:
        self.rounds.append(round)
        count = round.num_drawn
        return Drawn(np.full(count, 9), np.full(count, True), None)


def recording_model(num_slots: int) -> SimpleNamespace:
    """A model for trials, on such a runner."""
    runner = RecordingRunner(num_slots)
    service = Service(runner, num_slots, cache_bytes=0)
    return SimpleNamespace(runner=runner, service=service, config=SimpleNamespace(vocab_size=99))


def rounds_of_stall(mode: str, chunk: int) -> list[list[int]]:
    """Rows of each segment, of the rounds from the first to the last of the long prompt."""
    model = recording_model(4)
    stall = run_stall(model, 3, PROMPT, sharings(PROMPT, chunk)[mode])
    sizes = [[len(one.tokens) for one in round.segments] for round in model.runner.rounds]
    # The prompt has the fourth slot, and decodes in it afterwards.
    filling = [
        index
        for index, round in enumerate(model.runner.rounds)
        if any(one.slot == 3 and one.start < PROMPT for one in round.segments)
    ]
    assert all(len(tokens) >= NUM_BEFORE + NUM_AFTER for tokens in stall.tokens)
    return sizes[filling[0] : filling[-1] + 1]


def test_whole_runs_the_prompt_with_no_round_between():
    assert rounds_of_stall("whole", 512) == [[512], [512], [276]]


def test_chunks_have_a_round_between_them():
    assert rounds_of_stall("chunks", 500) == [[500], [1, 1, 1], [500], [1, 1, 1], [300]]


def test_mixed_runs_chunk_and_round_together():
    assert sorted(map(sorted, rounds_of_stall("mixed", 500))) == [
        [1, 1, 1, 300],
        [1, 1, 1, 500],
        [1, 1, 1, 500],
    ]


def test_pieces_are_the_segment_and_only_its_last_row_is_drawn():
    whole = Segment(2, 70, 5, tuple(range(1100)), 1)
    parts = list(pieces(whole, 512))
    assert sum((part.tokens for part in parts), ()) == whole.tokens
    assert [(part.start, part.num_drawn) for part in parts] == [(5, 0), (517, 0), (1029, 1)]
    assert {(part.slot, part.base) for part in parts} == {(2, 70)}


def test_the_timed_rounds_are_those_of_all_streams():
    model = recording_model(8)
    figures = run_streams(model, num_streams=8, num_prompt=100, num_tokens=5)
    sizes = [[len(one.tokens) for one in round.segments] for round in model.runner.rounds]
    assert sizes[-5:] == [[1] * 8] * 5
    assert figures["scheduling_s"] < figures["round_s"]


def test_gaps_are_those_that_a_filling_prompt_is_in():
    # 1 s apart before the prompt comes; its first token comes at 6.
    first = [-2, -1, 3, 7, 8]
    second = [-2, -1, 0.5, 5, 6.5]
    stall = Stall([first, second], first_token=6, chunk_s=2)
    assert sorted(stall.gaps) == [1.5, 1.5, 4, 4, 4.5]
    assert stall.before_s == 1
    assert stall.figures["worst_gap_s"] == 4.5 and stall.figures["worst_gap_over_chunk"] == 2.25
    others = [Stall([[-1, end]], first_token=1, chunk_s=1) for end in (9, 2, 3)]
    assert middle(others) is others[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--streams 0", "0 is below 1"),
        ("--plot out.png --stall-streams", "give --stall-streams a number"),
        ("--plot no-such-folder/out.png", "no-such-folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_options(["--plot", "out.png"])
    assert "pip install" in capsys.readouterr().err


def test_quick_leaves_alone_what_is_asked_for():
    options = parse_options(["--quick", "--streams", "3"])
    assert options.streams == [3] and options.runs == 1


def measured(folder, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.bench_rounds", "-m", str(folder), *arguments]
    environment = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_tables_and_a_json_object(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "tiny", tiny.dense_config())
    arguments = [*SMALL.split(), "--device", "CPU"]
    result = measured(folder, *arguments, XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert {"machine", "versions", "model", "settings", "date"} <= set(found)
    assert found["model"]["name"] == "tiny" and found["settings"]["streams"] == [1, 2]
    assert set(found["streams"]["cases"]) == {"1", "2"}
    (stall,) = found["stalls"]
    assert set(stall["cases"]) == {"whole", "chunks", "mixed"}
    assert found["reuse"]["cases"]["on"]["reused_tokens"]["min"] == 32
    assert found["reuse"]["cases"]["off"]["reused_tokens"]["max"] == 0


def test_a_model_that_is_not_there_is_told_in_a_line(tmp_path):
    result = measured(tmp_path / "none")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("bench_rounds: error:") and result.stderr.count("\n") == 1
