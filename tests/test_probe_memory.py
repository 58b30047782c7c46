"""Memory measurements disturbed by other processes are repeated."""

import json

import pytest

from effllm.runtime.planning import machine_probe


@pytest.mark.parametrize(("given", "made"), (([30e9, 31e9, 1e9], 2), ([10e9, 12e9, 14e9, 27e9, 1e9], 4),
                                             ([10e9] * 20, 2 + machine_probe.MORE_PASSES)),
                         ids=("free", "disturbed for a while", "disturbed all along"))
def test_memory_is_read_until_it_is_as_fast_as_what_was_read_from_it(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch,
                                                                    given: list[float], made: int) -> None:
    rates, asked = iter(given), []
    monkeypatch.setattr(machine_probe, "memory_passes", lambda threads: asked.append(threads) or [next(rates) if threads > 1 else 7e9])
    monkeypatch.setattr(machine_probe, "_overhead", lambda threads: {"figure": "overhead"})
    monkeypatch.setattr(machine_probe, "_kind", lambda threads, kind, overhead: {"figure": "kind", "kind": kind, "decode": 25e9})
    machine_probe.main(json.dumps({"threads": 2, "base": True, "kv": [], "kinds": ["bf16", "codebook4:16"]}))
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[-1]["figure"] == "memory" and told[-1]["best"] == max(given[:made]) and asked == [2] * made + [1]
    assert told[-1]["alone"] == 7e9, "of one thread"


def test_what_is_not_asked_for_is_not_measured(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "memory_passes", None)
    monkeypatch.setattr(machine_probe, "_overhead", lambda threads: {"figure": "overhead"})
    machine_probe.main(json.dumps({"threads": 2, "base": False, "kv": [], "kinds": []}))
    assert not capsys.readouterr().out
