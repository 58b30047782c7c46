"""Which kernels a run compiles: of low-bit formats, only those of its own model."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import mlx_checkpoints
import psutil
import pytest
import test_imported
from conversions import FABLE, odd_model, options, run
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub
from hub_user import MINUTE, HubUser
from low_bit_samples import FORMATS as SAMPLES
from server_process import wait_until

from effllm.kernels import warm
from effllm.kernels.cpu import packed_formats
from effllm.kernels.tiles import FORMATS, SCHEMES
from effllm.quant.imports.gguf import NATIVE
from effllm.quant.spec import QuantSpec
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning import process_memory, roofs
from effllm.runtime.planning.needed_kernels import Needs, folder_kinds, format_needs, kernel_kinds, kinds_of, on_load_kinds
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.pull import pull
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.plan import plan_pull, pull_target


def formats_in(kinds: tuple[str, ...]) -> set[str]:
    return set(kinds) & set(FORMATS)


def kinds_when_open(folder: Path) -> tuple[str, ...]:
    prepared = prepare(folder, EngineOptions(device="cpu"))
    prepared.store.close()
    return kinds_of(prepared.config, prepared.store, prepared.container, prepared.options)


@pytest.mark.parametrize("spec", ["4bit", "affine3:64", "symmetric8:32", "2bit"])
def test_a_folder_needs_its_own_formats(tmp_path: Path, spec: str) -> None:
    run(odd_model(tmp_path / "odd"), tmp_path / "out", options(spec))
    parsed = QuantSpec.parse(spec)
    kinds = folder_kinds(tmp_path / "out", EngineOptions())
    assert f"{parsed.scheme}-{parsed.bits}" in kinds and len(formats_in(kinds)) <= 2, "embeddings may have more bits"
    assert set(kinds) == set(kinds_when_open(tmp_path / "out"))


@pytest.mark.parametrize(("kind", "needed"), [("Q4_0", {"block-4"}), ("Q8_0", {"block-8"}), ("F16", set())])
def test_a_gguf_file_needs_those_of_its_types(tmp_path: Path, kind: str, needed: set[str]) -> None:
    path = tmp_path / "model.gguf"
    write_model(FABLE, path, kind)
    kinds = folder_kinds(path, EngineOptions())
    assert formats_in(kinds) == needed and set(kinds) == set(kinds_when_open(path))


@pytest.mark.parametrize("name", ["awq", "gptq 4, act order", "nvfp4", "int4, zero points", "fp8 blocks", "nf4", "bytes by row", "mlx"])
def test_a_folder_of_another_tool_needs_the_formats_that_its_codes_are_held_in(
        tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlx_checkpoints.written(tmp_path / "m", "affine 4") if name == "mlx" else test_imported.written(tmp_path / "m", name)
    opened = formats_in(kinds_when_open(tmp_path / "m"))
    monkeypatch.setattr(warm, "is_cold", lambda kinds=warm.ALL: True)
    assert formats_in(folder_kinds(tmp_path / "m", EngineOptions())) == opened and len(opened) < 3


def test_where_formats_are_not_known_all_are_compiled() -> None:
    assert formats_in(kernel_kinds(Needs(low_bit=True), EngineOptions())) == set(FORMATS)
    assert not formats_in(folder_kinds(FABLE, EngineOptions()))


@pytest.mark.parametrize("spec", ["4bit", "affine3:64", "8bit"])
def test_weights_that_are_quantized_on_load_need_what_they_will_be(tmp_path: Path, spec: str) -> None:
    run(FABLE, tmp_path / "out", options(spec))
    assert set(on_load_kinds(FABLE, spec, EngineOptions())) == set(folder_kinds(tmp_path / "out", EngineOptions()))


def test_weights_of_one_format_are_multiplied_by_few_functions() -> None:
    own = set(warm.compiled_functions(["low-bit", "codebook-4"])) - set(warm.compiled_functions(["low-bit"]))
    assert 3 <= len(own) <= 5 and len(warm.compiled_functions(FORMATS)) > 60


def test_every_format_has_loops_and_a_kind() -> None:
    """One that is in no kind would be compiled in the middle of a prompt, in a process whose plan does not know of it."""
    specs = {QuantSpec.parse(text) for text in SAMPLES} | set(NATIVE.values())
    named = {f"{spec.scheme}-{spec.bits}" for spec in specs if spec.scheme != "float"}
    assert named == set(FORMATS)
    listed = {function.name for function in warm.compiled_functions(FORMATS)}
    for spec in specs:
        if spec.scheme in SCHEMES and spec.scheme != "float":
            assert {each.name for each in packed_formats.loops_of(spec.scheme, spec.bits, spec.group < 32).functions()} <= listed


@pytest.mark.parametrize("spec", ["4bit", "affine3:64", "symmetric8:32", "ternary:64", "float8:32", "bf16", None])
def test_random_weights_need_the_formats_that_they_are_made_in(spec: str | None) -> None:
    prepared = prepare_synthetic(str(FABLE / "config.json"), EngineOptions(device="cpu"), spec)
    opened = kinds_of(prepared.config, prepared.store, prepared.container, prepared.options)
    assert set(kernel_kinds(format_needs(spec), EngineOptions())) == set(opened)


def test_a_measurement_compiles_the_formats_that_it_measures() -> None:
    assert not formats_in(tuple(roofs._kernels(roofs.RoofsWanted(2, kinds=("bf16", "f16")))))
    found = formats_in(tuple(roofs._kernels(roofs.RoofsWanted(2, kinds=("codebook4:16", "block8:32 exact", "no format"), kv=("4bit",)))))
    assert found == {"codebook-4", "block-8", "symmetric-6", "symmetric-8"}


def test_a_plan_with_fewer_bits_pays_for_kernels_of_low_bits_once() -> None:
    """Its formats are kinds of their own, of some 40 KB each: three MiB beside each were as much as a small model."""
    program = process_memory.Program(0, (), {"low-bit": 5})
    assert program.with_kinds(("low-bit", *FORMATS)) == 5


# -- while a model is on its way -----------------------------------------------------------------------------------------------------


def pulled_when(hub: Hub, tmp_path: Path, rate: float, is_time: Callable[[Path], bool]) -> Path:
    """The folder of kernels, empty before, after a pull of weights that trickle, `rate` bytes a second, until `is_time`."""
    made = tmp_path / "made"
    run(FABLE, made, options("4bit"))
    hub.add("org/name", made)
    kept, hub.rate = tmp_path / "kernels", rate
    pull = HubUser(tmp_path, hub.endpoint).start("pull", "org/name", XDG_CACHE_HOME=str(kept))
    while pull.poll() is None and not is_time(kept):
        time.sleep(0.02)
    hub.rate = None
    said = pull.communicate(timeout=MINUTE)[1]
    assert pull.returncode == 0 and "kernels" not in said, said
    return next(kept.rglob("lock")).parent


@pytest.mark.parametrize("name", ["made", "awq", "fp8 blocks", "nf4", "gguf"])
def test_what_a_download_compiles_is_what_the_folder_needs(hub: Hub, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GGUF file but for its formats, which its beginning does not tell: each takes a tenth of a second."""
    folder = tmp_path / "m"
    if name == "made":
        run(FABLE, folder, options("4bit"))
    elif name == "gguf":
        folder.mkdir()
        write_model(FABLE, folder / "m.gguf", "Q4_0", change=add_fable_tokenizer)
    else:
        test_imported.written(folder, name)
    hub.add("org/name", folder)
    env = HubUser(tmp_path, hub.endpoint).env
    plan = plan_pull(pull_target(parse_reference("org/name", env), env), Client(env), env)
    monkeypatch.setattr(warm, "is_cold", lambda kinds=warm.ALL: True)
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(pull, "warm_in_background", lambda kinds: given.append(kinds) or nullcontext())
    list(pull.pull_model(plan, Client(env), env))
    needed = set(folder_kinds(folder / "m.gguf" if name == "gguf" else folder, EngineOptions()))
    (found,) = map(set, given)
    assert (found - set(FORMATS) == needed - set(FORMATS)) if name == "gguf" else found == needed


def test_a_download_begins_to_compile_and_leaves_no_process_behind(hub: Hub, tmp_path: Path) -> None:
    folder = pulled_when(hub, tmp_path, 50_000, lambda kept: any(kept.rglob("lock")))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a compiler holds it
        assert not list(folder.glob("complete-*"))
        made = sorted(folder.glob("*.o"))
    time.sleep(1)
    assert sorted(folder.glob("*.o")) == made


def test_a_run_meanwhile_waits_for_one_function_not_for_all(tmp_path: Path) -> None:
    command, kept = [sys.executable, "-P", "-m", warm.__name__, warm.BACKGROUND_FLAG, warm.RAW], tmp_path / "kernels"
    with subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(kept)}) as child:
        while not (made := next(kept.rglob("*.o"), None)) and child.poll() is None:
            time.sleep(0.02)
        with open(made.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert child.poll() is None and not list(kept.rglob("complete-*"))
        child.kill()


def test_a_compiler_beside_a_process_that_is_killed_ends_too(tmp_path: Path) -> None:
    kept = tmp_path / "kernels"
    program = f"import time\nfrom {warm.__name__} import warm_in_background\nwith warm_in_background(('raw',)): time.sleep(600)"
    with subprocess.Popen([sys.executable, "-P", "-c", program], env={**os.environ, "XDG_CACHE_HOME": str(kept)}) as parent:
        while not (made := next(kept.rglob("*.o"), None)) and parent.poll() is None:
            time.sleep(0.02)
        with open(made.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the compiler waits
            compilers = psutil.Process(parent.pid).children()
            parent.kill()
            parent.wait()
            before = len(list(kept.rglob("*.o")))
    assert compilers
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in compilers))
    assert len(list(kept.rglob("*.o"))) <= before + 1 and not list(kept.rglob("complete-*"))


def test_where_no_process_can_be_started_a_download_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "is_cold", lambda kinds=warm.ALL: True)
    monkeypatch.setattr(warm.sys, "executable", str(tmp_path / "nothing"))
    with warm.warm_in_background((warm.RAW,)):
        done = True
    assert done


@pytest.mark.slow
def test_a_long_download_compiles_all_that_the_first_run_needs(hub: Hub, tmp_path: Path) -> None:
    last = kernel_kinds(format_needs("4bit"), EngineOptions())[-1]
    folder = pulled_when(hub, tmp_path, 10_000, lambda kept: any(kept.rglob(f"complete-{last}")))
    first_run = HubUser(tmp_path, hub.endpoint).start("run", "org/name", "Once", "-n", "2", XDG_CACHE_HOME=str(folder.parents[2]))
    out, said = first_run.communicate(timeout=MINUTE)
    assert first_run.returncode == 0 and out.strip() and "kernels" not in said, said
    needed = folder_kinds(tmp_path / "made", EngineOptions())
    assert {path.name for path in folder.glob("complete-*")} == {f"complete-{kind}" for kind in needed}
