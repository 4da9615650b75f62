"""config.json: spellings old and new, refusals by name, and the costs of the sizes."""

import json

import pytest

from lfm2.config import Config
from lfm2.errors import ConfigError
from lfm2.quantization import Packing
from tests.tiny import dense_config, moe_config

A16 = [2, 5, 8, 10, 12, 14]
A30 = [2, 5, 9, 13, 17, 21, 24, 27]
A24 = [2, 6, 10, 14, 18, 21]
A40 = list(range(2, 40, 4))


def dense(num_layers, attention, width, ffn, vocab=65536, adjusts=True):
    return {
        "model_type": "lfm2",
        "num_hidden_layers": num_layers,
        "full_attn_idxs": attention,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "num_key_value_heads": 8,
        "block_ff_dim": ffn,
        "block_auto_adjust_ff_dim": adjusts,
        "vocab_size": vocab,
    }


def moe(num_layers, attention, ffn, expert_ffn, num_experts, vocab=65536):
    return {
        "model_type": "lfm2_moe",
        "num_hidden_layers": num_layers,
        "full_attn_idxs": attention,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "moe_intermediate_size": expert_ffn,
        "num_experts": num_experts,
        "vocab_size": vocab,
    }


def read(config=None, without=(), **changes):
    config = (dense_config() if config is None else config) | changes
    return Config.from_dict({key: value for key, value in config.items() if key not in without})


@pytest.mark.parametrize(
    "config, total, active_billions",
    [
        (dense(16, A16, 1024, 6656), 354_483_968, 0.35),
        (dense(16, A16, 1536, 10240), 742_489_344, 0.74),
        (dense(16, A16, 2048, 12288), 1_170_340_608, 1.17),
        (dense(30, A30, 2048, 10752, adjusts=False), 2_569_272_320, 2.57),
        (dense(30, A30, 2048, 10752, 128_000, adjusts=False), 2_697_198_592, 2.70),
        (moe(24, A24, 7168, 1792, 32), 8_339_930_560, 1.56),
        (moe(40, A40, 11776, 1536, 64), 23_843_661_440, 2.33),
        (moe(40, A40, 11776, 1536, 64, 128_000), 23_971_587_712, 2.45),
    ],
)
def test_num_params_of_published_models(config, total, active_billions):
    config = Config.from_dict(config)
    assert config.num_params == total
    assert round(config.num_active_params / 1e9, 2) == active_billions


def test_memory_per_token_and_slot():
    config = Config.from_dict(dense(16, A16, 2048, 12288))
    assert config.kv_bytes_per_token(2) == 12 * 1024
    assert config.conv_bytes_per_slot(2, 2) == 10 * 8 * 1024
    assert config.num_attention_layers == 6


@pytest.mark.parametrize("make", [dense_config, moe_config])
def test_old_and_new_spellings_are_one_config(make):
    assert Config.from_dict(make("old")) == Config.from_dict(make("new"))


def test_aliases_of_single_keys():
    config = read(without=["norm_eps", "num_attention_heads"], block_norm_eps=1e-6, num_heads=2)
    assert (config.norm_eps, config.num_heads, config.head_dim) == (1e-6, 2, 32)
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=32).head_dim == 32
    assert read(tie_word_embeddings=True, tie_embedding=False).tie_embedding is False
    assert read(without=["tie_word_embeddings"]).tie_embedding is True
    assert read(eos_token_id=[7, 2]).eos_token_ids == (7, 2)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(dtype=None, torch_dtype="float16").dtype == "float16"
    moe = moe_config()
    moe["num_local_experts"] = moe.pop("num_experts")
    assert read(moe).num_experts == 8


def test_rope_theta_at_the_top_nested_or_absent():
    bare = ["rope_parameters"]
    nested = {"rope_theta": 5e6, "rope_type": "default"}
    assert read(without=bare, rope_theta=5e6).rope_theta == 5e6
    assert read(rope_parameters=nested).rope_theta == 5e6
    assert read(rope_parameters=nested, rope_theta=1e6).rope_theta == 5e6
    assert read(without=bare).rope_theta == 1e6


@pytest.mark.parametrize(
    "given, adjusts, multiple, used",
    [
        (12288, True, 256, 8192),
        (8192, False, 256, 8192),
        (8192, True, 256, 5632),
        (6656, True, 256, 4608),
        (10240, True, 256, 6912),
        (96, True, 16, 64),
    ],
)
def test_dense_ffn_size(given, adjusts, multiple, used):
    rule = dict(block_auto_adjust_ff_dim=adjusts, block_multiple_of=multiple)
    assert read(intermediate_size=given, **rule).ffn_size == used
    assert read(intermediate_size=1, block_ff_dim=given, **rule).ffn_size == used
    assert read(moe_config(), intermediate_size=given, **rule).ffn_size == given


def test_layer_types_from_indices():
    derived = read(without=["layer_types"], full_attn_idxs=[0, 3]).layer_types
    assert derived == ("full_attention", "conv", "conv", "full_attention")
    assert read(full_attn_idxs=[0, 3]).layer_types == tuple(dense_config()["layer_types"])
    assert read(without=["layer_types"]).layer_types == ("full_attention",) * 4


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "lfm3"}, ["model_type", "'lfm3'"]),
        ({"model_type": "lfm2_vl"}, ["'lfm2_vl'"]),
        ({"model_type": None}, ["no model_type"]),
        ({"architectures": ["Lfm2BidirectionalModel"]}, ["Lfm2BidirectionalModel"]),
        ({"architectures": ["Lfm2DSparkDraftModel"]}, ["Lfm2DSparkDraftModel"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope_parameters", "'yarn'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "'linear'"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling", "factor"]),
        ({"layer_types": ["conv"] * 3}, ["layer_types", "3", "4"]),
        ({"layer_types": ["conv"] * 3 + ["sliding_attention"]}, ["'sliding_attention'"]),
        ({"layer_types": None, "full_attn_idxs": [4]}, ["full_attn_idxs", "layer 4"]),
        ({"num_attention_heads": 5}, ["hidden_size 64", "5 heads"]),
        ({"num_key_value_heads": 3}, ["4 heads", "3 key-value"]),
        ({"num_heads": 2}, ["num_attention_heads is 4", "num_heads is 2"]),
        ({"vocab_size": None}, ["no vocab_size"]),
        ({"hidden_size": "64"}, ["hidden_size", '"64"', "whole number"]),
        ({"hidden_size": True}, ["hidden_size", "true"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "1 or more"]),
        ({"conv_bias": "no"}, ["conv_bias", "true or false"]),
        ({"rope_parameters": {"rope_theta": -1}}, ["rope_theta", "positive"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"eos_token_id": ["7"]}, ["eos_token_id", "list of whole numbers"]),
    ],
)
def test_refusals_name_what_is_wrong(changes, words):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert_one_line(caught, words)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"layer_types": None}, ["layer_types", "full_attn_idxs"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "8 experts"]),
        ({"num_dense_layers": 5}, ["num_dense_layers is 5"]),
        ({"intermediate_size": None}, ["no intermediate_size"]),
    ],
)
def test_refusals_of_moe(changes, words):
    with pytest.raises(ConfigError) as caught:
        read(moe_config(), **changes)
    assert_one_line(caught, words)


def test_quantization_with_overrides():
    found = {
        "group_size": 64,
        "bits": 4,
        "model.layers.1.feed_forward.gate": {"group_size": 64, "bits": 8},
        "model.layers.2.feed_forward.switch_mlp.down_proj": {"bits": 6},
        "model.embed_tokens": False,
    }
    quantization = read(moe_config(), quantization_config=found).quantization
    assert quantization == read(moe_config(), quantization=found).quantization
    assert quantization.packing("layers.1.feed_forward.gate") == Packing(8, 64)
    assert quantization.packing("layers.2.feed_forward.experts.w2") == Packing(6, 64)
    assert quantization.packing("layers.0.conv.in_proj") == Packing(4, 64)
    assert quantization.packing("embed_tokens") is None
    assert read().quantization is None


@pytest.mark.parametrize(
    "found, word",
    [
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "'mxfp4'"),
        ({"bits": 7, "group_size": 64}, "bits is 7"),
        ({"bits": 4, "group_size": 16}, "group_size is 16"),
        ({"bits": 4}, "group_size"),
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"bits": 4, "group_size": 64, "model.a": {"mode": "nvfp4"}}, "model.a: mode is 'nvfp4'"),
    ],
)
def test_refusals_of_quantization(found, word):
    with pytest.raises(ConfigError) as caught:
        read(quantization_config=found)
    assert_one_line(caught, [word])


def test_folder_without_a_usable_config(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Config.from_folder(tmp_path / "nowhere")
    assert_one_line(caught, ["no folder", "nowhere"])
    (tmp_path / "4bit").mkdir()
    (tmp_path / "4bit" / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        Config.from_folder(tmp_path)
    assert_one_line(caught, ["no config.json", "subfolder 4bit"])
    path = tmp_path / "config.json"
    for text, word in (
        (b'{"model_type": "lfm2"', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"[" * 100_000, "not valid JSON"),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            Config.from_folder(tmp_path)
        assert_one_line(caught, ["config.json", word])
    path.write_text(json.dumps(dense_config()))
    assert Config.from_folder(tmp_path) == read()


def assert_one_line(caught, words):
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
