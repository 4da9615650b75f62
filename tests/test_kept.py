"""Copies of states on the device, and the files that hold them."""

import hashlib
import json
import resource

import numpy as np
import pytest
from tinygrad import dtypes

from lfm2.config import Config
from lfm2.engine import Model
from lfm2.errors import PromptCacheError
from lfm2.prompt_cache import DIGEST_BYTES, LENGTH_BYTES, MAGIC
from lfm2.sampling import Sampling
from lfm2.service import Service
from lfm2.tokenizer import Tokenizer
from metal_ops.emulated_metal import install
from metal_ops.launch import copy_in, empty
from metal_ops.memory import Memory, read_tensor
from metal_ops.table import Capacity
from tests.build import DEMO, NUM_TOKENS, build_runner, poison

FORMS = (Capacity(64, 1, 1),)
STORY = "Once upon a time there was a small red fox called Mia."


@pytest.mark.parametrize("device", ["CPU", "METAL"])
def test_memory_holds_what_is_stored(device):
    if device == "METAL":
        install()
    source, target = (empty((100,), dtypes.uint8, device) for _ in range(2))
    copy_in(source, 0, memoryview(bytearray(range(100))))
    copy_in(target, 0, memoryview(bytearray(100)))
    memory = Memory(50, device)
    memory.store(10, source, 20, 30)
    memory.load(15, target, 7, 20)
    assert bytes(read_tensor(target, 0, 100)) == bytes(7) + bytes(range(25, 45)) + bytes(73)
    memory.write(0, bytearray(b"abc"))
    assert bytes(memory.read(1, 2)) == b"bc"
    for offset, first, count in ((30, 0, 21), (0, 80, 21), (-1, 0, 5)):
        with pytest.raises(ValueError, match="bytes"):
            memory.store(offset, source, first, count)


def test_memory_goes_back_at_once():
    """Whatever its size: tinygrad by itself keeps what is freed for a request of that size."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(100):
        num_bytes = (8 << 20) + 4096 * number
        Memory(num_bytes, "CPU").write(0, bytearray(num_bytes))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.fixture(scope="module")
def runners(steps):
    """dtype -> a runner, made when first asked for."""
    made = {}

    def runner(dtype: str = "float32"):
        if dtype not in made:
            made[dtype] = build_runner(DEMO, steps, dtype, FORMS)
        return made[dtype]

    return runner


@pytest.fixture(scope="module")
def make(runners):
    """A model as in a new process: whatever its state held is NaN."""
    config = Config.from_folder(DEMO)
    tokenizer = Tokenizer.from_folder(DEMO, config)

    def make(dtype: str = "float32", **options) -> Model:
        runner = runners(dtype)
        poison(runner.state)
        service = Service(runner, chunk=48, **options)
        return Model(config, tokenizer, service, Sampling(), NUM_TOKENS)

    return make


def test_a_copy_is_the_state_bit_for_bit(make):
    model = make()
    model.generate(STORY, raw=True, max_tokens=3)
    kept = model.service.cache.states[-1]
    copier, state = model.service.runner.copier, model.runner.state
    copier.restore(kept.copy, 7, 500)
    for pool in (*state.keys.values(), *state.values.values()):
        rows = pool.numpy()
        np.testing.assert_array_equal(rows[500 : 500 + kept.at], rows[: kept.at])
        assert np.isnan(rows[500 + kept.at]).all()
    for layer, ring in state.rings.items():
        np.testing.assert_array_equal(ring.numpy()[7], ring.numpy()[0], err_msg=str(layer))


@pytest.fixture
def file(make, tmp_path):
    """A file of the states after a prompt and after its reply."""
    model = make()
    model.generate(STORY, raw=True, max_tokens=4)
    path = tmp_path / "states"
    assert model.save_prompt_cache(path) == 2
    return path


def test_a_later_process_goes_on(make, file):
    later = f"{STORY} She lived by the river."
    cold = make(cache_bytes=0).generate(later, raw=True, max_tokens=6, num_logprobs=2)
    model = make()
    assert model.load_prompt_cache(file) == 2
    reply = model.generate(later, raw=True, max_tokens=6, num_logprobs=2)
    assert reply.draws == cold.draws
    assert reply.num_reused_tokens == len(model.encode(STORY, raw=True))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_states_survive_a_second_file(make, file):
    """Also those that share their memory with a longer one."""
    model = make()
    model.load_prompt_cache(file)
    model.generate(STORY, raw=True, max_tokens=4)
    assert len(model.service.cache.states) == 3
    assert model.save_prompt_cache(file) == 2
    again = make()
    again.load_prompt_cache(file)
    assert again.generate(STORY, raw=True, max_tokens=4).num_reused_tokens > 0


def test_what_does_not_fit_is_left_out(make, file):
    """The state that was used last is taken."""
    size = make().service.runner.copier.size
    model = make(cache_bytes=size.num_bytes(40))
    assert model.load_prompt_cache(file) == 2
    assert len(model.service.cache.states) == 1
    model = make(cache_bytes=0)
    assert model.load_prompt_cache(file) == 2 and model.save_prompt_cache(file) == 0


def sealed(header: dict, payload: bytes) -> bytes:
    """A file whose checksum is right."""
    encoded = json.dumps(header).encode()
    content = len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded + payload
    return MAGIC + hashlib.sha256(content).digest() + content


def opened(content: bytes) -> tuple[dict, bytes]:
    first = len(MAGIC) + DIGEST_BYTES
    length = int.from_bytes(content[first : first + LENGTH_BYTES], "little")
    first += LENGTH_BYTES
    return json.loads(content[first : first + length]), content[first + length :]


def refused(model: Model, path, words: str) -> None:
    with pytest.raises(PromptCacheError, match=words) as error:
        model.load_prompt_cache(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert not model.service.cache.states


def test_a_damaged_file_is_refused(make, file):
    """Cut at each part's border and elsewhere, longer, or with a bit turned anywhere."""
    model, content = make(), file.read_bytes()
    header, payload = opened(content)
    cuts, end = [len(content) - 1], len(content)
    for entry in reversed(header["states"]):
        for _, num_bytes in reversed(entry["parts"]):
            end -= num_bytes
            cuts.append(end)
    assert end == len(content) - len(payload)
    for cut in [*cuts, len(MAGIC) + 5]:
        file.write_bytes(content[:cut])
        refused(model, file, "damaged")
    file.write_bytes(content + b"\0")
    refused(model, file, "damaged")
    for place in (len(MAGIC), len(MAGIC) + DIGEST_BYTES, len(MAGIC) + 90, len(content) - 1):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        refused(model, file, "damaged")


def test_a_file_of_something_else_is_refused(make, file, tmp_path):
    model, content = make(), file.read_bytes()
    header, payload = opened(content)
    cases = [
        (sealed(header | {"model": "0" * 64}, payload), "another model"),
        (sealed(header | {"arithmetic": "METAL 0"}, payload), "another device or version"),
        (sealed(header | {"dtype": "float16"}, payload), "compute type float16, .* float32"),
        (content.replace(b"cache 1\n", b"cache 2\n"), "another version"),
        (b"PNG", "no file of kept states"),
        (b"", "no file of kept states"),
    ]
    first = header["states"][0]
    for parts in (first["parts"][1:], first["parts"][:-1], first["parts"][::-1]):
        # A layer is missing, first or last, or they are exchanged.
        changed = header | {"states": [first | {"parts": parts}, *header["states"][1:]]}
        cases.append((sealed(changed, payload), "another layout"))
    for damaged, words in cases:
        file.write_bytes(damaged)
        refused(model, file, words)
    refused(model, tmp_path / "missing", "cannot be read")
    file.write_bytes(content)
    refused(make("bfloat16"), file, "compute type float32, .* bfloat16")


def test_another_models_file_is_refused(make, file, runners):
    """One weight differs."""
    weight = runners().model.weights["layers.3.conv.out_proj.weight"]
    old = read_tensor(weight, 0, 2)
    copy_in(weight, 0, memoryview(bytearray(b"\x01\x02")))
    try:
        refused(make(), file, "another model")
    finally:
        copy_in(weight, 0, memoryview(old))
    assert make().load_prompt_cache(file) == 2


def test_a_file_is_written_whole_or_not_at_all(make, file, monkeypatch):
    content = file.read_bytes()
    model = make()
    model.load_prompt_cache(file)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Memory, "read", full)
    with pytest.raises(PromptCacheError, match="cannot be written: No space left"):
        model.save_prompt_cache(file)
    assert file.read_bytes() == content and len(list(file.parent.iterdir())) == 1
    with pytest.raises(PromptCacheError, match="cannot be written"):
        model.save_prompt_cache(file / "below")
