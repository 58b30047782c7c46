#!/usr/bin/env python3
"""Speculative decoding with a model larger than its memory, or with --in-memory one that is not: tokens per pass, and tokens per second
against the same run without.

The model has random weights; its own output would be noise, so the text comes from elsewhere. Repeating set: the answers in
`speculation_texts.py` are replayed: a sampler produces them token by token, in the tokenizer given by --vocabulary, whatever the logits
are. Stories: the packaged model determines what comes next, sampled as usual, and the large model runs alongside for the cost of a pass.
Drafts come from the text and from past passes, as in any run; on the repeating set those of past passes are based on random logits and are
hardly ever right.

Passes with and without alternate within every text, so that a change in disk speed affects both.

    python benchmarks/offload.py --make tinyllama-1.1b /data/tinyllama
    python benchmarks/speculation.py /data/tinyllama --ram 1.2G --vocabulary llama.gguf --publish tinyllama
    effllm quantize /data/tinyllama -o /data/tinyllama-4bit --bits 4
    python benchmarks/speculation.py /data/tinyllama-4bit --in-memory --vocabulary llama.gguf --publish tinyllama-4bit-in-memory
"""

import argparse
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

import numpy as np

import effllm
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, Yield, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.speculate import Counts, Speculation
from effllm.runtime.tokenizer import Tokenizer
from offload import evict
from report import Figure, publish
from speculation_texts import EXCHANGES

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
CONTEXT = 1024
PASSES_WITH, PASSES_WITHOUT = 5, 5  # consecutive passes with and without speculation
STORIES = ("Tell me a story about the fox and the king.", "Tell me a story about a girl who finds a lamp.",
           "Tell me a story about two friends and a boat.")
STORY_TOKENS = 250
INTRO = ("Random weights{where}; passes with and without speculation take turns in the "
         "same text. Repeating set: written answers, replayed. Stories: what the packaged model says, sampled as usual.")
FROM_DISK = " larger than the budget, read from the disk for every pass"


@dataclass
class Timings:
    """Seconds and tokens of passes with and without speculation."""

    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    tokens: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    counts: Counts = Counts()

    def rate(self, speculates: bool) -> float:
        return self.tokens[speculates] / self.seconds[speculates]

    @property
    def gain(self) -> float:
        return self.rate(True) / self.rate(False)


class Replay:
    """A sampler that reproduces a text.

    num_prompt_tokens: length of the prompt that `tokens` answer.
    """

    breakers = logprobs = token_logprobs = mask_logits = None

    def __init__(self, num_prompt_tokens: int, tokens: Sequence[int]) -> None:
        self._num_prompt_tokens, self._tokens = num_prompt_tokens, tokens

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The text's token after `history`."""
        return self._tokens[len(history) - self._num_prompt_tokens]


class SmallModelLogits:
    """Context manager in which `large` continues with the logits of `small`, while it runs the same passes for their cost.

    Replaces methods of the engine `large`. Both engines hold the same tokens.
    """

    def __init__(self, large: Engine, small: Engine) -> None:
        self._large, self._small = large, small
        self._run_large, self._accept_large = large.run_draft, large.accept_token

    def __enter__(self) -> None:
        self._large.run_draft, self._large.accept_token = self._run_draft, self._accept_token
        self._large._next_logits = self._next_logits

    def __exit__(self, *error: object) -> None:
        for name in ("run_draft", "accept_token", "_next_logits"):
            delattr(self._large, name)

    def _run_draft(self, ids: Sequence[int]) -> np.ndarray:
        self._run_large(ids)
        return self._small.run_draft(ids)

    def _accept_token(self, token: int) -> None:
        self._accept_large(token)
        self._small.accept_token(token)

    def _next_logits(self, token: int, num_left: int | None) -> Generator[Yield, None, np.ndarray]:
        """A generator like the engine's own, which may yield to other sequences; here there are none."""
        yield from ()
        if self._large.speculation is not None:
            return self._large.speculation.next_logits(self._large, token, num_left)
        rows = self._run_draft([token])
        self._accept_token(token)
        return rows[0]


def load_engine(folder: Path, **options: object) -> Engine:
    """The engine for `folder`; notices go to stderr."""
    engine = None
    for item in open_engine(folder, EngineOptions(device="cpu", ctx=CONTEXT, **options)):
        if isinstance(item, Notice):
            print(item.text, file=sys.stderr, flush=True)
        engine = item
    assert isinstance(engine, Engine)
    return engine


def load_target(folder: Path, ram: str | None) -> Engine:
    """The large model, its weights streamed from disk because they exceed `ram`; None: all of them in memory."""
    evict(sorted(folder.glob("*.safetensors")))
    engine = load_engine(folder, ram=ram)
    streamed = engine.prepared.placement.streamed_bytes
    assert engine.speculation is not None and (streamed > 0) is (ram is not None), "weights are not where --ram or --in-memory wants them"
    return engine


def time_passes(engine: Engine, speculation: Speculation, sampler: Replay | Sampler, max_tokens: int, timings: Timings,
                deadline: float) -> None:
    """Generate after the prefill, passes with and without speculation alternating; each token's time is attributed to the kind of its pass.

    timings: where seconds, tokens and counts are added.
    deadline: when to stop, as `time.monotonic()`.
    """
    speculates, passes, before = False, 0, speculation.counts
    engine.speculation = None
    steps: Iterator[object] = engine.generate(sampler, max_tokens, frozenset())
    next(steps)  # its logits are the prompt's
    while time.monotonic() < deadline:
        if not (speculates and speculation.num_pending):
            if passes == (PASSES_WITH if speculates else PASSES_WITHOUT):
                speculates, passes = not speculates, 0
            engine.speculation = speculation if speculates else None
            passes += 1
        started = time.perf_counter()
        if next(steps, None) is None:
            break
        timings.seconds[speculates] += time.perf_counter() - started
        timings.tokens[speculates] += 1
    timings.counts += speculation.counts.since(before)
    engine.speculation = speculation  # whatever the last pass was


def repeating(engine: Engine, vocabulary: Path, seconds: float) -> dict[str, Timings]:
    """The exchanges, replayed."""
    tokenizer, results, speculation = Tokenizer.load(vocabulary, engine.config), {}, engine.speculation
    for exchange in EXCHANGES:
        prompt, answer = tokenizer.encode(exchange.prompt), tokenizer.encode(exchange.answer, add_special_tokens=False)
        for _ in engine.prefill(prompt):
            continue
        timings = results[exchange.name] = Timings()
        deadline = time.monotonic() + seconds / len(EXCHANGES)
        time_passes(engine, speculation, Replay(len(prompt), answer), len(answer), timings, deadline)
        print(f"{exchange.name}: {len(answer)} tokens, {timings.counts}, {timings.gain:.2f} x", file=sys.stderr, flush=True)
    return results


def stories(engine: Engine, seconds: float) -> Timings:
    """Stories of the packaged model, one after the other."""
    small, timings, speculation = load_engine(FABLE, spec="off"), Timings(), engine.speculation
    tokenizer = Tokenizer.load(FABLE, read_config(FABLE))
    for number, story in enumerate(STORIES):
        prompt = tokenizer.encode_chat([{"role": "user", "content": story}], add_generation_prompt=True)
        for model_engine in (engine, small):
            for _ in model_engine.prefill(prompt):
                continue
        engine._logits = small._logits
        sampler = Sampler(SamplerSettings(temperature=0.8, top_k=40, seed=number), small.config.vocab_size)
        with SmallModelLogits(engine, small):
            time_passes(engine, speculation, sampler, STORY_TOKENS, timings, time.monotonic() + seconds / len(STORIES))
        print(f"story {number + 1}: {timings.counts}, {timings.gain:.2f} x", file=sys.stderr, flush=True)
    small.close()
    return timings


def figures_of(key: str, what: str, timings: Timings) -> list[Figure]:
    tokens = f"{timings.tokens[True]} tokens with, {timings.tokens[False]} without"
    accepted = f"{timings.counts.accepted} of {timings.counts.drafted} drafted were right"
    return [Figure(f"{key}_tokens_per_pass", f"{what}: tokens a pass", accepted, timings.counts.tokens_per_pass, ""),
            Figure(f"{key}_tokens_per_s", f"{what}: with speculation", tokens, timings.rate(True), "tokens/s"),
            Figure(f"{key}_without_tokens_per_s", f"{what}: without", tokens, timings.rate(False), "tokens/s"),
            Figure(f"{key}_gain", f"{what}: with over without", tokens, timings.gain, "x")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ram", default="1.2G")
    parser.add_argument("--in-memory", action="store_true", help="keep all weights in memory and ignore --ram")
    parser.add_argument("--vocabulary", type=Path, help="folder or GGUF file whose tokenizer encodes the repeating set")
    parser.add_argument("--seconds", type=float, default=150.0, help="for each set")
    parser.add_argument("--sets", default="repeating,stories")
    parser.add_argument("--publish", metavar="NAME", help="keep the result under this name")
    options = parser.parse_args()
    sets = options.sets.split(",")
    if "repeating" in sets and not options.vocabulary:
        parser.error("the repeating set needs a --vocabulary")
    figures, ram = [], None if options.in_memory else options.ram
    if "repeating" in sets:
        with closing(load_target(options.folder, ram)) as engine:
            results = repeating(engine, options.vocabulary, options.seconds)
        for name, timings in results.items():
            figures += figures_of(name.split()[0], name, timings)
        figures.append(Figure("repeating_gain", "repeating set: with over without", "geometric mean",
                              geometric_mean(timings.gain for timings in results.values()), "x"))
    if "stories" in sets:
        with closing(load_target(options.folder, ram)) as engine:  # what was learned of another vocabulary is no guess here
            figures += figures_of("stories", "stories", stories(engine, options.seconds))
    publish(f"speculation-{options.publish}" if options.publish else "speculation",
            f"Speculation: {options.folder.name} in {ram or 'memory'}",
            INTRO.format(where=FROM_DISK if ram else ", in memory"), figures, keep=bool(options.publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
