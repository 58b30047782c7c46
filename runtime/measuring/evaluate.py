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

MAX_LOSS = 700.0  # nats; exp() of much more overflows a float64
NUM_LOGPROB_ROWS = 4  # float64 rows [V] at once: two of log-probabilities, one temporary of a sum, one to spare
SAME_TOKENIZER_HINT = "compare models of one tokenizer"
FLOOR_TOKENS = 256  # on which the reference is compared with itself


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over the scored tokens."""

    tokens: int
    ppl: float
    ppl_error: float  # standard error

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class KldResult:
    """KL divergence of the run from the reference, in nats per token."""

    tokens: int
    ppl: float
    ppl_ref: float
    kld_mean: float
    kld_median: float
    kld_p99: float
    kld_p999: float
    same_top: float  # share of tokens with the same top token
    kv_bits_per_value: float
    packed_bits: float
    weight_bits_per_value: float
    floor_kld_mean: float  # of the reference against itself with the prompt split into single pages: rounding alone

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
    bos = ids[:1] if tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id] else []
    body_ids, width = ids[len(bos) :], ctx - len(bos)
    pieces = [bos + body_ids[start : start + width] for start in range(0, len(body_ids), width)] if width > 0 else []
    pieces = [window for window in pieces if len(window) > 1]
    if not pieces or ctx < 2:
        raise UsageError(f"{source} has {plural(len(ids), 'token')}: nothing to score in windows of {ctx}",
                         f"a longer {flag}" + (", or --ctx of at least 2" if ctx < 2 else ""))
    return pieces


def tokenize_with_progress(tokenizer: Tokenizer, text: str) -> Generator[Progress, None, list[int]]:
    """Tokenize a text, yielding Progress: it takes a second per few megabytes."""
    steps = tokenizer.encoding(text)
    while True:
        try:
            yield Progress("cutting the text into tokens", next(steps), len(text), "characters")
        except StopIteration as stop:
            return stop.value


def windowed_options(options: EngineOptions, folder: Path, default_ctx: int) -> tuple[EngineOptions, list[str]]:
    """Options with a window size as context (`usual`, or the model's context if smaller, unless requested) and without drafts, which
    scoring does not use; and notices about user settings that this overrides, which `strict` refuses."""
    config, notices = read_config(folder), []
    supported = drop_unsupported(replace(options, from_settings=options.from_settings & {"ctx"}), folder, config, None, notices)
    if options.strict:
        refuse_fallbacks(notices)
    return replace(options, ctx=supported.ctx or min(default_ctx, config.max_position_embeddings), spec="off"), notices


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [n, V], float64."""
    log_probs = logits.astype(np.float64)
    log_probs -= log_probs.max(-1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
    return log_probs


def loss_of(logits: np.ndarray, target: int) -> float:
    """Cross-entropy in nats of logits [V] for a target token."""
    return -float(log_softmax(logits)[target])


def perplexity_of(loss: np.ndarray) -> float:
    """Perplexity of losses in nats. Raises EffllmError on overflow."""
    mean = float(loss.mean())
    if mean > MAX_LOSS:
        raise EffllmError(f"the text is all but impossible for this model: a loss of {mean:.0f} nats a token is beyond any perplexity",
                          "are the tokenizer and the weights those of one model? effllm verify MODEL checks its files")
    return math.exp(mean)


def perplexity(engine: Engine, tokenizer: Tokenizer, text: str, ctx: int,
               source: str = "the text") -> Iterator[Progress | PerplexityResult]:
    """Score a text; yields Progress, the result last."""
    losses: list[float] = []
    text_windows = windows(tokenizer, text, min(ctx, engine.n_ctx), source, ids=(yield from tokenize_with_progress(tokenizer, text)))
    done, total = 0, sum(map(len, text_windows))
    for window in text_windows:
        for start, logits in engine.score(window):
            engine.require_finite_logits(logits)
            losses += map(loss_of, logits, window[start + 1 : start + 1 + len(logits)])
            done += len(logits)
            yield Progress("scoring", done, total, "tokens")
    loss = np.array(losses)
    ppl = perplexity_of(loss)
    yield PerplexityResult(len(loss), ppl, ppl * float(loss.std(ddof=1)) / math.sqrt(len(loss)) if len(loss) > 1 else 0.0)


def refuse_other_tokenizer(folder: Path, reference: Path) -> None:
    """Raises UsageError, naming the first differing token, for models with different tokenizers, whose distributions cannot be compared.
    A token that only one of them names is no difference: GGUF files name padding tokens."""
    vocab, other_vocab = (Tokenizer.load(each, read_config(each)).base_tokens() for each in (folder, reference))
    token_id = min((each for each in vocab.keys() & other_vocab.keys() if vocab[each] != other_vocab[each]), default=None)
    if token_id is not None:
        raise UsageError(f"{reference} has another tokenizer than {folder}: "
                         f"token {token_id} is {other_vocab[token_id]!r} and {vocab[token_id]!r}", SAME_TOKENIZER_HINT)


def open_reference(folder: Path, options: EngineOptions, measured: Engine) -> Iterator[Progress | Notice | Engine]:
    """`open_engine` for an engine that alternates with `measured`. Its plan leaves room for memory that `measured` has planned but not
    touched yet, and for the arrays of the comparison."""
    placement, config = measured.placement, measured.config
    untouched_nbytes = placement.kv_bytes - placement.gpu.kv_bytes + placement.workspace_bytes
    comparison_nbytes = NUM_LOGPROB_ROWS * 8 * config.vocab_size + FLOOR_TOKENS * 4 * config.hidden_size
    return open_prepared(lambda: prepare(folder, options, untouched_nbytes + comparison_nbytes), folder_kinds(folder, options))


def kld(engine: Engine, reference: Engine, tokenizer: Tokenizer, text: str, ctx: int,
        source: str = "the text", by_token: bool = False) -> Iterator[Progress | KldResult]:
    """Compare `engine` with `reference` on the same tokens; yields Progress, the result last.

    With a packed cache the text is run page by page, so that each page is packed before the next reads it, and tokens are scored that read
    a packed page. `by_token` runs `engine` one token at a time, with the decode kernels.
    """
    if engine.config.vocab_size != reference.config.vocab_size:
        raise UsageError(f"vocabularies differ: {engine.config.vocab_size} and {reference.config.vocab_size} tokens",
                         SAME_TOKENIZER_HINT)
    ids = yield from tokenize_with_progress(tokenizer, text)
    text_windows = windows(tokenizer, text, min(ctx, engine.n_ctx, reference.n_ctx), source, ids=ids)
    first_scored, pages = engine.first_reader(by_token), 1 if engine.cache.is_packed else None
    if len(text_windows[0]) <= first_scored + 1:
        remedy = "a longer text" if len(text_windows) == 1 else "a larger -c"
        raise UsageError(f"windows of {len(text_windows[0])} tokens: none reads a packed page, which needs {first_scored + 2}",
                         f"{remedy}, or a smaller --kv-sink and --kv-window")
    text_windows = [window for window in text_windows if len(window) > first_scored + 1]
    done, total = 0, sum(map(len, text_windows))
    klds, losses, ref_losses, top_matches = [], [], [], []
    kv_bits = 0.0
    for window in text_windows:
        scored = _finite_rows(engine, engine.score(window, pages, by_token=by_token))
        for (position, logits), (_, ref_logits) in zip(scored, _finite_rows(reference, reference.score(window, pages)), strict=True):
            done += 1
            yield Progress("scoring", done, total, "tokens")
            if position < first_scored or position + 1 == len(window):
                continue
            log_probs, ref_log_probs, target = log_softmax(logits), log_softmax(ref_logits), window[position + 1]
            losses.append(-log_probs[target])
            ref_losses.append(-ref_log_probs[target])
            top_matches.append(log_probs.argmax() == ref_log_probs.argmax())
            klds.append(_divergence(log_probs, ref_log_probs))
        if len(window) == len(text_windows[0]):  # a short last window would count its exact tokens too heavily
            kv_bits = engine.cache.bits_per_value
    packed_bits = engine.cache.packed_bits
    engine.reset()  # its cache makes room
    floor = _floor_kld(reference, text_windows[0][:FLOOR_TOKENS])
    divergences = np.array(klds)
    yield KldResult(
        tokens=len(divergences), ppl=perplexity_of(np.array(losses)), ppl_ref=perplexity_of(np.array(ref_losses)),
        kld_mean=float(divergences.mean()), kld_median=float(np.median(divergences)), kld_p99=float(np.quantile(divergences, 0.99)),
        kld_p999=float(np.quantile(divergences, 0.999)), same_top=float(np.mean(top_matches)), kv_bits_per_value=kv_bits,
        packed_bits=packed_bits, weight_bits_per_value=engine.model.bits_per_value, floor_kld_mean=floor)


def _finite_rows(engine: Engine, scored: Iterator[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits [V]), checked to be finite."""
    for start, logits in scored:
        engine.require_finite_logits(logits)
        yield from enumerate(logits, start)


def _divergence(log_probs: np.ndarray, ref_log_probs: np.ndarray) -> float:
    """KL divergence of a distribution from the reference, both as log-probabilities [V]; `log_probs` is overwritten."""
    np.subtract(ref_log_probs, log_probs, out=log_probs)
    log_probs *= np.exp(ref_log_probs)
    return float(log_probs.sum())


def _floor_kld(reference: Engine, window: list[int]) -> float:
    """The reference against itself on the beginning of a window, the second time split into single pages."""
    states = np.concatenate([x.copy() for _, x in reference.states(window)])  # a table of logits would be far larger
    klds, step = [], LOGIT_ROWS // 2
    for start, x in reference.states(window, pages=1):
        for row in range(0, len(x), step):
            page_states = x[row : row + step]
            logits = reference.model.logits(np.concatenate([states[start + row : start + row + len(page_states)], page_states]))
            klds += [_divergence(log_softmax(by_page), log_softmax(by_chunk))
                     for by_chunk, by_page in zip(logits, logits[len(page_states) :])]
    return float(np.mean(klds))
