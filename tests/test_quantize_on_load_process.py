"""The process in which a model is quantized on load: killed, and abandoned. A conversion that hangs simulates it."""

import sys
from pathlib import Path

import psutil
import pytest

from effllm import EffllmError
from effllm.runtime.catalog import ModelRef
from effllm.runtime.conversion import on_load

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
STANDS_STILL = """
import time
from effllm.runtime.conversion import on_load
from effllm.runtime.events import Notice
def convert(*asked):
    yield Notice("it has begun")
    time.sleep(600)
on_load.convert = convert
on_load.main()
"""


@pytest.fixture(autouse=True)
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model is made in a second, and a test may be kept from looking for longer."""
    script = tmp_path / "python"
    (tmp_path / "program").write_text(STANDS_STILL)
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -P '{tmp_path}/program' \"$@\"\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def begun(folder: Path) -> tuple[object, psutil.Process]:
    making = on_load.quantize_on_load(on_load.Request(ModelRef("fable", FABLE), "2bit", folder), folder / "out")
    assert next(making).text == "it has begun"
    (child,) = [each for each in psutil.Process().children() if "effllm.runtime.conversion.on_load" in each.cmdline()]
    return making, child


def test_a_child_that_is_killed_is_reported(tmp_path: Path) -> None:
    making, child = begun(tmp_path)
    child.kill()
    with pytest.raises(EffllmError, match=r"quantization failed: its process ended with -9") as caught:
        list(making)
    assert "effllm quantize" in caught.value.hint and not child.is_running()


def test_a_child_that_nobody_waits_for_any_more_ends(tmp_path: Path) -> None:
    making, child = begun(tmp_path)
    making.close()
    assert not child.is_running()
