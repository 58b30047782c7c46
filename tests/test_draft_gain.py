"""The gain of drafts where weights are in memory and a pass of several tokens costs more than one: texts are replayed on a simulated clock,
with pass costs of AVX2 and of VNNI. No model runs."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import effllm
from effllm.offload.direct_io import Interrupted
from effllm.runtime.config import read_config
from effllm.runtime.speculate import IDLE_PASSES, LOOKUP_INTERVAL, NO_DRAFT, SKIPPED, TOO_SHORT, Speculation
from effllm.runtime.speculation.draft_length import IN_MEMORY
from effllm.runtime.speculation.drafts import Draft, SuffixMatch
from effllm.runtime.tokenizer import Tokenizer

ROOT = Path(effllm.__path__[0])
FABLE = ROOT / "models" / "fable"

# Passes of 1 to 8 tokens, in passes of one.
COSTS = {"avx2": (1, 1.65, 2.1, 2.5, 2.9, 3.3, 3.6, 3.8), "vnni": (1, 1.2, 1.45, 1.75, 2.1, 2.4, 2.7, 3.0)}
LETTER = ("Dear neighbours, the water in our house will be turned off on Tuesday from eight in the morning until about noon, because the "
          "old pipe under the stairs is being replaced. Please fill a jug or two the evening before, and leave the tap in the kitchen "
          "closed, so that nothing floods when the water comes back. If anything goes wrong on the day, call me at the shop.")


class Replayed:
    """As much of an engine as drafts need; its passes take time on a clock of its own, give or take some."""

    def __init__(self, prompt: Sequence[int], costs: Sequence[float]) -> None:
        self.tokens, self.n_ctx, self.cache, self.now = list(prompt), 1 << 20, SimpleNamespace(step=0, max_speculative_tokens=64), 0.0
        self._costs, self._random = costs, random.Random(1)

    def run_draft(self, ids: Sequence[int]) -> np.ndarray:
        self.now += self._costs[len(ids) - 1] * (1 + self._random.gauss(0, 0.03))
        self.cache.step += 1
        return np.zeros((len(ids), 1), np.float32)

    def accept_token(self, token: int) -> None:
        self.tokens.append(token)


def gained(prompt: Sequence[int], answer: Sequence[int], cost: str) -> tuple[float, float]:
    """How many times as fast an answer came as without drafts, and how many times it says so itself."""
    engine = Replayed(prompt, COSTS[cost])
    speculation = Speculation((SuffixMatch(),), clock=lambda: engine.now, thresholds=IN_MEMORY)
    for index, token in enumerate(answer):
        speculation.next_logits(engine, token, len(answer) - index)
    return len(answer) / engine.now, speculation.counts.gain


def encoded(text: str) -> list[int]:
    return Tokenizer.load(FABLE, read_config(FABLE)).encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("cost", "least"), (("avx2", 1.3), ("vnni", 1.5)))
def test_an_edit_comes_faster(cost: str, least: float) -> None:
    changed = LETTER.replace("Tuesday", "Thursday").replace("eight", "nine").replace("at the shop", "at home")
    found, told = gained(encoded(LETTER + " Move it to Thursday at nine."), encoded(changed), cost)
    assert found > least and told == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("text", ("prose", "noise", "little words"))
def test_what_repeats_nothing_loses_nothing(text: str, cost: str) -> None:
    """Noise: any of 4,000 tokens. Little words: one of 20, so that pairs often stood there before and were followed by something else."""
    rng = random.Random(2)
    ids = {"prose": lambda: encoded((ROOT / "docs" / "memory.md").read_text()), "noise": lambda: [rng.randrange(4000) for _ in range(1500)],
           "little words": lambda: [rng.randrange(20) for _ in range(1500)]}[text]()
    assert gained(ids[:200], ids[200:1500], cost)[0] > 0.98


class Asked(SuffixMatch):
    """Counts how often it was asked for a guess."""

    asked = 0

    def propose(self, most: int) -> Draft | None:
        self.asked += 1
        return super().propose(most)


@pytest.mark.parametrize(("pass_s", "every"), ((3e-4, LOOKUP_INTERVAL), (1.0, 1)))
def test_where_passes_are_quick_guesses_are_looked_for_now_and_then(pass_s: float, every: int) -> None:
    """Until one was worth a draft: then before every pass."""
    engine, proposer = Replayed([1], [cost * pass_s for cost in COSTS["vnni"]]), Asked()
    speculation = Speculation((proposer,), clock=lambda: engine.now, thresholds=IN_MEMORY)
    new, repeated = list(range(2, 402)), [*range(100, 220)]  # nothing comes twice before the 402nd token
    for token in new:
        speculation.next_logits(engine, token, None)
    assert speculation.counts.passes == len(new) and speculation.counts.gain == pytest.approx(1.0, abs=0.01)
    assert abs(proposer.asked - (IDLE_PASSES + (len(new) - IDLE_PASSES) / every)) <= 1
    for token in repeated:
        speculation.next_logits(engine, token, None)
    assert speculation.counts.accepted > 0.6 * len(repeated)


def test_an_answer_that_ends_between_two_looks_says_so() -> None:
    """It was told that passes of one token were still being timed, which had been over for hundreds of them."""
    engine = Replayed([1], [cost * 3e-4 for cost in COSTS["vnni"]])
    speculation = Speculation((SuffixMatch(),), clock=lambda: engine.now, thresholds=IN_MEMORY)
    tokens, told = iter(range(2, 1000)), []  # nothing comes twice

    def say(length: int) -> None:
        before = speculation.counts
        for _ in range(length):
            speculation.next_logits(engine, next(tokens), None)
        told.append(speculation.counts.since(before).undrafted)

    say(2)
    say(IDLE_PASSES + LOOKUP_INTERVAL - 1)  # the last of them was looked before
    say(LOOKUP_INTERVAL - 1)
    say(1)
    assert told == [TOO_SHORT, NO_DRAFT, SKIPPED, NO_DRAFT]


def test_passes_that_never_end_are_no_reason_to_look_no_further() -> None:
    """Each was broken off while the disk was waited for; a pass's time was asked for that nobody knew: KeyError."""
    engine = Replayed([1], [cost * 3e-4 for cost in COSTS["vnni"]])
    speculation, whole = Speculation((SuffixMatch(),), clock=lambda: engine.now, thresholds=IN_MEMORY), engine.run_draft

    def broken(ids: Sequence[int]) -> np.ndarray:
        raise Interrupted

    engine.run_draft = broken
    for _ in range(IDLE_PASSES + LOOKUP_INTERVAL):
        with pytest.raises(Interrupted):
            speculation.next_logits(engine, 2, None)
    engine.run_draft = whole
    speculation.next_logits(engine, 2, None)
    assert speculation.counts.passes == 1 and speculation.counts.skipped == 0
