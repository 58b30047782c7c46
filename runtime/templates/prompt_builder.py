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
from ..tokens.plain_text import TOKEN_BREAK, PlainText
from .template import TemplateRefused

if TYPE_CHECKING:
    from ..engine import Engine
    from ..events import Notice, Progress

ANSWER_CHANNEL = "<|channel|>final<|message|>"
NO_TEMPLATE = "this is a base model without a chat template: it continues the text as it stands"
NO_SYSTEM_ROLE = "this model's chat template has no system role: the system prompt goes in front of the first message"


class PromptBuilder:
    """Builds the prompts of one model. With `raw`, or without a template, texts are concatenated.

    `folds_system`: the system prompt is prepended to the first message, because the template rejects or drops it.
    `cached`: text and sampled ids of what the KV cache holds; ("", []) where unknown.
    `media`: items that the media markers of texts refer to (`images/media_markers.py`), None for a text-only model.
    """

    def __init__(self, tokenizer: Tokenizer, raw: bool = False, media: MediaCache | None = None) -> None:
        self.tokenizer, self.raw, self.folds_system = tokenizer, raw or tokenizer.template is None, False
        self.media = media if media is not None and media.encoders else None
        self.cached: tuple[str, list[int]] = ("", [])

    def render(self, messages: Sequence[Mapping[str, Any]], system: str | None, think: str = "auto",
                 options: Mapping[str, Any] | None = None, system_extras: Mapping[str, Any] | None = None) -> str:
        """The text of a prompt. A system prompt that the template rejects or drops is prepended to the first message.

        `think`: "auto" leaves reasoning to the model, "on" and "off" set the template's switch.
        `options`: template variables, which take precedence over that switch.
        `system_extras`: further keys of the system message.
        """
        if self.raw:
            return "".join([system or "", *(message["content"] or "" for message in messages)])
        switches = {} if think == "auto" else self.tokenizer.thinking(think == "on")
        system_texts = [system] if system else []
        if think == "off" and self.tokenizer.no_think:
            system_texts.append(self.tokenizer.no_think)
        render = partial(self._render, partial(self.tokenizer.render_chat, **{**switches, **(options or {})}))
        if not system_texts and not system_extras:
            return render(messages)
        if not (self.folds_system and system and messages):
            try:
                prompt = render([{**(system_extras or {}), "role": "system", "content": "\n".join(system_texts)}, *messages])
            except TemplateRefused:
                if not messages:
                    raise
                prompt = "" if system else render(messages)
            if not system or system.strip() in prompt or not messages:
                return prompt
        first, *rest = messages
        prompt = render([{**first, "content": f"{system}\n\n{first['content'] or ''}"}, *rest])
        self.folds_system = True
        return prompt

    def _render(self, render: Render, messages: Sequence[Message]) -> str:
        """Messages through the template. A template that only accepts content parts would drop plain text, so parts are tried then."""
        texts = [each["content"] or "" for each in messages]
        markers = [found for each in texts for found in MARKER.finditer(each)]
        if self.media is None:
            if markers:
                plural = marker_modality(markers[0]).plural
                raise UsageError(f"this conversation contains {plural}, which the model does not accept", "continue with a model that does")
            return render(messages)
        if not markers:
            prompt = render(messages)
            if all(text.strip() in prompt for each, text in zip(messages, texts, strict=True) if each["role"] == "user"):
                return prompt
        return with_marks(render, messages, {modality: (encoder.placeholder, encoder.placeholder_text) for modality,
                                             encoder in self.media.encoders.items()})

    def with_answer_prefix(self, prompt: str, answer_prefix: str) -> str:
        """A prompt followed by the beginning of its answer, after an empty reasoning block where the template opens one."""
        if not answer_prefix:
            return prompt
        tags = self.tokenizer.think_tags
        closing = f"{tags.close}\n\n" if tags and tags.opened_by(prompt) else ANSWER_CHANNEL if self.tokenizer.channels else ""
        return prompt + closing + answer_prefix

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a prompt.

        Where it continues what the cache holds, the sampled ids are reused: tokenizing their text again could split it differently, and the
        cached keys would not match from there on.
        """
        return self.extend(self.cached, prompt) or self._token_ids(prompt, add_special_tokens=self.raw)

    def encode_media(self, prompt: str, engine: Engine, cancelled: Callable[[], bool]) -> Iterator[Progress | Notice]:
        """Encode the media of a prompt before it is tokenized, except those of the cached text; stops when `cancelled`.

        Raises MediaGone, and ContextOverflow before anything is encoded.
        """
        if self.media is None:
            return
        cached_text = self.cached[0] if prompt.startswith(self.cached[0]) else ""
        items = [picture for digest in marker_digests(cached_text) for picture in self.media.pending(digest)]  # encoding them was cancelled
        if not (items := [*items, *(self.media.find(digest) for digest in marker_digests(prompt[len(cached_text) :]))]):
            return
        # cached text is not counted anew: its media may be gone
        tokens = self.count(prompt[len(cached_text) :]) + len(self.cached[1] if cached_text else ())
        if engine.options.overflow != "shift" and tokens >= engine.n_ctx:
            raise context_overflow(tokens, engine.n_ctx, engine.config.context_length)
        yield from self.media.encode(items, cancelled)

    def count(self, prompt: str) -> int:
        """Number of tokens of a prompt; its media need not be encoded."""
        if self.media is None or not (digests := marker_digests(prompt)):
            return len(self.tokenize(prompt))
        prompt = self._with_spaces(prompt)
        text_ids = self._text_ids(MARKER.sub("", prompt), self.raw)
        shared_tokens = sum(self.media.encoders[marker_modality(mark)].shares_border for mark in ADJACENT_MARKER.finditer(prompt))
        return len(text_ids) + sum(map(self.media.token_count, digests)) - shared_tokens

    def _token_ids(self, text: str, add_special_tokens: bool, media_before: int = 0) -> list[int]:
        """Token ids of a text in which media ids replace the markers; `media_before` media items precede it. Raises MediaGone."""
        if self.media is None or not (digests := marker_digests(text)):
            return self._text_ids(text, add_special_tokens)
        text = self._with_spaces(text)
        span_hash = self._span_hash(text)
        media_ids = [self.media.ids(digest, number, span_hash) for number, digest in enumerate(digests, start=media_before)]
        placeholders = [self.media.encoders[marker_modality(mark)].placeholder for mark in MARKER.finditer(text)]
        placeholder_ids, replacements = {self.tokenizer.added.get(each) for each in placeholders}, iter(placeholders)
        ids = self._text_ids(MARKER.sub(lambda mark: next(replacements), text), add_special_tokens)
        if None in placeholder_ids or sum(token in placeholder_ids for token in ids) != len(media_ids):
            # a placeholder is no token of this vocabulary, or the text itself contains one
            first, *rest = MARKER.split(text)[::2]
            ids = self._text_ids(first, add_special_tokens)
            for item_ids, text_part, mark in zip(media_ids, rest, MARKER.finditer(text), strict=True):
                ids += self._without_shared_border(ids, item_ids, mark) + self._text_ids(text_part, False)
            return ids
        merged, replacements = [], zip(media_ids, MARKER.finditer(text), strict=True)
        for token in ids:
            merged += self._without_shared_border(merged, *next(replacements)) if token in placeholder_ids else (token,)
        return merged

    def _span_hash(self, text: str) -> bytes:
        """Hash of the text between images that attend to each other; empty for fewer than two."""
        markers = [] if self.media is None else [
            mark for mark in MARKER.finditer(text) if self.media.encoders[marker_modality(mark)].joint_attention]
        return hashlib.sha256(text[markers[0].start() : markers[-1].end()].encode()).digest() if len(markers) > 1 else b""

    def _with_spaces(self, text: str) -> str:
        """A text with a space after images that require one."""
        def with_space(mark: re.Match[str]) -> str:
            next_char = text[mark.end() : mark.end() + 1]
            shares_border = self.media.encoders[marker_modality(mark)].shares_border
            needs_space = shares_border and next_char and not next_char.isspace() and next_char not in f"<{BEGIN}"
            return f"{mark[0]} " if needs_space else mark[0]

        return MARKER.sub(with_space, text)

    def _without_shared_border(self, before: Sequence[int], item_ids: list[int], mark: re.Match[str]) -> list[int]:
        """Tokens of an image, without the first if an adjacent image before it ends with the same token."""
        shares_border = self.media.encoders[marker_modality(mark)].shares_border and before[-1:] == item_ids[:1]
        return item_ids[1:] if shares_border else item_ids

    def _text_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text without media; no token spans a TOKEN_BREAK."""
        first, *parts = text.split(TOKEN_BREAK)
        ids = self.tokenizer.encode(first, add_special_tokens=add_special_tokens)
        plain_text = PlainText(self.tokenizer) if parts else None
        return ids + [token for part in parts for token in plain_text.encode_after(part)]

    def extend(self, cached: tuple[str, list[int]], prompt: str) -> list[int] | None:
        """Token ids of a prompt that extends cached text and ids; None for one that does not."""
        text, ids = cached
        added = self.added_ids(text, prompt)
        return None if added is None else ids + added

    def added_ids(self, text: str, prompt: str) -> list[int] | None:
        """Token ids of what a prompt adds to cached text; None where it does not extend it."""
        if text and prompt.startswith(text) and not (marker_digests(prompt[len(text) :]) and self._span_hash(prompt)):
            added = self._token_ids(prompt[len(text) :], add_special_tokens=False, media_before=len(marker_digests(text)))
            if not added or added[0] in self.tokenizer.stop_ids:
                return added
        return None

    def record_cached(self, prompt: str, ids: list[int], sampled: list[int], text: str) -> None:
        """Record what the cache holds: a prompt with its ids, followed by the `sampled` tokens of `text`."""
        self.cached = (prompt + text, ids + sampled) if self.tokenizer.decode(sampled) == text else ("", [])


def whole_text(content: object) -> str | None:
    """The content of a message as one text, with content parts on separate lines; None without content."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
