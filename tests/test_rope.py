"""Rotary tables against the functions of transformers that define them, for every kind, both layouts and several contexts."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from effllm.runtime.config import parse_config
from effllm.runtime.config_rope import ROPE_KEYS, RopeConfig
from effllm.runtime.rope import rope_table

HEAD_DIM, POSITIONS = 32, 512
RAMP = [1.0 + 0.25 * i for i in range(HEAD_DIM // 2)]
SECTIONS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings":
               128},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 0.7},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.8},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    "yarn, factor from the lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn, one step": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 1.0, "beta_slow": 1.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "factor": 8.0},
    "longrope": {"rope_type": "longrope", "short_factor": RAMP, "long_factor": [3 * x for x in RAMP], "original_max_position_embeddings":
                 128},
    "longrope, factor": {"rope_type": "longrope", "short_factor": RAMP, "long_factor": RAMP[::-1], "factor": 16.0,
                         "original_max_position_embeddings": 128},
    "longrope, attention factor": {"rope_type": "longrope", "short_factor": RAMP, "long_factor": RAMP[::-1], "attention_factor": 1.5,
                                   "original_max_position_embeddings": 128},
}


def raw_config(section: dict[str, object] | None, theta: float = 10_000.0) -> dict[str, object]:
    """A config.json in the newer dialect."""
    return {"model_type": "llama", "vocab_size": 100, "hidden_size": 2 * HEAD_DIM, "intermediate_size": 88, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": POSITIONS,
            "rope_parameters": {**(section or {}), "rope_theta": theta}}


def ours(raw: dict[str, object], ctx: int) -> tuple[np.ndarray, float]:
    config = parse_config(raw)
    table = rope_table(config.rope, config.head_dim, ctx, config.max_position_embeddings)
    assert table.inv_freq.dtype == np.float32 and table.rotary_dim == HEAD_DIM and table.inv_freq.shape == (HEAD_DIM // 2,)
    return table.inv_freq, table.attention_scaling


def theirs(raw: dict[str, object], ctx: int) -> tuple[np.ndarray, float]:
    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "model_type"})
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=ctx)
    return inv_freq.numpy(), float(scaling)


def check(raw: dict[str, object], ctx: int) -> None:
    inv_freq, scaling = ours(raw, ctx)
    expected, expected_scaling = theirs(raw, ctx)
    # 4e-7 is a few steps of float32: the two libraries' power functions differ in the last bit.
    np.testing.assert_allclose(inv_freq, expected, rtol=4e-7, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


@pytest.mark.parametrize("ctx", [100, POSITIONS, 3000])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1e6])
def test_plain_table(theta: float, ctx: int) -> None:
    check(raw_config(None, theta), ctx)


@pytest.mark.parametrize("ctx", [100, 128, 129, POSITIONS, POSITIONS + 1, 3000])
@pytest.mark.parametrize("name", SECTIONS)
def test_scaled_tables_at_contexts_around_the_trained_ones(name: str, ctx: int) -> None:
    check(raw_config(SECTIONS[name]), ctx)


def test_every_kind_is_compared() -> None:
    assert {section["rope_type"] for section in SECTIONS.values()} | {"default"} == set(ROPE_KEYS)


@pytest.mark.parametrize("name", SECTIONS)
def test_scaling_changes_the_table(name: str) -> None:
    """Guards the comparison above: a section that changed nothing would compare nothing."""
    plain, scale = ours(raw_config(None), 3000)
    scaled, attention = ours(raw_config(SECTIONS[name]), 3000)
    assert not np.allclose(plain, scaled, rtol=1e-3) or abs(attention - scale) > 1e-3


@pytest.mark.parametrize("name", SECTIONS)
def test_the_older_dialect_means_the_same(name: str) -> None:
    section = dict(SECTIONS[name])
    older = {key: value for key, value in raw_config(None).items() if key != "rope_parameters"}
    older |= {"rope_theta": 10_000.0, "rope_scaling": {"type": section.pop("rope_type"), **section}}
    for ctx in (100, 3000):
        inv_freq, scaling = ours(older, ctx)
        expected, expected_scaling = ours(raw_config(SECTIONS[name]), ctx)
        assert np.array_equal(inv_freq, expected) and scaling == expected_scaling


def test_an_original_length_beside_the_section_wins_over_the_one_inside() -> None:
    raw = {**raw_config(SECTIONS["llama3"]), "original_max_position_embeddings": 64}
    check(raw, POSITIONS)
    assert not np.allclose(ours(raw, POSITIONS)[0], ours(raw_config(SECTIONS["llama3"]), POSITIONS)[0], rtol=1e-3)


def test_a_partial_rotation_has_a_table_for_its_channels() -> None:
    table = rope_table(RopeConfig(10_000.0, "default", {}, partial_rotary_factor=0.5), HEAD_DIM, 64, 64)
    assert table.rotary_dim == 16
    np.testing.assert_allclose(table.inv_freq, [10_000.0 ** (-2 * i / 16) for i in range(8)], rtol=1e-6)


def test_the_context_decides_once_for_dynamic_and_longrope() -> None:
    for name, edge in (("dynamic", POSITIONS), ("longrope", 128)):
        at, below, above = (ours(raw_config(SECTIONS[name]), ctx)[0] for ctx in (edge, edge - 28, edge + 1))
        assert np.array_equal(at, below) and not np.array_equal(at, above)


def test_tiny_heads_and_an_unknown_kind() -> None:
    table = rope_table(RopeConfig(10_000.0, "dynamic", {"factor": 2.0}), 2, 9999, 512)
    assert table.inv_freq.tolist() == [1.0] and math.isfinite(table.attention_scaling)
    with pytest.raises(KeyError):
        rope_table(RopeConfig(10_000.0, "spiral", {}), HEAD_DIM, 64, 64)
