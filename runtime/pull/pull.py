"""Executes a pull plan: downloads the files as they are, or quantizes them while they arrive; kernels for the run that follows are
compiled meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ... import EffllmError
from ...kernels.warm import warm_in_background
from .. import hub
from ..events import Notice, Progress
from ..library import storage
from ..planning.needed_kernels import kinds_of
from ..source import licence_of
from .client import Client
from .disk import remove_leftovers
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
        from .streaming_quantize import note_branch

        note_branch(plan, env)
        remove_leftovers(plan.folder, storage.MARKER)
        yield from _note_licence(plan, env)
        yield Pulled(plan.folder, 0, 0.0, was_here=True)
        return
    check_disk(plan, env)
    if plan.wish.bits is None:
        items = download(plan.repository, plan.files, client, env)
    else:
        from .streaming_quantize import quantize_while_downloading

        items = quantize_while_downloading(plan, client, env)
    before, folder = client.network.received, plan.folder
    with warm_in_background(_kinds(plan)):
        for item in items:
            if isinstance(item, Path):
                folder = item
            else:
                yield item
    loaded = client.network.received - before
    yield from _note_licence(plan, env)
    yield Pulled(folder, loaded, time.monotonic() - began, was_here=not loaded and plan.wish.bits is None)


def _kinds(plan: PullPlan) -> tuple[str, ...]:
    """Of kernels that a run of what arrives will need, as far as its plan knows."""
    if (prepared := plan.run.prepared) is None:
        return ()
    return kinds_of(prepared.config, prepared.store, prepared.container, prepared.options)


def _note_licence(plan: PullPlan, env: Mapping[str, str]) -> Iterator[Notice]:
    """Keep what the hub alone states of the licence of files that are in the cache now; in a folder of ours, since the cache is everybody's
    and has no place for it. A folder of ours that cannot be written costs no more than that."""
    licence, commit = plan.repository.licence, plan.repository.commit
    found = hub.find(env, plan.repository.asked, commit)
    if not licence or found is None or storage.stated_licence(env, found) is not None:
        return
    with suppress(EffllmError):  # a file that is no model has nothing to say
        if plan.wish.reference.file is not None and licence_of(found.folder / plan.files[0].name) is not None:
            return
    try:
        storage.note_licence(env, plan.repository.asked, commit, licence)
    except OSError as error:
        yield Notice(f"effllm list cannot show the licence, {licence}: {error.filename or storage.data_folder(env)}: {error.strerror}")
