"""Messages as a model reads them: through its chat template, with the system prompt and the wish for reasoning where that has a place for
them, and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..text import Tokenizer
from .template import TemplateRefused

ANSWER_CHANNEL = "<|channel|>final<|message|>"
NO_TEMPLATE = "this is a base model without a chat template: it continues the text as it stands"
NO_SYSTEM_ROLE = "this model's chat template has no system role: the system prompt goes in front of the first message"


class Prompts:
    """The prompts of one model. With `raw`, or where there is no template, texts follow one another as they stand.

    `folds`: whether the system prompt goes in front of the first message, since the template refuses or drops it. `held`: what the cache
    holds, as a text and as the ids that it was sampled in; ("", []) where that is not known.
    """

    def __init__(self, tokenizer: Tokenizer, raw: bool = False) -> None:
        self.tokenizer, self.raw, self.folds = tokenizer, raw or tokenizer.template is None, False
        self.held: tuple[str, list[int]] = ("", [])

    def rendered(self, messages: Sequence[Mapping[str, Any]], system: str | None, think: str = "auto",
                 options: Mapping[str, Any] | None = None, beside: Mapping[str, Any] | None = None) -> str:
        """The text of a prompt. A system prompt that the template refuses, or drops, goes in front of the first message. `think`: auto
        leaves reasoning to the model, on and off ask the template for it; `options` reach that as variables, and win. `beside`: keys that
        the system's message has beside its words."""
        if self.raw:
            return "".join([system or "", *(message["content"] or "" for message in messages)])
        thinking = {} if think == "auto" else self.tokenizer.thinking(think == "on")
        said = [system] if system else []
        if think == "off" and self.tokenizer.no_think:
            said.append(self.tokenizer.no_think)
        render = partial(self.tokenizer.render_chat, **{**thinking, **(options or {})})
        if not said and not beside:
            return render(messages)
        if not (self.folds and system and messages):
            try:
                prompt = render([{**(beside or {}), "role": "system", "content": "\n".join(said)}, *messages])
            except TemplateRefused:
                if not messages:
                    raise
                prompt = "" if system else render(messages)
            if not system or system.strip() in prompt or not messages:
                return prompt
        first, *rest = messages
        prompt = render([{**first, "content": f"{system}\n\n{first['content'] or ''}"}, *rest])
        self.folds = True
        return prompt

    def going_on(self, prompt: str, said: str) -> str:
        """A prompt whose answer begins with `said`: it goes on behind its reasoning, also where the template opens one."""
        if not said:
            return prompt
        tags = self.tokenizer.think_tags
        closing = f"{tags.close}\n\n" if tags and tags.opened_by(prompt) else ANSWER_CHANNEL if self.tokenizer.channels else ""
        return prompt + closing + said

    def encoded(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Where it continues what the cache holds, the ids of the answer as it was sampled are kept: encoding its
        text again may cut it differently, and the cache would be thrown away from there on."""
        return self.behind(self.held, prompt) or self.tokenizer.encode(prompt, add_special_tokens=self.raw)

    def behind(self, held: tuple[str, list[int]], prompt: str) -> list[int] | None:
        """Token ids of a prompt that goes on from what is held as a text and as ids; None for one that does not."""
        text, ids = held
        if text and prompt.startswith(text):
            rest = self.tokenizer.encode(prompt[len(text) :], add_special_tokens=False)
            if not rest or rest[0] in self.tokenizer.stop_ids:
                return ids + rest
        return None

    def hold(self, prompt: str, ids: list[int], made: list[int], text: str) -> None:
        """Behind a prompt of these ids the tokens `made` were sampled, as `text`."""
        self.held = (prompt + text, ids + made) if self.tokenizer.decode(made) == text else ("", [])


def whole_text(content: object) -> str | None:
    """The content of a message as one text, its parts on lines of their own; None where it has none."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
