"""Which kinds of compiled kernels a run needs (`kernels/warm.py`), from a model's folder before it is opened, or from its open weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ... import EffllmError
from ...kernels import warm
from ...kernels.tiles import FORMATS
from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import is_gguf
from ...quant.kv import codec
from ..config import ModelConfig, read_config
from ..kv.kv_setting import AUTO
from ..source import is_low_bit, native_gguf_formats, quantization_of
from ..sparse.neuron_bundles import is_bundled
from ..speculation.draft_types import draft_in
from ..stores.container import Container, read_container
from ..stores.expected_formats import expected_specs
from ..stores.import_config import has_fp8_weights

if TYPE_CHECKING:
    from ...quant.spec import QuantSpec
    from ..prepare import EngineOptions


@dataclass(frozen=True)
class Needs:
    """The properties of a model that decide which kernels it needs."""

    low_bit: bool = False  # has low-bit weights
    bundled: bool = False  # stored as neuron bundles
    foreign: bool = False  # weights of another tool, repacked or widened on read
    mixers: bool = False  # layers other than plain attention
    floats: bool = False  # float8 weights
    experts: bool = False
    formats: frozenset[str] = frozenset()  # of low-bit weights, empty if unknown

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, field.name) | getattr(other, field.name) for field in fields(self)))


def kernel_kinds(needs: Needs, options: EngineOptions) -> tuple[str, ...]:
    """The kinds of kernels that a run needs; lookup kernels chosen by measurement are compiled by the measurement."""
    needed = {warm.RAW: True, warm.LOW_BIT: needs.low_bit, warm.EXACT: needs.low_bit and options.exact,
              warm.LOOKUP: needs.low_bit and options.kernel == "lut", warm.KV: options.kv == AUTO or codec(options.kv).is_packed,
              warm.BUNDLED: needs.bundled, warm.SPARSE: options.kv_read == "sparse", warm.FOREIGN: needs.foreign,
              warm.MIXERS: needs.mixers, warm.EXPERTS: needs.experts, warm.FLOATS: needs.floats, warm.ADAPTERS: bool(options.lora),
              warm.ROUNDING: needs.low_bit and options.draft is not None and draft_in(Path(options.draft)) is not None}
    known = needs.formats and not needed[warm.ROUNDING]
    formats = () if not needs.low_bit else sorted(needs.formats & set(FORMATS)) if known else FORMATS
    return (*(kind for kind, is_needed in needed.items() if is_needed), *formats)


def folder_kinds(folder: Path, options: EngineOptions) -> tuple[str, ...]:
    """`kernel_kinds` for a model folder, even if it is damaged."""
    needs = folder_needs(folder)
    return kernel_kinds(needs if options.draft is None else needs | folder_needs(Path(options.draft)), options)


def on_load_kinds(folder: Path, bits: str, options: EngineOptions) -> tuple[str, ...]:
    """`kernel_kinds` for a folder that is quantized to a format on load. Raises UsageError."""
    return kernel_kinds(folder_needs(folder) | format_needs(bits), options)


def kinds_of(config: ModelConfig, store: TensorStore, container: Container | None, options: EngineOptions) -> tuple[str, ...]:
    """The kinds of kernels that a run of these weights needs."""
    low_bit = container is not None and container.is_low_bit
    formats = frozenset() if container is None else _formats(stored.spec for stored in container.tensors.values())
    stored = Needs(low_bit, is_bundled(container), store.repacks_on_read, floats=has_floats(container), formats=formats)
    return kernel_kinds(stored | layer_needs(config), options)


def calibration_kinds(config: ModelConfig) -> tuple[str, ...]:
    """For a layer-by-layer pass over unquantized weights."""
    needs = layer_needs(config)
    return (warm.RAW, *([warm.MIXERS] if needs.mixers else []), *([warm.EXPERTS] if needs.experts else []))


def has_floats(container: Container | None) -> bool:
    """Whether any weights are float8."""
    return container is not None and any(stored.spec.scheme == "float" for stored in container.tensors.values())


def _formats(specs: Iterable[QuantSpec]) -> frozenset[str]:
    """By name in `tiles.FORMATS`, the formats that have kernels of their own."""
    return frozenset(f"{spec.scheme}-{spec.bits}" for spec in specs)


def layer_needs(config: ModelConfig) -> Needs:
    """The needs of a model's layers, whatever format their weights have."""
    return Needs(mixers=has_mixers(config), experts=config.moe is not None)


def format_needs(text: str | None) -> Needs:
    """The needs of weights in a format (None: bf16), generated at random (`measuring/synthetic.py`) or quantized on load.

    Outer matrices and narrow values may have more bits. Raises UsageError."""
    from ...quant.recipe import Recipe
    from ...quant.spec import QuantSpec

    spec = None if text is None else QuantSpec.parse(text)
    if spec is None or spec.is_raw:
        return Needs()
    return Needs(low_bit=True, floats=spec.scheme == "float", formats=_formats((spec, Recipe(spec).spec_for("", (1, 1), "embed"))))


def has_mixers(config: ModelConfig) -> bool:
    """Whether any layer has a state, latent attention, narrowed heads, sparse attention or several residual streams."""
    chooses = config.mla is not None or config.indexer is not None
    return config.recurrent is not None or chooses or config.residual_streams > 0 or config.v_head_dim > 0


def folder_needs(folder: Path) -> Needs:
    """The needs of a model folder or GGUF file; incomplete if its files are damaged."""
    low_bit, bundled, foreign, floats, layer_kernels = is_low_bit(folder), False, False, False, Needs()
    formats = frozenset(FORMATS)
    with suppress(EffllmError):  # reported when the folder is opened
        container = None if is_gguf(folder) else read_container(folder)
        low_bit, bundled = low_bit and (container is None or container.is_low_bit), is_bundled(container)
        if container is not None or is_gguf(folder):
            formats = _formats(native_gguf_formats(folder) if container is None else (stored.spec for stored in container.tensors.values()))
        foreign = container is None and (low_bit or (not is_gguf(folder) and quantization_of(folder) is not None))
        quantization = {} if is_gguf(folder) else quantization_of(folder) or {}
        floats = low_bit and foreign and has_fp8_weights(quantization)
        config = read_config(folder)
        layer_kernels = layer_needs(config)
        if foreign and low_bit and quantization and warm.is_cold(FORMATS) and (specs := expected_specs(config, quantization)) is not None:
            low_bit, formats = bool(specs), _formats(specs)
    return Needs(low_bit, bundled, foreign, floats=floats, formats=formats if low_bit else frozenset()) | layer_kernels
