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
from .whisper_encoder import LARGE, encoder_rows, load_encoder

LAYER = LayerNames(("input_layernorm", "post_attention_layernorm"), qkv_names("self_attn.{}_proj"), "self_attn.o_proj",
                   ("mlp.fc1", "mlp.fc2"))
BESIDE = 4  # rows


class GlmAsr(WhisperTower):
    KINDS = {"glmasr_encoder": {**LARGE, "max_position_embeddings": 1500, "hidden_act": "gelu"}}
    placeholder, written = "<|pad|>", "<|begin_of_audio|><|pad|><|end_of_audio|>"
    transcription_prompt = "Please transcribe this audio into text"
    max_seconds = 655.0  # as many as its context of 8,192 tokens was made for

    def configure(self, keys: Keys) -> None:
        said = self.tower_config
        self.tower_config = said.with_values(max_source_positions=said.raw["max_position_embeddings"],
                                        activation_function=said.raw["hidden_act"])
        super().configure(keys)
        width, heads = self.sizes.width, self.sizes.heads
        if self.sizes.inner != BESIDE * width:
            raise said.fail("intermediate_size", f"{BESIDE * width}, that is {BESIDE} times hidden_size")
        if self.sizes.places % BESIDE:
            raise said.fail("max_position_embeddings", f"a multiple of {BESIDE}")
        if said.integer("num_key_value_heads", heads) != heads:
            raise said.fail("num_key_value_heads", f"{heads}, the number of attention heads")
        rope = Keys(said.section("rope_parameters") or {}, f"{said.where}: rope_parameters")
        self.theta = rope.number("rope_theta", 10_000.0)
        self.pairs = int(width // heads * (rope.number("partial_rotary_factor", None) or said.number("partial_rotary_factor", 0.5))) // 2

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        whole, rest = divmod(samples, self.log_mel.samples)
        return (ROW_PLACEHOLDER,) * (whole * (self.sizes.places // BESIDE) + encoder_rows(self.num_frames(rest)) // BESIDE)

    def load(self, weights: Weights) -> Rows:
        sizes, inner = self.sizes, self.sizes.inner
        angles = np.arange(sizes.places, dtype=np.float32)[:, None] * inverse_frequencies(self.theta, self.pairs)
        encoder = load_encoder(weights, sizes, "audio_tower.", "norm", np.zeros((sizes.places, sizes.width), np.float32), LAYER,
                               Rope.of(angles))
        project = self.to_text(weights, inner, 2 * self.config.hidden_size)

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            made = encoder.rows([(window, self.log_mel.frames) for window, _ in windows], pool)
            heard = [each[: encoder_rows(frames) // BESIDE * BESIDE] for each, (_, frames) in zip(made, windows, strict=True)]
            return project(encoder.after(np.concatenate(heard)).reshape(-1, inner), pool)

        return rows


encoder = GlmAsr
