"""config.json of the families that came later: what is read of it, as transformers reads it, and what is refused by name."""

import json
import sys
from pathlib import Path

import pytest
from transformers import Olmo3Config

from effllm.runtime.config import parse_config

sys.path.insert(0, str(Path(__file__).parent))
from config_samples import LLAMA, SMALL, refused

# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "olmo3": {"attention_bias": False, "eos_token_id": 257, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
              "max_position_embeddings": 65536, "rope_scaling": {
                  "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                  "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({**LLAMA, "eos_token_id": 7, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize(("family", "key", "value"), [
    ("olmo3", "clip_qkv", 8.0), ("olmo3", "use_sliding_window", False), ("olmo3", "mlp_bias", True),
    ("olmo3", "partial_rotary_factor", 0.5)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, key: value}, key)


def test_olmo3_stretches_the_positions_of_layers_without_a_window_alone() -> None:
    base = {**LLAMA, "model_type": "olmo3", "sliding_window": 32}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    older = parse_config({**base, "rope_theta": 500_000, "rope_scaling": yarn}, strict=True)
    newer = {"full_attention": {**yarn, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert older == parse_config({**base, "rope_parameters": newer}, strict=True)
    assert [rope.kind for rope in older.ropes] == ["default"] * 3 + ["yarn"] and older.windows == (32, 32, 32, None)
    assert older.context_length == 2048 and {rope.theta for rope in older.ropes} == {5e5}
    theirs = json.loads(Olmo3Config(**SMALL, sliding_window=32, rope_scaling=yarn).to_json_string())
    assert parse_config(theirs, strict=True).ropes == older.ropes
    other = {**newer, "sliding_attention": {"rope_theta": 7e3}}
    assert [rope.theta for rope in parse_config({**base, "rope_theta": 1e6, "rope_parameters": other}).ropes] == [7e3] * 3 + [5e5]
    # Versions of transformers do not agree on these: one base or two, and whether the section of all layers is read at all.
    refused({**base, "rope_theta": 1e6}, "rope_theta", "layers with a window")
    refused({**base, "rope_parameters": {**yarn, "rope_theta": 5e5}}, "rope_parameters")
    assert parse_config({**base, "rope_theta": 1e6, "layer_types": ["full_attention"] * 4}).rope.theta == 1e6
    refused({**base, "sliding_window": None}, "no sliding window")
