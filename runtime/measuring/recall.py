"""Recall: can a model still find a number stated far back? The accuracy with a packed KV cache, beside that with an exact one.

Each sample is a stretch of a text with a few facts ("The gate of the miller is 4711.") in its first part and questions at the end; answers
are teacher-forced, and a token of a number is right if it is the top token. A model that fails with exact keys and values says nothing
about a cache, so both are counted at every distance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from ... import UsageError
from ..engine import Engine
from ..events import Progress
from ..tokenizer import Tokenizer

WHO = ("miller", "king", "queen", "shepherd", "fisherman", "tailor", "soldier", "witch")
WHAT = ("secret number", "lucky number", "house number", "golden number")
SPREADS = (0.3, 0.95)  # facts lie within this share of the context
RESERVE = 0.15  # of the context is for questions, at least
SURE = 0.99  # share of right tokens with exact keys and values from which on a comparison means something


@dataclass(frozen=True)
class RecallRow:
    """Facts within the first `spread` of `ctx` tokens: number tokens asked for, and the shares that were right."""

    ctx: int
    spread: float
    tokens: int
    right: float
    right_exact: float
    comparable: bool


@dataclass(frozen=True)
class RecallResult:
    """`packed_bits` and `kv_bits_per_value` are those of the cache under test."""

    rows: tuple[RecallRow, ...]
    packed_bits: float
    kv_bits_per_value: float

    def to_json(self) -> dict[str, object]:
        return {"rows": [asdict(row) for row in self.rows], "packed_bits": self.packed_bits, "kv_bits_per_value": self.kv_bits_per_value}


def recall(engine: Engine, reference: Engine, tokenizer: Tokenizer, text: str, ctx: int, samples: int = 8,
           source: str = "the text") -> Iterator[Progress | RecallResult]:
    """Ask `engine`, and `reference` with an exact cache, the same questions; yields Progress, the result last. With a packed cache only
    answers that read a packed page count; raises UsageError if none does."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < ctx:
        raise UsageError(f"{source} has {len(ids)} tokens, less than a context of {ctx}", "a longer --text, or a smaller -c")
    first, made = engine.first_reader(), []
    for spread in SPREADS:
        draw = random.Random(5)
        drawn = [_sample(tokenizer, ids, ctx, spread, draw) for _ in range(samples)]
        made.append([(sample, reading) for sample, targets in drawn if (reading := [at for at in targets if at > first])])
    if not all(made):
        raise UsageError(f"a context of {ctx} tokens: no answer in it reads a packed page, which takes {first + 2}",
                         "a larger -c, or a smaller --kv-sink and --kv-window")
    rows, done = [], 0
    for spread, texts in zip(SPREADS, made, strict=True):
        asked, right, exact = 0, 0, 0
        for sample, targets in texts:
            asked += len(targets)
            right += _right(engine, sample, targets)
            exact += _right(reference, sample, targets)
            done += 1
            yield Progress("asking", done, sum(map(len, made)), "texts")
        rows.append(RecallRow(ctx, spread, asked, right / asked, exact / asked, exact / asked >= SURE))
    yield RecallResult(tuple(rows), engine.cache.packed_bits, engine.cache.bits_per_value)


def _sample(tokenizer: Tokenizer, ids: list[int], ctx: int, spread: float, draw: random.Random) -> tuple[list[int], list[int]]:
    """Token ids, at most `ctx`, and the positions of the answers' tokens. Raises UsageError for a context too short for a question."""
    def encode(piece: str) -> list[int]:
        return tokenizer.encode(piece, add_special_tokens=False)

    begin = draw.randrange(max(1, len(ids) - ctx))
    prose = ids[begin : begin + ctx]
    facts = [(who, what, str(draw.randrange(100, 100_000))) for who, what in
             draw.sample([(who, what) for who in WHO for what in WHAT], draw.randint(1, 4))]
    last = int(ctx * min(spread, 1 - RESERVE))
    made: list[int] = tokenizer.encode("")
    at = 0
    for (who, what, value), place in zip(facts, sorted(draw.sample(range(max(len(facts) + 1, last)), len(facts))), strict=True):
        made += prose[at:place] + encode(f"\n\nThe {what} of the {who} is {value}.\n\n")
        at = place
    room = ctx - len(made) - int(ctx * RESERVE)
    made += prose[at : at + max(0, room)]
    targets: list[int] = []
    while True:
        who, what, value = draw.choice(facts)
        before, after = _turn(tokenizer, f"What is the {what} of the {who}?", f"The {what} of the {who} is", f" {value}.")
        question, answer, rest = encode(before), encode(f" {value}"), encode("." + after)
        if len(made) + len(question) + len(answer) > ctx:
            break
        made += question
        targets += [len(made) + i for i, token in enumerate(answer) if tokenizer.decode([token]).strip().isdigit()]
        made += answer + rest
    if not targets:
        raise UsageError(f"a context of {ctx} tokens has no room for a fact and a question", "a larger -c")
    return made[:ctx], targets


def _turn(tokenizer: Tokenizer, question: str, answer: str, value: str) -> tuple[str, str]:
    """The text before and after the value: a chat turn if the model has a template, else plain text."""
    if tokenizer.template is None:
        return f"\n\n{question}\n{answer}", "\n"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer + value}]
    turn = tokenizer.render_chat(messages, add_generation_prompt=False)
    before, found, after = turn.rpartition(answer + value)
    if not found:  # a template that rewrites answers
        return tokenizer.render_chat(messages[:1], add_generation_prompt=True) + answer, "\n"
    return before + answer, after


def _right(engine: Engine, sample: list[int], targets: list[int]) -> int:
    """How many of the tokens at `targets` are top tokens. Run page by page, so that packed pages are read as in generation."""
    wanted, found = set(targets), 0
    for start, logits in engine.score(sample[:-1] if targets[-1] < len(sample) - 1 else sample, pages=1):
        for row, best in enumerate(np.argmax(logits, -1).tolist(), start + 1):
            if row in wanted:
                found += best == sample[row]
    return found
