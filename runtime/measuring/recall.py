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

OWNERS = ("miller", "king", "queen", "shepherd", "fisherman", "tailor", "soldier", "witch")
SUBJECTS = ("secret number", "lucky number", "house number", "golden number")
SPREADS = (0.3, 0.95)  # facts are placed within this share of the context
QUESTION_SHARE = 0.15  # minimum share of the context reserved for questions
MIN_EXACT_ACCURACY = 0.99  # accuracy with an exact cache below which a comparison means nothing


@dataclass(frozen=True)
class RecallRow:
    """Accuracy at one distance."""

    ctx: int
    spread: float  # facts are placed within this first share of the context
    tokens: int  # number tokens in all answers
    right: float  # share of them predicted with the cache under test
    right_exact: float  # share of them predicted with an exact cache
    comparable: bool  # whether `right_exact` reaches MIN_EXACT_ACCURACY


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
    first_reader, samples_by_spread = engine.first_reader(), []
    for spread in SPREADS:
        rng = random.Random(5)
        all_samples = [_make_sample(tokenizer, ids, ctx, spread, rng) for _ in range(samples)]
        scored = ((sample, [position for position in targets if position > first_reader]) for sample, targets in all_samples)
        samples_by_spread.append([(sample, targets) for sample, targets in scored if targets])
    if not all(samples_by_spread):
        raise UsageError(f"a context of {ctx} tokens: no answer in it reads a packed page, which takes {first_reader + 2}",
                         "a larger -c, or a smaller --kv-sink and --kv-window")
    rows, done = [], 0
    for spread, spread_samples in zip(SPREADS, samples_by_spread, strict=True):
        num_tokens, num_correct, num_correct_exact = 0, 0, 0
        for sample, targets in spread_samples:
            num_tokens += len(targets)
            num_correct += _num_correct(engine, sample, targets)
            num_correct_exact += _num_correct(reference, sample, targets)
            done += 1
            yield Progress("asking", done, sum(map(len, samples_by_spread)), "texts")
        exact_accuracy = num_correct_exact / num_tokens
        rows.append(RecallRow(ctx, spread, num_tokens, num_correct / num_tokens, exact_accuracy, exact_accuracy >= MIN_EXACT_ACCURACY))
    yield RecallResult(tuple(rows), engine.cache.packed_bits, engine.cache.bits_per_value)


def _make_sample(tokenizer: Tokenizer, ids: list[int], ctx: int, spread: float, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids, at most `ctx`, and the positions of the answers' tokens. Raises UsageError for a context too short for a question."""
    def encode(piece: str) -> list[int]:
        return tokenizer.encode(piece, add_special_tokens=False)

    start = rng.randrange(max(1, len(ids) - ctx))
    text_ids = ids[start : start + ctx]
    facts = [(owner, subject, str(rng.randrange(100, 100_000))) for owner, subject in
             rng.sample([(owner, subject) for owner in OWNERS for subject in SUBJECTS], rng.randint(1, 4))]
    facts_end = int(ctx * min(spread, 1 - QUESTION_SHARE))
    sample_ids: list[int] = tokenizer.encode("")
    position = 0
    fact_positions = sorted(rng.sample(range(max(len(facts) + 1, facts_end)), len(facts)))
    for (owner, subject, value), next_position in zip(facts, fact_positions, strict=True):
        sample_ids += text_ids[position:next_position] + encode(f"\n\nThe {subject} of the {owner} is {value}.\n\n")
        position = next_position
    remaining = ctx - len(sample_ids) - int(ctx * QUESTION_SHARE)
    sample_ids += text_ids[position : position + max(0, remaining)]
    targets: list[int] = []
    while True:
        owner, subject, value = rng.choice(facts)
        before, after = _text_around(tokenizer, f"What is the {subject} of the {owner}?", f"The {subject} of the {owner} is", f" {value}.")
        question, answer, rest = encode(before), encode(f" {value}"), encode("." + after)
        if len(sample_ids) + len(question) + len(answer) > ctx:
            break
        sample_ids += question
        targets += [len(sample_ids) + i for i, token in enumerate(answer) if tokenizer.decode([token]).strip().isdigit()]
        sample_ids += answer + rest
    if not targets:
        raise UsageError(f"a context of {ctx} tokens has no room for a fact and a question", "a larger -c")
    return sample_ids[:ctx], targets


def _text_around(tokenizer: Tokenizer, question: str, answer: str, value: str) -> tuple[str, str]:
    """The text before and after the value: a chat turn if the model has a template, else plain text."""
    if tokenizer.template is None:
        return f"\n\n{question}\n{answer}", "\n"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer + value}]
    turn = tokenizer.render_chat(messages, add_generation_prompt=False)
    before, found, after = turn.rpartition(answer + value)
    if not found:  # a template that rewrites answers
        return tokenizer.render_chat(messages[:1], add_generation_prompt=True) + answer, "\n"
    return before + answer, after


def _num_correct(engine: Engine, sample: list[int], targets: list[int]) -> int:
    """Number of tokens at positions `targets` that are top tokens. Run page by page, so that packed pages are read as in generation."""
    target_set, correct = set(targets), 0
    for start, logits in engine.score(sample[:-1] if targets[-1] < len(sample) - 1 else sample, pages=1):
        for position, top_token in enumerate(np.argmax(logits, -1).tolist(), start + 1):
            if position in target_set:
                correct += top_token == sample[position]
    return correct
