"""Conversions that end, by a kill or a full disk, after the result got its name: the model is known, and the same command resumes."""

import os
import signal
from pathlib import Path

import pytest
from hub_user import HubUser
from lora_adapters import RANK, adapter, peft, random

import effllm
from effllm.offload.folder_writer import JOURNAL, partial_folder
from effllm.runtime.config import read_config

FABLE = Path(effllm.__file__).parent / "models" / "fable"

# A command that is killed when it would take away the journal of a folder that has its name.
KILLED = """
import os, signal, sys
from effllm.cli.app import main
real = os.unlink
def unlink(path, *args, **more):
    if os.path.basename(path) == "journal":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, *args, **more)
os.unlink = unlink
main(sys.argv[1:])
"""


def made(user: HubUser, out: Path, *more: str) -> tuple[str, ...]:
    return ("quantize", "fable", "-o", str(out), "--bits", "4", "--no-kv-profile", *more)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(user: HubUser) -> list[str]:
    return [each["name"] for each in user.run("list", "--json").json["models"]]


def test_a_model_that_was_named_before_a_kill_is_listed_and_resumed(user: HubUser, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for more in ((), ("--force",)):
        ran = user.start_python("-c", KILLED, *made(user, out, *more))
        assert ran.wait(60) == -signal.SIGKILL and (out / JOURNAL).exists(), ran.stderr.read()
        assert partial_folder(out).exists() == bool(more), "what is replaced lies aside"
        assert listed(user).count(str(out)) == 1 and user.run("verify", out).code == 0
        other = user.run("quantize", "fable", "-o", out, "--bits", "3")
        assert "exists (codebook4:16, 4.75 bits per weight), not codebook3:16" in other.refused(2), "another one is not this one"
        before = contents(out)
        again = user.run(*made(user, out, *more))
        assert again.code == 0 and f"{out} is complete: an earlier run was stopped" in again.err
        del before[JOURNAL]
        assert contents(out) == before and not partial_folder(out).exists(), "nothing was made again, and nothing lies about"
        for stream in (ran.stdout, ran.stderr):
            stream.close()
    assert "exists" in user.run(*made(user, out)).refused(2)


def test_a_disk_that_fails_after_the_name_leaves_a_model(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "out", os.unlink

    def fails(path: object, *args: object, **more: object) -> None:
        if os.path.basename(path) == JOURNAL:
            raise OSError(28, "No space left on device", str(path))
        real(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fails)
        assert "run the same command again" in user.run(*made(user, out)).refused(4)
    assert listed(user).count(str(out)) == 1
    assert "is complete" in user.run(*made(user, out)).err and not (out / JOURNAL).exists()


def test_what_was_promised_and_never_made_is_not_listed(user: HubUser, tmp_path: Path) -> None:
    out = tmp_path / "out"
    user.run(*made(user, out, "--tensor-type", "nonsense=9bit")).refused(2)
    assert str(out) not in listed(user)
    assert user.run(*made(user, tmp_path / "other")).code == 0
    assert str(out) not in (user.home / "data" / "effllm" / "folders.json").read_text()


@pytest.mark.parametrize("argv", [
    ("export", "fable", "--lora", "{tuned}"), ("export", "fable", "--format", "compressed-tensors", "--type", "INT8"),
    ("quantize", "fable", "--bundle-ffn", "--gate-sparsity", "0.5", "--no-kv-profile"),
    pytest.param(("quantize", "fable", "--target", "5bpw", "--no-kv-profile"), marks=pytest.mark.slow)])
def test_whatever_makes_a_folder_does_what_was_left(user: HubUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    argv: tuple[str, ...]) -> None:
    out, real, width = tmp_path / "out", os.unlink, read_config(FABLE).hidden_size
    tuned = adapter(tmp_path / "tuned", peft({"model.layers.0.self_attn.q_proj": (random(RANK, width), random(width, RANK))}))
    line = (*(each.format(tuned=tuned) for each in argv), "-o", str(out))

    def fails(path: object, *args: object, **more: object) -> None:
        if os.path.basename(path) == JOURNAL:
            raise OSError(5, "Input/output error", str(path))
        real(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fails)
        assert user.run(*line).code == 1 and (out / JOURNAL).exists()
    before = contents(out)
    again = user.run(*line)
    assert again.code == 0 and f"{out} is complete: an earlier run was stopped" in again.err
    del before[JOURNAL]
    assert contents(out) == before, "nothing was made again, and nothing lies about"
    assert f"{out} exists" in user.run(*line).refused(2)
