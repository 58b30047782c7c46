"""Which GPU a run uses, how much of its memory, and what layers take there.

torch is imported only if a driver reports a GPU, or one was requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ... import DoesNotFit, UsageError
from ...kernels.device_memory import allocation, gpu_workspace
from ...kernels.workspace import Dims
from ...offload import hardware
from ...offload.demand import BlockBytes
from ...offload.notes import Fallback
from ...offload.plan_gpu import CopiedLayers, LinkRates, copied_from
from ...offload.size import format_size, parse_size
from ..families import expert_of
from ..ngrams import held
from ..weights.layer_upload import buffer_offsets as carried_places
from ..weights.layer_upload import matrices
from ..weights.shared_block_weights import blocks_of
from . import roofs

if TYPE_CHECKING:
    from ...kernels.cuda.device import Device
    from ...kernels.threads import ThreadPool
    from ...offload.placement import Placement
    from ..moe_config import MoEConfig
    from ..prepare import EngineOptions
    from ..tensors import ModelTensor

Tensors = Mapping[int | str, Mapping[str, "ModelTensor"]]
DRIVER = Path("/dev/nvidiactl")
USUAL = 20e9, 8e9  # products per second and thread, memory bytes per second: if the CPU was not measured
DOCTOR = "effllm doctor shows what it found"


def gpu(options: EngineOptions, notices: list[str]) -> Device | None:
    """The GPU of a run, None for CPU only; auto uses one only if it exists and torch is installed.

    Raises UsageError if one was requested and does not exist, or is ruled out by another option."""
    asked = f"-ngl {options.gpu_layers}" if options.gpu_layers else f"--vram {options.vram}" if options.vram else ""
    if options.device == "cpu":
        if asked:
            raise UsageError(f"{asked} requires a GPU, which --device cpu rules out", "drop one of the two")
        return None
    if options.gpu_layers == 0:
        if flag := "--device cuda" if options.device == "cuda" else asked:
            raise UsageError(f"-ngl 0 rules out the GPU that {flag} asks for", "drop one of the two")
        return None
    flag = "--device cuda" if options.device == "cuda" else asked
    torch, driver = find_spec("torch") is not None, DRIVER.exists()
    if not torch and (flag or driver):
        if flag:
            raise UsageError(f"{flag} needs torch, which is not installed", "pip install 'effllm[cuda]'")
        notices.append(Fallback("a GPU is here but torch is not installed: running on the CPU (pip install 'effllm[cuda]')"))
    if not torch or not (flag or driver):
        return None
    try:
        gpu, why = detect_gpu(), "torch finds no GPU here"
    except DoesNotFit as error:
        gpu, why = None, error.message
    except RuntimeError as error:  # for a driver, GPU or torch that do not match
        gpu, why = None, str(error).splitlines()[0]
    if gpu is None and flag:
        raise UsageError(f"{flag}: {why}", f"--device cpu, and {DOCTOR}" if flag.startswith("--device") else
                         f"leave out {flag.split()[0]}: without it the CPU runs all layers; {DOCTOR}")
    if gpu is None:
        notices.append(Fallback(f"a GPU is here and cannot be used: running on the CPU ({why})"))
    return gpu


def detect_gpu() -> Device | None:
    """The GPU that torch can use. Raises DoesNotFit, RuntimeError if there is one that it cannot."""
    from ...kernels.cuda.device import find_gpu

    return find_gpu()


def vram(options: EngineOptions, gpu_device: Device, notices: list[str]) -> int:
    """Bytes of GPU memory to use: as requested, at most what is free."""
    free = gpu_device.free()
    asked = parse_size(options.vram) if options.vram else free
    if asked > free:
        notices.append(f"--vram {options.vram}: the GPU has {format_size(free)} free, using that")
    return min(asked, free)


def blocks(tensors: Tensors, dims: Dims, packed_kv: bool) -> tuple[BlockBytes, ...]:
    """Weights by layer, with their size on a GPU: vectors are float32 there, and a packed cache has its basis rotations."""
    bases = (2 * allocation(4 * own.heads * own.head_dim**2) + allocation(4 * own.heads * own.head_dim) for own in dims.per_layer_kind)
    basis = max(bases) if packed_kv else 0
    return tuple(BlockBytes(str(key), sum(tensor.nbytes for tensor in roles.values() if not tensor.turn),
                            basis + sum(map(gpu_nbytes, roles.values())))
                 for key, roles in {**tensors, "outer": held(tensors["outer"])}.items())


def gpu_nbytes(tensor: ModelTensor) -> int:
    """Bytes that a tensor takes on a GPU."""
    return allocation(tensor.nbytes if tensor.is_matrix else 4 * prod(tensor.shape))


def copied(tensors: Tensors, dims: Dims, own: MoEConfig | None, exact: bool, workers: int, link: float) -> CopiedLayers | None:
    """Host layers that long passes copy to the GPU, and from how many tokens on; None if that never pays.

    `link`: bytes per second to the GPU. The CPU's rates come from an earlier `plan` or `doctor`, or from typical figures, which alone never
    cause copies for a single token."""
    from .forecast import kind_of_weight

    layers = [roles for key, roles in tensors.items() if key != "outer"]
    heaviest = max(layers, key=lambda roles: carried_places(roles)[1])
    nbytes = carried_places(heaviest)[1]
    visited = 1.0 if own is None or not own.layers else own.visit_rate
    products = round(sum(prod(tensor.shape) * (1.0 if expert_of(role) is None else visited)
                         for role, tensor in heaviest.items() if tensor.is_matrix))
    kind = kind_of_weight(max(matrices(heaviest), key=lambda tensor: tensor.nbytes).spec, exact)
    machine = roofs.known(roofs.RoofsWanted(workers)).machine
    rate = None if machine is None else machine.kinds.get(kind)
    border = max(4 * own.head_dim * (2 * own.heads + 2 * own.kv_heads) for own in dims.per_layer_kind)
    rates = LinkRates(USUAL[0] * workers, USUAL[1], link) if rate is None else LinkRates(rate.prefill, rate.decode, link)
    tokens = copied_from(nbytes, products, border, rates)
    tokens = tokens if rate is not None or tokens is None else max(2, tokens)
    vectors = sum(gpu_nbytes(tensor) for roles in layers for tensor in roles.values() if not tensor.is_matrix)
    return None if tokens is None or tokens > dims.chunk else CopiedLayers(nbytes, tokens, vectors)


def workspace(tensors: Tensors, dims: Dims) -> int:
    """Workspace on a GPU, at most."""
    shared = blocks_of(tensors["outer"]).values()  # which are there as soon as one layer is
    matrices = [tensor for key, roles in tensors.items() for tensor in (shared if key == "outer" else roles.values()) if tensor.is_matrix]
    widest = max((prod(tensor.shape) for tensor in matrices if tensor.spec.is_raw), default=0)
    opened = max((prod(tensor.shape) for tensor in matrices if not tensor.spec.is_raw), default=0)
    return gpu_workspace(dims, widest, opened) + sum(map(gpu_nbytes, shared))


def not_free(placement: Placement, mapped: bool) -> list[str]:
    """The notice for a plan that needs more memory than is available now; `mapped` weights can be dropped."""
    free = hardware.memory_available() + hardware.rss() - hardware.rss_files()
    if placement.total_bytes - hardware.rss_files() <= free or mapped:
        return []
    return [f"{format_size(placement.total_bytes)} of memory are planned, {format_size(free)} are available now: the system may kill "
            "this process"]


def backends_of(devices: Sequence[str], widths: Dims, pool: ThreadPool, exact: bool, gpu_device: Device | None,
                by_neuron: bool = False) -> dict[str, object]:
    """The backends of `devices`, and the CPU's, which the embedding and the head may need. `by_neuron`: see `default_registry`."""
    from ...kernels.cpu.candidates import default_registry
    from ...kernels.cpu.ops import CpuOps

    backends: dict[str, object] = {"cpu": CpuOps(pool, widths, default_registry(exact=exact, by_neuron=by_neuron))}
    if "cuda" in devices:
        from ...kernels.cuda.torch_ops import TorchOps

        backends["cuda"] = TorchOps(gpu_device, one_scale=widths.one_scale)
    return backends
