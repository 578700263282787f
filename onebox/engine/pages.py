"""Page pool and slot pool. Take counts, give ids. An id belongs to exactly one owner: free, or one sequence."""

from __future__ import annotations

from collections.abc import Iterable

PAGE_SIZE = 64  # tokens


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_SIZE)


class Pool:
    """Ids 1..n of equal things (KV pages, state slots). Id 0 is nobody's: padding rows may write there."""

    def __init__(self, n: int) -> None:
        self.total = n
        self._free = list(range(n, 0, -1))  # lowest id on top

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` ids. The caller has checked `n_free`."""
        assert n <= len(self._free), f"{n} asked of a pool with {len(self._free)} free"
        taken = [self._free.pop() for _ in range(n)]
        return taken

    def give(self, ids: Iterable[int]) -> None:
        self._free.extend(ids)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that the free ids and `owned` (all owners' ids together) are ids 1..n, each once."""
        every = [*self._free, *owned]
        assert sorted(every) == list(range(1, self.total + 1)), (
            f"{len(every)} ids held for {self.total}; twice: {sorted({i for i in every if every.count(i) > 1})[:8]}; "
            f"lost: {sorted(set(range(1, self.total + 1)) - set(every))[:8]}"
        )
