"""Families other than Llama's, quantized: what is stored and where, what calibration sees, what may be folded into what.

One model of each is enough: that it computes what transformers does is shown in test_families.py.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES, Case
from saved_models import saved

import effllm
from effllm import UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels.reference import normalise
from effllm.kernels.threads import ThreadPool
from effllm.offload.checkpoint import TensorStore
from effllm.quant.codes import dequantize
from effllm.quant.methods import smooth
from effllm.quant.pack import unpack
from effllm.runtime.calibrate import NORMS, READS, LayerStats, calibrate
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.conversion.convert_stream import read_tensor
from effllm.runtime.conversion.convert_tensors import Converter
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import read_container

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
# Weights drawn less wide than where exactness is judged: attention is then no lottery that any rounding decides.
CALM = {"initializer_range": 0.08, "init_std": 0.08}
NEW = {name: replace(CASES[name], dtype="float32", changes={**CASES[name].changes, **CALM})
       for name in ("phi3", "arcee", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma3", "olmo2", "olmo3", "ministral3", "seed_oss",
                    "smollm3", "granite", "opt", "starcoder2", "ernie4_5", "glm", "glm4", "qwen3_5_text", "lfm2",
                    "granitemoehybrid, state spaces", "nemotron_h", "bamba", "falcon_h1", "nemotron", "hyperclovax", "jais2", "stablelm",
                    "apertus", "cohere", "gpt_neox", "phi", "olmo", "bitnet", "gptj", "modernbert_decoder",
                    "persimmon", "nemotron_nas")}
IDS = np.random.default_rng(3).integers(0, 300, 200).tolist()
# Which roles of a layer smoothing may change: a norm that feeds matrices, projections whose rows can be divided, and their readers.
PLAIN = {"input_norm", "q", "k", "v", "o", "post_norm", "gate", "up", "down"}
SMOOTHED = {**dict.fromkeys(("gemma", "gemma2", "gemma3", "glm", "glm4", "seed_oss"), PLAIN | {"v_bias"}),
            **dict.fromkeys(("apertus", "arcee", "nemotron_h"), PLAIN - {"gate", "down"}),
            "nemotron": PLAIN - {"gate", "down"} | {"input_norm_bias", "post_norm_bias"},
            "stablelm": PLAIN | {"input_norm_bias", "post_norm_bias", "v_bias"}, "exaone4": {"v", "o", "up", "down"},
            "olmo": {"up", "down"}, "bitnet": {"input_norm", "q", "k", "v", "post_norm", "gate", "up"},
            **dict.fromkeys(("olmo2", "olmo3"), {"v", "o", "up", "down", "v_bias"}),
            **dict.fromkeys(("granite", "smollm3"), PLAIN | {"v_bias", "up_bias"}),
            "opt": PLAIN - {"gate"} | {"input_norm_bias", "post_norm_bias", "v_bias", "up_bias"},
            "gptj": PLAIN - {"gate", "down", "post_norm"} | {"input_norm_bias"},
            **dict.fromkeys(("jais2", "persimmon", "starcoder2"),
                            PLAIN - {"gate", "down"} | {"input_norm_bias", "post_norm_bias", "v_bias"}),
            "qwen3_5_text": PLAIN | {"v_bias"}, "cohere": PLAIN - {"post_norm"},
            "phi": PLAIN - {"gate", "down", "post_norm"} | {"input_norm_bias", "v_bias"},
            "gpt_neox": PLAIN - {"gate", "down", "post_norm"} | {"mlp_norm", "input_norm_bias", "mlp_norm_bias", "v_bias"}}
MLP = {"post_norm", "gate", "up", "down"}  # of a layer of linear attention, where nothing else is folded


@pytest.fixture(params=NEW, scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    saved(NEW[request.param], folder)
    return folder


@pytest.fixture
def engine(source: Path) -> Iterator[Engine]:
    opened = open_folder(source)
    yield opened
    opened.close()


def open_folder(folder: Path) -> Engine:
    return list(open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=256)))[-1]


def logits(engine: Engine) -> np.ndarray:
    return np.concatenate([rows.copy() for _, rows in engine.score(IDS)])


@pytest.mark.slow
def test_a_converted_folder_answers_nearly_the_same(source: Path, engine: Engine, tmp_path: Path) -> None:
    before, errors = logits(engine), []
    for spec in ("8bit", "4bit"):
        made, said = run(source, tmp_path / spec, options(spec))
        quantized = open_folder(tmp_path / spec)
        errors.append(np.square(logits(quantized) - before).mean() / np.square(before - before.mean()).mean())
        assert quantized.model.nbytes == made.after
        quantized.close()
        left_out = [line for line in said if line.startswith("left out")]
        # An image encoder, and numbers that every curve has; of others nothing.
        assert bool(left_out) == (source.name in ("gemma3", "apertus"))
    most = 5e-3 if source.name == "qwen3_5_text" else 3e-3  # small heads are normed behind each other's convolution and recurrence
    assert errors[0] < most and 10 * errors[0] < errors[1] < 0.2


def test_a_converted_folder_means_what_its_numbers_mean(source: Path, engine: Engine, tmp_path: Path) -> None:
    """In float32 its answers are those of the model with the rounded weights put back."""
    made, _ = run(source, tmp_path / "out", options("3bit"))
    quantized = list(open_engine(tmp_path / "out", EngineOptions(kv="32bit", device="cpu", ctx=256, exact=True)))[-1]
    ours = logits(quantized)
    quantized.close()
    plan = plan_conversion(source, options("3bit").recipe)
    with plan.store, TensorStore.open(tmp_path / "out") as store:
        for job in plan.jobs:
            if not job.spec.is_raw:
                values = dequantize(unpack(store.read(store.tensors[job.name]), job.spec, job.shape), job.spec)
                with engine.model.pager.lease(job.key) as raw:
                    raw[job.name].view(np.float32)[:] = values.reshape(-1)
    theirs = logits(engine)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


def test_what_is_stored_and_where(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", options("4bit"))
    made, plan = read_container(tmp_path / "out"), plan_conversion(source, options("4bit").recipe)
    with plan.store, TensorStore.open(tmp_path / "out") as store:
        for job in plan.jobs:
            stored, values = made.tensors[job.name], read_tensor(plan.store, job)
            raw = store.read(store.tensors[job.name])
            matrix = job.role in ("q", "k", "v", "o", "gate", "up", "down", "embed", "head", "state_in", "state_gate", "state_out")
            assert stored.spec.is_raw != matrix, job.name
            if matrix:
                error = dequantize(unpack(raw, stored.spec, stored.shape), stored.spec) - values
                assert np.square(error).sum() < 0.02 * np.square(values).sum(), job.name
            else:
                assert raw.tobytes() == values.astype(np.float32).tobytes(), job.name
        for layer in range(plan.config.num_hidden_layers):
            infos = [store.tensors[job.name] for job in plan.jobs if job.key == layer and not made.tensors[job.name].spec.is_raw]
            assert [one.offset + one.nbytes for one in infos[:-1]] == [two.offset for two in infos[1:]], "read together, stored together"


def test_calibration_sees_what_a_run_sees(source: Path, engine: Engine) -> None:
    seen: dict[tuple[int, str], np.ndarray] = {}
    engine.model.forward(np.array(IDS), engine.cache, lambda name, layer, value: seen.update({(layer, name): value.copy()}))
    for found in calibrate(source, IDS):
        if not isinstance(found, LayerStats) or found.key == "outer":
            continue
        with engine.model.pager.lease(found.key) as raw:
            weights = engine.model._lease(found.key, raw)
        of_attention = () if found.key in engine.config.layers_without_attention else ("block_in",)
        of_mlp = () if found.key in engine.config.layers_without_mlp else ("mlp_in", "mlp_hidden")
        assert {tap for key, tap in seen if key == found.key} & READS.keys() >= {*of_attention, *of_mlp}
        for tap, roles in READS.items():
            if (inputs := seen.get((found.key, tap))) is None:
                assert found.roles.keys().isdisjoint(roles)
                continue
            if tap in NORMS:
                norm = attrgetter(NORMS[tap])(weights)
                inputs = normalise(inputs, norm.kind, norm.weight, norm.bias, norm.eps)
            hessian = inputs.T.astype(np.float64) @ inputs / len(inputs)
            own = next(found.roles[role] for role in roles if role in found.roles)
            assert np.allclose(own.hessian, hessian, atol=1e-4 * np.abs(hessian).max()), (found.key, tap)


def test_smoothing_changes_no_answer(source: Path, engine: Engine) -> None:
    """All that may be folded is, nothing else, and the unrounded model says what it said."""
    before, moved = logits(engine), 0.0
    plan, pool = plan_conversion(source, options("4bit").recipe), ThreadPool(1)
    with plan.store:
        converter = Converter(plan, "smooth", SimpleNamespace(finished={}), pool, IDS)
        for found in calibrate(source, IDS):
            if isinstance(found, LayerStats) and found.key != "outer":
                changed = converter._equalise(found)
                roles = {job.role for job in plan.jobs if job.name in changed}
                own = SMOOTHED.get(source.name, PLAIN)
                if not any(job.key == found.key and job.role == "input_norm" for job in plan.jobs):
                    own = own - {"input_norm", "q", "k"}  # nothing stands before what they read
                beside = plan.config.parallel_hybrid  # whose state reads what q, k and v do
                own = own - {"input_norm", "q", "k"} if beside else own & MLP if found.key in plan.config.recurrent_layers else own
                own = own & MLP if found.key in plan.config.layers_without_attention else own
                assert roles == own - (MLP if found.key in plan.config.layers_without_mlp else set())
                with engine.model.pager.lease(found.key) as raw:
                    for name, values in changed.items():
                        moved = max(moved, np.abs(raw[name].view(np.float32) - values.reshape(-1)).max())
                        raw[name].view(np.float32)[:] = values.reshape(-1)
    pool.close()
    assert moved > 0.01
    engine.model._wrapped.clear()
    engine.reset()
    assert np.abs(logits(engine) - before).max() < 1e-4 * np.abs(before).max()


def test_what_does_not_commute_is_not_folded() -> None:
    """An MLP without a gate passes a factor through ReLU and through nothing else."""
    rng = np.random.default_rng(0)
    tensors = {"up": rng.standard_normal((32, 16), np.float32), "down": rng.standard_normal((16, 32), np.float32)}
    stats = {role: SimpleNamespace(mean_square=np.exp(rng.standard_normal(each.shape[1])), hessian=None) for role, each in tensors.items()}
    specs = dict.fromkeys(tensors, options("4bit").recipe.base)
    pool = ThreadPool(1)
    for act, changed in (("relu", {"up", "down"}), ("gelu", set())):
        layout = smooth.Layout(2, 2, 8, act=act)
        assert smooth.equalise(tensors, stats, specs, layout, pool).keys() == changed
    pool.close()


def test_the_workspace_is_what_was_planned(source: Path, engine: Engine) -> None:
    """Every buffer that a run took was planned, at its size: the longest chunk, then one token."""
    engine.reset()
    list(engine.prefill(IDS))
    engine.forward_logits([1])
    workspace = engine.backends["cpu"].workspace
    assert all(len(buffer) == workspace.floats[name] for name, buffer in workspace._buffers.items())
    assert prepare(source, EngineOptions(kv="32bit", device="cpu", ctx=256)).placement.ctx == 256


def test_positions_that_were_never_learned_are_refused(tmp_path: Path) -> None:
    saved(CASES["opt"], tmp_path)
    for force in (False, True):
        with pytest.raises(UsageError, match="513 is more than the 512") as caught:
            prepare(tmp_path, EngineOptions(device="cpu", ctx=513, force=force))
        assert "learned" in caught.value.hint


# -- through the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gemma_through_every_command(tmp_path: Path) -> None:
    """Asked with a system prompt that its template has no role for, planned, shown, quantized with calibration, measured, asked again."""
    folder, out, text = tmp_path / "gemma", tmp_path / "gemma-4bit", tmp_path / "text.txt"
    vocab = json.loads((FABLE / "config.json").read_text())["vocab_size"]
    saved(Case("gemma2", {**CASES["gemma2"].changes, "vocab_size": vocab, "eos_token_id": [1, 2]}), folder)
    for path in FABLE.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    text.write_text((FABLE / "README.md").read_text()[:1500])

    def called(*argv: str) -> tuple[str, str]:
        environment = Environment(StringIO(), StringIO(), StringIO(), {"HOME": str(tmp_path), "PATH": ""})
        code = main(argv, environment)
        assert code == 0, environment.stderr.getvalue()
        return environment.stdout.getvalue(), environment.stderr.getvalue()

    asked = ("Hello", "--system", "Be brief.", "--temp", "0", "-n", "6", "-c", "200", "--ignore-eos", "--json")
    answer, said = called("run", str(folder), *asked)
    assert len(json.loads(answer)["token_ids"]) == 6 and "no system role" in said
    assert json.loads(called("show", str(folder), "--json")[0])["windows"] == [40]
    assert "gemma2" in called("plan", str(folder))[0]
    for method in ("gptq", "smooth"):
        _, said = called("quantize", str(folder), "-o", str(out), "--bits", "4", "--method", method, "--calib-tokens", "512", "--force")
        assert "left out" not in said
    assert len(json.loads(called("run", str(out), *asked)[0])["token_ids"]) == 6
    measured = json.loads(called("eval", "kld", str(out), "--against", str(folder), "--text", str(text), "--json")[0])
    assert 0 < measured["kld_mean"] < 1
    assert len(json.loads(called("quantize", str(folder), "-o", str(tmp_path / "b"), "--target", "5bpw", "--json")[0])["classes"]) > 3
