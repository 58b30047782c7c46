"""RWKV 7: the paper's equations in NumPy, folders with the tensor names of early and later checkpoints, GGUF files; and the effect of token
shift on drafts, rollback, statistics and converted folders.

That logits are those of a torch model is in `test_families.py`, the recurrence by itself in `test_state_kernels.py`, and what engines do
with states in `test_hybrid.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import refused
from conversions import options, run
from family_models import Case, assert_close, oracle, our_logits, text, written
from rwkv7_files import file_of
from safetensors.torch import load_file, save_file
from state_kinds import cpu, normal

from effllm import EffllmError
from effllm.kernels.layout import MAX_DECODE_TOKENS
from effllm.kernels.reference import normalise
from effllm.kernels.rwkv7_shape import Rwkv7Shape
from effllm.kernels.state_shape import AFTER, FROM, KEPT, NO_SLOT, TO
from effllm.quant.weight import Norm
from effllm.runtime.calibrate import LayerStats, calibrate
from effllm.runtime.config import parse_config, read_config
from effllm.runtime.convert import plan_conversion
from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.kv.states import controls

# As llama.cpp wants heads, and wide enough for blocks of 256.
CASE = Case("rwkv7", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2, "decay_low_rank_dim": 32,
                      "a_low_rank_dim": 32, "v_low_rank_dim": 32, "gate_low_rank_dim": 32, "initializer_range": 0.1})
PUBLISHED = {  # RWKV7-Goose-World3-1.5B-HF
    "model_type": "rwkv7", "a_low_rank_dim": 96, "architectures": ["RWKV7ForCausalLM"], "attn": None, "attn_mode": "chunk", "auto_map": {
        "AutoConfig": "modeling_rwkv7.RWKV7Config", "AutoModel": "modeling_rwkv7.RWKV7Model", "AutoModelForCausalLM":
        "modeling_rwkv7.RWKV7ForCausalLM"}, "bos_token_id": 0, "decay_low_rank_dim": 96, "eos_token_id": 0, "fuse_cross_entropy": True,
    "fuse_norm": False, "gate_low_rank_dim": 256, "head_dim": 64, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "hidden_size": 2048,
    "initializer_range": 0.006, "intermediate_size": 8192, "max_position_embeddings": 2048, "norm_bias": True, "norm_eps": 1e-05,
    "norm_first": True, "num_heads": 32, "num_hidden_layers": 24, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformers_version": "4.48.0", "use_cache": True, "v_low_rank_dim": 64, "value_dim": [2048] * 24, "vocab_size": 65536}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rwkv7") / "source"
    written(CASE, made)
    return made


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return file_of(folder, folder.parent / "m.gguf")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    *_, made = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=640, chunk=512, threads=2))
    yield made
    made.close()


def by_the_equations(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits token by token as the paper's appendix has them, each step of a model in vectors of that token alone."""
    weights = {name: values.double().numpy() for name, values in load_file(folder / "model.safetensors").items()}
    raw = json.loads((folder / "config.json").read_text())
    layers, depth, eps = raw["num_hidden_layers"], raw["head_dim"], raw["norm_eps"]
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + eps) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    rows, states = np.zeros((layers, 2, raw["hidden_size"])), np.zeros((layers, raw["hidden_size"] // depth, depth, depth))
    out = []
    for token in ids:
        x, first = norm("model.layers.0.pre_norm", weights["model.embeddings.weight"][token]), None
        for i in range(layers):
            own = {name.removeprefix(f"model.layers.{i}."): values for name, values in weights.items()
                   if name.startswith(f"model.layers.{i}.")}
            low = lambda letter, x, act, own=own: (  # noqa: E731
                own[f"attn.{letter}_lora.lora.2.weight"] @ act(own[f"attn.{letter}_lora.lora.0.weight"] @ x)
                + own.get(f"attn.{letter}_lora.lora.2.bias", 0))
            now = norm(f"model.layers.{i}.attn_norm", x)
            seen = {letter: now + (rows[i, 0] - now) * own[f"attn.x_{letter}"].reshape(-1) for letter in "rwkvag"}
            rows[i, 0] = now
            r, k, v = (own[f"attn.{letter}_proj.weight"] @ seen[letter] for letter in "rkv")
            w, a = np.exp(-np.exp(-0.5) * sigmoid(low("w", seen["w"], np.tanh))), sigmoid(low("a", seen["a"], np.asarray))
            g = low("g", seen["g"], sigmoid)
            first = v if first is None else first
            v = v if i == 0 else v + (first - v) * sigmoid(low("v", seen["v"], np.asarray))
            kk, k = k * own["attn.k_k"], k * (1 + (a - 1) * own["attn.k_a"])
            read = np.empty_like(x)
            for head in range(len(x) // depth):
                at = slice(head * depth, (head + 1) * depth)
                unit = kk[at] / np.linalg.norm(kk[at])
                states[i, head] = (states[i, head] @ (np.diag(w[at]) - np.outer(unit, unit * a[at])) + np.outer(v[at], k[at]))
                y = states[i, head] @ r[at]
                y = (y - y.mean()) / np.sqrt(y.var() + depth * eps) * own["attn.g_norm.weight"][at] + own["attn.g_norm.bias"][at]
                read[at] = y + (r[at] * k[at] * own["attn.r_k"][head]).sum() * v[at]
            x = x + own["attn.o_proj.weight"] @ (read * g)
            now = norm(f"model.layers.{i}.ffn_norm", x)
            mixed, rows[i, 1] = now + (rows[i, 1] - now) * own["ffn.x_k"], now
            x = x + own["ffn.value.weight"] @ np.maximum(own["ffn.key.weight"] @ mixed, 0) ** 2
        out.append(weights["lm_head.weight"] @ norm("model.norm", x))
    return np.array(out)


def test_logits_are_those_of_the_equations(folder: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 300, 40).tolist()
    assert_close(our_logits(folder, ids), by_the_equations(folder, ids))


def test_the_torch_model_that_others_compare_with_is_that_of_the_equations(tmp_path: Path) -> None:
    model = written(Case("rwkv7", {}), tmp_path)
    ids = text(model, 30)
    assert_close(oracle(model, ids), by_the_equations(tmp_path, ids))


def test_a_folder_in_the_names_of_early_checkpoints(folder: Path, tmp_path: Path) -> None:
    """All six shares of rows in one tensor, and ones of dimensions that say nothing."""
    tensors = load_file(folder / "model.safetensors")
    for i in range(2):
        before = f"model.layers.{i}.attn."
        tensors[f"{before}x_x"] = torch.cat([tensors.pop(f"{before}x_{letter}").view(1, -1) for letter in "rwkvag"])
        tensors[f"{before}r_k"] = tensors[f"{before}r_k"].reshape(-1)
        tensors[f"model.layers.{i}.ffn.x_k"] = tensors[f"model.layers.{i}.ffn.x_k"].view(1, 1, -1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    ids = np.random.default_rng(3).integers(0, 300, 30).tolist()
    assert np.array_equal(our_logits(tmp_path, ids), our_logits(folder, ids))
    tensors.pop("model.layers.1.attn.x_x")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EffllmError, match=r"tensor model\.layers\.1\.attn\.x_x is missing"):
        our_logits(tmp_path, ids)


# -- what a config says ----------------------------------------------------------------------------------------------------------------


def test_the_published_config_is_known_to_the_last_key() -> None:
    config = parse_config(PUBLISHED, strict=True)
    assert config.recurrent == Rwkv7Shape(32, 64, (96, 96, 64, 256), 64 * 1e-5) and config.attention_layers == () and not config.warnings
    assert config.intermediate_size == 8192 and config.context_length == 1 << 20 and config.eos_token_ids == (0,)
    silent = {key: value for key, value in PUBLISHED.items() if not key.endswith(("_dim", "_size", "num_heads", "_ratio"))}
    made = parse_config({**silent, "hidden_size": 1024})
    assert made.recurrent.ranks == (64, 64, 16, 128) and made.intermediate_size == 4096 and made.vocab_size == 32_000
    null = dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"))
    assert parse_config({**silent, **null, "hidden_size": 1024}).recurrent.ranks == (64, 64, 64, 160)


@pytest.mark.parametrize(("key", "value"), [
    ("attn", {"layers": [3]}), ("norm_first", False), ("value_dim", [1024] * 24), ("num_heads", 16), ("head_dim", 60),
    ("hidden_act", "gelu"), ("decay_low_rank_dim", -1), ("norm_eps", 0), ("auto_map", {"AutoModel": "modeling_other.Other"})])
def test_what_no_published_model_has_is_refused(key: str, value: object) -> None:
    assert refused({**PUBLISHED, key: value}, "config.json").hint or key in ("norm_eps", "decay_low_rank_dim")


# -- GGUF files ------------------------------------------------------------------------------------------------------------------------


def test_a_file_means_what_its_folder_does(folder: Path, file: Path) -> None:
    ids = np.random.default_rng(4).integers(0, 300, 50).tolist()
    assert np.array_equal(our_logits(file, ids), our_logits(folder, ids))
    own, other = read_config(folder), read_config(file)
    assert other.recurrent.ranks == own.recurrent.ranks and other.norm_bias and not other.warnings
    assert other.recurrent.eps == pytest.approx(64e-5) and (other.residual_streams, other.hidden_act) == (2, "relu2")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_run_from_their_codes(folder: Path, tmp_path: Path, kind: str) -> None:
    *_, made = open_engine(file_of(folder, tmp_path / "m.gguf", kind), EngineOptions(kv="32bit", device="cpu", ctx=256))
    kept = {role for role, tensor in made.model.tensors[1].items() if not tensor.spec.is_raw}
    made.close()
    assert kept == {"state_r", "state_k", "state_v", "state_out", "up", "down"}


@pytest.mark.parametrize(("changes", "said"), [
    ({"wkv.head_size": 60}, "head_size"), ({"wkv.head_size": None}, "lacks key rwkv7.wkv.head_size"),
    ({"attention.decay_lora_rank": 16}, "16"), ({"token_shift_count": 1}, "token_shift_count 1"),
    ({"attention.layer_norm_epsilon": None}, "lacks key rwkv7.attention.layer_norm_epsilon"), ({"attention.sliding_window": 32}, "window")])
def test_lies_of_a_file_are_named(folder: Path, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = file_of(folder, tmp_path / "m.gguf", changes=changes)
    with pytest.raises(EffllmError) as caught:
        our_logits(path, [1, 2, 3])
    assert said in caught.value.message and caught.value.hint and "\n" not in caught.value.message


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_gives_the_same_logits(file: Path) -> None:
    peer = pytest.importorskip("llama_cpp")
    ids = np.random.default_rng(6).integers(0, 300, 100)
    theirs = peer.Llama(str(file), n_ctx=128, n_threads=1, verbose=False, logits_all=True)
    try:
        theirs.eval(ids.tolist())
        found = np.array(theirs.scores[: len(ids)])
    finally:
        theirs.close()
    ours = our_logits(file, ids.tolist())
    assert np.abs(ours - found).max() < 1e-4 * np.abs(found).max()


# -- rows of the token before ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", [None, "reference"])
def test_rows_are_on_their_way_to_those_before(only: str | None) -> None:
    """In both halves of a layer, whatever a text is cut into, and behind a draft of which a part came true."""
    shape = Rwkv7Shape(2, 40, (8, 8, 8, 8))
    ops, told, memory = cpu(shape, 2, only), controls(), np.zeros(shape.nbytes, np.uint8)
    states = ops.state_layer(shape, memory, told)
    x, mixes = normal(1, 30, 80), (normal(2, 6, 80), normal(3, 1, 80))
    norm = Norm("layer", normal(4, 80), normal(5, 80), 1e-5)
    rows = normalise(x, "layer", norm.weight, norm.bias, norm.eps)
    beside = np.concatenate([np.zeros((1, 80)), rows[:-1]])

    def passed(begin: int, end: int, source: int, target: int, after: int = 0) -> list[np.ndarray]:
        told[FROM], told[TO], told[AFTER], told[KEPT] = source, target, after, 3
        return [np.stack([row.copy() for row in states.shifted(x[begin:end].copy(), norm, mix.reshape(-1), half)])
                for half, mix in enumerate(mixes)]

    expected = [rows + (beside - rows) * mix[:, None] for mix in mixes]
    for cuts in ([30], [12, 18], [1] * 30, [20, 3, 7]):
        at, source = 0, NO_SLOT
        for cut in cuts:
            found, target = passed(at, at + cut, source, 1 if source == 0 else 0), 1 if source == 0 else 0
            for own, wanted in zip(found, expected, strict=True):
                assert np.allclose(own, wanted[:, at : at + cut], atol=2e-6)
            at, source = at + cut, target
    passed(0, 20, NO_SLOT, 0, after=9)
    assert np.allclose(states.inputs_of(3), rows[8], atol=1e-6) and np.allclose(states.inputs_of(0), rows[19], atol=1e-6)
    passed(20, 20 + MAX_DECODE_TOKENS, 0, 1)
    for tokens in range(1, MAX_DECODE_TOKENS):
        states.rebuild_slot(0, 2, tokens)
        assert np.allclose(states.inputs_of(2), rows[19 + tokens], atol=1e-6)
    ops.close()


def test_a_text_has_the_same_bits_in_any_chunks_and_on_any_threads(folder: Path) -> None:
    ids = np.random.default_rng(7).integers(0, 300, 300).tolist()
    found = []
    for chunk, threads in ((128, 1), (256, 2), (512, 2)):
        *_, made = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=640, chunk=chunk, threads=threads))
        list(made.prefill(ids))
        found.append(([state.tobytes() for state in made.cache.states.read(300)], made.forward_logits([5])[0].tobytes()))
        made.close()
    assert found[0] == found[1] == found[2]


def test_a_draft_that_comes_to_nothing_leaves_no_trace(engine: Engine) -> None:
    ids, found = np.random.default_rng(8).integers(0, 300, 60).tolist(), []
    for guesses in ([], [1, 2, 3]):
        engine.reset()
        list(engine.prefill(ids[:50]))
        for token in ids[50:55]:
            engine.model.forward(np.array([token, *guesses]), engine.cache, commit=False)
            engine.cache.commit(1)
        found.append(engine.forward_logits([ids[55]])[:1].copy())
    assert_close(*found)


# -- converted folders -----------------------------------------------------------------------------------------------------------------


def test_statistics_are_of_what_each_matrix_reads(folder: Path, engine: Engine) -> None:
    ids, seen = np.random.default_rng(9).integers(0, 300, 512).tolist(), {}
    engine.model.forward(np.array(ids), engine.cache, lambda name, layer, value: seen.update({(layer, name): value.copy()}))
    taps = {"state_r": "receptance_in", "state_k": "key_in", "state_v": "value_in", "state_out": "state_out", "up": "shifted_in",
            "down": "mlp_hidden"}
    for found in calibrate(folder, ids):
        if isinstance(found, LayerStats) and found.key != "outer":
            assert found.roles.keys() == taps.keys()
            for role, tap in taps.items():
                inputs = seen[found.key, tap].astype(np.float64)
                wanted = inputs.T @ inputs / len(inputs)
                assert np.allclose(found.roles[role].hessian, wanted, atol=1e-4 * np.abs(wanted).max()), role


def test_what_is_of_low_rank_stays_and_the_rest_is_quantized(folder: Path, tmp_path: Path) -> None:
    plan = plan_conversion(folder, options("4bit").recipe)
    with plan.store:
        roles = {quantized: {job.role for job in plan.jobs if job.key == 1 and job.quantized == quantized} for quantized in (True, False)}
    assert roles[True] == {"state_r", "state_k", "state_v", "state_out", "up", "down"}
    assert {f"state_{letter}_{side}" for letter in "wavg" for side in ("in", "out")} <= roles[False]
    run(folder, tmp_path / "out", options("8bit"))
    ids = np.random.default_rng(10).integers(0, 300, 60).tolist()
    exact, rounded = our_logits(folder, ids), our_logits(tmp_path / "out", ids)
    assert 0 < np.square(rounded - exact).mean() < 1e-2 * np.square(exact).mean()
