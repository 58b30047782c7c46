"""A slot of the server: one sequence with its KV cache, which serves one request after another and keeps the last one's tokens for
prefix reuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..prefill_chunks import common_prefix
from ..sessions.shared_prefix import MIN_SHARED_TOKENS
from ..templates.prompt_builder import PromptBuilder

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales
    from ..engine import Engine
    from ..sessions.prompt_cache import PromptCache

MIN_GAIN = 4  # a slot's cached prefix is reused in place if it has this many times the tokens that are evicted


@dataclass
class Slot:
    """One sequence of the server and its state between requests."""

    engine: Engine
    prompts: PromptBuilder  # knows the cached tokens as text
    prompt_cache: PromptCache | None  # saves sequences that another request evicts, None if that is off
    prompt_tokens: int = 0  # of the last request
    last_request: int = 0  # its number, counted over all slots
    is_free: bool = True

    @contextmanager
    def occupy(self, request_number: int) -> Iterator[Slot]:
        """Context manager: the slot is busy with a request."""
        self.is_free, self.last_request = False, request_number
        try:
            yield self
        finally:
            self.is_free = True

    def reusable_tokens(self, prompt: str | list[int], fresh_ids: list[int], choice: AdapterScales) -> int:
        """How many tokens of a prompt are cached here. `fresh_ids`: its token ids if nothing is reused.

        0 if they were computed with other adapter scales, or if using them would evict another request's prompt although the common prefix
        can be copied instead.
        """
        engine, ids = self.engine, fresh_ids
        if engine.adapter_scales != choice:
            return 0
        if isinstance(prompt, str):
            ids = self.prompts.extend(self.prompts.cached, prompt) or fresh_ids
        reusable = engine.cache.reachable_length(min(common_prefix(engine.tokens, ids), len(ids) - 1))
        evicted = min(self.prompt_tokens, len(engine.tokens)) - reusable
        return reusable if evicted < min(MIN_SHARED_TOKENS, reusable / MIN_GAIN) else 0

    def begin(self, skip_cache: bool) -> None:
        """Prepare for a request. `skip_cache`: reuse no cached prefix, of this slot or of another."""
        self.engine.may_share_prefix = not skip_cache
        if skip_cache:
            self.engine.reset()
            self.prompts.cached = "", []

    def tokenize(self, prompt: str, choice: AdapterScales) -> list[int]:
        """Token ids of a prompt, continuing the cached ones where they match."""
        uncached = PromptBuilder(self.prompts.tokenizer, media=self.prompts.media)
        return (self.prompts if self.engine.adapter_scales == choice else uncached).tokenize(prompt)
