"""Kimi-VL (16B-A3B): the tower of Kimi K2.5 under other names, with a limit on patches only."""

from __future__ import annotations

from ..config_reader import Keys
from .kimi_k25 import USUAL, KimiK25
from .preprocessor import BICUBIC, CLIP_MEAN, CLIP_STD

MOST = 4096  # default patch limit
LONGEST = 510  # patches on a side: no more than 511 have a place in the tower, filled up to whole squares
OF_READY = {"in_token_limit": "max_patches", "merge_kernel_size": "merge_size"}


class KimiVl(KimiK25):
    KINDS = {"moonvit": USUAL}
    PROCESSORS = ("KimiVLImageProcessor",)
    LOOK = CLIP_MEAN, CLIP_STD, BICUBIC
    PROJECTOR = "multi_modal_projector.pre_norm", "multi_modal_projector.linear_", ("1", "2")
    placeholder_text = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"

    def renamed(self, keys: Keys) -> Keys:
        if not keys.flag("pad_input", False):
            raise keys.fail("pad_input", "true: of images that are cut off in place of that the tower's output is not known")
        found = {OF_READY.get(key, key): value for key, value in keys.raw.items()}
        merged = found.get("merge_size")
        if isinstance(merged, list) and len(merged) == 2 and merged[0] == merged[1]:
            found["merge_size"] = merged[0]
        return Keys({"max_patches": MOST, **found, "size": {"max_height": LONGEST, "max_width": LONGEST}}, keys.where)


encoder = KimiVl
