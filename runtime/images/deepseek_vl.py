"""DeepSeek VL 1.3B: Janus Pro's preprocessing with a plain SigLIP."""

from __future__ import annotations

from .janus import Janus
from .tower_ops import gelu
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import SIGLIP, layer_count, load_transformer


class DeepseekVl(Janus):
    KINDS = {"siglip_vision_model": SIGLIP}
    PROCESSORS = ("DeepseekVLImageProcessor",)
    placeholder = placeholder_text = "<image_placeholder>"
    FIXED = ()

    def load(self, weights: Weights) -> Rows:
        tower, hidden = load_transformer(weights, self, "vision_model.", finished=True), self.config.hidden_size
        project = weights.two_layers("aligner.", (self.width, hidden, hidden), gelu, True, ("linear1", "linear2"))
        return lambda values, pool: project(tower.layers([values], [layer_count(self)], pool)[0], pool)


encoder = DeepseekVl
