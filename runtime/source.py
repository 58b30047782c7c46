"""Opens a model's weights: a folder of safetensors with tokenizer and settings, or one GGUF file that has all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from .stores.container import FILE, Container, made_here, read_container
from .stores.float64_store import Float64Store, has_float64
from .weights.tied_head import drop_tied_copy, drop_tied_copy_parts, outer_rules

if TYPE_CHECKING:
    from ..quant.spec import QuantSpec

# Models whose folders hold matrices of experts with inputs before outputs (`transposed_experts.py`), and whether all of them do.
BY_ROWS = ("dbrx",)  # and those of all experts of a layer in one matrix, row by row (`dbrx_experts.py`)
TURNED = {"llama4": True, "llama4_text": True, "qwen3_vl_moe": False}


# Files in which tools say how they quantized, where config.json does not -> the quant_method that is meant.
BESIDE = {"quantize_config.json": "gptq or awq", "quant_config.json": "gptq or awq", "hf_quant_config.json": "modelopt"}


def open_store(path: Path, wide: str = "f16", low_bit: bool = False, kept: Callable[[str], bool] | None = None,
               whole: bool = True) -> TensorStore:
    """The weights of a model as raw values; GGUF blocks are widened to `wide`, f16 or f32. With `low_bit` blocks that kernels support stay
    packed, and the store has a `container` that lists them; for a folder, `kept` decides by tensor name. Not `whole`: weights are still to
    come, or every tensor of a file counts, so none is ignored for its content.

    Raises CheckpointError, ModelNotFound.
    """
    if is_gguf(path):
        from .gguf.store import open_gguf_store

        return open_gguf_store(path, wide, low_bit)
    made = os.path.exists(path / FILE)
    with made_here() if made else nullcontext():
        store = TensorStore.open(path)
    try:
        if not made:
            store = _rearranged(store, wide, low_bit, kept, whole)
        if whole:
            drop_tied_copy(store)
        return store
    except BaseException:
        store.close()
        raise


def _rearranged(store: TensorStore, wide: str, low_bit: bool, kept: Callable[[str], bool] | None, whole: bool) -> TensorStore:
    """The store under the names and layouts that families expect; the config was checked when it was read."""
    outer = read_model(store.folder)
    raw = text_model_config(outer)
    if outer.get("model_type") in PREFIX_STRIPPED:
        canonicalize_text_names(store)
    if outer.get("model_type") in TURNED:
        from .stores.transposed_experts import with_transposed_experts

        store = with_transposed_experts(store, raw, TURNED[outer["model_type"]])
    if raw.get("model_type") in BY_ROWS:
        from .stores.dbrx_experts import with_dbrx_experts

        store = with_dbrx_experts(store, raw)
    from .stores.fp8_ngram_tables import with_tables, without_tables
    from .stores.integer_tables import with_integer_tables
    from .stores.tensor_views import IN_ONE, JOINED, ROUTERS_TURNED, STACKED, with_views

    canonicalize_names(store, raw.get("model_type"))
    tables = without_tables(store, wide)
    store = with_tables(with_integer_tables(_in_own_form(store, raw, wide, low_bit, kept, whole)), tables)

    if raw.get("model_type") not in (*IN_ONE, *JOINED, *ROUTERS_TURNED, *STACKED):
        return store
    from .config import read_config

    return with_views(store, read_config(store.folder))


def _in_own_form(store: TensorStore, raw: Mapping[str, object], wide: str, low_bit: bool, kept: Callable[[str], bool] | None,
                 whole: bool) -> TensorStore:
    """`_rearranged` except for fused matrices and names."""
    from .stores.import_config import MLX, section_of

    if (section := section_of(raw)) is not None and section["quant_method"] == MLX:
        return _of_mlx(store, raw, wide, kept or (lambda name: low_bit), whole)
    if raw.get("model_type") == "deepseek_v4":
        split_groups(store, raw.get("o_groups", 8))
    if raw.get("model_type") == "gpt_oss":
        from .stores.gpt_oss_experts import GptOssExpertStore

        return GptOssExpertStore(store, kept or (lambda name: low_bit))
    if section is not None:
        from .stores.import_decoder import asks_for_depths
        from .stores.imported import ImportedStore
        from .stores.imported_ternary import TernaryStore

        if section.get("quant_method") == "bitnet":
            return TernaryStore(store, section, wide, _linears(store.folder, section), kept or (lambda name: low_bit))
        return ImportedStore(store, section, wide, low_bit, _parted(store.folder) if low_bit else (), kept,
                             _depths(store.folder) if asks_for_depths(section) else None)
    _refuse_undescribed(store)
    return Float64Store(store) if has_float64(store) else store


def _of_mlx(store: TensorStore, raw: Mapping[str, object], wide: str, kept: Callable[[str], bool], whole: bool) -> TensorStore:
    """The store of a folder that MLX quantized, under the names of its family."""
    from . import families
    from .config import read_config
    from .stores.import_config import EXACT_OF_MLX, FROM_MLX
    from .stores.imported_mlx import MlxStore
    from .stores.mlx_latent import latent_rules, with_heads_joined
    from .stores.mlx_names import canonicalize_mlx_names
    from .stores.tensor_views import places

    config = read_config(store.folder)
    family = families.get(config.family)
    canonicalize_mlx_names(store, config.family)
    if whole:
        drop_tied_copy_parts(store, config)
    rules = {**{f"outer.{role}": rule for role, rule in outer_rules(config, store.tensors).items()},
             **{f"{layer}.{role}": rule for layer in range(config.num_hidden_layers)
                for role, rule in family.layer_tensors(config, layer).items()}}
    codes = {rule.name for role, rule in rules.items() if families.base_role(role) in FROM_MLX and not rule.plain}
    exact = {rule.name for role, rule in rules.items() if families.base_role(role) in EXACT_OF_MLX}
    every = [*rules.values(), *latent_rules(config)]
    made = MlxStore(store, str(raw.get("model_type")), wide, every, codes, exact, kept, places(config))
    return with_heads_joined(made, config)


def _refuse_undescribed(store: TensorStore) -> None:
    """Raises CheckpointError for packed or low-bit weights that config.json does not describe, as older tools left them."""
    words = next((name for name, info in store.tensors.items() if name.endswith((".qweight", ".weight_packed"))
                  or info.dtype in ("F8_E4M3", "U8") and not store.tensors.keys().isdisjoint((f"{name}_scale", f"{name}_scale_inv"))), None)
    if words is None:
        return
    beside = next((name for name in BESIDE if (store.folder / name).exists()), None)
    raise CheckpointError(f"{store.folder} holds {shown(words)}, quantized weights that its config.json does not mention",
                          f"copy {beside} into config.json as quantization_config, with its quant_method ({BESIDE[beside]}); or "
                          "use the original checkpoint" if beside else "use the original 16-bit checkpoint, or an upload that does")


def _linears(path: Path, section: Mapping[str, object]) -> frozenset[str]:
    """Names of the matrices that a `quantization_config` covers, without its exceptions."""
    from . import families
    from .config import read_config
    from .stores.import_config import LINEARS, is_named, left_out

    config, named = read_config(path), left_out(section)
    rules = (families.get(config.family).layer_tensors(config, layer) for layer in range(config.num_hidden_layers))
    return frozenset(rule.name for each in rules for role, rule in each.items()
                     if families.base_role(role) in LINEARS and not any(is_named(module, rule.name) for module in named))


def _parted(path: Path) -> frozenset[str]:
    """Names of tensors of which a model reads row ranges under other names, or raw values."""
    from . import families
    from .config import read_config

    config = read_config(path)
    family = families.get(config.family)
    rules = (rule for i in range(config.num_hidden_layers) for rule in family.layer_tensors(config, i).values())
    found = frozenset(rule.part_of[0] if rule.part_of else rule.name for rule in rules if rule.part_of or rule.plain)
    from .stores.tensor_views import joins, places

    return found | {whole for whole, _ in places(config).values()} | {name for named in joins(config).values() for name, _ in named}


def _depths(path: Path) -> dict[str, int]:
    """Name -> input width of the matrices that a model reads, whole or in parts."""
    from . import families
    from .config import read_config
    from .stores.tensor_views import joins, places, stacks

    config = read_config(path)
    family = families.get(config.family)
    rules = [*family.outer_tensors(config).values(),
             *(rule for layer in range(config.num_hidden_layers) for rule in family.layer_tensors(config, layer).values())]
    found = {name: rule.shape[1] for rule in rules if len(rule.shape) == 2
             for name in (rule.name, *rule.also, *(rule.part_of[:1] if rule.part_of else ()))}
    lying = {own: (whole,) for own, (whole, _) in places(config).items()} | stacks(config)
    lying |= {own: tuple(name for name, _ in parts) for own, parts in joins(config).items()}
    return found | {name: found[own] for own, names in lying.items() if own in found for name in names}


def quantization_of(path: Path) -> Mapping[str, object] | None:
    """The `quantization_config` of a folder, if any; it was checked when the config was read."""
    from .stores.import_config import section_of

    return section_of(text_model_config(read_model(path)))


def open_weights(path: Path, low_bit: bool = True) -> tuple[TensorStore, Container | None]:
    """The weights of a model for a run, and the container that says which are low-bit. Without `low_bit`, weights that other tools
    quantized are widened.

    Raises CheckpointError, ModelNotFound.
    """
    store, container = open_store(path, low_bit=low_bit), None if is_gguf(path) else read_container(path)
    return store, container or getattr(store, "container", None)


def is_low_bit(path: Path, low_bit: bool = True) -> bool:
    """Whether `open_weights` will find low-bit weights, whatever else may be wrong with the model."""
    if not is_gguf(path):
        return os.path.exists(path / FILE) or (low_bit and _imports_codes(path))
    return low_bit and bool(kept_specs(path))


def kept_specs(path: Path) -> set[QuantSpec]:
    """The formats of a GGUF file that kernels multiply as stored, whatever else may be wrong with it."""
    from ..quant.imports.gguf import NATIVE
    from .gguf.store import read_header

    try:
        return {NATIVE[tensor.type] for tensor in read_header(path).tensors.values() if tensor.type in NATIVE}
    except EffllmError:
        return set()


def is_rounded(path: Path) -> bool:
    """Whether a model's weights were quantized before, so that quantizing them loses twice."""
    if is_gguf(path):
        from ..quant.imports.gguf import DECODERS
        from .gguf.store import read_header

        return any(tensor.type in DECODERS for tensor in read_header(path).tensors.values())
    made = read_container(path)
    return quantization_of(path) is not None if made is None else made.is_low_bit


def _imports_codes(path: Path) -> bool:
    from .stores.import_config import is_quantized

    try:
        section = quantization_of(path)
    except EffllmError:
        return False
    return section is not None and is_quantized(section)


def _is_rearranged(path: Path) -> bool:
    from .config import read_config
    from .stores.tensor_views import IN_ONE, JOINED, ROUTERS_TURNED, STACKED, stacks

    kind = read_model(path).get("model_type")
    made = ("gpt_oss", *IN_ONE, *JOINED, *ROUTERS_TURNED, *TURNED, *BY_ROWS)
    if quantization_of(path) is not None or kind in made or kind in STACKED and stacks(read_config(path)):
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
    if path is not None and (is_gguf(path) or not os.path.exists(path / FILE) and _is_rearranged(path)):
        raise UsageError(f"--load mmap: the weights of {path.name} are repacked as they are read", "leave out --load")
