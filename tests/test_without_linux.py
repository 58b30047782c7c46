"""Running without Linux features: a process in which os, time and mmap offer no more than on macOS, without /proc and /sys.

It stands for what Python's own modules offer there, not for another processor, file system or C library.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from effllm.kernels.compile import cache_root

# Libraries keep their Linux: they are imported before, and psutil reads /proc in the place of macOS's calls.
LACKING = """
import asyncio, builtins, ctypes, fcntl, io, mmap, multiprocessing, os, platform, select, shutil, signal, socket, ssl, subprocess, sys
import sysconfig, tempfile, time, urllib.request
import numba, numpy, psutil
import numpy.linalg._umath_linalg

NAMES = {
    os: "pipe2 posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_getscheduler fdatasync memfd_create eventfd"
        " pidfd_open getrandom splice copy_file_range getxattr setxattr listxattr removexattr O_DIRECT O_TMPFILE O_PATH",
    time: "CLOCK_BOOTTIME", select: "epoll", signal: "SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo pidfd_send_signal",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTDUMP", socket: "AF_NETLINK AF_ALG SOCK_CLOEXEC",
}
for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in [name for name in dir(os) if name.startswith(("POSIX_FADV", "SCHED_", "SPLICE_", "EFD_", "MFD_"))]:
    delattr(os, name)
shutil._copyxattr, tempfile._O_TMPFILE_WORKS = (lambda *anything, **more: None), False
fcntl.F_NOCACHE, control = 48, fcntl.fcntl
fcntl.fcntl = lambda descriptor, command, argument=0: 0 if command == 48 else control(descriptor, command, argument)
sysconfig.get_config_vars()
sys.platform, platform.system, platform.release = "darwin", lambda: "Darwin", lambda: "24.6.0"


def without_proc(function):
    def asked(path, *more, **named):
        if str(path).startswith(("/proc", "/sys/")) and "psutil" not in sys._getframe(1).f_code.co_filename:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *more, **named)
    return asked


for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    setattr(os, name, without_proc(getattr(os, name)))
io.open = builtins.open = without_proc(builtins.open)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("syscall", "renameat2", "getauxval"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library
import json
from effllm.cli.app import main

for words in json.loads(sys.argv[1]):
    if code := main(words):
        sys.exit(f"{words}: exit code {code}")
"""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("home")

    def run(*commands: list[str]) -> str:
        folders = {name: str(home / name) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        environment = {**os.environ, **folders, "XDG_CACHE_HOME": str(cache_root().parent)}  # what is compiled is compiled
        done = subprocess.run([sys.executable, "-P", "-c", LACKING, json.dumps(commands)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_model_runs_from_a_mapped_file_too_and_is_quantized(typed, tmp_path: Path) -> None:
    asked = ["Once upon a time", "--raw", "-n", "12", "--temp", "0"]
    small = str(tmp_path / "small")
    out = typed(["run", "fable", *asked], ["run", "fable", *asked, "--load", "mmap"],
                ["quantize", "fable", "-o", small, "--bits", "4"], ["verify", small], ["run", small, *asked])
    here = subprocess.run([sys.executable, "-P", "-m", "effllm", "run", "fable", *asked], capture_output=True, text=True, check=True).stdout
    assert out.startswith(here + here)


@pytest.mark.slow
def test_a_conversation_continues(typed) -> None:
    answer = ["-n", "8", "--temp", "0", "--session", "talk"]
    out = typed(["run", "fable", "Hello", *answer], ["run", "fable", "And then?", *answer], ["session", "list", "--json"])
    assert json.loads(out[out.index('{"folder"') :])["sessions"][0]["messages"] == 4
