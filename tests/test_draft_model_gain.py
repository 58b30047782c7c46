"""The gain or loss of a draft model, from its pass cost relative to the target's and its acceptance rate: replayed on a simulated clock.
With real ones: what is timed as drafting and what as prefill, damaged weights, Ctrl-C."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from test_draft_gain import COSTS, Replayed

import effllm
from effllm import UsageError
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice, Progress
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.session import Session
from effllm.runtime.speculate import Speculation
from effllm.runtime.speculation.draft_length import IN_MEMORY, MAX_CATCH_UP, ON_DISK, DraftCosts
from effllm.runtime.speculation.draft_model import MODEL_DRAFT
from effllm.runtime.speculation.drafts import Draft
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
GREEDY = SamplerSettings(temperature=0)

DISK = (1.0,) * 8  # a pass that waits for a disk takes that long whatever it holds


class Replaying(Replayed):
    """An engine for a draft model too."""

    cancelled = staticmethod(lambda: False)


class Drafting:
    """As much of a draft model as drafts need. `token`, `read`: what a token of a guess takes, and one of a text that is read; a token is
    right with the chance `right` of its place."""

    failed = ""

    def __init__(self, engine: Replaying, text: Sequence[int], token: float, read: float, right: Callable[[int], float]) -> None:
        self.costs, self._engine, self._text, self._token, self._read, self._right = DraftCosts(), engine, text, token, read, right
        self._history: list[int] = []
        self._held, self._random, self.asked = 0, random.Random(3), []

    def follow(self, history: Sequence[int]) -> None:
        self._history = list(history)

    def tokens_behind(self, tokens: int) -> int:
        return max(1, tokens - self._held)

    def read(self, cancelled: Callable[[], bool]) -> Iterator[object]:
        tokens = self.tokens_behind(len(self._history))
        self._held, seconds = len(self._history), self._read * tokens
        self._engine.now += seconds
        self.costs.record_prefill(tokens, seconds)
        return iter(())

    def propose(self, most: int, cancelled: Callable[[], bool]) -> Draft:
        at, read = len(self._history), self.tokens_behind(len(self._history))
        read_s = max(self._token, self._read * read)
        self._engine.now += read_s + (most - 1) * self._token
        self.costs.record_draft(most, (most - 1) * self._token, read, read_s)
        self._held, self.asked = at, [*self.asked, at]
        drafted = tuple(token if self._random.random() < self._right(at) else -1 for token in self._text[at : at + most])
        return Draft(drafted or (-1,), MODEL_DRAFT)


def gained(costs: Sequence[float], token: float, right: float | Callable[[int], float], tokens: int = 1000,
           prompt: int = 1000, read: float = 0.25) -> tuple[float, Drafting]:
    """How many times as fast an answer came behind a prompt that both have read as without drafts, and the draft model. `read`: what a
    token that is read takes beside one that is guessed."""
    text = list(range(prompt + tokens))
    engine = Replaying(text[:prompt], costs)
    model = Drafting(engine, text, token, token * read, right if callable(right) else lambda at: right)
    speculation = Speculation((), model, lambda: engine.now, ON_DISK if costs is DISK else IN_MEMORY)
    list(speculation.read(engine))
    began = engine.now
    for index, token in enumerate(text[prompt:]):
        speculation.next_logits(engine, token, tokens - index)
    return tokens / (engine.now - began), model


@pytest.mark.parametrize("token", (0.01, 0.05, 0.1, 0.3, 1.0))
@pytest.mark.parametrize("costs", (DISK, *COSTS.values()), ids=("disk", *COSTS))
def test_a_draft_model_that_is_never_right_costs_little(costs: Sequence[float], token: float) -> None:
    assert gained(costs, token, 0.0)[0] > 0.96
    assert gained(costs, token, 0.0, tokens=200)[0] > 0.95


@pytest.mark.parametrize(("cost", "token", "right", "least"), (
    ("disk", 0.05, 0.7, 2.0), ("disk", 0.2, 0.7, 1.4), ("avx2", 0.05, 0.9, 1.25),
    ("vnni", 0.1, 0.9, 1.5), ("vnni", 0.1, 0.7, 1.25), ("avx2", 0.2, 1.0, 1.35)))
@pytest.mark.parametrize("prompt", (20, 4000))
def test_one_that_pays_is_used_however_long_the_prompt(cost: str, token: float, right: float, least: float, prompt: int) -> None:
    """Reading it was counted as the cost of the first guesses: they did not pay, and the next was tried 64 passes later."""
    assert gained(DISK if cost == "disk" else COSTS[cost], token, right, prompt=prompt)[0] > least


@pytest.mark.parametrize("right", (0.5, 0.7, 0.9))
@pytest.mark.parametrize("costs", (DISK, *COSTS.values()), ids=("disk", *COSTS))
def test_one_that_reads_as_slowly_as_it_guesses_is_not_read_again_and_again(costs: Sequence[float], right: float) -> None:
    assert min(gained(costs, token, right, read=1.0)[0] for token in (0.1, 0.2, 0.3)) > 0.96


def test_one_that_could_not_pay_is_tried_once() -> None:
    assert len(gained(COSTS["avx2"], 1.0, 1.0)[1].asked) == 1


def test_one_that_begins_to_be_right_is_found_out() -> None:
    """Tries are rare, and read what came since the last."""
    found, model = gained(DISK, 0.05, lambda at: 0.95 * (at > 1500), 2000)
    assert found > 2 and sum(1100 < at <= 1500 for at in model.asked) < 10 < sum(at > 1700 for at in model.asked)


# -- real ones ---------------------------------------------------------------------------------------------------------------------


def opened(draft: Path, **asked: object) -> Engine:
    return list(open_engine(FABLE, EngineOptions(device="cpu", ctx=1024, threads=1, draft=str(draft), **asked)))[-1]


def test_what_a_guess_takes_is_told_from_what_reading_takes() -> None:
    costs = DraftCosts()
    assert costs.per_token == costs.prefill_s(1000) == 0.0
    costs.record_draft(1, 0.0, 1700, 17.0)
    assert costs.per_token == 0.0 and costs.prefill_s(100) == pytest.approx(1.0), "the first comes with what was read"
    costs.record_draft(3, 4.0, 66, 0.66)
    assert costs.per_token == 2.0
    for _ in range(3):
        costs.record_draft(2, 1.0, MAX_CATCH_UP, 2.0)
    assert costs.per_token == 1.5 and costs.prefill_s(MAX_CATCH_UP) == 0.0, "a few tokens are a part of the guess"


def test_a_prompt_is_read_by_both_before_the_answer() -> None:
    """It was read before the first guess, in the time of the answer, unseen, and made the guesses dear."""
    engine, prompt = opened(FABLE), [*range(300, 900)]
    drafting = engine.speculation._model
    read = [event for event in engine.prefill(prompt) if isinstance(event, Progress) and "draft model" in event.phase]
    assert read and drafting._engine.tokens == prompt and engine.prefill_s > drafting._engine.prefill_s > 0
    for _ in engine.generate(Sampler(GREEDY, 4096), 6, frozenset(), ignore_eos=True):
        continue
    assert engine.speculation.counts.drafted and drafting._engine.num_prefilled_tokens <= MAX_CATCH_UP
    engine.reset()
    assert not drafting._engine.tokens
    engine.close()


def test_ctrl_c_ends_what_the_draft_model_reads() -> None:
    engine = opened(FABLE)
    session = Session(engine, Tokenizer.load(FABLE, engine.config), GREEDY, raw=True, max_tokens=20)
    drafting, run = engine.speculation._model._engine, []
    forward = drafting._forward

    def cancelling(ids: Sequence[int], **options: object) -> np.ndarray:
        run.append(len(ids))
        session.cancel()
        return forward(ids, **options)

    drafting._forward = cancelling
    text = (Path(effllm.__path__[0]) / "runtime" / "calibration.txt").read_text()[:2000]
    list(session.complete(text))
    assert len(run) == 1 and session.stats.finish_reason == "cancelled" and not session.stats.token_ids
    assert len(drafting.tokens) == run[0], "as much as was read is held"
    assert engine.speculation._model.propose(2, lambda: True) is None
    del drafting._forward
    list(session.complete(text))
    found, engine.speculation = session.stats.token_ids, None
    list(session.complete(text))
    assert session.stats.token_ids == found
    engine.close()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model with a weight that is no number."""
    folder = shutil.copytree(FABLE, tmp_path_factory.mktemp("damaged") / "draft")
    content = bytearray((folder / "model.safetensors").read_bytes())
    head = struct.unpack("<Q", content[:8])[0]
    tensors = json.loads(content[8 : 8 + head])
    at = 8 + head + next(tensor["data_offsets"][0] for name, tensor in tensors.items() if "layers.3.mlp.down" in name)
    content[at : at + 2] = b"\xc0\x7f"
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_a_damaged_draft_model_ends_its_drafts_and_not_the_answer(damaged: Path) -> None:
    engine = opened(damaged)
    session = Session(engine, Tokenizer.load(FABLE, engine.config), GREEDY, raw=True, max_tokens=40)
    said = [event.text for _ in range(2) for event in session.complete("The fox and the king") if isinstance(event, Notice)]
    (line,) = [text for text in said if "drafting is disabled" in text]
    assert line.startswith(f"the draft model {damaged}: tensor model.layers.3.mlp.down_proj.weight holds NaN")
    found, engine.speculation = session.stats.token_ids, None
    list(session.complete("The fox and the king"))
    assert session.stats.token_ids == found and len(found) == 40
    engine.close()
    engine = opened(damaged, strict=True)
    session = Session(engine, Tokenizer.load(FABLE, engine.config), GREEDY, max_tokens=40)
    with pytest.raises(UsageError, match=f"--strict refuses .*the draft model {damaged}"):
        list(session.ask("Hi"))
    engine.close()
