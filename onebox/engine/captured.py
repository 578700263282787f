"""A decode step as one CUDA graph: window, verification, drafts. One graph a (batch bucket, way of sampling).

Every sequence has 1 + k rows in a graph: its last token, its drafts, and filler where it has fewer. Filler stands
behind the real rows, so causality hides it from them, and it is never accepted. Sequences that fill the bucket up have
slot 0 and page 0, which belong to nobody.

A graph ends by writing the next step's inputs: what was accepted, the new drafts, and which sequences are over (their
stop ids and lengths are on the device), who from then on stand in nobody's slot. So the host may launch the next step
before it has read this one, and be one step behind.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.engine.pages import PAGE_SIZE
from onebox.engine.sampler import SamplingRows, sample
from onebox.engine.sequence import Sequence
from onebox.model.cache import Cache
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch

MAX_STOPS = 8
# what the device knows of a sequence: int64, then its stop ids (-1: none), then its last token and drafts
SLOT, COMPUTED, COMMIT, N_DRAFTS, SEED, TOP_K, MAX_LEN, FIRST_STOP, DRAFT_LEN, ACTIVE = range(10)
STOPS, TOKENS = 10, 10 + MAX_STOPS
WAYS = ((False, False), (True, False), (True, True))  # of sampling: random, truncated
REAL = 3  # fp32: temperature, top_p, min_p


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that graphs are made for: powers of two, and the most there can be."""
    return tuple(sorted({1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs} | {max_num_seqs}))


@dataclass(frozen=True)
class Verified:
    """A step: the target's token for each row of a sequence, drafts to follow what stands, logits [B rows, V]."""

    targets: list[list[int]]
    drafts: list[list[int]]
    logits: Tensor


@dataclass(frozen=True)
class Flight:
    """A step on its way: its sequences in the graph's order, its graph, and which of two places its tokens go to."""

    sequences: tuple[Sequence, ...]
    graph: _Graph
    place: int


def capturable(sequence: Sequence) -> bool:
    """Whether the device alone can choose this sequence's tokens: nothing that depends on what it said so far."""
    p = sequence.request.params
    plain = not (p.logit_bias or p.presence_penalty or p.frequency_penalty) and p.repetition_penalty == 1.0
    return plain and sequence.matcher is None and len(sequence.tokens) - sequence.prompt_len >= p.min_tokens


def foreseeable(sequence: Sequence) -> bool:
    """Whether the device also knows when this sequence is over, and the host needs no logits of it."""
    return len(sequence.stop_ids) <= MAX_STOPS and sequence.request.params.logprobs is None


class CapturedSteps:
    """Graphs of one model over one cache, made on first use and kept.

    `forced` is for measuring speed with random weights: draft i is kept with probability forced[i], whatever the target
    says, and the target's token there is made to agree or differ.
    """

    def __init__(
        self,
        model: Qwen35,
        cache: Cache,
        *,
        draft_len: int,
        max_num_seqs: int,
        max_pages: int,
        forced: tuple[float, ...] = (),
    ) -> None:
        self.model, self.cache, self.forced = model, cache, forced
        self.draft_len, self.max_pages = draft_len, max_pages
        self.buckets = buckets(max_num_seqs)
        self._pool: tuple[int, int] | None = None
        self._graphs: dict[tuple[int, bool, bool], _Graph] = {}

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Every graph there can be, the largest first, whose memory the others share. `progress` hears how many of how
        many are captured."""
        ways = [(size, *way) for size in reversed(self.buckets) for way in WAYS]
        for i, (size, random, truncated) in enumerate(ways):
            progress(i, len(ways))
            self.graph(size, random, truncated)

    def launch(self, sequences: Seq[Sequence]) -> Flight:
        """Start a step of sequences that are all `capturable`."""
        random = [p for s in sequences if not (p := s.request.params).greedy]
        truncated = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in random)
        graph = self.graph(len(sequences), bool(random), truncated)
        graph.fill(sequences)
        return Flight(tuple(sequences), graph, graph.start(0))

    def again(self, flight: Flight) -> Flight:
        """Start the step after `flight`, which may be under way still. Pages may have been added meanwhile."""
        flight.graph.fill_pages(flight.sequences)
        return Flight(flight.sequences, flight.graph, flight.graph.start(1 - flight.place))

    def land(self, flight: Flight) -> Verified:
        """Wait for a step and read it."""
        return flight.graph.read(flight.place)

    def graph(self, n: int, random: bool = False, truncated: bool = False) -> _Graph:
        """The graph for `n` sequences, captured if need be."""
        size = next(b for b in self.buckets if b >= n)
        key = (size, random, truncated)
        if key not in self._graphs:
            graph = _Graph(self, size, random, truncated)
            self._pool = graph.capture(self._pool)
            self._graphs[key] = graph
        return self._graphs[key]


class _Graph:
    """One graph with the memory it reads its numbers from and writes its tokens to."""

    def __init__(self, steps: CapturedSteps, size: int, random: bool, truncated: bool) -> None:
        self.model, self.cache, self.size, self.k = steps.model, steps.cache, size, steps.draft_len
        self.random, self.truncated, self.forced = random, truncated, steps.forced
        device, k, rows, max_pages = self.model.device, self.k, 1 + self.k, steps.max_pages
        pin = device.type == "cuda"

        def host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin)

        self.whole_host = host(size, TOKENS + rows, dtype=torch.int64)
        self.real_host = host(size, REAL, dtype=torch.float32)
        self.table_host = host(size, max_pages, dtype=torch.int64)
        self.out_hosts = [host(size, rows + k, dtype=torch.int64) for _ in range(2)]
        self.whole, self.real, self.table, self.out = (
            torch.zeros_like(t, device=device, pin_memory=False)
            for t in (self.whole_host, self.real_host, self.table_host, self.out_hosts[0])
        )
        self.tabled: list[list[int]] = [[] for _ in range(size)]  # pages that each row of the table holds
        self.query_start = torch.arange(size + 1, device=device) * rows
        self.single_start = torch.arange(size + 1, device=device)
        self.logits = torch.empty(0, device=device)
        self.chances = torch.tensor(self.forced[:k], device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = [torch.cuda.Event() for _ in range(2)] if pin else []

    def capture(self, pool: tuple[int, int] | None) -> tuple[int, int] | None:
        """Run once to compile kernels, then record. Gives the memory pool that graphs share."""
        if not self.done:
            return None
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):  # type: ignore[arg-type]
                self._step()
        found: tuple[int, int] = self.graph.pool()
        return found

    def fill(self, sequences: Seq[Sequence]) -> None:
        """Everything the step reads of these sequences. No step of this graph may be under way."""
        whole, real = [], []
        for s in sequences:
            p, drafts = s.request.params, s.drafts
            stops = [*s.stop_ids][:MAX_STOPS]
            numbers = [s.slot, s.computed, s.pending, len(drafts), s.seed, max(p.top_k, 0), s.max_len]
            numbers += [s.prompt_len + p.min_tokens, s.draft_len, 1, *stops, *[-1] * (MAX_STOPS - len(stops))]
            whole.append([*numbers, s.tokens[-1], *drafts, *[0] * (self.k - len(drafts))])
            real.append([0.0 if p.greedy else p.temperature, p.top_p, p.min_p])
        n = len(sequences)
        self.whole_host.zero_()
        self.real_host.zero_()
        self.whole_host[:n] = torch.tensor(whole)
        self.real_host[:n] = torch.tensor(real)
        self.whole.copy_(self.whole_host, non_blocking=True)
        self.real.copy_(self.real_host, non_blocking=True)
        self.fill_pages(sequences)

    def fill_pages(self, sequences: Seq[Sequence]) -> None:
        """Bring the table up to the sequences' pages. While a step is under way rows may only have grown."""
        for b in range(self.size):
            pages = sequences[b].pages if b < len(sequences) else []
            if self.tabled[b] != pages:
                self.table_host[b, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
                self.table_host[b, len(pages) :] = 0
                self.table[b].copy_(self.table_host[b], non_blocking=True)
                self.tabled[b] = list(pages)

    def start(self, place: int) -> int:
        """Launch the step and the copy of its tokens to `place`."""
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        self.out_hosts[place].copy_(self.out, non_blocking=True)
        if self.done:
            self.done[place].record()
        return place

    def read(self, place: int) -> Verified:
        if self.done:
            self.done[place].synchronize()
        rows = self.out_hosts[place].tolist()
        width = 1 + self.k
        return Verified([r[:width] for r in rows], [r[width:] for r in rows], self.logits)

    def _step(self) -> None:
        """What is captured."""
        k, width = self.k, 1 + self.k
        at = torch.arange(width, device=self.whole.device)
        computed, tokens = self.whole[:, COMPUTED], self.whole[:, TOKENS:]
        positions = computed[:, None] + at
        active = self.whole[:, ACTIVE, None]
        table = self.table * active
        batch = self._batch(tokens, positions, table, self.query_start)
        hidden = self.model.forward(batch, self.cache)
        self.model.store_hidden(hidden, batch, self.cache)
        self.logits = self.model.logits(hidden)
        targets = sample(self.logits, self._sampling(positions + 1)).view(-1, width)
        if self.forced:
            agree = torch.rand(targets.shape[0], k, device=targets.device) < self.chances
            targets[:, :k] = torch.where(agree, tokens[:, 1:], (tokens[:, 1:] + 1) % self.model.spec.vocab)
        kept = (targets[:, :k] == tokens[:, 1:]) & (at[:k] < self.whole[:, N_DRAFTS, None])
        n_new = 1 + kept.to(torch.int64).cumprod(1).sum(1)
        self.out[:, :width] = targets
        drafts = self._drafts(targets, positions + 1, table, n_new, hidden) if k else targets[:, :0]
        self.out[:, width:] = drafts
        self._advance(targets, positions + 1, n_new, drafts)

    def _advance(self, targets: Tensor, positions: Tensor, n_new: Tensor, drafts: Tensor) -> None:
        """The next step's inputs. `targets` [B, 1 + k] would stand at `positions`; the first `n_new` of them do."""
        whole = self.whole
        stops = (targets[..., None] == whole[:, None, STOPS:TOKENS]).any(-1)
        stops &= (positions >= whole[:, FIRST_STOP, None]) & (positions < positions[:, :1] + n_new[:, None])
        length = positions[:, 0] + n_new
        over = stops.any(-1) | (length >= whole[:, MAX_LEN])
        active = whole[:, ACTIVE] * ~over
        whole[:, COMPUTED] = (length - 1) * active
        whole[:, COMMIT] = n_new * active
        whole[:, SLOT] *= active
        left = torch.minimum(whole[:, MAX_LEN] - length - 1, whole[:, DRAFT_LEN])
        whole[:, N_DRAFTS] = left.clamp(min=0) * active
        whole[:, ACTIVE] = active
        whole[:, TOKENS] = targets.gather(1, n_new[:, None] - 1)[:, 0]
        whole[:, TOKENS + 1 :] = drafts

    def _drafts(self, tokens: Tensor, positions: Tensor, table: Tensor, n_new: Tensor, hidden: Tensor) -> Tensor:
        """Drafts [B, k] behind the first `n_new` of tokens [B, 1 + k], whose entries the drafter writes on the way."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < n_new[:, None]
        batch = self._batch(tokens, positions, table, self.query_start, real)
        rows = self.model.draft_forward(batch, hidden, self.cache)
        hidden = rows[self.query_start[:-1] + n_new - 1]
        position = positions[:, :1] + n_new[:, None]
        drafts: list[Tensor] = []
        for i in range(self.k):
            if i:
                batch = self._batch(drafts[-1][:, None], position, table, self.single_start)
                hidden = self.model.draft_forward(batch, hidden, self.cache)
                position = position + 1
            drafts.append(sample(self.model.draft_logits(hidden), self._sampling(position)))
        return torch.stack(drafts, dim=1)

    def _batch(
        self, tokens: Tensor, positions: Tensor, table: Tensor, query_start: Tensor, real: Tensor | None = None
    ) -> Batch:
        """Rows [B, n] as a Batch; those that are not `real` leave no keys and values."""
        page = (positions // PAGE_SIZE).clamp(max=table.shape[1] - 1)
        slots = table.gather(1, page) * PAGE_SIZE + positions % PAGE_SIZE
        if real is not None:
            slots = torch.where(real, slots, 0)
        return Batch(
            tokens=tokens.reshape(-1).contiguous(),  # kernels take every index array as contiguous
            positions=positions.reshape(-1),
            query_start=query_start,
            context_len=positions[:, 0].contiguous(),
            page_table=table,
            kv_slot=slots.reshape(-1),
            state_slot=self.whole[:, SLOT].contiguous(),
            commit=self.whole[:, COMMIT].contiguous(),
            window=True,
            max_query=tokens.shape[1],
            max_context=table.shape[1] * PAGE_SIZE,
        )

    def _sampling(self, positions: Tensor) -> SamplingRows:
        """Each sequence's parameters for its row or rows of positions [B, n]."""
        n = positions.shape[1]
        whole, real = self.whole.repeat_interleave(n, 0), self.real.repeat_interleave(n, 0)
        return SamplingRows(
            temperature=real[:, 0],
            top_k=whole[:, TOP_K],
            top_p=real[:, 1],
            min_p=real[:, 2],
            seed=whole[:, SEED],
            position=positions.reshape(-1),
            any_random=self.random,
            any_truncated=self.truncated,
        )
