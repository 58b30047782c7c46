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
    """The result of a pull."""

    folder: Path  # of the model
    downloaded_nbytes: int
    seconds: float
    was_complete: bool = False  # there was nothing to do


def pull_model(plan: PullPlan, client: Client, env: Mapping[str, str]) -> Iterator[Progress | Notice | Pulled]:
    """Yields what happens, the result last. Raises DoesNotFit before a byte is downloaded if the disk is too small."""
    started = time.monotonic()
    if plan.is_done:
        from .streaming_quantize import note_branch

        note_branch(plan, env)
        remove_leftovers(plan.folder, storage.MARKER)
        yield from _note_licence(plan, env)
        yield Pulled(plan.folder, 0, 0.0, was_complete=True)
        return
    check_disk(plan, env)
    if plan.target.bits is None:
        items = download(plan.repository, plan.files, client, env)
    else:
        from .streaming_quantize import quantize_while_downloading

        items = quantize_while_downloading(plan, client, env)
    before, folder = client.network.received, plan.folder
    with warm_in_background(_kernel_kinds(plan)):
        for item in items:
            if isinstance(item, Path):
                folder = item
            else:
                yield item
    downloaded = client.network.received - before
    yield from _note_licence(plan, env)
    yield Pulled(folder, downloaded, time.monotonic() - started, was_complete=not downloaded and plan.target.bits is None)


def _kernel_kinds(plan: PullPlan) -> tuple[str, ...]:
    """The kinds of kernels that a run of the model will need, as far as its plan knows."""
    if (prepared := plan.run.prepared) is None:
        return ()
    return kinds_of(prepared.config, prepared.store, prepared.container, prepared.options)


def _note_licence(plan: PullPlan, env: Mapping[str, str]) -> Iterator[Notice]:
    """Store a licence that only the hub states, for files in the cache. It goes into our own data folder, since other programs share the
    cache and its layout has no place for it. If that folder cannot be written, only the licence is lost."""
    licence, commit = plan.repository.licence, plan.repository.commit
    found = hub.find(env, plan.repository.requested_name, commit)
    if not licence or found is None or storage.stated_licence(env, found) is not None:
        return
    with suppress(EffllmError):  # raised for a file that is no model
        if plan.target.reference.file is not None and licence_of(found.folder / plan.files[0].name) is not None:
            return
    try:
        storage.note_licence(env, plan.repository.requested_name, commit, licence)
    except OSError as error:
        yield Notice(f"effllm list cannot show the licence, {licence}: {error.filename or storage.data_folder(env)}: {error.strerror}")
