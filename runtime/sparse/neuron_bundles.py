"""Bundled FFNs (`quantize --bundle-ffn`): `up` rows and `down` columns stored neuron by neuron; tensors, file positions, windows.

A layer's bundles are one tensor, named after `down`; the gate, or the first matrix of an MLP without one, stays a matrix of its own, since
it tells which neurons are active. Only activations that are exactly zero for most inputs can skip neurons without changing the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...offload.neuron_pager import BundlePlace
from ...quant.bundles import BundleLayout, bundle_name
from ..families import TensorRule

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..config import ModelConfig
    from ..stores.container import Container
    from ..tensors import ModelTensor

SUFFIX = ".bundles"
ROLE, THRESHOLDS = "bundles", "thresholds"
SPARSE = ("relu", "relu2")  # activations whose values are mostly exactly zero in models trained with them


def is_bundled(container: Container | None) -> bool:
    """Whether a folder holds bundles."""
    return container is not None and any(name.endswith(SUFFIX) for name in container.tensors)


def bundled_rules(rules: Mapping[str, TensorRule], container: Container | None) -> dict[str, TensorRule]:
    """A layer's tensors in a bundled folder: `bundles` in place of down and, with a gate, of up."""
    down = rules.get("down")
    stored = None if container is None or down is None else container.tensors.get(bundle_name(down.name))
    if stored is None:
        return dict(rules)
    width, ffn = down.shape
    layout = BundleLayout(stored.spec.scheme, width, "gate" in rules)
    left = {role: rule for role, rule in rules.items() if role != "down" and not (role == "up" and layout.has_up)}
    left |= {ROLE: TensorRule(bundle_name(down.name), layout.shape(ffn))}
    thresholds = threshold_name(down.name)
    return left | {THRESHOLDS: TensorRule(thresholds, (ffn,))} if thresholds in container.tensors else left


def threshold_name(down: str) -> str:
    """The name of a layer's thresholds."""
    return f"{down.removesuffix('.weight')}.thresholds"


def is_lossy(container: Container | None) -> bool:
    """Whether thresholds skip neurons that are not zero."""
    return container is not None and any(name.endswith(".thresholds") for name in container.tensors)


def layout_of(tensor: ModelTensor, config: ModelConfig, has_gate: bool) -> BundleLayout:
    return BundleLayout(tensor.spec.scheme, config.hidden_size, has_gate)


def bundle_places(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> tuple[BundlePlace, ...]:
    """Where each layer's bundles lie, in layer order; none for a model without bundles, or if any are not block-aligned."""
    found = []
    for key in sorted(key for key in tensors if key != "outer"):
        tensor = tensors[key].get(ROLE)
        place = None if tensor is None else store.place(tensor.info)
        if place is None:
            return ()
        found.append(BundlePlace(tensor.info.file, place, tensor.nbytes // tensor.shape[0], tensor.shape[0]))
    return tuple(found) if all(place.offset % 4096 == 0 for place in found) else ()


def neurons_per_read(tensors: Mapping[int | str, Mapping[str, ModelTensor]], config: ModelConfig) -> int:
    """How many neurons one read brings, for a model that is or would be bundled."""
    roles = tensors[0]
    tensor = roles.get(ROLE) or roles["down"]
    return layout_of(tensor, config, "gate" in roles).together if tensor.spec.is_raw else 1


@dataclass(frozen=True)
class NeuronWindows:
    """Which bundles are read from disk, and how many units of each layer stay."""

    places: tuple[BundlePlace, ...]
    slots: tuple[int, ...]
