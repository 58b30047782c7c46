"""Gemma 3n: an earlier version of Gemma 4's audio tower, of which every fourth row is kept.

A clip always takes 188 rows. The padding rows and the end token are embeddings of the tower's own vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ... import UsageError
from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import Norm, WorkerPool, matmul
from ..images.tower_weights import Weights
from .causal_conformer import GEMMA_3N_NAMES, CausalConformer, CausalSizes, load_causal_conformer
from .gemma4 import Gemma4
from .gemma_mel import GEMMA_3N

BEGIN_TOKEN, AUDIO_TOKEN, END_TOKEN = "<start_of_audio>", "<audio_soft_token>", "<end_of_audio>"
CONFIG_DEFAULTS = {
    "input_feat_size": 128, "hidden_size": 1536, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10, "conf_attention_chunk_size": 12,
    "conf_attention_context_left": 13, "conf_attention_context_right": 0, "conf_attention_logit_cap": 50.0, "conf_num_attention_heads": 8,
    "conf_num_hidden_layers": 12, "conf_conv_kernel_size": 5, "conf_reduction_factor": 4, "conf_residual_weight": 0.5,
    "sscp_conv_channel_size": [128, 32], "sscp_conv_group_norm_eps": 1e-3, "vocab_size": 128, "vocab_offset": 262_272}
# Key in the config -> the same key in Gemma 4's config.
GEMMA_4_KEYS = {
    "conf_attention_chunk_size": "attention_chunk_size", "conf_attention_context_left": "attention_context_left",
    "conf_attention_context_right": "attention_context_right", "conf_attention_logit_cap": "attention_logit_cap",
    "conf_num_attention_heads": "num_attention_heads", "conf_num_hidden_layers": "num_hidden_layers",
    "conf_conv_kernel_size": "conv_kernel_size", "conf_residual_weight": "residual_weight",
    "sscp_conv_channel_size": "subsampling_conv_channels"}


@dataclass(frozen=True)
class CumulativeGroupNorm:
    """Normalizes each frame by mean and variance of all frames so far."""

    weight: np.ndarray  # float32 [C]
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [T, F, C]."""
        counts = np.arange(1, len(x) + 1) * x[0].size
        means = np.cumsum(x.sum((1, 2), dtype=np.float64)) / counts
        y = x - means[:, None, None].astype(np.float32)
        variances = np.cumsum(np.einsum("tfc,tfc->t", y, y, dtype=np.float64)) / counts
        y *= (1 / np.sqrt(variances + self.eps))[:, None, None].astype(np.float32)
        return y * self.weight


class Gemma3n(Gemma4):
    KINDS = {"gemma3n_audio": CONFIG_DEFAULTS}
    EXTRACTORS, EXTRACTOR_DEFAULTS = ("Gemma3nAudioFeatureExtractor",), GEMMA_3N
    placeholder = AUDIO_TOKEN

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.num_rows = self.root_config.integer("audio_soft_tokens_per_image", 188, high=1 << 14)
        self.row_stride = self.tower_config.integer("conf_reduction_factor", high=64)
        # Token ids from vocab_offset on are rows of the tower's own embedding table; the last one is padding.
        self.vocab_offset, self.vocab_size = (self.tower_config.integer(name, low=0) for name in ("vocab_offset", "vocab_size"))
        self.padding_id = self.config.vocab_size - 1 - self.vocab_offset
        if not 0 <= self.padding_id < self.vocab_size:
            raise self.tower_config.fail("vocab_offset",
                                         f"an offset that leaves token {self.config.vocab_size - 1} inside the tower's vocabulary")

    def read_sizes(self, keys: Keys, bands: int) -> CausalSizes:
        if keys.integer("input_feat_size") != bands:
            raise keys.fail("input_feat_size", f"{bands}, as in the feature extractor's config")
        for name, expected in (("sscp_conv_kernel_size", [[3, 3]] * 2), ("sscp_conv_stride_size", [[2, 2]] * 2)):
            if keys.raw.get(name) not in (None, expected):
                raise keys.fail(name, f"{expected}")
        raw = {GEMMA_4_KEYS.get(name, name): value for name, value in keys.raw.items()}
        raw |= {"hidden_act": "silu", "use_clipped_linears": False, "output_proj_dims": keys.integer("hidden_size")}
        return CausalSizes.read(Keys(raw, keys.where), bands, edges=True)

    @cached_property
    def _surrounding_tokens(self) -> tuple[list[int], list[int]]:
        """Tokens before and after a clip's rows. The end token is a row if it belongs to the tower's vocabulary."""
        end = self.token_id(END_TOKEN)
        before, after = (self.tokenizer.encode(text, add_special_tokens=False) for text in (f"\n\n{BEGIN_TOKEN}", f"{END_TOKEN}\n\n"))
        self.token_id(BEGIN_TOKEN)
        return before, [ROW_PLACEHOLDER if token == end >= self.vocab_offset else token for token in after]

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        if not self.mel.frames(samples):
            raise UsageError(f"an audio clip of {samples / SAMPLE_RATE:.3f} s is too short for this model", "use a longer clip")
        before, after = self._surrounding_tokens
        return (*before, *(ROW_PLACEHOLDER,) * self.num_rows, *after)

    def load(self, weights: Weights) -> Rows:
        sizes, width, hidden_size = self.sizes, self.sizes.width, self.config.hidden_size
        tower = self.load_tower(weights)
        norm = Norm(np.ones(hidden_size, np.float32), None, sizes.eps, centered=False)
        hard, soft = (weights.rms_norm(f"embed_audio.{kind}_embedding_norm", width, sizes.eps) for kind in ("hard", "soft"))
        project = weights.matrix("embed_audio.embedding_projection", hidden_size, width, bias=False)
        table = weights.numbers("embed_audio.embedding.weight", self.vocab_size, width)
        end = self.token_id(END_TOKEN) - self.vocab_offset
        special_rows = table[[self.padding_id, *((end,) if end >= 0 else ())]]

        def rows(frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
            encoded = tower.rows(frames, pool)[: self.num_rows]
            projected = norm(matmul(soft(encoded), project, pool))
            padding, *after = norm(matmul(hard(special_rows), project, pool))
            return np.stack([*projected, *(padding,) * (self.num_rows - len(projected)), *after])

        return rows

    def load_tower(self, weights: Weights) -> CausalConformer:
        eps = self.tower_config.number("sscp_conv_group_norm_eps")
        return load_causal_conformer(weights, self.sizes, "audio_tower.", GEMMA_3N_NAMES,
                                     lambda weight: CumulativeGroupNorm(weight, eps), self.row_stride)


encoder = Gemma3n
