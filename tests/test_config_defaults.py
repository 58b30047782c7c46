"""Keys absent from config.json, for every family in transformers: they mean transformers' defaults."""


import pytest
from family_models import CASES
from remapped_checkpoints import BASE_FAMILY
from transformers import AutoConfig

from effllm.runtime.config import parse_config
from effllm.runtime.families import FAMILIES

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2}
# Where transformers puts a theta in the place of what is published: a null of OLMo Hybrid means that nothing turns.
OTHERWISE = ("olmo_hybrid",)
# Whose sizes go with positions that their cases state, or whose positions have no numbers.
TOGETHER = ("codegen", "gptj", "cohere_compass_text", "minimax_m3_vl_text", "qwen4_exp_text", "granite_swa", "zaya")
SILENT = {case.family: {**SIZES, **{key: value for key, value in case.changes.items() if not key.startswith("rope_")}}
          for case in reversed(CASES.values()) if case.family in FAMILIES and case.family not in {*BASE_FAMILY, *OTHERWISE, *TOGETHER,
                                                                                                  "rwkv7"}}


@pytest.mark.parametrize("family", sorted(SILENT))
def test_positions_of_which_nothing_is_said(family: str) -> None:
    raw = {"model_type": family, **SILENT[family]}
    section = getattr(type(AutoConfig.for_model(family)).from_dict({**raw}), "rope_parameters", None) or {}
    sections = [each for each in section.values() if isinstance(each, dict)] or [section] * bool(section)
    turned = {(rope.kind, rope.theta) for rope in parse_config(raw).ropes if rope is not None}
    assert turned <= {(each["rope_type"], each["rope_theta"]) for each in sections if each.get("rope_theta")}


def test_what_the_text_part_of_voxtral_does_not_say() -> None:
    """A Llama whose sizes and positions are not those of the class that it is read by."""
    inner = AutoConfig.for_model("voxtral", text_config={"hidden_size": 64, "intermediate_size": 88}).text_config
    own = {"hidden_size": 64, "intermediate_size": 88, "tie_word_embeddings": False}
    config = parse_config({"model_type": "voxtral", "text_config": {**own, "num_attention_heads": 32}})
    theta = inner.rope_parameters["rope_theta"]
    assert (config.rope.theta, config.head_dim, config.norm_eps) == (theta, inner.head_dim, inner.rms_norm_eps)
    assert (config.vocab_size, config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings) == (
        inner.vocab_size, inner.num_hidden_layers, inner.num_key_value_heads, inner.max_position_embeddings)
