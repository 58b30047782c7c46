"""Which kernels multiply a model's weights, for one token and for a prompt, and why: a section of `effllm plan`.

`effllm doctor` shows the kernel of each op for every stored type; this is limited to the model's types, on the planned devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...kernels.cpu.candidates import default_registry
from ...kernels.cpu.int8_ir import INSTRUCTION_SET
from ...kernels.cpu.stages import LOW_BIT
from ...kernels.registry import Call, Registry
from ..prepare import Prepared
from ..sparse.neuron_bundles import ROLE as BUNDLES
from ..sparse.neuron_bundles import SPARSE
from ..tensors import ModelTensor, check_tensors
from ..weights import lookup_layout
from .forecast import Tensors

PROMPT = 512  # enough tokens to select prompt kernels
EITHER = f"dot products or table lookup, {INSTRUCTION_SET}"


@dataclass(frozen=True)
class Kernel:
    """A kernel, by its name in `effllm doctor`, and the reason for it."""

    name: str
    because: str
    fallback: bool


# Bundles have no candidates: the format decides.
NEURONS = (Kernel("active neurons", "few tokens: inactive neurons are skipped", False),
           Kernel("neurons in groups", "many tokens: together they activate nearly all neurons", False))


@dataclass(frozen=True)
class ChosenKernels:
    """The kernels for all matrices of one stored type on one device."""

    stored: str
    device: str
    nbytes: int  # of these matrices
    token: Kernel
    prompt: Kernel

    def to_json(self) -> dict[str, object]:
        def kernel_json(kernel: Kernel) -> dict[str, object]:
            return {"kernel": kernel.name, "because": kernel.because, "fallback": kernel.fallback}

        return {"stored": self.stored, "device": self.device, "bytes": self.nbytes,
                "token": kernel_json(self.token), "prompt": kernel_json(self.prompt)}


def chosen_kernels(prepared: Prepared, tensors: Tensors | None = None) -> tuple[ChosenKernels, ...]:
    """For a plan, largest type first. A type that only partly uses lookup appears twice."""
    tensors = tensors or check_tensors(prepared.config, prepared.store, prepared.container)
    decisions = [] if prepared.options.exact else lookup_layout.decide(prepared, tensors)  # exact mode uses neither
    decided = {tensor.name: decision for decision in decisions for tensor in decision.tensors}
    registries = {device: _registry(device, prepared) for device in dict.fromkeys((*prepared.placement.devices, "cpu"))}
    nbytes_by_kernel: dict[tuple[str, str, Kernel, Kernel], int] = {}
    for device, role, tensor in _matrices(prepared, tensors):
        kernels = NEURONS if role == BUNDLES and device == "cpu" else (
            _kernel(registries[device], tensor, columns, decided.get(tensor.name)) for columns in (1, PROMPT))
        key = (str(replace(tensor.spec, outliers=0.0)), device, *kernels)
        nbytes_by_kernel[key] = nbytes_by_kernel.get(key, 0) + tensor.nbytes
    return tuple(ChosenKernels(stored, device, nbytes, token, prompt)
                 for (stored, device, token, prompt), nbytes in sorted(nbytes_by_kernel.items(), key=lambda item: -item[1]))


def _registry(device: str, prepared: Prepared) -> Registry:
    if device == "cpu":
        return default_registry(exact=prepared.options.exact, by_neuron=prepared.config.hidden_act in SPARSE)
    from ...kernels.cuda import torch_ops

    return torch_ops.default_registry()


def _matrices(prepared: Prepared, tensors: Tensors) -> Iterator[tuple[str, str, ModelTensor]]:
    """(device, role, matrix) of every product."""
    for layer, device in enumerate(prepared.placement.devices):
        yield from ((device, role, tensor) for role, tensor in tensors[layer].items() if len(tensor.shape) == 2)
    outer = tensors["outer"]
    yield "cuda" if prepared.placement.gpu.head_bytes else "cpu", "head", outer.get("head", outer["embed"])


def _kernel(registry: Registry, tensor: ModelTensor, columns: int, decision: lookup_layout.Decision | None) -> Kernel:
    spec, is_token = tensor.spec, columns == 1
    looked_up = is_token and decision is not None and decision.kernel == "lut"
    op = "matrix" if spec.is_raw or not any(each.op == LOW_BIT for each in registry.candidates) else LOW_BIT
    candidate = registry.select(Call(op, spec.scheme, columns, bits=spec.bits, looked_up=looked_up)).candidate
    if is_token and decision is not None and decision.reason == lookup_layout.UNMEASURED and not candidate.fallback:
        return Kernel(EITHER, "measured when a run begins", False)
    because = decision.reason if is_token and decision is not None and op == LOW_BIT else candidate.because
    return Kernel(candidate.name, because, candidate.fallback)
