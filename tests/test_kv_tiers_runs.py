"""Whole runs with KV pages on disk, as processes: the answer, memory within bounds, and failures."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from streamed_models import long_context, long_context_mixture
from test_streamed_runs import BUFFERED, HANGS, MIB, MINUTES, finish, peak, start

CTX, PROMPT = 4096, "word " * 1800
# A disk with room for so many bytes.
FULL = """
import errno
real, room = os.pwrite, [{nbytes}]
def pwrite(fd, data, offset):
    if not room[0]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    count = real(fd, data[:room[0]], offset)
    room[0] -= count
    return count
os.pwrite = pwrite
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_context(tmp_path_factory.mktemp("models") / "long")


def answer(model: Path, *more: object, tokens: int = 8) -> tuple[object, ...]:
    return ("run", model, "--raw", PROMPT, "-n", tokens, "--temp", 0, "--ignore-eos", "-c", CTX, "--device", "cpu", *more)


def tier(folder: Path, kv: str = "16bit") -> tuple[object, ...]:
    """Exact tokens take 9 MB, or 8."""
    return "--kv-ram", "16M" if kv == "16bit" else "13M", "--spill-dir", folder


@pytest.fixture(scope="module", params=("16bit", pytest.param("4bit", marks=pytest.mark.slow)))
def expected(model: Path, request: pytest.FixtureRequest) -> dict:
    """The answer with everything in memory."""
    found = json.loads(finish(start(*answer(model, "--kv", request.param, "--json")))[0])
    return {**found, "kv": request.param}


def test_a_run_keeps_to_its_budget_and_answers_the_same(model: Path, expected: dict, tmp_path: Path) -> None:
    more = ("--kv", expected["kv"], *tier(tmp_path, expected["kv"]))
    planned = json.loads(finish(start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--json", *more))[0])
    assert planned["tiers"]["disk"]["kv_bytes"] > planned["kv_bytes"] // 2 > 0
    assert planned["tiers"]["memory"]["kv_bytes"] <= 16 * 10**6
    budget = planned["total_bytes"] + 2 * MIB  # what the program itself takes differs a little from process to process
    out, err = finish(start(*answer(model, *more, "--ram", budget, "--json")))
    found = json.loads(out)
    assert found["token_ids"] == expected["token_ids"]
    assert peak(err) <= budget, f"{peak(err) / MIB:.0f} MiB of {budget / MIB:.0f} used"
    assert "of the KV cache are on disk" in err
    assert found["io"]["disk_bytes_read"] > expected["io"]["disk_bytes_read"] + planned["tiers"]["disk"]["kv_bytes"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_mixture_with_its_cache_and_its_experts_on_the_disk(tmp_path: Path) -> None:
    """Of both a part: what the plan says in one process, another one keeps to."""
    mixture = long_context_mixture(tmp_path / "mixture")
    plan = ("plan", mixture, "-c", CTX, "--device", "cpu", "--no-probe", "--json")
    whole = json.loads(finish(start(*plan))[0])
    more = ("--ram", whole["total_bytes"] - whole["kv_bytes"] - 12 * MIB, *tier(tmp_path / "spill"))
    planned = json.loads(finish(start(*plan, *more))[0])
    assert planned["ctx"] == CTX and planned["tiers"]["disk"]["kv_bytes"] > 8 * MIB and planned["tiers"]["disk"]["weights_bytes"] > 0
    expected = json.loads(finish(start(*answer(mixture, "--json")))[0])
    found = json.loads(finish(start(*answer(mixture, *more, "--json")))[0])
    assert found["token_ids"] == expected["token_ids"]
    _, err = finish(start(*answer(mixture, "--ram", "64M", *tier(tmp_path / "spill"))), 4)
    assert re.search(r"hint: .*--ram \d+Mi", err), err


@pytest.mark.slow
def test_a_context_that_memory_does_not_hold_runs_where_it_was_asked_for(model: Path, tmp_path: Path) -> None:
    whole = json.loads(finish(start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--json"))[0])["total_bytes"]
    more = ("--ram", whole - 8 * MIB, "--spill-dir", tmp_path)
    planned = json.loads(finish(start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--json", *more))[0])
    assert planned["ctx"] == CTX and planned["tiers"]["disk"]["kv_bytes"] > 8 * MIB and planned["tiers"]["disk"]["weights_bytes"] == 0
    shortened = json.loads(finish(start("plan", model, "--device", "cpu", "--no-probe", "--json", *more))[0])
    assert shortened["ctx"] < CTX and shortened["tiers"]["disk"]["kv_bytes"] == 0
    _, err = finish(start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--disk", "1M", *more), 4)
    assert re.search(r"of the KV cache for 4096 tokens would be on disk, --disk allows 976.56 KiB", err)


@pytest.mark.slow
def test_a_disk_that_fills_keeps_the_text(model: Path, tmp_path: Path) -> None:
    """The prompt's pages find room, the answer's do not."""
    planned = json.loads(finish(start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--json", *tier(tmp_path)))[0])
    assert planned["tiers"]["disk"]["kv_bytes"] > 10 * MIB
    child = start(*answer(model, *tier(tmp_path), tokens=300), before=f"import effllm.offload.spill_file\n{FULL.format(nbytes=1 << 40)}" """
import effllm.runtime.engine as engine
generate = engine.Engine.generate
def generating(self, *more, **named):
    room[0] = 0
    yield from generate(self, *more, **named)
engine.Engine.generate = generating
""")
    out, err = finish(child, 4)
    assert len(out) > 10 and re.search(r"the disk is full: .* of the KV cache are in", err) and "--spill-dir" in err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_altered_ends_the_answer_and_keeps_the_text(model: Path, tmp_path: Path) -> None:
    """Ten tokens in: what follows would be made of garbage."""
    child = start(*answer(model, *tier(tmp_path), tokens=300), before="""
import effllm.runtime.engine as engine
generate = engine.Engine.generate
def generating(self, *more, **named):
    for number, step in enumerate(generate(self, *more, **named)):
        yield step
        if number == 10:
            file = self.cache.pool.stream.spill
            os.pwrite(file.descriptor, bytes(range(200)), file.nbytes // 3)
            os.fsync(file.descriptor)
engine.Engine.generate = generating
""")
    out, err = finish(child, 1)
    assert len(out) > 10 and out.endswith("\n") and "Traceback" not in err
    assert re.search(r"effllm: the KV cache's file was altered: the checksum of page \d+ of layer \d+ differs\nhint: .*--spill-dir", err)


@pytest.mark.slow
def test_a_killed_run_leaves_nothing(model: Path, tmp_path: Path) -> None:
    child = start(*answer(model, *tier(tmp_path), tokens=400))
    assert child.stdout.read(1)
    child.kill()
    child.communicate(timeout=MINUTES)
    assert child.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


def test_ctrl_c_while_the_disk_hangs_keeps_what_was_written(model: Path, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    child = start(*answer(model, *tier(tmp_path / "spill"), tokens=400), before=HANGS.format(file=str(hang)))
    assert child.stdout.read(1)
    hang.touch()
    while "hangs" not in child.stderr.readline():
        continue
    child.send_signal(signal.SIGINT)
    out, err = finish(child, 130)
    assert out.endswith("\n") and re.search(r"stopped by Ctrl-C after \d+ token", err)


@pytest.mark.slow
def test_a_file_system_without_direct_reads(model: Path, expected: dict, tmp_path: Path) -> None:
    out, err = finish(start(*answer(model, "--kv", expected["kv"], *tier(tmp_path, expected["kv"]), "--json"), before=BUFFERED))
    assert json.loads(out)["token_ids"] == expected["token_ids"] and err.count("the KV cache is read through the page cache") == 1


def test_a_folder_that_nobody_may_write(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, err = finish(start(*answer(model, *tier(tmp_path / "file"))), 1)
    assert "no file for the KV cache in" in err and "--spill-dir" in err


@pytest.mark.slow
def test_the_environment_names_the_same_flags(model: Path, tmp_path: Path) -> None:
    env = {**os.environ, "EFFLLM_KV_RAM": "16M", "EFFLLM_SPILL_DIR": str(tmp_path)}
    child = start("plan", model, "-c", CTX, "--device", "cpu", "--no-probe", "--json", env=env)
    assert json.loads(finish(child)[0])["tiers"]["disk"]["kv_bytes"] > 0
