"""`--strict`: what is otherwise a notice about a slower or different answer ends the command; everything else continues."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import running
from hub_user import FABLE, HubUser
from test_imported import written
from test_plan_streamed import MB, demand

from effllm import UsageError
from effllm.offload.notes import Fallback, refuse_fallbacks
from effllm.offload.placement import Budget
from effllm.offload.plan import plan
from effllm.runtime.engine import open_engine
from effllm.runtime.planning import devices
from effllm.runtime.prepare import EngineOptions


@pytest.fixture
def user(tmp_path: Path) -> Iterator[HubUser]:
    with running() as hub:
        yield HubUser(tmp_path, hub.endpoint)


def base_model(folder: Path) -> Path:
    shutil.copytree(FABLE, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    return folder


def test_a_run_without_fallbacks_is_not_disturbed(user: HubUser) -> None:
    assert user.run("run", "fable", "Hi", "-n", "1", "--strict", "--device", "cpu").code == 0
    assert user.run("plan", "fable", "--strict", "--no-probe", "--device", "cpu").code == 0


@pytest.mark.parametrize(("words", "named"), [
    (("--kv", "4bit", "-c", "256"), "nothing will be packed"), (("--kv-sink", "400", "--kv", "4bit"), "at most 128 sinks"),
])
def test_a_setting_without_its_effect(user: HubUser, words: tuple[str, ...], named: str) -> None:
    typed = ("run", "fable", "Hi", "-n", "1", "--device", "cpu", *words)
    said = user.run(*typed)
    assert said.code == 0 and named in said.err
    assert named in user.run(*typed, "--strict").refused(2)


def test_more_threads_than_a_pool_takes(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed or set for all models, and by every command once."""
    said = "-t 64: at most 46 threads, using 46 (the limit of the thread pool; fewer already saturate the memory)"
    words = ("plan", "fable", "--no-probe", "--device", "cpu")
    (tmp_path / "text.txt").write_text("The fox ran to the wood. " * 12)
    scored = user.run("eval", "kld", "fable", "--text", tmp_path / "text.txt", "-c", "64", "--device", "cpu", "-t", "64")
    made = user.run("quantize", "fable", "-o", tmp_path / "out", "--bits", "4", "--no-kv-profile", "-t", "64")
    for ran in (user.run(*words, "-t", "64"), scored, made):
        assert ran.code == 0 and ran.err.count(said) == 1, ran.err
    assert "threads, using" not in user.run(*words, "-t", "46", "--strict").err
    assert said in user.run(*words, "-t", "64", "--strict").refused(2)
    monkeypatch.setenv("EFFLLM_THREADS", "64")
    assert said in user.run(*words).err and said in user.run(*words, "--strict").refused(2)


@pytest.mark.parametrize(("name", "fits"), [("fp8 rows", True), ("gptq 3", False), ("gptq 4, act order", False), ("awq", True)])
def test_weights_in_another_type_than_stored(user: HubUser, tmp_path: Path, name: str, fits: bool) -> None:
    """Widened ones cost memory and speed; those that are only put in order do not."""
    written(tmp_path / "m", name)
    words = ("plan", tmp_path / "m", "--no-probe", "--device", "cpu")
    assert user.run(*words).code == 0
    strict = user.run(*words, "--strict")
    assert strict.code == 0 if fits else "widened to f16" in strict.refused(2)


def test_less_context_and_weights_from_the_disk() -> None:
    """As the plan reports them; a context that the user asks for is none."""
    whole = plan(demand(), Budget(3000 * MB), 4096, 512)
    for notes, named in ((plan(demand(), Budget(600 * MB), 4096).notes, "do not fit in memory"),
                         (plan(demand(), Budget(whole.total_bytes), 4096).notes, "context 512 of the model's 4096")):
        with pytest.raises(UsageError, match=named):
            refuse_fallbacks(notes)
    refuse_fallbacks(whole.notes)
    refuse_fallbacks(["a line that is none"])


def test_a_template_that_is_missing(user: HubUser, tmp_path: Path) -> None:
    folder = base_model(tmp_path / "base")
    said = user.run("run", folder, "Once", "-n", "1", "--device", "cpu")
    assert said.code == 0 and "base model" in said.err
    assert "base model" in user.run("run", folder, "Once", "-n", "1", "--device", "cpu", "--strict").refused(2)
    assert "base model" in user.run("show", folder, "--template").refused(1)
    assert user.run("run", folder, "Once", "--raw", "-n", "1", "--device", "cpu", "--strict").code == 0


def test_a_graphics_card_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DRIVER", Path("/dev/null"))
    monkeypatch.setattr(devices, "detect_gpu", lambda: None)
    *items, engine = open_engine(FABLE, EngineOptions(ctx=256))
    engine.close()
    assert any("running on the CPU" in getattr(item, "text", "") for item in items)
    with pytest.raises(UsageError, match="running on the CPU"):
        list(open_engine(FABLE, EngineOptions(ctx=256, strict=True)))


@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_that_is_slower(strict: bool) -> None:
    *_, engine = open_engine(FABLE, EngineOptions(device="cpu", ctx=256, strict=strict))
    engine.backends["cpu"].registry._pending.append("matrix: NumPy reference, because of this")
    try:
        if strict:
            with pytest.raises(UsageError, match="NumPy reference"):
                engine.announcements()
        else:
            (line,) = engine.announcements()
            assert isinstance(line, Fallback) and "because of this" in line
    finally:
        engine.close()


@pytest.mark.parametrize("words", [("--draft", "fable", "--strict"), ("--kv", "4bit", "--kv-sink", "16", "--draft", "fable", "-c", "1024")],
                         ids=" ".join)
def test_a_draft_model_has_a_cache_of_its_own(user: HubUser, words: tuple[str, ...]) -> None:
    """Which is not packed, whatever was asked of the other's: nothing is said of that."""
    ran = user.run("run", "fable", "Hi", "-n", "1", "--device", "cpu", *words)
    assert ran.code == 0 and "has no effect" not in ran.err


@pytest.mark.parametrize(("words", "named"), [(("--kv-window", "500"), "--kv-window has no effect"),
                                              (("--kv", "auto"), "no profile of this"), (("--think", "on"), "does not reason")])
def test_what_has_no_effect_on_this_model(user: HubUser, words: tuple[str, ...], named: str) -> None:
    typed = ("run", "fable", "Hi", "-n", "1", "--device", "cpu", *words)
    ran = user.run(*typed)
    assert ran.code == 0 and named in ran.err and named in user.run(*typed, "--strict").refused(2)
