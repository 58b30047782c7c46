"""Neuron bundles: the layout, the folder, and the bits of a run that reads neurons from disk when they are active."""

import ctypes
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from bundle_models import CASES, RELU, bundled, folders, found, resident, windowed
from conversions import options as conversion
from conversions import run as convert_run
from family_models import Case
from gguf_samples import FABLE, fable_gguf
from hypothesis import given
from hypothesis import strategies as st
from saved_models import saved

from effllm import UsageError
from effllm.kernels import warm
from effllm.kernels.cpu.bundles import MAX_LANES
from effllm.offload.checkpoint import CheckpointError, TensorStore
from effllm.offload.direct_io import Interrupted
from effllm.offload.neuron_pager import MOST_TOKENS, BundlePlace, NeuronPager, WindowStats
from effllm.offload.placement import Residency
from effllm.offload.shards import Planned, plan_files
from effllm.offload.streaming_pager import StreamingPager
from effllm.quant.bundles import BLOCK, FFN_MULTIPLE, BundleLayout, bundle_name
from effllm.runtime.conversion.bundle_ffn import bundle
from effllm.runtime.library.verify import verify
from effllm.runtime.planning.needed_kernels import folder_kinds
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.stores.container import FILE, read_container
from effllm.runtime.tokenizer import Tokenizer

__all__ = ["folders"]  # a fixture
MINUTE = 60.0

# -- layout ------------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 300), st.booleans(), st.sampled_from(["f32", "f16", "bf16"]))
def test_packing_loses_nothing_and_fills_blocks(ffn: int, sixteenths: int, has_up: bool, scheme: str) -> None:
    layout = BundleLayout(scheme, 16 * sixteenths, has_up)
    assert layout.stride >= layout.used == (1 + has_up) * 16 * sixteenths * layout.item
    assert layout.stride % BLOCK == 0 or BLOCK % layout.stride == 0
    assert layout.stride < 2 * max(layout.used, BLOCK)
    rng = np.random.default_rng(ffn)
    kind = np.float32 if scheme == "f32" else np.uint16
    up = rng.integers(1, 60_000, (ffn, layout.width)).astype(kind) if has_up else None
    down = rng.integers(1, 60_000, (layout.width, ffn)).astype(kind)
    packed = layout.pack(up, down)
    assert packed.shape == layout.shape(ffn)
    again_up, again_down = layout.unpack(packed)
    assert np.array_equal(again_down, down)
    assert again_up is None if up is None else np.array_equal(again_up, up)


def test_a_folder_holds_every_neuron_once_and_verifies(folders) -> None:
    model, out = folders("llama, bf16")
    container = read_container(out)
    name = bundle_name("model.layers.1.mlp.down_proj.weight")
    assert name in container.tensors
    assert "model.layers.1.mlp.up_proj.weight" not in container.tensors
    assert "model.layers.1.mlp.gate_proj.weight" in container.tensors
    assert not container.is_low_bit
    prepared = prepare(out, EngineOptions(device="cpu"))
    with prepared.store as store:
        info = store.tensors[name]
        assert info.offset % BLOCK == 0
        layout = BundleLayout("bf16", 64, True)
        up, down = layout.unpack(store.read(info).view(np.uint16).reshape(layout.shape(192)))
    with prepare(model, EngineOptions(device="cpu")).store as plain:
        for stored, role in ((up, "up"), (down, "down")):
            original = plain.read(plain.tensors[f"model.layers.1.mlp.{role}_proj.weight"]).view(np.uint16).reshape(stored.shape)
            assert np.array_equal(stored, original)
    assert list(verify(out))


def test_a_bundled_folder_runs_on_every_instruction_set() -> None:
    assert FFN_MULTIPLE % MAX_LANES == 0 and FFN_MULTIPLE % (4 * 16) == 0  # four registers of 16 floats: the widest there are


# -- bits --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_in_memory_bundles_give_the_bits_of_whole_matrices(name: str, folders) -> None:
    model, out = folders(name)
    assert np.array_equal(found(resident(out)), found(resident(model)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slots", (3, 20, 10_000))
def test_neurons_from_the_disk_give_the_bits_of_whole_matrices(name: str, slots: int, folders) -> None:
    model, out = folders(name)
    engine = windowed(out, slots)
    made = found(engine)
    assert engine.model.pager.traffic.reads > 0
    assert np.array_equal(made, found(resident(model)))


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("keep", (0, 2))
@pytest.mark.parametrize("direct", (True, False), ids=("direct", "buffered"))
def test_what_else_streams_and_how_changes_nothing(threads: int, keep: int, direct: bool, folders) -> None:
    model, out = folders("llama, bf16")
    assert np.array_equal(found(windowed(out, 20, keep, direct, threads=threads)), found(resident(model, threads=1)))


# -- the window --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tensor of 96 records of 4096 bytes, and one of 100 records of 1024."""
    rng = np.random.default_rng(2)
    arrays = {"large": rng.integers(0, 256, (96, 4096), dtype=np.uint8), "small": rng.integers(0, 256, (100, 1024), dtype=np.uint8)}
    (plan,) = plan_files([[Planned(name, "U8", array.shape, array.nbytes)] for name, array in arrays.items()], {})
    folder = tmp_path_factory.mktemp("records")
    with (folder / plan.name).open("wb") as out:
        out.write(plan.head)
        for name, array in arrays.items():
            out.seek(plan.places[name])
            out.write(array.data)
    return folder


class Opened:
    """A pager over one tensor of `records`, and what it should hold."""

    def __init__(self, folder: Path, name: str, slots: int, **more: object) -> None:
        self.store = TensorStore.open(folder)
        info = self.store.tensors[name]
        self.content = self.store.read(info).reshape(info.shape)
        place = BundlePlace(info.file, info.offset, info.shape[1], info.shape[0])
        rest = StreamingPager(self.store, {}, [], Residency((), (), 0, 0, 0))
        self.pager = NeuronPager(rest, self.store, [place], [slots], **more)
        self.layer = self.pager.layers[0]

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *error: object) -> None:
        self.pager.close()
        self.store.close()

    def use(self, active: list[int]) -> None:
        """Have neurons brought, and look at every one."""
        seen: list[int] = []
        for batch in self.layer.few(np.array(sorted(active), np.int64)):
            self.check(batch.ready, batch.addresses(batch.ready))
            batch.wait()
            assert sorted([*batch.ready, *batch.late]) == list(batch.neurons)
            self.check(batch.neurons, batch.addresses(batch.neurons))
            seen += batch.neurons.tolist()
            last = batch.last
        assert last and seen == sorted(active)

    def check(self, neurons: np.ndarray, places: np.ndarray) -> None:
        for neuron, place in zip(neurons, places, strict=True):
            width = self.content.shape[1]
            assert np.array_equal(np.ctypeslib.as_array((ctypes.c_uint8 * width).from_address(int(place))), self.content[neuron])

    def read_all(self) -> None:
        """What a prompt does."""
        following = 0
        for first, count, place, pitch in self.layer.groups():
            assert first == following
            following += count
            self.check(np.arange(first, first + count), place + pitch * np.arange(count))
        assert following == len(self.content)


PASSES = st.lists(st.one_of(st.sets(st.integers(0, 95), max_size=40), st.just("all")), max_size=12)


@pytest.mark.parametrize("name", ("large", "small"))
@given(passes=PASSES, slots=st.integers(2, 30))
def test_whatever_was_asked_for_lies_where_it_is_said_to(name: str, records: Path, passes: list, slots: int) -> None:
    with Opened(records, name, min(slots, 25)) as opened:
        for step in passes:
            if step == "all":
                opened.read_all()
            else:
                opened.use(list(step))


def test_what_the_window_holds_is_not_read_again(records: Path) -> None:
    with Opened(records, "large", 8) as opened:
        opened.use([1, 5, 9])
        opened.use([5, 9, 20])
        assert opened.pager.stats == WindowStats(6, 4, 2)
        assert opened.pager.traffic.nbytes == 4 * 4096
        opened.use([30, 31, 32, 33, 34])  # 1 goes: no token of the window but the first had it
        opened.use([5, 9, 20])
        assert opened.pager.stats.missed == 9
        opened.use([1])
        assert opened.pager.stats.missed == 10


def test_neighbours_come_in_one_read(records: Path) -> None:
    with Opened(records, "large", 40) as opened:
        opened.use([3, 4, 5, 6, 50, 51, 70])
        assert opened.pager.traffic.reads == 3


def test_a_window_of_many_tokens_stays_short(records: Path) -> None:
    with Opened(records, "large", 90) as opened:
        for token in range(500):
            opened.use([token % 7, 20 + token % 60])
        assert len(opened.layer._window.tokens) <= MOST_TOKENS
        assert opened.pager.stats.missed == 67


def test_a_wait_that_is_ended_leaves_nothing_wrong(records: Path) -> None:
    ended = [False]
    with Opened(records, "large", 8, cancelled=lambda: ended[0]) as opened:
        opened.use([1, 2])
        ended[0] = True
        with pytest.raises(Interrupted):
            opened.use([1, 2, 40])
        with pytest.raises(Interrupted):
            opened.read_all()
        ended[0] = False
        opened.use([1, 2, 40])
        opened.read_all()


@pytest.mark.parametrize("expected", (False, True), ids=("asked for", "expected"))
def test_waiting_for_what_was_given_up_can_be_ended_too(records: Path, monkeypatch: pytest.MonkeyPatch, expected: bool) -> None:
    """A read that hangs writes when it ends, however often somebody has stopped waiting for it: its slot is free no earlier."""
    stuck, patient, released, preadv = threading.Event(), threading.Event(), threading.Event(), os.preadv
    with Opened(records, "large", 8, cancelled=lambda: stuck.is_set() and not patient.is_set()) as opened:
        hanging = opened.layer._place.offset + 40 * 4096

        def slow(fd: int, buffers: list, offset: int) -> int:
            if offset == hanging:
                stuck.set()
                assert released.wait(MINUTE)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", slow)
        opened.use([1, 2])
        if expected:
            opened.layer.expect(np.array([30, 40]))
        for _ in range(2):
            with pytest.raises(Interrupted):
                opened.use([1, 2, 40, 50])
        patient.set()
        threading.Timer(0.3, released.set).start()
        eight = list(range(60, 68))
        opened.use(eight)
        assert released.wait(MINUTE)
        while not opened.pager._reader.idle:
            time.sleep(0.01)
        read = opened.pager.traffic.reads
        opened.use(eight)
        assert opened.pager.traffic.reads == read, "they were still there"


def test_a_prompt_after_one_that_was_interrupted_begins_at_the_beginning(records: Path) -> None:
    with Opened(records, "large", 8) as opened:
        for groups in (1, 2, 5):
            running = opened.layer.groups()
            for _ in range(groups):
                next(running)
            running.close()
            opened.read_all()


def test_a_file_that_became_shorter_is_an_error_and_no_answer(tmp_path: Path, records: Path) -> None:
    shutil.copytree(records, tmp_path / "copy")
    with Opened(tmp_path / "copy", "small", 8) as opened:
        opened.use([1])
        os.truncate(opened.layer._place.file, opened.layer._place.offset + 8192)
        with pytest.raises(CheckpointError, match="shorter"):
            opened.use([1, 90])
        opened.use([1, 6])


# -- the command -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, said", (({"hidden_act": "silu"}, "silu is never exactly zero"),
                                           ({"intermediate_size": 88}, "64 neurons and 16 channels")))
def test_what_would_gain_nothing_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    saved(Case("llama", {**RELU, **changes}), tmp_path / "model")
    with pytest.raises(UsageError, match=said):
        list(bundle(tmp_path / "model", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_stopped_continues_to_the_same_bytes(tmp_path: Path, folders) -> None:
    model, whole = folders("llama, bf16")
    out = tmp_path / "out"
    for count, _ in enumerate(bundle(model, out)):
        if count == 9:
            break
    assert not out.exists() and (tmp_path / ".out.partial").exists()
    bundled(model, out)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (out / FILE).read_text() == (whole / FILE).read_text()


def test_a_bundled_folder_is_not_bundled_or_quantized_again(tmp_path: Path, folders) -> None:
    with pytest.raises(UsageError, match="are bundled already"):
        list(bundle(folders("opt")[1], tmp_path / "out"))


@pytest.mark.parametrize(("family", "sizes", "rule"), [
    ("llama", {**RELU, "hidden_size": 256}, "(up|down)_proj=bf16"),
    ("opt", {"hidden_size": 256, "ffn_dim": 128, "word_embed_proj_dim": 256}, "fc2=bf16")])
def test_neurons_of_a_quantized_model_are_bundled_beside_its_codes(family: str, sizes: dict, rule: str, tmp_path: Path) -> None:
    """Attention, gates, embeddings in 4 bits; what is read neuron by neuron as it was published."""
    quantized, out = tmp_path / "quantized", tmp_path / "out"
    saved(Case(family, sizes, dtype="bfloat16"), tmp_path / "model")
    convert_run(tmp_path / "model", quantized, conversion("4bit", rules=(rule,)))
    with pytest.raises(UsageError, match="quantized is the model itself"):
        bundled(quantized, quantized, replace=True)
    made, _ = bundled(quantized, out)
    assert list(verify(out))[-1].damaged == ()
    before, after = read_container(quantized), read_container(out)
    assert after.is_low_bit and after.spec_text == "4bit, bf16, neurons bundled" and after.method["weights"] == before.method
    same = [stored for stored in after.tensors.values() if not stored.spec.is_raw]
    assert same and all(before.tensors[stored.name].crc32 == stored.crc32 for stored in same)
    whole = found(resident(quantized))
    assert np.array_equal(found(resident(out)), whole)
    for slots in (3, 20):
        assert np.array_equal(found(windowed(out, slots)), whole)
    with pytest.raises(UsageError, match="are bundled already"):
        list(bundle(out, tmp_path / "again"))


def test_neurons_in_few_bits_are_refused_with_what_leaves_them_wide(tmp_path: Path, folders) -> None:
    convert_run(folders("llama, bf16")[0], tmp_path / "quantized", conversion("4bit"))
    with pytest.raises(UsageError, match=r"is codebook4:16, but neurons can be read individually only in 16 or 32 bits") as refused:
        list(bundle(tmp_path / "quantized", tmp_path / "out"))
    assert "'(up_proj|down_proj)=bf16'" in refused.value.hint


def test_the_kernels_of_a_bundled_draft_are_among_those_compiled_beforehand(folders) -> None:
    plain, bundled = folders("llama, bf16")
    assert warm.BUNDLED in folder_kinds(plain, EngineOptions(draft=str(bundled)))
    assert warm.BUNDLED in folder_kinds(bundled, EngineOptions(draft=str(plain)))
    assert warm.BUNDLED not in folder_kinds(plain, EngineOptions(draft=str(plain)))


def test_a_file_is_bundled_into_a_folder_that_runs_alone(tmp_path: Path) -> None:
    """A GGUF file is no folder whose config and tokenizer could be copied."""
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    fable_gguf(file)
    bundled(file, out, gate_sparsity=0.5)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in out.iterdir()}
    file.unlink()
    assert list(verify(out))[-1].damaged == ()
    engine = resident(out)
    text = "The king had three sons, and\n12 foxes."
    own, other = (Tokenizer.load(folder, engine.config) for folder in (FABLE, out))
    assert other.encode(text) == own.encode(text) and other.template.source == own.template.source
    rows = engine.forward_logits(other.encode(text)).copy()
    engine.close()
    bundled(FABLE, tmp_path / "folder", gate_sparsity=0.5)
    engine = resident(tmp_path / "folder")
    assert np.abs(engine.forward_logits(own.encode(text)) - rows).max() < 0.02 * np.abs(rows).max()
    engine.close()
