"""Layers applied several times per token: stored once in memory and in files, counted as often as they are read, and the same bits
streamed, quantized, memory-mapped, by table lookup and with adapters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from conversions import options, run
from family_models import CASES
from lora_adapters import adapter, peft, random
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from streamed_models import streaming

from effllm.offload.placement import choose_pinned, first_copies, least_budget
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.planning.expected_store import ExpectedStore
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.source import open_store
from effllm.runtime.tensors import check_tensors, parameters
from effllm.runtime.weights import stream_layout
from effllm.runtime.weights.weight_tiers import weight_tiers

IDS = np.random.default_rng(7).integers(0, 300, 150).tolist()
ROUNDS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loops") / "model"
    case = CASES["ouro"]
    saved(replace(case, changes=case.changes | {"vocab_size": 4096, "initializer_range": 0.08}), made)
    with_words_of_fable(made)
    return made


def logits(engine: object) -> np.ndarray:
    engine.reset()
    rows = [found.copy() for _, found in engine.score(IDS[:120])]
    rows += [engine.forward_logits(IDS[at : at + 1]).copy() for at in range(120, 130)]
    engine.close()
    return np.concatenate(rows)


def resident(folder: Path, **asked: object) -> np.ndarray:
    return logits(list(open_engine(folder, EngineOptions(device="cpu", ctx=256, **asked)))[-1])


def test_they_are_there_once_and_read_several_times(folder: Path) -> None:
    config = read_config(folder)
    assert (config.loops, config.stored_layers, config.num_hidden_layers) == (ROUNDS, 2, 2 * ROUNDS)
    *_, engine = open_engine(folder, EngineOptions(device="cpu", ctx=256))
    with open_store(folder) as store:
        held = {name: info.nbytes for name, info in store.tensors.items() if "early_exit" not in name}
        tensors = check_tensors(config, store)
    layers = sum(nbytes for name, nbytes in held.items() if ".layers." in name)
    again = (ROUNDS - 1) * (layers + held["model.norm.weight"])
    assert engine.model.nbytes == sum(held.values()) == 4 * parameters(tensors)
    assert sum(held.values()) <= engine.model.pager.nbytes < sum(held.values()) + layers
    assert engine.model.bytes_per_pass == sum(held.values()) - held["model.embed_tokens.weight"] + again
    with engine.model.layer(0) as first, engine.model.layer(2) as second:
        assert first.q.weight.parts["data"].ctypes.data == second.q.weight.parts["data"].ctypes.data
        assert first.entry_norm is None and second.entry_norm is not None
    engine.close()
    prepared = prepare(folder, EngineOptions(device="cpu", ctx=256))
    assert weight_tiers(prepared).memory == sum(held.values())
    prepared.store.close()
    assert ExpectedStore(config).nbytes == sum(held.values())


def test_from_the_disk_they_are_read_every_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    expected = resident(folder)
    for keep in (0, 3):
        engine = streaming(folder, ctx=256, keep=keep)
        matrices = {name for name in engine.model.streamed.parts.slices if ".layers.1.mlp.up_proj" in name}
        assert len(matrices) == ROUNDS
        assert np.array_equal(logits(engine), expected)


def test_what_stays_of_them_stays_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    with open_store(folder) as store:
        cut = stream_layout.plan_layout(check_tensors(read_config(folder), store), store)
    once = sum(cut.sizes[index] for index in first_copies(cut.same))
    assert len(cut.parts) > len(first_copies(cut.same)) > 4 and once < sum(cut.sizes)
    assert choose_pinned(cut.sizes, once, copy_of=cut.same).pinned_nbytes == once and least_budget(cut.sizes, cut.same) < once
    found = choose_pinned(cut.sizes, once * 3 // 4, 4 * max(cut.sizes), cut.same)
    away = {cut.same[index] for index in found.streamed}
    assert found.streamed and not away & {cut.same[index] for index in found.pinned} and found.nbytes <= once * 3 // 4
    assert found.pinned_nbytes == once - sum(cut.sizes[index] for index in away)
    assert found.streamed_nbytes == sum(cut.sizes[index] for index in found.streamed) > once - found.pinned_nbytes
    engine = streaming(folder, ctx=256, keep=1)
    assert sum(memory.nbytes for memory in engine.model.pager.resident_arrays()) < 1.1 * once
    assert np.array_equal(logits(engine), resident(folder))


def test_mapped_files_and_table_lookup_change_nothing(folder: Path, tmp_path: Path) -> None:
    assert np.array_equal(resident(folder, load="mmap"), resident(folder))
    run(folder, tmp_path / "small", options("affine4:32"))
    *_, engine = open_engine(tmp_path / "small", EngineOptions(device="cpu", ctx=256, kernel="lut"))
    assert engine.model.lut_tensors
    engine.close()
    assert np.array_equal(resident(tmp_path / "small", kernel="lut"), resident(tmp_path / "small", kernel="dot"))


@pytest.mark.parametrize("method", ["rtn", "gptq", "smooth"])
def test_a_quantized_folder_holds_them_once(folder: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "PART_NBYTES", 24 << 10)
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 512)
    run(folder, tmp_path / "small", options("8bit", method=method, **({} if method == "rtn" else {"calibration_tokens": 512})))
    with open_store(tmp_path / "small") as store:
        names = {name for name in store.tensors if "layers" in name}
    assert {name.split(".")[2] for name in names} == {"0", "1"}
    small, whole = resident(tmp_path / "small"), resident(folder)
    assert np.abs(small - whole).mean() < 0.1 * np.abs(whole).max()
    assert np.array_equal(logits(streaming(tmp_path / "small", ctx=256)), small)


def test_an_adapter_is_beside_every_round(folder: Path, tmp_path: Path) -> None:
    """As if it had been added to the weights."""
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.self_attn.o_proj"
    a, b = 0.1 * random(4, 64), 0.1 * random(64, 4, seed=1)
    lora = adapter(tmp_path / "lora", peft({name: (a, b)}))
    merged = tmp_path / "merged"
    merged.mkdir()
    for each in folder.iterdir():
        (merged / each.name).write_bytes(each.read_bytes())
    tensors = load_file(merged / "model.safetensors")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + torch.matmul(b, a) * 10 / 4
    save_file(tensors, merged / "model.safetensors")
    beside, within, without = resident(folder, lora=(str(lora),)), resident(merged), resident(folder)
    assert np.abs(beside - within).max() < 1e-2 * np.abs(within).max() < np.abs(without - within).max()


# As published, Ouro 1.4B's as far as it is known.
NANBEIGE = {
    "architectures": ["NanbeigeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_nanbeige.NanbeigeConfig", "AutoModel": "modeling_nanbeige.NanbeigeModel",
        "AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM"}, "bos_token_id": 166_100, "eos_token_id": 166_101, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 10_752, "kv_channels": 128, "loop_loss_weights": [],
    "max_position_embeddings": 262_144, "model_type": "nanbeige", "num_attention_heads": 48, "num_hidden_layers": 22,
    "num_key_value_heads": 8, "num_loops": 2, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 70_000_000, "skip_loop_final_norm": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 166_144}
OURO = {
    "architectures": ["OuroForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}, "bos_token_id": 0,
    "early_exit_threshold": 1.0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24, "max_position_embeddings": 65_536, "max_window_layers": 24, "model_type": "ouro",
    "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1_000_000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "total_ut_steps": 4,
    "use_cache": True, "use_sliding_window": False, "vocab_size": 49_152}


def test_published_configs_are_known_to_the_last_key() -> None:
    nanbeige, ouro = (parse_config(raw, strict=True) for raw in (NANBEIGE, OURO))
    assert nanbeige.warnings == ouro.warnings == ()
    assert (nanbeige.num_hidden_layers, nanbeige.stored_layers, nanbeige.head_dim, nanbeige.rope.theta) == (44, 22, 128, 7e7)
    assert (ouro.num_hidden_layers, ouro.stored_layers, len(ouro.ropes), ouro.eos_token_ids) == (96, 24, 96, (2,))
    assert parse_config({key: value for key, value in OURO.items() if key != "total_ut_steps"}).loops == 4
    once = parse_config({key: value for key, value in NANBEIGE.items() if key != "num_loops"}, strict=True)
    assert (once.loops, once.num_hidden_layers) == (1, 22)


@pytest.mark.parametrize(("raw", "key", "value"), [
    (NANBEIGE, "skip_loop_final_norm", True), (NANBEIGE, "loop_loss_weights", [0.5]), (NANBEIGE, "qk_layernorm", True),
    (NANBEIGE, "emb_neighbor_num", 3), (NANBEIGE, "enable_mhc", True), (NANBEIGE, "kv_channels", 64), (NANBEIGE, "num_loops", 0),
    (NANBEIGE, "auto_map", {"AutoModel": "modeling_other.Other"}), (OURO, "early_exit_threshold", 0.9), (OURO, "early_exit_step", 2),
    (OURO, "use_sliding_window", True), (OURO, "sliding_window", 4096), (OURO, "total_ut_steps", "4")])
def test_what_is_not_known_is_named(raw: dict[str, object], key: str, value: object) -> None:
    refused({**raw, key: value}, key)


def test_rounds_have_a_limit() -> None:
    refused({**NANBEIGE, "num_loops": 2000}, "44000 layers")
