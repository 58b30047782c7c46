"""Gate thresholds for models whose activation is never exactly zero: lossy sparsity, opt-in.

A neuron contributes |act(gate)| times its `up` times the norm of its column of `down`. The first is known before anything of the neuron is
read, the last always; so a gate is compared with a threshold divided by that norm (WINA's weighting of CATS's criterion). A layer's
threshold is the quantile of the product over a text, so that every layer skips the share asked for. The rule `magnitude` uses no weighting:
one magnitude per tensor, as TEAL (2408.14690) does for the inputs of every matrix, here for bundled matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...kernels import reference
from ..calibrate import built_in_text, calibration_ids
from ..config import read_config
from ..engine import Engine, open_engine
from ..events import Notice, Progress
from ..prepare import EngineOptions

TOKENS = 512
RULES = ("weighed", "magnitude")


def gate_thresholds(folder: Path, share: float, text: str | None = None,
                    rule: str = RULES[0]) -> Iterator[Progress | Notice | tuple[np.ndarray, ...]]:
    """Run a text through the model in `folder`, whose MLPs are gated; yields progress, and last the thresholds of every layer, float32
    [neurons] each, which zero a `share` of all gates."""
    engine, width = None, min(TOKENS, read_config(folder).context_length)
    for item in open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=width)):
        if isinstance(item, Engine):
            engine = item
        else:
            yield item
    try:
        config = engine.config
        ids = calibration_ids(folder, config, built_in_text() if text is None else text, TOKENS)[:width]
        seen: dict[int, np.ndarray] = {}

        def tap(name: str, layer: int, value: np.ndarray) -> None:
            if name == "mlp_in":
                seen[layer] = np.array(value)

        engine.reset()
        engine.model.forward(np.array(ids, np.int64), engine.cache, tap)
        found = []
        for layer in range(config.num_hidden_layers):
            weights = engine.model.read_layer(layer)
            norm, bias = weights.post_norm, weights.gate.bias
            x = reference.normalise(seen[layer].astype(np.float64), norm.kind, norm.weight, norm.bias, norm.eps).astype(np.float32)
            gates = x @ weights.gate.weight.to_f32().T + (0 if bias is None else bias)
            sizes = np.abs(reference.activate(gates, config.hidden_act))
            if rule == "magnitude":
                found.append(np.full(gates.shape[1], np.quantile(sizes, share), np.float32))
            else:
                lengths = np.sqrt(np.square(weights.down.weight.to_f32(), dtype=np.float32).sum(axis=0)).astype(np.float32)
                lengths = np.maximum(lengths, np.float32(1e-12))
                found.append((np.quantile(sizes * lengths, share) / lengths).astype(np.float32))
            yield Progress("finding thresholds", layer + 1, config.num_hidden_layers, "layers")
        yield tuple(found)
    finally:
        engine.close()
