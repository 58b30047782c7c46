"""Answers held to a form (constrained decoding): of all tokens only those may come next that a JSON schema or a grammar still allows.

Which these are is found by llguidance, from the bytes of the vocabulary. A token that is not allowed has no chance; among the others the
sampler chooses as ever. The form is that of the answer: a model that reasons first does so as it likes. Drafts need no care, since a
guess counts only where the sampler draws it; what a form leaves no choice about is a guess of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from .. import EffllmError, UsageError
from .small_file import JSON_NBYTES, read_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from .text import Tokenizer

BLANK = "▁"  # how a blank is written in vocabularies of SentencePiece
ANY_OBJECT = "json"  # what --schema takes beside a file: whatever object the model makes up
# White space between the parts of JSON: a blank, or the end of a line and how far the next is indented. Of more there might be no end.
SPACE = {"whitespace_pattern": r" ?|\n[ \t]{0,24}"}
SCHEMA, GRAMMAR = "--schema", "--grammar"
RULE = "::="  # what GBNF has and no name of a file
LENIENT = 'leave them out; "x-guidance": {"lenient": true} in the schema passes over them'


@dataclass(frozen=True)
class Form:
    """What answers are held to: `grammar` as llguidance reads it, `flag` and `name` for a person."""

    grammar: str
    flag: str
    name: str

    def opened(self, tokenizer: Tokenizer, model_rows: int) -> Vocabulary:
        """The form over the tokens of a model whose head has `model_rows` rows. Raises EffllmError."""
        ends = sorted(tokenizer.stop_ids)
        if not ends:
            raise EffllmError(f"{self.flag} needs a model with a token that ends a text, and this one states none",
                              "leave it out, or name the token as eos_token_id in generation_config.json")
        try:
            made = _library().LLTokenizer(tokenizer.to_json(), n_vocab=model_rows, eos_token=ends)
        except Exception as error:  # as below
            raise EffllmError(f"{self.flag} cannot be held to with this vocabulary: {_line(error)}", "leave it out") from None
        tags = tokenizer.think_tags
        tokens = tokenizer.vocabulary()
        opening = None if tags is None or tokenizer.channels else tokens.get(tags.marks[0])
        return Vocabulary(self, made, frozenset(ends), opening, _shown_bare(tokenizer, tokens))


def schema_form(asked: str) -> Form:
    """The form of `--schema`: a file, the schema itself where it begins with a brace, or `json`. Raises UsageError."""
    inline = asked.lstrip().startswith("{")
    name = "the schema" if inline else asked
    text = '{"type": "object"}' if asked == ANY_OBJECT else asked if inline else _read(asked, SCHEMA, f"{ANY_OBJECT} for any object, or ")
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{SCHEMA}: {name} is no JSON: {error}", "see json-schema.org for how a schema is written") from None
    except RecursionError:
        raise UsageError(f"{SCHEMA}: {name} is nested too deeply", "see json-schema.org for how a schema is written") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{SCHEMA}: {name} is no JSON schema, which is an object", "see json-schema.org for how a schema is written")
    return _judged(Form(_library().LLMatcher.grammar_from_json_schema(schema, defaults=SPACE), SCHEMA, name))


def grammar_form(asked: str) -> Form:
    """The form of `--grammar`: a file in GBNF, as llama.cpp reads it, or in Lark's notation; or GBNF itself. Raises UsageError."""
    name, text = ("the grammar", asked) if RULE in asked else (asked, _read(asked, GRAMMAR, ""))
    library = _library()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # that library raises nothing finer
        raise UsageError(f"{GRAMMAR}: {name}: {_line(error)}", "GBNF begins with `root ::=`, Lark with `start:`") from None
    return _judged(Form(library.LLMatcher.grammar_from_lark(lark), GRAMMAR, name))


def form_of(schema: str | None, grammar: str | None) -> Form | None:
    """What the two flags ask for. Raises UsageError, also where both are given."""
    if schema is not None and grammar is not None:
        raise UsageError(f"{SCHEMA} and {GRAMMAR} both say what the answer is", "leave one of them out")
    return grammar_form(grammar) if grammar is not None else schema_form(schema) if schema is not None else None


def _shown_bare(tokenizer: Tokenizer, tokens: Mapping[str, int]) -> dict[int, int]:
    """Tokens that lose the blank they begin with where a text begins, each with the one of the same text without it."""
    pairs = {number: tokens[text[1:]] for text, number in tokens.items() if text[0] == BLANK and text[1:] in tokens}
    return pairs if pairs and not tokenizer.decode([next(iter(pairs))]).startswith(" ") else {}


class Vocabulary:
    """A form over the tokens of one model; `begin` starts an answer. `opening`: the token with which a model may begin to reason; `bare`:
    tokens that mean another where a text begins."""

    def __init__(self, form: Form, tokenizer: LLTokenizer, ends: frozenset[int], opening: int | None, bare: Mapping[int, int]) -> None:
        self.form, self.ends, self.opening, self.bare, self._tokenizer = form, ends, opening, bare, tokenizer

    def begin(self, said: str = "", inside: bool = False, free: bool = False, may_reason: bool = True) -> Constraint:
        """For one answer; `said` is how it began, which must be of the form, `inside`: its first token stands behind text, `free` as of
        `Constraint.took`. Raises EffllmError."""
        matcher = _library().LLMatcher(self._tokenizer, self.form.grammar, log_level=0)
        if said and not matcher.consume_tokens(self._tokenizer.tokenize_str(said)):
            raise EffllmError(f"the answer so far is not of {self.form.flag} {self.form.name}", "ask again instead of going on with it")
        return Constraint(matcher, self, None if said or not may_reason else self.opening, {} if said or inside else self.bare, free)


class Constraint:
    """What may come next in one answer. The session says with `took` what came, the sampler asks with `narrow`. `opening`: a token that is
    allowed first beside the form's, with which reasoning begins."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, opening: int | None, bare: Mapping[int, int], free: bool) -> None:
        self._matcher, self._vocabulary, self._opening, self._bare = matcher, vocabulary, opening, bare
        self.free, self._begun = free, False  # is the text not the answer yet? Once that has begun it is

    @property
    def is_whole(self) -> bool:
        """May the answer end here?"""
        return self._matcher.is_accepting()

    def narrow(self, logits: np.ndarray) -> None:
        """Take away, in place, what may not come next of logits[V]. Raises EffllmError where the form is too much for the matcher."""
        if self.free:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._refuse()
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        if self._bare:
            allowed[[*self._bare.keys()]] |= allowed[[*self._bare.values()]]
        if self._opening is not None:
            allowed[self._opening] = 1
        logits[allowed == 0] = -np.inf

    def took(self, token: int, free: bool) -> None:
        """A token came; `free`: behind it the text is not the answer, or not yet."""
        if not self.free:
            if token != self._opening and token not in self._vocabulary.ends:
                self._begun = True
                if not self._matcher.consume_token(self._bare.get(token, token)):
                    self._refuse()
                self._bare = {}
            self._opening = None
        self.free = free and not self._begun

    def forced(self, most: int) -> Sequence[int]:
        """The tokens that come next whatever the model thinks, as far as they are known."""
        return () if self.free or not self._begun else self._matcher.compute_ff_tokens()[:most]

    def _refuse(self) -> None:
        form = self._vocabulary.form
        raise EffllmError(f"{form.flag}: the answer cannot be held to {form.name}: {_line(self._matcher.get_error())}",
                          "make the form simpler, or leave it out")


def _judged(form: Form) -> Form:
    wrong, said = _library().LLMatcher.validate_grammar_with_warnings(form.grammar)
    if wrong:
        told = _line(said[0])
        raise UsageError(f"{form.flag}: {form.name}: {told}", LENIENT if told.startswith("Unimplemented keys") else "correct it")
    return form


def _library() -> ModuleType:
    """llguidance, which takes 30 ms to load. Raises EffllmError where an environment is older than this."""
    try:
        import llguidance
    except ImportError:
        raise EffllmError("holding answers to a form needs the package llguidance, which is not installed",
                          "pip install llguidance") from None
    return llguidance


def _read(asked: str, flag: str, also: str) -> str:
    try:
        return read_text(Path(asked).expanduser(), JSON_NBYTES)
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {asked} is no text: byte {error.start} is no UTF-8", f"{also}a file of text") from None
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {asked}: {error.strerror or error}", f"{also}the path of a file that can be read") from None


def _line(error: object) -> str:
    """What was said, on one line."""
    return " ".join(str(error).split())
