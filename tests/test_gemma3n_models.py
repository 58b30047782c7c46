"""Gemma 3n quantized, streamed from disk, with spilled and packed caches, on two devices and under calibration: the same model
everywhere."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import assert_close, oracle, text, written
from family_sizes import GEMMA_3N, Case
from quantization_checks import assert_calibration_is_a_pass
from safetensors.torch import load_file, save_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from streamed_models import streaming

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.threads import ThreadPool
from effllm.quant.methods import Layout, smooth
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats
from effllm.quant.weight import Weight, to_f32
from effllm.runtime.calibrate import LayerStats, built_in_text, calibrate, calibration_ids
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.planning.devices import gpu_nbytes
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container
from effllm.runtime.tensors import check_tensors
from effllm.runtime.workspace_dims import dims

WIDE = {**GEMMA_3N, "hidden_size": 128, "intermediate_size": [384, 384, 352, 384, 416, 384], "hidden_size_per_layer_input": 32,
        "vocab_size": 384, "vocab_size_per_layer_input": 370, "laurel_rank": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, and beside it in 4 bits."""
    made = tmp_path_factory.mktemp("gemma3n") / "model"
    saved(Case("gemma3n_text", WIDE, dtype="bfloat16"), made)
    run(made, low(made), options("4bit"))
    return made


def low(folder: Path) -> Path:
    return folder.with_name("4bit")


def logits(engine: Engine, prompt: int = 300, answer: int = 12) -> np.ndarray:
    """Of a prompt in chunks, then token by token, then few at once."""
    ids = np.random.default_rng(7).integers(0, engine.config.vocab_size, prompt + answer + 6).tolist()
    try:
        rows = [found.copy() for _, found in engine.score(ids[:prompt])]
        rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
        rows.append(engine.forward_logits(ids[prompt + answer :]).copy())
        return np.concatenate(rows)
    finally:
        engine.close()


def resident(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(**{"device": "cpu", "ctx": 384, "kv": "16bit", **asked})))[-1]


def test_four_bits_mean_what_they_say(folder, tmp_path):
    """transformers with the weights that the codes mean; what stays as it is stored does."""
    config, container = read_config(low(folder)), read_container(low(folder))
    with open_store(low(folder)) as store:
        tensors = check_tensors(config, store, container)
        model = written(Case("gemma3n_text", WIDE), tmp_path / "plain")
        state, kept = model.state_dict(), set()
        for roles in tensors.values():
            for role, tensor in roles.items():
                raw = store.read(tensor.info)
                if tensor.spec.is_raw:
                    values = to_f32(raw.view(np.uint16), tensor.spec.scheme)
                    kept |= {role} if len(tensor.shape) == 2 else set()
                else:
                    values = Weight.low_bit(tensor.spec, tensor.shape, raw).to_f32()
                state[tensor.name] = torch.from_numpy(values.reshape(tensor.shape).copy())
    assert kept == {"stream_router", "predict", "correct"}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    for module in (each for each in model.modules() if hasattr(each, "embed_scale")):
        module.embed_scale = module.embed_scale.to(torch.bfloat16).float()
    ids = text(model, 200)
    engine = resident(low(folder), kv="32bit", exact=True)
    ours = np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    engine.close()
    assert_close(ours, oracle(model, ids))


@pytest.mark.parametrize("bits", ["model", "4bit"])
def test_weights_from_the_disk_give_the_same_bits(bits, folder):
    """Of the table of what layers are given rows alone are read, as of Gemma 4's."""
    whole = logits(resident(folder.with_name(bits)))
    engine = streaming(folder.with_name(bits), keep=3, ctx=384, kv="16bit")
    parts = engine.model.streamed.parts
    assert {role for role, tensor in engine.model.tensors["outer"].items() if tensor.name in parts.tables} == {"embed", "layer_embed"}
    streamed = {role for role, tensor in engine.model.tensors[0].items() if tensor.name in parts.slices}
    assert {"gate", "up", *(("low_in", "low_out") if bits == "model" else ())} <= streamed
    assert np.array_equal(logits(engine), whole)


@pytest.mark.parametrize("bits", ["model", "4bit"])
def test_threads_change_no_bit(bits, folder):
    one, three = (logits(resident(folder.with_name(bits), threads=threads)) for threads in (1, 3))
    assert np.array_equal(one, three)


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
def test_pages_on_the_disk_give_the_same_answer(kv, folder, tmp_path):
    asked = {"kv": kv, "ctx": 640}
    engine = resident(folder, **asked)
    cache, placement = engine.cache, engine.prepared.placement
    assert len(cache.layouts) == 4 == len(engine.config.attention_layers)
    assert placement.kv_bytes == sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes
    whole = logits(engine, prompt=560)
    prepared = prepare(folder, EngineOptions(device="cpu", spill_dir=str(tmp_path), **asked))
    spilled = Engine(replace(prepared, placement=replace(prepared.placement, kv_pages=1)))
    list(spilled.model.load())
    pool, ours = spilled.cache.pool, logits(spilled, prompt=560)
    assert pool.traffic.nbytes > 0 and np.abs(ours - whole).max() < 1e-3 * np.abs(whole).max()


def test_a_gpu_takes_streams_of_the_host(folder):
    """The last layers on torch: streams cross, and what attends crosses to the keys and values of the host."""
    prepared = prepare(folder, EngineOptions(device="cpu", kv="16bit", ctx=384))
    config = prepared.config
    host = CpuOps(ThreadPool(1), dims(config, 384, prepared.shape.chunk, LOGIT_ROWS), default_registry(exact=True))
    placement = replace(prepared.placement, devices=("cpu",) * 3 + ("cuda",) * 3)
    engine = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    list(engine.model.load())
    assert config.kv_sources == (0, 1, 2, 3, 2, 3)
    coefficients = [engine.model.tensors[3][role] for role in ("stream_router", "predict", "correct")]
    assert all(gpu_nbytes(each) >= 4 * np.prod(each.shape) and not each.is_matrix for each in coefficients)
    whole = logits(resident(folder, exact=True))
    ours = logits(engine)
    assert np.abs(ours - whole).max() < 1e-3 * np.abs(whole).max()


def test_calibration_is_a_pass_of_the_model(folder):
    assert "embed" in assert_calibration_is_a_pass(folder, unseen=set())[-1].roles


@pytest.mark.slow
def test_gptq_rounds_by_what_it_saw(tmp_path):
    """A method that asks for statistics finds those of each matrix of a layer, and outside the layers does without."""
    source = tmp_path / "model"
    saved(Case("gemma3n_text", {**WIDE, "vocab_size": 4096}, dtype="bfloat16"), source)
    with_words_of_fable(source)
    run(source, tmp_path / "rtn", options("4bit"))
    run(source, tmp_path / "gptq", options("4bit", method="gptq", calibration_tokens=1024))
    config = read_config(source)
    ids = calibration_ids(source, config, built_in_text(), 1024)
    stats = [item for item in calibrate(source, ids, threads=1) if isinstance(item, LayerStats)]
    damage = {}
    for method in ("model", "rtn", "gptq"):
        with open_store(folder := tmp_path / method) as store:
            tensors = check_tensors(config, store, read_container(folder))
            for layer, found in enumerate(stats[:-1]):
                for role, own in found.roles.items():
                    tensor = tensors[layer][role]
                    raw = store.read(tensor.info)
                    value = to_f32(raw.view(np.uint16), "bf16").reshape(tensor.shape) if tensor.spec.is_raw else \
                        Weight.low_bit(tensor.spec, tensor.shape, raw).to_f32()
                    lost = value - damage.setdefault(("model", layer, role), value)
                    if method != "model":
                        damage[method, layer, role] = float(np.einsum("ij,jk,ik->", lost, own.hessian, lost))
    for layer, found in enumerate(stats[:-1]):
        assert all(damage["gptq", layer, role] < damage["rtn", layer, role] for role in found.roles)


def test_smoothing_moves_nothing_out_of_the_norm_that_a_branch_adds_to():
    """What attention reads is also what the branch beside it is added to."""
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32), "gate": (24, 16), "up": (24, 16), "down": (16, 24),
              "low_in": (8, 16), "low_out": (16, 8), "input_norm": (16,), "post_norm": (16,)}
    tensors = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}
    matrices = [role for role, shape in shapes.items() if len(shape) == 2]
    stats = {role: Stats(64, None, np.exp(rng.uniform(-3, 3, shapes[role][1])).astype(np.float32)) for role in matrices}
    specs = {role: QuantSpec.parse("4bit") for role in matrices}
    found = smooth.equalise(tensors, stats, specs, Layout(4, 2, 8, stored="f32", values_normed=True))
    assert found.keys() == {"post_norm", "gate", "up", "down"}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_it_is_found_in_a_checkpoint_that_takes_images_and_audio(prefix, folder, tmp_path):
    """As it is published: beside towers, with keys and values of layers that have none of their own."""
    raw = json.loads((folder / "config.json").read_text())
    inner = {key: value for key, value in raw.items() if key != "architectures"}
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": inner, "vision_config": {},
             "audio_config": {}, "eos_token_id": [1, 106], "dtype": "bfloat16", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    kept = {f"{prefix}layers.5.self_attn.{name}.weight": torch.ones(4) for name in ("k_proj", "v_proj", "k_norm")}
    kept |= {"model.vision_tower.x": torch.ones(2), "model.audio_tower.x": torch.ones(2), "model.embed_audio.hard.weight": torch.ones(2)}
    save_file(kept | {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    engine = resident(tmp_path)
    assert engine.config.eos_token_ids == (1, 106)
    assert np.array_equal(logits(engine, 60), logits(resident(folder), 60))
