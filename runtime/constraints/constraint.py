"""Constrained decoding: only tokens that a JSON schema or a grammar still allows may come next.

llguidance computes the allowed tokens from the bytes of the vocabulary; all others are masked before sampling. A constraint applies to the
content: reasoning before it is free. Speculation needs no special care, since a draft counts only if the sampler draws it; text that the
constraint forces is drafted for free.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ... import EffllmError, UsageError
from ...offload.safetensors_header import shown
from ..files.bounded_read import JSON_NBYTES, read_text
from ..tokens.text_stream import REPLACEMENT_CHAR
from .gbnf import RULE, SHALLOWER, GbnfError, place, to_lark
from .multiple_of import MULTIPLE
from .schema_cost import too_expensive
from .schema_rewrites import rewritten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ..tokenizer import Tokenizer
    from ..tokens.reasoning import ChannelFilter, ThinkFilter

FUEL = 5_000_000  # llguidance's step limit for multipleOf: some seconds at most
BLANK = "▁"  # SentencePiece's blank
ANY_OBJECT = "json"  # --schema json: any object
# White space between JSON tokens: a blank, or a newline with indentation. Models may repeat unlimited white space forever.
SPACE = {"whitespace_pattern": r" ?|\n[ \t]{0,24}"}
SCHEMA, GRAMMAR = "--schema", "--grammar"
LENIENT = 'leave it out; "x-guidance": {"lenient": true} in the schema ignores it'
SMALLER = "make it smaller: fewer entries, properties or alternatives, or less nesting"
HINTS = {**dict.fromkeys(("schema too large", "initial lexer configuration", "recursion limit exceeded"), SMALLER),
         "too deeply nested": SHALLOWER, "Unimplemented keys": LENIENT, "Unknown format": LENIENT,
         "oneOf constraints": 'use anyOf instead of oneOf; "x-guidance": {"coerce_one_of": true} in the schema does that'}
ITSELF = """GBNF itself, as 'root ::= "yes" | "no"', or """
# llguidance's message about an unresolved $ref.
LOST = re.compile(r"(?:(Pointer|Anchor)|Resource) '(?:json-schema:///)?([^']*)' (?:does not exist|is not present in a registry).*")
# llguidance's message about a position: line, what is wrong, and the source around it.
PLACE = re.compile(r"(?P<line>\d+)\(\d+\): (?P<what>.*?)(?: \(at \".*|(?: \d+ \| .*)?)$")
# What programs that ask a server for answers of a schema put around it.
MOST_SAID = 300  # llguidance quotes the whole grammar
ENVELOPE = "json_schema"
ENVELOPES = ("response_format", ENVELOPE, "schema")
# Every meaningful schema has one of these; JSON Schema ignores unknown keywords.
KEYWORDS = frozenset("""$ref $defs $schema $id $anchor $comment $dynamicRef definitions type enum const properties patternProperties
    additionalProperties required propertyNames minProperties maxProperties dependentRequired dependentSchemas dependencies items
    prefixItems additionalItems contains minItems maxItems uniqueItems unevaluatedItems unevaluatedProperties minLength maxLength pattern
    format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf anyOf allOf oneOf not if then else title description default
    examples x-guidance""".split())


@dataclass(frozen=True)
class Constraint:
    """What an answer must match: `grammar` in llguidance's format; `flag` and `name` for messages. `whole`: it covers all generated text
    including reasoning, not only the content."""

    grammar: str
    flag: str
    name: str
    whole: bool = False

    def opened(self, tokenizer: Tokenizer, model_rows: int) -> CompiledConstraint:
        """Compile for a tokenizer and a head of `model_rows` rows. Raises EffllmError."""
        tokens = tokenizer.vocabulary()
        rows = max(model_rows, 1 + max(tokens.values(), default=0))  # the text model of one that sees has no row for an image
        ends = sorted(end for end in tokenizer.stop_ids if end < model_rows)
        if not ends:
            raise EffllmError(f"{self.flag} needs a model with an end-of-text token, and this one has none",
                              "leave it out, or name the token as eos_token_id in generation_config.json")
        try:
            made = _library().LLTokenizer(tokenizer.to_json(), n_vocab=rows, eos_token=ends)
        except Exception as error:  # as below
            raise EffllmError(f"{self.flag} does not work with this tokenizer: {_line(error)}", "leave it out") from None
        tokens = {text: number for text, number in tokens.items() if number < model_rows}
        tags = tokenizer.think_tags
        opening = None if tags is None or tokenizer.channels else tokens.get(tags.tokens[0])
        return CompiledConstraint(self, made, model_rows, frozenset(ends), opening, _shown_bare(tokenizer, tokens))


def read_schema_flag(asked: str) -> Constraint:
    """The constraint of `--schema`: a file, inline JSON that begins with a brace, or `json`. Raises UsageError."""
    inline = asked.lstrip().startswith("{")
    name = "the schema" if inline else asked
    also = f"{ANY_OBJECT} for any object, the schema itself, or "
    text = '{"type": "object"}' if asked == ANY_OBJECT else asked if inline else _read(asked, SCHEMA, also)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{SCHEMA}: {name} is not JSON: {error}", "see json-schema.org for how a schema is written") from None
    except RecursionError:
        raise UsageError(f"{SCHEMA}: {name} is nested too deeply", "see json-schema.org for how a schema is written") from None
    for key in ENVELOPES:
        if isinstance(schema, dict) and isinstance(schema.get(key), dict) and schema.get("type", ENVELOPE) == ENVELOPE \
                and schema.keys() & KEYWORDS <= {"type", "description"}:
            schema = schema[key]
    return schema_constraint(schema, SCHEMA, name)


def schema_constraint(schema: object, flag: str, name: str) -> Constraint:
    """The constraint of a parsed JSON schema; `flag` and `name` for messages. Raises UsageError."""
    if not isinstance(schema, dict):
        raise UsageError(f"{flag}: {name} is not a JSON schema: it must be an object", "see json-schema.org for how a schema is written")
    if schema and schema.keys().isdisjoint(KEYWORDS):
        raise UsageError(f"{flag}: {name} has no keyword of JSON Schema: {shown(next(iter(schema)))} is none",
                         f"{ANY_OBJECT} for any object; see json-schema.org for how a schema is written")
    try:
        grammar = _library().LLMatcher.grammar_from_json_schema(rewritten(schema), defaults=SPACE)
    except ValueError as error:  # a number of more than 64 bits, half a surrogate pair
        raise UsageError(f"{flag}: {name}: {_line(error)}", "use numbers of at most 64 bits, and text that is valid UTF-8") from None
    return _judged(Constraint(grammar, flag, name))


def read_grammar_flag(asked: str) -> Constraint:
    """The constraint of `--grammar`: a file in GBNF, as llama.cpp reads it, or in Lark notation; or inline GBNF. Raises UsageError."""
    name, text = ("the grammar", asked) if RULE.search(asked) else (asked, _read(asked, GRAMMAR, ITSELF))
    return grammar_constraint(text, GRAMMAR, name)


def grammar_constraint(text: str, flag: str, name: str) -> Constraint:
    """The constraint of a grammar's text, GBNF or Lark; `flag` and `name` for messages. Raises UsageError."""
    form = partial(lark_constraint, flag=flag, name=name)
    if not RULE.search(text):
        return form(text)
    try:
        whole, cut = to_lark(text), to_lark(text, as_one=False)
    except GbnfError as error:
        raise UsageError(f"{flag}: {name}: {error}", error.hint) from None
    try:
        return form(whole)
    except UsageError:
        pass  # as one terminal it was too much
    try:
        return form(cut)
    except UsageError as error:
        raise located_in_gbnf(error, text, cut) from error


def regex_constraint(regex: str, flag: str, name: str) -> Constraint:
    """The constraint that the whole text matches a regular expression; `flag` and `name` for messages. Raises UsageError."""
    whole = regex.removeprefix("^")
    kept = whole.removesuffix("$")
    is_escaped = (len(kept) - len(kept.rstrip("\\"))) % 2 == 1
    made = _taken(_library().LLMatcher.grammar_from_regex, whole if is_escaped else kept, flag, name)
    return lark_constraint(json.loads(made)["grammars"][0]["lark_grammar"], flag, name)


def choice_constraint(choices: Sequence[str], flag: str, name: str) -> Constraint:
    """The constraint to one of several texts; `flag` and `name` for messages. Raises UsageError."""
    words = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return lark_constraint(f"start: CHOICE\nCHOICE: {words}", flag, name)


def located_in_gbnf(error: UsageError, text: str, lark: str) -> UsageError:
    """llguidance's error about the translated grammar, with its position in the user's GBNF."""
    found = PLACE.search(error.message)
    there = None if found is None else place(text, lark, int(found["line"]))
    if there is None:
        return error
    said = error.message[: found.start()]
    return UsageError(f"{said}line {there[0]}, in the rule {there[1]}: {found['what']}", error.hint)


def lark_constraint(lark: str, flag: str, name: str, whole: bool = False) -> Constraint:
    """The constraint of generated Lark; `flag` and `name` for messages. Raises UsageError."""
    return _judged(Constraint(_taken(_library().LLMatcher.grammar_from_lark, lark, flag, name), flag, name, whole))


def _taken(grammar_of: Callable[[str], str], text: str, flag: str, name: str) -> str:
    """Call a grammar builder of llguidance. Raises UsageError."""
    try:
        return grammar_of(text)
    except ValueError as error:  # half a surrogate pair
        raise UsageError(f"{flag}: {name}: {_line(error)}", "use text that is valid UTF-8") from None


def read_constraint_flags(schema: str | None, grammar: str | None) -> Constraint | None:
    """The constraint of the two flags. Raises UsageError, also if both are given."""
    if schema is not None and grammar is not None:
        raise UsageError(f"{SCHEMA} and {GRAMMAR} cannot be combined", "leave one of them out")
    return read_grammar_flag(grammar) if grammar is not None else read_schema_flag(schema) if schema is not None else None


def _shown_bare(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> dict[int, int]:
    """SentencePiece tokens that lose their leading blank at the beginning of a text, each with the token of the same text without it."""
    pairs = {number: tokens[text[1:]] for text, number in tokens.items() if text[:1] == BLANK and text[1:] in tokens}
    word = next((number for text, number in tokens.items() if number in pairs and text[1:2] not in ("", BLANK)), None)
    return {} if word is None or tokenizer.decode([word]).startswith(" ") else pairs


def _half(raw: bytes) -> bytes:
    """The bytes of an incomplete UTF-8 character at the end."""
    for length, byte in enumerate(raw[:-4:-1], 1):
        if byte >= 0xC0:
            return raw[-length:] if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else b""
        if byte < 0x80:
            break
    return b""


class CompiledConstraint:
    """A constraint over the vocabulary of one model with `rows` logits; `begin` starts an answer. `opening`: the token that opens
    reasoning; `bare`: tokens that stand for another at the beginning of a text."""

    def __init__(self, source: Constraint, tokenizer: LLTokenizer, rows: int, ends: frozenset[int], opening: int | None,
                 bare: Mapping[int, int]) -> None:
        self.source, self.rows, self.ends, self.opening, self.bare, self._tokenizer = source, rows, ends, opening, bare, tokenizer

    def holding(self, form: Constraint) -> CompiledConstraint:
        """Compile another constraint over the same tokenizer, which is not parsed again."""
        return CompiledConstraint(form, self._tokenizer, self.rows, self.ends, self.opening, self.bare)

    def begin(self, said: str = "", inside: bool = False, think: ThinkFilter | ChannelFilter | None = None, may_reason: bool = True,
              before: Sequence[int] = ()) -> ConstraintMatcher:
        """The matcher for one answer. `said` is a prefill, which must match; `inside`: the first token continues a text; `think`
        separates reasoning; `before`: the tokens before, if known. Raises EffllmError."""
        library = _library()
        # By remainders every token of digits leads elsewhere, of which the library's own limit takes too few where tokens have many.
        limits = library.LLParserLimits(step_lexer_fuel=FUEL if MULTIPLE in self.source.grammar else None)
        matcher = library.LLMatcher(self._tokenizer, self.source.grammar, log_level=0, limits=limits)
        if matcher.is_error():
            self.refuse(matcher)
        half = _half(self._tokenizer.decode_bytes([*before[-4:]])) if said.endswith(REPLACEMENT_CHAR) else b""
        begun = (said[:-1] if half else said).encode("utf-8", "replace").decode()
        tokens = [*self._tokenizer.greedy_tokenize(begun), *self._tokenizer.tokenize_bytes(half)]  # as letters, also what a mark is called
        if tokens and not matcher.consume_tokens(tokens):
            raise UsageError(f"the answer so far does not match {self.source.flag} {self.source.name}",
                             "ask again instead of continuing it")
        if self.source.whole:
            return ConstraintMatcher(matcher, self, None, {} if said or inside else self.bare, free=False)
        may_reason = may_reason and not said and (think is None or think.may_open)
        return ConstraintMatcher(matcher, self, self.opening if may_reason else None, {} if said or inside else self.bare,
                                 think is not None and not think.at_answer)

    def refuse(self, matcher: LLMatcher) -> None:
        """Raises UsageError for a matcher that failed: the constraint is too expensive, or cannot be satisfied."""
        raise UsageError(f"{self.source.flag}: {self.source.name} cannot constrain the answer: {_line(matcher.get_error())}",
                         "simplify it, or leave it out")


class ConstraintMatcher:
    """The state of a constraint within one answer: `took` advances it by a token, `mask_logits` masks the logits. `opening`: a token that
    is also allowed first, which opens reasoning."""

    def __init__(self, matcher: LLMatcher, compiled: CompiledConstraint, opening: int | None, bare: Mapping[int, int],
                 free: bool) -> None:
        self._matcher, self._compiled, self._opening, self._bare = matcher, compiled, opening, bare
        self.free, self._begun = free, False  # is the text not the answer yet? Once that has begun it is

    @property
    def is_whole(self) -> bool:
        """May the answer end here?"""
        return self._matcher.is_accepting()

    def mask_logits(self, logits: np.ndarray) -> None:
        """Mask logits[V] in place. Raises EffllmError if the constraint is too expensive for llguidance."""
        if self.free:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._compiled.refuse(self._matcher)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        if self._bare:
            allowed[[*self._bare.keys()]] |= allowed[[*self._bare.values()]]
        if self._opening is not None:
            allowed[self._opening] = 1
        if not allowed.any():
            source = self._compiled.source
            raise EffllmError(f"{source.flag}: no token of this model can continue the answer as {source.name} requires",
                              "check that it can match a finite text")
        logits[allowed == 0] = -np.inf

    def took(self, token: int, free: bool) -> None:
        """Advance by a token; `free`: the text after it is not content, or not yet."""
        if not self.free:
            if token != self._opening and token not in self._compiled.ends:
                self._begun = True
                if not self._matcher.consume_token(self._bare.get(token, token)):
                    self._compiled.refuse(self._matcher)
                self._bare = {}
            self._opening = None
        self.free = free and not self._begun

    def forced(self, most: int) -> Sequence[int]:
        """The tokens that are forced next, as far as they are known."""
        if self.free or not self._begun:
            return ()
        return [*takewhile(self._compiled.rows.__gt__, self._matcher.compute_ff_tokens()[:most])]


def _judged(form: Constraint) -> Constraint:
    if (dear := too_expensive(form.grammar)) is not None:
        raise UsageError(f"{form.flag}: {form.name}: {dear[0]}", dear[1])
    wrong, said = _library().LLMatcher.validate_grammar_with_warnings(form.grammar)
    if wrong:
        told = _line(said[0])
        if (lost := LOST.search(told)) is not None:
            raise UsageError(f"{form.flag}: {form.name}: $ref names {'#' if lost[1] else ''}{lost[2]}, which does not exist in the schema",
                             "move it into the schema's $defs: other documents are not loaded")
        raise UsageError(f"{form.flag}: {form.name}: {told}", next((HINTS[each] for each in HINTS if each in told), "correct it"))
    return form


def _library() -> ModuleType:
    """llguidance, which takes 30 ms to import. Raises EffllmError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise EffllmError("constrained decoding needs the package llguidance, which is not installed",
                          "pip install llguidance") from None
    return llguidance


def _read(asked: str, flag: str, also: str) -> str:
    try:
        return read_text(Path(os.path.expanduser(asked)), JSON_NBYTES).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {asked} is not text: byte {error.start} is not UTF-8", f"{also}a file of text") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag}: cannot read {asked}: {reason}", f"{also}the path of a file that can be read") from None


def _line(error: object) -> str:
    """An error of llguidance on one line, without its internal state."""
    said = " ".join(str(error).partition("<state>")[0].partition("<backtrace>")[0].split())
    return "nothing can come next" if said == "NoExtensionBias" else said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}…"
