"""Prompt cache of a server: the KV cache of one conversation is saved before another replaces it, and restored when it continues.

Entries are ordinary sessions without messages, in a folder that lives as long as the server or among the user's sessions. An entry is found
by its tokens, as far as they are a prefix of the prompt, and by the text they were made from: an answer's tokens are those sampled, which
tokenizing its text again need not give. A conversation that continues gets bit-identical results to one that was never interrupted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import EffllmError, UsageError
from ...offload.size import format_size
from ..events import Notice, Progress
from ..prefill_chunks import common_prefix
from ..sampler import SamplerSettings
from .conversation_file import History
from .saved_cache import ADAPTERS, restore_cache, token_bytes
from .session_format import SavedCache, SavedSession, TokenizedText

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales
    from ..engine import Engine
    from ..prepare import EngineOptions
    from ..templates.prompt_builder import PromptBuilder
    from .saved_sessions import SavedSessions

PREFIX = "served-"  # of session names
MOST_TOKENS = 1 << 20  # of all entries that are searched, some 20 bytes of memory each; a small model's would fit on disk by far more
WORTH = 256  # tokens: fewer are recomputed in about the time that files take
NO_TEXT = History([], None, SamplerSettings()).to_json()


@dataclass(frozen=True)
class CachedPrompt:
    """A saved prompt with its answer: the tokens in the cache, and the `text` known to correspond to `ids` ("" for none). `adapted_by`: the
    adapters and scales that it was computed with."""

    name: str
    tokens: array[int]
    text: str
    ids: array[int]
    adapted_by: str = ""


def conflicting_flag(options: EngineOptions) -> str:
    """The flag that makes caches useless to other prompts than their own; "" if there is none."""
    return "--kv-read sparse" if options.kv_read == "sparse" else f"--kv {options.kv}" if "+" in options.kv else ""


def refuse_inexact_cache(options: EngineOptions, wanted: str = "--keep-prompts") -> None:
    """Raises UsageError if there is a `conflicting_flag`, naming the flag that asks for caches to be reused."""
    if what := conflicting_flag(options):
        raise UsageError(f"with {what} prompt caches cannot be stored", f"leave out {what} or {wanted}")


def known_tokenization(tokens: Sequence[int], text: str, ids: Sequence[int]) -> TokenizedText | None:
    """The text of these tokens if they are known to be its tokenization into `ids`; else None."""
    known = min(len(tokens), len(ids))
    return TokenizedText(text, tuple(ids), None) if text and tuple(ids[:known]) == tuple(tokens[:known]) else None


def _packed(tokens: Sequence[int]) -> array[int]:
    """Tokens in 8 bytes each, media tokens included."""
    return array("Q", tokens)


class PromptCache:
    """The cache of one engine, in one session folder; `said` receives a message when something is saved. Raises UsageError if the engine's
    caches cannot be restored."""

    def __init__(self, engine: Engine, sessions: SavedSessions, said: str = "") -> None:
        refuse_inexact_cache(engine.options)
        self.engine, self.sessions, self.said = engine, sessions, said
        self._kept: dict[str, CachedPrompt] = {}
        self._looked = [False]  # whether existing entries have been loaded
        self._prompt = 0  # prompt tokens in the cache that are worth saving

    def beside(self, engine: Engine) -> PromptCache:
        """The same cache for another sequence of the model; entries are shared."""
        other = copy(self)
        other.engine, other._prompt = engine, 0
        return other

    def switch_to(self, prompt: str | None, ids: list[int], prompts: PromptBuilder, lasting: int | None = None,
                choice: AdapterScales | None = None) -> Generator[Progress | Notice, None, list[int]]:
        """Before a prompt is read: save what it would overwrite, restore what it continues. Returns its token ids, which may follow the
        tokenization of a restored answer. `prompts` knows the text of the current cache; `prompt` is None if ids were given. `lasting`: how
        many of them are worth saving later, None for all. `choice`: adapter scales for this prompt, None to keep the current ones."""
        engine = self.engine
        choice = engine.adapter_scales if choice is None else choice
        if len(ids) >= engine.n_ctx:  # too long for this context
            return ids
        common = common_prefix(engine.tokens, ids) if choice == engine.adapter_scales else 0
        held = engine.cache.reachable_length(min(common, max(0, len(ids) - 1)))
        found, known, own = self._longest(prompt, ids, prompts, engine.prepared.adapters.digest_of(choice))
        if min(self._prompt, len(engine.tokens)) - held >= WORTH:
            yield from self._save(prompts)
        engine.choose(choice)
        if found is not None and found.name not in self._all():  # it was evicted to make room for what was just saved
            found = None
        if found is not None and known - held >= WORTH and (yield from self._restore(found)):
            ids = own.tolist()
            prompts.cached = found.text, found.ids.tolist()
        self._prompt = len(ids) if lasting is None else lasting
        return ids

    def _longest(self, prompt: str | None, ids: list[int], prompts: PromptBuilder,
                 adapted_by: str) -> tuple[CachedPrompt | None, int, array[int]]:
        """The entry that shares the longest prefix with the prompt, the length, and the prompt's ids if it continues from there. Runs for
        every request, so it does not build a list of 100,000 tokens per entry."""
        plain = _packed(ids)
        best: tuple[CachedPrompt | None, int, array[int]] = (None, 0, plain)
        for kept in self._all().values():
            if kept.adapted_by != adapted_by:
                continue
            rest = None if prompt is None else prompts.added_ids(kept.text, prompt)
            own = plain if rest is None else kept.ids + _packed(rest)
            known = common_prefix(kept.tokens, own)
            if self.engine.cache.states is not None and known < len(kept.tokens):
                continue  # states exist only after the last token
            if known > best[1]:
                best = kept, known, own
        return best

    def _all(self) -> dict[str, CachedPrompt]:
        """All entries of this model, read and run in the same way; also those of an earlier process."""
        if not self._looked[0]:
            self._looked[0] = True
            store = self.sessions.store
            for name in reversed([name for name in store.newest() if name.startswith(PREFIX)]):
                try:
                    self._note(store.read(name))
                except EffllmError:  # `effllm session list` reports it
                    continue
        return self._kept

    def _note(self, saved: SavedSession) -> None:
        cache = saved.cache
        if cache is not None and len(cache.tokens) <= self.engine.n_ctx and self._is_ours(cache):
            text, ids = (cache.tokenized_text.text, cache.tokenized_text.ids) if cache.tokenized_text else ("", ())
            kept = self._all()
            kept[saved.name] = CachedPrompt(saved.name, _packed(cache.tokens), text, _packed(ids), str(cache.identity.get(ADAPTERS, "")))
            while len(kept) > 1 and sum(len(each.tokens) for each in kept.values()) > MOST_TOKENS:
                del kept[next(iter(kept))]  # the oldest

    def _is_ours(self, cache: SavedCache) -> bool:
        """Whether it was made by this model, read and run in the same way; adapter scales may differ."""
        theirs, own = ({part: value for part, value in each.items() if part != ADAPTERS}
                       for each in (cache.identity, self.sessions.identity(self.engine)))
        return theirs == own

    def _save(self, prompts: PromptBuilder) -> Generator[Progress | Notice, None, None]:
        """Save the current cache, replacing entries that it continues."""
        tokens = tuple(self.engine.tokens)
        packed = _packed(tokens)
        tokenized_text = known_tokenization(tokens, *prompts.cached)
        if (large := self.engine.cache.read_nbytes) > self.sessions.budget:
            yield Notice(f"a prompt's cache of {format_size(large)} exceeds --session-disk {format_size(self.sessions.budget)}: it is "
                         "recomputed if the conversation continues")
            return
        adapted_by = self.engine.adapted_by
        name = PREFIX + hashlib.sha256(token_bytes(tokens) + adapted_by.encode()).hexdigest()[:12]
        if name in self._all():
            return
        try:
            for event in self.sessions.keep(self.engine, name, tokenized_text, NO_TEXT):
                if isinstance(event, SavedSession):
                    self._note(event)
                    yield from [Notice(self.said)] if self.said else ()
                else:
                    yield event
            before = [each.name for each in self._all().values() if each.name != name and each.adapted_by == adapted_by
                      and each.tokens == packed[: len(each.tokens)]]
            self.sessions.store.remove([each for each in before if self.sessions.store.has(each)])
            for each in [each for each in self._all() if not self.sessions.store.has(each)]:  # these, and those evicted to make room
                self._all().pop(each)
        except EffllmError as error:
            yield Notice(f"{error.message}: the previous prompt is recomputed if its conversation continues")

    def _restore(self, kept: CachedPrompt) -> Generator[Progress | Notice, None, bool]:
        """Restore an entry; returns whether that worked."""
        store = self.sessions.store
        try:
            saved = store.read(kept.name)
            if saved.cache is None or _packed(saved.cache.tokens) != kept.tokens:
                raise EffllmError(f"session {kept.name} lost its cache")
            with store.reading():
                yield from restore_cache(self.engine, store, saved)
            return True
        except EffllmError as error:
            self._all().pop(kept.name, None)
            yield Notice(f"{error.message}: the prompt is read")
            return False

