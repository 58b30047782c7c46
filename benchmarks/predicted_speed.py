"""The prediction of `effllm plan` for a run, from rates measured at that moment."""

import sys
from dataclasses import replace
from pathlib import Path

from effllm.offload import disk_probe
from effllm.runtime.planning import forecast, roofs
from effllm.runtime.prepare import Prepared


def promise(prepared: Prepared, file: Path | None = None) -> forecast.Forecast:
    """The prediction; unknown rates of this machine are measured, and the disk's afresh, on the model's own file or on `file`."""
    wanted = forecast.wanted(prepared)
    wanted = replace(wanted, file=file or wanted.file)
    known = roofs.known(wanted)
    if (lacking := roofs.missing(wanted, known)) is not None:
        *_, known = roofs.probe(lacking, known)
    found = disk_probe.probe(wanted.file)
    for what, rates in (("disk", [(read.nbytes, read.depth, round(read.rate / 1e6)) for read in found.reads]),
                        ("disk, the second time", (found.stretch, round(found.again / 1e6))),
                        ("attention", [known.machine.attention.get(kv) for kv in wanted.kv])):
        print(what, rates, file=sys.stderr, flush=True)
    return forecast.forecast(prepared, replace(known, disk=roofs.DiskRoofs(found, "now", wanted.file.stat().st_size)))
