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
from .draft_length import MAX_CATCH_UP, DraftCosts
from .drafts import Draft

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from ..prepare import EngineOptions, Prepared
    from ..sampling.dry import Breakers
    from ..stores.container import Container
    from .trained_draft import TrainedDraft

MODEL_DRAFT = "model"  # the kind of a model's drafts
DROP = "drop --draft, or a smaller one"
# Settings that change the most likely token.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_last_n", "dry_multiplier", "dry_base",
             "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "logit_bias")


def prepare_draft(folder: Path | None, config: ModelConfig, container: Container | None, options: EngineOptions) -> Prepared | TrainedDraft:
    """The plan for the model in `options.draft`, all of it in memory, with a KV cache for the requested context. Options that apply to any
    model apply to it; those about sparse activations and kernels are only the target's. `config`, `container`: the target's, None if it has
    no container.

    Raises UsageError, naming a token, if its vocabulary differs from that of the model in `folder`, or if it was trained for another
    target; DoesNotFit if it takes all memory; and what opening it raises, naming the draft model.
    """
    from ..prepare import prepare
    from .trained_draft_kinds import trained_in

    draft_folder = Path(options.draft)
    if folder is None:
        raise UsageError("random weights have no vocabulary that a draft model could share", "drop --draft")
    with _naming_the_draft():
        trained = trained_in(draft_folder, config, options, container)
    if trained is not None:
        return trained
    refuse_other_vocabulary(folder, draft_folder)
    with _naming_the_draft():
        max_ctx = read_config(draft_folder, options.strict).context_length
        draft_options = replace(
            options, draft=None, lora=(), spec="off", device="cpu", gpu_layers=None, ctx=min(options.ctx or AUTO_CTX, max_ctx), kv="16bit",
            kv_sink=None, kv_window=None, load="ram", chunk=PAGE, overflow="error", vram=None, kv_ram=None, disk="0", kv_read="exact",
            kernel="auto", predict_neurons=False)
        prepared = prepare(draft_folder, draft_options)
    if prepared.placement.streamed_bytes:
        prepared.store.close()
        raise DoesNotFit(f"the draft model in {draft_folder} does not fit in memory as a whole", DROP)
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
def _naming_the_draft() -> Iterator[None]:
    """Errors name the draft model, since most would be true of the target too."""
    try:
        yield
    except DoesNotFit as error:
        raise DoesNotFit(f"the draft model {error.message}", DROP) from None
    except EffllmError as error:
        message = error.message if error.message.startswith("the draft model") else f"the draft model: {error.message}"
        raise type(error)(message, error.hint) from None


def refuse_other(folder: Path, draft: Path, config: ModelConfig, options: EngineOptions) -> None:
    """Raises what `prepare_draft` would for a draft that is for another model than that in `folder`."""
    from .trained_draft_kinds import trained_in

    with _naming_the_draft():
        trained = trained_in(draft, config, options)
    if trained is None:
        refuse_other_vocabulary(folder, draft)
    else:
        trained.store.close()


@cache
def refuse_other_vocabulary(folder: Path, draft: Path) -> None:
    """Raises UsageError, naming the first differing token, unless both vocabularies are the same."""
    target_ids = Tokenizer.load(folder, read_config(folder)).vocabulary()
    with _naming_the_draft():
        draft_ids = Tokenizer.load(draft, read_config(draft)).vocabulary()
    if target_ids == draft_ids:
        return
    differing = min(token for _, token in target_ids.items() ^ draft_ids.items())
    texts = (next((text for text, token in ids.items() if token == differing), None) for ids in (target_ids, draft_ids))
    shown = " and ".join("none" if text is None else repr(text) for text in texts)
    raise UsageError(f"the draft model {draft} has another tokenizer than {folder}: token {differing} is {shown}",
                     "give a smaller model of the same family")


def greedy_sampler(settings: SamplerSettings, breakers: Breakers | None, current: Sampler) -> Sampler:
    """A greedy sampler with the penalties of `settings` (the temperature does not change the most likely token): `current` if it fits."""
    greedy = replace(SamplerSettings(temperature=0), **{name: getattr(settings, name) for name in PENALTIES})
    same = greedy == current.settings and breakers is current.breakers
    return current if same else Sampler(greedy, current.vocab_size, breakers)


class DraftModel:
    """Greedy drafts of a standalone model, under the run's penalties. Its engine holds the sequence and the draft; the next draft drops
    rejected tokens.

    vocab_size: rows of the target's embedding; a draft ends before a token beyond it.
    failed: the error that disabled it, empty if none did.
    """

    num_hidden_states = 0

    def __init__(self, prepared: Prepared, vocab_size: int) -> None:
        from ..engine import Engine

        self._engine, self._vocab_size = Engine(prepared), vocab_size
        self._greedy = Sampler(SamplerSettings(temperature=0), prepared.config.vocab_size)
        self._history: list[int] = []
        self.costs, self.failed = DraftCosts(), ""

    def load(self) -> Iterator[Progress]:
        """Load its weights."""
        for done, total in self._engine.model.load():
            yield Progress("loading the draft model", done, total, "bytes")
        if (states := self._engine.cache.states) is not None:
            states.is_draft = True

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft the most likely tokens of a run with these settings."""
        self._greedy = greedy_sampler(settings, breakers, self._greedy)

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """The target's hidden states are not used."""

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`. Runs nothing."""
        self._history = list(history)

    def tokens_behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""
        missed = tokens - len(self._engine.tokens)
        return max(1, missed) if missed > -MAX_CATCH_UP else tokens  # it holds its last draft; a shorter text is a new one

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Catch up with the sequence, so that no draft waits for that; stops early if `cancelled`."""
        if cancelled() or not self._can_follow():
            return
        before = self._engine.prefill_s
        with self._disabled_by_errors():
            for event in self._engine.prefill(self._history):
                if isinstance(event, Progress):
                    yield replace(event, phase="reading the prompt (draft model)")
                if cancelled():
                    return
            self.costs.record_prefill(self._engine.num_prefilled_tokens, self._engine.prefill_s - before)

    def propose(self, limit: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `limit` tokens; None if the sequence exceeds the context or has other tokens, if `cancelled`, and once it has `failed`."""
        if limit < 1 or not self._can_follow():
            return None
        engine, drafted = self._engine, []
        with self._disabled_by_errors():
            started = time.perf_counter()
            engine.set_tokens(engine.tokens)  # a draft continues from them, however few tokens are new
            for _ in engine.prefill(self._history):
                if cancelled():
                    return None
            caught_up_at = time.perf_counter()
            for step in engine.generate(self._greedy, limit, frozenset()):
                if cancelled():
                    return None
                if step.token >= self._vocab_size:
                    break
                drafted.append(step.token)
            self.costs.record_draft(len(drafted), time.perf_counter() - caught_up_at, engine.num_prefilled_tokens, caught_up_at - started)
        return Draft(tuple(drafted), MODEL_DRAFT) if drafted and not self.failed else None

    def _can_follow(self) -> bool:
        """Whether it can process the sequence."""
        return not self.failed and len(self._history) < self._engine.n_ctx and max(self._history) < self._engine.config.vocab_size

    @contextmanager
    def _disabled_by_errors(self) -> Iterator[None]:
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
