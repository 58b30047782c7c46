"""A sequence of a model, as a server has several of: one answer after the other goes to it, and what it holds of the last one may be gone
on from by the next."""

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
    """A sequence, which one answer after the other goes to. `prompts` knows what its cache holds as a text; `prompt`: tokens of the last
    one; `used`: when it had its last answer, in answers of all."""

    engine: Engine
    prompts: PromptBuilder
    kept: PromptCache | None
    prompt: int = 0
    used: int = 0
    is_free: bool = True

    @contextmanager
    def taken(self, used: int) -> Iterator[Slot]:
        """Around an answer that goes to it, the `used`th of all."""
        self.is_free, self.used = False, used
        try:
            yield self
        finally:
            self.is_free = True

    def saves(self, prompt: str | list[int], plain: list[int], choice: AdapterScales) -> int:
        """Tokens of a prompt that are held here and need not be read; 0 where it would take the place of another one's, whose beginning can
        be copied from here instead, or where what is held was read with another choice. `plain`: the ids of a text that goes on from
        nothing that is held."""
        engine, ids = self.engine, plain
        if engine.choice != choice:
            return 0
        if isinstance(prompt, str):
            ids = self.prompts.behind(self.prompts.held, prompt) or plain
        has = engine.cache.reach(min(common_prefix(engine.tokens, ids), len(ids) - 1))
        lost = min(self.prompt, len(engine.tokens)) - has
        return has if lost < min(WORTH, has / LITTLE) else 0

    def begin(self, anew: bool) -> None:
        """Before an answer: whether its prompt is read as if nothing of it were held, here or by another sequence."""
        self.engine.borrows = not anew
        if anew:
            self.engine.reset()
            self.prompts.held = "", []

    def encoded(self, prompt: str, choice: AdapterScales) -> list[int]:
        """Token ids of a prompt, which go on from those that are held where they were read so."""
        fresh = PromptBuilder(self.prompts.tokenizer, media=self.prompts.media)
        return (self.prompts if self.engine.choice == choice else fresh).encoded(prompt)
