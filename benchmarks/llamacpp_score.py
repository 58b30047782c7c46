"""Scoring for all quality tables, the same code for both sides: KL divergence from the float32 model, in float64.

The reference is the checkpoint in float32 through transformers. A candidate is a set of dequantized tensors placed into that model
(*format*: the numbers alone, exact arithmetic), or logits computed elsewhere on the same ids (*system*: including kernels, activations and
cache). Texts are cut into independent windows; every token after a window's first is scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from effllm.runtime.config import read_config
from effllm.runtime.measuring.evaluate import windows as cut
from effllm.runtime.tokenizer import Tokenizer

RESAMPLES = 2000
BATCH_TOKENS = 2048  # through the float32 model at once


@dataclass(frozen=True)
class Score:
    """KL divergence from the reference in nats per token; `kld_error` is its standard error, by bootstrap over windows. `same_top` is the
    share of tokens with the same likeliest next token. `window_kld` has one mean per window, for comparing runs in pairs."""

    tokens: int
    ppl: float
    ppl_ref: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_p99: float
    kld_p999: float
    same_top: float
    window_kld: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Score:
        return cls(**{**raw, "window_kld": tuple(raw["window_kld"])})


def heldout_windows(folder: Path, text: Path, ctx: int = 512, count: int = 64) -> list[list[int]]:
    """The first `count` windows of `ctx` tokens of a text file, cut as `effllm eval` does. Raises ValueError for a text too short."""
    tokenizer = Tokenizer.load(folder, read_config(folder))
    whole = [window for window in cut(tokenizer, text.read_text(encoding="utf-8"), ctx) if len(window) == ctx]
    if len(whole) < count:
        raise ValueError(f"{text} has {len(whole)} windows of {ctx} tokens, {count} are wanted")
    return whole[:count]


def resamples(windows: int) -> np.ndarray:
    """Bootstrap window indices [RESAMPLES, windows], the same for every run, so that two runs can be compared pairwise."""
    return np.random.default_rng(0).integers(0, windows, (RESAMPLES, windows))


class Reference:
    """The float32 model of a folder on some windows. Its logits are cached in `work` if given, else in memory."""

    def __init__(self, folder: Path, windows: Sequence[Sequence[int]], work: Path | None = None) -> None:
        if len({len(window) for window in windows}) != 1:
            raise ValueError("windows must be of one length")
        self.folder, self.windows, self.work = folder, np.array(windows, np.int64), work
        weights = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
        self.weights_key = hashlib.sha256(weights + (folder / "config.json").read_bytes()).hexdigest()[:12]
        self.key = f"{self.weights_key}-{hashlib.sha256(self.windows.tobytes()).hexdigest()[:12]}"

    @cached_property
    def model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def logits(self) -> np.ndarray:
        """float32 [windows, tokens, V]; from a file, mapped, where there is a work folder."""
        path = self.work / f"reference-{self.key}.npy" if self.work else None
        if path is None or not path.exists():
            shape = (*self.windows.shape, self.model.config.vocab_size)
            if path is None:
                made = np.empty(shape, np.float32)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".unfinished")
                made = np.lib.format.open_memmap(unfinished, "w+", np.float32, shape)
            for row, logits in zip(made, self.run(), strict=True):
                row[:] = logits
            if path is None:
                return made
            made.flush()
            unfinished.rename(path)
        return np.load(path, mmap_mode="r")

    def run(self) -> Iterator[np.ndarray]:
        """Logits [tokens, V] of each window through the model in its current state."""
        step = max(1, BATCH_TOKENS // self.windows.shape[1])
        for start in range(0, len(self.windows), step):
            with torch.inference_mode():
                yield from self.model(torch.from_numpy(self.windows[start : start + step]), use_cache=False).logits.numpy()

    def score(self, logits: Iterable[np.ndarray]) -> Score:
        """Score logits [tokens, V] of each window in turn."""
        divergence, loss, loss_ref, same = [], [], [], []
        for ids, wanted, got in zip(self.windows, self.logits, logits, strict=True):
            targets = torch.from_numpy(ids[1:])[:, None]
            there = torch.log_softmax(torch.from_numpy(wanted[:-1].astype(np.float64)), -1)
            here = torch.log_softmax(torch.from_numpy(got[: len(ids) - 1].astype(np.float64)), -1)
            divergence.append((there.exp() * (there - here)).sum(-1).numpy())
            loss.append(-here.gather(1, targets).numpy())
            loss_ref.append(-there.gather(1, targets).numpy())
            same.append((here.argmax(-1) == there.argmax(-1)).numpy())
        each = np.concatenate(divergence)
        per_window = np.array([part.mean() for part in divergence])
        spread = per_window[resamples(len(per_window))].mean(1).std()
        return Score(
            tokens=len(each), ppl=float(np.exp(np.concatenate(loss).mean())), ppl_ref=float(np.exp(np.concatenate(loss_ref).mean())),
            kld_mean=float(each.mean()), kld_error=float(spread), kld_median=float(np.median(each)),
            kld_p99=float(np.quantile(each, 0.99)), kld_p999=float(np.quantile(each, 0.999)),
            same_top=float(np.concatenate(same).mean()), window_kld=tuple(per_window.tolist()))

    def score_tensors(self, tensors: Mapping[str, np.ndarray]) -> Score:
        """*format*: float32 values by Hugging Face name, placed into the model; what is not named keeps the checkpoint's values. Raises
        KeyError for a name and ValueError for a shape that the model does not have."""
        self.logits  # noqa: B018  before anything is replaced
        places = dict(self.model.named_parameters())
        kept = {}
        try:
            for name, values in tensors.items():
                if name not in places:
                    raise KeyError(f"the model has no tensor {name} of its own")
                if tuple(places[name].shape) != tuple(values.shape):
                    raise ValueError(f"{name}: shape {values.shape}, the model has {tuple(places[name].shape)}")
                kept[name] = places[name].data
                places[name].data = torch.from_numpy(np.array(values, np.float32))
            return self.score(self.run())
        finally:
            for name, data in kept.items():
                places[name].data = data


@lru_cache(maxsize=2)
def _reference(folder: Path, windows: tuple[tuple[int, ...], ...], work: Path | None) -> Reference:
    return Reference(folder, windows, work)


def reference(folder: Path, windows: Sequence[Sequence[int]], work: Path | None = None) -> Reference:
    """The Reference of a folder, cached for the next call with the same windows."""
    return _reference(Path(folder), tuple(map(tuple, windows)), work)


def score_tensors(folder: Path, tensors: Mapping[str, np.ndarray], windows: Sequence[Sequence[int]], work: Path | None = None) -> Score:
    """`Reference.score_tensors` for a model folder: the loss caused by the format of these tensors, in exact arithmetic."""
    return reference(folder, windows, work).score_tensors(tensors)


def score_engine(ref: Reference, folder: Path, columns: int | None = None, threads: int | None = None) -> Score:
    """*system*: a folder through effllm's own engine against `ref`. `columns` None runs windows as prompts are read; a number feeds so many
    tokens at a time, which is the arithmetic of decode up to 16."""
    from effllm.runtime.engine import open_engine
    from effllm.runtime.prepare import EngineOptions

    ctx = ref.windows.shape[1]
    *_, engine = open_engine(folder, EngineOptions(device="cpu", ctx=ctx + 1, threads=threads, kv="32bit", force=True))

    def logits() -> Iterator[np.ndarray]:
        for window in ref.windows.tolist():
            if columns is None:
                yield np.concatenate([part.copy() for _, part in engine.score(window)])
                continue
            engine.reset()
            yield np.concatenate([engine.forward_logits(window[at : at + columns]).copy() for at in range(0, ctx, columns)])

    try:
        return ref.score(logits())
    finally:
        engine.close()


def container(folder: Path) -> tuple[str, dict[str, np.ndarray], dict[str, float]]:
    """A folder that `effllm quantize` made: its format and method in words, its tensors dequantized, by name, and its sizes: `bpw` over
    every tensor, `body_bpw` without embedding and head, `nbytes`. Padding between tensors is not counted, padding inside them is."""
    import json

    from effllm.offload.checkpoint import TensorStore
    from effllm.quant.codes import dequantize
    from effllm.quant.pack import unpack
    from effllm.quant.spec import QuantSpec
    from effllm.quant.weight import to_f32
    from llamacpp_files import DTYPES

    raw = json.loads((folder / "effllm.json").read_text(encoding="utf-8"))
    described = raw["tensors"]
    values: dict[str, np.ndarray] = {}
    nbytes, count = {"body": 0, "head": 0}, {"body": 0, "head": 0}
    with TensorStore.open(folder) as store:
        for name, info in store.tensors.items():
            if name.startswith("__pad__"):
                continue
            entry, data = described.get(name, {}), store.read(info)
            spec = QuantSpec.parse(entry["spec"]) if "spec" in entry else QuantSpec.raw(DTYPES[info.dtype])
            if spec.is_raw:
                stored = data.view(np.float32 if spec.scheme == "f32" else np.uint16)
                values[name] = to_f32(stored, spec.scheme).reshape(info.shape)
            else:
                values[name] = dequantize(unpack(data, spec, tuple(entry["shape"])), spec)
            part = "head" if name in ("model.embed_tokens.weight", "lm_head.weight") else "body"
            nbytes[part] += info.nbytes
            count[part] += values[name].size
    label = f"{raw['spec']} {raw['method']['name']}"
    return label, values, {"bpw": 8 * sum(nbytes.values()) / sum(count.values()), "body_bpw": 8 * nbytes["body"] / count["body"],
                           "head_bpw": 8 * nbytes["head"] / max(1, count["head"]), "nbytes": sum(nbytes.values())}
