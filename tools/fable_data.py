"""Training data for `fable`: a corpus of tales as token arrays, and the four samplers that turn it into training rows.

A row is `(ids, weights)`: n + 1 token ids (inputs and targets overlap by one) and the loss weight of each id as a target. Prose is windows
of books; chats are questions about the content of a passage; copying repeats runs of tokens, from which induction heads form within a few
hundred steps; recall states numbers and asks for them up to a full context later. All samplers draw from the global generators of `random`
and `numpy.random`, in a fixed order, so that a seed reproduces a training run.
"""

import json
import lzma
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
QUESTIONS = [
    "Tell me a story about the {a} and the {b}.",
    "I would like a tale with a {a} and a {b} in it.",
    "What happened to the {a} and the {b}?",
    "Please write about the {a}.",
    "Do you know a story about the {a}?",
]
CONTINUATIONS = ["Go on.", "What happened then?", "And then?", "Please continue."]
FACT_OWNERS = (
    "fox king queen giant witch miller prince wolf bear raven fisherman tailor dragon cat mouse soldier shepherd princess goose dwarf"
).split()
FACT_NAMES = ["secret number", "lucky number", "magic number", "house number", "golden number"]
# Frequent after an article, yet nothing that a tale could be about.
NOT_SUBJECTS = frozenset(
    "very first same other little old great whole most more such one two three next last few own poor good young long large small "
    "beautiful new best rest others end way day time moment word thing things kind sort part side while bit lot number matter place "
    "hand head house night morning".split()
)
ANSWER_WEIGHT = 4.0
# Tokens kept free behind the last place a fact may take, for the question and its answer.
QUESTION_ROOM = 60

Row = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Mix:
    """Shares of copying, recall and chat among the rows (the rest is prose), and the spreads that recall draws from."""

    copying: float
    recall: float
    chat: float
    spreads: tuple[float, ...]


def read_books(folder: Path) -> list[dict[str, str]]:
    """The training books, `{"title": ..., "text": ...}` each, from `tales.jsonl.xz`."""
    with lzma.open(folder / "tales.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


def build_tokenizer(books: list[dict[str, str]], size: int) -> Tokenizer:
    """Byte-level BPE over the books; each digit is a token of its own, so that numbers can be copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((book["text"] for book in books), trainer)
    return tokenizer


class Corpus:
    """The books and the held-out text as token ids, and the samplers; `n` is the context length of a row throughout."""

    def __init__(self, books: list[dict[str, str]], heldout: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {name: tokenizer.token_to_id(name) for name in SPECIAL}
        self.train = [np.array(self.encode(book["text"]), np.int32) for book in books]
        self.heldout = np.array(self.encode(heldout), np.int32)
        lengths = np.array([len(ids) for ids in self.train], float)
        self.book_share = lengths / lengths.sum()
        self.paragraphs = [[p for p in book["text"].split("\n\n") if len(p) > 40] for book in books]
        after_article = re.compile(r"\b(?:the|a|an) ([a-z]{3,12})\b")
        counts = Counter(match.group(1) for book in books for match in after_article.finditer(book["text"]))
        self.subjects = {word for word, _ in counts.most_common(420) if word not in NOT_SUBJECTS}
        occurrences = np.bincount(np.concatenate(self.train), minlength=tokenizer.get_vocab_size())
        self.frequent = np.argsort(-occurrences)[:1200]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def window(self, n: int) -> list[int]:
        """`n` tokens in a row from one book, books chosen by their length (fewer tokens where the book is shorter)."""
        ids = self.train[np.random.choice(len(self.train), p=self.book_share)]
        start = random.randrange(0, max(1, len(ids) - n))
        return ids[start : start + n].tolist()

    def prose(self, n: int) -> Row:
        ids = self.window(n + 1)
        return ids, [1.0] * len(ids)

    def chat(self, n: int) -> Row:
        """Conversations of one to three turns; the answers are consecutive paragraphs of one book."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < n + 1:
            book = random.choices(self.paragraphs, weights=self.book_share)[0]
            at = random.randrange(len(book))
            for turn in range(random.choice([1, 1, 2, 3])):
                passage, at = self._passage(book, at)
                if not passage:
                    break
                question = self._question(passage, first=turn == 0)
                user_turn = self._user_turn(question)
                answer = self.encode("\n" + passage) + [self.special["<|end|>"]]
                ids += user_turn + answer
                weights += [0.3] * len(user_turn) + [1.0] * len(answer)
            ids.append(self.special["<|endoftext|>"])
            weights.append(0.0)
        return ids[: n + 1], weights[: n + 1]

    def copying(self, n: int) -> Row:
        """Short runs of frequent tokens (or of prose), repeated; the repeats weigh."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < n + 1:
            length = random.randrange(6, min(44, n // 2))
            if random.random() < 0.75:
                run = np.random.choice(self.frequent, length).tolist()
            else:
                run = self.window(length)
            times = random.choice([2, 2, 3])
            ids += run * times
            weights += [0.05] * len(run) + [1.5] * (len(run) * (times - 1))
        return ids[: n + 1], weights[: n + 1]

    def recall(self, n: int, spread: float) -> Row:
        """Facts within the first `spread` of the context, questions after it; the answers weigh most."""
        base = self.window(n)
        far = int(n * spread)
        subjects = random.sample([(owner, name) for owner in FACT_OWNERS for name in FACT_NAMES], random.choice([1, 2, 3, 4]))
        positions = sorted(random.sample(range(0, max(len(subjects) + 1, far - QUESTION_ROOM)), len(subjects)))
        ids: list[int] = []
        weights: list[float] = []
        facts: list[tuple[str, str, str]] = []
        last = 0
        for (owner, name), at in zip(subjects, positions, strict=True):
            value = "".join(random.choice("0123456789") for _ in range(random.choice([3, 4, 5])))
            fact = self.encode(f"\n\nThe {name} of the {owner} is {value}.\n\n")
            ids += base[last:at] + fact
            weights += [0.5] * (at - last) + [0.1] * len(fact)
            facts.append((owner, name, value))
            last = at
        filler = base[last : max(last, far - QUESTION_ROOM)]
        ids += filler
        weights += [0.5] * len(filler)
        while len(ids) < n - 30:
            owner, name, value = random.choice(facts)
            user_turn = self._user_turn(f"What is the {name} of the {owner}?") + self.encode(f"\nThe {name} of the {owner} is")
            answer = self.encode(f" {value}.") + [self.special["<|end|>"]]
            ids += user_turn + answer
            weights += [0.05] * len(user_turn) + [ANSWER_WEIGHT] * len(answer)
            if random.random() < 0.5 or spread > 0.9:
                gap = base[: random.randrange(5, 60)]
                ids += gap
                weights += [0.2] * len(gap)
        return self._padded((ids, weights), n)

    def batch(self, size: int, n: int, mix: Mix) -> tuple[np.ndarray, np.ndarray]:
        """`size` rows drawn from the mix: ids int64[size, n + 1] and weights float32[size, n + 1]."""
        rows = [self._padded(self._draw(n, mix), n) for _ in range(size)]
        return np.array([ids for ids, _ in rows], np.int64), np.array([weights for _, weights in rows], np.float32)

    def _draw(self, n: int, mix: Mix) -> Row:
        chance = random.random()
        if chance < mix.copying:
            return self.copying(n)
        if chance < mix.copying + mix.recall:
            return self.recall(n, random.choice(mix.spreads))
        if chance < mix.copying + mix.recall + mix.chat:
            return self.chat(n)
        return self.prose(n)

    def _passage(self, book: list[str], at: int) -> tuple[str, int]:
        """Paragraphs from `at` on until a random length is reached, and where the next passage begins."""
        body: list[str] = []
        size = 0
        while at < len(book) and size < random.choice([350, 700, 1100]):
            body.append(book[at])
            size += len(book[at])
            at += 1
        return "\n\n".join(body), at

    def _question(self, passage: str, first: bool) -> str:
        """A question about two subjects that the passage names; a later turn, or a passage without two, asks to go on."""
        named = [word for word in dict.fromkeys(re.findall(r"[a-z]{3,12}", passage)) if word in self.subjects]
        if not first or len(named) < 2:
            return random.choice(CONTINUATIONS)
        a, b = random.sample(named, 2)
        return random.choice(QUESTIONS).format(a=a, b=b)

    def _user_turn(self, text: str) -> list[int]:
        return [self.special["<|user|>"]] + self.encode("\n" + text) + [self.special["<|end|>"], self.special["<|assistant|>"]]

    def _padded(self, row: Row, n: int) -> Row:
        ids, weights = row
        missing = n + 1 - len(ids)
        return (ids + [self.special["<|endoftext|>"]] * missing)[: n + 1], (weights + [0.0] * missing)[: n + 1]
