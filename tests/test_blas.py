"""NumPy's matrix products limited to one thread: the limit is released whatever happens in between."""

from collections.abc import Iterator

import numpy as np
import pytest

from effllm.kernels import blas


def threads() -> int | None:
    functions = blas._functions()
    return None if functions is None else functions[0]()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As in a program that nobody holds to one, as all tests are."""
    functions = blas._functions()
    if functions is None:
        pytest.skip("NumPy's BLAS is no OpenBLAS of its own")
    before = functions[0]()
    functions[1](2)
    yield
    functions[1](before)


def test_held_to_one_and_given_back(two_threads):
    before = threads()
    assert before == 2
    with blas.one_thread():
        assert threads() == 1
        x = np.ones((64, 64), np.float32)
        assert (x @ x == 64).all()
        with blas.one_thread():
            assert threads() == 1
        assert threads() == 1
    assert threads() == before
    with pytest.raises(KeyError), blas.one_thread():
        raise KeyError
    assert threads() == before


def test_another_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(blas, "_functions", lambda: None)
    with blas.one_thread():
        assert (np.ones((2, 2)) @ np.ones((2, 2)) == 2).all()
