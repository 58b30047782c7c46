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
DEFAULT_CPU_RATES = 20e9, 8e9  # of a CPU that was not measured: products per second and thread, memory bytes per second
DOCTOR = "effllm doctor shows what it found"


def gpu(options: EngineOptions, notices: list[str]) -> Device | None:
    """The GPU of a run, None for CPU only; auto uses one only if it exists and torch is installed.

    Raises UsageError if one was requested and does not exist, or is ruled out by another option."""
    flag_given = f"-ngl {options.gpu_layers}" if options.gpu_layers else f"--vram {options.vram}" if options.vram else ""
    if options.device == "cpu":
        if flag_given:
            raise UsageError(f"{flag_given} requires a GPU, which --device cpu rules out", "drop one of the two")
        return None
    if options.gpu_layers == 0:
        if flag := "--device cuda" if options.device == "cuda" else flag_given:
            raise UsageError(f"-ngl 0 rules out the GPU that {flag} asks for", "drop one of the two")
        return None
    flag = "--device cuda" if options.device == "cuda" else flag_given
    torch, driver = find_spec("torch") is not None, DRIVER.exists()
    if not torch and (flag or driver):
        if flag:
            raise UsageError(f"{flag} needs torch, which is not installed", "pip install 'effllm[cuda]'")
        notices.append(Fallback("a GPU is here but torch is not installed: running on the CPU (pip install 'effllm[cuda]')"))
    if not torch or not (flag or driver):
        return None
    try:
        gpu, reason = detect_gpu(), "torch finds no GPU here"
    except DoesNotFit as error:
        gpu, reason = None, error.message
    except RuntimeError as error:  # for a driver, GPU or torch that do not match
        gpu, reason = None, str(error).splitlines()[0]
    if gpu is None and flag:
        raise UsageError(f"{flag}: {reason}", f"--device cpu, and {DOCTOR}" if flag.startswith("--device") else
                         f"leave out {flag.split()[0]}: without it the CPU runs all layers; {DOCTOR}")
    if gpu is None:
        notices.append(Fallback(f"a GPU is here and cannot be used: running on the CPU ({reason})"))
    return gpu


def detect_gpu() -> Device | None:
    """The GPU that torch can use. Raises DoesNotFit, RuntimeError if there is one that it cannot."""
    from ...kernels.cuda.device import find_gpu

    return find_gpu()


def vram(options: EngineOptions, gpu_device: Device, notices: list[str]) -> int:
    """Bytes of GPU memory to use: as requested, at most what is free."""
    free = gpu_device.free()
    requested = parse_size(options.vram) if options.vram else free
    if requested > free:
        notices.append(f"--vram {options.vram}: the GPU has {format_size(free)} free, using that")
    return min(requested, free)


def blocks(tensors: Tensors, dims: Dims, packed_kv: bool) -> tuple[BlockBytes, ...]:
    """Weights by layer, with their size on a GPU: vectors are float32 there, and a packed cache has its basis rotations."""
    bases = (2 * allocation(4 * shape.num_attention_heads * shape.head_dim**2) + allocation(4 * shape.num_attention_heads * shape.head_dim)
             for shape in dims.by_layer_kind)
    basis = max(bases) if packed_kv else 0
    return tuple(BlockBytes(str(key), sum(tensor.nbytes for tensor in roles.values() if not tensor.turn),
                            basis + sum(map(gpu_nbytes, roles.values())))
                 for key, roles in {**tensors, "outer": held(tensors["outer"])}.items())


def gpu_nbytes(tensor: ModelTensor) -> int:
    """Bytes that a tensor takes on a GPU."""
    return allocation(tensor.nbytes if tensor.is_matrix else 4 * prod(tensor.shape))


def copied(tensors: Tensors, dims: Dims, mixture: MoEConfig | None, exact: bool, workers: int, link: float) -> CopiedLayers | None:
    """Host layers that long passes copy to the GPU; None if that is never faster.

    `link`: bytes per second to the GPU. The CPU's rates come from an earlier `plan` or `doctor`. Without them typical rates are assumed,
    but then single tokens never cause copies."""
    from .forecast import kind_of_weight

    layers = [roles for key, roles in tensors.items() if key != "outer"]
    heaviest = max(layers, key=lambda roles: carried_places(roles)[1])
    nbytes = carried_places(heaviest)[1]
    visited = 1.0 if mixture is None or not mixture.layers else mixture.visit_rate
    products = round(sum(prod(tensor.shape) * (1.0 if expert_of(role) is None else visited)
                         for role, tensor in heaviest.items() if tensor.is_matrix))
    kind = kind_of_weight(max(matrices(heaviest), key=lambda tensor: tensor.nbytes).spec, exact)
    machine = roofs.known(roofs.RoofsWanted(workers)).machine
    rate = None if machine is None else machine.kinds.get(kind)
    token_nbytes = max(4 * shape.head_dim * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) for shape in dims.by_layer_kind)
    products_s, memory_s = (DEFAULT_CPU_RATES[0] * workers, DEFAULT_CPU_RATES[1]) if rate is None else (rate.prefill, rate.decode)
    rates = LinkRates(products_s, memory_s, link)
    tokens = copied_from(nbytes, products, token_nbytes, rates)
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
    """The notice for a plan that needs more memory than is available now; none if the weights are `mapped`, which the system can drop."""
    free = hardware.memory_available() + hardware.rss() - hardware.rss_files()
    if placement.total_bytes - hardware.rss_files() <= free or mapped:
        return []
    return [f"{format_size(placement.total_bytes)} of memory are planned, {format_size(free)} are available now: the system may kill "
            "this process"]


def backends_of(devices: Sequence[str], widths: Dims, pool: ThreadPool, exact: bool, gpu_device: Device | None,
                by_neuron: bool = False) -> dict[str, object]:
    """Ops by device name, for `devices` and for the CPU, where the embedding runs. `by_neuron`: see `default_registry`."""
    from ...kernels.cpu.candidates import default_registry
    from ...kernels.cpu.ops import CpuOps

    backends: dict[str, object] = {"cpu": CpuOps(pool, widths, default_registry(exact=exact, by_neuron=by_neuron))}
    if "cuda" in devices:
        from ...kernels.cuda.torch_ops import TorchOps

        backends["cuda"] = TorchOps(gpu_device, one_scale=widths.per_token_scale)
    return backends
