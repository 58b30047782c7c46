"""Opens a model's weights: a folder of safetensors with tokenizer and settings, or one GGUF file that has all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .. import EffllmError, UsageError
from ..offload.checkpoint import CheckpointError, TensorStore
from ..offload.safetensors_header import is_gguf, shown
from .config_reader import read_model
from .families import PREFIX_STRIPPED
from .hub import stated_licence
from .stores.canonical_names import canonicalize_names, canonicalize_text_names, split_groups
from .stores.composite import text_model_config
from .stores.container import FILE, Container, read_container, requantize_hint
from .stores.float64_store import Float64Store, has_float64
from .weights.tied_head import drop_tied_copy, drop_tied_copy_parts, outer_rules

if TYPE_CHECKING:
    from ..quant.spec import QuantSpec
    from .config import ModelConfig
    from .families import TensorRule

# Models whose fused expert tensors [E, K, N] store inputs before outputs (`transposed_experts.py`) -> whether all of their tensors do.
TRANSPOSED_EXPERTS = {"llama4": True, "llama4_text": True, "qwen3_vl_moe": False}
# Models that store the rows of all experts of a layer in one matrix (`dbrx_experts.py`).
ROW_FUSED_EXPERTS = ("dbrx",)
# Files in which tools describe their quantization outside config.json -> the quant_method to name in an error's hint.
SEPARATE_QUANT_CONFIGS = {"quantize_config.json": "gptq or awq", "quant_config.json": "gptq or awq", "hf_quant_config.json": "modelopt"}


def open_store(path: Path, dequant_dtype: str = "f16", low_bit: bool = False, keeps_packed: Callable[[str], bool] | None = None,
               drop_tied: bool = True) -> TensorStore:
    """The weights of a model as raw values.

    `dequant_dtype`: f16 or f32, to which quantized weights are dequantized.
    `low_bit`: weights in formats that the kernels support stay packed; the store's `container` lists them.
    `keeps_packed`: for a folder, decides that by tensor name instead of `low_bit`.
    `drop_tied`: leave out an output head that is a copy of the embedding. False while a folder is still being downloaded, and where every
    tensor of a file counts.

    Raises CheckpointError, ModelNotFound.
    """
    if is_gguf(path):
        from .gguf.store import open_gguf_store

        return open_gguf_store(path, dequant_dtype, low_bit)
    is_ours = os.path.exists(path / FILE)
    with requantize_hint() if is_ours else nullcontext():
        store = TensorStore.open(path)
    try:
        if not is_ours:
            store = _canonical_store(store, dequant_dtype, low_bit, keeps_packed, drop_tied)
        if drop_tied:
            drop_tied_copy(store)
        return store
    except BaseException:
        store.close()
        raise


def _canonical_store(store: TensorStore, dequant_dtype: str, low_bit: bool, keeps_packed: Callable[[str], bool] | None,
                     drop_tied: bool) -> TensorStore:
    """The store under the names and layouts that families expect; the config was checked when it was read."""
    full_config = read_model(store.folder)
    raw = text_model_config(full_config)
    if full_config.get("model_type") in PREFIX_STRIPPED:
        canonicalize_text_names(store)
    if full_config.get("model_type") in TRANSPOSED_EXPERTS:
        from .stores.transposed_experts import with_transposed_experts

        store = with_transposed_experts(store, raw, TRANSPOSED_EXPERTS[full_config["model_type"]])
    if raw.get("model_type") in ROW_FUSED_EXPERTS:
        from .stores.dbrx_experts import with_dbrx_experts

        store = with_dbrx_experts(store, raw)
    from .stores.fp8_ngram_tables import pop_tables, with_tables
    from .stores.integer_tables import with_integer_tables
    from .stores.tensor_views import VIEW_FAMILIES, with_views

    canonicalize_names(store, raw.get("model_type"))
    tables = pop_tables(store, dequant_dtype)
    decoded = _decoded_store(store, raw, dequant_dtype, low_bit, keeps_packed, drop_tied)
    store = with_tables(with_integer_tables(decoded), tables)
    if raw.get("model_type") not in VIEW_FAMILIES:
        return store
    from .config import read_config

    return with_views(store, read_config(store.folder))


def _decoded_store(store: TensorStore, raw: Mapping[str, object], dequant_dtype: str, low_bit: bool,
                   keeps_packed: Callable[[str], bool] | None, drop_tied: bool) -> TensorStore:
    """The store that decodes the quantization, or the expert layout, of another tool's checkpoint; the same store if it has neither."""
    from .stores.import_config import MLX, quantization_section

    is_packed = keeps_packed or (lambda name: low_bit)
    if (section := quantization_section(raw)) is not None and section["quant_method"] == MLX:
        return _mlx_store(store, raw, dequant_dtype, is_packed, drop_tied)
    if raw.get("model_type") == "deepseek_v4":
        split_groups(store, raw.get("o_groups", 8))
    if raw.get("model_type") == "gpt_oss":
        from .stores.gpt_oss_experts import GptOssExpertStore

        return GptOssExpertStore(store, is_packed)
    if section is not None:
        from .stores.import_decoder import needs_input_widths
        from .stores.imported import ImportedStore
        from .stores.imported_ternary import TernaryStore

        if section.get("quant_method") == "bitnet":
            return TernaryStore(store, section, dequant_dtype, _quantized_linears(store.folder, section), is_packed)
        return ImportedStore(store, section, dequant_dtype, low_bit, _sliced_tensors(store.folder) if low_bit else (), keeps_packed,
                             _input_widths(store.folder) if needs_input_widths(section) else None)
    _refuse_undeclared_quantization(store)
    return Float64Store(store) if has_float64(store) else store


def _mlx_store(store: TensorStore, raw: Mapping[str, object], dequant_dtype: str, is_packed: Callable[[str], bool],
               drop_tied: bool) -> TensorStore:
    """The store of a folder that MLX quantized, under the names of its family."""
    from . import families
    from .config import read_config
    from .stores.import_config import MLX_EXACT_ROLES, MLX_PACKED_ROLES
    from .stores.imported_mlx import MlxStore
    from .stores.mlx_latent import latent_rules, with_heads_joined
    from .stores.mlx_names import canonicalize_mlx_names
    from .stores.tensor_views import gathered_rows

    config = read_config(store.folder)
    family = families.get(config.family)
    canonicalize_mlx_names(store, config.family)
    if drop_tied:
        drop_tied_copy_parts(store, config)
    rules_by_role = {**{f"outer.{role}": rule for role, rule in outer_rules(config, store.tensors).items()},
                     **{f"{layer}.{role}": rule for layer in range(config.num_hidden_layers)
                        for role, rule in family.layer_tensors(config, layer).items()}}
    packable = {rule.name for role, rule in rules_by_role.items() if families.base_role(role) in MLX_PACKED_ROLES and not rule.plain}
    exact = {rule.name for role, rule in rules_by_role.items() if families.base_role(role) in MLX_EXACT_ROLES}
    rules = [*rules_by_role.values(), *latent_rules(config)]
    mlx_store = MlxStore(store, str(raw.get("model_type")), dequant_dtype, rules, packable, exact, is_packed, gathered_rows(config))
    return with_heads_joined(mlx_store, config)


def _refuse_undeclared_quantization(store: TensorStore) -> None:
    """Raises CheckpointError for packed or low-bit weights that config.json does not describe, as older tools left them."""
    names = store.tensors.keys()
    packed = next((name for name, info in store.tensors.items() if name.endswith((".qweight", ".weight_packed"))
                   or info.dtype in ("F8_E4M3", "U8") and not names.isdisjoint((f"{name}_scale", f"{name}_scale_inv"))), None)
    if packed is None:
        return
    hint = "use the original 16-bit checkpoint, or an upload that does"
    described_in = next((name for name in SEPARATE_QUANT_CONFIGS if (store.folder / name).exists()), None)
    if described_in is not None:
        hint = (f"copy {described_in} into config.json as quantization_config, with its quant_method "
                f"({SEPARATE_QUANT_CONFIGS[described_in]}); or use the original checkpoint")
    raise CheckpointError(f"{store.folder} holds {shown(packed)}, quantized weights that its config.json does not mention", hint)


def _layer_rules(config: ModelConfig) -> Iterator[tuple[str, TensorRule]]:
    """(role, rule) of every tensor of every layer."""
    from . import families

    family = families.get(config.family)
    for layer in range(config.num_hidden_layers):
        yield from family.layer_tensors(config, layer).items()


def _quantized_linears(path: Path, section: Mapping[str, object]) -> frozenset[str]:
    """Names of the matrices that a `quantization_config` covers, without its exceptions."""
    from . import families
    from .config import read_config
    from .stores.import_config import LINEAR_ROLES, excluded_modules, matches_module

    excluded = excluded_modules(section)
    return frozenset(rule.name for role, rule in _layer_rules(read_config(path))
                     if families.base_role(role) in LINEAR_ROLES and not any(matches_module(module, rule.name) for module in excluded))


def _sliced_tensors(path: Path) -> frozenset[str]:
    """Names of tensors of which a model reads row ranges under other names, or raw values."""
    from .config import read_config
    from .stores.tensor_views import concatenated_parts, gathered_rows

    config = read_config(path)
    sliced = {rule.part_of[0] if rule.part_of else rule.name for _, rule in _layer_rules(config) if rule.part_of or rule.plain}
    sliced.update(source for source, _ in gathered_rows(config).values())
    sliced.update(source for parts in concatenated_parts(config).values() for source, _ in parts)
    return frozenset(sliced)


def _input_widths(path: Path) -> dict[str, int]:
    """Name -> input width of the matrices that a model reads, whole or in parts."""
    from . import families
    from .config import read_config
    from .stores.tensor_views import concatenated_parts, gathered_rows, stacked_vectors

    config = read_config(path)
    rules = [*families.get(config.family).outer_tensors(config).values(), *(rule for _, rule in _layer_rules(config))]
    widths = {name: rule.shape[1] for rule in rules if len(rule.shape) == 2
              for name in (rule.name, *rule.also, *(rule.part_of[:1] if rule.part_of else ()))}
    sources = {name: (source,) for name, (source, _) in gathered_rows(config).items()} | stacked_vectors(config)
    sources |= {name: tuple(source for source, _ in parts) for name, parts in concatenated_parts(config).items()}
    return widths | {source: widths[name] for name, names in sources.items() if name in widths for source in names}


def quantization_of(path: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a folder, if any; it was checked when the config was read."""
    from .stores.import_config import quantization_section

    return quantization_section(text_model_config(read_model(path)))


def open_weights(path: Path, low_bit: bool = True) -> tuple[TensorStore, Container | None]:
    """(weights of a model for a run, container that lists the low-bit ones or None). Without `low_bit`, weights that other tools quantized
    are dequantized.

    Raises CheckpointError, ModelNotFound.
    """
    store = open_store(path, low_bit=low_bit)
    container = None if is_gguf(path) else read_container(path)
    return store, container or getattr(store, "container", None)


def is_low_bit(path: Path, low_bit: bool = True) -> bool:
    """Whether `open_weights` will find low-bit weights, whatever else may be wrong with the model."""
    if not is_gguf(path):
        return os.path.exists(path / FILE) or (low_bit and _runs_from_codes(path))
    return low_bit and bool(native_gguf_formats(path))


def native_gguf_formats(path: Path) -> set[QuantSpec]:
    """The formats of a GGUF file that kernels multiply as stored, whatever else may be wrong with it."""
    from ..quant.imports.gguf import NATIVE
    from .gguf.store import read_header

    try:
        return {NATIVE[tensor.type] for tensor in read_header(path).tensors.values() if tensor.type in NATIVE}
    except EffllmError:
        return set()


def is_already_quantized(path: Path) -> bool:
    """Whether a model's weights were quantized before, so that quantizing them loses twice."""
    if is_gguf(path):
        from ..quant.imports.gguf import DECODERS
        from .gguf.store import read_header

        return any(tensor.type in DECODERS for tensor in read_header(path).tensors.values())
    container = read_container(path)
    return quantization_of(path) is not None if container is None else container.is_low_bit


def _runs_from_codes(path: Path) -> bool:
    """Whether kernels multiply the codes of another tool's quantized folder as stored."""
    from .stores.import_config import is_quantized

    try:
        section = quantization_of(path)
    except EffllmError:
        return False
    return section is not None and is_quantized(section)


def _is_converted_on_read(path: Path) -> bool:
    """Whether a folder has tensors that are renamed, decoded or rearranged in memory, so that the files cannot be mapped."""
    from .config import read_config
    from .stores.tensor_views import STACKED_FAMILIES, VIEW_FAMILIES, stacked_vectors

    if quantization_of(path) is not None:
        return True
    model_type = read_model(path).get("model_type")
    if model_type in STACKED_FAMILIES:  # only some of their models have such vectors
        has_views = bool(stacked_vectors(read_config(path)))
    else:
        has_views = model_type in ("gpt_oss", *VIEW_FAMILIES, *TRANSPOSED_EXPERTS, *ROW_FUSED_EXPERTS)
    if has_views:
        return True
    with TensorStore.open(path) as store:
        return has_float64(store)


def settings_of(path: Path) -> dict[str, object] | None:
    """The sampling settings that a GGUF file recommends, under the names of generation_config.json; None for a folder."""
    if not is_gguf(path):
        return None
    from .gguf.folder_files import generation_config

    return generation_config(path)


def licence_of(path: Path) -> str | None:
    """The licence that a GGUF file, or the card of a folder, states."""
    if not is_gguf(path):
        return stated_licence(path)
    from .gguf import folder_files
    from .gguf.store import read_header

    return folder_files.stated_licence(read_header(path))


def folder_files(path: Path) -> dict[str, str]:
    """Name -> text of the files that a folder made of this model needs beside its weights, if the model is no folder to copy from."""
    if not is_gguf(path):
        return {}
    from .gguf.folder_files import folder_texts

    return folder_texts(path)


def check_mapping(path: Path | None) -> None:
    """Raises UsageError for weights that cannot be memory-mapped."""
    if path is not None and (is_gguf(path) or not os.path.exists(path / FILE) and _is_converted_on_read(path)):
        raise UsageError(f"--load mmap: the weights of {path.name} are repacked as they are read", "leave out --load")
