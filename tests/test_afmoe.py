"""AFMoE quantized, streamed from disk, with packed caches and under calibration: attention gates, and one norm after the sum of shared and
routed experts. Also Laguna, whose layers differ in query heads, Flint, and Kolibri, which corrects router logits."""

from pathlib import Path

import numpy as np
import pytest
from conversions import options, run
from family_models import CASES, Case
from quantization_checks import assert_calibration_is_a_pass
from saved_models import saved
from streamed_models import paging, streaming

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.methods import Layout, smooth
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import read_container
from effllm.runtime.weights import stream_layout

GATES = {"afmoe": "gate_proj", "laguna": "g_proj"}  # what their matrices are called
SHARED = {"afmoe": "shared_experts", "kolibri1": "shared_experts", "laguna": "shared_expert", "flint": "shared_expert"}
CALM = {"laguna": 0.06, "flint": 0.06}  # weights less wide where no norm stands behind experts, whose choice any rounding would decide
SLOTS = {"afmoe": 20, "kolibri1": 24, "laguna": 13, "flint": 24}  # for experts in memory


@pytest.fixture(scope="module", params=("afmoe", "laguna", "flint", "kolibri1"))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    base, family = tmp_path_factory.mktemp("gated") / request.param, request.param
    # Matrices large enough to be read one by one.
    wide = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "initializer_range": CALM.get(family, 0.12)}
    own = {"laguna": {"gating": "per-element"},  # gates of heads are too few to be rounded
           "kolibri1": {"num_experts_per_tok": 6, "num_hidden_layers": 3, "layer_types": [
               "sliding_attention", "sliding_attention", "full_attention"]}}
    saved(Case(family, {**CASES[family].changes, **wide, **own.get(family, {})}), base / "whole")
    run(base / "whole", base / "4bit", options("4bit"))
    return {"whole": base / "whole", "4bit": base / "4bit", "family": family}


def found_by(engine: Engine, prompt: int = 300, answer: int = 6) -> np.ndarray:
    """Logits of a prompt in chunks, then token by token, then few at once."""
    ids = np.random.default_rng(7).integers(0, engine.config.vocab_size, prompt + answer + 4).tolist()
    rows = [found.copy() for _, found in engine.score(ids[:prompt])]
    rows += [engine.forward_logits(ids[at : at + 1]).copy() for at in range(prompt, prompt + answer)]
    rows.append(engine.forward_logits(ids[prompt + answer :]).copy())
    engine.close()
    return np.concatenate(rows)


def resident(folder: Path, **asked: object) -> Engine:
    return list(open_engine(folder, EngineOptions(**{"device": "cpu", "ctx": 384, "kv": "16bit", **asked})))[-1]


@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.slow), "4bit"])
def test_weights_and_experts_from_the_disk_give_the_same_bits(kind: str, folders: dict[str, Path | str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_layout, "MIN_STREAMED_NBYTES", 1024)
    whole, slots = found_by(resident(folders[kind])), SLOTS[folders["family"]]
    for engine in (streaming(folders[kind], keep=3, ctx=384, kv="16bit"), paging(folders[kind], slots, ctx=384, kv="16bit")):
        assert np.array_equal(found_by(engine), whole)


def test_four_bits_hold_every_matrix_and_say_nearly_the_same(folders: dict[str, Path | str]) -> None:
    stored = read_container(folders["4bit"]).tensors
    own = [name for name, each in stored.items() if not each.spec.is_raw]
    gates, shared = GATES.get(folders["family"], "q_proj"), SHARED[folders["family"]]
    assert f"model.layers.2.self_attn.{gates}.weight" in own and f"model.layers.2.mlp.{shared}.up_proj.weight" in own
    first = "shared_experts.up_proj" if folders["family"] == "kolibri1" else "up_proj"  # a family without dense layers
    assert f"model.layers.0.mlp.{first}.weight" in own and not any("router" in name for name in own)
    ours, rounded = (found_by(resident(folders[kind], exact=True), 100) for kind in ("whole", "4bit"))
    assert 0 < np.square(ours - rounded).mean() < 0.2 * ours.var()


def test_packed_caches_say_nearly_the_same(folders: dict[str, Path | str]) -> None:
    exact, packed = (found_by(resident(folders["whole"], kv=kv, kv_sink=0, kv_window=0)) for kv in ("32bit", "8bit"))
    assert 0 < np.abs(exact - packed).max() and np.square(exact - packed).mean() < 0.02 * exact.var()


def test_plans_count_the_cache_to_the_byte(folders: dict[str, Path | str]) -> None:
    engine = resident(folders["whole"])
    pages = engine.cache.shape.pages * engine.cache.sealed_nbytes
    assert engine.prepared.placement.kv_bytes == sum(map(len, engine.cache.slots.memory)) + pages
    assert engine.backends["cpu"].workspace.nbytes <= prepare(folders["whole"], engine.prepared.options).placement.workspace_bytes
    engine.close()


def test_calibration_is_a_pass_of_the_model(folders: dict[str, Path | str]) -> None:
    """Gates read what queries read."""
    for found in assert_calibration_is_a_pass(folders["whole"], unseen={"router"})[:-1]:
        assert found.roles.get("attn_gate", found.roles["q"]) is found.roles["q"]


def test_smoothing_moves_nothing_that_experts_read_too() -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "attn_gate": (32, 16), "o": (16, 32), "gate": (24, 16), "up": (24, 16),
              "down": (16, 24), "input_norm": (16,), "post_norm": (16,)}
    tensors = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}
    matrices = [role for role, shape in shapes.items() if len(shape) == 2]
    stats = {role: Stats(64, None, np.exp(rng.uniform(-3, 3, shapes[role][1])).astype(np.float32)) for role in matrices}
    specs, layout = dict.fromkeys(matrices, QuantSpec.parse("4bit")), Layout(4, 2, 8, stored="f32")
    assert smooth.equalise(tensors, stats, specs, layout).keys() == shapes.keys()
    routed = {**tensors, "router": rng.standard_normal((6, 16)).astype(np.float32)}
    assert smooth.equalise(routed, stats, specs, layout).keys() == shapes.keys() - {"post_norm", "gate"}


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_gates_by_themselves_match_the_reference(tokens: int) -> None:
    """And are those that stand behind queries, once these are taken away."""
    rng, heads, depth = np.random.default_rng(1), 6, 24
    sizes, pool = Dims(96, heads, 2, depth, 64, 300, chunk=64, ctx=128, logit_rows=8, output_gate=True), ThreadPool(2)
    x, gates = (rng.standard_normal((tokens, heads * depth), np.float32) for _ in range(2))
    joined = np.stack([rng.standard_normal((tokens, heads, depth), np.float32), gates.reshape(tokens, heads, depth)], 2).reshape(tokens, -1)
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    found = [ops.gate_heads(x.copy(), y, heads, depth) for ops in (fast, exact) for y in (gates, joined)]
    fast.flush()
    pool.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[2], found[3])
    assert np.allclose(found[0], x / (1 + np.exp(-gates.astype(np.float64))), atol=1e-6) and np.allclose(found[0], found[2], atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("width", [6, 6 * 24])
def test_gates_of_a_softplus_match_the_reference(width: int, tokens: int) -> None:
    """One of a head or of each of its channels; large ones are what they are, and small ones nearly nothing."""
    rng, heads, depth = np.random.default_rng(2), 6, 24
    sizes, pool = Dims(96, heads, 2, depth, 64, 300, chunk=64, ctx=128, logit_rows=8, output_gate=True), ThreadPool(2)
    x, gates = rng.standard_normal((tokens, heads * depth), np.float32), 30 * rng.standard_normal((tokens, width), np.float32)
    gates[0, :3] = 200, -200, 0
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    found = [ops.gate_heads(x.copy(), gates, heads, depth, True) for ops in (fast, exact)]
    fast.flush()
    pool.close()
    wanted = x * np.repeat(np.log1p(np.exp(gates.astype(np.float64))), heads * depth // width, 1)
    assert all(np.allclose(each, wanted, rtol=1e-5, atol=1e-7) for each in found)
