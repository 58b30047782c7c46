"""Advice for runs that do not fit: of weights that cannot be streamed from disk, of a cache that can be moved there."""

import re
from contextlib import closing
from pathlib import Path

import pytest
from gguf_samples import FABLE

from effllm import DoesNotFit, UsageError
from effllm.kernels import warm
from effllm.offload import hardware
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.prepare import EngineOptions, Prepared, prepare


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose weights are converted on load."""
    file = tmp_path_factory.mktemp("whole") / "d.gguf"
    list(export_gguf(FABLE, file, "Q8_0", "a name"))
    return file


@pytest.fixture(autouse=True)
def of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are held against each other are of a process that holds as much: the system may take some of it in between."""
    held = hardware.rss()
    monkeypatch.setattr(hardware, "rss", lambda: held)


def planned(model: Path, **options: object) -> Prepared:
    prepared = prepare(model, EngineOptions(**{"device": "cpu", "ctx": 2048, **options}))
    prepared.store.close()
    return prepared


def refused(model: Path, **options: object) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        planned(model, **options)
    return caught.value


@pytest.mark.parametrize("options", ({"kv": "3bit", "kv_ram": "2M"}, {"kv_ram": "6Mi", "disk": "100K"}), ids=("memory", "disk"))
def test_where_the_cache_has_too_little_room_that_is_what_is_advised(whole: Path, options: dict[str, str]) -> None:
    error, streams = refused(whole, **options), refused(FABLE, **options)
    assert (error.message, error.hint) == (streams.message, streams.hint)
    flag, size = re.search(r"--(kv-ram|disk) (\d+Mi)", error.hint).groups()
    assert planned(whole, **options | {flag.replace("-", "_"): size})


def test_where_weights_have_too_little_the_least_memory_is_named_and_what_streams(whole: Path) -> None:
    """A folder that streams is advised only where memory holds what is no weight: it would be refused as well."""
    error = refused(whole, ram="40Mi")
    assert "converted on load" in error.message and "effllm quantize" not in error.hint
    ram, = re.findall(r"it takes --ram (\d+)Mi, or a smaller model$", error.hint)
    assert planned(whole, ram=f"{ram}Mi")
    assert "; effllm quantize " in refused(whole, ram=f"{int(ram) - 4}Mi").hint


@pytest.mark.parametrize("streams", (False, True), ids=("whole", "streams"))
def test_a_shorter_context_is_named_with_the_memory_for_the_one_that_was_asked(whole: Path, streams: bool) -> None:
    model = FABLE if streams else whole
    most = int(re.search(r"--ram (\d+)Mi", refused(model, ram="40Mi").hint)[1])
    hint = refused(model, ram=f"{most - 4}Mi").hint
    ctx, ram = map(int, re.match(r"-c (\d+) fits; 2048 tokens take --ram (\d+)Mi", hint).groups())
    assert planned(model, ram=f"{most - 4}Mi", ctx=ctx).placement.ctx == ctx and abs(ram - most) <= 1
    assert ("effllm quantize" in hint) != streams


@pytest.mark.parametrize("streams", (False, True), ids=("whole", "streams"))
def test_a_shorter_context_is_named_as_it_would_be_planned(whole: Path, streams: bool) -> None:
    """Passes over a short context take less memory than those over the one that was asked for: none was said to be short enough."""
    model = FABLE if streams else whole
    least = int(re.search(r"--ram (\d+)Mi", refused(model, ram="40Mi", ctx=128).hint)[1])
    hint = refused(model, ram=f"{least + 2}Mi").hint
    ctx, ram = map(int, re.match(r"-c (\d+) fits; 2048 tokens take --ram (\d+)Mi", hint).groups())
    assert 128 <= ctx < 2048 and planned(model, ram=f"{least + 2}Mi", ctx=ctx)
    assert planned(model, ram=f"{ram}Mi")
    assert refused(model, ram=f"{least + 1}Mi", ctx=ctx + 128), "a mebibyte is for a program that is larger the next time"


@pytest.mark.parametrize("streams", (False, True), ids=("whole", "streams"))
def test_a_context_left_open_shrinks_to_the_longest_that_can_be_asked_for(whole: Path, streams: bool) -> None:
    """Exact tokens and passes were sized for the model's context: budgets for a short one were refused, or held less than smaller ones."""
    model, ctx = FABLE if streams else whole, 0
    least = int(re.search(r"--ram (\d+)Mi", refused(model, ram="40Mi", ctx=None).hint)[1])
    assert least == int(re.search(r"--ram (\d+)Mi", refused(model, ram="40Mi", ctx=128).hint)[1])
    for ram in range(least, least + 9):
        prepared = planned(model, ram=f"{ram}Mi", ctx=None)
        before, ctx = ctx, prepared.placement.ctx
        assert before <= ctx < 2048 and prepared.placement.total_bytes <= ram << 20
        assert any(note.startswith(f"context {ctx} of the model's 2048: ") for note in prepared.placement.notes)
        if ctx < 512:
            assert refused(model, ram=f"{ram}Mi", ctx=ctx + 128)


@pytest.mark.parametrize("streams", (False, True), ids=("whole", "streams"))
def test_a_context_that_shrank_is_run(streams: bool, whole: Path) -> None:
    model = FABLE if streams else whole
    least = int(re.search(r"--ram (\d+)Mi", refused(model, ram="40Mi", ctx=None).hint)[1])
    *notices, engine = open_engine(model, EngineOptions(device="cpu", ram=f"{least + 2}Mi"))
    with closing(engine):
        assert engine.n_ctx in (128, 256) and any(f"context {engine.n_ctx} of the model's 2048" in str(notice) for notice in notices)
        for _ in engine.prefill([5] * (engine.n_ctx - 1)):
            pass
        assert engine.num_prefilled_tokens == engine.n_ctx - 1


def test_what_is_wrong_with_a_request_is_reported_before_kernels_are_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes tens of seconds. Memory is weighed with what is compiled, so that refusal comes after it."""
    compiled = []
    monkeypatch.setattr(warm, "is_cold", lambda kinds=(): True)
    monkeypatch.setattr(warm, "warm", lambda kinds: compiled.append(kinds) or iter(()))
    with pytest.raises(UsageError, match="more than the 2048 positions"):
        list(open_engine(FABLE, EngineOptions(device="cpu", ctx=5000)))
    assert not compiled
    with pytest.raises(DoesNotFit):
        list(open_engine(FABLE, EngineOptions(device="cpu", ctx=2048, ram="30M")))
    assert compiled


def test_what_memory_decides_is_not_refused_before_kernels_are_weighed_with_it() -> None:
    """Nor kept from being compiled for good: with a cold cache an allowance is planned in their place."""
    least = refused(FABLE, ctx=512, ram="30M").required_nbytes
    streamed = EngineOptions(device="cpu", ctx=512, ram=f"{(least >> 20) + 3}Mi", strict=True)
    with pytest.raises(UsageError, match="--strict"):
        prepare(FABLE, streamed)
    prepare(FABLE, streamed, dry_run=True).store.close()
