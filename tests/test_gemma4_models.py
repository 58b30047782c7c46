"""Gemma 4 quantized, streamed from disk, with spilled and packed caches, on two devices and under calibration: the same model
everywhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import options, run
from family_models import GEMMA_4, GEMMA_EXPERTS, KEYS_AS_VALUES, Case, assert_close, oracle, text, written
from quantization_checks import assert_calibration_is_a_pass
from saved_models import saved
from streamed_models import paging, streaming

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.quant.kv import codec
from effllm.quant.methods import Layout, smooth
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats
from effllm.quant.weight import Weight, to_f32
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.planning.forecast import work
from effllm.runtime.planning.plan_request import LOGIT_ROWS
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.source import open_store
from effllm.runtime.stores.container import read_container
from effllm.runtime.tensors import check_tensors
from effllm.runtime.weights import stream_layout
from effllm.runtime.workspace_dims import dims

WIDE = {"hidden_size": 128, "intermediate_size": 192, "hidden_size_per_layer_input": 32, "vocab_size": 384, "max_position_embeddings": 1024}
KINDS = {"small": {**GEMMA_4, **WIDE, "vocab_size_per_layer_input": 384},
         "large": {**GEMMA_4, **WIDE, **KEYS_AS_VALUES}, "mixture": {**GEMMA_4, **WIDE, **KEYS_AS_VALUES, **GEMMA_EXPERTS}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind a folder in bfloat16 and one in 4 bits."""
    base, found = tmp_path_factory.mktemp("gemma4"), {}
    for kind, changes in KINDS.items():
        saved(Case("gemma4_text", changes, dtype="bfloat16"), base / kind)
        run(base / kind, base / f"{kind}-4bit", options("4bit"))
        found |= {kind: base / kind, f"{kind}-4bit": base / f"{kind}-4bit"}
    return found


def logits(engine: Engine, prompt: int = 300, answer: int = 12) -> np.ndarray:
    """Of a prompt in chunks, then token by token, then few at once."""
    ids = np.random.default_rng(7).integers(0, engine.config.vocab_size, prompt + answer + 6).tolist()
    engine.reset()
    rows = [found.copy() for _, found in engine.score(ids[:prompt])]
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
    rows.append(engine.forward_logits(ids[prompt + answer :]).copy())
    return np.concatenate(rows)


def resident(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(**{"device": "cpu", "ctx": 384, "kv": "16bit", **asked})))[-1]


def found_by(engine: Engine, **of: int) -> np.ndarray:
    try:
        return logits(engine, **of)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_four_bits_mean_what_they_say(kind, folders, tmp_path):
    """transformers with the weights that the codes mean."""
    config = read_config(folders[kind])
    with open_store(folders[f"{kind}-4bit"]) as store:
        tensors = check_tensors(config, store, read_container(folders[f"{kind}-4bit"]))
        model = written(Case("gemma4_text", KINDS[kind]), tmp_path / "plain")
        state = model.state_dict()
        joint: dict[str, list[torch.Tensor]] = {}
        for roles in tensors.values():
            for tensor in roles.values():
                raw = store.read(tensor.info)
                values = to_f32(raw.view(np.uint16), tensor.spec.scheme) if tensor.spec.is_raw else None
                if values is None:
                    values = Weight.low_bit(tensor.spec, tensor.shape, raw).to_f32()
                value = torch.from_numpy(values.reshape(tensor.shape).copy())
                if ".experts." in tensor.name:
                    place, _, rest = tensor.name.partition(".experts.")
                    joint.setdefault(f"{place}.experts.{'down_proj' if '.down_' in rest else 'gate_up_proj'}", []).append(value)
                else:
                    state[tensor.name] = value.reshape(state[tensor.name].shape)
        for name, parts in joint.items():
            each = [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)] if name.endswith("gate_up_proj") else parts
            state[name] = torch.stack(each)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    for module in (each for each in model.modules() if hasattr(each, "embed_scale")):
        module.embed_scale = module.embed_scale.to(torch.bfloat16).float()
    ids = text(model, 200)
    engine = resident(folders[f"{kind}-4bit"], kv="32bit", exact=True)
    ours = np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    engine.close()
    assert_close(ours, oracle(model, ids))


@pytest.mark.parametrize("bits", ["", "-4bit"])
@pytest.mark.parametrize("kind", ["small", "large"])
def test_weights_from_the_disk_give_the_same_bits(kind, bits, folders, monkeypatch):
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    folder = folders[f"{kind}{bits}"]
    whole = found_by(resident(folder))
    engine = streaming(folder, keep=3, ctx=384, kv="16bit")
    tables = engine.model.streamed.parts.tables
    held = {role for role, tensor in engine.model.tensors["outer"].items() if tensor.name in tables}
    assert held == ({"embed", "layer_embed"} if kind == "small" else {"embed"})
    assert np.array_equal(found_by(engine), whole)


@pytest.mark.parametrize("bits", ["", "-4bit"])
def test_experts_from_the_disk_give_the_same_bits(bits, folders):
    folder = folders[f"mixture{bits}"]
    whole = found_by(resident(folder))
    engine = paging(folder, 12, ctx=384, kv="16bit")
    assert np.array_equal(logits(engine), whole)
    assert 0 < engine.model.pager.stats.hits < engine.model.pager.stats.uses
    engine.close()


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_count_the_cache_to_the_byte(kind, kv, folders):
    engine = resident(folders[kind], kv=kv)
    config, cache, placement = engine.config, engine.cache, engine.prepared.placement
    owners = 4  # of their own keys and values, in all three kinds
    assert len(cache.slots.memory) == len(cache.layouts) == owners == len(config.attention_layers)
    assert placement.kv_bytes == sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes
    found_by(engine)


def test_a_forecast_counts_what_every_layer_reads(folders):
    """By its own heads, and those too that read another's keys and values."""
    prepared = prepare(folders["small"], EngineOptions(device="cpu", kv="16bit", ctx=384))
    counted = work(prepared, check_tensors(prepared.config, prepared.store))
    narrow, wide = (codec("16bit").layout(2, size).layer_page_nbytes // PAGE for size in (16, 32))
    assert counted.kv_bytes_by_layer == (narrow, wide) * 3 and counted.kv_bytes == 3 * (narrow + wide) and narrow < wide
    assert counted.attention_widths == (2 * 4 * 16, 2 * 4 * 32) * 3 and counted.windows == (40, None) * 3 and counted.layers == 6


@pytest.mark.parametrize("kv", ["16bit", "4bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_on_the_disk_give_the_same_answer(kind, kv, folders, tmp_path):
    asked = {"kv": kv, "ctx": 640}
    whole = found_by(resident(folders[kind], **asked), prompt=560)
    prepared = prepare(folders[kind], EngineOptions(device="cpu", spill_dir=str(tmp_path), **asked))
    spilled = Engine(replace(prepared, placement=replace(prepared.placement, kv_pages=1)))
    list(spilled.model.load())
    ours = logits(spilled, prompt=560)
    assert spilled.cache.pool.traffic.nbytes > 0 and np.abs(ours - whole).max() < 1e-3 * np.abs(whole).max()
    spilled.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forgotten_leaves_no_trace(kind, folders):
    engine = resident(folders[kind], kv="32bit")
    ids = np.random.default_rng(3).integers(0, 384, 330).tolist()
    list(engine.prefill(ids[:320]))
    want = engine.forward_logits(ids[320:321])[0].copy()
    engine.reset()
    list(engine.prefill([*ids[:250], *ids[:40]]))  # another end, then back
    assert engine.cache.truncate(250) == 250
    engine.tokens[250:] = []
    list(engine.prefill(ids[:320]))
    assert np.array_equal(engine.forward_logits(ids[320:321])[0], want)
    engine.close()


def test_a_gpu_reads_keys_and_values_of_the_host(folders):
    """The last layers, on torch, have none of their own: what attends crosses to where they lie."""
    prepared = prepare(folders["small"], EngineOptions(device="cpu", kv="16bit", ctx=384))
    config = prepared.config
    host = CpuOps(ThreadPool(1), dims(config, 384, prepared.shape.chunk, LOGIT_ROWS), default_registry(exact=True))
    placement = replace(prepared.placement, devices=("cpu",) * 3 + ("cuda",) * 3)
    engine = Engine(replace(prepared, placement=placement), {"cpu": host, "cuda": TorchOps("cpu")})
    list(engine.model.load())
    assert config.kv_sources == (0, 1, 2, 3, 2, 3)
    whole = found_by(resident(folders["small"], exact=True))
    ours = found_by(engine)
    assert np.abs(ours - whole).max() < 1e-3 * np.abs(whole).max()


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_is_a_pass_of_the_model(kind, folders):
    assert_calibration_is_a_pass(folders[kind], unseen={"router"})


def test_smoothing_moves_nothing_into_what_makes_values():
    """They are normed, which would undo it."""
    rng = np.random.default_rng(0)
    tensors = {role: rng.standard_normal(shape).astype(np.float32)
               for role, shape in {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32), "input_norm": (16,)}.items()}
    stats = {role: Stats(64, None, np.exp(rng.uniform(-3, 3, 32 if role == "o" else 16)).astype(np.float32)) for role in "qkvo"}
    specs = {role: QuantSpec.parse("4bit") for role in "qkvo"}
    for normed, changed in ((False, {"input_norm", "q", "k", "v", "o"}), (True, {"input_norm", "q", "k", "v"})):
        layout = Layout(4, 2, 8, stored="f32", values_normed=normed)
        found = smooth.equalise(tensors, stats, specs, layout)
        assert found.keys() == changed
        ratio = found["v"] / tensors["v"]
        assert (np.ptp(ratio, 0).max() < 1e-3) == normed  # columns alone, by the norm before them
