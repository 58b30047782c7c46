"""Exports a model in the compressed-tensors format, which transformers, vLLM and SGLang load.

The matrices of the layers, experts included, become integers of 4 or 8 bits in groups of 128 inputs; everything else is unchanged, and
config.json describes it. Tensors get the names a family publishes, with its fused layouts restored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ... import EffllmError, UsageError, __version__
from ...offload.checkpoint import TensorStore
from ...offload.folder_writer import FolderWriter, finish_cleanup, needs_cleanup, partial_nbytes
from ...offload.shards import SINGLE, PlannedFile
from ...quant.imports.compressed_tensors import WORD, pack_words, quantize_groups
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .. import families
from ..config import CAUSAL_LM, LM_HEAD_MODEL, ModelConfig, read_config
from ..convert import check_space, check_target, companion_files
from ..events import Notice, Progress
from ..families import MODEL_TYPE_ALIASES, base_role
from ..files.model_folder_files import already_complete
from ..images import input_modalities
from ..source import folder_files, is_already_quantized, open_store
from ..stores.composite import text_model_config
from ..stores.container import DTYPES, read_container
from ..stores.import_config import LINEAR_ROLES
from ..stores.tensor_views import STACKED_FAMILIES
from ..tensors import ModelTensor, check_tensors
from ..weights.tied_head import outer_rules

KINDS = {"INT4": 4, "INT8": 8}
GROUP = 128
TABLES = ("embed", "positions")  # rows are looked up: no linear, which readers would take for quantized
HEAD = "lm_head"  # a linear of readers also where it is the embedding
BLOCK_NBYTES = 16 << 20  # float32 rows at once
MARKER = "config.json"
# Families that readers do not call by the words of their name.
SPELLED = {"axk1": "AXK1", "axk2": "AXK2", "bitnet": "BitNet", "codegen": "CodeGen", "cohere2_moe": "Cohere2Moe", "cohere_compass_text":
           "CohereCompass", "diffllama": "DiffLlama", "ernie4_5": "Ernie4_5", "ernie4_5_moe": "Ernie4_5_Moe", "gemma3_text": "Gemma3",
           "gemma3n_text": "Gemma3n", "gemma4_text": "Gemma4", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode", "gpt_neo": "GPTNeo",
           "gpt_neox": "GPTNeoX", "gptj": "GPTJ", "granite_swa": "GraniteSWA", "granitemoe": "GraniteMoe", "granitemoe_swa":
           "GraniteMoeSWA", "granitemoehybrid": "GraniteMoeHybrid", "granitemoeshared": "GraniteMoeShared", "hunyuan_v1_dense":
           "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1", "hy_v3": "HYV3", "hy_v4": "HYV4", "hyperclovax": "HyperCLOVAX",
           "internlm3": "Llama", "iquestcoder": "Llama", "llama4_text": "Llama4", "mimo_v2_flash": "MiMoV2Flash", "minicpm3": "MiniCPM3",
           "minimax": "MiniMax", "minimax_m2": "MiniMaxM2", "minimax_m3_vl_text": "MiniMaxM3VL", "modernbert_decoder":
           "ModernBertDecoder", "nanochat": "NanoChat", "nemotron_nas": "DeciLM", "opt": "OPT", "qwen3_5_moe_text": "Qwen3_5Moe",
           "qwen3_5_text": "Qwen3_5", "qwen4_exp_text": "Qwen4Exp", "smollm3": "SmolLM3", "stablelm": "StableLm",
           "vaultgemma": "VaultGemma"}
DASHED = {family: kind for kind, family in MODEL_TYPE_ALIASES.items() if "-" in kind}  # whose files have another name
NOT_WRITTEN = {**dict.fromkeys(("gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"), "other tools expect fused experts"),
               **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm5_next_text", "glm_moe_dsa", "hy_v4",
                                "minimax_m3_vl_text", "mistral_large4_text", "qwen4_exp_text"),
                               "exporting their indexer is not supported"),
               **dict.fromkeys(("mllama_text_model", "whisper"),
                               "no other tool is known to load its text part alone"),
               "gemma3n_text": "no other tool is known to load its AltUp weights in this format",
               "gemma4_text": "no other tool is known to load its per-layer embeddings and experts in this format",
               "embedding_gemma2_text": "no other tool is known to load its per-layer embeddings in this format",
               **dict.fromkeys(("llama4_text", "longcat_flash"), "no other tool is known to load their experts in this format"),
               **dict.fromkeys(("deepseek_ocr2_text", "ernie4_5_vl_moe_text", "mistral4", "molmo2_text", "muse_glimmer_text", "step3p5",
                                "unlimited_ocr_text"),
                               "other tools load it only as part of a vision model"),
               **dict.fromkeys(("bailing_moe_v2", "exaone", "mimo", "minicpm", "nanbeige", "ouro"),
                               "other tools load them only with the checkpoint's own code"),
               "gpt2": "other tools expect transposed matrices",
               "falcon": "other tools expect queries, keys and values fused by group",
               "internlm2": "other tools expect queries, keys and values fused by group",
               **dict.fromkeys(("bloom", "gpt_neox", "persimmon"), "other tools expect queries, keys and values fused by head"),
               "codegen": "other tools expect queries, keys and values fused in four parts",
               "dbrx": "other tools expect fused experts",
               "modernbert_decoder": "no other tool is known to load their prediction head in this format",
               "mpt": "no other tool is known to load them in this format",
               "falcon_h1": "no other tool is known to apply its multipliers in this format",
               "nemotron_h": "no other tool is known to load their layers in this format",
               **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "no other tool is known to load their convolutions in this format"),
               **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
                               "no other tool is known to load their linear attention in this format")}
RECURRENT = "no other tool is known to load their recurrent layers in this format"
LEFT_OUT = ("auto_map",)  # names code that does not go along and that no reader needs


@dataclass(frozen=True)
class CompressedFolder:
    """The folder that was made."""

    folder: Path
    nbytes: int
    quantized: int
    kept: int

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "file_bytes": self.nbytes, "quantized_tensors": self.quantized, "kept_tensors": self.kept}


def export_compressed(source: Path, out: Path, kind: str) -> Iterator[Progress | Notice | CompressedFolder]:
    """Write the model in `source` as the folder `out`; the result comes last.

    Raises UsageError where `out` exists, `kind` is unknown, the source is quantized already, or a row is no multiple of GROUP.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown compressed-tensors type {kind!r}", f"known: {', '.join(KINDS)}")
    out = Path(os.path.abspath(out))
    if not (is_named := needs_cleanup(out, MARKER)):
        check_target(out, None)
    config, bits = read_config(source), KINDS[kind]
    why = NOT_WRITTEN.get(config.family) or (RECURRENT if config.recurrent is not None else "")
    if config.listwise_reranker:
        why = "no other tool is known to load its listwise ranking head"
    if config.extra_embeddings:
        why = why or "other tools expect as many rows in the head as in the embedding"
    if config.family in STACKED_FAMILIES and config.qk_norm_per_head:
        why = "other tools expect separate norms for each head"
    if why:
        raise UsageError(f"{config.family} models cannot be exported as compressed-tensors: {why}",
                         "effllm quantize makes a folder for effllm")
    if (made := read_container(source)) is not None or is_already_quantized(source):
        how = "by another tool" if made is None else made.spec_text
        raise UsageError(f"{source} is quantized already ({how})", "export the original checkpoint")
    texts = folder_files(source)
    raw = json.loads(texts[MARKER] if texts else (source / MARKER).read_text(encoding="utf-8"))
    if raw["model_type"] not in (config.family, DASHED.get(config.family)):
        yield Notice(f"{raw['model_type']} takes {input_modalities(raw)} too: only its text part is exported, {config.family}")
    with open_store(source, dequant_dtype="f32") as store:
        items = tuple(_items(config, store, bits))
        for item in items:
            if item.bits and item.shape[1] % GROUP:
                raise UsageError(f"{item.name} has rows of {item.shape[1]}, which are not a multiple of {GROUP}", "export as GGUF")
        file = _planned({name: entry for item in items for name, entry in _entries(item).items()})
        done, total = 0, sum(item.nbytes for item in items)
        quantized, fingerprint = sum(item.bits > 0 for item in items), _fingerprint(store, source, kind, file)
        made = CompressedFolder(out, file.size, quantized, len(items) - quantized)
        if is_named:
            if finish_cleanup(out, fingerprint, MARKER) is not None:
                yield Notice(already_complete(out))
                yield made
                return
            check_target(out, None)
        copies = {name: path for name, path in companion_files(source).items() if name != MARKER}
        check_space(out, file.size - partial_nbytes(out) + sum(path.stat().st_size for path in copies.values()))
        with FolderWriter(out, [file], fingerprint, MARKER) as writer:
            if writer.resumed:
                yield Notice("resuming where an earlier run stopped")
            if writer.discarded:
                yield Notice("an unfinished run of another type, another source or an older effllm is discarded: starting over")
            for item in items:
                if not all(part in writer.finished for part in _entries(item)):
                    _write(store, writer, item)
                done += item.nbytes
                yield Progress("exporting", done, total, "bytes", item.name)
            store.check_unchanged()
            described = {key: value for key, value in text_model_config(raw).items() if key not in LEFT_OUT}
            for key in ("layer_types", "mlp_layer_types"):  # some list those that guess ahead too, which readers take for a mistake
                if isinstance(listed := described.get(key), list):
                    described[key] = listed[: config.num_hidden_layers]
            if any(item.roles == ("head",) for item in items):
                described["tie_word_embeddings"] = False
            described["model_type"] = DASHED.get(config.family, described["model_type"])
            described["architectures"] = described.get("architectures") or [reader(config.family)]
            described["quantization_config"] = quantization_config(bits, _ignored(items))
            check_target(out, None)  # it may have been filled meanwhile
            writer.commit(copies, {**texts, MARKER: json.dumps(described, indent=1) + "\n"})
    yield made


def reader(family: str) -> str:
    """The class by which transformers and vLLM read a family, for sources that do not say it, such as GGUF files."""
    own = SPELLED.get(family) or "".join(map(str.capitalize, family.split("_")))
    return own + (LM_HEAD_MODEL if family == "gpt2" else CAUSAL_LM)


@dataclass(frozen=True)
class _Item:
    """A matrix or vector of the folder: one of the model, or several whose rows follow one another. `bits` 0 keeps it."""

    name: str
    roles: tuple[str, ...]
    tensors: tuple[ModelTensor, ...]
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _items(config: ModelConfig, store: TensorStore, bits: int) -> Iterator[_Item]:
    """The model's tensors by the names and in the joined forms in which its family is published, whatever they are in `store`."""
    family = families.get(config.family)
    for key, found in check_tensors(config, store).items():
        rules = outer_rules(config, store.tensors) if key == "outer" else family.layer_tensors(config, key)
        joined: dict[str, list[tuple[int, str]]] = {}
        for role in found:
            name, first, _ = rules[role].part_of or (rules[role].name, 0, 0)
            joined.setdefault(name, []).append((first, role))
        for name, parts in joined.items():
            roles = tuple(role for _, role in sorted(parts))
            linear = all(base_role(role) in LINEAR_ROLES for role in roles)
            yield _Item(name, roles, tuple(found[role] for role in roles), bits if linear else 0)


def _ignored(items: Iterable[_Item]) -> list[str]:
    """The linear modules that stay as they were."""
    kept = (item.name.removesuffix(".weight") for item in items
            if not item.bits and len(item.shape) == 2 and item.roles[0] not in TABLES and item.name.endswith(".weight"))
    return list(dict.fromkeys((HEAD, *kept)))


def quantization_config(bits: int, ignore: Sequence[str]) -> dict[str, object]:
    """The section of config.json. `ignore`: modules that are linear and were not quantized."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False,
               "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None, "global_compression_ratio": None}


def _fingerprint(store: TensorStore, source: Path, kind: str, file: PlannedFile) -> str:
    """A hash of all that decides the bytes of the weights."""
    stamps = [(path.name, (status := os.fstat(store.descriptor(path))).st_size, status.st_mtime_ns) for path in store.files]
    parts = [__version__, str(source), kind, stamps, hashlib.sha256(file.head).hexdigest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _entries(item: _Item) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> dtype, shape and bytes of what an item becomes."""
    if not item.bits:
        return {item.name: (DTYPES[item.tensors[0].spec.scheme], item.shape, item.nbytes)}
    n, k = item.shape
    base, words = item.name.removesuffix("weight"), -(-k * item.bits // WORD)
    return {f"{base}weight_packed": ("I32", (n, words), 4 * n * words),
            f"{base}weight_scale": ("BF16", (n, k // GROUP), 2 * n * k // GROUP), f"{base}weight_shape": ("I64", (2,), 16)}


def _planned(entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> PlannedFile:
    """One file without padding between tensors, which other readers would take for tensors; the largest items first keep all aligned."""
    order = sorted(entries, key=lambda name: -{"I64": 8, "I32": 4, "F32": 4}.get(entries[name][0], 2))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, {}
    for name in order:
        dtype, shape, nbytes = entries[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        starts[name], at = at, at + nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return PlannedFile(SINGLE, head, {name: len(head) + start for name, start in starts.items()}, len(head) + at)


def _write(store: TensorStore, writer: FolderWriter, item: _Item) -> None:
    """An item, some rows at a time."""
    base, at = item.name.removesuffix("weight"), 0
    for tensor, raw, values in _blocks(store, item):
        if not np.isfinite(values).all():
            raise EffllmError(f"{tensor.name}: NaN or infinity", "the checkpoint is damaged: download it again, or contact its publisher")
        if item.bits:
            codes, scales = quantize_groups(values, item.bits, GROUP)
            words, stored = pack_words(codes, item.bits), from_f32(scales, "bf16")
            writer.write(f"{base}weight_packed", at * 4 * words.shape[1], memoryview(words))
            writer.write(f"{base}weight_scale", at * 2 * stored.shape[1], memoryview(np.ascontiguousarray(stored)))
        else:
            writer.write(item.name, at * (item.nbytes // item.shape[0]), memoryview(raw))
        at += len(values)
    if item.bits:
        writer.write(f"{base}weight_shape", 0, np.array(item.shape, "<i8").tobytes())
    for part in _entries(item):
        writer.finish(part, {})


def _blocks(store: TensorStore, item: _Item) -> Iterator[tuple[ModelTensor, np.ndarray, np.ndarray]]:
    """Rows in their order: the tensor that they are of, their bytes and their values, float32 [rows, K]."""
    for tensor in item.tensors:
        rows, scheme = tensor.shape[0], tensor.spec.scheme
        step = max(1, BLOCK_NBYTES // 4 // max(1, prod(tensor.shape[1:])))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            raw = store.read(tensor.info, begin, end)
            yield tensor, raw, to_f32(raw.view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)
