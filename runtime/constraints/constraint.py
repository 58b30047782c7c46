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
from ..files.bounded_read import MAX_JSON_NBYTES, read_text
from ..tokens.text_stream import REPLACEMENT_CHAR
from .gbnf import RULE, SHALLOWER_HINT, GbnfError, gbnf_position, to_lark
from .grammar_messages import located, without_position
from .multiple_of import MULTIPLE
from .schema_cost import too_expensive
from .schema_rewrites import rewritten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ..tokenizer import Tokenizer
    from ..tokens.reasoning import ChannelFilter, ThinkFilter

FUEL = 5_000_000  # llguidance's step limit for multipleOf: some seconds at most
SPACE_MARKER = "▁"  # SentencePiece's blank
ANY_OBJECT = "json"  # --schema json: any object
# White space between JSON tokens: a blank, or a newline with indentation. Models may repeat unlimited white space forever.
WHITESPACE = {"whitespace_pattern": r" ?|\n[ \t]{0,24}"}
SCHEMA, GRAMMAR = "--schema", "--grammar"
LENIENT_HINT = 'leave it out; "x-guidance": {"lenient": true} in the schema ignores it'
SMALLER_HINT = "make it smaller: fewer entries, properties or alternatives, or less nesting"
HINTS = {**dict.fromkeys(("schema too large", "initial lexer configuration", "recursion limit exceeded"), SMALLER_HINT),
         "too deeply nested": SHALLOWER_HINT, "Unimplemented keys": LENIENT_HINT, "Unknown format": LENIENT_HINT,
         "oneOf constraints": 'use anyOf instead of oneOf; "x-guidance": {"coerce_one_of": true} in the schema does that'}
INLINE_GBNF_HINT = """GBNF itself, as 'root ::= "yes" | "no"', or """
# llguidance's message about an unresolved $ref.
UNRESOLVED_REF = re.compile(r"(?:(Pointer|Anchor)|Resource) '(?:json-schema:///)?([^']*)' "
                            r"(?:does not exist|is not present in a registry).*")
# A message about a position, as `located` writes it.
ERROR_POSITION = re.compile(r"line (?P<line>\d+), column \d+: (?P<what>.*)$")
# What programs that ask a server for answers of a schema put around it.
MAX_MESSAGE_CHARS = 300  # of llguidance's messages
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
    """What an answer must match."""

    grammar: str  # in llguidance's format
    flag: str  # for messages
    name: str  # for messages
    covers_reasoning: bool = False  # the grammar covers all generated text, not only the content

    def compile(self, tokenizer: Tokenizer, model_rows: int) -> CompiledConstraint:
        """Compile for a tokenizer and a head of `model_rows` rows. Raises EffllmError."""
        tokens = tokenizer.vocabulary()
        rows = max(model_rows, 1 + max(tokens.values(), default=0))  # multimodal vocabularies have ids without a row in the head
        stop_ids = sorted(token_id for token_id in tokenizer.stop_ids if token_id < model_rows)
        if not stop_ids:
            raise EffllmError(f"{self.flag} needs a model with an end-of-text token, and this one has none",
                              "leave it out, or name the token as eos_token_id in generation_config.json")
        try:
            library_tokenizer = _library().LLTokenizer(tokenizer.to_json(), n_vocab=rows, eos_token=stop_ids)
        except Exception as error:  # of any kind: the library reports errors so
            raise EffllmError(f"{self.flag} does not work with this tokenizer: {_one_line(error)}", "leave it out") from None
        tokens = {text: number for text, number in tokens.items() if number < model_rows}
        tags = tokenizer.think_tags
        reasoning_token = None if tags is None or tokenizer.channels else tokens.get(tags.tokens[0])
        return CompiledConstraint(self, library_tokenizer, model_rows, frozenset(stop_ids), reasoning_token,
                                  _tokens_without_space(tokenizer, tokens))


def read_schema_flag(value: str) -> Constraint:
    """The constraint of `--schema`: a file, inline JSON that begins with a brace, or `json`. Raises UsageError."""
    is_inline = value.lstrip().startswith("{")
    name = "the schema" if is_inline else value
    alternatives = f"{ANY_OBJECT} for any object, the schema itself, or "
    text = '{"type": "object"}' if value == ANY_OBJECT else value if is_inline else _read_file(value, SCHEMA, alternatives)
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
        grammar = _library().LLMatcher.grammar_from_json_schema(rewritten(schema), defaults=WHITESPACE)
    except ValueError as error:  # a number of more than 64 bits, half a surrogate pair
        raise UsageError(f"{flag}: {name}: {_one_line(error)}", "use numbers of at most 64 bits, and text that is valid UTF-8") from None
    return _validated(Constraint(grammar, flag, name))


def read_grammar_flag(value: str) -> Constraint:
    """The constraint of `--grammar`: a file in GBNF, as llama.cpp reads it, or in Lark notation; or inline GBNF. Raises UsageError."""
    name, text = ("the grammar", value) if RULE.search(value) else (value, _read_file(value, GRAMMAR, INLINE_GBNF_HINT))
    return grammar_constraint(text, GRAMMAR, name)


def grammar_constraint(text: str, flag: str, name: str) -> Constraint:
    """The constraint of a grammar's text, GBNF or Lark; `flag` and `name` for messages. Raises UsageError."""
    build = partial(lark_constraint, flag=flag, name=name)
    if not RULE.search(text):
        return build(text)
    try:
        as_terminal, as_rules = to_lark(text), to_lark(text, as_one=False)
    except GbnfError as error:
        raise UsageError(f"{flag}: {name}: {error}", error.hint) from None
    try:
        return build(as_terminal)
    except UsageError:
        pass  # too expensive as one terminal
    try:
        return build(as_rules)
    except UsageError as error:
        raise located_in_gbnf(error, text, as_rules) from error


def regex_constraint(regex: str, flag: str, name: str) -> Constraint:
    """The constraint that the whole text matches a regular expression; `flag` and `name` for messages. Raises UsageError."""
    unanchored_start = regex.removeprefix("^")
    unanchored = unanchored_start.removesuffix("$")
    is_escaped = (len(unanchored) - len(unanchored.rstrip("\\"))) % 2 == 1
    grammar = _build_grammar(_library().LLMatcher.grammar_from_regex, unanchored_start if is_escaped else unanchored, flag, name)
    try:
        return lark_constraint(json.loads(grammar)["grammars"][0]["lark_grammar"], flag, name)
    except UsageError as error:
        raise UsageError(without_position(error.message), error.hint) from None


def choice_constraint(choices: Sequence[str], flag: str, name: str) -> Constraint:
    """The constraint to one of several texts; `flag` and `name` for messages. Raises UsageError."""
    words = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return lark_constraint(f"start: CHOICE\nCHOICE: {words}", flag, name)


def located_in_gbnf(error: UsageError, text: str, lark: str) -> UsageError:
    """llguidance's error about the translated grammar, with its position in the user's GBNF."""
    match = ERROR_POSITION.search(error.message)
    position = None if match is None else gbnf_position(text, lark, int(match["line"]))
    if position is None:
        return error
    prefix = error.message[: match.start()]
    return UsageError(f"{prefix}line {position[0]}, in the rule {position[1]}: {match['what']}", error.hint)


def lark_constraint(lark: str, flag: str, name: str, covers_reasoning: bool = False) -> Constraint:
    """The constraint of generated Lark; `flag` and `name` for messages. Raises UsageError."""
    return _validated(Constraint(_build_grammar(_library().LLMatcher.grammar_from_lark, lark, flag, name), flag, name, covers_reasoning))


def _build_grammar(grammar_of: Callable[[str], str], text: str, flag: str, name: str) -> str:
    """Call a grammar builder of llguidance. Raises UsageError."""
    try:
        return grammar_of(text)
    except ValueError as error:  # half a surrogate pair
        raise UsageError(f"{flag}: {name}: {_one_line(error)}", "use text that is valid UTF-8") from None


def read_constraint_flags(schema: str | None, grammar: str | None) -> Constraint | None:
    """The constraint of the two flags. Raises UsageError, also if both are given."""
    if schema is not None and grammar is not None:
        raise UsageError(f"{SCHEMA} and {GRAMMAR} cannot be combined", "leave one of them out")
    return read_grammar_flag(grammar) if grammar is not None else read_schema_flag(schema) if schema is not None else None


def _tokens_without_space(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> dict[int, int]:
    """SentencePiece tokens that lose their leading blank at the beginning of a text, each with the token of the same text without it."""
    pairs = {number: tokens[text[1:]] for text, number in tokens.items() if text[:1] == SPACE_MARKER and text[1:] in tokens}
    sample = next((number for text, number in tokens.items() if number in pairs and text[1:2] not in ("", SPACE_MARKER)), None)
    return {} if sample is None or tokenizer.decode([sample]).startswith(" ") else pairs


def _incomplete_character(data: bytes) -> bytes:
    """The bytes of an incomplete UTF-8 character at the end."""
    for length, byte in enumerate(data[:-4:-1], 1):
        if byte >= 0xC0:
            return data[-length:] if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else b""
        if byte < 0x80:
            break
    return b""


class CompiledConstraint:
    """A constraint over the vocabulary of one model with `rows` logits; `begin` starts an answer.

    `reasoning_token`: opens reasoning, None if there is none.
    `without_space`: tokens that at the beginning of a text stand for the same text without its leading space -> the token of that text.
    """

    def __init__(self, source: Constraint, tokenizer: LLTokenizer, rows: int, stop_ids: frozenset[int], reasoning_token: int | None,
                 without_space: Mapping[int, int]) -> None:
        self.source, self.rows, self.stop_ids = source, rows, stop_ids
        self.reasoning_token, self.without_space, self._tokenizer = reasoning_token, without_space, tokenizer

    def compile_other(self, constraint: Constraint) -> CompiledConstraint:
        """Compile another constraint over the same tokenizer, which is not parsed again."""
        return CompiledConstraint(constraint, self._tokenizer, self.rows, self.stop_ids, self.reasoning_token, self.without_space)

    def begin(self, answer_prefix: str = "", continues_text: bool = False, think: ThinkFilter | ChannelFilter | None = None,
              allow_reasoning: bool = True,
              previous_tokens: Sequence[int] = ()) -> ConstraintMatcher:
        """The matcher for one answer. `answer_prefix` is a prefill, which must match; `continues_text`: the first token continues a text;
        `think` separates reasoning; `previous_tokens`: the tokens before, if known. Raises EffllmError."""
        library = _library()
        # With multipleOf every token of digits leads to another state: the library's default limit is too low for tokens of many digits.
        limits = library.LLParserLimits(step_lexer_fuel=FUEL if MULTIPLE in self.source.grammar else None)
        matcher = library.LLMatcher(self._tokenizer, self.source.grammar, log_level=0, limits=limits)
        if matcher.is_error():
            self.refuse(matcher)
        incomplete = b""
        if answer_prefix.endswith(REPLACEMENT_CHAR):
            incomplete = _incomplete_character(self._tokenizer.decode_bytes([*previous_tokens[-4:]]))
        text = (answer_prefix[:-1] if incomplete else answer_prefix).encode("utf-8", "replace").decode()
        # special tokens in it count as plain text
        tokens = [*self._tokenizer.greedy_tokenize(text), *self._tokenizer.tokenize_bytes(incomplete)]
        if tokens and not matcher.consume_tokens(tokens):
            raise UsageError(f"the answer so far does not match {self.source.flag} {self.source.name}",
                             "ask again instead of continuing it")
        if self.source.covers_reasoning:
            return ConstraintMatcher(matcher, self, None, {} if answer_prefix or continues_text else self.without_space, is_free=False)
        allow_reasoning = allow_reasoning and not answer_prefix and (think is None or think.may_open)
        return ConstraintMatcher(matcher, self, self.reasoning_token if allow_reasoning else None, {} if answer_prefix or continues_text
                                 else self.without_space,
                                 think is not None and not think.at_answer)

    def refuse(self, matcher: LLMatcher) -> None:
        """Raises UsageError for a matcher that failed: the constraint is too expensive, or cannot be satisfied."""
        raise UsageError(f"{self.source.flag}: {self.source.name} cannot constrain the answer: {_one_line(matcher.get_error())}",
                         "simplify it, or leave it out")


class ConstraintMatcher:
    """The state of a constraint within one answer: `accept` advances it by a token, `mask_logits` masks the logits.

    `reasoning_token`: also allowed as the first token.
    """

    def __init__(self, matcher: LLMatcher, compiled: CompiledConstraint, reasoning_token: int | None, without_space: Mapping[int, int],
                 is_free: bool) -> None:
        self._matcher, self._compiled, self._reasoning_token, self._without_space = matcher, compiled, reasoning_token, without_space
        self.is_free = is_free  # the next text is not content
        self._has_begun = False  # once content has begun, all later text is content

    @property
    def is_whole(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def mask_logits(self, logits: np.ndarray) -> None:
        """Mask logits[V] in place. Raises EffllmError if the constraint is too expensive for llguidance."""
        if self.is_free:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._compiled.refuse(self._matcher)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        if self._without_space:
            allowed[[*self._without_space.keys()]] |= allowed[[*self._without_space.values()]]
        if self._reasoning_token is not None:
            allowed[self._reasoning_token] = 1
        if not allowed.any():
            source = self._compiled.source
            raise EffllmError(f"{source.flag}: no token of this model can continue the answer as {source.name} requires",
                              "check that it can match a finite text")
        logits[allowed == 0] = -np.inf

    def accept(self, token: int, free: bool) -> None:
        """Advance by a token; `free`: the text after it is not content, or not yet."""
        if not self.is_free:
            if token != self._reasoning_token and token not in self._compiled.stop_ids:
                self._has_begun = True
                if not self._matcher.consume_token(self._without_space.get(token, token)):
                    self._compiled.refuse(self._matcher)
                self._without_space = {}
            self._reasoning_token = None
        self.is_free = free and not self._has_begun

    def forced(self, max_tokens: int) -> Sequence[int]:
        """The tokens that are forced next, as far as they are known."""
        if self.is_free or not self._has_begun:
            return ()
        return [*takewhile(self._compiled.rows.__gt__, self._matcher.compute_ff_tokens()[:max_tokens])]


def _validated(constraint: Constraint) -> Constraint:
    if (problem := too_expensive(constraint.grammar)) is not None:
        raise UsageError(f"{constraint.flag}: {constraint.name}: {problem[0]}", problem[1])
    is_invalid, warnings = _library().LLMatcher.validate_grammar_with_warnings(constraint.grammar)
    if is_invalid:
        message = _one_line(warnings[0])
        if (unresolved := UNRESOLVED_REF.search(message)) is not None:
            target = f"{'#' if unresolved[1] else ''}{unresolved[2]}"
            raise UsageError(f"{constraint.flag}: {constraint.name}: $ref names {target}, which does not exist in the schema",
                             "move it into the schema's $defs: other documents are not loaded")
        raise UsageError(f"{constraint.flag}: {constraint.name}: {message}",
                         next((HINTS[each] for each in HINTS if each in message), "correct it"))
    return constraint


def _library() -> ModuleType:
    """llguidance, which takes 30 ms to import. Raises EffllmError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise EffllmError("constrained decoding needs the package llguidance, which is not installed",
                          "pip install llguidance") from None
    return llguidance


def _read_file(value: str, flag: str, alternatives: str) -> str:
    try:
        return read_text(Path(os.path.expanduser(value)), MAX_JSON_NBYTES).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {value} is not text: byte {error.start} is not UTF-8", f"{alternatives}a file of text") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{flag}: cannot read {value}: {reason}", f"{alternatives}the path of a file that can be read") from None


def _one_line(error: object) -> str:
    """An error of llguidance on one line, without its internal state."""
    message = " ".join(located(str(error).partition("<state>")[0].partition("<backtrace>")[0]).split())
    if message == "NoExtensionBias":
        return "nothing can come next"
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
