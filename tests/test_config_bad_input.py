"""config.json that is malformed or absurd: a one-line error that names the key, whatever it holds."""

import os
from pathlib import Path

import pytest
from config_samples import LLAMA, SMALL, keys_read, refused, small_config
from hypothesis import given
from hypothesis import strategies as st

from effllm import EffllmError, ModelNotFound
from effllm.runtime import families
from effllm.runtime.config import ModelConfig, parse_config, read_config
from effllm.runtime.config_reader import FILE_LIMIT, ConfigError, Keys


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64], 2**40, 10**400], ids=lambda value: repr(value)[:12])
def test_absurd_sizes_are_named(name: str, value: object) -> None:
    refused({**LLAMA, name: value}, name)


@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"num_key_value_heads"}))
def test_a_missing_size_is_named(name: str) -> None:
    refused({**LLAMA, name: None}, name, "missing")
    refused({key: value for key, value in LLAMA.items() if key != name}, name, "missing")


@pytest.mark.parametrize(("name", "value"), [
    ("rms_norm_eps", 0.0), ("rms_norm_eps", float("nan")), ("rms_norm_eps", "1e-5"), ("hidden_act", "swiglu"), ("hidden_act", 3),
    ("tie_word_embeddings", "yes"), ("rope_theta", 1.0), ("rope_theta", float("inf")), ("max_position_embeddings", 2**40),
    ("head_dim", 4096), ("rope_scaling", "linear"), ("rope_scaling", {"type": "spiral"}), ("rope_scaling", {"type": ["linear"]}),
    ("rope_scaling", {"type": "linear"}), ("rope_scaling", {"type": "linear", "factor": -2}),
    ("rope_scaling", {"type": "linear", "factor": True}),
    ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("rope_scaling", {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}),
    ("rope_scaling", {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}), ("architectures", "LlamaForCausalLM"), ("dtype", 16)])
def test_values_of_the_wrong_kind_are_named(name: str, value: object) -> None:
    refused({**LLAMA, name: value}, name)


@pytest.mark.parametrize("value", [["llama"], {}, {"a": 1}, 3, True], ids=repr)
def test_a_family_that_is_no_text_is_named(value: object) -> None:
    refused({**LLAMA, "model_type": value}, "model_type", "expected a string")


MOST_DIGITS = 10**400  # more than a float has, and no infinity either


@pytest.mark.parametrize(("family", "name", "value"), [
    ("falcon_h1", "mlp_multipliers", [MOST_DIGITS, 1.0]), ("falcon_h1", "ssm_multipliers", [MOST_DIGITS] * 5),
    ("bailing_hybrid", "kda_lower_bound", -MOST_DIGITS), ("mimo_v2_flash", "rope_parameters", {"full_attention": [1]})])
def test_values_of_a_familys_own_keys_are_named(family: str, name: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, name: value}, name)


ANY_KEY = st.sampled_from(sorted({"architectures", "text_config"}.union(*map(keys_read, families.FAMILIES))))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor", "rope_type"]), inner), max_leaves=4)


@given(st.dictionaries(ANY_KEY, ANY_JSON), st.sampled_from([*families.FAMILIES, *families.COMPOSITE]))
def test_any_json_gives_a_config_or_one_line(changes: dict[str, object], family: str) -> None:
    try:
        config = parse_config({**LLAMA, "ffn_dim": 88, **changes, "model_type": family})
    except EffllmError as error:
        assert "\n" not in error.message
    else:
        assert isinstance(config, ModelConfig) and len(config.windows) == config.num_hidden_layers


@given(st.data(), st.sampled_from(families.FAMILIES))
def test_a_key_that_is_known_is_known_whatever_the_others_say(data: st.DataObject, family: str) -> None:
    known = keys_read(family)
    own = st.sampled_from(sorted(known - {"model_type"}))
    values = st.sampled_from([None, True, False, 0, 1, 2, 4, 0.5, ["full_attention"] * 4, [1] * 4])
    changes = data.draw(st.dictionaries(own, values, max_size=3))
    keys = Keys({**small_config(family), **changes})
    keys.text("model_type")
    try:
        families.get(family).config(keys)
    except ConfigError:
        return
    assert known <= keys.accessed


@pytest.mark.parametrize(("family", "changes", "name"), [
    ("cohere2_moe", {"rms_norm_eps": 1e-5}, "layer_norm_eps"), ("deepseek_v2", {"topk_method": "greedy"}, "n_group"),
    ("exaone4", {"sliding_window": None}, "sliding_window_pattern"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "multi_query"),
    *(("ernie4_5_vl_moe_text", {"mlp_layer_types": ["sparse"] * 4}, f"moe_layer_{each}") for each in
      ("interval", "start_index", "end_index")),
    ("step3p5", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "rope_scaling"),
    ("glm_moe_dsa", {"indexer_types": ["full"] * 4}, "index_topk_freq"),
    ("lfm2", {"block_ff_dim": 88}, "intermediate_size"), ("lfm3", {"layer_types": ["full_attention"] * 4}, "conv_L_cache"),
    ("llama4_text", {"num_local_experts": 0}, "num_experts_per_tok")])
def test_a_key_that_the_others_make_idle_is_known(family: str, changes: dict[str, object], name: str) -> None:
    keys = Keys({**small_config(family), **changes})
    families.get(family).config(keys)
    assert name in keys.accessed


def test_a_section_of_positions_that_nothing_reads_may_be_anything() -> None:
    plain = parse_config(small_config("gptj"))
    for odd in ([0, 1], 2.0, "nope"):
        assert parse_config({**small_config("gptj"), "rope_parameters": odd}) == plain


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_kind_of_layers_without_a_name_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="layer_types holds '', which is not supported"):
        parse_config({**small_config(family), "layer_types": ["", *["full_attention"] * 3]})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    def message(kind: type[EffllmError]) -> str:
        with pytest.raises(EffllmError) as caught:
            read_config(tmp_path)
        assert type(caught.value) is kind and "\n" not in caught.value.message
        return caught.value.message

    path = tmp_path / "config.json"
    assert "has no config.json" in message(ModelNotFound)
    for text in ("", "{", "[" * 100_000, "[1]", '"text"', "{'a': 1}", '{"vocab_size": ' + "9" * 10_000 + "}"):
        path.write_text(text)
        assert "config.json" in message(ConfigError)
    path.write_bytes(b"\xff\xfe{}")
    assert "not valid JSON" in message(ConfigError)
    path.write_text('{"vocab_size": 3,\n')
    assert message(ConfigError).endswith("config.json is not valid JSON (line 2: Expecting property name enclosed in double quotes)")
    path.write_bytes(b" " * (FILE_LIMIT + 1))
    assert "at most" in message(ConfigError)
    path.unlink()
    os.mkfifo(path)  # a pipe would block the reader for ever
    assert "not a regular file" in message(ConfigError)
    path.unlink()
    path.mkdir()
    assert "not a regular file" in message(ConfigError)
    with pytest.raises(ModelNotFound, match="no folder"):
        read_config(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator reads everything")
def test_a_config_without_read_permission(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        read_config(tmp_path)
