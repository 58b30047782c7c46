"""A plan carried out: the files as they are, or quantized as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import storage
from ..events import Notice, Progress
from .client import Client
from .disk import sweep
from .download import download
from .plan import PullPlan, check_disk


@dataclass(frozen=True)
class Pulled:
    """`folder` holds the model; `nbytes_loaded` came over the network; `was_here` says that there was nothing to do."""

    folder: Path
    nbytes_loaded: int
    seconds: float
    was_here: bool = False


def pull_model(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice | Pulled]:
    """Yields what happens, the result last. Raises DoesNotFit before anything is loaded that the disk could not hold."""
    began = time.monotonic()
    if plan.is_done:
        from .streamed import note_branch

        note_branch(plan, env)
        sweep(plan.folder, storage.MARKER)
        yield Pulled(plan.folder, 0, 0.0, was_here=True)
        return
    check_disk(plan, env)
    if plan.wish.bits is None:
        items = download(plan.repository, plan.files, client, env)
    else:
        from .streamed import quantized

        items = quantized(plan, client, env)
    before, folder = client.network.received, plan.folder
    for item in items:
        if isinstance(item, Path):
            folder = item
        else:
            yield item
    loaded = client.network.received - before
    yield Pulled(folder, loaded, time.monotonic() - began, was_here=not loaded and plan.wish.bits is None)
