"""A pass with one token of each of several sequences, in every family: each sequence's logits are, bit for bit, those of separate
passes."""

from pathlib import Path

import numpy as np
import pytest
from family_models import CASES
from family_sizes import OF_ALL_KINDS
from saved_models import saved
from streamed_models import paging, random_model, streaming

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.generation.batching import PendingToken, open_sequences
from effllm.runtime.prepare import EngineOptions

# One case of each family.
BY_FAMILY = {case.family: case for case in reversed(CASES.values()) if not case.images and not case.inside}
LENGTHS, STEPS = (5, 190, 64), 14  # of prompts: the last one's page is full while it writes, as the first one's sinks are


def assert_rows_alone(engine: Engine) -> None:
    """Passes of several against passes of as many other sequences alone, prompts in pieces against prompts in chunks; now and then one of
    the several goes on by itself, with drafts of which some come true."""
    try:
        engines, said = open_sequences(engine, 2 * len(LENGTHS))
        together, alone, rows = engines[: len(LENGTHS)], engines[len(LENGTHS) :], engine.config.vocab_size
        rng, passes = np.random.default_rng(0), engine.batched_passes
        for length, one, other in zip(LENGTHS, together, alone, strict=True):
            ids = rng.integers(0, rows, length).tolist()
            for reads, passes.is_single in ((one, False), (other, True)):  # in pieces, and in chunks
                list(reads.prefill(ids))
        assert not said and passes.max_tokens > 1
        for step in range(STEPS):
            place, guesses = step % len(LENGTHS), rng.integers(0, rows, 3).tolist()
            if engine.speculation is not None and together[place].cache.max_speculative_tokens >= len(guesses):
                found = together[place].run_draft(guesses).copy()
                for row, token in enumerate(guesses[: 1 + step % len(guesses)]):
                    together[place].accept_token(token)
                    right = engine.model.logits(engine.model.forward(np.array([token], np.int64), alone[place].cache))[0]
                    assert np.array_equal(found[row], right)
            tokens = rng.integers(0, rows, len(LENGTHS)).tolist()
            expected = []
            for other, token in zip(alone, tokens, strict=True):
                expected.append(engine.model.logits(engine.model.forward(np.array([token], np.int64), other.cache))[0].copy())
            wants = [PendingToken(one, token) for one, token in zip(together, tokens, strict=True)]
            passes.run(wants)
            for want, right in zip(wants, expected, strict=True):
                assert want.error is None and np.array_equal(want.logits, right)
    finally:
        engine.close()


@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family in OF_ALL_KINDS else pytest.mark.slow)
                                    for family in sorted(BY_FAMILY)])
def test_rows_are_those_of_passes_alone(family: str, tmp_path: Path) -> None:
    saved(BY_FAMILY[family], tmp_path)
    *_, engine = open_engine(tmp_path, EngineOptions(device="cpu", ctx=256, parallel=2 * len(LENGTHS)))
    assert_rows_alone(engine)


def test_weights_from_the_disk(tmp_path: Path) -> None:
    engine = streaming(random_model(tmp_path / "model"), ctx=256, parallel=2 * len(LENGTHS))
    read = engine.model.pager.traffic
    assert_rows_alone(engine)
    assert read.reads > 0


def test_experts_from_the_disk(tmp_path: Path) -> None:
    saved(BY_FAMILY["qwen3_moe"], tmp_path)
    assert_rows_alone(paging(tmp_path, slots=9, ctx=256, parallel=2 * len(LENGTHS)))


def test_families_of_every_kind_are_tried() -> None:
    assert {"llama", "opt", "gemma2", "gemma4_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "cohere", "lfm2"} <= BY_FAMILY.keys()
