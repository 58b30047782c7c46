"""A stand-in store for a model that is not downloaded: tensor shapes from its config, or from the `effllm.json` of a quantized one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

from ...offload.checkpoint import TensorInfo
from ...offload.repack import Repack, staging_buffer
from ...quant.recipe import Recipe
from ...quant.spec import QuantSpec
from .. import families
from ..config import ModelConfig
from ..conversion.convert_plan import MATRICES
from ..families import TensorRule
from ..speculation.mtp_tensors import mtp_rules
from ..stores.container import DTYPES, Container, StoredTensor
from ..stores.converting_store import REPACK_SCRATCH_NBYTES, REPACKED_SCHEMES, scratch_nbytes

RAW = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


Formats = Callable[[str, TensorRule], QuantSpec | None]  # (role, rule) -> its quantization, None for stored as is


class ExpectedStore:
    """The tensors that a config implies, raw or quantized by the recipe of `spec`: names, shapes and types, no bytes. `formats`: what
    another tool quantized, which is repacked or widened on read. `of_codes`: `spec` is made from such a checkpoint, whose raw matrices take
    16 bits. `container`: use its list of tensors, whatever the config implies."""

    def __init__(self, config: ModelConfig, spec: QuantSpec | None = None, formats: Formats | None = None, of_codes: bool = False,
                 container: Container | None = None) -> None:
        self._made: set[str] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._schemes: dict[str, str] = {}
        self.nbytes, self.notices = 0, ()
        self.tensors: dict[str, TensorInfo] = {}
        if container is not None:
            for each in container.tensors.values():
                self._put(each.name, each.spec, each.shape)
            self.container = container
            return
        family, raw = families.get(config.family), QuantSpec.raw(RAW.get(config.dtype, "bf16"))
        groups = [family.outer_tensors(config), *(family.layer_tensors(config, i) for i in range(config.num_hidden_layers))]
        if formats is None and not of_codes:
            groups.append(mtp_rules(config))
        recipe = None if spec is None else Recipe(spec)
        experts_stored = QuantSpec.parse(config.expert_format) if spec is None and config.expert_format else None
        stored: dict[str, StoredTensor] = {}
        for role, rule in ((role, rule) for rules in groups for role, rule in rules.items()):
            low = recipe is not None and len(rule.shape) == 2 and families.base_role(role) in MATRICES
            own = recipe.spec_for(rule.name, rule.shape, role) if low else QuantSpec.raw("f16") if of_codes and rule.plain else raw
            if experts_stored is not None and families.expert_of(role) is not None and len(rule.shape) == 2:
                own = experts_stored
                self._made.add(rule.name)
            if formats is not None and (made := formats(role, rule)) is not None:
                own = made
                self._made.add(rule.name)
            stored[rule.name] = StoredTensor(rule.name, own, self._put(rule.name, own, tuple(rule.shape)), 0)
        bits = 8 * self.nbytes / sum(prod(each.shape) for each in stored.values())
        said = spec or experts_stored or next((each.spec for each in stored.values() if not each.spec.is_raw), None)
        self.container = None if said is None else Container(str(said), bits, stored, {}, {}, {}, {})

    def _put(self, name: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Place it after all others; returns the shape of the whole tensor, of which this may be a part."""
        whole, nbytes = self._shapes.setdefault(name, shape), spec.nbytes(shape)
        if name in self.tensors:  # a layer that is reused
            return whole
        self._schemes[name] = spec.scheme
        dtype, form = (DTYPES[spec.scheme], whole) if spec.is_raw else ("U8", (nbytes,))
        self.tensors[name] = TensorInfo(name, dtype, form, Path("expected"), self.nbytes, nbytes)
        self.nbytes += nbytes
        return whole

    @property
    def repacks_on_read(self) -> bool:
        """See `TensorStore`, for the model once it is here."""
        return bool(self._made)

    def place(self, info: TensorInfo) -> int | None:
        """As if all tensors were in one file, except those converted on read."""
        return None if info.name in self._made else info.offset

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        """As if the file held each tensor as it is in memory; nothing is actually read."""
        if not self._made.issuperset(info.name for info in infos):
            return None
        sizes = tuple(info.nbytes for info in infos)
        scratch = max(REPACK_SCRATCH_NBYTES if self._schemes[info.name] in REPACKED_SCHEMES else scratch_nbytes(*self._shapes[info.name])
                      for info in infos)
        return Repack(sizes, sum(sizes), max(map(staging_buffer, sizes)), scratch, tuple)

    def close(self) -> None:
        """Nothing is open."""
