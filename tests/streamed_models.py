"""Models opened with parts of their weights on the disk, whatever the machine's memory holds."""

from dataclasses import replace
from pathlib import Path

from effllm.offload.placement import Residency
from effllm.runtime.engine import Engine
from effllm.runtime.model import check_tensors
from effllm.runtime.parts import cut
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.streamed import Streams

MIB = 1 << 20


def streams(folder: Path, options: EngineOptions, keep: int = 0, ring: int | None = None, direct: bool = True) -> Streams:
    """Every `keep`-th part pinned (0: none), the rest in a ring for two parts, or of `ring` bytes."""
    prepared = prepare(folder, options)
    parts = cut(check_tensors(prepared.config, prepared.store, prepared.container), prepared.store)
    prepared.store.close()
    pinned = tuple(i for i in range(len(parts.parts)) if keep and i % keep == 0)
    streamed = tuple(i for i in range(len(parts.parts)) if i not in pinned)
    room = max(2 * max(parts.sizes), ring or 0)
    return Streams(parts, Residency(pinned, streamed, sum(parts.sizes[i] for i in pinned), sum(parts.sizes[i] for i in streamed), room),
                   direct=direct)


def streaming(folder: Path, keep: int = 0, ring: int | None = None, direct: bool = True, **options: object) -> Engine:
    """An engine that streams."""
    asked = EngineOptions(device="cpu", **options)
    made = streams(folder, asked, keep, ring, direct)
    engine = Engine(replace(prepare(folder, asked), streams=made))
    for _ in engine.model.load():
        continue
    return engine
