"""`effllm doctor`: paths and sizes, why each kernel is used, and what ended the model that it tries."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from effllm.cli import doctor
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.cli.screen import Screen
from effllm.kernels.cpu.candidates import default_registry
from effllm.runtime.files.storage_locations import list_locations
from effllm.runtime.planning import diagnose, roofs
from effllm.runtime.planning.forecast import no_roofs
from effllm.runtime.planning.roofs import MachineRoofs, Roofs
from effllm.runtime.prepare import EngineOptions


@pytest.mark.parametrize(("code", "said"), [
    (-signal.SIGILL, "SIGILL: a kernel uses an instruction that this processor lacks"),
    (-signal.SIGKILL, "SIGKILL: the system killed it, usually for lack of memory"),
    (-signal.SIGSEGV, "SIGSEGV: a bug in effllm or a library"), (-63, "signal 63: a bug")])
def test_a_signal_is_blamed_on_what_sends_it(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: subprocess.CompletedProcess(given, code, "", "a warning\n"))
    works, verdict = doctor.trial()
    assert not works and said in verdict
    assert ("processor" in verdict) == (code == -signal.SIGILL) and ("memory" in verdict) == (code == -signal.SIGKILL)


@pytest.mark.parametrize(("errors", "said"), [
    ("compiling kernels 3/9\nsome library warns\neffllm: the weights are gone\nhint: fetch them\n",
     "fable did not answer: the weights are gone"),
    ("Traceback\nImportError: no numba\n", "fable did not answer: ImportError: no numba"), ("", "fable did not answer: no message")])
def test_the_line_of_the_failure_is_quoted_not_the_first_one(monkeypatch: pytest.MonkeyPatch, errors: str, said: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: subprocess.CompletedProcess(given, 1, "", errors))
    assert doctor.trial() == (False, said)


def test_every_kernel_says_why_it_runs() -> None:
    choices = diagnose.kernel_choices()
    assert {"packed attention", "seal", *default_registry().ops} == {choice.op for choice in choices}
    assert all(doctor.reason(choice).startswith(choice.because) and len(choice.because) > 10 for choice in choices)
    for registry in (default_registry(), default_registry(exact=True), default_registry(only="reference")):
        assert all(len(candidate.because) > 10 for candidate in registry.candidates)
    one = next(choice for choice in choices if choice.op == "low-bit matrix" and choice.columns == 1)
    assert "table lookup" in doctor.reason(one), "and why not what comes before it"


@pytest.mark.parametrize(("choice", "said"), ((None, False), (3e-5, True)))
def test_what_was_not_measured_is_not_shown_as_nothing(choice: float | None, said: bool) -> None:
    world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {})
    machine = MachineRoofs("A CPU", 2, "2026-01-01 12:00", 20e9, 18e9, 1e-4, 1e-5, {}, {}, choice)
    doctor.show_roofs(Screen(world), Roofs(machine, None))
    shown = world.stdout.getvalue()
    assert "100 us, and 10 us per layer, besides reading weights" in shown and ("; 30 us between tokens" in shown) == said
    assert said or "between tokens" not in shown
    assert "other programs" not in shown
    doctor.show_roofs(Screen(world), Roofs(replace(machine, disturbed={"memory": 0.2, "kind bf16": 0.62}), None))
    assert "had up to 62% of the cores' time when these were measured: memory, bf16;" in " ".join(world.stdout.getvalue().split())


def test_what_was_measured_is_of_so_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run says that was not measured with its threads is there after the command that it names."""
    monkeypatch.setattr(doctor, "trial", lambda: (True, "fable wrote 8 tokens"))
    monkeypatch.setattr(roofs, "cache_root", lambda: tmp_path)
    known = MachineRoofs("A CPU", 3, "2026-01-01 12:00", 20e9, 18e9, 1e-4, 1e-5, {}, {}, 3e-5)
    roofs._write("machines", roofs._machine_key(3), asdict(known))
    command = re.search(r"\(run effllm (.*) once\)$", no_roofs(EngineOptions(threads=3)))[1]
    for words, threads, shown in ((command.split(), "", True), (["doctor"], "3", True), (["doctor"], "", False)):
        monkeypatch.setenv("EFFLLM_THREADS", threads)
        world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        assert main([*words, "--no-probe"], world) == 0, world.stderr.getvalue()
        assert ("speed with 3 threads" in world.stdout.getvalue()) == shown
        assert ("speed  not measured with these kernels" in world.stdout.getvalue()) != shown
    asked = diagnose.roofs_wanted(os.environ, 3)
    assert asked.threads == 3 and roofs.known(asked).machine == known
    world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), {})
    assert main(["doctor", "-t", "0"], world) == 2 and "--threads 0 is too small" in world.stderr.getvalue()


def test_places_have_a_path_a_size_and_the_free_disk(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_STATE_HOME": str(tmp_path / "state"), "HF_HOME": str(tmp_path / "hf"),
           "HOME": str(tmp_path)}
    blobs, snapshot = tmp_path / "hf" / "hub" / "models--a--b" / "blobs", tmp_path / "hf" / "hub" / "models--a--b" / "snapshots"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "x").write_bytes(b"x" * 5000)
    (snapshot / "model.safetensors").symlink_to(blobs / "x")
    sessions = tmp_path / "state" / "effllm" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / "tale.json").write_bytes(b"{}")
    found = {place.name: place for place in list_locations(env)}
    assert list(found) == ["kernel cache", "hub cache", "own models", "sessions", "served prompts", "spilled cache", "measurements"]
    assert (found["hub cache"].path, found["hub cache"].nbytes) == (tmp_path / "hf" / "hub", 5000), "a link to a file is not a second one"
    assert (found["sessions"].path, found["sessions"].nbytes) == (sessions, 2)
    assert (found["own models"].nbytes, (tmp_path / "data").exists()) == (0, False), "looking makes nothing"
    assert all(place.free_nbytes for place in found.values())


def test_the_report_names_versions_python_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "trial", lambda: (True, "fable wrote 8 tokens"))
    for words in (("--json",), ()):
        world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
        assert main(["doctor", "--no-probe", *words], world) == 0, world.stderr.getvalue()
        said = world.stdout.getvalue()
        assert sys.executable in said and "llvmlite" in said
        if words:
            report = json.loads(said)
            assert [place["name"] for place in report["places"]][:2] == ["kernel cache", "hub cache"]
            assert {"path", "bytes", "free_bytes"} <= report["places"][0].keys() and report["executable"] == sys.executable
        else:
            assert "free there" in said and "hub cache" in said and "sessions" in said
    assert diagnose.installed(("numpy", "no-such-library")).keys() == {"numpy"}
