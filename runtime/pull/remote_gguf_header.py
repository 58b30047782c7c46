"""Predicts config and tensor types of a remote GGUF file from its first quarter of a megabyte.

Writers put the architecture's keys before the vocabulary, and tensor types and shapes after it, megabytes further on. So the config is
read from the file, while types are inferred from its length: every matrix gets the type below the average, and as many as fit the next
larger one, in the order writers prefer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ...offload.gguf_header import BLOCKS, GgufHeader, GgufTensor, Value, read_gguf_keys
from ...offload.safetensors_header import CheckpointError
from ...quant.imports.gguf import NATIVE
from ...quant.spec import QuantSpec
from ..config import ModelConfig
from ..conversion.convert_plan import MATRICES
from ..encoders import GGUF_ARCHITECTURES
from ..families import TensorRule, base_role
from ..gguf.architectures import architecture
from ..gguf.config import ROPE_SCALING_PREFIX, config_json, parse_gguf_config, required_keys
from ..planning.expected_store import ExpectedStore
from .client import Client, DownloadFailed, RemoteFile
from .repository import Repository

HEAD_NBYTES = 256 << 10
TOKENS = "tokenizer.ggml.tokens"
TOKEN_NBYTES = 40  # of the header for a token: its text, score and type, and a merge
TYPES = ("IQ2_XXS", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "F32")
FAVOURED = ("head", "embed", "down", "v")  # matrices that writers give larger types first
# Values of general.file_type whose weights take about as much memory as in the file: raw, or run from their codes.
RUN_FROM_CODES = frozenset({0, 1, 2, 3, *range(7, 25), *range(26, 33), 36, 37, 39})
SLACK = 1.02
READS = "it does not generate text: once downloaded, effllm plan shows what it needs"
DRAFTS = "it drafts for another model: once downloaded, effllm plan THAT-MODEL --draft THIS-ONE shows what it needs"
TIED_SHARE = 0.1  # an embedding with a larger share of the weights is usually tied to the LM head


@dataclass(frozen=True)
class RemoteGguf:
    """What the head of a remote file says."""

    config: ModelConfig | None = None  # None if `unknown`
    store: ExpectedStore | None = None
    unknown: str = ""  # why the head is not enough
    nbytes_read: int = 0


def read_head(repository: Repository, files: Sequence[RemoteFile], client: Client) -> RemoteGguf:
    """Read the head of a file, or of the first of its parts. Raises CheckpointError for an unsupported architecture or feature."""
    first = files[0]
    try:
        head = client.read_range(repository.requested_name, repository.commit, first, 0, min(first.size, HEAD_NBYTES))
    except DownloadFailed as error:
        return RemoteGguf(unknown=f"the header of {first.name} cannot be read on its own ({error.message})")
    path = Path(first.name)
    try:
        keys, lengths = read_gguf_keys(path, head, first.size)
    except CheckpointError as error:
        return RemoteGguf(unknown=error.message, nbytes_read=len(head))
    name, vocab_size = keys.get("general.architecture"), lengths.get(TOKENS)
    if name in GGUF_ARCHITECTURES:
        return RemoteGguf(unknown=READS, nbytes_read=len(head))
    needed = () if name is None else required_keys(architecture(path, name))
    if name is None or vocab_size is None or any(f"{name}.{key}" not in keys for key in needed):
        return RemoteGguf(unknown=f"{first.name} does not state its shape before its vocabulary", nbytes_read=len(head))
    nbytes = sum(file.size for file in files) - TOKEN_NBYTES * vocab_size
    config = _config(path, keys, vocab_size, repository.parameters)
    from_codes = keys.get("general.file_type", 0) in RUN_FROM_CODES
    return RemoteGguf(config, _store(config, nbytes, from_codes), "", len(head))


def _config(path: Path, keys: dict[str, Value], vocab_size: int, parameters: int | None) -> ModelConfig:
    """The file's config. Whether the embedding is also the LM head follows from the number of parameters."""
    name = keys["general.architecture"]
    if keys.get(f"{name}.{ROPE_SCALING_PREFIX}type") == "longrope":  # its factors are tensors, which are not in the head
        keys = {key: value for key, value in keys.items() if not key.startswith(f"{name}.{ROPE_SCALING_PREFIX}")}
    embedding = GgufTensor("token_embd.weight", "F16", (vocab_size, 1), 0, 0, path)
    tensors = {tensor.name: tensor for tensor in (embedding, replace(embedding, name="output.weight"))}
    header = GgufHeader(path, keys, tensors)
    untied = replace(parse_gguf_config(header, config_json(header, {})), dtype="float16")
    table = vocab_size * untied.hidden_size
    weights = sum(prod(info.shape) for info in ExpectedStore(untied).tensors.values()) - table
    tied = table > TIED_SHARE * weights if parameters is None else abs(parameters - weights) < abs(parameters - weights - table)
    return replace(untied, tie_word_embeddings=tied)


def _store(config: ModelConfig, nbytes: int, from_codes: bool) -> ExpectedStore:
    """The tensors of a file of `nbytes`; unless they run `from_codes`, or if the file is smaller than
    all types allow, matrices are widened to f16."""
    matrices: list[tuple[str, TensorRule]] = []

    def collect(role: str, rule: TensorRule) -> None:
        if base_role(role) in MATRICES and len(rule.shape) == 2:
            matrices.append((role, rule))

    ExpectedStore(config, formats=collect)
    types = assign_types([(base_role(role), rule.shape) for role, rule in matrices], nbytes) if from_codes else None
    widened = QuantSpec.raw("f16")
    specs = {rule.name: widened if types is None else NATIVE.get(types[i]) for i, (_, rule) in enumerate(matrices)}
    return ExpectedStore(config, formats=lambda role, rule: specs.get(rule.name))


def assign_types(matrices: Sequence[tuple[str, tuple[int, ...]]], nbytes: int) -> list[str] | None:
    """The type of each matrix, given as (kind, shape), so that all of them take about `nbytes`; None if even the smallest
    types take more."""

    def size(shape: tuple[int, ...], kind: str) -> int:
        return prod(shape) * BLOCKS[type_for_shape(shape, kind)][1] // BLOCKS[type_for_shape(shape, kind)][0]

    totals = {kind: sum(size(shape, kind) for _, shape in matrices) for kind in TYPES}
    if totals[TYPES[0]] > SLACK * nbytes:
        return None
    level = max((i for i, kind in enumerate(TYPES) if totals[kind] <= nbytes), default=0)
    types, left = [type_for_shape(shape, TYPES[level]) for _, shape in matrices], nbytes - totals[TYPES[level]]
    if level + 1 < len(TYPES):
        priority = {kind: number for number, kind in enumerate(FAVOURED)}
        for i in sorted(range(len(matrices)), key=lambda i: priority.get(matrices[i][0], len(priority))):
            shape = matrices[i][1]
            more = size(shape, TYPES[level + 1]) - size(shape, TYPES[level])
            if more <= left:
                types[i], left = type_for_shape(shape, TYPES[level + 1]), left - more
    return types


def type_for_shape(shape: tuple[int, ...], kind: str) -> str:
    """`kind`, or the type that writers take instead if its block size does not divide the rows."""
    return kind if shape[-1] % BLOCKS[kind][0] == 0 else "Q8_0" if shape[-1] % BLOCKS["Q8_0"][0] == 0 else "F16"
