"""Builds prompts: messages through the chat template, with system prompt and reasoning switch, to text and token ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import UsageError
from ..images.media import MediaCache
from ..images.media_markers import ADJACENT_MARKER, BEGIN, MARKER, Message, Render, marker_digests, marker_modality
from ..images.media_markers import render_with_media as with_marks
from ..prefill_chunks import context_overflow
from ..tokenizer import Tokenizer
from ..tokens.plain_text import CUT, PlainText
from .template import TemplateRefused

if TYPE_CHECKING:
    from ..engine import Engine
    from ..events import Notice, Progress

ANSWER_CHANNEL = "<|channel|>final<|message|>"
NO_TEMPLATE = "this is a base model without a chat template: it continues the text as it stands"
NO_SYSTEM_ROLE = "this model's chat template has no system role: the system prompt goes in front of the first message"


class PromptBuilder:
    """Builds the prompts of one model. With `raw`, or without a template, texts are concatenated.

    `folds`: the system prompt is prepended to the first message, because the template rejects or drops it. `held`: text and sampled ids of
    what the cache holds; ("", []) where unknown. Texts contain media markers (`images/media_markers.py`) of items in `media`, None for a
    text-only model.
    """

    def __init__(self, tokenizer: Tokenizer, raw: bool = False, media: MediaCache | None = None) -> None:
        self.tokenizer, self.raw, self.folds = tokenizer, raw or tokenizer.template is None, False
        self.media = media if media is not None and media.encoders else None
        self.held: tuple[str, list[int]] = ("", [])

    def rendered(self, messages: Sequence[Mapping[str, Any]], system: str | None, think: str = "auto",
                 options: Mapping[str, Any] | None = None, beside: Mapping[str, Any] | None = None) -> str:
        """The text of a prompt. A system prompt that the template rejects or drops is prepended to the first message. `think`: "auto"
        leaves reasoning to the model, "on" and "off" set the template's switch; `options`: template variables, which take precedence.
        `beside`: further keys of the system message."""
        if self.raw:
            return "".join([system or "", *(message["content"] or "" for message in messages)])
        thinking = {} if think == "auto" else self.tokenizer.thinking(think == "on")
        said = [system] if system else []
        if think == "off" and self.tokenizer.no_think:
            said.append(self.tokenizer.no_think)
        render = partial(self._render, partial(self.tokenizer.render_chat, **{**thinking, **(options or {})}))
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

    def _render(self, render: Render, messages: Sequence[Message]) -> str:
        """Messages through the template. A template that only accepts content parts would drop plain text, so parts are tried then."""
        said = [each["content"] or "" for each in messages]
        has_pictures = [found for each in said for found in MARKER.finditer(each)]
        if self.media is None:
            if has_pictures:
                plural = marker_modality(has_pictures[0]).plural
                raise UsageError(f"this conversation contains {plural}, which the model does not accept", "continue with a model that does")
            return render(messages)
        if not has_pictures:
            prompt = render(messages)
            if all(text.strip() in prompt for each, text in zip(messages, said, strict=True) if each["role"] == "user"):
                return prompt
        return with_marks(render, messages, {modality: (sight.placeholder, sight.written) for modality,
                                             sight in self.media.encoders.items()})

    def going_on(self, prompt: str, said: str) -> str:
        """A prompt with the beginning `said` of its answer, after an empty reasoning block where the template opens one."""
        if not said:
            return prompt
        tags = self.tokenizer.think_tags
        closing = f"{tags.close}\n\n" if tags and tags.opened_by(prompt) else ANSWER_CHANNEL if self.tokenizer.channels else ""
        return prompt + closing + said

    def encoded(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Where it continues what the cache holds, the sampled ids are kept: tokenizing the text again could split
        it differently, and the cache would be lost from there on."""
        return self.behind(self.held, prompt) or self._ids(prompt, add_special_tokens=self.raw)

    def encode(self, prompt: str, engine: Engine, left: Callable[[], bool]) -> Iterator[Progress | Notice]:
        """Encode the media of a prompt before it is tokenized for `engine`, except those of the cached text, until `left` says that the
        client is gone. Raises MediaGone, and ContextOverflow before anything is encoded."""
        if self.media is None:
            return
        held = self.held[0] if prompt.startswith(self.held[0]) else ""
        found = [picture for digest in marker_digests(held) for picture in self.media.pending(digest)]  # looking at them was left
        if not (found := [*found, *(self.media.find(digest) for digest in marker_digests(prompt[len(held) :]))]):
            return
        tokens = self.count(prompt[len(held) :]) + len(self.held[1] if held else ())  # pictures of what is held may be gone
        if engine.options.overflow != "shift" and tokens >= engine.n_ctx:
            raise context_overflow(tokens, engine.n_ctx, engine.config.context_length)
        yield from self.media.encode(found, left)

    def count(self, prompt: str) -> int:
        """Number of tokens of a prompt, whose media need not be encoded."""
        if self.media is None or not (found := marker_digests(prompt)):
            return len(self.encoded(prompt))
        prompt = self._spaced(prompt)
        own = self._letters(MARKER.sub("", prompt), self.raw)
        shared = sum(self.media.encoders[marker_modality(mark)].bordered for mark in ADJACENT_MARKER.finditer(prompt))
        return len(own) + sum(map(self.media.token_count, found)) - shared

    def _ids(self, text: str, add_special_tokens: bool, before: int = 0) -> list[int]:
        """Token ids of a text after `before` media items, with markers replaced by media ids. Raises MediaGone."""
        if self.media is None or not (found := marker_digests(text)):
            return self._letters(text, add_special_tokens)
        text = self._spaced(text)
        within = self._within(text)
        shown = [self.media.ids(digest, number, within) for number, digest in enumerate(found, start=before)]
        places = [self.media.encoders[marker_modality(mark)].placeholder for mark in MARKER.finditer(text)]
        numbers, waiting = {self.tokenizer.added.get(each) for each in places}, iter(places)
        ids = self._letters(MARKER.sub(lambda mark: next(waiting), text), add_special_tokens)
        if None in numbers or sum(token in numbers for token in ids) != len(shown):
            # one is letters for this vocabulary, or the text has another one
            first, *rest = MARKER.split(text)[::2]
            ids = self._letters(first, add_special_tokens)
            for own, piece, mark in zip(shown, rest, MARKER.finditer(text), strict=True):
                ids += self._beside(ids, own, mark) + self._letters(piece, False)
            return ids
        made, waiting = [], zip(shown, MARKER.finditer(text), strict=True)
        for token in ids:
            made += self._beside(made, *next(waiting)) if token in numbers else (token,)
        return made

    def _within(self, text: str) -> bytes:
        """Hash of the text that images with mutual attention span; empty for fewer than two."""
        found = [mark for mark in MARKER.finditer(text) if self.media is not None and self.media.encoders[marker_modality(mark)].together]
        return hashlib.sha256(text[found[0].start() : found[-1].end()].encode()).digest() if len(found) > 1 else b""

    def _spaced(self, text: str) -> str:
        """A text with a space after images that require one."""
        def behind(mark: re.Match[str]) -> str:
            follows = text[mark.end() : mark.end() + 1]
            bordered = self.media.encoders[marker_modality(mark)].bordered
            spaced = bordered and follows and not follows.isspace() and follows not in f"<{BEGIN}"
            return f"{mark[0]} " if spaced else mark[0]

        return MARKER.sub(behind, text)

    def _beside(self, before: Sequence[int], own: list[int], mark: re.Match[str]) -> list[int]:
        """Tokens of an image, without the one that it shares with an adjacent image before it."""
        shares = self.media.encoders[marker_modality(mark)].bordered and before[-1:] == own[:1]
        return own[1:] if shares else own

    def _letters(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text without media; no token spans a CUT."""
        begin, *rest = text.split(CUT)
        ids = self.tokenizer.encode(begin, add_special_tokens=add_special_tokens)
        plain = PlainText(self.tokenizer) if rest else None
        return ids + [token for part in rest for token in plain.behind(part)]

    def behind(self, held: tuple[str, list[int]], prompt: str) -> list[int] | None:
        """Token ids of a prompt that extends cached text and ids; None for one that does not."""
        text, ids = held
        rest = self.rest(text, prompt)
        return None if rest is None else ids + rest

    def rest(self, text: str, prompt: str) -> list[int] | None:
        """Token ids of what a prompt adds to cached text; None where it does not extend it."""
        if text and prompt.startswith(text) and not (marker_digests(prompt[len(text) :]) and self._within(prompt)):
            rest = self._ids(prompt[len(text) :], add_special_tokens=False, before=len(marker_digests(text)))
            if not rest or rest[0] in self.tokenizer.stop_ids:
                return rest
        return None

    def hold(self, prompt: str, ids: list[int], made: list[int], text: str) -> None:
        """Record that after this prompt with these ids, tokens `made` were sampled as `text`."""
        self.held = (prompt + text, ids + made) if self.tokenizer.decode(made) == text else ("", [])


def whole_text(content: object) -> str | None:
    """The content of a message as one text, with content parts on separate lines; None without content."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
