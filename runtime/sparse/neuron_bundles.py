"""A model whose `up` and `down` lie neuron by neuron (`quantize --bundle-ffn`): its tensors, its places in the file, its windows.

A layer's bundles are one tensor, named after `down`; the gate, or the first matrix of an MLP without one, stays a matrix of its own: it
tells which neurons are active. Only activations that are exactly zero for most inputs leave neurons out without changing a result.
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
SPARSE = ("relu", "relu2")  # activations of which most values are exactly zero, in models that were trained with them


def is_bundled(container: Container | None) -> bool:
    """Does a folder hold bundles?"""
    return container is not None and any(name.endswith(SUFFIX) for name in container.tensors)


def bundled_rules(rules: Mapping[str, TensorRule], container: Container | None) -> dict[str, TensorRule]:
    """A layer's tensors as a bundled folder holds them: `bundles` in the place of down, and of up where there is a gate."""
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
    """What a layer's thresholds are called."""
    return f"{down.removesuffix('.weight')}.thresholds"


def is_lossy(container: Container | None) -> bool:
    """Do thresholds leave out what is not zero?"""
    return container is not None and any(name.endswith(".thresholds") for name in container.tensors)


def layout_of(tensor: ModelTensor, config: ModelConfig, has_gate: bool) -> BundleLayout:
    return BundleLayout(tensor.spec.scheme, config.hidden_size, has_gate)


def bundle_places(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> tuple[BundlePlace, ...]:
    """Where each layer's bundles lie, in the order of layers; none for a model without, or where one lies off the blocks of its file."""
    found = []
    for key in sorted(key for key in tensors if key != "outer"):
        tensor = tensors[key].get(ROLE)
        place = None if tensor is None else store.place(tensor.info)
        if place is None:
            return ()
        found.append(BundlePlace(tensor.info.file, place, tensor.nbytes // tensor.shape[0], tensor.shape[0]))
    return tuple(found) if all(place.offset % 4096 == 0 for place in found) else ()


def neurons_per_read(tensors: Mapping[int | str, Mapping[str, ModelTensor]], config: ModelConfig) -> int:
    """Neurons that one read would bring of a model, bundled or not yet."""
    roles = tensors[0]
    tensor = roles.get(ROLE) or roles["down"]
    return layout_of(tensor, config, "gate" in roles).together if tensor.spec.is_raw else 1


@dataclass(frozen=True)
class NeuronWindows:
    """Which bundles come from the disk, and how many units of each layer stay."""

    places: tuple[BundlePlace, ...]
    slots: tuple[int, ...]
