"""Prompt cache of a server: the KV cache of one conversation is saved before another replaces it, and restored when it continues.

Entries are ordinary sessions without messages, in a temporary folder of the server or among the user's sessions. An entry is found by its
tokens, as far as they are a prefix of the prompt, and by its text: an answer's tokens are those sampled, and tokenizing its text again may
give others. A conversation that continues gets bit-identical results to one that was never interrupted.
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
MAX_TOKENS = 1 << 20  # of all entries together: each takes about 20 bytes of memory, and the disk holds far more tokens of a small model
MIN_RECOMPUTED_TOKENS = 256  # minimum worth saving or restoring: fewer are prefilled in about the time that files take
NO_TEXT = History([], None, SamplerSettings()).to_json()


@dataclass(frozen=True)
class CachedPrompt:
    """A saved prompt with its answer."""

    name: str  # of its session
    tokens: array[int]  # in the cache
    text: str  # "" if unknown
    ids: array[int]  # the tokenization of `text`
    adapted_by: str = ""  # the adapters and scales that it was computed with


def conflicting_flag(options: EngineOptions) -> str:
    """The flag that makes caches useless to other prompts than their own; "" if there is none."""
    return "--kv-read sparse" if options.kv_read == "sparse" else f"--kv {options.kv}" if "+" in options.kv else ""


def refuse_inexact_cache(options: EngineOptions, flag: str = "--keep-prompts") -> None:
    """Raises UsageError if there is a `conflicting_flag`, naming the flag that asks for caches to be reused."""
    if what := conflicting_flag(options):
        raise UsageError(f"with {what} prompt caches cannot be stored", f"leave out {what} or {flag}")


def known_tokenization(tokens: Sequence[int], text: str, ids: Sequence[int]) -> TokenizedText | None:
    """The text of these tokens if they are known to be its tokenization into `ids`; else None."""
    num_known = min(len(tokens), len(ids))
    return TokenizedText(text, tuple(ids), None) if text and tuple(ids[:num_known]) == tuple(tokens[:num_known]) else None


def _packed(tokens: Sequence[int]) -> array[int]:
    """Tokens in 8 bytes each, media tokens included."""
    return array("Q", tokens)


class PromptCache:
    """The prompt cache of one engine, in one session folder.

    saved_notice: text of a Notice when an entry is saved, "" for none

    Raises UsageError if the engine's caches cannot be restored.
    """

    def __init__(self, engine: Engine, sessions: SavedSessions, saved_notice: str = "") -> None:
        refuse_inexact_cache(engine.options)
        self.engine, self.sessions, self.saved_notice = engine, sessions, saved_notice
        self._entries: dict[str, CachedPrompt] = {}
        self._is_loaded = [False]  # whether existing entries have been loaded; a list, shared by all sequences
        self._num_worth_saving = 0  # prompt tokens in the engine's cache that are worth saving

    def for_sequence(self, engine: Engine) -> PromptCache:
        """The same cache for another sequence of the model; entries are shared."""
        other = copy(self)
        other.engine, other._num_worth_saving = engine, 0
        return other

    def switch_to(self, prompt: str | None, ids: list[int], prompts: PromptBuilder, num_worth_saving: int | None = None,
                  choice: AdapterScales | None = None) -> Generator[Progress | Notice, None, list[int]]:
        """Before a prompt is prefilled: save the cache that it would overwrite, restore the entry that it continues. Returns the prompt's
        token ids, which may follow the tokenization of a restored answer.

        prompt: the text of `ids`, None if only ids are known
        prompts: its `cached` is the text of the engine's cache
        num_worth_saving: number of the ids that are worth saving later, None for all
        choice: adapter scales for this prompt, None to keep the current ones
        """
        engine = self.engine
        choice = engine.adapter_scales if choice is None else choice
        if len(ids) >= engine.n_ctx:  # too long for this context
            return ids
        common = common_prefix(engine.tokens, ids) if choice == engine.adapter_scales else 0
        reusable = engine.cache.reachable_length(min(common, max(0, len(ids) - 1)))
        entry, length, entry_ids = self._longest(prompt, ids, prompts, engine.prepared.adapters.digest_of(choice))
        if min(self._num_worth_saving, len(engine.tokens)) - reusable >= MIN_RECOMPUTED_TOKENS:
            yield from self._save(prompts)
        engine.choose(choice)
        if entry is not None and entry.name not in self._all():  # evicted to make room for the one just saved
            entry = None
        if entry is not None and length - reusable >= MIN_RECOMPUTED_TOKENS and (yield from self._restore(entry)):
            ids = entry_ids.tolist()
            prompts.cached = entry.text, entry.ids.tolist()
        self._num_worth_saving = len(ids) if num_worth_saving is None else num_worth_saving
        return ids

    def _longest(self, prompt: str | None, ids: list[int], prompts: PromptBuilder,
                 adapted_by: str) -> tuple[CachedPrompt | None, int, array[int]]:
        """The entry that shares the longest prefix with the prompt, the length, and the prompt's ids if it continues from there. Runs for
        every request, so it does not build a list of 100,000 tokens per entry."""
        packed_ids = _packed(ids)
        best: tuple[CachedPrompt | None, int, array[int]] = (None, 0, packed_ids)
        for entry in self._all().values():
            if entry.adapted_by != adapted_by:
                continue
            rest = None if prompt is None else prompts.added_ids(entry.text, prompt)
            entry_ids = packed_ids if rest is None else entry.ids + _packed(rest)
            length = common_prefix(entry.tokens, entry_ids)
            if self.engine.cache.states is not None and length < len(entry.tokens):
                continue  # states exist only after the last token
            if length > best[1]:
                best = entry, length, entry_ids
        return best

    def _all(self) -> dict[str, CachedPrompt]:
        """All entries that this engine can restore, including those of an earlier process."""
        if not self._is_loaded[0]:
            self._is_loaded[0] = True
            store = self.sessions.store
            for name in reversed([name for name in store.newest() if name.startswith(PREFIX)]):
                try:
                    self._add(store.read(name))
                except EffllmError:  # `effllm session list` reports it
                    continue
        return self._entries

    def _add(self, saved: SavedSession) -> None:
        cache = saved.cache
        if cache is not None and len(cache.tokens) <= self.engine.n_ctx and self._is_ours(cache):
            text, ids = (cache.tokenized_text.text, cache.tokenized_text.ids) if cache.tokenized_text else ("", ())
            entries = self._all()
            entries[saved.name] = CachedPrompt(saved.name, _packed(cache.tokens), text, _packed(ids), str(cache.identity.get(ADAPTERS, "")))
            while len(entries) > 1 and sum(len(entry.tokens) for entry in entries.values()) > MAX_TOKENS:
                del entries[next(iter(entries))]  # the oldest

    def _is_ours(self, cache: SavedCache) -> bool:
        """Whether it was made by this model with the same settings; adapter scales may differ."""
        cached, current = ({part: value for part, value in identity.items() if part != ADAPTERS}
                           for identity in (cache.identity, self.sessions.identity(self.engine)))
        return cached == current

    def _save(self, prompts: PromptBuilder) -> Generator[Progress | Notice, None, None]:
        """Save the current cache, replacing entries that it continues."""
        tokens = tuple(self.engine.tokens)
        packed = _packed(tokens)
        tokenized_text = known_tokenization(tokens, *prompts.cached)
        if (nbytes := self.engine.cache.read_nbytes) > self.sessions.budget:
            yield Notice(f"a prompt's cache of {format_size(nbytes)} exceeds --session-disk {format_size(self.sessions.budget)}: it is "
                         "recomputed if the conversation continues")
            return
        adapted_by = self.engine.adapted_by
        name = PREFIX + hashlib.sha256(token_bytes(tokens) + adapted_by.encode()).hexdigest()[:12]
        if name in self._all():
            return
        try:
            for event in self.sessions.keep(self.engine, name, tokenized_text, NO_TEXT):
                if isinstance(event, SavedSession):
                    self._add(event)
                    if self.saved_notice:
                        yield Notice(self.saved_notice)
                else:
                    yield event
            prefixes = [entry.name for entry in self._all().values() if entry.name != name and entry.adapted_by == adapted_by
                        and entry.tokens == packed[: len(entry.tokens)]]
            self.sessions.store.remove([prefix for prefix in prefixes if self.sessions.store.has(prefix)])
            for gone in [entry for entry in self._all() if not self.sessions.store.has(entry)]:  # these, and those evicted to make room
                self._all().pop(gone)
        except EffllmError as error:
            yield Notice(f"{error.message}: the previous prompt is recomputed if its conversation continues")

    def _restore(self, entry: CachedPrompt) -> Generator[Progress | Notice, None, bool]:
        """Restore an entry; returns whether that worked."""
        store = self.sessions.store
        try:
            saved = store.read(entry.name)
            if saved.cache is None or _packed(saved.cache.tokens) != entry.tokens:
                raise EffllmError(f"session {entry.name} lost its cache")
            with store.reading():
                yield from restore_cache(self.engine, store, saved)
            return True
        except EffllmError as error:
            self._all().pop(entry.name, None)
            yield Notice(f"{error.message}: the prompt is read")
            return False

