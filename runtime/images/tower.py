"""Base class of vision and audio towers: reads the config, loads weights on first use, checks the output shape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ... import UsageError
from ...offload.hardware import cpu_threads
from ..config_reader import ConfigError, Keys, show
from ..stores.composite import THINKER_KEY
from ..tokenizer import Tokenizer
from . import ROW_PLACEHOLDER, EncodingJob
from .modality import Modality
from .tower_ops import ACTIVATIONS, WorkerPool
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

SCALED_EMBEDDING_FAMILIES = ("granite",)  # text families that scale embeddings after media rows are inserted
# Output of `values`, and workers -> rows float32 [n, hidden], or [1 + layers, n, hidden] with DeepStack rows.
Rows = Callable[[Any, WorkerPool], np.ndarray]


class Family(Protocol):
    """What a family implements for one modality."""

    def read_preprocessor(self) -> Keys:
        """The preprocessor's configuration."""

    def configure(self, keys: Keys) -> None:
        """Derive settings from it and from the config. Raises EffllmError for what is not supported."""

    def values(self, taken: np.ndarray) -> Any:
        """Preprocess an image uint8 [height, width, 3], or audio float32 [samples], into the tower's input."""

    def load(self, weights: Weights) -> Rows:
        """The tower, as a function from input to rows."""

    def workspace_floats(self) -> int:
        """Float32 values needed beside the weights while one item is encoded."""

    def tokens(self, *size: int) -> tuple[int, ...]:
        """What an image (height, width), a video (frames, height, width) or audio (samples) becomes in the prompt."""


class Tower(Family):
    """`KINDS`: supported tower types -> defaults of their configs; the first is meant where none is named. The tower's config is the
    `SECTION` of config.json, or its root where that is empty: `tower_config`; the config around it is `root_config`."""

    KINDS: Mapping[str, Mapping[str, object]]
    SECTION: str
    modality: Modality
    placeholder: str
    threads: int | None = None
    joint_attention = shares_border = False  # as of `MediaEncoder`
    constrain_logits: Callable[[Sequence[int], bool, np.ndarray], None] | None = None
    scales_rows = True  # rows are scaled like embeddings, in SCALED_EMBEDDING_FAMILIES

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        self.source, self.config = source, config
        self.root_config = Keys(Keys(source.config).section(THINKER_KEY) or source.config)
        stated = (self.root_config.section(self.SECTION) or {}) if self.SECTION else self.root_config.raw
        self.tower = str(stated.get("model_type") or next(iter(self.KINDS)))
        if self.tower not in self.KINDS:
            raise UsageError(f"its {self.modality.part} tower of type {show(self.tower)} is not supported",
                             f"known: {', '.join(self.KINDS)}; text-only works")
        own = {key: value for key, value in stated.items() if value is not None}
        self.tower_config = Keys({**self.KINDS[self.tower], **own}, f"config.json{self.SECTION and f': {self.SECTION}'}")
        self._rows: Rows | None = None
        self._once = threading.Lock()
        self.configure(self.read_preprocessor())

    def run_tower(self, taken: np.ndarray, job: EncodingJob) -> tuple[np.ndarray, tuple[int, ...], np.ndarray | None]:
        """Rows, tokens and DeepStack rows, as in `EncodedMedia`."""
        with self._once, self.source.saying():
            tokens = self.tokens(*(taken.shape if taken.ndim == 1 else taken.shape[:-1]))
            if self._rows is None:
                with self.source.weights() as weights:
                    self._rows = self.load(weights)
        with WorkerPool(self.workers, job) as pool:
            rows, deep = self._rows(self.values(taken), pool), None
        if rows.ndim == 3:
            rows, deep = rows[0], rows[1:]
        if rows.shape != (self.row_count(tokens, taken), self.config.hidden_size):
            raise ConfigError(f"{self.source.model}: an {self.modality.noun} became {len(rows)} rows of {rows.shape[-1]}, but "
                              f"{self.row_count(tokens, taken)} of {self.config.hidden_size} are expected")
        if self.scales_rows and self.config.family in SCALED_EMBEDDING_FAMILIES:
            rows = rows * np.float32(self.config.embedding_multiplier)
        return rows, tokens, deep

    def to_text(self, weights: Weights, inside: int, between: int = 0, bias: bool | None = None) -> Rows:
        """The two-layer MLP projector to the text model's width, which most families have: from `inside` by way of `between`, by default
        the hidden size."""
        hidden, curve = self.config.hidden_size, self.root_config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
        return weights.two_layers("multi_modal_projector.", (inside, between or hidden, hidden), curve, bias)

    def row_count(self, tokens: tuple[int, ...], taken: np.ndarray) -> int:
        """Number of rows for an item with these tokens."""
        return tokens.count(ROW_PLACEHOLDER)

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or cpu_threads()

    def bytes_needed(self) -> int:
        """Memory of the weights and of one encoding."""
        with self.source.saying(), self.source.weights() as weights:
            return weights.nbytes + 4 * self.workspace_floats()

    @property
    def placeholder_text(self) -> str:
        return self.placeholder

    def token_count(self, *size: int) -> int:
        return len(self.tokens(*size))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.load(self.source.model, self.config)

    def token_id(self, text: str) -> int:
        """Id of a special token. Raises ConfigError."""
        number = self.tokenizer.added.get(text)
        if number is None:
            raise ConfigError(f"{self.source.model}: the vocabulary lacks {text}, a special token for {self.modality.plural}",
                              self.source.without_word)
        return number
