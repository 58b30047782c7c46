"""Beam's config as transformers writes it and where it is silent, what is refused, and a quantized folder."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from conversions import options, run
from export_models import scores
from family_models import CASES
from saved_models import saved
from torch import arange
from transformers import BeamConfig
from transformers.models.beam.modeling_beam import compute_attention_scaling

from effllm.runtime.config import parse_config
from effllm.runtime.families import get
from effllm.runtime.rope import rope_tables

FULL, WINDOWED = "full_attention", "sliding_attention"
BEAM = json.loads(BeamConfig(architectures=["BeamForCausalLM"]).to_json_string())


def test_beam_is_what_transformers_takes_where_a_config_is_silent() -> None:
    made = parse_config(BEAM, strict=True)
    full = [layer for layer, window in enumerate(made.windows) if window is None]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 51] and {*made.windows} == {None, 512}
    assert [layer for layer, rope in enumerate(made.ropes) if rope is None] == full
    assert made.moe.layers == frozenset(range(3, 52)) and (made.moe.num_groups, made.moe.top_groups) == (8, 4)
    assert made.moe.routed_scale == 2.5 and made.moe.shared_expert_dim is None and made.final_logit_softcapping == 30.0
    silent = parse_config({"model_type": "beam"}, strict=True)
    assert replace(silent, dtype=made.dtype) == made


def test_queries_without_rotary_positions_grow_as_in_transformers() -> None:
    made = parse_config(BEAM)
    windowed, table = rope_tables(made, 8192)[4:6]
    assert windowed.queries is None and table.queries is not None
    positions = np.array([0, 1, 2047, 2048, 8191])
    cos, sin = table.queries.cos_sin(positions)
    wanted = compute_attention_scaling(arange(8192)[None])[0, 0, :, 0].numpy()[positions]
    assert cos.shape == (5, 64) and np.allclose(cos, wanted[:, None], rtol=1e-6) and not sin.any()
    cos, sin = table.cos_sin(positions)
    assert (cos == 1).all() and not sin.any()


def test_gates_have_a_bias_for_each_head() -> None:
    made = parse_config(BEAM)
    dense, sparse = (get("beam").layer_tensors(made, layer) for layer in (0, 3))
    assert dense["attn_gate"].shape == (6144, 5120) and dense["attn_gate_bias"].shape == (48,)
    assert "gate" in dense and "gate" not in sparse and "correction" in sparse


@pytest.mark.parametrize(("key", "value"), [
    ("layer_types", ["chunked_attention"] * 52), ("sliding_window", 0), ("mlp_layer_types", ["shared"] * 52),
    ("num_experts_per_tok", 300), ("n_group", 7), ("final_logit_softcapping", 0), ("rope_theta", 1e6),
    ("rope_parameters", {FULL: None, WINDOWED: None})])
def test_what_beam_may_not_have_is_named(key: str, value: object) -> None:
    refused({**BEAM, key: value}, key)


def test_a_quantized_folder_answers_nearly_the_same(tmp_path: Path) -> None:
    calm = replace(CASES["beam"], changes={**CASES["beam"].changes, "initializer_range": 0.05})
    saved(calm, tmp_path / "source")
    run(tmp_path / "source", tmp_path / "8bit", options("8bit"))
    ids = list(range(5, 90))
    expected, got = scores(tmp_path / "source", ids), scores(tmp_path / "8bit", ids)
    assert 0 < np.square(got - expected).mean() < 1e-2 * np.square(expected).mean()
