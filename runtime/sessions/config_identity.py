"""What of a model's config the pages of a saved session depend on, as a digest.

The digest is over field names and values, in the form that they had when sessions were first saved: a field that was renamed counts under
its first name, and one that was added later only where it is not at its default. So sessions saved by earlier versions still match, and a
new field needs nothing here; a renamed one needs an entry in `renamed`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass

from ..config import ModelConfig

NOT_IN_PAGES = {"warnings", "ropes", "bos_token_id", "eos_token_ids", "max_position_embeddings", "mtp_layers"}  # change no page's bytes


@dataclass(frozen=True)
class FirstForm:
    """How a dataclass was first written. `name`: its own, empty if that has not changed. `renamed`: field -> its first name. `original`:
    fields that count even at their default. `together`: fields that came at once, which count as soon as one of them is not at its
    default."""

    name: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    original: frozenset[str] = frozenset()
    together: tuple[tuple[str, ...], ...] = ()


FIRST_FORMS = {
    "ModelConfig": FirstForm(
        renamed={"state": "delta", "state_layers": "delta_layers"},
        original=frozenset({
            "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "qk_norm_whole", "norm_kind", "attn_scale", "attn_logit_softcapping",
            "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logits_scaling", "position_offset", "mixture",
            "experts_stored"}),
        together=(("state", "state_layers", "gated_queries"),)),
    "Mixture": FirstForm(together=(
        ("sigmoid", "factor", "corrected", "shared_width", "shared_scaled"), ("groups", "kept_groups"), ("roots", "picked"),
        ("seen_width", "seen_words"))),
    "KdaShape": FirstForm(together=(("narrow", "bound"),)),
    "IndexShape": FirstForm(original=frozenset({"grain", "each", "near"})),
    "LatentShape": FirstForm(original=frozenset({"query_rank"})),
    "LightningShape": FirstForm(original=frozenset({"taps"})),
    "Mamba1Shape": FirstForm(original=frozenset({"biased", "normed"})),
    "Mamba2Shape": FirstForm(original=frozenset({"biased"})),
    "Rwkv7Shape": FirstForm(original=frozenset({"eps", "taps"})),
}


def config_digest(config: ModelConfig) -> str:
    """32 hex digits that two models share if the same tokens, weights and settings give the same pages in both."""
    values = {name: first_repr(value) for each, name, value in _counted(config) if each.name not in NOT_IN_PAGES}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def first_repr(value: object) -> str:
    """`repr(value)` as it was when sessions were first saved."""
    if type(value) is tuple:
        return f"({', '.join(map(first_repr, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    title = FIRST_FORMS.get(type(value).__name__, FirstForm()).name or type(value).__name__
    return f"{title}({', '.join(f'{name}={first_repr(own)}' for _, name, own in _counted(value))})"


def _counted(record: object) -> list[tuple[Field, str, object]]:
    """The fields of a dataclass that count, each with its first name and its value."""
    form = FIRST_FORMS.get(type(record).__name__, FirstForm())
    used = {each.name for each in fields(record) if each.default is MISSING or getattr(record, each.name) != each.default}
    used |= {name for group in form.together if used.intersection(group) for name in group}
    return [(each, form.renamed.get(each.name, each.name), getattr(record, each.name)) for each in fields(record)
            if each.name in used or each.name in form.original]
