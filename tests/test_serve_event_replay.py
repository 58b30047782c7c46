"""Events of background responses: memory is bounded, and a request for dropped events is told so."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.cli.server import guard
from effllm.cli.server.background import EventReplay
from effllm.cli.server.event_log import EventLog, EventLogs
from effllm.cli.server.problems import Problem
from effllm.cli.server.response_store import ResponseStore
from effllm.cli.server.responses_requests import ResponsesRequest
from effllm.cli.server.store_limits import MAX_STORE_NBYTES
from effllm.cli.server.streams import RequestRecord

NAME = "resp_1"
EMPTY = sys.getsizeof(b"")


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.binary(max_size=40), max_size=5)), max_size=40))
def test_the_newest_are_held_and_no_more_than_may(steps: list[tuple[int, list[bytes]]]) -> None:
    pot = EventLogs(1000)
    held, all_of_them = [pot.begin() for _ in range(3)], [[], [], []]
    for which, more in steps:
        pot.add(held[which], more)
        all_of_them[which] += more
        assert sum(each.nbytes for each in held) <= 1000
    for events, said in zip(held, all_of_them, strict=True):
        assert len(events) == len(said) and events.nbytes == sum(map(sys.getsizeof, said[events.first :]))
        for number in range(len(said) + 2):
            if number < events.first:
                with pytest.raises(Problem, match="were dropped"):
                    events.since(number, NAME)
            else:
                assert events.since(number, NAME) == b"".join(said[number:])


def test_one_that_says_much_takes_nothing_from_others() -> None:
    pot = EventLogs(100 * EMPTY)
    short, long = pot.begin(), pot.begin()
    pot.add(short, [b""] * 10)
    for _ in range(1000):
        pot.add(long, [b""])
    assert short.first == 0 and 75 <= len(long) - long.first <= 90
    pot.end(long)
    pot.add(short, [b""] * 60)
    assert short.first == 0


def bodies(events: EventLog, running: object = None, at: int = 0) -> list[bytes]:
    """What a client gets that asks for them from a number on."""
    got: list[bytes] = []

    async def follow() -> None:
        async def receive() -> dict:
            return await asyncio.Event().wait()

        async def send(message: dict) -> None:
            got.append(message.get("body"))

        await EventReplay(events, NAME, running, at)({"type": "http"}, receive, send)

    asyncio.run(follow())
    return [each for each in got if each]


def test_a_client_that_reads_too_slowly_is_told() -> None:
    events, asked = EventLog(), []
    events.add([b"x"] * 80)

    async def changed(_: float) -> bool:
        """More came while the client read, and once so much that the oldest went."""
        events.add([b"y"] * 80)
        asked.append(len(events))
        while len(asked) == 2 and events.first <= 160:
            events.make_room()
        return True

    first, more, last = bodies(events, SimpleNamespace(has_ended=False, changed=changed))
    assert (first, more, asked) == (b"x" * 80, b"y" * 80, [160, 240])
    assert last.startswith(b'event: error\ndata: {"type":"error","sequence_number":160,"code":"events_gone"')


def test_one_that_comes_too_late_is_refused_before_anything_is_sent() -> None:
    events = EventLog()
    events.add([b"x"] * 80)
    events.make_room()
    with pytest.raises(Problem, match="up to 9 were dropped for newer ones: GET /v1/responses/resp_1 has the whole text") as caught:
        EventReplay(events, NAME)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "events_gone", "starting_after")
    assert bodies(events, at=10)[0] == b"x" * 70


def test_of_a_response_that_has_ended_the_newest_events_are_kept() -> None:
    kept, events = ResponseStore(20_000), EventLog()
    events.add([b"x" * 100] * 400)
    asked = ResponsesRequest(input="Hello")
    kept.keep(asked, kept.input_items(asked), {"id": NAME, "output": []}, events)
    assert kept.get(NAME)["id"] == NAME and kept.events(NAME) is events and 0 < events.first < 400 and events.nbytes < 20_000
    assert MAX_STORE_NBYTES > 20_000, "which is what there is in a server"


def test_what_a_response_in_the_background_was_asked_with_counts_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_BODIES_NBYTES", 2000)
    statuses: list[int] = []

    async def test() -> None:
        ends = asyncio.Event()

        async def application(scope: dict, receive: object, send: object) -> None:
            try:
                await receive()
            except Problem as problem:
                await send({"type": "http.response.start", "status": problem.status, "headers": []})
                return
            record: RequestRecord = scope[guard.RECORD]
            record.background_task = asyncio.ensure_future(ends.wait())
            await send({"type": "http.response.start", "status": 200, "headers": []})

        app = guard.Guard(application, guard.AccessRules(False), lambda method, path, status, record: statuses.append(status))

        async def asked() -> None:
            async def receive() -> dict:
                return {"type": "http.request", "body": b"x" * 1500}

            async def send(message: dict) -> None:
                return None

            await app({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)

        await asked()
        await asked()
        ends.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asked()

    asyncio.run(test())
    assert statuses == [200, 503, 200]
