"""Plan of a conversion from headers alone: every tensor's format, the output files and sizes. `quantize --dry-run` prints it.

Matrices of the roles below are quantized by the recipe; everything else (norms, biases, routers) keeps its stored type. Tensors are laid
out layer by layer in the order a forward pass reads them, q, k, v and gate, up adjacent. Experts come last in their layer, each a
contiguous record on a 4096-byte boundary, so that one read fetches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ... import UsageError
from ...kernels.tiles import padded
from ...offload.checkpoint import TensorInfo, TensorStore
from ...offload.shards import Planned, PlannedFile, plan_files
from ...quant.recipe import Recipe
from ...quant.spec import QuantSpec
from ..config import ModelConfig, read_config
from ..families import base_role, expert_of
from ..ngrams import ROLE as NGRAMS
from ..source import is_low_bit, open_store
from ..speculation.mtp_tensors import JOIN
from ..stores.container import DTYPES, FORMAT, VERSION, read_container
from ..tensors import ModelTensor, with_own_layer

# Roles of quantized matrices, in the order in which they are written.
MATRICES = ("lent_out", "state_in", "state_gate", "state_r", "state_k", "state_v", "state_out", "low_in", "low_out", "q", "k", "v",
            "kv_a", "q_a", "q_b", "attn_gate", "o_in", "o", "gate", "up", "down", "experts_in", "experts_out", "input_gate", "input_out",
            "mix_down", "mix_up", "ngram_key", "ngram_value", "embed", "layer_embed", "layer_proj", "enter", "leave", NGRAMS, "head",
            JOIN)
OTHER = "other"  # the class of norms and biases
WIDENED, HALF = QuantSpec.raw("f32"), QuantSpec.raw("f16")  # codes of other tools are read as the first, and written raw as the second
KEPT_BITS = 4  # published 4-bit codes are kept if the recipe's format has at least as many bits
ORIGINAL = "quantize the original 16-bit checkpoint"


@dataclass(frozen=True)
class Job:
    """The conversion of one tensor."""

    name: str
    key: int | str  # its layer, or "outer"
    role: str
    info: TensorInfo  # as it is read
    source: QuantSpec
    spec: QuantSpec  # after the conversion
    stored_nbytes: int  # in the source's files: less than in `info` for weights that are widened as they are read

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes(self.shape)

    @property
    def kept(self) -> bool:
        """Whether low-bit codes of the checkpoint are copied unchanged."""
        return not self.spec.is_raw and self.spec == self.source

    @property
    def quantized(self) -> bool:
        return not self.spec.is_raw and not self.kept

    @property
    def group(self) -> str:
        """The class in which its size is reported."""
        return kind if (kind := base_role(self.role)) in MATRICES else OTHER


@dataclass(frozen=True)
class SizeRow:
    """Sizes of the tensors of one class."""

    name: str
    tensors: int
    weights: int
    before: int  # bytes
    after: int  # bytes
    specs: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.after / self.weights if self.weights else 0.0

    def to_json(self) -> dict[str, object]:
        return {"class": self.name, "tensors": self.tensors, "weights": self.weights, "bytes_before": self.before,
                "bytes_after": self.after, "bits_per_weight": self.bits_per_weight, "specs": list(self.specs)}


@dataclass(frozen=True)
class ConversionPlan:
    """The conversion of a checkpoint."""

    folder: Path
    config: ModelConfig
    store: TensorStore
    recipe: Recipe
    jobs: tuple[Job, ...]  # in the order in which they are written
    files: tuple[PlannedFile, ...]
    unused: tuple[str, ...]  # tensors of the checkpoint that the model does not read

    @property
    def weights(self) -> int:
        return sum(prod(job.shape) for job in self.jobs)

    @property
    def before(self) -> int:
        """Bytes of the tensors in the source's files; `read_nbytes`: after widening."""
        return sum(job.stored_nbytes for job in self.jobs)

    @property
    def read_nbytes(self) -> int:
        return sum(job.info.nbytes for job in self.jobs)

    @property
    def after(self) -> int:
        """Bytes of the tensors; `file_nbytes` adds headers and the padding between them."""
        return sum(job.nbytes for job in self.jobs)

    @property
    def file_nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights, every tensor counted."""
        return 8 * self.after / self.weights

    def rows(self) -> tuple[SizeRow, ...]:
        """Sizes per class of tensor."""
        return tuple(row for name in (*MATRICES, OTHER) if (row := _size_row(name, [job for job in self.jobs if job.group == name])))

    def notices(self) -> Iterable[str]:
        """Notices about kept codes, requantization, padding (once per shape and format) and unused tensors."""
        reported = set()
        if kept := [job for job in self.jobs if job.kept]:
            yield (f"{len(kept)} tensors stay in {kept[0].spec}, as they were published: requantizing them would lose accuracy and save "
                   "nothing (--tensor-type for another format)")
        if any(job.quantized and job.stored_nbytes < job.info.nbytes for job in self.jobs) and is_low_bit(self.folder):
            yield "these weights were quantized before, and errors add up; quantizing the published weights gives smaller ones"
        for job in self.jobs:
            if not job.quantized or (job.shape, max(32, job.spec.group)) in reported:
                continue
            reported.add((job.shape, max(32, job.spec.group)))
            stored = padded(job.shape, job.spec.scheme, job.spec.group)
            if stored != job.shape:
                yield (f"{base_role(job.role)} of {job.shape[0]} x {job.shape[1]} is padded to {stored[0]} x {stored[1]}: rows come in "
                       f"blocks of 16, inputs in groups of {max(32, job.spec.group)}")
        if self.unused:
            more = f" and {len(self.unused) - 1} more" if len(self.unused) > 1 else ""
            yield f"left out, because the model does not read it: {self.unused[0]}{more}"

    def with_recipe(self, recipe: Recipe) -> ConversionPlan:
        """The same checkpoint in other formats."""
        jobs = tuple(replace(job, spec=_spec(job, recipe)) for job in self.jobs)
        return replace(self, recipe=recipe, jobs=jobs, files=_files(jobs))


def plan_conversion(folder: Path, recipe: Recipe, keep: bool = True, whole: bool = True) -> ConversionPlan:
    """Plan a conversion from headers. The store of the plan stays open.

    keep: keep published 4-bit codes instead of rounding them to as many or more bits, unless a rule names them. whole: False while weights
    are still missing: then an LM head stored beside the embedding of a tied model is kept, whatever it will hold.

    Raises UsageError for a quantized model and for a rule that matches no matrix, CheckpointError for a damaged one.
    """
    folder = Path(folder)
    if (container := read_container(folder)) is not None:
        raise UsageError(f"{folder} is quantized already ({container.spec_text})", ORIGINAL)
    config = read_config(folder)
    keeps_codes = keep and not recipe.base.is_raw and recipe.base.bits >= KEPT_BITS
    keeps_ternary = keep and config.per_token_scale and not recipe.base.is_raw  # exact, and smaller than any format
    store = open_store(folder, dequant_dtype="f32", drop_tied=whole,
                       keeps_packed=lambda name: (keeps_codes or keeps_ternary) and recipe.ruled(name) is None)
    try:
        jobs = tuple(_jobs(with_own_layer(config, store, getattr(store, "container", None)), recipe, store))
        _check_rules(recipe, jobs)
    except BaseException:
        store.close()
        raise
    read = {(job.info.file, job.info.offset) for job in jobs}  # the first part of a split tensor has its offset
    unused = tuple(name for name, info in store.tensors.items() if (info.file, info.offset) not in read)
    return ConversionPlan(folder, config, store, recipe, jobs, _files(jobs), unused)


def _check_rules(recipe: Recipe, jobs: Sequence[Job]) -> None:
    names = [job.name for job in jobs if base_role(job.role) in MATRICES and len(job.shape) == 2]
    for pattern, _ in recipe.rules:
        if not any(re.search(pattern, name) for name in names):
            if raw := next((job.name for job in jobs if re.search(pattern, job.name)), None):
                raise UsageError(f"{raw}, which {pattern!r} matches, stays as it is stored",
                                 f"quantized matrices have names like {names[-1]}")
            raise UsageError(f"no matrix of this model has a name that {pattern!r} matches", f"names are like {names[-1]}")


def _jobs(tensors: Mapping[int | str, Mapping[str, ModelTensor]], recipe: Recipe, store: TensorStore) -> Iterable[Job]:
    outer = dict(tensors["outer"])
    groups: list[tuple[int | str, dict[str, ModelTensor]]] = [("outer", {"embed": outer.pop("embed")})]
    groups += [(key, dict(roles)) for key, roles in tensors.items() if key != "outer"] + [("outer", outer)]
    for key, roles in groups:
        for role in sorted((role for role, tensor in roles.items() if not tensor.turn), key=_write_order):
            tensor = roles[role]
            info = replace(tensor.info, shape=tensor.shape)  # `tensor.info` has the shape of codes
            job = Job(tensor.name, key, role, info, tensor.spec, tensor.spec, store.stored_nbytes(tensor.info))
            yield replace(job, spec=_spec(job, recipe))


def _write_order(role: str) -> tuple[int, int, int, str]:
    kind, expert = base_role(role), expert_of(role)
    index = MATRICES.index(kind) if kind in MATRICES else len(MATRICES)
    return (0, 0, index, role) if expert is None else (1, expert, index, role)


def _spec(job: Job, recipe: Recipe) -> QuantSpec:
    """The format of a tensor after the conversion. A matrix that was widened from codes but stays raw takes 16 bits, as in a run."""
    if len(job.shape) != 2 or not job.source.is_raw:
        return job.source
    if base_role(job.role) in MATRICES:
        return recipe.spec_for(job.name, job.shape, job.role)
    return HALF if job.source == WIDENED and job.stored_nbytes < job.info.nbytes else job.source


def _files(jobs: Sequence[Job]) -> tuple[PlannedFile, ...]:
    groups: list[list[Planned]] = []
    key: object = None
    for job in jobs:
        if not groups or (job.key, expert_of(job.role)) != key:
            groups.append([])
        key = job.key, expert_of(job.role)
        dtype, shape = (DTYPES[job.spec.scheme], job.shape) if job.spec.is_raw else ("U8", (job.nbytes,))
        groups[-1].append(Planned(job.name, dtype, shape, job.nbytes))
    return plan_files(groups, {"format": FORMAT, "version": str(VERSION)})


def _size_row(name: str, jobs: Sequence[Job]) -> SizeRow | None:
    if not jobs:
        return None
    return SizeRow(name, len(jobs), sum(prod(job.shape) for job in jobs), sum(job.stored_nbytes for job in jobs),
                   sum(job.nbytes for job in jobs), tuple(dict.fromkeys(str(job.spec) for job in jobs)))
