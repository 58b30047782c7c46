"""Quality of a model, a weight format or a KV cache: perplexity, and KL divergence from a reference run.

Texts are split into independent windows of `ctx` tokens. Every token after a window's first is scored, with the same kernels, chunks and
cache as generation. Log-probabilities are float64, computed for one token at a time: a table of them would exceed the planned memory.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ... import EffllmError, UsageError
from ...offload.notes import refuse_fallbacks
from ...offload.size import plural
from ..config import read_config
from ..engine import Engine, EngineOptions, open_prepared
from ..events import Notice, Progress
from ..planning.needed_kernels import folder_kinds
from ..planning.plan_request import LOGIT_ROWS
from ..planning.settings_fit import drop_unsupported
from ..prepare import prepare
from ..tokenizer import Tokenizer

LARGEST_LOSS = 700.0  # nats: its exponential is the last that a float holds, nearly
ROWS_AT_ONCE = 4  # of log-probabilities: two, and what a sum over one of them takes; one to spare
ONE_TOKENIZER = "compare models of one tokenizer"
FLOOR_TOKENS = 256  # the reference runs them twice more


@dataclass(frozen=True)
class PerplexityResult:
    """`ppl_error` is the standard error of the perplexity."""

    tokens: int
    ppl: float
    ppl_error: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class KldResult:
    """KL divergence of the run from the reference, in nats per token; `same_top` is the share of tokens with the same top token.

    `floor_kld_mean` is the reference against itself with the prompt split into single pages: rounding alone.
    """

    tokens: int
    ppl: float
    ppl_ref: float
    kld_mean: float
    kld_median: float
    kld_p99: float
    kld_p999: float
    same_top: float
    kv_bits_per_value: float
    packed_bits: float
    weight_bits_per_value: float
    floor_kld_mean: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def windows(tokenizer: Tokenizer, text: str, ctx: int, source: str = "the text", flag: str = "--text",
            ids: list[int] | None = None) -> list[list[int]]:
    """The text in windows of `ctx` tokens; a last window of fewer than two is dropped. `source` names the text in errors, `flag` the flag
    it comes from. `ids`: its tokens, if known.

    If the tokenizer adds BOS, every window begins with it, unscored, because windows are independent texts. llama.cpp does so too;
    transformers' recipe has BOS in the first window only, which counts the surprise of a text without beginning against the model. Raises
    UsageError for a text too short.
    """
    ids = tokenizer.encode(text) if ids is None else ids
    begin = ids[:1] if tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id] else []
    body, width = ids[len(begin) :], ctx - len(begin)
    cut = [begin + body[start : start + width] for start in range(0, len(body), width)] if width > 0 else []
    cut = [window for window in cut if len(window) > 1]
    if not cut or ctx < 2:
        raise UsageError(f"{source} has {plural(len(ids), 'token')}: nothing to score in windows of {ctx}",
                         f"a longer {flag}" + (", or --ctx of at least 2" if ctx < 2 else ""))
    return cut


def cutting(tokenizer: Tokenizer, text: str) -> Generator[Progress, None, list[int]]:
    """Tokenize a text, with Progress: a second per few megabytes."""
    steps = tokenizer.encoding(text)
    while True:
        try:
            yield Progress("cutting the text into tokens", next(steps), len(text), "characters")
        except StopIteration as stop:
            return stop.value


def windowed_options(options: EngineOptions, folder: Path, usual: int) -> tuple[EngineOptions, list[str]]:
    """Options with a window size as context (`usual`, or the model's context if smaller, unless requested) and without drafts, which
    scoring does not use; and notices about user settings that this overrides, which `strict` refuses."""
    config, notices = read_config(folder), []
    asked = drop_unsupported(replace(options, from_settings=options.from_settings & {"ctx"}), folder, config, None, notices)
    if options.strict:
        refuse_fallbacks(notices)
    return replace(options, ctx=asked.ctx or min(usual, config.max_position_embeddings), spec="off"), notices


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [n, V], float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def loss_of(logits: np.ndarray, target: int) -> float:
    """Cross-entropy in nats of logits [V] for a target token."""
    return -float(log_softmax(logits)[target])


def perplexity_of(loss: np.ndarray) -> float:
    """Perplexity of losses in nats. Raises EffllmError on overflow."""
    mean = float(loss.mean())
    if mean > LARGEST_LOSS:
        raise EffllmError(f"the text is all but impossible for this model: a loss of {mean:.0f} nats a token is beyond any perplexity",
                          "are the tokenizer and the weights those of one model? effllm verify MODEL checks its files")
    return math.exp(mean)


def perplexity(engine: Engine, tokenizer: Tokenizer, text: str, ctx: int,
               source: str = "the text") -> Iterator[Progress | PerplexityResult]:
    """Score a text; yields Progress, the result last."""
    losses: list[float] = []
    cut = windows(tokenizer, text, min(ctx, engine.n_ctx), source, ids=(yield from cutting(tokenizer, text)))
    done, total = 0, sum(map(len, cut))
    for window in cut:
        for start, logits in engine.score(window):
            engine.require_finite_logits(logits)
            losses += map(loss_of, logits, window[start + 1 : start + 1 + len(logits)])
            done += len(logits)
            yield Progress("scoring", done, total, "tokens")
    loss = np.array(losses)
    ppl = perplexity_of(loss)
    yield PerplexityResult(len(loss), ppl, ppl * float(loss.std(ddof=1)) / math.sqrt(len(loss)) if len(loss) > 1 else 0.0)


def refuse_other_tokenizer(folder: Path, against: Path) -> None:
    """Raises UsageError, naming the first differing token, for models with different tokenizers, whose distributions cannot be compared.
    A token that only one of them names is no difference: GGUF files name padding tokens."""
    own, other = (Tokenizer.load(each, read_config(each)).base_tokens() for each in (folder, against))
    number = min((number for number in own.keys() & other.keys() if own[number] != other[number]), default=None)
    if number is not None:
        raise UsageError(f"{against} has another tokenizer than {folder}: token {number} is {other[number]!r} and {own[number]!r}",
                         ONE_TOKENIZER)


def open_reference(folder: Path, options: EngineOptions, measured: Engine) -> Iterator[Progress | Notice | Engine]:
    """`open_engine` for an engine that alternates with `measured`: memory that one has planned but not touched yet is counted, and what
    the comparison takes."""
    plan, config = measured.placement, measured.config
    untouched = plan.kv_bytes - plan.gpu.kv_bytes + plan.workspace_bytes
    compared = ROWS_AT_ONCE * 8 * config.vocab_size + FLOOR_TOKENS * 4 * config.hidden_size
    return open_prepared(lambda: prepare(folder, options, untouched + compared), folder_kinds(folder, options))


def kld(engine: Engine, reference: Engine, tokenizer: Tokenizer, text: str, ctx: int,
        source: str = "the text", by_token: bool = False) -> Iterator[Progress | KldResult]:
    """Compare `engine` with `reference` on the same tokens; yields Progress, the result last.

    With a packed cache the text is run page by page, so that each page is packed before the next reads it, and tokens are scored that read
    a packed page. `by_token` runs `engine` one token at a time, with the decode kernels.
    """
    if engine.config.vocab_size != reference.config.vocab_size:
        raise UsageError(f"vocabularies differ: {engine.config.vocab_size} and {reference.config.vocab_size} tokens",
                         ONE_TOKENIZER)
    cut = windows(tokenizer, text, min(ctx, engine.n_ctx, reference.n_ctx), source, ids=(yield from cutting(tokenizer, text)))
    first, pages = engine.first_reader(by_token), 1 if engine.cache.is_packed else None
    if len(cut[0]) <= first + 1:
        larger = "a longer text" if len(cut) == 1 else "a larger -c"
        raise UsageError(f"windows of {len(cut[0])} tokens: none reads a packed page, which needs {first + 2}",
                         f"{larger}, or a smaller --kv-sink and --kv-window")
    cut = [window for window in cut if len(window) > first + 1]
    done, total = 0, sum(map(len, cut))
    divergence, loss, loss_ref, same = [], [], [], []
    bits = 0.0
    for window in cut:
        scored = _rows(engine, engine.score(window, pages, by_token=by_token))
        for (at, own), (_, wanted) in zip(scored, _rows(reference, reference.score(window, pages)), strict=True):
            done += 1
            yield Progress("scoring", done, total, "tokens")
            if at < first or at + 1 == len(window):
                continue
            here, there, target = log_softmax(own), log_softmax(wanted), window[at + 1]
            loss.append(-here[target])
            loss_ref.append(-there[target])
            same.append(here.argmax() == there.argmax())
            divergence.append(_divergence(here, there))
        if len(window) == len(cut[0]):  # a short last window would count its exact tokens too heavily
            bits = engine.cache.bits_per_value
    packed_bits = engine.cache.packed_bits
    engine.reset()  # its cache makes room
    floor = _floor(reference, cut[0][:FLOOR_TOKENS])
    each = np.array(divergence)
    yield KldResult(
        tokens=len(each), ppl=perplexity_of(np.array(loss)), ppl_ref=perplexity_of(np.array(loss_ref)),
        kld_mean=float(each.mean()), kld_median=float(np.median(each)), kld_p99=float(np.quantile(each, 0.99)),
        kld_p999=float(np.quantile(each, 0.999)), same_top=float(np.mean(same)), kv_bits_per_value=bits,
        packed_bits=packed_bits, weight_bits_per_value=engine.model.bits_per_value, floor_kld_mean=floor)


def _rows(engine: Engine, scored: Iterator[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits [V]), checked to be finite."""
    for start, logits in scored:
        engine.require_finite_logits(logits)
        yield from enumerate(logits, start)


def _divergence(here: np.ndarray, there: np.ndarray) -> float:
    """KL divergence of `here` from the log-probabilities `there` [V]; `here` is overwritten."""
    np.subtract(there, here, out=here)
    here *= np.exp(there)
    return float(here.sum())


def _floor(reference: Engine, window: list[int]) -> float:
    """The reference against itself on the beginning of a window, the second time split into single pages."""
    whole = np.concatenate([x.copy() for _, x in reference.states(window)])  # a table of logits would be far larger
    found, step = [], LOGIT_ROWS // 2
    for start, x in reference.states(window, pages=1):
        for row in range(0, len(x), step):
            cut = x[row : row + step]
            logits = reference.model.logits(np.concatenate([whole[start + row : start + row + len(cut)], cut]))
            found += [_divergence(log_softmax(other), log_softmax(own)) for own, other in zip(logits, logits[len(cut) :])]
    return float(np.mean(found))
