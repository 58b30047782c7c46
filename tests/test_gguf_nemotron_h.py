"""GGUF files of Nemotron H and Nemotron 3 Nano: the type of each layer, messages about damaged files, and experts read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from export_models import exported, model, scores
from gguf_samples import Reader
from test_paged_models import paged, resident

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.gguf import nemotron_h

MIXED, DENSE, NARROWED = "nemotron_h, experts", "nemotron_h", "nemotron_h, experts of fewer numbers"


@pytest.mark.parametrize("name", (MIXED, DENSE))
def test_blocks_are_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    source = model(name, tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    reader, config = Reader(path), read_config(path, strict=True)
    arch = "nemotron_h_moe" if name == MIXED else "nemotron_h"
    stated = {key: reader.fields[f"{arch}.{key}"].contents() for key in ("block_count", *nemotron_h.PER_BLOCK_KEYS)}
    kinds = ["E" if width and name == MIXED else "-" if width else "*" if heads else "M"
             for heads, width in zip(stated["attention.head_count_kv"], stated["feed_forward_length"])]
    assert "".join(kinds) == ("MEM*E*EM" if name == MIXED else "M-M*-M") and stated["block_count"] == len(kinds)
    own = read_config(source, strict=True)
    assert config.moe == own.moe and config.recurrent == own.recurrent and config.recurrent_layers == own.recurrent_layers
    assert config.layers_without_mlp == own.layers_without_mlp and config.norm_eps == pytest.approx(own.norm_eps) and config.warnings == ()
    tensors = {tensor.name for tensor in reader.tensors}
    assert all(f"blk.{block}.attn_norm.weight" in tensors for block in range(len(kinds)))
    assert ("blk.1.ffn_up_exps.weight" in tensors) == (name == MIXED) and not any("gate_exps" in tensor for tensor in tensors)


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], None]) -> None:
    """Let files state something else."""
    real = nemotron_h.export_keys

    def stated(config: object) -> dict:
        keys = real(config)
        change(keys)
        return keys

    monkeypatch.setattr(nemotron_h, "export_keys", stated)


@pytest.mark.parametrize(("change", "said"), [
    (lambda keys: keys.update({"feed_forward_length": np.array([0, 32, 0], np.int32)}),
     "feed_forward_length that is not a number for each"),
    (lambda keys: keys.update({"feed_forward_length": 32}), "feed_forward_length that is not a number for each of 8 blocks"),
    (lambda keys: keys.update({"attention.head_count_kv": np.array([0, 0, 0, 2, 2, 2, 0, 0], np.int32)}), "heads and a width of block 4"),
    (lambda keys: keys.update({"attention.head_count_kv": np.array([0, 0, 0, 2, 0, 1, 0, 0], np.int32)}), r"\[1, 2\], which differ by"),
    (lambda keys: keys.update({"attention.head_count_kv": np.array([0, 0, 0, -2, 0, 2, 0, 0], np.int32)}), "not a number for each"),
    (lambda keys: keys.update({"ssm.inner_size": 191}), "inner_size 191 for 6 heads"),
    (lambda keys: keys.update({"ssm.time_step_rank": 0}), "inner_size 192 for 0 heads"),
    (lambda keys: keys.update({"ssm.group_count": 4}), "not a multiple of"),
    (lambda keys: keys.update({"expert_gating_func": 1}), "expert_gating_func is not 2"),
    (lambda keys: keys.update({"moe_latent_size": 1024}), "moe_latent_size"),
    (lambda keys: keys.update({"nextn_predict_layers": 8}), "nextn_predict_layers 8 of 8 blocks"),
    (lambda keys: keys.update({"expert_shared_count": 2}), "expert_shared_count"),
    (lambda keys: keys.pop("ssm.state_size"), "lacks key nemotron_h_moe.ssm.state_size")])
def test_what_a_file_cannot_mean_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, said: str) -> None:
    changed(monkeypatch, change)
    path = exported(model(MIXED, tmp_path / "source"), tmp_path / "m.gguf")
    with pytest.raises(EffllmError, match=said) as caught:
        read_config(path)
    assert "\n" not in caught.value.message and caught.value.hint


def test_blocks_that_guess_ahead_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp counts one in, with attention and experts, behind the last."""
    source = model(MIXED, tmp_path / "source")
    expected = read_config(exported(source, tmp_path / "without.gguf"), strict=True)
    changed(monkeypatch, lambda keys: keys.update({"block_count": 9, "nextn_predict_layers": 1, **{
        key: np.append(keys[key], count).astype(np.int32) for key, count in zip(nemotron_h.PER_BLOCK_KEYS, (2, 32))}}))
    path = exported(source, tmp_path / "m.gguf")
    config = read_config(path, strict=True)
    assert config == expected
    assert np.array_equal(scores(path, range(5, 40)), scores(tmp_path / "without.gguf", range(5, 40)))
    assert nemotron_h.is_mtp("blk.8.nextn.eh_proj.weight", config) and not nemotron_h.is_mtp("blk.7.ssm_out.weight", config)
    assert not nemotron_h.is_mtp("output_norm.weight", config)


def test_experts_that_read_fewer_numbers_are_written(tmp_path: Path) -> None:
    reader = Reader(exported(model(NARROWED, tmp_path / "source"), tmp_path / "m.gguf"))
    shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors}
    assert reader.fields["nemotron_h_moe.moe_latent_size"].contents() == 32
    assert shapes["blk.1.ffn_latent_down.weight"] == (64, 32) and shapes["blk.1.ffn_latent_up.weight"] == (32, 64)
    assert shapes["blk.1.ffn_up_exps.weight"][0] == 32 and shapes["blk.1.ffn_up_shexp.weight"][0] == 64


def test_a_file_of_ollama_leaves_it_to_be_seen_how_many_numbers_experts_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(NARROWED, tmp_path / "source")
    expected = read_config(exported(source, tmp_path / "usual.gguf"), strict=True)
    for role, name in (("experts_in", "ffn_latent_in"), ("experts_out", "ffn_latent_out")):
        monkeypatch.setitem(nemotron_h.ROLES, role, name)
    changed(monkeypatch, lambda keys: keys.pop("moe_latent_size"))
    path = exported(source, tmp_path / "m.gguf")
    assert "blk.1.ffn_latent_in.weight" in {tensor.name for tensor in Reader(path).tensors}
    config = read_config(path, strict=True)
    assert config == expected and nemotron_h.is_mtp("mtp.layers.0.norm.weight", config)
    assert np.array_equal(scores(path, range(5, 40)), scores(tmp_path / "usual.gguf", range(5, 40)))


@pytest.mark.parametrize(("name", "changes", "said"), [
    (MIXED, {"n_group": 2, "topk_group": 1, "n_routed_experts": 12}, "chooses experts by groups"),
    (MIXED, {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "MLPs beside experts"),
    (DENSE, {"layers_block_type": ["attention", "mlp"]}, "no state space"), (DENSE, {"mlp_hidden_act": "silu"}, "relu2 is meant")])
def test_what_llamacpp_would_run_otherwise_is_not_written(tmp_path: Path, name: str, changes: dict, said: str) -> None:
    with pytest.raises(EffllmError, match=said):
        exported(model(name, tmp_path / "source", **changes), tmp_path / "m.gguf")


def test_experts_come_from_a_file_of_blocks(tmp_path: Path) -> None:
    """Each as it is needed, with the bits of all in memory."""
    path = exported(model(MIXED, tmp_path / "source"), tmp_path / "m.gguf", "Q8_0")
    assert np.array_equal(paged(path, 24), resident(path))
    ids = list(range(5, 60))
    expected = scores(tmp_path / "source", ids)
    assert np.abs(scores(path, ids) - expected).mean() < 0.03 * np.abs(expected).max()
