"""A compiler target that was forced is tried in a child process before a run trusts it."""

import os
import stat
import subprocess
import sys

import pytest

from effllm.kernels import target_check, warm
from effllm.kernels.compile import cpu_features

FORCED = {"NUMBA_CPU_NAME": "icelake-server", "NUMBA_CPU_FEATURES": "+avx512f,+avx512bw,+avx512vl,+avx512vnni"}


def test_nothing_is_forced_normally():
    assert target_check.forced_target({}) == "" and target_check.forced_target({"NUMBA_CPU_NAME": ""}) == ""
    assert target_check.forced_target({"NUMBA_CPU_NAME": "haswell", "HOME": "/"}) == "NUMBA_CPU_NAME=haswell"


@pytest.mark.skipif("avx512f" in cpu_features(), reason="this processor has AVX-512")
def test_a_set_that_this_processor_lacks_is_refused_in_one_line(tmp_path):
    environment = {**os.environ, **FORCED, "XDG_CACHE_HOME": str(tmp_path)}
    code = ("from effllm.kernels import target_check, warm\nassert target_check.forced_target()\n"
            "print(target_check.target_runs([warm.RAW]), target_check.target_runs([warm.RAW]))")
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr[-2000:]
    assert not list(tmp_path.rglob("tried-*"))


def test_a_target_that_runs_is_tried_once(tmp_path):
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse2", "XDG_CACHE_HOME": str(tmp_path)}
    code = "from effllm.kernels import target_check, warm\nprint(target_check.target_runs([warm.RAW]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr[-2000:]
    assert [path.name for path in tmp_path.rglob("tried-*")] == ["tried-raw"]


def test_a_child_that_is_ended_by_a_signal_is_a_no(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -ILL $$\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(target_check, "cache_folder", lambda: None)
    monkeypatch.setattr(sys, "executable", str(script))
    assert not target_check.target_runs([warm.RAW, warm.LOW_BIT])
    script.write_text("#!/bin/sh\nexit 3\n")
    assert target_check.target_runs([warm.RAW])


@pytest.mark.slow
@pytest.mark.skipif("avx512f" in cpu_features(), reason="this processor has AVX-512")
def test_a_run_says_what_was_forced_and_what_to_do(tmp_path):
    for words in (("run", "fable", "hello"), ("quantize", "fable", "-o", str(tmp_path / "out"), "--bits", "4")):
        done = subprocess.run([sys.executable, "-P", "-m", "effllm", *words], capture_output=True, text=True,
                              env={**os.environ, **FORCED, "XDG_CACHE_HOME": str(tmp_path)})
        assert done.returncode == 2 and "this processor lacks instructions" in done.stderr, (done.returncode, done.stderr[-2000:])
        assert "NUMBA_CPU_NAME=icelake-server" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
