"""`effllm eval`: which settings a reference shares with the measured run, and what is refused before either starts."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import CliRun

import effllm

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
SAMPLE = Path(effllm.__path__[0]) / "runtime" / "calibration.txt"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts") / "text.txt"
    made.write_text(SAMPLE.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "fable-4bit"
    ran = CliRun("quantize", FABLE, "-o", folder, "--spec", "affine4:64", "--tensor-type", "v_proj=affine4:64", "--no-kv-profile")
    assert ran.code == 0
    return folder


@pytest.mark.parametrize("words", (("kld", "--kv", "4bit"), pytest.param(
        ("recall", "--kv", "4bit", "--samples", "1"), marks=pytest.mark.slow)))
def test_exact_ends_of_a_packed_cache_are_no_matter_of_the_reference(words: tuple[str, ...], text: Path) -> None:
    ran = CliRun("eval", words[0], FABLE, "--text", text, "-c", "512", *words[1:], "--kv-sink", "8", "--kv-window", "16", "--strict")
    assert ran.code == 0 and "has no effect" not in ran.err, ran.err


@pytest.mark.parametrize("words", (("kld",), pytest.param(("recall", "--samples", "1"), marks=pytest.mark.slow)))
def test_what_a_cache_would_pack_is_not_said_of_one_that_packs_nothing(words: tuple[str, ...], text: Path) -> None:
    for kv, packed in (("16bit", False), ("4bit", True)):
        ran = CliRun("eval", words[0], FABLE, "--text", text, "-c", "512", *words[1:], "--kv", kv)
        assert ran.code == 0 and "bits per value overall" in ran.out and ("packed" in ran.out) == packed, (ran.out, ran.err)


def test_a_kernel_of_low_bit_weights_is_no_matter_of_a_reference_with_other_weights(text: Path, quantized: Path) -> None:
    words = ("eval", "kld", quantized, "--text", text, "-c", "128", "--kernel", "lut", "--strict", "--against")
    ran = CliRun(*words, FABLE)
    assert ran.code == 0 and "has no effect" not in ran.err, ran.err
    assert f"reference       {FABLE}, its cache at 32bit\n" in ran.out, "the report says what it held the model against"


def test_strict_still_means_the_run_that_is_measured_and_what_is_known_of_the_reference(text: Path, tmp_path: Path) -> None:
    words = ("eval", "kld", FABLE, "--text", text, "-c", "128", "--strict")
    ran = CliRun(*words, "--kv-sink", "8")
    assert ran.code == 2 and "--kv-sink has no effect: at --kv 16bit" in ran.err
    odd = tmp_path / "odd"
    shutil.copytree(FABLE, odd)
    (odd / "config.json").write_text(json.dumps({**json.loads((FABLE / "config.json").read_text()), "tilted_attention": True}))
    assert CliRun(*words[:-1], "--against", odd).code == 0
    ran = CliRun(*words, "--against", odd)
    assert ran.code == 2 and "tilted_attention" in ran.err


def test_a_context_of_the_settings_that_the_model_cannot_have_gives_way_to_the_usual_window(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(SAMPLE.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    words = ("eval", "ppl", FABLE, "--text", tmp_path / "text.txt", "--json")
    usual = CliRun(*words)
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "256")
    assert CliRun(*words).out != usual.out
    monkeypatch.setenv("EFFLLM_CTX_SIZE", "99999")
    ran = CliRun(*words)
    assert usual.code == ran.code == 0 and ran.out == usual.out
    assert ran.err.count("a context of 99999 is more") == 1 and "ignored" in ran.err
    refused = CliRun(*words, "--strict")
    assert refused.code == 2 and "--strict refuses" in refused.err


def test_models_of_other_tokenizers_are_not_compared(tmp_path: Path, text: Path) -> None:
    """As many tokens, of which two have changed places; a name that a fine-tune has given one is no difference, nor is another format."""
    other, named = (shutil.copytree(FABLE, tmp_path / name) for name in ("other", "named"))
    raw = (FABLE / "tokenizer.json").read_text(encoding="utf-8")
    content = json.loads(raw)
    one, two = (next(token for token, number in content["model"]["vocab"].items() if number == own) for own in (4094, 4095))
    content["model"]["vocab"] |= {one: 4095, two: 4094}
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    words = ("eval", "kld", FABLE, "--text", text, "-c", "128", "--against")
    ran = CliRun(*words, other)
    assert ran.code == 2 and f"{other} has another tokenizer than {FABLE}: token 4094 is {two!r} and {one!r}" in ran.err
    special = json.loads(raw)["added_tokens"][-1]["content"]
    (named / "tokenizer.json").write_text(raw.replace(json.dumps(special), '"<|another|>"'), encoding="utf-8")
    (named / "tokenizer_config.json").unlink()
    assert CliRun(*words, named).code == 0
    assert CliRun("export", FABLE, "-o", tmp_path / "m.gguf").code == 0 and CliRun(*words, tmp_path / "m.gguf").code == 0
