"""NVIDIA GPUs and their memory without importing torch: names from the driver's /proc files, memory from `nvidia-smi`.

nvidia-smi runs only where the driver lists a GPU. Where it is missing, hangs or prints another format, memory is unknown (None) and
reported so; a run that uses the GPU asks torch.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
TIMEOUT_S = 10


@dataclass(frozen=True)
class Gpu:
    """A GPU; bytes of memory, None if unknown."""

    name: str
    memory: int | None = None
    free: int | None = None


def gpus(root: Path = ROOT) -> tuple[Gpu, ...]:
    """The GPUs of this machine; empty without the driver."""
    names = _announced(root)
    told = _told() if root == ROOT and (names or (root / "dev/nvidiactl").exists()) else ()
    return told or tuple(Gpu(name) for name in names)


def _announced(root: Path) -> list[str]:
    names = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        except OSError:
            found = None
        names.append(found.group(1).strip() if found else "NVIDIA GPU")
    return names


def _told() -> tuple[Gpu, ...]:
    try:
        done = subprocess.run(QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse(done.stdout) if done.returncode == 0 else ()


def parse(text: str) -> tuple[Gpu, ...]:
    """Parse lines of `name, MiB total, MiB free`; a figure that is not a number ("[N/A]") is unknown."""
    found = []
    for line in text.splitlines():
        name, *figures = (part.strip() for part in line.rsplit(",", 2))
        if name:
            total, free = [int(figure) << 20 if figure.isdigit() else None for figure in (figures + ["", ""])[:2]]
            found.append(Gpu(name, total, free))
    return tuple(found)
