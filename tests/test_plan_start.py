"""What `effllm plan` reports on the start of a run, and on measurements made while the machine was busy."""

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from hub_user import HubUser
from test_forecast import KNOWN

from effllm.runtime.planning import roofs


def typed(*words: str) -> tuple[str, float]:
    """stdout of a process of its own, and the seconds of a processor that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([sys.executable, "-P", "-m", "effllm", *words], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ran.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_start_of_a_run_is_foretold() -> None:
    typed("run", "fable", "hi", "-n", "1", "-t", "1")  # by which its kernels are compiled
    told = json.loads(typed("plan", "fable", "--no-probe", "--json")[0])["prediction"]["program_s"]
    least = min(typed("run", "fable", "hi", "-n", "1", "-t", "1")[1] for _ in range(3))
    assert 0.4 * least < told < 1.6 * least, "most of what a run of one token takes"


def test_the_start_counts_for_the_first_token(user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "known", lambda asked: KNOWN)
    (line,) = [line for line in user.run("plan", "fable").out.splitlines() if line.startswith("first token ")]
    assert " s of starting and " in line and line.endswith(" of loading from a cold disk")


@pytest.mark.parametrize(("figure", "told"), [("memory", True), ("attention 16bit", True), ("kind affine2:64", False)])
def test_figures_that_were_taken_beside_others_are_called_that(user: HubUser, monkeypatch: pytest.MonkeyPatch, figure: str,
                                                               told: bool) -> None:
    beside = replace(KNOWN, machine=replace(KNOWN.machine, disturbed={figure: 0.62}))
    monkeypatch.setattr(roofs, "known", lambda asked: beside)
    said = "other programs had up to 62% of the cores' time then"
    assert (said in user.run("plan", "fable", "--no-probe").out) is told
