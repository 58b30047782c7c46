"""Memory of the process besides weights and caches: its modules, and the machine code of the kernels it loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...kernels.tiles import FORMATS
from ...offload import hardware
from ...offload.size import SPARE
from .needed_kernels import kinds_of

if TYPE_CHECKING:
    from ..prepare import Prepared

COLD_ALLOWANCE = 16 << 20  # for machine code; all kernels together take 13.6 MB
MODULES_ALLOWANCE = 3 << 20  # at most, for modules loaded with kernels of another kind
# Imports at the end of an answer, and small transient objects: a chat over quantized weights and a packed cache took 1.1 MiB
# more than everything else that is counted.
LATER_ALLOWANCE = 2 << 20


@dataclass(frozen=True)
class Program:
    """The memory of the process (and of draft models in it), measured once with certain kernels loaded, so that alternative plans are not
    charged for what was loaded meanwhile."""

    nbytes: int
    kinds: tuple[str, ...]  # of the kernels that were loaded
    more: dict[str, int] = field(default_factory=dict)  # additional bytes for kernels of other kinds

    def with_kinds(self, kinds: Sequence[str]) -> int:
        """Its bytes with kernels of these kinds. The code of a single weight format, some 40 KB, is included in the low-bit figure."""
        missing_kinds = [kind for kind in kinds if kind not in self.kinds and kind not in FORMATS]
        for kind in missing_kinds:
            if kind not in self.more:
                before = hardware.rss()
                self.more[kind] = max(0, baseline((kind,)) - LATER_ALLOWANCE - before) + MODULES_ALLOWANCE
        return self.nbytes + sum(self.more[kind] for kind in missing_kinds)


def program_of(prepared: Prepared) -> Program:
    """The process as a plan counted it, for comparing alternative plans, with what each may load in addition."""
    placement = prepared.placement
    gpu_nbytes = prepared.gpu.host_nbytes if "cuda" in placement.devices else 0  # paid by each plan that uses the GPU
    kinds = kinds_of(prepared.config, prepared.store, prepared.container, prepared.options)
    return Program(placement.baseline_bytes - gpu_nbytes + SPARE, kinds)


def baseline(kinds: Sequence[str]) -> int:
    """Bytes of the process with everything that a run imports and compiles. With a cold kernel cache, where that would take long, the
    machine code is an allowance."""
    import tokenizers  # noqa: F401

    from ...kernels import warm
    from ...kernels.cpu import ops  # noqa: F401

    if warm.is_cold(kinds):
        return hardware.rss() + COLD_ALLOWANCE
    warm.load_all(kinds)
    return hardware.rss() + LATER_ALLOWANCE
