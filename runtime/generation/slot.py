"""A slot of the server: one sequence with its KV cache, which serves one request after another and keeps the last one's tokens for
prefix reuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..prefill_chunks import common_prefix
from ..sessions.shared_prefix import WORTH
from ..templates.prompt_builder import PromptBuilder

if TYPE_CHECKING:
    from ..adapters.adapter_selection import AdapterScales
    from ..engine import Engine
    from ..sessions.prompt_cache import PromptCache

LITTLE = 4  # times that what is held of a prompt is more than what it takes the place of, where it goes on from there


@dataclass
class Slot:
    """`prompts` knows the cached tokens as text; `prompt`: prompt tokens of the last request; `used`: the number of the last request,
    counted over all slots."""

    engine: Engine
    prompts: PromptBuilder
    kept: PromptCache | None
    prompt: int = 0
    used: int = 0
    is_free: bool = True

    @contextmanager
    def taken(self, used: int) -> Iterator[Slot]:
        """Context manager: the slot is busy with request number `used`."""
        self.is_free, self.used = False, used
        try:
            yield self
        finally:
            self.is_free = True

    def saves(self, prompt: str | list[int], plain: list[int], choice: AdapterScales) -> int:
        """How many tokens of a prompt are cached here. 0 if using them would evict another request's prompt whose prefix can be copied
        instead, or if they were computed with other adapter scales. `plain`: token ids of the prompt if nothing is reused."""
        engine, ids = self.engine, plain
        if engine.adapter_scales != choice:
            return 0
        if isinstance(prompt, str):
            ids = self.prompts.behind(self.prompts.held, prompt) or plain
        has = engine.cache.reach(min(common_prefix(engine.tokens, ids), len(ids) - 1))
        lost = min(self.prompt, len(engine.tokens)) - has
        return has if lost < min(WORTH, has / LITTLE) else 0

    def begin(self, anew: bool) -> None:
        """Before a request; `anew`: reuse no cached prefix, of this slot or of another."""
        self.engine.may_share_prefix = not anew
        if anew:
            self.engine.reset()
            self.prompts.held = "", []

    def encoded(self, prompt: str, choice: AdapterScales) -> list[int]:
        """Token ids of a prompt, continuing the cached ones where they match."""
        fresh = PromptBuilder(self.prompts.tokenizer, media=self.prompts.media)
        return (self.prompts if self.engine.adapter_scales == choice else fresh).encoded(prompt)
