"""Models with some layers on a simulated GPU, and the outputs that every placement must give."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.kernels.cuda.device import SimulatedDevice
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.planning import devices
from effllm.runtime.planning.roofs import Roofs
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.source import is_low_bit

CTX = 512
NO_ROOFS = Roofs(None, None)


def simulated(memory: int | None = None, link: float = 1.0) -> SimulatedDevice:
    """A GPU, by default behind a link so slow that no layer is copied to it for a pass."""
    return SimulatedDevice(memory, link)


@contextmanager
def card_here(card: SimulatedDevice | None) -> Iterator[None]:
    """Pretend that this machine has this GPU, or a driver without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "DRIVER", Path("/dev/null"))
        patch.setattr(devices, "detect_gpu", lambda: card)
        patch.setattr(devices.roofs, "known", lambda wanted: NO_ROOFS)
        yield


def typed(*argv: object, card: SimulatedDevice | None = None) -> tuple[int, str, str]:
    """The code of a command, and what it wrote."""
    environment = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    with card_here(card):
        code = main([str(argument) for argument in argv], environment)
    return code, environment.stdout.getvalue(), environment.stderr.getvalue()


def opened(folder: Path, card: SimulatedDevice | None, **options_given: object) -> tuple[Engine, list[str]]:
    """An engine, and the notices while opening it. Raw weights keep float32 activations on the processor, as they do on a GPU."""
    exact = {"exact": not is_low_bit(folder)}
    options = EngineOptions(**{"ctx": CTX, "threads": 1, "device": "auto" if card else "cpu", **exact, **options_given})
    with card_here(card):
        *notices, engine = open_engine(folder, options)
    return engine, [event.text for event in notices if isinstance(event, Notice)]


def logits(engine: Engine, tokens: int = 330, prompt: int = 300) -> np.ndarray:
    """Logits of a prompt in chunks and of single tokens after it; the engine is closed."""
    ids = np.random.default_rng(3).integers(0, engine.config.vocab_size, tokens).tolist()
    try:
        rows = [logits_row.copy() for _, logits_row in engine.score(ids[:prompt])]
        rows += [engine.forward_logits([token]).copy() for token in ids[prompt:]]
    finally:
        engine.close()
    return np.concatenate(rows)


def divergence(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Mean KL divergence of `ours` from `theirs`, in nats per token."""
    p, q = (np.exp(logits_ - logits_.max(-1, keepdims=True), dtype=np.float64) for logits_ in (theirs, ours))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return float((p * np.log(p / q)).sum(-1).mean())
