"""Quantization on load: low-bit weights written to a private scratch folder, or to the user's data folder for later runs.

It runs in a subprocess (`python -m effllm.runtime.conversion.on_load`), so that its memory is free again when the run is planned, and a
plan, which quantizes nothing, agrees with the run. A scratch folder is removed with the process that made it (`scratch_folder.py`).
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ... import DiskFull, DoesNotFit, EffllmError, not_written, typed
from ...offload.size import format_size
from ...quant.recipe import Recipe
from ...quant.spec import QuantSpec
from ..catalog import ModelRef
from ..convert import Converted, ConvertOptions, convert
from ..events import Notice, Progress
from ..files.scratch_folder import scratch_folder
from ..library.storage import stored_folder
from ..source import licence_of, open_weights
from ..stores.container import CheckpointError, refuse_quantized

PREFIX = "effllm-load-"


@dataclass(frozen=True)
class Request:
    """A model to be quantized on load."""

    ref: ModelRef
    bits: str  # a short format such as 4bit
    kept: Path  # the folder of all models that --keep stored
    keep: bool = False
    threads: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of this model at these bits, existing or not: `<data>/models/<name>/<revision or local-...>/<bits>`."""
        return stored_folder(self.kept, self.ref.folder, self.bits, self.ref.repo or self.ref.alias, self.ref.revision)


def check_format(bits: str) -> None:
    """Raises UsageError for an unknown format."""
    QuantSpec.parse(bits)


def find_stored(request: Request) -> Path | None:
    """The folder that an earlier --keep of the same source stored, None if there is none. Raises CheckpointError, with a hint how to
    rebuild it, if it is damaged."""
    if not (request.folder / "effllm.json").is_file():
        return None
    try:
        store, container = open_weights(request.folder)
    except CheckpointError as error:
        model = typed(f"{request.ref.text}:{request.bits}")
        raise CheckpointError(error.message, f"effllm rm {model} removes the stored copy, so that it is rebuilt") from error
    store.close()
    return request.folder if container is not None else None


def quantize_on_load(request: Request, out: Path) -> Iterator[Progress | Notice | Converted]:
    """Convert into `out`; yields events, the result last."""
    refuse_quantized(request.ref.folder, request.ref.text, "--bits")
    spec = QuantSpec.parse(request.bits)
    source = {key: value for key, value in (("model", request.ref.alias or request.ref.text), ("repo", request.ref.repo),
                                            ("revision", request.ref.revision),
                                            ("licence", request.ref.licence or licence_of(request.ref.folder))) if value}
    # A run takes the vision tower from the original, which is here; a stored copy may outlive it.
    options = ConvertOptions(Recipe(spec), request.bits, threads=request.threads, tower=request.keep, source=source)
    try:
        for item in _convert_in_subprocess(request.ref.folder, out, options):
            if isinstance(item, Converted):
                where = f"kept in {out}" if request.keep else "for this run only; --keep keeps it"
                yield Notice(f"quantized on load to {item.bits_per_weight:.2f} bits per weight, {format_size(item.after)}, {where}")
            yield item
    except (DiskFull, DoesNotFit) as error:
        where = "XDG_DATA_HOME" if request.keep else "TMPDIR"
        raise type(error)(error.message, f"make room there, or set {where} to a folder with room") from error


def _convert_in_subprocess(folder: Path, out: Path, options: ConvertOptions) -> Iterator[Progress | Notice | Converted]:
    """`convert` in a subprocess, which is terminated when this is closed. Raises its exceptions."""
    with subprocess.Popen([sys.executable, "-P", "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            pickle.dump((folder, out, options), child.stdin)
            child.stdin.close()
            while True:
                item = pickle.load(child.stdout)
                if isinstance(item, Exception):
                    raise item
                yield item
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            if (code := child.wait()) != 0:
                raise EffllmError(f"quantization failed: its process ended with {code}",
                                  "memory may have run out; effllm quantize resumes where it stopped") from None
        finally:
            child.terminate()


def main() -> None:
    """The subprocess: arguments on stdin; events and a final exception on stdout, pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and terminates this process
    out, sys.stdout = sys.stdout.buffer, sys.stderr

    def send(item: object) -> None:
        pickle.dump(item, out)
        out.flush()

    with suppress(BrokenPipeError):  # the parent closed the pipe
        try:
            for item in convert(*pickle.load(sys.stdin.buffer)):
                send(item)
        except BrokenPipeError:
            raise
        except Exception as error:  # of any kind: the parent raises it
            send(error)

@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A scratch folder, removed at exit. Raises EffllmError if none can be created."""
    try:
        root = Path(tempfile.gettempdir())
    except OSError as error:
        raise EffllmError(f"cannot create a temporary folder: {error.strerror}", "set TMPDIR to a folder with room") from error
    with ExitStack() as held:
        try:
            folder = held.enter_context(scratch_folder(root, PREFIX))
        except OSError as error:
            raise not_written(error, f"cannot create a temporary folder in {root}", "set TMPDIR to a folder with room",
                              "make room there, or set TMPDIR to a folder with room") from error
        yield folder


if __name__ == "__main__":
    main()
