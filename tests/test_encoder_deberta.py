"""DeBERTa v2 and v3 against transformers, beyond the common encoder tests: relative positions, other ways to state them, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_models import made_encoder, random_model, states_of, unit
from test_encoders import KINDS, never, opened, returned, rows_of
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from effllm import EffllmError
from effllm.runtime.config_reader import read_json
from effllm.runtime.encoders.encoder import EncoderOptions, plan_encoder
from effllm.runtime.encoders.relative_bias import disentangled_rows

NAME, SAID = KINDS["deberta-v2"]


@pytest.mark.parametrize(("buckets", "furthest", "longest"), [(256, 512, 512), (256, 512, 1500), (4, 4, 30), (16, 400, 400), (7, 20, 64)])
def test_rows_of_distances(buckets: int, furthest: int, longest: int) -> None:
    behind = torch.arange(longest - 1, -longest, -1)
    theirs = torch.clamp(make_log_bucket_position(behind, buckets, furthest).long() + buckets, 0, 2 * buckets - 1)
    assert (disentangled_rows(buckets, furthest, longest) == theirs.numpy()).all()


@pytest.mark.parametrize("more", [{"position_buckets": -1, "max_relative_positions": 30}, {"norm_rel_ebd": "none"}, {"type_vocab_size": 2},
                                  {"hidden_act": "gelu_new", "max_relative_positions": 64}])
def test_vectors_of_models_that_state_other_distances(tmp_path: Path, more: dict) -> None:
    model = random_model(NAME, **{**SAID, **more})
    rows = rows_of((3, 20, 20, 150, 390))
    for row, own in zip(rows, returned(opened(made_encoder(tmp_path / "m", model), threads=2).vectors(rows, never)), strict=True):
        np.testing.assert_allclose(unit(own), unit(states_of(model, row).mean(0)), atol=2e-6, rtol=0)


def test_what_distances_are_made_into_is_planned(tmp_path: Path) -> None:
    plan = plan_encoder(made_encoder(tmp_path / "m", random_model(NAME, **SAID)), EncoderOptions())
    made = [each for layer in opened(plan.folder)._stack.layers for each in layer.relative_positions]
    assert plan.config.distance_nbytes == sum(each.nbytes for each in made)


@pytest.mark.parametrize(("changed", "said"), [
    ({"relative_attention": False}, "with a table of positions are not supported"),
    ({"position_biased_input": True}, "with a table of positions are not supported"), ({"share_att_key": False}, "share_att_key is False"),
    ({"pos_att_type": ["c2p"]}, "pos_att_type"), ({"pos_att_type": 3}, "pos_att_type 3"), ({"conv_kernel_size": 3}, "conv_kernel_size = 3"),
    ({"embedding_size": 24}, "embedding_size = 24"), ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd 'batch_norm'"),
    ({"position_buckets": 2}, "position_buckets 2 does not fit"), ({"max_relative_positions": 9}, "distances up to 9"),
    ({"position_buckets": 32}, "but the config says")])
def test_what_does_not_run_is_named(tmp_path: Path, changed: dict, said: str) -> None:
    folder = made_encoder(tmp_path / "m", random_model(NAME, **SAID))
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **changed}))
    with pytest.raises(EffllmError) as refused:
        opened(folder)
    assert said in refused.value.message and refused.value.hint


def test_terms_by_one_word(tmp_path: Path) -> None:
    """As published configs have them."""
    folder, row = made_encoder(tmp_path / "m", random_model(NAME, **SAID)), rows_of((9,))[0]
    (wanted,) = returned(opened(folder).vectors([row], never))
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), "pos_att_type": "p2c|c2p"}))
    (own,) = returned(opened(folder).vectors([row], never))
    assert (own == wanted).all()
