"""The formats in which models write tool calls, one entry each.

A model's format is not looked up by name: its chat template renders a known call, and the format that parses it is the model's
(`call_style`). A new format is a new entry here and, if its syntax is new, a body parser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..events import Call
from .body_parsers import BareJson, JsonObjects, NamedJson, TaggedArguments
from .cursor import Cursor, Mismatch, to_json
from .gemma import GemmaCall
from .harmony import HarmonyCall
from .python_calls import PythonCalls
from .schema import Tools

BodyParser = Callable[[Cursor, Tools], list[Call]]
Written = tuple[str, Mapping[str, Any]]  # name and arguments of a call


@dataclass(frozen=True)
class Format:
    """`open`: opening markers, after which `body` parses the rest. `section`: an optional marker before the first call, `closers` after
    the last. `bare`: no marker, so a call is only recognised at the beginning of an answer. `write`: renders calls, for templates that
    do not."""

    name: str
    open: tuple[str, ...]
    body: BodyParser
    section: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    bare: bool = False
    write: Callable[[Sequence[Written]], str] | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        return self.section + self.open

    def read(self, cursor: Cursor, tools: Tools) -> list[Call]:
        """The calls that begin here. Raises Incomplete or Mismatch."""
        if cursor.take_any(*self.section):
            cursor.skip_whitespace()
        if not cursor.take_any(*self.open):
            raise Mismatch
        return self.body(cursor, tools)


def _object(call: Written) -> str:
    return to_json({"name": call[0], "arguments": call[1]})


def _hermes(calls: Sequence[Written]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _listed(open: str, close: str) -> Callable[[Sequence[Written]], str]:
    return lambda calls: f"{open}[{', '.join(map(_object, calls))}]{close}"


def _python(open: str, between: str, close: str) -> Callable[[Sequence[Written]], str]:
    def write(calls: Sequence[Written]) -> str:
        said = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]
        return f"{open}{between.join(said)}{close}"

    return write


_PARAMETERS = TaggedArguments((">",), "<parameter=", ">", "</parameter>", ("</function>",))
_VALUES = TaggedArguments(("",), "<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",), "<arg_value>", strip_line_feeds=False)
_DSML = TaggedArguments(('">',), '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>", ("</｜DSML｜invoke>",), strip_line_feeds=False,
                        type_suffixes=('" string="true', '" string="false'))
_HUNYUAN = TaggedArguments(("<tool_sep:opensource>",), "<arg_key:opensource>", "</arg_key:opensource>", "</arg_value:opensource>",
                           ("</tool_call:opensource>",), "<arg_value:opensource>", strip_line_feeds=False)
_FENCE = ("```json", "```")

# Of formats that read the same text the first counts; those without a mark come last.
FORMATS = (
    Format("Hermes", ("<tool_call>",), JsonObjects(("</tool_call>",)), write=_hermes),
    Format("Qwen 3 Coder", ("<function=",), _PARAMETERS, ("<tool_call>",), ("</tool_call>",)),
    Format("Seed", ("<function=",), replace(_PARAMETERS, strip_line_feeds=False), ("<seed:tool_call>",), ("</seed:tool_call>",)),
    Format("GLM", ("<tool_call>",), _VALUES),
    Format("Hunyuan 3", ("<tool_call:opensource>",), _HUNYUAN, ("<tool_calls:opensource>",), ("</tool_calls:opensource>",)),
    Format("Mistral", ("[TOOL_CALLS]",), JsonObjects()),
    Format("Mistral 3", ("[TOOL_CALLS]",), NamedJson(("[ARGS]", ""), id="[CALL_ID]")),
    Format("DeepSeek V3", ("<｜tool▁call▁begin｜>",),
           NamedJson(close=("<｜tool▁call▁end｜>",), lead=("function<｜tool▁sep｜>",), fence=_FENCE),
           ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
    Format("DeepSeek V3.1", ("<｜tool▁call▁begin｜>",), NamedJson(("<｜tool▁sep｜>",), ("<｜tool▁call▁end｜>",)),
           ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)),
    Format("DeepSeek V3.2", ('<｜DSML｜invoke name="',), _DSML, ("<｜DSML｜function_calls>",), ("</｜DSML｜function_calls>",)),
    Format("DeepSeek V4", ('<｜DSML｜invoke name="',), _DSML, ("<｜DSML｜tool_calls>",), ("</｜DSML｜tool_calls>",)),
    Format("MiniMax M2", ('<invoke name="',),
           TaggedArguments(('">',), '<parameter name="', '">', "</parameter>", ("</invoke>",), strip_line_feeds=False),
           ("<minimax:tool_call>",), ("</minimax:tool_call>",)),
    Format("harmony", ("to=functions.",), HarmonyCall()),
    Format("Gemma 4", ("<|tool_call>call:",), GemmaCall()),
    Format("Granite 3", ("<|tool_call|>",), JsonObjects(("<|/tool_call|>", "")), write=_listed("<|tool_call|>", "")),
    Format("Kimi K2", ("<|tool_call_begin|>",),
           NamedJson(("<|tool_call_argument_begin|>",), ("<|tool_call_end|>",), numbered=True),
           ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
    Format("Cohere", ("<|START_ACTION|>",), JsonObjects(("<|END_ACTION|>",))),
    Format("LFM2", ("<|tool_call_start|>",), PythonCalls(("<|tool_call_end|>",)),
           write=_python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    Format("OLMo 3", ("<function_calls>",), PythonCalls(("</function_calls>",)),
           write=_python("<function_calls>\n", "\n", "\n</function_calls>")),
    Format("Apertus", ("<|tools_prefix|>",), JsonObjects(("<|tools_suffix|>",), name_as_key=True)),
    Format("Nemotron", ("<TOOLCALL>",), JsonObjects(("</TOOLCALL>",)), write=_listed("<TOOLCALL>", "</TOOLCALL>")),
    Format("Hunyuan", ("<tool_call>",), NamedJson(close=("</tool_call>",), fence=_FENCE), ("<tool_calls>",), ("</tool_calls>",)),
    Format("tool_calls", ("<tool_calls>",), JsonObjects(("</tool_calls>",)), write=_listed("<tool_calls>", "</tool_calls>")),
    Format("Solar", ("<|tool_call:begin|>",), NamedJson(("<|tool_call:args|>",), ("<|tool_call:end|>",), named="<|tool_call:name|>"),
           ("<|tool_calls|>",)),
    Format("Functionary", ("<function=",), NamedJson((">",), ("</function>",))),
    Format("MiniCPM", ('<function name="',),
           TaggedArguments(('">',), '<param name="', '">', "</param>", ("</function>",), strip_line_feeds=False)),
    Format("GigaChat", ("<|function_call|>",), JsonObjects()),
    Format("Phi 4 mini", ("functools",), JsonObjects(), write=_listed("functools", "")),
    Format("Llama 3", ("{",), BareJson(), ("<|python_tag|>",), bare=True),
    Format("Llama 4", ("[",), PythonCalls(bracket="["), bare=True),
)
HERMES = FORMATS[0]
