"""Table-lookup (LUT) kernels for low-bit weights: which weights use them on this machine, and rearranging those in memory.

Lookup gives the same bits as dot products, so the choice (`kernels/autotune.py`) only affects speed. It is measured per kind of weight,
once per machine: a model with an unmeasured kind has it measured before its weights are read, with a notice. Waiting for `effllm doctor
--warm` instead would leave most users with the slower kernel; measuring takes about a second, after a first run has spent half a minute
compiling. Memory-mapped weights stay as they are, and so do the embedding and the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...kernels import autotune
from ...kernels.autotune import Case
from ...kernels.compile import cache_folder
from ...kernels.cpu import lut_layout
from ...kernels.layout import align
from ...offload.notes import Fallback, refuse_fallbacks
from ..events import Notice, Progress
from ..families import base_role
from ..model import Model
from ..prepare import Prepared, worker_count
from ..tensors import ModelTensor

# Roles that are only ever multiplied.
ROLES = ("q", "k", "v", "kv_a", "q_a", "q_b", "attn_gate", "o", "gate", "up", "down", "state_in", "state_gate", "state_r", "state_k",
         "state_v", "state_out")
UNMEASURED = "nothing could be measured"
LEAST_NBYTES = 32 << 20  # with less than this, responses are immediate either way


@dataclass(frozen=True)
class Decision:
    """A kind of weight: its tensors, the kernel they get and why."""

    case: Case
    tensors: tuple[ModelTensor, ...]
    kernel: str
    reason: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def measure(prepared: Prepared, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> Iterator[Progress]:
    """Measure what the choice for a model lacks, in a child process."""
    if prepared.options.kernel != "auto" or why_unchanged(prepared) or cache_folder() is None:
        return
    kinds, known = _kinds(prepared, tensors), autotune.load_timings()
    if sum(tensor.nbytes for found in kinds.values() for tensor in found) < LEAST_NBYTES:
        return
    unknown = [(case, align(max(tensor.shape[0] for tensor in found), lut_layout.PAIR))
               for case, found in kinds.items() if case not in known]
    if unknown:
        yield Progress("measuring kernels (once)", 0, len(unknown), "kinds of weights")
        for done, total in autotune.measure(unknown):
            yield Progress("measuring kernels (once)", done, total, "kinds of weights")


def why_unchanged(prepared: Prepared) -> str:
    """Why no weights are rearranged, if none are."""
    if prepared.streaming is not None:
        return "streamed weights keep their layout"
    return "memory-mapped files keep their layout" if prepared.options.load == "mmap" else ""


def decide(prepared: Prepared, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> list[Decision]:
    """The kernel of every kind of weight that lookup supports."""
    kinds, known, asked = _kinds(prepared, tensors), autotune.load_timings(), prepared.options.kernel
    small = sum(tensor.nbytes for found in kinds.values() for tensor in found) < LEAST_NBYTES
    decisions = []
    for case, found in kinds.items():
        if why_unchanged(prepared):
            kernel, reason = "dot", why_unchanged(prepared)
        elif asked != "auto":
            kernel, reason = asked, f"--kernel {asked}"
        elif small:
            kernel, reason = "dot", "the model is too small to matter"
        elif case in known:
            kernel, reason = known[case].kernel, known[case].reason
        else:
            kernel, reason = "dot", UNMEASURED
        decisions.append(Decision(case, tuple(found), kernel, reason))
    return decisions


def apply_layout(model: Model, prepared: Prepared) -> Iterator[Progress | Notice]:
    """Rearrange the chosen weights of a loaded model in place, before anything has read them."""
    chosen = [decision for decision in decide(prepared, model.tensors) if decision.kernel == "lut"]
    if prepared.options.kernel == "lut":
        for reason, count in Counter(reason for _, reason in _weights(prepared, model.tensors) if reason).items():
            said = Fallback(f"--kernel lut: {count} weights run by dot products: {reason}")
            if prepared.options.strict:
                refuse_fallbacks([said])
            yield Notice(said)
    done, total = 0, sum(decision.nbytes for decision in chosen)
    wanted = {tensor.name for decision in chosen for tensor in decision.tensors}
    for layer, device in enumerate(model.devices):
        if device != "cpu" or not wanted:
            continue
        with model.pager.lease(layer) as raw:
            for tensor in model.tensors[layer].values():
                if tensor.name in wanted - model.lut_tensors:
                    lut_layout.reorder_codes(model.backends["cpu"].pool, raw[tensor.name], tensor.spec, tensor.shape)
                    model.lut_tensors.add(tensor.name)
                    done += tensor.nbytes
        yield Progress("arranging for table lookup", done, total, "bytes")
    for decision in chosen:
        case = decision.case
        yield Notice(f"{len(decision.tensors)} weights of {case.bits} bits and {case.depth} inputs are in lookup order: {decision.reason}")


def _kinds(prepared: Prepared, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> dict[Case, list[ModelTensor]]:
    """The weights that lookup supports, grouped by what determines their speed."""
    threads = worker_count(prepared.options)
    kinds: dict[Case, list[ModelTensor]] = {}
    for tensor, reason in _weights(prepared, tensors):
        if not reason:
            kinds.setdefault(Case(tensor.spec.bits, tensor.spec.group, tensor.shape[1], threads), []).append(tensor)
    return kinds


def _weights(prepared: Prepared, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> Iterator[tuple[ModelTensor, str]]:
    """The low-bit weights of host layers, each with the reason why lookup is ruled out, if it is."""
    for layer, device in enumerate(prepared.placement.devices):
        for role, tensor in tensors[layer].items() if device == "cpu" else ():
            if base_role(role) in ROLES and not tensor.spec.is_raw and not tensor.turn:
                yield tensor, lut_layout.declines(tensor.spec.scheme, tensor.spec.bits, tensor.spec.group, tensor.shape[0])
