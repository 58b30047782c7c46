"""The one flag that `plan` recommends: following it helps, fits, and keeps the context."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from streamed_models import long_context, long_context_mixture
from test_forecast import CPU, DISK, KINDS, KNOWN, MACHINE, fable

from effllm.cli.plan_report import speeds, verdict
from effllm.offload.predict import KindRate
from effllm.runtime.planning.forecast import forecast, suggest
from effllm.runtime.planning.roofs import Roofs
from effllm.runtime.prepare import prepare


def test_fewer_bits_are_advised_where_they_help() -> None:
    found = suggest(fable(), KNOWN)
    assert found.flag == "--bits 4" and not found.full
    after = forecast(fable(spec="4bit"), KNOWN)
    assert found.tokens_per_s == pytest.approx(after.start.tokens_per_s)
    assert found.gain == pytest.approx(forecast(fable(), KNOWN).start.seconds / after.start.seconds) and found.gain > 1.5
    slow = replace(MACHINE, kinds={**KINDS, "codebook4:16": KindRate(1e9, 1e9), "symmetric6:32": KindRate(1e9, 1e9)})
    assert suggest(fable(), Roofs(slow, DISK)) is None, "bits that make it slower"
    raw = replace(MACHINE, kinds={"bf16": KINDS["bf16"]})
    assert suggest(fable(), Roofs(raw, DISK)) is None, "a guess is no advice"
    assert suggest(fable(spec="4bit"), KNOWN) is None


@pytest.mark.parametrize(("bytes_per_s", "pace"), [
    (40e9, "faster than you read"), (6e7, "about as fast as you read"), (2e7, "more slowly than you read"), (3e6, "very slowly")])
def test_a_plan_says_in_a_sentence_how_fast_answers_come(bytes_per_s: float, pace: str) -> None:
    slow = replace(MACHINE, memory=bytes_per_s, kinds={"bf16": KindRate(bytes_per_s, 1e11)})
    said = verdict(fable(), forecast(fable(), Roofs(slow, DISK)))
    assert said.startswith(f"yes, all of it in memory; answers come {pace}")


def test_a_plan_says_in_a_sentence_what_the_disk_is_needed_for() -> None:
    capped = fable(replace(CPU, ctx=2048, kv_ram="9M"))
    assert verdict(capped, forecast(capped, KNOWN)) == ("partly: what does not fit in memory is read from the disk; "
                                                        "answers come faster than you read")
    unknown = forecast(fable(), Roofs(None, None))
    assert unknown.start is None and verdict(fable(), unknown) == "yes, all of it in memory"


def test_a_smaller_cache_is_advised_where_depth_costs() -> None:
    deep = replace(MACHINE, kinds={"bf16": KINDS["bf16"]}, attention={"16bit": KindRate(1e9, 1e9), "4bit": KindRate(4e9, 4e9)})
    found = suggest(fable(), Roofs(deep, DISK))
    assert (found.flag, found.full) == ("--kv 4bit", True) and found.gain > 2


def test_memory_is_advised_where_a_full_context_would_read_the_cache_from_the_disk(tmp_path: Path) -> None:
    capped = fable(replace(CPU, ctx=2048, kv_ram="9M"))
    assert capped.placement.kv_disk_bytes > 0
    found = forecast(capped, KNOWN)
    assert (found.start.limit, found.full.limit) == ("memory", "disk")
    assert speeds(found)[0][1].endswith("; the memory limits it at the start, the disk then")
    better = suggest(capped, KNOWN)
    assert better.flag.startswith("--kv-ram ") and better.full and better.gain > 2
    whole = fable(replace(CPU, ctx=2048, kv_ram=better.flag.split()[1]))
    assert not whole.placement.kv_disk_bytes and better.tokens_per_s == pytest.approx(forecast(whole, KNOWN).full.tokens_per_s)
    folder = long_context(tmp_path / "long")
    most = prepare(folder, replace(CPU, ctx=16_384)).placement.total_bytes
    tight = prepare(folder, replace(CPU, ctx=16_384, ram=str(most - (60 << 20))))
    assert tight.placement.kv_disk_bytes and tight.placement.residency is None
    advised = suggest(tight, KNOWN)
    assert advised.flag.startswith("--ram ") and advised.full
    assert not prepare(folder, replace(CPU, ctx=16_384, ram=advised.flag[6:])).placement.kv_disk_bytes


def test_memory_or_a_shorter_context_is_advised_where_weights_do_not_fit(tmp_path: Path) -> None:
    """In a budget to the last megabyte, in a process that has loaded nothing but what the plan needs, on a machine where nobody knows how
    fast fewer bits are; where that is known, they are the better advice."""
    script = tmp_path / "advice.py"
    script.write_text(f"""import sys
from effllm import DoesNotFit
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_forecast import CPU, DISK, KINDS, KNOWN, MACHINE, Roofs, fable, replace, suggest
try:
    fable(replace(CPU, ram="1M"))
except DoesNotFit as error:
    tight = fable(replace(CPU, ram=error.hint.split("--ram ")[1].split(",")[0]))
assert tight.placement.streamed_bytes
advised = suggest(tight, Roofs(replace(MACHINE, kinds={{"bf16": KINDS["bf16"]}}), DISK))
assert advised.flag.startswith(("-c ", "--ram ")) and advised.gain > 5, advised
assert suggest(tight, KNOWN).flag == "--bits 4" and suggest(tight, KNOWN).gain > advised.gain
""")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_what_is_advised_keeps_the_context_and_fits(tmp_path: Path) -> None:
    """From the least budget on: fewer bits need other kernels, which are memory too, and a context is not given for them."""
    script = tmp_path / "advice.py"
    script.write_text(f"""import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from effllm import DoesNotFit
from test_forecast import CPU, KNOWN, fable, forecast, replace, suggest
ram = sys.argv[1]
if ram == "1M":
    try:
        fable(replace(CPU, ram=ram))
    except DoesNotFit as error:
        print(error.hint.split("--ram ")[1].split("Mi")[0])
elif len(sys.argv) > 2:
    flag, ctx, told, full = sys.argv[2:]
    name, value = flag.split()
    more = {{name[2:]: value}} if name in ("--ram", "--kv") else {{}}
    asked = replace(CPU, **{{"ram": ram, "ctx": int(ctx)}} | more)
    found = forecast(fable(asked, value + "bit" if name == "--bits" else None), KNOWN)
    assert abs((found.full if full == "True" else found.start).tokens_per_s / float(told) - 1) < 0.01, found
else:
    plan = fable(replace(CPU, ram=ram))
    if advised := suggest(plan, KNOWN):
        ctx = advised.flag[3:] if advised.flag.startswith("-c") else plan.placement.ctx
        print(advised.flag, ctx, advised.tokens_per_s, advised.full, sep="\\n")
""")

    def told(*arguments: str) -> list[str]:
        ended = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{arguments}: {ended.stderr}"
        return ended.stdout.splitlines()

    least = int(told("1M")[0])
    for ram in (least, least + 2, least + 4, least + 7):
        if advised := told(f"{ram}Mi"):
            told(f"{ram}Mi", *advised)


def test_memory_is_advised_for_a_mixture_whose_experts_come_from_the_disk(tmp_path: Path) -> None:
    raw, folder = Roofs(replace(MACHINE, kinds={"bf16": KINDS["bf16"]}), DISK), long_context_mixture(tmp_path / "mixture")
    whole = prepare(folder, replace(CPU, ctx=1024)).placement.total_bytes
    paged = prepare(folder, replace(CPU, ctx=1024, ram=str(whole - (30 << 20))))
    assert 0 < paged.placement.expert_slots < 32
    advised = suggest(paged, raw)
    assert advised.flag.startswith("--ram ") and advised.gain > 1.5, advised
    assert prepare(folder, replace(CPU, ctx=1024, ram=advised.flag[6:])).streaming is None
