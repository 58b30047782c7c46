"""GLM-ASR: zero-padded windows of 30 s through Whisper's encoder with rotary embeddings instead of absolute ones; four rows are
concatenated and projected by an MLP."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.tower import Rows
from ..images.tower_layers import LayerNames, qkv_names
from ..images.tower_ops import Rope, WorkerPool, inverse_frequencies
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .whisper_encoder import LARGE_DEFAULTS, encoder_rows, load_encoder

LAYER_NAMES = LayerNames(
    ("input_layernorm", "post_attention_layernorm"), qkv_names("self_attn.{}_proj"), "self_attn.o_proj", ("mlp.fc1", "mlp.fc2"))
STACKED_ROWS = 4  # encoder rows concatenated into one row of the prompt


class GlmAsr(WhisperTower):
    KINDS = {"glmasr_encoder": {**LARGE_DEFAULTS, "max_position_embeddings": 1500, "hidden_act": "gelu"}}
    placeholder, written = "<|pad|>", "<|begin_of_audio|><|pad|><|end_of_audio|>"
    transcription_prompt = "Please transcribe this audio into text"
    max_seconds = 655.0  # the most that fits its context of 8,192 tokens

    def configure(self, keys: Keys) -> None:
        stated = self.tower_config
        self.tower_config = stated.with_values(max_source_positions=stated.raw["max_position_embeddings"],
                                               activation_function=stated.raw["hidden_act"])
        super().configure(keys)
        width, heads = self.sizes.width, self.sizes.heads
        if self.sizes.ffn_width != STACKED_ROWS * width:
            raise stated.fail("intermediate_size", f"{STACKED_ROWS * width}, that is {STACKED_ROWS} times hidden_size")
        if self.sizes.max_positions % STACKED_ROWS:
            raise stated.fail("max_position_embeddings", f"a multiple of {STACKED_ROWS}")
        if stated.integer("num_key_value_heads", heads) != heads:
            raise stated.fail("num_key_value_heads", f"{heads}, the number of attention heads")
        rope = Keys(stated.section("rope_parameters") or {}, f"{stated.where}: rope_parameters")
        self.theta = rope.number("rope_theta", 10_000.0)
        self.pairs = int(width // heads * (rope.number("partial_rotary_factor", None) or stated.number("partial_rotary_factor", 0.5))) // 2

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        whole, remainder = divmod(samples, self.log_mel.samples)
        last_rows = encoder_rows(self.num_frames(remainder)) // STACKED_ROWS
        return (ROW_PLACEHOLDER,) * (whole * (self.sizes.max_positions // STACKED_ROWS) + last_rows)

    def load(self, weights: Weights) -> Rows:
        sizes, width = self.sizes, self.sizes.ffn_width  # of STACKED_ROWS rows
        angles = np.arange(sizes.max_positions, dtype=np.float32)[:, None] * inverse_frequencies(self.theta, self.pairs)
        no_positions = np.zeros((sizes.max_positions, sizes.width), np.float32)
        encoder = load_encoder(weights, sizes, "audio_tower.", "norm", no_positions, LAYER_NAMES, Rope.of(angles))
        project = self.to_text(weights, width, 2 * self.config.hidden_size)

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            encoded = encoder.rows([(window, self.log_mel.frames) for window, _ in windows], pool)
            lengths = [encoder_rows(frames) // STACKED_ROWS * STACKED_ROWS for _, frames in windows]  # without rows of padding
            audio_rows = [window_rows[:length] for window_rows, length in zip(encoded, lengths, strict=True)]
            return project(encoder.output_norm(np.concatenate(audio_rows)).reshape(-1, width), pool)

        return rows


encoder = GlmAsr
