"""Complaints about memory accounting elsewhere (`test_complaints.py`): containers, mapped files, downloads."""

import re
import resource
from functools import partial
from pathlib import Path

import pytest
from hub_server import Hub
from hub_user import FABLE, MINUTE, CommandResult, HubUser, on_disk, tiny
from streamed_models import streaming
from test_hardware import GIB, machine, tree, v1, v2

from effllm.offload import hardware
from effllm.runtime.prepare import SYSTEM_RESERVE
from effllm.runtime.sampler import Sampler, SamplerSettings

MIB = 1 << 20
PAGE = 4096
# A command, and on stderr the most memory that its process has held.
MEASURED = """
import sys
from effllm.cli.app import main
code = main(sys.argv[1:])
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("version", [1, 2])
def test_psutil_2100_a_plan_follows_the_container_not_its_host(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               version: int) -> None:
    """(vllm#47372; ComfyUI#14938, #15272, #15788; facet#111) On a host of 64 GiB: the budget is the limit less what is used, moves with
    both, and what does not fit in it is refused however much the host has free."""
    def group(limit: int, used: int) -> dict[str, str]:
        if version == 2:
            return v2("/job", {"job": {"memory.max": str(limit), "memory.current": str(used), "memory.stat": f"anon {used}\n"}})
        names = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": "total_inactive_file 0\n"}
        return v1({"memory": "/job"}, {"memory/job": names})

    def planned(name: str, limit: int, used: int) -> CommandResult:
        root = tree(tmp_path / name, machine() | group(limit, used))
        for each in ("memory_available", "memory_total"):
            monkeypatch.setattr(hardware, each, partial(originals[each], root))
        return user.run("plan", "fable", "--json", "--no-probe", "--device", "cpu")

    originals = {each: getattr(hardware, each) for each in ("memory_available", "memory_total")}
    held = hardware.rss()
    monkeypatch.setattr(hardware, "rss", lambda: held)  # what this process holds is part of its budget, and grows between the plans
    assert planned("wide", 2 * GIB, GIB // 2).json["ram_bytes"] == 2 * GIB - GIB // 2 + held - SYSTEM_RESERVE
    assert planned("narrow", 2 * GIB, GIB).json["ram_bytes"] == GIB + held - SYSTEM_RESERVE, "what others of the group hold is not free"
    said = planned("none", GIB, GIB - MIB).refused(4)
    assert "of memory" in said, said


def test_llamacpp_27766_weights_from_the_disk_are_read_not_faulted_in() -> None:
    """(#5207) Tokens whose weights are streamed wait for reads of their own: of the pages that come, next to none comes by a fault."""
    engine = streaming(FABLE, ctx=256, threads=1)
    try:
        for _ in engine.prefill(list(range(1, 20))):
            continue
        sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
        list(engine.generate(sampler, 2, frozenset()))  # code and tables come in once
        before, read = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, engine.disk_nbytes
        list(engine.generate(sampler, 12, frozenset()))
        faults, read = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before, engine.disk_nbytes - read
    finally:
        engine.close()
    assert read > 50 * MIB and faults < read / PAGE / 500, f"{faults} major faults for {read / PAGE:.0f} pages"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")
def test_huggingface_hub_3960_a_large_file_does_not_pass_through_memory(hub: Hub, user: HubUser) -> None:
    """A process of its own says the most that it held: as much for 160 MB as for 2."""
    held = {}
    for size in (2_000_000, 160_000_000):
        repo = hub.add(f"org/of-{size}", files=tiny(size))
        process = user.start_python("-c", MEASURED, "pull", f"org/of-{size}")
        _, said = process.communicate(timeout=MINUTE)
        assert process.returncode == 0, said
        held[size] = int(re.search(r"^VmHWM:\s+(\d+) kB", said, re.MULTILINE)[1]) * 1024
        assert on_disk(user.snapshot(f"org/of-{size}", repo.commit)) == repo.files
    small, large = held.values()
    assert large - small < 24 * MIB, held
