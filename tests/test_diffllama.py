"""DiffLlama in the whole program: values of paired heads, lambda parameters, profiles, packed caches, which methods may fold what, and
which configs are accepted."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bit_exactness import (
    assert_batching_changes_nothing,
    assert_chunks_equal_single_tokens,
    assert_drafts_change_nothing,
    assert_restored_text_continues,
    assert_threads_and_chunks_change_nothing,
    engine,
)
from config_samples import LLAMA, refused
from conversions import options, run
from family_models import assert_close, oracle, written
from family_sizes import Case
from hybrid_models import CTX, IDS, opened, read_afresh
from transformers import CONFIG_MAPPING

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.methods import Layout, smooth
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.families.diffllama import share_of
from effllm.runtime.kv.kv_recording import _output_grams
from effllm.runtime.sessions.session_store import SessionStore

__all__ = ["engine"]  # fixtures

WIDE = Case("diffllama", {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.08, "max_position_embeddings": CTX})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("diff") / "model"
    written(WIDE, made)
    return made


@pytest.mark.parametrize("tokens", [1, 40])
def test_pairs_of_values_match_their_meaning(tokens: int) -> None:
    rng, pool, heads, depth = np.random.default_rng(5), ThreadPool(2), 6, 16
    sizes = Dims(96, 6, heads, 2 * depth, 64, 300, chunk=64, ctx=128, logit_rows=8, v_head_dim=depth, differential_attention=True)
    v = rng.standard_normal((tokens, heads * depth), np.float32)
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    found = [ops.pair_heads(v.copy(), heads, depth) for ops in (fast, exact)]
    fast.flush()
    pool.close()
    split = v.reshape(tokens, heads, depth)
    wanted = [np.concatenate([split[:, head % 3], split[:, 3 + head % 3]], 1) for head in range(heads)]
    assert all(np.array_equal(each, np.concatenate(wanted, 1)) for each in found)


def test_without_a_difference_the_model_is_another(folder: Path, tmp_path: Path) -> None:
    """What is taken away grows from layer to layer, and what is left is made smaller by it."""
    theirs = written(WIDE, tmp_path / "model")
    engine, ids = opened(folder, kv="32bit"), IDS[:60]
    own = [theirs.model.layers[layer].self_attn for layer in range(3)]
    wanted = [float(((each.lambda_q1 * each.lambda_k1).sum().exp() - (each.lambda_q2 * each.lambda_k2).sum().exp()).detach())
              + each.lambda_init for each in own]
    with engine.model.layer(1) as w:
        assert np.isclose(w.differential_lambda, wanted[1], rtol=1e-5) and np.allclose(w.attn_sub_norm.weight, 1 - own[1].lambda_init)
    assert [share_of(layer) for layer in range(3)] == [each.lambda_init for each in own] and share_of(0) == pytest.approx(0.2)
    expected, usual = oracle(theirs, ids), engine.model.records.layer
    assert_close(np.concatenate([logits.copy() for _, logits in engine.score(ids)]), expected)
    engine.close()
    other = opened(folder, kv="32bit")
    other.model.records.layer = lambda *given, **more: replace(usual(*given, **more), differential_lambda=0.0)
    found = np.concatenate([logits.copy() for _, logits in other.score(ids)])
    other.close()
    assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()


def test_threads_and_chunks_change_no_bit(folder: Path) -> None:
    assert_threads_and_chunks_change_nothing(folder)


@pytest.mark.slow
def test_tokens_at_once_are_tokens_one_by_one(engine: Engine) -> None:
    assert_chunks_equal_single_tokens(engine, 200)


@pytest.mark.slow
def test_drafts_change_no_answer(engine: Engine) -> None:
    assert_drafts_change_nothing(engine, 190, 0.6)


def test_answers_at_once_are_what_each_is_alone(folder: Path) -> None:
    assert_batching_changes_nothing(folder, (IDS[:300], IDS[100:160]))


def test_a_session_continues_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    read_afresh(engine, IDS[:455])
    assert_restored_text_continues(engine, SessionStore(tmp_path / "sessions"), 470)


def test_a_profile_weighs_values_by_what_both_halves_go_through(engine: Engine) -> None:
    """The matrix behind attention reads the difference alone."""
    config = engine.config
    with engine.model.layer(2) as w:
        found = _output_grams(w, np.zeros((4, config.num_attention_heads // 2 * config.head_dim), np.float32), config, 2)
        o = w.o.weight.to_f32().astype(np.float64).reshape(128, 2, 64)
        for head in range(2):
            assert np.allclose(found[head], o[:, head].T @ o[:, head], rtol=1e-4, atol=1e-6)
            assert np.allclose(found[2 + head], found[head] * w.differential_lambda**2, rtol=1e-4, atol=1e-6)
    assert found.shape == (4, 64, 64)


@pytest.mark.slow
def test_packed_caches_and_quantized_folders_answer_nearly_the_same(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "4bit", options("4bit"))
    rows = []
    for where, kv in ((folder, "32bit"), (folder, "4bit"), (tmp_path / "4bit", "16bit")):
        engine = opened(where, kv=kv, kv_window=64)
        rows.append(read_afresh(engine, IDS[:500]).copy())
        engine.close()
    assert all(0 < np.abs(rows[0] - other).max() < 0.3 * np.abs(rows[0]).max() for other in rows[1:])


def test_smoothing_moves_nothing_through_a_difference_nor_what_an_indexer_reads_too() -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32), "gate": (24, 16), "up": (24, 16), "down": (16, 24),
              "input_norm": (16,), "post_norm": (16,)}
    latent = {"q_a": (8, 16), "q_b": (32, 8), "kv_a": (12, 16), "input_norm": (16,), "q_a_norm": (8,)}

    def changed(shapes: dict[str, tuple[int, ...]], **more: tuple[int, ...]) -> set[str]:
        tensors = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in (shapes | more).items()}
        matrices = [role for role, shape in shapes.items() if len(shape) == 2]
        stats = {role: Stats(64, None, np.exp(rng.uniform(-3, 3, shapes[role][1])).astype(np.float32)) for role in matrices}
        specs = dict.fromkeys(matrices, QuantSpec.parse("4bit"))
        return {*smooth.equalise(tensors, stats, specs, Layout(4, 2, 8, stored="f32"))}

    assert changed(shapes) == shapes.keys() and changed(latent) == latent.keys()
    assert changed(shapes, lambda_q1=(8,)) == shapes.keys() - {"o"}  # v is read behind a norm that is moved as before
    assert changed(latent, index_k=(8, 16)) == {"q_a_norm", "q_b"} and changed(latent, index_q=(8, 8)) == {"input_norm", "q_a", "kv_a"}
    assert not changed(latent, index_k=(8, 16), index_q=(8, 8))


def test_what_a_config_says_by_saying_nothing() -> None:
    """As transformers' own class has it."""
    theirs = CONFIG_MAPPING["diffllama"]()
    made = parse_config({"model_type": "diffllama", "architectures": ["DiffLlamaForCausalLM"]}, strict=True)
    assert (made.hidden_size, made.num_hidden_layers, made.num_attention_heads) == (2048, 16, 32) and made.norm_eps == theirs.rms_norm_eps
    assert (made.projected_head_dim, made.head_dim, made.num_key_value_heads) == (
        theirs.head_dim, 2 * theirs.head_dim, theirs.num_key_value_heads)
    assert made.attn_scale == theirs.head_dim**-0.5 and made.rotary_head_dim == theirs.head_dim
    whole = partial(parse_config, strict=True)
    assert whole({**theirs.to_dict(), "architectures": ["DiffLlamaForCausalLM"], "dtype": "float32"}) == made


@pytest.mark.parametrize(("key", "value"), [("num_key_value_heads", 1), ("head_dim", 1024), ("sliding_window", 40), ("mlp_bias", True)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**LLAMA, "model_type": "diffllama", key: value}, key)
