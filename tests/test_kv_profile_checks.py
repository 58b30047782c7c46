"""What a profile's checks rest on: enough tokens, and passes that were run; unknown results are reported as unknown."""

import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import effllm
from effllm import EffllmError, UsageError
from effllm.cli.app import main
from effllm.cli.environment import Environment
from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_bits import SIDES
from effllm.quant.kv_sink_split import SINK_SPLITS
from effllm.runtime.calibrate import built_in_text
from effllm.runtime.config import read_config
from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.events import Notice
from effllm.runtime.kv import kv_profile_run
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.kv.kv_profile_file import load_profile
from effllm.runtime.kv.kv_profile_run import profile_report, record_profile
from effllm.runtime.kv.kv_validation import MIN_SCORED, held_out_window, validate_auto
from effllm.runtime.measuring.evaluate import windows
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
CTX = 640


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    *_, opened = open_engine(FABLE, EngineOptions(device="cpu", kv="8bit", ctx=CTX, chunk=CTX, exact=True))
    yield opened
    opened.close()


def plain(costs: tuple = (None,) * 6) -> Profile:
    """The same bits everywhere: 4 do not keep fable's answers, 8 do."""
    return Profile((KVBasis.plain(2, 64),) * 6, costs, "w", 1024)


def test_the_longest_window_is_held_back_and_not_what_is_left_behind_it() -> None:
    def held(*lengths: int) -> int | None:
        return held_out_window([range(length) for length in lengths], 320)

    assert held(1024, 1024, 1024, 326) == held(1024, 1024, 1024, 1000) == 2
    assert held(1024, 1024) == held(1024, 320 + MIN_SCORED) == 1
    assert held() is held(1024) is held(1024, 326) is held(1024, 319 + MIN_SCORED) is held(400, 400, 400) is None


def test_a_handful_of_tokens_decides_nothing(tmp_path: Path) -> None:
    """Six tokens of the last window were taken for a check: they let --kv auto pack, or said that nothing may be."""
    folder, tokenizer = shutil.copytree(FABLE, tmp_path / "fable"), Tokenizer.load(FABLE, read_config(FABLE))
    (tmp_path / "text.txt").write_text(tokenizer.decode(tokenizer.encode(built_in_text())[: 1024 + 326]), encoding="utf-8")
    world = Environment(io.StringIO(), io.StringIO(), io.StringIO(), os.environ)
    assert main(["eval", "kv-profile", str(folder), "--text", str(tmp_path / "text.txt")], world) == 0, world.stderr.getvalue()
    assert "16bit: nothing was checked" in world.stdout.getvalue()
    assert "text.txt has no second window of 576 tokens (a longer --text)" in world.stderr.getvalue()
    made = load_profile(folder, read_config(folder))
    assert made.checks == () and made.auto is None and made.tokens > 1024


@pytest.mark.slow
def test_passes_that_there_was_no_time_for_are_told_and_eight_bits_are_tried_before_it_is_said_that_none_will_do(engine: Engine) -> None:
    window = windows(Tokenizer.load(FABLE, engine.config), built_in_text()[9000:], CTX, "the sample")[3]
    *events, made = validate_auto(engine, plain(), window, until=0.0)
    assert made.auto == 8 and len(made.checks) == 2
    assert [event.text for event in events if isinstance(event, Notice)] == [
        "validation stopped at its time limit, after 2 of 3 passes (more --seconds)"]
    *events, made = validate_auto(engine, replace(plain(), ends=(0, 192)), window, until=0.0)
    assert made.ends == SINK_SPLITS[0] and any("no time to check 0 first and 192 newest tokens" in event.text for event in events
                                        if isinstance(event, Notice))
    *events, made = validate_auto(engine, plain(), window)
    assert len(made.checks) == 4 and not any(isinstance(event, Notice) for event in events)


def test_a_profile_of_layers_that_read_no_packed_page_is_reported() -> None:
    """Layers whose window is shorter than what stays exact cost nothing at any bits: that ended with a division by zero."""
    nothing = np.zeros((2, len(SIDES)))
    facts = profile_report(plain(((nothing, nothing), *[None] * 5)), FABLE)
    assert facts["presets"][4][2] is None
    assert profile_report(plain(((nothing + 1, nothing), *[None] * 5)), FABLE)["presets"][4][2] == 1


def test_heads_that_no_record_takes_are_reported_without_a_flag_that_the_command_lacks(tmp_path: Path) -> None:
    folder = shutil.copytree(FABLE, tmp_path / "fable")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 12}))
    with pytest.raises(UsageError, match="this model has 12") as refused:
        list(record_profile(folder, built_in_text()[:9000]))
    assert "--" not in refused.value.hint


def test_a_folder_that_takes_no_profile_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_profile_run, "open_prepared", lambda *_: pytest.fail("it was loaded"))
    folder = shutil.copytree(FABLE, tmp_path / "fable")
    there = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system"))
                        if str(path).endswith(".partial") else there(path, *more, **named))
    with pytest.raises(EffllmError, match="kv_profile.json cannot be written: Read-only file system"):
        list(record_profile(folder, built_in_text()[:9000]))
    assert not [path for path in folder.iterdir() if "kv_profile" in path.name]


@pytest.mark.parametrize(("bits", "said"), [
    (0x7F80, r"tensor model\.layers\.1\.self_attn\.v_proj\.weight holds NaN or infinity"),
    (0x5F80, "keys or values of layer 1 are too large to be squared on this text")])  # 2^64
@pytest.mark.filterwarnings("error")
def test_weights_that_make_no_numbers_are_named(tmp_path: Path, bits: int, said: str) -> None:
    """An infinity ended as one of the internal errors of NumPy, behind its warnings."""
    folder = shutil.copytree(FABLE, tmp_path / "fable")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + size])["model.layers.1.self_attn.v_proj.weight"]["data_offsets"]
    np.frombuffer(raw, "<u2", (end - begin) // 2, 8 + size + begin)[5] = bits
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(EffllmError, match=said) as refused:
        list(record_profile(folder, built_in_text()[:9000]))
    assert refused.value.hint
