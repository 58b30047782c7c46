"""What a pull of a GGUF file reports beforehand, from the file's header: memory, speed, and whether it will run at all."""

from pathlib import Path

import gguf
import pytest
from gguf_samples import add_fable_tokenizer, write_model
from hub_server import Hub
from hub_user import FABLE, HubUser

from effllm.offload.gguf_header import read_gguf_keys
from effllm.offload.safetensors_header import CheckpointError
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.pull.remote_gguf_header import HEAD_NBYTES, assign_types

REPO, FILE = "org/name", "fable.gguf"


@pytest.fixture
def user(tmp_path: Path, hub: Hub) -> HubUser:
    return HubUser(tmp_path / "home", hub.endpoint)


def stated(kind: int | None) -> object:
    """A change of fable's file: its tokenizer, and before that the type that it says it mostly has."""

    def change(writer: gguf.GGUFWriter) -> None:
        if kind is not None:
            writer.add_file_type(kind)
        add_fable_tokenizer(writer)

    return change


@pytest.mark.parametrize(("kind", "number", "per_file"), [("Q8_0", 7, 0), ("Q4_K", None, 0), ("Q6_K", 18, 0), ("F16", 1, 0), ("Q4_1", 3, 0),
                                                          ("Q8_0", None, 20)])
def test_the_memory_is_that_of_the_run_that_follows(hub: Hub, user: HubUser, tmp_path: Path, kind: str, number: int | None,
                                                    per_file: int) -> None:
    """Blocks that kernels multiply, 16 bits, and a file in parts."""
    (tmp_path / "made").mkdir()
    write_model(FABLE, tmp_path / "made" / FILE, kind, change=stated(number), per_file=per_file)
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    hub.add(REPO, files=files)
    first = min(files)
    plan = user.run("pull", f"{REPO}:{first}", "--dry-run", "--json").json
    assert plan["bytes_total"] == sum(map(len, files.values())) and sum(hub.served.values()) <= 300_000
    assert plan["bytes_read_for_plan"] <= 300_000
    prepared = prepare(tmp_path / "made" / first, EngineOptions())
    memory, placement = plan["memory"], prepared.placement
    assert memory["weights_bytes"] == pytest.approx(placement.weights_bytes, rel=0.1)
    assert memory["kv_bytes"] == placement.kv_bytes and memory["context"] == placement.ctx
    assert memory["layers"] == list(placement.tiers)
    prepared.store.close()
    said = user.run("pull", f"{REPO}:{first}", "--dry-run").err
    assert "memory    █" in said and "speed" in said


def test_an_architecture_that_is_not_supported_is_refused_before_the_download(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / FILE, "mamba9")
    writer.add_block_count(2)
    writer.add_token_list(["x" * 20] * 20_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    hub.add(REPO, files={FILE: (tmp_path / FILE).read_bytes()})
    said = user.run("pull", f"{REPO}:{FILE}").refused(1)
    assert "mamba9" in said and "docs/models.md has all families" in said and hub.served[FILE] <= HEAD_NBYTES and not user.blobs(REPO)


def test_a_head_that_does_not_tell_is_said_in_words(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    """The vocabulary comes first here; another file is none of this format at all."""
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_token_list([f"token {i}" for i in range(30_000)])
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    hub.add(REPO, files={FILE: (tmp_path / FILE).read_bytes(), "junk.gguf": b"g" * 1000})
    for name, why in ((FILE, "does not state its shape before its vocabulary"), ("junk.gguf", "is not a GGUF file")):
        ran = user.run("pull", f"{REPO}:{name}")
        assert ran.code == 0 and "memory and speed are not known: " in ran.err and why in ran.err, ran.err
    plan = user.run("pull", f"{REPO}:{FILE}", "--dry-run", "--json").json
    assert plan["memory"] is None and plan["tokens_per_s_estimate"] is None and "its files are here" in plan["speed_unknown"]


def test_keys_as_far_as_they_are_here(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_block_count(7)
    writer.add_token_list(["a", "bc", "def"])
    writer.add_string("general.name", "after")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    raw = (tmp_path / FILE).read_bytes()
    keys, lengths = read_gguf_keys(Path(FILE), raw, len(raw))
    assert keys["llama.block_count"] == 7 and keys["tokenizer.ggml.tokens"] == ["a", "bc", "def"] and keys["general.name"] == "after"
    seen = []
    for end in range(24, len(raw)):  # wherever the beginning ends, what it holds is told and nothing else
        found, counted = read_gguf_keys(Path(FILE), raw[:end], len(raw))
        assert found.items() <= keys.items() and counted.items() <= lengths.items()
        seen.append(len(found) + len(counted))
    assert seen == sorted(seen) and lengths == {"tokenizer.ggml.tokens": 3} and seen[0] == 0
    with pytest.raises(CheckpointError, match="cut short"):
        read_gguf_keys(Path(FILE), raw[:60], 61)
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf_keys(Path(FILE), b"GGUF" + (3).to_bytes(4, "big") + raw[8:], len(raw))


def test_types_follow_from_the_length() -> None:
    matrices = [("embed", (1000, 256)), *[(kind, (256, 256)) for kind in ("q", "v", "gate", "down")]]
    weights = 1000 * 256 + 4 * 256 * 256
    assert set(assign_types(matrices, weights * 2)) == {"F16"} and set(assign_types(matrices, weights * 18 // 32)) == {"Q4_K"}
    assert assign_types(matrices, weights // 5) is None and set(assign_types(matrices, weights * 17 // 32)) == {"IQ4_XS"}
    mixed = assign_types(matrices, weights * 18 // 32 + 1000 * 256 // 8 + 256 * 256 // 8)
    assert mixed == ["Q5_K", "Q4_K", "Q4_K", "Q4_K", "Q5_K"], "the table first, then what writers favour"
    assert assign_types([("q", (256, 96))], 256 * 102) == ["Q8_0"] and assign_types([("q", (256, 24))], 256 * 48) == ["F16"]


def test_what_a_file_ranks_by_comes_and_goes_with_it(hub: Hub, user: HubUser, tmp_path: Path) -> None:
    """It lies in the same folder, and is no model by itself."""
    write_model(FABLE, tmp_path / FILE, "Q8_0", change=stated(7))
    hub.add(REPO, files={FILE: (tmp_path / FILE).read_bytes(), "projector.safetensors": b"x" * 64})
    assert "holds only GGUF files" in user.run("pull", REPO).refused(3)
    assert user.run("pull", f"{REPO}:{FILE}").code == 0
    (held,) = (user.blobs(REPO)[name] for name in user.blobs(REPO) if user.blobs(REPO)[name].stat().st_size == 64)
    assert held.read_bytes() == b"x" * 64 and user.run("verify", f"{REPO}:{FILE}").code == 0
    assert user.run("rm", f"{REPO}:{FILE}", answers="y").code == 0 and not user.blobs(REPO)
