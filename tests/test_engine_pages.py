"""Page and slot pools."""

from __future__ import annotations

import pytest

from onebox.engine.pages import PAGE_SIZE, Pool, pages_for


@pytest.mark.parametrize(("n_tokens", "n_pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_for_rounds_up_to_whole_pages_of_64_tokens(n_tokens: int, n_pages: int) -> None:
    assert PAGE_SIZE == 64 and pages_for(n_tokens) == n_pages


def test_id_0_is_never_handed_out() -> None:
    assert sorted(Pool(5).take(5)) == [1, 2, 3, 4, 5]


def test_given_ids_can_be_taken_again() -> None:
    pool = Pool(3)
    taken = pool.take(3)
    pool.give(taken[:1])
    assert pool.n_free == 1 and pool.take(1) == taken[:1]


def test_taking_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="2 asked of a pool with 1 free"):
        Pool(1).take(2)


@pytest.mark.parametrize(
    ("owned", "fault"), [([1], "lost: \\[2\\]"), ([1, 2, 2], "twice: \\[2\\]"), ([1, 2, 3], "twice: \\[3\\]")]
)
def test_check_finds_lost_and_doubly_owned_ids(owned: list[int], fault: str) -> None:
    pool = Pool(4)
    pool.take(2)
    pool.check([1, 2])
    with pytest.raises(AssertionError, match=fault):
        pool.check(owned)
