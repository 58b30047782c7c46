"""Mixtures of experts in the whole program: quantizing with and without text, expert layout, what a pass reads, synthetic shapes."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import FABLE, check_whole, contents, options, originals, run
from safetensors.torch import save_file

from effllm import UsageError
from effllm.kernels.warm import compiled_functions
from effllm.offload.checkpoint import TensorStore
from effllm.offload.shards import PAD
from effllm.quant.codes import dequantize
from effllm.quant.pack import unpack
from effllm.runtime import families
from effllm.runtime.calibrate import LayerStats, built_in_text, calibrate, calibration_ids, normalised, windows
from effllm.runtime.config import read_config
from effllm.runtime.conversion.bit_search import units
from effllm.runtime.conversion.calibration_stats import LEAST_VISITS
from effllm.runtime.conversion.convert_plan import OTHER, plan_conversion
from effllm.runtime.engine import Engine, open_engine, open_prepared
from effllm.runtime.events import Notice
from effllm.runtime.measuring.bench import BenchOptions, BenchRow, bench, prepare_synthetic
from effllm.runtime.measuring.synthetic import synthetic_config
from effllm.runtime.model import Model
from effllm.runtime.planning.needed_kernels import Needs, folder_kinds, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.stores.container import read_container

EXPERTS, TOP, HIDDEN, WIDTH = 6, 2, 64, 96


def mixture_model(folder: Path) -> Path:
    """A random Qwen 3 mixture in bfloat16 with the packaged model's tokenizer; its first layer is dense."""
    folder.mkdir()
    for path in FABLE.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    fable = json.loads((FABLE / "config.json").read_text())
    config = {"model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 80, "moe_intermediate_size": WIDTH,
              "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS,
              "num_experts_per_tok": TOP, "norm_topk_prob": True, "mlp_only_layers": [0], "max_position_embeddings": 512,
              "vocab_size": fable["vocab_size"], "bos_token_id": fable.get("bos_token_id"), "eos_token_id": fable.get("eos_token_id"),
              "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    parsed, family, rng = read_config(folder, strict=True), families.get("qwen3_moe"), np.random.default_rng(7)
    tensors = {}
    for rules in (family.outer_tensors(parsed), *(family.layer_tensors(parsed, layer) for layer in range(3))):
        for rule in rules.values():
            values = rng.standard_normal(rule.shape, np.float32)
            values = 1 + 0.3 * values if len(rule.shape) == 1 else values / rule.shape[1] ** 0.5
            tensors[rule.name] = torch.from_numpy(values.astype(np.float32)).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_model(tmp_path_factory.mktemp("mixture") / "model")


def opened(folder: Path, **more: object) -> Engine:
    *_, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=512, **more))
    return engine


def scores(folder: Path, **more: object) -> np.ndarray:
    engine = opened(folder, **more)
    try:
        return np.concatenate([part.copy() for _, part in engine.score(list(range(5, 105)))])
    finally:
        engine.close()


# ---- conversion


@pytest.mark.parametrize("spec", ["4bit", "8bit", "2bit"])
def test_a_mixture_is_quantized_and_runs(source: Path, tmp_path: Path, spec: str) -> None:
    made, _ = run(source, tmp_path / "out", options(spec))
    container = check_whole(tmp_path / "out", source)
    for name, stored in container.tensors.items():
        assert stored.spec.is_raw == (name.endswith(".mlp.gate.weight") or "norm" in name), name
    classes = {row.size.name: row.size for row in made.classes}
    assert classes["gate"].tensors == classes["down"].tensors == 1 + 2 * EXPERTS and classes[OTHER].tensors == 3 * 4 + 2 + 1
    before, after = scores(source), scores(tmp_path / "out")
    assert np.isfinite(after).all()
    error = np.square(after - before).sum() / np.square(before).sum()
    assert {"8bit": 0, "4bit": 1e-4, "2bit": 1e-2}[spec] < error < {"8bit": 1e-2, "4bit": 0.5, "2bit": 3}[spec]


def test_a_rule_may_name_experts(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", options("4bit", rules=[r"experts\.[01]\.=8bit", r"experts\.2\.up=bf16"]))
    specs = {name: stored.spec for name, stored in check_whole(tmp_path / "out", source).tensors.items() if ".experts." in name}
    assert {name: spec.bits for name, spec in specs.items()} == {
        name: 16 if "experts.2.up" in name else 8 if re.search(r"experts\.[01]\.", name) else 4 for name in specs}
    assert np.isfinite(scores(tmp_path / "out")).all()  # a gate of 4 bits beside an up of 16 is not one job


def test_an_expert_is_one_record(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    with TensorStore.open(tmp_path / "out") as store:
        for layer in (1, 2):
            ends = []
            for expert in range(EXPERTS):
                parts = [store.tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")]
                assert len({part.file for part in parts}) == 1 and parts[0].offset % 4096 == 0
                for here, there in zip(parts, parts[1:]):
                    assert here.offset + here.nbytes <= there.offset < here.offset + here.nbytes + 64  # nothing but a few bytes between
                ends.append((parts[0].offset, parts[-1].offset + parts[-1].nbytes))
            assert ends == sorted(ends)
            record = range(ends[0][0], ends[-1][1])
            inside = [name for name, info in store.tensors.items() if info.offset in record and not name.startswith(PAD)]
            assert len(inside) == 3 * EXPERTS and all(f"layers.{layer}.mlp.experts" in name for name in inside)


def test_what_the_table_and_the_search_count_together(source: Path) -> None:
    plan = plan_conversion(source, options("4bit").recipe)
    with plan.store:
        rows = {row.name: row for row in plan.rows()}
        assert rows["up"].tensors == 1 + 2 * EXPERTS and rows["up"].weights == (2 * EXPERTS * WIDTH + 80) * HIDDEN
        found = units([job for job in plan.jobs if not job.spec.is_raw] * 4)  # more than are measured one by one
        assert {job.group for unit in found for job in unit.jobs} == {"q", "k", "v", "o", "gate", "up", "down", "embed"}
        assert all(len({job.group for job in unit.jobs}) == 1 for unit in found) and len(found) <= 64


# ---- calibration


def test_an_expert_is_judged_by_its_own_tokens(source: Path) -> None:
    ids = calibration_ids(source, read_config(source), built_in_text(), 1024)
    layer, found = 2, None
    for event in calibrate(source, ids, threads=2):
        if isinstance(event, LayerStats) and event.key == layer:
            found = {role: event.roles[role] for role in event.roles}
    assert set(found) == {"q", "k", "v", "o", *(families.expert_role(e, role) for e in range(EXPERTS) for role in ("gate", "up", "down"))}
    engine = opened(source, exact=True)
    entered: list[np.ndarray] = []
    hidden: dict[int, list[np.ndarray]] = {}
    rows: dict[int, list[np.ndarray]] = {}

    def tap(name: str, at: int, value: object) -> None:
        if at == layer and name == "mlp_in":
            entered.append(normalised(value, engine.model._wrapped[layer][1].post_norm))
        if at == layer and name == "visits":
            for e in range(EXPERTS):
                mine = slice(*value.offsets[e : e + 2])
                rows.setdefault(e, []).append(entered[-1][value.tokens[mine]])
                hidden.setdefault(e, []).append(value.hidden[mine].copy())

    try:
        for window in windows(ids, 512):
            engine.reset()
            engine.model.forward(window, engine.cache, tap)
    finally:
        engine.close()
    for e in range(EXPERTS):
        for role, seen in (("gate", rows), ("up", rows), ("down", hidden)):
            inputs, stats = np.concatenate(seen[e]), found[families.expert_role(e, role)]
            if len(inputs) < LEAST_VISITS:
                assert stats.tokens in (len(ids), TOP * len(ids))
                continue
            assert abs(stats.tokens - len(inputs)) <= 1  # a token on the edge may go elsewhere
            expected = inputs.T @ inputs / len(inputs)
            assert np.abs(stats.hessian - expected).max() < 0.02 * np.abs(expected).max()
    assert sum(len(np.concatenate(rows[e])) >= LEAST_VISITS for e in range(EXPERTS)) > 2


def test_an_expert_that_nobody_visits_takes_the_layers_statistics(tmp_path: Path) -> None:
    """And that is said, once."""
    lonely = mixture_model(tmp_path / "lonely")
    with TensorStore.open(lonely) as store:
        routers = {info.name: info for info in store.tensors.values() if info.name.endswith("mlp.gate.weight")}
        raw = bytearray((lonely / "model.safetensors").read_bytes())
        for info in routers.values():  # all experts alike: every token goes to the first two
            raw[info.offset : info.offset + info.nbytes] = bytes(info.nbytes)
    (lonely / "model.safetensors").write_bytes(raw)
    ids = calibration_ids(lonely, read_config(lonely), built_in_text(), 700)
    events = list(calibrate(lonely, ids, threads=2))
    layers = [event for event in events if isinstance(event, LayerStats) and event.key in (1, 2)]
    assert [layer.scarce for layer in layers] == [EXPERTS - TOP] * 2
    for layer in layers:
        assert layer.roles["experts.0.up"].tokens == layer.roles["experts.5.up"].tokens == len(ids)
        assert layer.roles["experts.5.down"].tokens == TOP * len(ids)  # every visit of the layer
        assert layer.roles["experts.5.gate"] is layer.roles["experts.4.gate"]
        with pytest.raises(KeyError):
            layer.roles[f"experts.{EXPERTS}.up"]
    said = [event.text for event in events if isinstance(event, Notice)]
    assert len(said) == 1 and f"{2 * (EXPERTS - TOP)} of {2 * EXPERTS} experts" in said[0]


@pytest.mark.slow
def test_what_text_shows_lowers_the_error_of_each_experts_outputs(source: Path, tmp_path: Path) -> None:
    """On the tokens that visit it; and the bytes are the same however many threads."""
    given = options("3bit", method="gptq", calibration_tokens=1024)
    run(source, tmp_path / "rtn", options("3bit"))
    run(source, tmp_path / "gptq", given)
    before = dict(originals(source))
    ids = calibration_ids(source, read_config(source), built_in_text(), 1024)
    compared = 0
    for event in calibrate(source, ids):
        if not isinstance(event, LayerStats) or event.key not in (1, 2):
            continue
        for expert in range(EXPERTS):
            for role in ("gate", "up", "down"):
                name = f"model.layers.{event.key}.mlp.experts.{expert}.{role}_proj.weight"
                errors = {}
                for method in ("rtn", "gptq"):
                    with TensorStore.open(tmp_path / method) as store:
                        stored = read_container(tmp_path / method).tensors[name]
                        w = dequantize(unpack(store.read(store.tensors[name]), stored.spec, stored.shape), stored.spec) - before[name]
                    errors[method] = np.einsum("nk,nk->", w @ event.roles[families.expert_role(expert, role)].hessian, w)
                assert errors["gptq"] < errors["rtn"], name
                compared += 1
    assert compared == 2 * 3 * EXPERTS
    run(source, tmp_path / "alone", replace(given, threads=1))
    assert contents(tmp_path / "alone")["model.safetensors"] == contents(tmp_path / "gptq")["model.safetensors"]


def test_equalising_refuses_a_mixture(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="smooth does not support mixtures"):
        run(source, tmp_path / "out", options("4bit", method="smooth"))


# ---- planning, reading, benchmarks


def test_a_pass_reads_the_experts_that_a_token_visits(source: Path) -> None:
    engine = opened(source)
    try:
        model: Model = engine.model
        experts = 2 * EXPERTS * 3 * WIDTH * HIDDEN * 2
        assert model.bytes_per_pass == model.nbytes - experts * (EXPERTS - TOP) // EXPERTS
        assert engine.placement.weights_bytes == model.nbytes
    finally:
        engine.close()


def test_lookup_gives_the_same_answers(source: Path, tmp_path: Path) -> None:
    """Experts lie in lookup order where that is asked for."""
    run(source, tmp_path / "out", options("affine2:32"))
    engine = opened(tmp_path / "out", kernel="lut")
    assert any(".experts." in name for name in engine.model.lut_tensors)
    engine.close()
    dot, looked_up = (scores(tmp_path / "out", kernel=kernel) for kernel in ("dot", "lut"))
    assert np.array_equal(dot, looked_up)


@pytest.mark.parametrize("bits", [None, "4bit"])
def test_a_synthetic_mixture_is_measured(source: Path, bits: str | None) -> None:
    given, asked = EngineOptions(device="cpu", ctx=256), BenchOptions(prompt=(40,), gen=(4,), repetitions=1)
    prepared = prepare_synthetic(str(source / "config.json"), given, bits)
    *_, engine = open_prepared(lambda: prepared, kernel_kinds(Needs(bits is not None), given))
    try:
        rows = [row for row in bench(engine, asked, "mixture") if isinstance(row, BenchRow)]
        assert [row.test for row in rows] == ["pp40", "tg4"] and all(row.avg_ts > 0 for row in rows)
        assert rows[1].bytes_per_pass < engine.model.nbytes
    finally:
        engine.close()
    if bits:
        specs = {name: stored.spec for name, stored in prepared.container.tensors.items()}
        assert all(spec.is_raw == (name.endswith("mlp.gate.weight") or "norm" in name) for name, spec in specs.items())


def test_the_named_shapes_are_those_of_the_models() -> None:
    table = 151_552 * 4096  # embedding and head, which its makers do not count as active
    for shape, total, active in (("qwen3-30b-a3b", 30.5e9, 3.3e9), ("olmoe-1b-7b", 6.9e9, 1.3e9),
                                 ("qwen1.5-moe-a2.7b", 14.3e9, 2.7e9), ("glm-4.5-air", 106e9, 12e9 + 2 * table)):
        config = synthetic_config(shape)
        family = families.get(config.family)
        rules = [*family.outer_tensors(config).items()]
        rules += [item for layer in range(config.num_hidden_layers) for item in family.layer_tensors(config, layer).items()]
        weights = sum(prod(rule.shape) for _, rule in rules)
        visited = sum(prod(rule.shape) * (config.moe.experts_per_token / config.moe.num_experts if families.expert_of(role) is not None
                                          else 1)
                      for role, rule in rules)
        assert abs(weights / total - 1) < 0.02 and abs(visited / active - 1) < 0.05


def test_a_quantized_mixture_says_what_it_is(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    made = read_container(tmp_path / "out")
    assert made is not None and sum(".experts." in name for name in made.tensors) == 2 * 3 * EXPERTS


def test_what_mixtures_alone_need_is_compiled_for_them_alone(source: Path) -> None:
    assert "experts" in folder_kinds(source, EngineOptions()) and "experts" not in folder_kinds(FABLE, EngineOptions())
    assert not any(function.name.startswith("moe_loops.") for function in compiled_functions(folder_kinds(FABLE, EngineOptions())))
    assert any(function.name.startswith("moe_loops.") for function in compiled_functions(folder_kinds(source, EngineOptions())))
