"""Cohere Compass (North Micro Vision): Qwen 3 VL's tower with its own special tokens."""

from __future__ import annotations

from .qwen3_vl import DEEP, Qwen3Vl


class CohereCompass(Qwen3Vl):
    KINDS = {"cohere_compass_vision": DEEP, "cohere_compass": DEEP}
    PROCESSORS = ("CohereCompassImageProcessor", *Qwen3Vl.PROCESSORS)
    placeholder, placeholder_text = "<|IMAGE_PAD|>", "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"


encoder = CohereCompass
