"""What a server stores of requests and answers takes no more memory than its plan counts."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
import uuid
from pathlib import Path

import pytest
from server_process import MINUTE, serving

import effllm
from effllm.cli.server.conversations import Conversations
from effllm.cli.server.message_threads import MessageThreads
from effllm.cli.server.messages_requests import MessagesRequest
from effllm.cli.server.response_store import ResponseStore
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.store_limits import ALL_STORES_NBYTES, KINDS, MAX_STORE_NBYTES
from effllm.runtime.prepare import EngineOptions, prepare

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
MOST = 256 << 10
MIB = 1 << 20


def sent(value: object) -> str:
    return json.dumps(value)


def responses(text: str) -> ResponseStore:
    """More of them than there is room for."""
    kept = ResponseStore(MOST)
    for _ in range(400):
        asked = ResponsesRequest.model_validate_json(sent({"input": [{"role": "user", "content": text}]}))
        item = {"id": uuid.uuid4().hex, "type": "message", "content": [{"type": "output_text", "text": text, "annotations": []}]}
        response = json.loads(sent({"id": uuid.uuid4().hex, "output": [item], "usage": {"input_tokens": 9999}}))
        kept.keep(asked, kept.input_items(asked), response)
    return kept


def conversations(text: str) -> Conversations:
    held = Conversations(MOST)
    for _ in range(40):
        begun = held.create([], {"of": "a test"})
        for _ in range(10):
            held.add(begun.id, json.loads(sent([{"role": "user", "content": text}])))
    return held


def threads(text: str) -> MessageThreads:
    held = MessageThreads(MOST)
    for number in range(400):
        asked = MessagesRequest.model_validate_json(sent({"max_tokens": 1, "messages": [{"role": "user", "content": text}],
                                                          "thread": {"type": "create"}}))
        held.keep(asked, held.with_history(asked), f"msg_{number}", json.loads(sent([{"type": "text", "text": text}])))
    return held


@pytest.mark.parametrize("text", ["x", "The fox is sly. " * 60, "狐狸是国王。" * 80, "The fox is sly" * 30 + "🦊"])
@pytest.mark.parametrize("filled", [responses, conversations, threads])
def test_what_is_kept_takes_what_is_counted(filled, text):
    """However short the texts are, and in whichever script: each letter of one that has a wide letter takes as many bytes."""
    filled(text)  # what is made once, by the first of all requests
    gc.collect()
    gc.freeze()  # what other tests left is not looked through again
    tracemalloc.start()
    try:
        kept = filled(text)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.4 * MOST < taken <= MOST, f"{kept} takes {taken}"


def test_a_plan_counts_it():
    """From the start, so that a server within --ram stays there when programs have asked for much."""
    plain, keeping = (prepare(FABLE, EngineOptions(ctx=256, device="cpu", reserved_nbytes=kept)) for kept in (0, ALL_STORES_NBYTES))
    try:
        more = keeping.placement.baseline_bytes - plain.placement.baseline_bytes
        assert ALL_STORES_NBYTES == len(KINDS) * MAX_STORE_NBYTES and abs(more - ALL_STORES_NBYTES) < 8 * MIB
    finally:
        plain.store.close()
        keeping.store.close()


def test_a_server_has_it_in_its_plan():
    planned = subprocess.run([sys.executable, "-P", "-m", "effllm", "plan", "fable", "--json", "-c", "256", "--device", "cpu"],
                             capture_output=True, text=True, timeout=MINUTE, stdin=subprocess.DEVNULL, check=True)
    with serving("-c", "256", "--device", "cpu") as server:
        (model,) = server.request("GET", "/api/ps").json["models"]
        assert model["size"] - json.loads(planned.stdout)["total_bytes"] > 0.9 * ALL_STORES_NBYTES
