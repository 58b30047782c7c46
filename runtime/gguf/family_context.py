"""`FamilyContext`: what completes a family's config in addition to its metadata keys: sliding windows and the layers that have one,
expert scoring, and multi-token prediction layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...offload.gguf_header import GgufHeader, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS
from ..config_rope import GLOBAL, LOCAL

DEFAULT_WINDOW = 4096  # of every size of Gemma 2, EXAONE 4 and StarCoder 2
K_EXAONE_WINDOW = 128
AFMOE_WINDOW_PERIOD = OLMO3_WINDOW_PERIOD = EXAONE4_WINDOW_PERIOD = COHERE2_WINDOW_PERIOD = 4  # every fourth layer has no window
KOLIBRI_WINDOW_PERIOD = 5  # every fifth layer of Kolibri 1 has no window
EXAONE4_WINDOWED_LAYERS = 64  # of the one size that has windows
WINDOW_PATTERN_SUFFIX = ".attention.sliding_window_pattern"
DEFAULT_ROPE_THETA = 10_000.0
SIGMOID = 2  # a value of expert_gating_func


@dataclass(frozen=True)
class FamilyContext:
    """A file's header and its sliding window, from which modules complete their family's config."""

    header: GgufHeader
    stated_window: object  # the file's value; None if it states none
    window: object  # width of the sliding window; None for full attention

    @property
    def name(self) -> str:
        """The architecture's name, with which its keys begin."""
        return self.header.metadata["general.architecture"]

    def numbers(self, key: str, default: float) -> list[float]:
        """The value of a key below the architecture's name, a number or a list, as a list. Raises CheckpointError."""
        stated = self.header.metadata.get(f"{self.name}.{key}", default)
        values = np.atleast_1d(np.asarray(stated))
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            damaged(self.header.path, f"states {self.name}.{key} {shown_value(stated)}, expected numbers")
        return [float(value) for value in values]

    def has(self, *tensors: str) -> bool:
        """Whether the first layer has any of these tensors."""
        return any(f"blk.0.{tensor}" in self.header.tensors for tensor in tensors)

    def layer_types(self, raw: dict[str, object], period: int) -> list[str]:
        """`layer_types` of config.json; by default every `period`-th layer has no window. The file's list may include MTP layers."""
        layers, mtp_layers = raw["num_hidden_layers"], raw.get("num_nextn_predict_layers")
        listed = self.header.metadata.get(f"{self.name}{WINDOW_PATTERN_SUFFIX}")
        includes_mtp = isinstance(listed, np.ndarray) and type(layers) is type(mtp_layers) is int and len(listed) == layers + mtp_layers
        return layer_types(self.header, layers + mtp_layers, period)[:layers] if includes_mtp else layer_types(self.header, layers, period)

    def require_sigmoid_scores(self, raw: dict[str, object]) -> None:
        """Raises CheckpointError for expert scores other than sigmoid, where the family supports no other."""
        if raw.pop("scoring_func", SIGMOID) != SIGMOID:
            raise CheckpointError(f"{self.header.path}: {self.name}.expert_gating_func is not {SIGMOID}, which is not supported for this "
                                  "architecture", "give the folder of the original checkpoint, if its family is supported")


def drop_mtp_layers(raw: dict[str, object]) -> None:
    """Subtract the multi-token prediction layers, which files include in the layer count."""
    mtp_layers, layers = raw.setdefault("num_nextn_predict_layers", 0), raw["num_hidden_layers"]
    if type(mtp_layers) is int and type(layers) is int and 0 <= mtp_layers < layers:
        raw["num_hidden_layers"] = layers - mtp_layers


def family_context(header: GgufHeader, raw: dict[str, object]) -> FamilyContext:
    """Remove the window from `raw` and build the context. Raises CheckpointError if the family requires a window and the file does not
    state its width."""
    stated_window, family = raw.pop("sliding_window", None), raw["model_type"]
    window = stated_window or None  # files of Phi 4 state 0 for none
    if family == "gemma2" and stated_window is None:
        window = DEFAULT_WINDOW  # early files leave it out
    if family in ("gemma2", "gemma3_text", "gemma3n_text") and not window:
        key = f"{header.metadata['general.architecture']}.attention.sliding_window"
        how = "lacks key" if stated_window is None else "states 0 for"
        raise CheckpointError(f"{header.path} {how} {key}: the width of its sliding window is unknown",
                              "the file was converted wrongly: use another conversion, or the folder of the checkpoint")
    return FamilyContext(header, stated_window, window)


def layer_types(header: GgufHeader, layers: object, period: int) -> list[str]:
    """`layer_types`: the file's list of booleans, or all layers but every n-th have a window, n as the file states it, else `period`."""
    key = f"{header.metadata['general.architecture']}{WINDOW_PATTERN_SUFFIX}"
    pattern = header.metadata.get(key, period)
    if isinstance(pattern, np.ndarray) and pattern.dtype.kind in "biu" and len(pattern) == layers and np.isin(pattern, (0, 1)).all():
        return [LOCAL if has_window else GLOBAL for has_window in pattern]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        return []  # the config reader refuses it
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        damaged(header.path, f"states {key} {shown_value(pattern)}, expected a boolean for each of {layers} layers, or a number")
    return [LOCAL if (layer + 1) % pattern else GLOBAL for layer in range(layers)]
