"""Streaming filters that separate reasoning from the answer, by tags or harmony channels, and how families mark it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .stream_filters import partial_suffix

Part = tuple[str, str]  # (kind "answer" | "thinking", text)


@dataclass(frozen=True)
class ThinkTags:
    """How a family marks reasoning. `behind`: what its template may put after the opening tag; `off`: template options that disable
    reasoning. `token`: the token that the opening tag begins with, where it is more than one. `ends`: what may follow the answer. `sign`: a
    token that identifies the vocabulary, where neither it nor the template contains the tag."""

    open: str
    close: str
    behind: str = ""
    off: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": False})
    token: str = ""
    ends: str = ""
    sign: str = ""

    @property
    def marks(self) -> tuple[str, str]:
        """The tokens that open and close reasoning."""
        return self.token or self.open, self.close

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.open) or bool(self.behind) and prompt.endswith(self.open + self.behind)


# The first whose opening tag a vocabulary or a template holds is the model's. Mistral's vocabularies hold the tag of all their models,
# those of Gemma 4's base models hold that of the others.
THINK_TAGS = (ThinkTags("◁think▷", "◁/think▷", sign="<|media_start|>"),  # Kimi-VL
              ThinkTags("<think>", "</think>"),
              ThinkTags("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", {"thinking_budget": 0}),
              ThinkTags("[THINK]", "[/THINK]"), ThinkTags("<|channel>thought", "<channel|>", token="<|channel>"),
              ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"), ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
              ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ends="[END FINAL RESPONSE]"))  # Apriel
OF_TEMPLATES = frozenset({"[THINK]", "<|channel>", THINK_TAGS[-1].open})
# Around the answer, of some that reason: Hunyuan, ERNIE and Granite, Command R7B and A, and their successors.
ANSWER_TAGS = (("<answer>", "</answer>"), ("<response>", "</response>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
               ("<|START_TEXT|>", "<|END_TEXT|>"))
ANSWER_SIGNS = {"<answer>": ("<｜hy_User｜>", "<|extra_0|>")}  # Hunyuan's vocabularies, which have the tag as a text alone
# Around calls of tools and what they bring, where vocabularies have them as words: of Gemma 4, Kimi, LFM2, DeepSeek and Cohere.
CALL_MARKS = frozenset(("""<|tool_call> <tool_call|> <|tool_response> <tool_response|> <|tool> <tool|> <|"|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
    <|tool_call_start|> <|tool_list_start|> <|tool_list_end|> <|tool_response_start|> <|tool_response_end|>
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
    <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
    <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>""").split())


class ThinkFilter:
    """Separates reasoning from the answer.

    Only a block at the beginning counts (after whitespace): later tags are text of the answer, which may be about tags. `started`: the
    prompt already ended with the opening tag. Whitespace around the block is dropped. `answers`: pairs of tags that may surround the
    answer; both are removed if it begins with one, the closing tag only at the very end.
    """

    def __init__(self, open: str = "<think>", close: str = "</think>", started: bool = False,
                 answers: Sequence[tuple[str, str]] = ()) -> None:
        self.open, self.close, self.answers = open, close, tuple(answers)
        self._end = ""  # the tag that closes the answer
        self._state = "thinking" if started else "before"
        self._trim = started  # drop white space at the start of the next part
        self._held = ""

    @property
    def at_answer(self) -> bool:
        """Whether the next text would be the answer; not while it may be the beginning of a tag."""
        return self._state in ("answer", "wrapped") or self._state != "thinking" and not self._held.strip()

    @property
    def may_open(self) -> bool:
        """Whether reasoning may still begin."""
        return self._state == "before"

    @property
    def is_thinking(self) -> bool:
        """Whether the text is inside reasoning."""
        return self._state == "thinking"

    @property
    def waiting(self) -> int:
        """Number of held-back characters."""
        return len(self._held)

    def push(self, text: str) -> list[Part]:
        """Parts that are certain now, in order, none empty."""
        parts: list[Part] = []
        self._held += text
        if self._state == "before":
            self._decide_beginning()
        if self._state == "thinking":
            self._think(parts)
        if self._state == "behind":
            self._decide_answer(self._held.lstrip())
        if self._state == "wrapped":
            stripped = self._held.rstrip()
            certain = stripped.removesuffix(self._end) if stripped.endswith(self._end) else \
                self._held[: len(self._held) - partial_suffix(self._held, (self._end,))]
            self._certain("answer", certain.rstrip(), parts)
        if self._state == "answer":
            self._emit("answer", self._held, parts)
            self._held = ""
        return parts

    def flush(self) -> list[Part]:
        """End of the text: what is held back is not a tag."""
        parts: list[Part] = []
        kind = "thinking" if self._state == "thinking" else "answer"
        if self._state == "wrapped" and self._held.rstrip().endswith(self._end):
            self._held = ""
        self._emit(kind, self._held.rstrip() if kind == "thinking" else self._held, parts)
        self._held = ""
        return parts

    def _decide_beginning(self) -> None:
        body = self._held.lstrip()
        if body.startswith(self.open):
            self._state, self._trim, self._held = "thinking", True, body[len(self.open) :]
        elif not self.open.startswith(body):
            self._decide_answer(body)

    def _decide_answer(self, body: str) -> None:
        """Check for an opening answer tag; waits while it may become one."""
        for open, close in self.answers:
            if body.startswith(open):
                self._state, self._trim, self._end, self._held = "wrapped", True, close, body[len(open) :]
                return
        if not any(open.startswith(body) for open, _ in self.answers):
            self._state = "answer"

    def _think(self, parts: list[Part]) -> None:
        before, close, after = self._held.partition(self.close)
        if close:
            self._emit("thinking", before.rstrip(), parts)
            self._state, self._trim, self._held = "behind", True, after
            return
        # white space is held too: if the closing tag follows, it is trimmed
        self._certain("thinking", self._held[: len(self._held) - partial_suffix(self._held, (self.close,))].rstrip(), parts)

    def _certain(self, kind: str, text: str, parts: list[Part]) -> None:
        self._emit(kind, text, parts)
        self._held = self._held[len(text) :]

    def _emit(self, kind: str, text: str, parts: list[Part]) -> None:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            parts.append((kind, text))


class ChannelFilter:
    """Tells reasoning from the answer where a turn is several messages, each on a channel: the harmony format of gpt-oss.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

    What is on `final`, or on no channel, is the answer; all else is shown as reasoning, with an empty line between two messages. `prompt`:
    how the prompt ends, which may be in the midst of a header or of a message. With `calls`, a message to a function is a part of the
    answer too, whatever its channel: to=functions.NAME<|message|>...<|end|>, from which a reader takes the call.
    """

    START, CHANNEL, MESSAGE, END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    FUNCTION = re.compile(r"to=functions\.[\w.-]+")
    HEADER_LIMIT = 256  # a longer header is none: what was held is shown

    def __init__(self, prompt: str = "", calls: bool = False) -> None:
        self._kind, self._held, self._said = "answer", "", ""  # kind of the message, None in a header; what of this kind came before
        self._fresh = False  # whether the message has no text yet
        self._calls, self._calling = calls, False  # is the message a call?
        begin = prompt.rfind(self.START)
        if begin >= 0:
            self._header(prompt[begin:])

    @property
    def at_answer(self) -> bool:
        """Whether the next text would be the answer; unknown inside a header."""
        return self._kind == "answer"

    may_open = False  # messages tell what they are

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thinking"

    @property
    def waiting(self) -> int:
        """Number of held-back characters."""
        return len(self._held)

    def _header(self, text: str) -> None:
        """Start the message whose header is `text`, or wait for the rest of it."""
        head, message, rest = text.partition(self.MESSAGE)
        if not message:
            self._kind, self._held = None, text
        elif self.END in rest:
            self._kind, self._held = None, ""
        else:
            name = head.rpartition(self.CHANNEL)[2].split() if self.CHANNEL in head else ()
            to = self.FUNCTION.search(head) if self._calls else None
            self._calling, self._held = to is not None, to.group() + self.MESSAGE if to else ""
            self._kind = "answer" if to or not name or name[0] == "final" else "thinking"
            self._fresh = not rest

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
        held = self._held + text
        head, message, rest = held.partition(self.MESSAGE)
        broken = self._broken(held)
        if len(head) - partial_suffix(head, (self.MESSAGE,)) > self.HEADER_LIMIT:
            broken = broken or self.HEADER_LIMIT + 1
        if broken:  # a model that knows no channels
            self._kind, self._held, self._fresh = "answer", "", True
            self._emit(self._behind_role(held[:broken]), parts)
            return held[broken:]
        if message:
            self._header(head + message)
            return rest
        self._held = held
        return ""

    def _broken(self, held: str) -> int:
        """Number of characters after which a text cannot become a header, 0 while it can."""
        own = self._behind_role(held)
        if own.startswith((self.START, self.CHANNEL, self.MESSAGE, "to=")):
            return 0
        marks = (self.START, self.CHANNEL, self.MESSAGE, "to=", "assistant")
        length = next((n for n in range(1, len(own) + 1) if not any(mark.startswith(own[:n]) for mark in marks)), 0)
        return length and len(held) - len(own) + length

    def _behind_role(self, header: str) -> str:
        return header.removeprefix(self.START).removeprefix("assistant").lstrip()

    def _in_message(self, text: str, parts: list[Part]) -> str:
        held = self._held + text
        marks = (self.END, self.START, self.CHANNEL)
        at = min((place for mark in marks if (place := held.find(mark)) >= 0), default=-1)
        certain = held[:at] if at >= 0 else held[: len(held) - partial_suffix(held, marks)]
        self._emit(certain + self.END if self._calling and at >= 0 else certain, parts)
        self._held = "" if at >= 0 else held[len(certain) :]
        if at < 0:
            return ""
        self._kind, self._held = None, ""
        return held[at:].removeprefix(self.END)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if text:
            if self._fresh and self._said == self._kind:
                text = "\n\n" + text
            self._fresh, self._said = False, self._kind
            parts.append((self._kind, text))

    def flush(self) -> list[Part]:
        """End of the text: what is held back of a message is text; an unfinished header is dropped."""
        parts: list[Part] = []
        if self._kind is None:
            own, whole_role = self._behind_role(self._held), self._held.removeprefix(self.START).startswith("assistant")
            if own and not own.startswith(("<|", "to=")) and (whole_role or not "assistant".startswith(own)):
                self._kind, self._held = "answer", own
        if self._kind is not None:
            self._emit(self._held, parts)
        self._held = ""
        return parts
