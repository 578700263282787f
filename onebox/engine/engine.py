"""The step loop: schedule, run, settle. Requests in, Outputs out. The only file that sees all the others."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from onebox.config import EngineConfig, cpu_threads
from onebox.engine.graph_runner import GraphRunner, News
from onebox.engine.pages import PAGE_SIZE, Pool, pages_for
from onebox.engine.prefix import PrefixCache
from onebox.engine.process import EngineInfo, EngineStats
from onebox.engine.sampler import token_logprobs
from onebox.engine.scheduler import Chunk, Scheduler
from onebox.engine.sequence import Phase, Sequence
from onebox.engine.speculate import accept, choose
from onebox.engine.states import SnapshotSlots
from onebox.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from onebox.ledger import Build, kv_bytes_per_token, state_bytes
from onebox.model.cache import Cache
from onebox.model.load import Loaded, load_model
from onebox.request import FinishReason, Output, Request
from onebox.spec import Spec

DEFAULT_DRAFT_LEN = 2
CPU_KV_GB = 1.0
CPU_SNAPSHOT_GB, CUDA_SNAPSHOT_GB = 0.25, 4.0
CUDA_KV_SHARE = 0.8  # of the memory still free after the weights


class Engine:
    """One model, many requests. Not thread-safe: one caller adds, cancels and steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the checkpoint and allocate KV pages and state slots. Raises CheckpointError or ConfigError."""
        config = config.resolve_device(cuda_devices=torch.cuda.device_count())
        if config.device == "cpu":
            torch.set_num_threads(cpu_threads())
        loaded = load_model(
            config.model,
            device=config.device,
            dtype=getattr(torch, config.dtype),
            mtp={None: None, 0: False}.get(config.draft_len, True),
            fused=config.fused,
        )
        self.loaded: Loaded = loaded
        model, spec = loaded.model, loaded.model.spec
        draft_len = config.draft_len
        if draft_len is None:
            draft_len = DEFAULT_DRAFT_LEN if model.mtp is not None else 0
        max_model_len = config.max_model_len or spec.max_positions
        if max_model_len > spec.max_positions:
            raise ConfigError(
                f"max_model_len {max_model_len} is more than the checkpoint's {spec.max_positions} positions "
                "(max_position_embeddings)."
            )
        self.config = replace(config, draft_len=draft_len, max_model_len=max_model_len)
        self.draft_len, self.max_model_len = draft_len, max_model_len
        self.eos_token_ids = eos_token_ids(Path(config.model), spec)
        n_pages = self._plan_pages(spec, model.mtp is not None)
        n_snapshots, n_host = self._plan_snapshots(spec)
        pages = Pool(n_pages)
        self.scheduler = Scheduler(
            pages,
            Pool(config.max_num_seqs),
            PrefixCache(pages, SnapshotSlots(n_snapshots, n_host)),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            snapshot_every=config.snapshot_every,
        )
        cache = Cache.allocate(
            spec,
            n_pages=1 + n_pages,
            n_slots=1 + config.max_num_seqs,
            n_snapshots=1 + n_snapshots,
            window=1 + draft_len,
            dtype=model.dtype,
            device=model.device,
            mtp=model.mtp is not None,
        )
        self.runner = GraphRunner(model, cache)
        self.sequences: dict[str, Sequence] = {}
        self._counts: Counter[str] = Counter()
        self._accepted_per_pos = [0] * draft_len
        self._arrivals = 0

    @property
    def info(self) -> EngineInfo:
        model = self.runner.model
        return EngineInfo(
            model=self.config.model,
            build="+".join(sorted(self.loaded.report.formats)),
            vocab=model.spec.vocab,
            max_model_len=self.max_model_len,
            max_num_seqs=self.scheduler.max_num_seqs,
            draft_len=self.draft_len,
            eos_token_ids=self.eos_token_ids,
            device=self.config.device,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthError, QueueFullError, or RequestError naming the field."""
        vocab, params = self.runner.model.spec.vocab, request.params
        if request.id in self.sequences:
            raise RequestError(f"Request id {request.id!r} is in use.", param="request_id")
        if not request.prompt:
            raise RequestError("The prompt has no tokens.", param="prompt")
        if not all(0 <= t < vocab for t in request.prompt):
            bad = next(t for t in request.prompt if not 0 <= t < vocab)
            raise RequestError(f"Token id {bad} is outside the vocabulary of {vocab}.", param="prompt")
        for token, _ in params.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError(f"'logit_bias' names token {token}; ids end at {vocab - 1}.", param="logit_bias")
        if len(request.prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(request.prompt)} tokens; this server's context is {self.max_model_len} tokens, "
                "prompt and answer together.",
                param="prompt",
            )
        draft_len = self.draft_len if request.draft_len is None else min(request.draft_len, self.draft_len)
        stop_ids = {t for t in params.stop_token_ids if 0 <= t < vocab}
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            draft_len=draft_len,
            stop_ids=frozenset(stop_ids if params.ignore_eos else stop_ids | set(self.eos_token_ids)),
            max_len=min(len(request.prompt) + params.max_tokens, self.max_model_len),
        )
        self.scheduler.add(sequence)
        self._arrivals += 1
        self.sequences[request.id] = sequence

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds now. Unknown or finished ids are ignored."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.cancel(sequence)
            self._count(cancelled=1)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def step(self) -> list[Output]:
        """Run one step of everything that is scheduled. Gives what each request got."""
        plan = self.scheduler.schedule()
        outputs: list[Output] = []
        with torch.inference_mode():
            self.runner.move(plan.ops)
            news: list[News] = []
            if plan.window:
                news += self._step_window(plan.window, outputs)
            if plan.prefill:
                news += self._step_prefill(plan.prefill, outputs)
            self.runner.draft(news)
        for output in outputs:
            if output.finish_reason is not None:
                self.scheduler.finish(self.sequences.pop(output.request_id))
        self.scheduler.settle(plan)
        self._count(steps=1, finished=sum(o.finish_reason is not None for o in outputs))
        if self.config.debug:
            self.scheduler.check()
        return outputs

    def stats(self) -> EngineStats:
        scheduler, slots = self.scheduler, self.scheduler.prefix.slots
        return EngineStats(
            **self._counts,
            pages_total=scheduler.pages.total,
            slots_total=scheduler.slots.total,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_free=scheduler.pages.n_free,
            pages_cached=scheduler.prefix.n_idle,
            slots_free=scheduler.slots.n_free,
            preemptions=scheduler.preemptions,
            snapshots_total=slots.device.total,
            snapshots_free=slots.device.n_free,
            host_snapshots_total=slots.host.total,
            host_snapshots_free=slots.host.n_free,
            accepted_per_pos=tuple(self._accepted_per_pos),
            prefix=dict(scheduler.prefix.counts),
        )

    def _step_prefill(self, chunks: tuple[Chunk, ...], outputs: list[Output]) -> list[News]:
        hidden = self.runner.prefill(chunks)
        done = [i for i, c in enumerate(chunks) if c.last]
        for c in chunks:
            c.sequence.prefilled(c.n)
        if not done:
            return []
        logits = self.runner.model.logits(hidden[done])
        sequences = [chunks[i].sequence for i in done]
        targets = choose(logits, [(s, []) for s in sequences])
        news = []
        for row, (i, s) in enumerate(zip(done, sequences, strict=True)):
            if len(s.tokens) == s.prompt_len:  # not a preempted one's return
                self._count(prompt_tokens=s.prompt_len, cached_tokens=s.cached_tokens)
            s.phase = Phase.DECODE
            n = self._settle(s, 0, [targets[row]], logits[row, None], outputs)
            news.append(News(s, n, hidden[i, None][:n]))
        return news

    def _step_window(self, window: tuple[Sequence, ...], outputs: list[Output]) -> list[News]:
        hidden = self.runner.window(window)
        logits = self.runner.model.logits(hidden)
        targets = choose(logits, [(s, s.drafts[:i]) for s in window for i in range(1 + len(s.drafts))])
        news, row = [], 0
        for s in window:
            rows = 1 + len(s.drafts)
            tokens = accept(s.drafts, targets[row : row + rows])
            s.drafted += rows - 1
            self._count(drafted_tokens=rows - 1, draft_windows=int(rows > 1))
            n = self._settle(s, len(tokens), tokens, logits[row : row + rows], outputs)
            news.append(News(s, n, hidden[row : row + n]))
            row += rows
        return news

    def _settle(self, s: Sequence, n_rows: int, tokens: list[int], logits: Tensor, outputs: list[Output]) -> int:
        """Append and report the step's tokens, of which `n_rows` rows of a window stand. Gives how many were kept."""
        reason: FinishReason | None = None
        stop_token: int | None = None
        said = len(s.tokens) - s.prompt_len
        for i, token in enumerate(tokens):
            if token in s.stop_ids and said + i >= s.request.params.min_tokens:
                reason, stop_token, tokens = "stop", token, tokens[:i]
                break
        kept = min(max(n_rows - 1, 0), len(tokens))  # drafts behind a stop are not kept
        s.accepted += kept
        for i in range(kept):
            s.accepted_per_pos[i] += 1
            self._accepted_per_pos[i] += 1
        s.verified(n_rows, tokens)
        if reason is None and len(s.tokens) >= s.max_len:
            reason = "length"
        n_top = s.request.params.logprobs
        outputs.append(
            Output(
                request_id=s.request.id,
                tokens=tuple(tokens),
                logprobs=()
                if n_top is None
                else tuple(token_logprobs(logits[i], token, n_top) for i, token in enumerate(tokens)),
                finish_reason=reason,
                stop_token=stop_token,
                prompt_tokens=s.prompt_len,
                cached_tokens=s.cached_tokens,
                drafted=s.drafted,
                accepted=s.accepted,
                accepted_per_pos=tuple(s.accepted_per_pos),
            )
        )
        self._count(generated_tokens=len(tokens), accepted_tokens=kept)
        return len(tokens)

    def _plan_snapshots(self, spec: Spec) -> tuple[int, int]:
        """Snapshots on the device and on the host; none without a prefix cache."""
        config = self.config
        if not config.prefix_caching:
            return 0, 0
        each = state_bytes(spec) or 1.0
        budget = CPU_SNAPSHOT_GB if config.device == "cpu" else CUDA_SNAPSHOT_GB
        n = config.snapshots if config.snapshots is not None else min(max(int(budget * 1e9 / each), 4), 256)
        return n, int(config.snapshot_host_gb * 1e9 / each)

    def _plan_pages(self, spec: Spec, mtp: bool) -> int:
        """KV pages: what all slots could use, within the budget. Raises ConfigError when not even one request fits."""
        config, per_seq = self.config, pages_for(self.max_model_len + 2 * self.draft_len)
        # the ledger counts 16-bit KV; a CPU run stores what it computes with
        element = torch.empty(0, dtype=getattr(torch, config.dtype)).element_size()
        page_bytes = kv_bytes_per_token(spec, Build(), mtp=mtp) / 2 * element * PAGE_SIZE
        if config.kv_gb is not None:
            budget = config.kv_gb * 1e9
        elif config.device == "cpu":
            budget = max(CPU_KV_GB * 1e9, per_seq * page_bytes)
        else:
            budget = torch.cuda.mem_get_info()[0] * CUDA_KV_SHARE
        n_pages = min(int(budget / page_bytes), config.max_num_seqs * per_seq)
        if n_pages < 2:
            raise ConfigError(
                f"{budget / 1e9:.3f} GB of KV is not two pages of {page_bytes / 1e6:.3f} MB; raise --kv-gb."
            )
        return n_pages

    def _count(self, **added: int) -> None:
        self._counts.update(added)


def eos_token_ids(folder: Path, spec: Spec) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's and config.json's together."""
    ids = list(spec.eos_token_ids)
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            value = json.loads(path.read_text("utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as e:
            raise CheckpointError(f"{path.name}: not a JSON object: {e}.") from e
        ids = ([value] if isinstance(value, int) else list(value or [])) + ids
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < spec.vocab))
