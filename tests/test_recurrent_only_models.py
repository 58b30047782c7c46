"""Purely recurrent models: no layer has keys and values, and reports say so.

What engines do with them is in `test_hybrid.py` and `test_hybrid_caches.py`, what they compute in `test_families.py`.
"""

from pathlib import Path

import numpy as np
import pytest
from family_models import CASES, Case, written
from hybrid_models import opened, read
from saved_tokenizers import with_words_of_fable

from effllm.runtime.config import read_config
from effllm.runtime.prepare import EngineOptions, prepare


@pytest.fixture(scope="module", params=["mamba", "falcon_mamba", "mamba2", "rwkv7"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that speaks, if nonsense."""
    made = tmp_path_factory.mktemp("alone") / request.param
    written(Case(request.param, {**CASES[request.param].changes, "num_hidden_layers": 4, "vocab_size": 4096,
                                 "max_position_embeddings": 640}), made)
    return with_words_of_fable(made)


@pytest.mark.parametrize("kv", ["16bit", "8bit", "4bit", "k8v4", "auto"])
def test_whatever_a_cache_is_asked_to_be_answers_are_the_same(alone: Path, kv: str) -> None:
    ids, found = list(range(5, 305)), []
    for asked in ("32bit", kv):
        engine = opened(alone, kv=asked)
        found.append(read(engine, ids))
        assert engine.cache.n == 300 and engine.cache.bits_per_value == 0 and engine.cache.allocated_nbytes == engine.cache.states.nbytes
        engine.close()
    assert np.array_equal(*found)


def test_a_context_takes_no_more_memory_the_longer_it_is(alone: Path) -> None:
    plans = [prepare(alone, EngineOptions(device="cpu", ctx=ctx)).placement for ctx in (256, 640)]
    assert plans[0].kv_bytes == plans[1].kv_bytes and plans[0].kv_bytes_per_token == 0
    assert plans[0].kv_bytes == len(read_config(alone).recurrent_layers) * read_config(alone).recurrent.nbytes


def test_packing_what_is_not_there_is_remarked(alone: Path, user) -> None:
    said = user.run("run", alone, "Once", "-n", "3", "--kv", "4bit")
    assert said.code == 0 and "--kv 4bit: this model has no keys and values" in said.err


def test_there_is_no_profile_of_it(alone: Path, user) -> None:
    said = user.run("eval", "kv-profile", alone)
    assert said.code != 0 and "this model has no keys and values to profile" in said.err


def test_quantizing_records_none_and_the_folder_runs(alone: Path, tmp_path: Path, user) -> None:
    made = user.run("quantize", alone, "-o", tmp_path / "4bit", "--bits", "4")
    assert made.code == 0 and "packed cache" not in made.err and "profile" not in made.err
    assert {path.name for path in (tmp_path / "4bit").glob("kv_profile*")} == set()
    assert user.run("run", tmp_path / "4bit", "Once", "-n", "3").code == 0


def test_a_session_continues_where_it_ended(alone: Path, user) -> None:
    name = f"alone-{alone.name}"
    first = user.run("run", alone, "Once upon a time " * 30, "-n", "3", "--session", name)
    again = user.run("run", alone, "there was", "-n", "3", "--session", name)
    assert first.code == again.code == 0 and "is new" in first.err and "tokens restored" in again.err


def test_show_and_plan_speak_of_no_attention(alone: Path, user) -> None:
    lines = dict(line.split(maxsplit=1) for line in user.run("show", alone).out.splitlines() if not line.startswith(" "))
    behind = ", feed-forward 88" if alone.name == "rwkv7" else ""  # no other has an MLP
    assert lines["attention"] == "none" and lines["layers"] == f"4 of width 64{behind}" and lines["context"].endswith("no positions")
    assert "up to 0 B of cache" in user.run("plan", alone).out
