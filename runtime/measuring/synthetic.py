"""Synthetic models: random weights of a named shape, for measuring speed without a download. They say nothing about quality and are never
written to disk.

A synthetic store looks like a TensorStore. Its bytes are one repeated block of small random numbers, or of random codes: speed does not
depend on the values as long as none is subnormal or NaN.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from ... import UsageError
from ...kernels.tiles import LEVELS_NBYTES, MAX_LEVEL, STEPS_NBYTES, row_nbytes
from ...offload.checkpoint import TensorInfo, TensorStore
from ...quant.recipe import Recipe
from ...quant.spec import QuantSpec
from ...quant.weight import RAW_NUMPY, from_f32
from .. import families
from ..config import ModelConfig, parse_config
from ..conversion.convert_plan import MATRICES
from ..stores.container import Container, StoredTensor

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "torch_dtype": "bfloat16"}
_MOE = {"hidden_act": "silu", "hidden_size": 2048, "norm_topk_prob": False, "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
            "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, object]] = {
    "tinyllama-1.1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    "llama3.2-1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
                    "tie_word_embeddings": True},
    "llama3-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False},
    "olmoe-1b-7b": {**_MOE, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "intermediate_size": 1024,
                    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
                    "max_position_embeddings": 4096, "num_experts": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    "qwen3-30b-a3b": {**_MOE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                      "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "num_experts": 128, "norm_topk_prob": True,
                      "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    "qwen1.5-moe-a2.7b": {**_MOE, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "intermediate_size": 5632,
                          "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "max_position_embeddings": 8192,
                          "num_experts": 60, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    "glm-4.5-air": {**_MOE, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096,
                    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
                    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 131072,
                    "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
                    "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
}
BLOCK_NBYTES = 1 << 20


class SyntheticStore:
    """The tensors that a config requires, generated: bf16, or quantized by a recipe (stated in `container`)."""

    repacks_on_read = False

    def __init__(self, config: ModelConfig, spec: QuantSpec | None = None) -> None:
        family = families.get(config.family)
        layers = (family.layer_tensors(config, i) for i in range(config.num_hidden_layers))
        rules_by_name = {rule.name: (role, rule) for rules in (family.outer_tensors(config), *layers) for role, rule in rules.items()}
        rules = [*rules_by_name.values()]  # layers may share tensors
        self.tensors: dict[str, TensorInfo] = {}
        stored: dict[str, StoredTensor] = {}
        recipe = None if spec is None else Recipe(spec)
        offset = 0
        for role, rule in rules:
            is_quantized = recipe is not None and families.base_role(role) in MATRICES
            tensor_spec = recipe.spec_for(rule.name, rule.shape, role) if is_quantized else QuantSpec.raw("bf16")
            stored[rule.name] = StoredTensor(rule.name, tensor_spec, tuple(rule.shape), 0)
            nbytes = tensor_spec.nbytes(rule.shape)
            dtype, shape = ("BF16", tuple(rule.shape)) if tensor_spec.is_raw else ("U8", (nbytes,))
            self.tensors[rule.name] = TensorInfo(rule.name, dtype, shape, Path("synthetic"), offset, nbytes)
            offset += nbytes
        bits = 8 * offset / sum(prod(rule.shape) for _, rule in rules)
        self.container = None if spec is None else Container(str(spec), bits, stored, {}, {}, {}, {})
        self._starts, self._stored = [info.offset for info in self.tensors.values()], list(stored.values())
        random = np.random.default_rng(0)
        self._values = from_f32(random.standard_normal(BLOCK_NBYTES // 2, np.float32) * 0.02, "bf16").view(np.uint8)
        self._codes = random.integers(0, 256, BLOCK_NBYTES, np.uint8)

    def read_at(self, file: Path, offset: int, out: memoryview) -> None:
        """Fill `out` as if read from `offset`."""
        done = 0
        while done < len(out):
            index = bisect_right(self._starts, offset + done) - 1
            tensor_offset, stored = offset + done - self._starts[index], self._stored[index]
            part = out[done : done + stored.nbytes - tensor_offset]
            if stored.spec.is_raw:
                _fill_repeated(self._values, tensor_offset, part)
            else:
                self._fill_blob(stored, tensor_offset, part)
            done += len(part)

    def _fill_blob(self, stored: StoredTensor, start: int, out: memoryview) -> None:
        """The bytes of a blob from offset `start` on: random codes, zero points in the middle of their range, scales and row scales of one
        size, tables of evenly spaced levels."""
        _fill_repeated(self._codes, start, out)
        spec, sections = stored.spec, stored.spec.sections(stored.shape)
        row_scales_and_tables, row_scale_nbytes = np.zeros(stored.nbytes - sections.row_scales, np.uint8), row_nbytes(spec.scheme)
        row_scale_dtype = "f32" if row_scale_nbytes == 4 else "bf16"
        row_scales = from_f32(np.full(sections.rows, 1e-5, np.float32), row_scale_dtype)
        row_scales_and_tables[: row_scale_nbytes * sections.rows].view(RAW_NUMPY[row_scale_dtype])[:] = row_scales
        if sections.tables >= 0:
            levels = np.linspace(-MAX_LEVEL, MAX_LEVEL - 1, 1 << spec.bits).astype(np.int8)
            tables = np.concatenate([np.resize(levels, LEVELS_NBYTES).view(np.uint8), np.arange(14, 14 + STEPS_NBYTES, dtype=np.uint8)])
            row_scales_and_tables[sections.tables - sections.row_scales :][: tables.size] = tables
        _copy_overlap(row_scales_and_tables, sections.row_scales, start, out)
        scales_nbytes = sections.row_scales - (sections.zeros if sections.zeros >= 0 else sections.scales)
        if spec.scheme == "float":
            _copy_overlap(np.ones(scales_nbytes // 4, np.float32).view(np.uint8), sections.scales, start, out)
            codes = out[: max(0, sections.scales - start)]
            np.bitwise_and(codes, 0xF7, out=np.frombuffer(codes, np.uint8))  # none is NaN
        elif spec.scheme != "codebook":  # scales of one size: random ones would span 2**16, exponents all of float32
            scale_code = {"mxfp": 128, "nvfp": 56, "minimum": 0x3C}.get(spec.scheme, 64)
            code = scale_code if sections.zeros < 0 else 1 << (spec.bits - 1)
            _copy_overlap(np.full(scales_nbytes, code, np.uint8), sections.row_scales - scales_nbytes, start, out)
            if sections.zeros >= 0:
                _copy_overlap(np.full(sections.zeros - sections.scales, 64, np.uint8), sections.scales, start, out)

    def read(self, info: TensorInfo) -> np.ndarray:
        out = np.empty(info.nbytes, np.uint8)
        self.read_at(info.file, info.offset, memoryview(out))
        return out

    notices: tuple[str, ...] = ()
    reads = TensorStore.reads

    def place(self, info: TensorInfo) -> int | None:
        """No file."""
        return None

    def repack_plan(self, infos: Sequence[TensorInfo]) -> None:
        """No pages to prefetch."""

    def check_unchanged(self) -> None:
        """Nothing on disk can change."""

    def close(self) -> None:
        """Nothing is open."""


def _fill_repeated(block: np.ndarray, start: int, out: memoryview) -> None:
    """Fill `out` with the repeated block, from offset `start` on."""
    block_offset = start % len(block)
    for position in range(0, len(out), len(block)):
        part = out[position : position + len(block)]
        head_nbytes = min(len(part), len(block) - block_offset)
        part[:head_nbytes] = memoryview(block[block_offset : block_offset + head_nbytes])
        part[head_nbytes:] = memoryview(block[: len(part) - head_nbytes])


def _copy_overlap(source: np.ndarray, source_offset: int, out_offset: int, out: memoryview) -> None:
    """Copy the overlap of `source`, which begins at `source_offset`, with `out`, which begins at `out_offset`."""
    begin, end = max(source_offset, out_offset), min(source_offset + len(source), out_offset + len(out))
    if begin < end:
        out[begin - out_offset : end - out_offset] = memoryview(source[begin - source_offset : end - source_offset])


def synthetic_config(shape: str) -> ModelConfig:
    """A named shape, or the path of a config.json. Raises UsageError naming the shapes that exist."""
    if shape in SHAPES:
        return parse_config(SHAPES[shape])
    path = Path(shape)
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise ValueError("it holds no JSON object")
            return parse_config(raw)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{shape} is not a config: {error}", "give a model's config.json") from None
    raise UsageError(f"no shape {shape!r}", f"known: {', '.join(SHAPES)}, or a config.json")
