"""Prefix cache: pages and states of prompts already computed. Takes token ids, gives the longest reusable prefix.

A tree over token ids, one node a full page, one root a (build, salt). A snapshot hangs on the node of the last full
page below its exact token count; the tokens after that page are its key there, and the page that holds them its tail.
A hit is the deepest snapshot that leaves at least one token to compute: the sequence shares the full pages, gets a copy
of the tail page, and the state is restored into its slot. Shared pages are never written below what they share, so
nothing is ever copied on write: a sequence that wrote a tail page goes on behind the tokens that the snapshot reads.

Whoever uses a node's page uses the pages of all nodes above it; so every page without a user can be evicted. Where
there is room in host memory, pages of the coldest snapshots move there instead, from the end of a prefix on, and come
back with a hit. A page in host memory has an id above all the pool's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

from onebox.engine.pages import PAGE_SIZE, Pool
from onebox.engine.sequence import Sequence
from onebox.engine.states import CopyPage, LoadPage, OffloadPage, RestoreState, SaveState, Snapshot, SnapshotSlots

Key = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One full page below `parent`: `key` its tokens. Roots have page 0."""

    root: tuple[str, str]
    parent: Node | None = None
    key: Key = ()
    page: int = 0
    depth: int = 0  # full pages from the root to here
    children: dict[Key, Node] = field(default_factory=dict)
    snapshots: dict[Key, CachedState] = field(default_factory=dict)


@dataclass(eq=False)
class CachedState(Snapshot):
    """A snapshot with its place in the tree. `tail_page` is 0 when `n_tokens` is a whole number of pages."""

    node: Node = field(kw_only=True)
    tail: Key = ()
    tail_page: int = 0


@dataclass
class CachedPage:
    """Who needs a page of the cache: a node, `n_tails` snapshots, `n_users` sequences."""

    node: Node | None = None
    n_tails: int = 0
    n_users: int = 0


@dataclass(frozen=True)
class Match:
    """What the cache knows of a prompt: `shared` tokens of it, `n_tokens` of them reusable, else why not.

    `miss` is "" for a hit, else one of `too_short`, `no_match`, `no_snapshot`, `salt`.
    """

    state: CachedState | None
    shared: int
    miss: str

    @property
    def n_tokens(self) -> int:
        return self.state.n_tokens if self.state else 0


class PrefixCache:
    """Owner of shared pages and of snapshots. `counts`: lookups, hits, hit_tokens, miss_*, saved, evicted_*, moves.

    `n_host` pages may be kept in host memory. `build` is everything beside tokens and salt that changes the numbers.
    Prefixes under `min_tokens` are not kept, and two snapshots of one prompt stand at least that far apart, except
    where the request asked for one.
    """

    def __init__(
        self, pages: Pool, slots: SnapshotSlots, *, build: str = "", min_tokens: int = PAGE_SIZE, n_host: int = 0
    ) -> None:
        self.host = Pool(n_host)
        self.pool, self.slots, self.build, self.min_tokens = pages, slots, build, min_tokens
        self.roots: dict[tuple[str, str], Node] = {}
        self.pages: dict[int, CachedPage] = {}
        self.n_idle = 0  # pages without a user: all of them can be evicted
        self.dead: dict[Node, None] = {}  # leaves that no snapshot needs, oldest first
        self.counts = slots.counts
        slots.on_drop = self._forget

    # what a new sequence can reuse

    def find(self, tokens: Seq[int], salt: str = "") -> Match:
        """The deepest snapshot of `tokens` that leaves one to compute, and how many tokens the tree shares at all."""
        limit = len(tokens) - 1
        if limit < self.min_tokens:
            return Match(None, 0, "too_short")
        node, best, shared = self.roots.get((self.build, salt)), None, 0
        while node is not None:
            start = node.depth * PAGE_SIZE
            page = tuple(tokens[start : start + PAGE_SIZE])
            for tail, state in node.snapshots.items():
                if state.n_tokens <= limit and page[: len(tail)] == tail:
                    best = state if best is None or state.n_tokens > best.n_tokens else best
            child = node.children.get(page)
            if child is None:
                shared = start + max((_common(page, k) for k in chain(node.children, node.snapshots)), default=0)
            node = child
        shared = min(shared, limit)
        if best is not None:
            return Match(best, shared, "")
        if shared >= self.min_tokens:
            return Match(None, shared, "no_snapshot")
        first = tuple(tokens[:PAGE_SIZE])
        elsewhere = any(first in root.children for key, root in self.roots.items() if key != (self.build, salt))
        return Match(None, shared, "salt" if elsewhere else "no_match")

    def hold(self, match: Match) -> list[int]:
        """Keep a match from being evicted until `let_go` or `attach`. Gives its full pages, in order, up to where they
        are in host memory."""
        state = match.state
        if state is None:
            return []
        state.pinned = True
        if state.tail_page and not self._hosted(state.tail_page):
            self._use(state.tail_page)
        pages = [node.page for node in _path(state.node) if not self._hosted(node.page)]
        for page in pages:
            self._use(page)
        return pages

    def let_go(self, match: Match, pages: Iterable[int]) -> None:
        """Undo `hold`."""
        if match.state is not None:
            self.release(pages)
            self._unpin(match.state)

    def attach(self, match: Match, sequence: Sequence) -> None:
        """Start a sequence, whose pages begin with the held ones and whose slot is set, behind a held match."""
        self.counts.update(lookups=1, lookup_tokens=len(sequence.tokens))
        sequence.node, state = None, match.state
        if state is None:
            self.counts[f"miss_{match.miss}"] += 1
            return
        self.counts.update(hits=1, hit_tokens=state.n_tokens)
        for node in _path(state.node):
            if self._hosted(node.page):
                page = sequence.pages[node.depth - 1]
                self._load(node.page, page)
                assert node.parent is not None
                self._move(node.page, page, node.parent)
        if state.tail_page:
            copy = sequence.pages[state.node.depth]
            if self._hosted(state.tail_page):
                self._load(state.tail_page, copy)
            else:
                self.slots.ops.append(CopyPage(state.tail_page, copy))
        if state.host:
            placed = self.slots.place(state)
            assert placed, "a held snapshot is the only pinned one"
        self.slots.touch(state)
        self.slots.ops.append(RestoreState(state.device, sequence.slot))
        sequence.computed, sequence.node = state.n_tokens, state.node
        self._unpin(state)

    # what a sequence leaves behind

    def save(self, sequence: Sequence) -> None:
        """Keep the computed prefix: its pages become the cache's, its state (pending rows applied) a snapshot."""
        n, tokens, pages = sequence.computed, sequence.tokens, sequence.pages
        if n < self.min_tokens or not self.slots.device.total:
            return
        node = sequence.node
        if node is None:
            root = (self.build, sequence.request.cache_salt)
            node = self.roots.setdefault(root, Node(root))
        for i in range(node.depth, n // PAGE_SIZE):
            node = self._step(node, tuple(tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]), pages)
        sequence.node = node if node.depth else None
        tail = tuple(tokens[node.depth * PAGE_SIZE : n])
        if tail in node.snapshots:
            self.slots.touch(node.snapshots[tail])
            return
        state = CachedState(n_tokens=n, node=node, tail=tail)
        if not self.slots.place(state):
            self._sort(node)
            return
        if node.parent is None:
            self.roots[node.root] = node  # placing the state may have dropped the last one that kept this root
        if tail:
            state.tail_page = pages[node.depth]
            self._adopt(state.tail_page).n_tails += 1
        node.snapshots[tail] = state
        self._sort(node)
        self.slots.ops.append(SaveState(sequence.slot, sequence.pending, state.device))
        self.counts["saved"] += 1

    def release(self, pages: Iterable[int]) -> None:
        """A sequence no longer uses these pages: its own become free, the cache's lose a user."""
        for page in pages:
            cached = self.pages.get(page)
            if cached is None:
                self.pool.give([page])
                continue
            cached.n_users -= 1
            if not cached.n_users:
                self.n_idle += 1
                self._free_unneeded(page, cached)

    def reclaim(self, n: int) -> bool:
        """Make room until `n` pages are free: pages that no snapshot needs go first, then those of snapshots, least
        recently used first, to host memory where there is room, else with their snapshot."""
        if n > self.pool.n_free + self.n_idle:
            return False
        while self.pool.n_free < n:
            leaf = next((x for x in self.dead if not self.pages[x.page].n_users), None)
            if leaf is not None:
                self._remove(leaf)
                continue
            if not self._offload(n - self.pool.n_free) and not self.slots.evict():
                return False
        return True

    def check(self, users: Iterable[Sequence] = ()) -> None:
        """Assert that counts of users, tails and nodes are what sequences, snapshots and the tree say."""
        n_users = Counter(page for s in users for page in s.pages if page in self.pages)
        n_tails: Counter[int] = Counter()
        nodes: dict[int, Node] = {}
        states: set[Snapshot] = set()
        stack = list(self.roots.values())
        for root in stack:
            assert root.children or root.snapshots, f"empty root {root.root}"
        while stack:
            node = stack.pop()
            start = node.depth * PAGE_SIZE
            if node.parent is not None:
                assert node.page not in nodes, f"page {node.page} stands twice in the tree"
                nodes[node.page] = node
                assert len(node.key) == PAGE_SIZE and node.depth == node.parent.depth + 1
                assert (node in self.dead) == (not node.children and not node.snapshots), f"page {node.page}"
                above = node.parent
                assert not above.page or self.pages[node.page].n_users <= self.pages[above.page].n_users
                assert self._hosted(node.page) or not self._hosted(above.page), "a page behind one in host memory"
            for tail, state in node.snapshots.items():
                assert state.node is node and state.tail == tail and state.n_tokens == start + len(tail)
                assert bool(tail) == bool(state.tail_page) and not state.pinned and len(tail) < PAGE_SIZE
                n_tails[state.tail_page] += bool(tail)
                states.add(state)
            stack += node.children.values()
        assert set(self.dead) <= set(nodes.values())
        for page, cached in self.pages.items():
            found = CachedPage(nodes.get(page), n_tails[page], n_users[page])
            assert found == cached, f"page {page}: counted {found}, recorded {cached}"
            assert cached.node or cached.n_tails, f"page {page} is kept for nobody"
        assert set(nodes) | set(+n_tails) == set(self.pages)
        hosted = [page for page in self.pages if self._hosted(page)]
        assert not any(self.pages[page].n_users for page in hosted)
        self.host.check(page - self.pool.total for page in hosted)
        assert self.n_idle == sum(not c.n_users for c in self.pages.values()) - len(hosted)
        assert states == {*self.slots.on_device, *self.slots.on_host}
        self.slots.check()

    def _step(self, node: Node, key: Key, pages: list[int]) -> Node:
        """The child of `node` for the sequence's next full page, which it shares from now on."""
        page, child = pages[node.depth], node.children.get(key)
        if child is None:
            child = Node(node.root, node, key, page, node.depth + 1)
            node.children[key] = child
            self._adopt(page).node = child
            self.dead.pop(node, None)
            self.dead[child] = None
        elif self._hosted(child.page):
            self._move(child.page, page, node)
        elif child.page != page:
            # computed twice, side by side: equal tokens, equal entries; one copy is enough
            self._use(child.page)
            pages[node.depth] = child.page
            self.release([page])
        return child

    def _adopt(self, page: int) -> CachedPage:
        """The record of a page; a new one has the sequence that computed it as its user."""
        return self.pages.setdefault(page, CachedPage(n_users=1))

    def _use(self, page: int) -> None:
        cached = self.pages[page]
        self.n_idle -= not cached.n_users
        cached.n_users += 1

    def _unpin(self, state: CachedState) -> None:
        state.pinned = False
        if state.tail_page and not self._hosted(state.tail_page):
            self.release([state.tail_page])

    def _hosted(self, page: int) -> bool:
        return page > self.pool.total

    def _offload(self, n: int) -> int:
        """Move up to `n` pages without a user to host memory, the coldest snapshot's first. Gives how many."""
        n = min(n, self.host.n_free)
        found = 0
        for state in [*self.slots.on_host, *self.slots.on_device] if n else ():
            assert isinstance(state, CachedState)
            for page, above in self._cold(state):
                if found == n:
                    return found
                [host] = self.host.take(1)
                self.slots.ops.append(OffloadPage(page, host))
                self.n_idle -= 1
                self._move(page, self.pool.total + host, above)
                self.pool.give([page])
                self.counts["offloaded_pages"] += 1
                found += 1
        return found

    def _cold(self, state: CachedState) -> Iterator[tuple[int, Node]]:
        """A snapshot's pages on the device that may leave it without one behind them that stays, the last first; each
        with the node that it follows."""
        if state.tail_page and not self._hosted(state.tail_page) and not self.pages[state.tail_page].n_users:
            kept = self.pages[state.tail_page].node
            if kept is None or self._last(kept):
                yield state.tail_page, state.node
        node = state.node
        while node.parent is not None:
            if not self._hosted(node.page):
                if self.pages[node.page].n_users or not self._last(node):
                    return
                yield node.page, node.parent
            node = node.parent

    def _last(self, node: Node) -> bool:
        """Whether no page on the device stands behind this one."""
        return all(self._hosted(child.page) for child in node.children.values())

    def _load(self, page: int, to: int) -> None:
        self.slots.ops.append(LoadPage(page - self.pool.total, to))
        self.counts["loaded_pages"] += 1

    def _move(self, page: int, to: int, above: Node) -> None:
        """Let page `to`, a host page or one of a sequence, be for tree and snapshots what `page` behind node `above`
        was. The copy is queued or not needed; a host page becomes free."""
        cached = self.pages.pop(page)
        new = self.pages.setdefault(to, CachedPage(n_users=0 if self._hosted(to) else 1))
        if cached.node is not None:
            new.node, cached.node.page = cached.node, to
        new.n_tails += cached.n_tails
        for state in above.snapshots.values():
            if state.tail_page == page:
                state.tail_page = to
        if self._hosted(page):
            self.host.give([page - self.pool.total])

    def _free_unneeded(self, page: int, cached: CachedPage) -> None:
        """Free a page that neither tree nor snapshot needs; with a user left, it becomes the user's own again."""
        if cached.node is None and not cached.n_tails:
            del self.pages[page]
            if self._hosted(page):
                self.host.give([page - self.pool.total])
            elif not cached.n_users:
                self.n_idle -= 1
                self.pool.give([page])

    def _remove(self, leaf: Node) -> None:
        parent, cached = leaf.parent, self.pages[leaf.page]
        assert parent is not None
        del self.dead[leaf], parent.children[leaf.key]
        cached.node = None
        self.counts["evicted_pages"] += 1
        self._free_unneeded(leaf.page, cached)
        self._sort(parent)

    def _forget(self, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, CachedState)
        del snapshot.node.snapshots[snapshot.tail]
        if snapshot.tail_page:
            cached = self.pages[snapshot.tail_page]
            cached.n_tails -= 1
            self._free_unneeded(snapshot.tail_page, cached)
        self._sort(snapshot.node)

    def _sort(self, node: Node) -> None:
        """Put a node where its children and snapshots say: a dead leaf, an empty root, or neither."""
        empty = not node.children and not node.snapshots
        if node.parent is None:
            if empty:
                self.roots.pop(node.root, None)
        elif empty:
            self.dead[node] = None
        else:
            self.dead.pop(node, None)


def _path(node: Node) -> list[Node]:
    """Nodes with pages, from the root down to `node`."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _common(a: Key, b: Key) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
