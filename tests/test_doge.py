"""Doge in the whole program: its parameters, which configs are refused, and runs, sessions, drafts and batches of such a model."""

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
from family_sizes import Case
from hybrid_models import CTX, IDS, read_afresh
from saved_models import saved
from transformers import CONFIG_MAPPING

from effllm import UsageError
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.methods import Layout, smooth
from effllm.quant.spec import QuantSpec
from effllm.quant.stats import Stats
from effllm.runtime.config import parse_config
from effllm.runtime.engine import Engine
from effllm.runtime.kv.kv_profile_run import record_profile
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.sessions.session_store import SessionStore

__all__ = ["engine"]  # fixtures

WIDE = Case("doge", {"hidden_size": 128, "initializer_range": 0.08, "max_position_embeddings": CTX})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("doge") / "model"
    saved(WIDE, made)
    return made


@pytest.mark.parametrize("tokens", [1, 40])
def test_numbers_of_keys_match_their_meaning(tokens: int) -> None:
    rng, pool, heads, wide = np.random.default_rng(6), ThreadPool(2), 3, 32
    sizes = Dims(96, 6, heads, wide, 64, 300, chunk=64, ctx=128, logit_rows=8, v_head_dim=16)
    k, says, rates = (rng.standard_normal(shape, np.float32) for shape in ((tokens, heads * wide), (tokens, heads), heads))
    fast, exact = CpuOps(pool, sizes), CpuOps(pool, sizes, default_registry("reference"))
    found = [ops.dynamic_mask_heads(k.copy(), says, heads, wide, rates).reshape(tokens, heads, wide) for ops in (fast, exact)]
    fast.flush()
    pool.close()
    wanted = k.reshape(tokens, heads, wide).copy()
    wanted[..., 0] = np.exp(rates * np.log1p(np.exp(says)))
    assert all(np.allclose(each, wanted, rtol=1e-5) for each in found)


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


def test_packed_caches_and_their_profiles_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--kv 4bit: every key of this model has a score bias") as caught:
        prepare(folder, EngineOptions(ctx=CTX, kv="4bit", device="cpu"))
    assert caught.value.hint == "--kv 16bit"
    with pytest.raises(UsageError, match="never packed"):
        list(record_profile(folder, "a text", 1.0))


def test_smoothing_moves_no_value_that_numbers_are_made_of() -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32), "gate": (24, 16), "up": (24, 16), "down": (16, 24),
              "input_norm": (16,), "post_norm": (16,)}
    tensors = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}
    matrices = [role for role, shape in shapes.items() if len(shape) == 2]
    stats = {role: Stats(64, None, np.exp(rng.uniform(-3, 3, shapes[role][1])).astype(np.float32)) for role in matrices}
    specs, layout = dict.fromkeys(matrices, QuantSpec.parse("4bit")), Layout(4, 2, 8, stored="f32")
    marked = tensors | {"dynamic_mask": rng.standard_normal((2, 16)).astype(np.float32)}
    assert {*smooth.equalise(marked, stats, specs, layout)} == shapes.keys() - {"o"}


def test_what_a_config_says_by_saying_nothing() -> None:
    """As transformers' own class has it; beyond what is seen whatever it says the model is not run."""
    theirs, bare = CONFIG_MAPPING["doge"](), {"model_type": "doge", "architectures": ["DogeForCausalLM"]}
    made = parse_config(bare, strict=True)
    assert (made.hidden_size, made.num_hidden_layers, made.projected_head_dim) == (theirs.hidden_size, theirs.num_hidden_layers, 128)
    assert made.head_dim == 144 and made.attn_scale == 128**-0.5 and made.rotary_head_dim == 128
    assert parse_config({**theirs.to_dict(), "architectures": ["DogeForCausalLM"], "dtype": "float32"}, strict=True) == made
    assert made.context_length == 2048 and parse_config({**bare, "keep_window_size": 512}).context_length == 512


@pytest.mark.parametrize(("key", "value"), [("is_moe", True), ("sliding_window", 40), ("keep_window_size", 0)])
def test_what_it_cannot_be_is_named(key: str, value: object) -> None:
    refused({**LLAMA, "model_type": "doge", key: value}, key)
