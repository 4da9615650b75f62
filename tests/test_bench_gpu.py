"""scripts/bench_gpu.py: what its figures are made of, and what it takes from transformers. No
times.
"""

import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lfm2.config import Config
from scripts import bench_gpu
from scripts.gpu import bench
from scripts.gpu.bench import Bench, Figure, measure
from scripts.gpu.counts import rates
from scripts.gpu.table import our_line, peer_lines
from tests import tiny

PEER = {
    "eager": {"decode 1": {"tok_s": 50.0, "spread": [49.0, 51.0], "experts": "grouped_mm"}},
    "compiled": {},
    "reasons": {"eager": {}, "compiled": {"decode 1": "given up after 9 s"}},
}


@pytest.fixture
def short(monkeypatch):
    """Few rounds of few rows."""
    for name, value in {"AFTER": 8, "NUM_ROUNDS": 3, "NUM_WARM_UPS": 1, "NUM_PROMPTS": 2}.items():
        monkeypatch.setattr(bench, name, value)


def test_figures_of_a_mixture_of_experts(short):
    two_layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}
    config = Config.from_dict(tiny.moe_config() | two_layers)
    prefill, decode = measure(config, 16, "CPU", [8], [4])
    assert (prefill.what, decode.what) == ("prefill 8", "decode 4")
    assert config.num_active_experts < decode.num_experts < config.num_experts
    assert decode.host_share is None and decode.bytes_s > 0
    for figure in (prefill, decode):
        low, high = figure.spread
        assert 0 < low <= figure.tok_s <= high and figure.num_launches > config.num_layers


def test_rates_are_between_those_that_were_seen():
    # Far apart, as where other work shares the machine.
    assert rates(10, [1.0, 100.0]) == (10 / 50.5, (10 / 75.25, 10 / 25.75))
    assert rates(10, [5.0, 1.0, 2.0, 4.0, 3.0]) == (10 / 3, (2.5, 5.0))


def test_a_decode_round_reads_all_but_the_experts_that_it_does_not_use(short):
    config = Config.from_dict(tiny.moe_config())
    made = Bench(config, 16, "CPU", streams=4, context=16)
    # Three matrices of width 32 in three layers, bf16; keys and values of one layer, 4 x 16 wide.
    expert = 3 * 3 * 32 * config.hidden_size * 2
    keys_and_values = 8 * 2 * config.num_kv_heads * config.head_dim * 2
    whole = sum(made.sizes.values()) + 4 * keys_and_values
    assert made.decode_bytes(4, 8) == whole
    assert made.decode_bytes(4, 2.5) == whole - 5.5 * expert
    assert made.decode_bytes(1, 8) == whole - 3 * keys_and_values


def test_lines_of_the_table():
    figure = Figure("decode 1", 500.0, (490.0, 505.0), 9, 4.0, 2e9, 0.05)
    line = our_line("lfm2-350m", 4, figure, bandwidth=8e9, peer=PEER)
    assert "490.0-505.0" in line and "2 GB/s = 25% of a copy" in line
    assert line.endswith("10.00x eager")
    eager, compiled = peer_lines("lfm2-350m", PEER)
    assert "50.0 tok/s  (49.0-51.0)  grouped_mm" in eager
    assert "compiled" in compiled and compiled.endswith("given up after 9 s")


@pytest.mark.parametrize("ending", ["exit 1", "exec sleep 60"])
def test_of_a_peer_that_fails_or_hangs_what_it_had_is_taken(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "PEER_LIMIT_S", 1)
    python = script(tmp_path, f"echo {{}}\necho '{json.dumps(PEER)}'\n{ending}\n")
    assert bench_gpu.peer_figures("lfm2-350m", options(python)) == PEER


def test_a_peer_without_a_figure_is_none(tmp_path):
    assert (
        bench_gpu.peer_figures("lfm2-350m", options(script(tmp_path, "exit 3\n"))) == "exit code 3"
    )


def test_the_table_is_kept_as_it_comes(tmp_path, monkeypatch, capsys):
    def figures(*arguments):
        yield Figure("decode 1", 500.0, (490.0, 505.0), 9)
        raise KeyboardInterrupt

    out = tmp_path / "out.txt"
    monkeypatch.setattr(bench_gpu, "measure", figures)
    monkeypatch.setattr(bench_gpu, "copy_bandwidth", lambda *arguments: 8e9)
    monkeypatch.setattr(sys, "argv", ["", "--device", "CPU", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        bench_gpu.main()
    assert stopped.value.code == 130
    assert out.read_text() == capsys.readouterr().out
    assert "500.0 tok/s" in out.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, code",
    [(["--streams", "0"], 2), (["--prompt", "-5"], 2), (["--device", "NOPE"], "NOPE")],
)
def test_mistakes_are_told_before_anything_is_measured(arguments, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit) as stopped:
        bench_gpu.main()
    assert code == stopped.value.code or code in stopped.value.code
    assert capsys.readouterr().out == ""


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def options(python: str) -> SimpleNamespace:
    return SimpleNamespace(
        peer=python, device="CPU", prompt=[8], streams=[1], compile_limit=0, layers=None
    )
