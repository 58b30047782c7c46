"""Streaming filters that separate reasoning from the answer, by tags or harmony channels, and how families mark it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .stream_filters import partial_suffix

Part = tuple[str, str]  # (kind "answer" | "thinking", text)


@dataclass(frozen=True)
class ThinkTags:
    """How a family marks reasoning."""

    open: str
    close: str
    after_open: str = ""  # what its template may put after the opening tag
    # template variables that disable reasoning
    disable_options: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": False})
    open_token: str = ""  # the token that the opening tag begins with, if the tag is several tokens
    answer_end: str = ""  # what may follow the answer
    vocabulary_token: str = ""  # identifies the vocabulary, if neither it nor the template contains the tag

    @property
    def tokens(self) -> tuple[str, str]:
        """The tokens that open and close reasoning."""
        return self.open_token or self.open, self.close

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.open) or bool(self.after_open) and prompt.endswith(self.open + self.after_open)


# The first entry whose opening tag is in the vocabulary or the template is the model's.
THINK_TAGS = (ThinkTags("◁think▷", "◁/think▷", vocabulary_token="<|media_start|>"),  # Kimi-VL
              ThinkTags("<think>", "</think>"),
              ThinkTags("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", {"thinking_budget": 0}),
              ThinkTags("[THINK]", "[/THINK]"), ThinkTags("<|channel>thought", "<channel|>", open_token="<|channel>"),
              ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"), ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
              ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", answer_end="[END FINAL RESPONSE]"))  # Apriel
# Tags that count only if the template has them: Mistral's vocabularies have the tag in all models, Gemma 4's also in base models.
TEMPLATE_ONLY_TAGS = frozenset({"[THINK]", "<|channel>", THINK_TAGS[-1].open})
# Tags around the answer of some reasoning models: Hunyuan, ERNIE and Granite, Command R7B and A, and their successors.
ANSWER_TAGS = (("<answer>", "</answer>"), ("<response>", "</response>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
               ("<|START_TEXT|>", "<|END_TEXT|>"))
ANSWER_TAG_VOCABULARIES = {"<answer>": ("<｜hy_User｜>", "<|extra_0|>")}  # tokens of Hunyuan's vocabularies, which lack the tag itself
# Tokens around tool calls and tool results: of Gemma 4, Kimi, LFM2, DeepSeek and Cohere.
TOOL_CALL_TOKENS = frozenset(("""<|tool_call> <tool_call|> <|tool_response> <tool_response|> <|tool> <tool|> <|"|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
    <|tool_call_start|> <|tool_list_start|> <|tool_list_end|> <|tool_response_start|> <|tool_response_end|>
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
    <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
    <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>""").split())


class ThinkFilter:
    """Separates reasoning from the answer.

    Only a block at the beginning counts (after whitespace): later tags are text of the answer, which may be about tags. Whitespace around
    the block is dropped.
    `starts_inside`: the prompt already ended with the opening tag.
    `answer_tags`: pairs of tags that may surround the answer; both are removed if it begins with one, the closing tag only at the very end.
    """

    def __init__(self, open: str = "<think>", close: str = "</think>", starts_inside: bool = False,
                 answer_tags: Sequence[tuple[str, str]] = ()) -> None:
        self.open, self.close, self.answer_tags = open, close, tuple(answer_tags)
        self._answer_close = ""  # the tag that closes the answer
        self._state = "thinking" if starts_inside else "before"
        self._strips_next = starts_inside  # drop whitespace at the start of the next part
        self._held_back = ""

    @property
    def at_answer(self) -> bool:
        """Whether the next text would be the answer; not while it may be the beginning of a tag."""
        return self._state in ("answer", "wrapped") or self._state != "thinking" and not self._held_back.strip()

    @property
    def may_open(self) -> bool:
        """Whether reasoning may still begin."""
        return self._state == "before"

    @property
    def is_thinking(self) -> bool:
        """Whether the text is inside reasoning."""
        return self._state == "thinking"

    @property
    def held_back_count(self) -> int:
        """Number of held-back characters."""
        return len(self._held_back)

    def push(self, text: str) -> list[Part]:
        """Parts that are certain now, in order, none empty."""
        parts: list[Part] = []
        self._held_back += text
        if self._state == "before":
            self._check_opening_tag()
        if self._state == "thinking":
            self._read_reasoning(parts)
        if self._state == "after reasoning":
            self._check_answer_tag(self._held_back.lstrip())
        if self._state == "wrapped":
            stripped = self._held_back.rstrip()
            if stripped.endswith(self._answer_close):
                certain = stripped.removesuffix(self._answer_close)
            else:
                certain = self._held_back[: len(self._held_back) - partial_suffix(self._held_back, (self._answer_close,))]
            self._release("answer", certain.rstrip(), parts)
        if self._state == "answer":
            self._emit("answer", self._held_back, parts)
            self._held_back = ""
        return parts

    def flush(self) -> list[Part]:
        """End of the text: what is held back is not a tag."""
        parts: list[Part] = []
        kind = "thinking" if self._state == "thinking" else "answer"
        if self._state == "wrapped" and self._held_back.rstrip().endswith(self._answer_close):
            self._held_back = ""
        self._emit(kind, self._held_back.rstrip() if kind == "thinking" else self._held_back, parts)
        self._held_back = ""
        return parts

    def _check_opening_tag(self) -> None:
        body = self._held_back.lstrip()
        if body.startswith(self.open):
            self._state, self._strips_next, self._held_back = "thinking", True, body[len(self.open) :]
        elif not self.open.startswith(body):
            self._check_answer_tag(body)

    def _check_answer_tag(self, body: str) -> None:
        """Check for an opening answer tag; waits while it may become one."""
        for open, close in self.answer_tags:
            if body.startswith(open):
                self._state, self._strips_next, self._answer_close, self._held_back = "wrapped", True, close, body[len(open) :]
                return
        if not any(open.startswith(body) for open, _ in self.answer_tags):
            self._state = "answer"

    def _read_reasoning(self, parts: list[Part]) -> None:
        before, close, after = self._held_back.partition(self.close)
        if close:
            self._emit("thinking", before.rstrip(), parts)
            self._state, self._strips_next, self._held_back = "after reasoning", True, after
            return
        # whitespace is held back too: it is trimmed if the closing tag follows
        self._release("thinking", self._held_back[: len(self._held_back) - partial_suffix(self._held_back, (self.close,))].rstrip(), parts)

    def _release(self, kind: str, text: str, parts: list[Part]) -> None:
        self._emit(kind, text, parts)
        self._held_back = self._held_back[len(text) :]

    def _emit(self, kind: str, text: str, parts: list[Part]) -> None:
        if self._strips_next:
            text = text.lstrip()
        if text:
            self._strips_next = False
            parts.append((kind, text))


class ChannelFilter:
    """Separates reasoning from the answer where a turn is several messages, each on a channel: the harmony format of gpt-oss.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

    What is on `final`, or on no channel, is the answer; all else is reasoning, with an empty line between two messages.
    `prompt`: the end of the prompt, which may be inside a header or a message.
    `emits_calls`: a message to a function is part of the answer too, whatever its channel: to=functions.NAME<|message|>...<|end|>, which
    `CallReader` parses.
    """

    START, CHANNEL, MESSAGE, END = MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    FUNCTION = re.compile(r"to=functions\.[\w.-]+")
    HEADER_LIMIT = 256  # characters; longer text is not a header, and is shown

    def __init__(self, prompt: str = "", emits_calls: bool = False) -> None:
        self._kind: str | None = "answer"  # of the message, None in a header
        self._last_kind = ""  # of the last text that was emitted
        self._held_back = ""
        self._is_empty = False  # the message has no text yet
        self._emits_calls, self._in_call = emits_calls, False
        start = prompt.rfind(self.START)
        if start >= 0:
            self._header(prompt[start:])

    @property
    def at_answer(self) -> bool:
        """Whether the next text would be the answer; unknown inside a header."""
        return self._kind == "answer"

    may_open = False  # each message states its channel

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thinking"

    @property
    def held_back_count(self) -> int:
        """Number of held-back characters."""
        return len(self._held_back)

    def _header(self, text: str) -> None:
        """Start the message whose header is `text`, or wait for the rest of it."""
        head, message, rest = text.partition(self.MESSAGE)
        if not message:
            self._kind, self._held_back = None, text
        elif self.END in rest:
            self._kind, self._held_back = None, ""
        else:
            channel = head.rpartition(self.CHANNEL)[2].split() if self.CHANNEL in head else ()
            function = self.FUNCTION.search(head) if self._emits_calls else None
            self._in_call, self._held_back = function is not None, function.group() + self.MESSAGE if function else ""
            self._kind = "answer" if function or not channel or channel[0] == "final" else "thinking"
            self._is_empty = not rest

    def push(self, text: str) -> list[Part]:
        """Parts that are certain now, in order, none empty."""
        parts: list[Part] = []
        while text:
            if self._kind is None:
                text = self._in_header(text, parts)
            else:
                text = self._in_message(text, parts)
        return parts

    def _in_header(self, text: str, parts: list[Part]) -> str:
        """Returns the text after the header."""
        pending = self._held_back + text
        head, message, rest = pending.partition(self.MESSAGE)
        invalid = self._invalid_length(pending)
        if len(head) - partial_suffix(head, (self.MESSAGE,)) > self.HEADER_LIMIT:
            invalid = invalid or self.HEADER_LIMIT + 1
        if invalid:  # the model does not write channels
            self._kind, self._held_back, self._is_empty = "answer", "", True
            self._emit(self._without_role(pending[:invalid]), parts)
            return pending[invalid:]
        if message:
            self._header(head + message)
            return rest
        self._held_back = pending
        return ""

    def _invalid_length(self, pending: str) -> int:
        """Number of characters after which a text cannot become a header, 0 while it can."""
        header = self._without_role(pending)
        if header.startswith((self.START, self.CHANNEL, self.MESSAGE, "to=")):
            return 0
        beginnings = (self.START, self.CHANNEL, self.MESSAGE, "to=", "assistant")
        length = next((n for n in range(1, len(header) + 1) if not any(mark.startswith(header[:n]) for mark in beginnings)), 0)
        return length and len(pending) - len(header) + length

    def _without_role(self, header: str) -> str:
        return header.removeprefix(self.START).removeprefix("assistant").lstrip()

    def _in_message(self, text: str, parts: list[Part]) -> str:
        pending = self._held_back + text
        enders = (self.END, self.START, self.CHANNEL)
        at = min((position for mark in enders if (position := pending.find(mark)) >= 0), default=-1)
        certain = pending[:at] if at >= 0 else pending[: len(pending) - partial_suffix(pending, enders)]
        self._emit(certain + self.END if self._in_call and at >= 0 else certain, parts)
        self._held_back = "" if at >= 0 else pending[len(certain) :]
        if at < 0:
            return ""
        self._kind, self._held_back = None, ""
        return pending[at:].removeprefix(self.END)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if text:
            if self._is_empty and self._last_kind == self._kind:
                text = "\n\n" + text
            self._is_empty, self._last_kind = False, self._kind
            parts.append((self._kind, text))

    def flush(self) -> list[Part]:
        """End of the text: what is held back of a message is text; an unfinished header is dropped."""
        parts: list[Part] = []
        if self._kind is None:
            header, has_role = self._without_role(self._held_back), self._held_back.removeprefix(self.START).startswith("assistant")
            if header and not header.startswith(("<|", "to=")) and (has_role or not "assistant".startswith(header)):
                self._kind, self._held_back = "answer", header
        if self._kind is not None:
            self._emit(self._held_back, parts)
        self._held_back = ""
        return parts
