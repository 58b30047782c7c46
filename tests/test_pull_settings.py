"""A format given with a model that is not downloaded: after the file's name, in a flag, in a variable. What is downloaded, quantized and
reported."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub, running
from hub_user import FABLE, HubUser, measure_nothing
from test_imported import written

from effllm.quant.spec import QuantSpec
from effllm.runtime.config import read_config
from effllm.runtime.families import TensorRule, base_role
from effllm.runtime.planning.expected_store import ExpectedStore
from effllm.runtime.pull.plan import _is_quantized

REPO, FEW = "org/name", ("Once", "--raw", "-n", "2", "--temp", "0")
LEFT_OUT = "is quantized already (by another tool): bits of EFFLLM_BITS is ignored"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for kind in ("Q8_0", "F16"):
        write_model(FABLE, folder / f"fable-{kind}.gguf", kind, change=add_fable_tokenizer)
    return folder


@pytest.fixture
def hub(made: Path) -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, made)
        yield hub


@pytest.fixture
def user(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> HubUser:
    measure_nothing(monkeypatch)
    return HubUser(tmp_path / "home", hub.endpoint)


@pytest.mark.parametrize("words", [pytest.param((f"{REPO}:fable-Q8_0.gguf:4bit",), marks=pytest.mark.slow), (f"{REPO}:Q8_0:4bit",),
                                   pytest.param((f"{REPO}:Q8_0", "--bits", "4"), marks=pytest.mark.slow)])
def test_a_file_that_is_absent_comes_as_it_is_and_is_rounded_on_load(hub: Hub, user: HubUser, words: tuple[str, ...]) -> None:
    name = words[0].removesuffix(":4bit")
    said = user.run("run", words[0], *FEW, *words[1:]).refused(3)
    assert said.endswith(f"hint: effllm pull {name}") and not hub.requests
    planned = user.run("plan", *words, "--no-probe", "--json").json
    assert planned["pull"]["bits_on_load"] == "4bit" and planned["pull"]["bytes_total"] == len(hub.repos[REPO].files["fable-Q8_0.gguf"])
    ran = user.run("run", words[0], *FEW, *words[1:], answers="y\n")
    assert ran.code == 0 and ran.out.strip() and "on load   quantized to 4bit" in ran.err, ran.err
    assert ran.err.count("quantized on load to 4.") == 1 and "quantized already" not in ran.err
    assert list(user.snapshot(REPO, hub.repos[REPO].commit).iterdir())[0].name == "fable-Q8_0.gguf"
    hub.forget()
    again = user.run("run", words[0], *FEW, *words[1:])
    assert again.code == 0 and again.out.strip() == ran.out.strip().removeprefix("> ") and not hub.requests
    assert "quantized on load to 4." in again.err
    assert user.run("plan", *words, "--no-probe", "--json").json["weights_bytes"] == pytest.approx(planned["weights_bytes"], rel=0.02)


def test_a_file_is_pulled_without_a_format(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    said = user.run("pull", f"{REPO}:Q8_0:4bit").refused(2)
    assert f"effllm pull {REPO}:Q8_0; effllm run {REPO}:Q8_0:4bit quantizes it on load" in said and not hub.requests
    monkeypatch.setenv("EFFLLM_BITS", "4")
    pulled = user.run("pull", f"{REPO}:Q8_0")
    assert pulled.code == 0 and "a single file is pulled without quantizing: bits of EFFLLM_BITS is ignored" in pulled.err
    assert "without quantizing" in user.run("pull", f"{REPO}:F16", "--bits", "4").refused(2), "what is typed is an error"


def test_what_does_not_fit_as_it_is_stored_is_judged_as_it_will_run(hub: Hub, user: HubUser) -> None:
    wide, small = (user.run("plan", f"{REPO}:F16{bits}", "--no-probe", "--json").json for bits in ("", ":2bit"))
    assert small["weights_bytes"] < wide["weights_bytes"] / 3
    assert small["pull"]["memory"]["weights_bytes"] == small["weights_bytes"], "what the offer draws is what the run will take"


@pytest.mark.parametrize("name", ["awq", "gptq 4, act order"])
def test_bits_of_a_variable_give_way_to_a_repository_that_is_quantized(
        hub: Hub, user: HubUser, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "m", name)
    repo = hub.add("org/codes", tmp_path / "m")
    monkeypatch.setenv("EFFLLM_BITS", "4")
    planned = user.run("plan", "org/codes", "--no-probe", "--json")
    assert planned.json["pull"]["bits"] is None and f"org/codes {LEFT_OUT}" in planned.err
    ran = user.run("run", "org/codes", *FEW, "-y")
    assert ran.code == 0 and ran.err.count(LEFT_OUT) == 1 and "quantized on load" not in ran.err, ran.err
    assert (user.snapshot("org/codes", repo.commit) / "model.safetensors").exists()
    assert {path.name for path in (user.home / "data" / "effllm").iterdir()} == {"licences"}, "nothing was made of it"
    again = user.run("run", "org/codes", *FEW)
    assert again.code == 0 and again.out == ran.out and again.err.count(LEFT_OUT) == 1
    assert user.run("rm", "org/codes", "-y").code == 0
    typed = user.run("run", "org/codes", *FEW, "-y", "--bits", "4")
    assert typed.code == 0 and LEFT_OUT not in typed.err
    assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable", "org/codes:4bit"]


def test_bits_of_a_variable_are_for_pull_what_they_are_for_run(hub: Hub, user: HubUser, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "m", "awq")
    hub.add("org/codes", tmp_path / "m")
    hub.add("org/plain", FABLE)
    monkeypatch.setenv("EFFLLM_BITS", "4")
    codes, plain = user.run("pull", "org/codes"), user.run("pull", "org/plain")
    assert codes.code == plain.code == 0 and LEFT_OUT in codes.err and LEFT_OUT not in plain.err
    assert [model["name"] for model in user.run("list", "--json").json["models"]] == ["fable", "org/plain:4bit", "org/codes"]


@pytest.mark.slow
def test_bits_of_a_variable_round_a_file_of_16_bits_alone(hub: Hub, user: HubUser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFLLM_BITS", "4")
    for file, rounded in (("Q8_0", False), ("F16", True)):
        for present in (False, True):
            ran = user.run("run", f"{REPO}:{file}", *FEW, "-y")
            assert ran.code == 0 and ("quantized on load to 4." in ran.err) is rounded, (file, present, ran.err)
            assert ran.err.count(LEFT_OUT) == (not rounded)


@pytest.mark.parametrize(("kinds", "expected"), [(("v",), False), (("q", "k", "v", "o", "gate", "up", "down"), True)])
def test_a_file_is_quantized_where_most_of_it_is(kinds: tuple[str, ...], expected: bool) -> None:
    """Types follow from a file's length, which a writer's padding changes a little."""

    def formats(role: str, rule: TensorRule) -> QuantSpec | None:
        return QuantSpec(8, 32, "block") if base_role(role) in kinds and len(rule.shape) == 2 else None

    config = read_config(FABLE)
    assert _is_quantized(ExpectedStore(config, formats=formats), None) is expected
