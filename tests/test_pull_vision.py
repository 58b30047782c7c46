"""A vision-language model quantized during the download: its vision tower is kept shard by shard, also after interruptions."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub, running
from hub_user import HubUser, sharded
from test_pull_bits import REPO, kept, weights
from test_pull_resume import weights_served
from test_vision_quantized import save_idefics3
from vision_models import PICTURES, open_encoder

from effllm.offload.checkpoint import TensorStore
from effllm.runtime.events import Progress
from effllm.runtime.files import model_folder_files
from effllm.runtime.images import EncodingJob
from effllm.runtime.library.model_name import parse_reference
from effllm.runtime.pull.client import Client
from effllm.runtime.pull.plan import plan_pull, pull_target
from effllm.runtime.pull.pull import pull_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_idefics3(tmp_path_factory.mktemp("sees") / "whole")


@pytest.fixture
def hub(whole: Path) -> Iterator[Hub]:
    with running() as hub:
        hub.add(REPO, files=sharded(whole))
        yield hub


def held_against(whole: Path, made: Path) -> None:
    with TensorStore.of_file(made / model_folder_files.TOWER) as own, TensorStore.open(whole) as all_of_it:
        assert own.tensors and all(np.array_equal(own.read(info), all_of_it.read(all_of_it.tensors[name]))
                                   for name, info in own.tensors.items())
    first, second = (open_encoder(each).encode(PICTURES["photo"], EncodingJob()) for each in (whole, made))
    assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens


def test_what_comes_quantized_sees_the_same(hub: Hub, user: HubUser, whole: Path) -> None:
    plan = user.run("pull", REPO, "--bits", "4", "--dry-run", "--json").json
    ran = user.run("pull", REPO, "--bits", "4")
    assert ran.code == 0 and "takes images too" not in ran.err, ran.err
    made = kept(user, hub)
    held_against(whole, made)
    assert user.run("verify", f"{REPO}:4bit").code == 0
    assert {row["name"]: row["input_modalities"] for row in user.run("list", "--json").json["models"]} == {
        "fable": ["text"], f"{REPO}:4bit": ["text", "image"]}
    assert plan["bytes_kept"] >= 0.95 * sum(path.stat().st_size for path in made.iterdir())
    assert not [path for path in made.parent.iterdir() if path.name not in (".4bit.lock", "4bit")]


def test_stopped_between_shards_nothing_of_it_comes_twice(hub: Hub, user: HubUser, whole: Path) -> None:
    client = Client(user.env)
    plan = plan_pull(pull_target(parse_reference(f"{REPO}:4bit", user.env), user.env), client, user.env)
    pulling = pull_model(plan, client, user.env)
    for item in pulling:
        if isinstance(item, Progress) and item.phase == "quantizing" and item.done > item.total // 2:
            break
    pulling.close()
    assert not kept(user, hub).exists()
    assert user.run("pull", REPO, "--bits", "4").code == 0
    assert weights_served(hub) == weights(hub)
    held_against(whole, kept(user, hub))
