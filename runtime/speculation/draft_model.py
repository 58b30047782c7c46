"""A small draft model with the vocabulary of the target. It is planned first; the target gets the memory that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ... import DoesNotFit, EffllmError, UsageError
from ...kernels.layout import PAGE
from ...offload.demand import AUTO_CTX
from ...offload.notes import Fallback
from ..config import read_config
from ..events import Progress
from ..sampler import Sampler, SamplerSettings
from ..tokenizer import Tokenizer
from .draft_length import STEADY, DraftCosts
from .drafts import Draft

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from ..prepare import EngineOptions, Prepared
    from ..sampling.dry import Breakers
    from ..stores.container import Container
    from .trained_draft import TrainedDraft

KIND = "model"
DROP = "drop --draft, or a smaller one"
# What moves the likeliest token.
MOVING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_last_n", "dry_multiplier", "dry_base",
          "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "logit_bias")


def prepare_draft(folder: Path | None, config: ModelConfig, container: Container | None, options: EngineOptions) -> Prepared | TrainedDraft:
    """The plan for the model in `options.draft`, all of it in memory, with a KV cache for the requested context. Flags that apply to any
    model apply to it; those about neurons and kernels are the target's, whose `config` is given, and its `container` if it has one.

    Raises UsageError, naming a token, if its vocabulary differs from that of the model in `folder`, or if it was trained for another
    target; DoesNotFit if it takes all memory; and what opening it raises, naming the draft model.
    """
    from ..prepare import prepare
    from .trained_draft_kinds import trained_in

    place = Path(options.draft)
    if folder is None:
        raise UsageError("random weights have no vocabulary that a draft model could share", "drop --draft")
    with _said_of_the_draft():
        trained = trained_in(place, config, options, container)
    if trained is not None:
        return trained
    refuse_other_vocabulary(folder, place)
    with _said_of_the_draft():
        longest = read_config(place, options.strict).context_length
        own = replace(options, draft=None, lora=(), spec="off", device="cpu", gpu_layers=None, ctx=min(options.ctx or AUTO_CTX, longest),
                      kv="16bit", kv_sink=None, kv_window=None, load="ram", chunk=PAGE, overflow="error", vram=None, kv_ram=None, disk="0",
                      kv_read="exact", kernel="auto", predict_neurons=False)
        prepared = prepare(place, own)
    if prepared.placement.streamed_bytes:
        prepared.store.close()
        raise DoesNotFit(f"the draft model in {place} does not fit in memory as a whole", DROP)
    return prepared


def draft_or_without(folder: Path | None, config: ModelConfig, container: Container | None, options: EngineOptions,
                     notices: list[str]) -> tuple[EngineOptions, Prepared | TrainedDraft | None]:
    """`prepare_draft` if requested, and the resulting options: an unusable draft model from the settings file is dropped with a notice."""
    from .trained_draft import TrainedDraft

    try:
        draft = prepare_draft(folder, config, container, options) if options.draft else None
        notices += [draft.notice] if isinstance(draft, TrainedDraft) and draft.notice else []
        return options, draft
    except EffllmError as error:
        if "draft" not in options.from_settings:
            error.option = "draft"
            raise
        notices.append(Fallback(f"{error.message}: ignored, since it is a setting for all models"))
        return replace(options, draft=None), None


@contextmanager
def _said_of_the_draft() -> Iterator[None]:
    """Errors name the draft model, since most would be true of the target too."""
    try:
        yield
    except DoesNotFit as error:
        raise DoesNotFit(f"the draft model {error.message}", DROP) from None
    except EffllmError as error:
        said = error.message if error.message.startswith("the draft model") else f"the draft model: {error.message}"
        raise type(error)(said, error.hint) from None


def refuse_other(folder: Path, draft: Path, config: ModelConfig, options: EngineOptions) -> None:
    """Raises what `prepare_draft` would for a draft that is for another model than that in `folder`."""
    from .trained_draft_kinds import trained_in

    with _said_of_the_draft():
        trained = trained_in(draft, config, options)
    if trained is None:
        refuse_other_vocabulary(folder, draft)
    else:
        trained.store.close()


@cache
def refuse_other_vocabulary(folder: Path, draft: Path) -> None:
    """Raises UsageError, naming the first differing token, unless both vocabularies are the same."""
    own = Tokenizer.load(folder, read_config(folder)).vocabulary()
    with _said_of_the_draft():
        other = Tokenizer.load(draft, read_config(draft)).vocabulary()
    if own == other:
        return
    number = min(number for _, number in own.items() ^ other.items())
    texts = (next((token for token, place in found.items() if place == number), None) for found in (own, other))
    said = " and ".join("none" if text is None else repr(text) for text in texts)
    raise UsageError(f"the draft model {draft} has another tokenizer than {folder}: token {number} is {said}",
                     "give a smaller model of the same family")


def likeliest_under(settings: SamplerSettings, breakers: Breakers | None, known: Sampler) -> Sampler:
    """The greedy choice under these settings: `known` if it fits. Penalties change the likeliest token, the temperature does not."""
    greedy = replace(SamplerSettings(temperature=0), **{name: getattr(settings, name) for name in MOVING})
    same = greedy == known.settings and breakers is known.breakers
    return known if same else Sampler(greedy, known.vocab_size, breakers)


class DraftModel:
    """Greedy drafts of a whole model, under the run's penalties. Its engine holds the sequence and the draft; rejected tokens are dropped
    with the next.

    `vocabulary`: rows of the target's embedding; a draft ends before a token beyond it. `failed`: the error that ended it, "" before.
    """

    reads = 0

    def __init__(self, prepared: Prepared, vocabulary: int) -> None:
        from ..engine import Engine

        self._engine, self._vocabulary = Engine(prepared), vocabulary
        self._greedy = Sampler(SamplerSettings(temperature=0), prepared.config.vocab_size)
        self._history: list[int] = []
        self.costs, self.failed = DraftCosts(), ""

    def load(self) -> Iterator[Progress]:
        """Load its weights."""
        for done, total in self._engine.model.load():
            yield Progress("loading the draft model", done, total, "bytes")
        if (states := self._engine.cache.states) is not None:
            states.is_draft = True

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft what a run with these settings finds likeliest."""
        self._greedy = likeliest_under(settings, breakers, self._greedy)

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """The target's hidden states are not used."""

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`. Runs nothing."""
        self._history = list(history)

    def behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""
        missed = tokens - len(self._engine.tokens)
        return max(1, missed) if missed > -STEADY else tokens  # it holds its last guess; a shorter text is another

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Catch up with the sequence, so that no draft waits for that; stops early if `cancelled`."""
        if cancelled() or not self._knows():
            return
        before = self._engine.prefill_s
        with self._failing():
            for event in self._engine.prefill(self._history):
                if isinstance(event, Progress):
                    yield replace(event, phase="reading the prompt (draft model)")
                if cancelled():
                    return
            self.costs.read(self._engine.num_prefilled_tokens, self._engine.prefill_s - before)

    def propose(self, most: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `most` tokens; None if the sequence exceeds its context or has unknown tokens, if `cancelled`, and once it has `failed`."""
        if most < 1 or not self._knows():
            return None
        engine, drafted = self._engine, []
        with self._failing():
            started = time.perf_counter()
            engine.set_tokens(engine.tokens)  # as what a guess goes on from, however few tokens are new
            for _ in engine.prefill(self._history):
                if cancelled():
                    return None
            read = time.perf_counter()
            for step in engine.generate(self._greedy, most, frozenset()):
                if cancelled():
                    return None
                if step.token >= self._vocabulary:
                    break
                drafted.append(step.token)
            self.costs.guessed(len(drafted), time.perf_counter() - read, engine.num_prefilled_tokens, read - started)
        return Draft(tuple(drafted), KIND) if drafted and not self.failed else None

    def _knows(self) -> bool:
        """Can it process the sequence?"""
        return not self.failed and len(self._history) < self._engine.n_ctx and max(self._history) < self._engine.config.vocab_size

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Guards its passes: an error in them (overflow, damaged weights) ends drafting, not the answer."""
        try:
            yield
        except EffllmError as error:
            self.failed = f"the draft model {self._engine.prepared.folder}: {error.message}: drafting is disabled"

    def reset(self) -> None:
        """Drop the sequence."""
        self._engine.reset()

    def close(self) -> None:
        """Free its memory and threads."""
        self._engine.close()
