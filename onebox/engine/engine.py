"""The step loop: schedule, run, settle. Requests in, Outputs out. The only file that sees all the others."""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from onebox.config import EngineConfig, cpu_threads, fingerprints
from onebox.engine.captured import CapturedSteps, Flight, capturable, foreseeable
from onebox.engine.client import EngineInfo, EngineStats, Progress, unheard
from onebox.engine.grammar import Grammars, Matcher
from onebox.engine.graph_runner import GraphRunner
from onebox.engine.pages import PAGE_SIZE, Pool, pages_for
from onebox.engine.plan import announce, drafts_of, kv_format, plan_for, plan_loaded, wants_mtp
from onebox.engine.prefix import PrefixCache
from onebox.engine.sampler import SamplingRows, token_logprobs
from onebox.engine.scheduler import Chunk, Scheduler
from onebox.engine.sequence import Phase, Sequence
from onebox.engine.speculate import Drafter, DraftLengths, News, PromptLookup, accept, choose
from onebox.engine.states import SnapshotSlots
from onebox.errors import CheckpointError, ContextLengthError, RequestError
from onebox.kernels.sparse_attention_ref import SPAN
from onebox.ledger import BUILDS, Build
from onebox.model.cache import Cache
from onebox.model.kv_layout import kv_layout
from onebox.model.load import Loaded, load_model
from onebox.model.selfcheck import self_check
from onebox.model.sparse import SparsePrefill
from onebox.model.trial import try_prefill
from onebox.request import FinishReason, Output, Request
from onebox.spec import Spec

COMPILE_POLL_S = 0.01  # between looks for a compiled grammar, when nothing else is to be done

logger = logging.getLogger(__name__)


def load_engine(config: EngineConfig, progress: Progress = unheard) -> Engine:
    """An engine that is ready to serve: loaded, checked, its graphs captured. Raises CheckpointError or ConfigError."""
    engine = Engine(config, progress=progress)
    engine.warm_up(progress)
    return engine


def wants_prefill_kernels(config: EngineConfig, spec: Spec) -> bool:
    """Whether prompts go through the Triton kernels: as told, else where a trial has shown that they work."""
    if config.prefill_kernels is not None:
        return config.prefill_kernels
    dtype = getattr(torch, config.dtype)
    if config.device != "cuda" or dtype.itemsize != 2:
        return False
    sparse = config.prefill_attention != "dense"
    verdict = try_prefill(spec, dtype, fingerprints(), kv=config.kv_cache_dtype, sparse=sparse)
    if not verdict.works:
        logger.warning("prompts do without the prefill kernels, more slowly: %s", verdict.why)
    return verdict.works


class Engine:
    """One model, many requests. Not thread-safe: one caller adds, cancels and steps."""

    def __init__(self, config: EngineConfig, loaded: Loaded | None = None, *, progress: Progress = unheard) -> None:
        """Plan memory, load the checkpoint unless it is given, allocate. Raises CheckpointError or ConfigError."""
        config = config.resolve_device(cuda_devices=torch.cuda.device_count())
        progress("plan", 0, 0)
        if loaded is None:
            self.plan = plan_for(config)
        else:
            self.plan = plan_loaded(config, loaded)
        announce(self.plan)
        if config.device == "cpu":
            torch.set_num_threads(cpu_threads(self.plan.weights))
        if loaded is None:
            reading = "read and pack weights" if config.fused else "read weights"
            progress(reading, 0, 0)
            loaded = load_model(
                config.model,
                device=config.device,
                dtype=getattr(torch, config.dtype),
                mtp=wants_mtp(config),
                fused=bool(config.fused),
                progress=lambda done, total: progress(reading, done, total),
            )
            if config.self_check:
                progress("self-check", 0, 0)
                logger.info("self-check: %s", self_check(loaded.model, Path(config.model), fingerprints()))
        progress("allocate memory", 0, 0)
        self.loaded: Loaded = loaded
        model, spec, plan = loaded.model, loaded.model.spec, self.plan
        if config.draft_vocab is not None:
            model = replace(model, draft_vocab=min(config.draft_vocab, spec.vocab))
        draft_len = drafts_of(config, mtp=model.mtp is not None)
        self.sparse: SparsePrefill | None = None
        if config.prefill_attention != "dense":
            table = Path(config.sparse_table) if config.sparse_table else None
            self.sparse = SparsePrefill.of(config.prefill_attention, spec, config.sparse_from, table)
        if config.device == "cuda" and config.prefill_kernels is None:
            progress("try the prefill kernels", 0, 0)
        kernels = wants_prefill_kernels(config, spec)
        model = replace(model, sparse=self.sparse, prefill_kernels=kernels)
        config = replace(config, draft_len=draft_len, max_model_len=plan.max_model_len, max_num_seqs=plan.max_num_seqs)
        self.config = config
        self.draft_len, self.max_model_len = draft_len, plan.max_model_len
        self.eos_token_ids = eos_token_ids(Path(config.model), spec)
        self._forget()
        cache = Cache.allocate(
            spec,
            n_pages=1 + plan.n_pages,
            n_slots=1 + config.max_num_seqs,
            n_snapshots=1 + plan.n_snapshots,
            window=1 + draft_len,
            dtype=model.dtype,
            device=model.device,
            mtp=model.mtp is not None,
            state_dtype=getattr(torch, config.state_dtype),
            kv=kv_layout(model, config.kv_cache_dtype),
        )
        self.runner = GraphRunner(model, cache, plan.n_host_pages)
        self.grammars = Grammars(Path(config.model) / "tokenizer.json", spec.vocab, self.eos_token_ids)
        self._compiling: dict[Sequence, Future[Matcher]] = {}
        self.captured: CapturedSteps | None = None
        self.flight: Flight | None = None  # a captured step that is launched and not read
        if self.config.cuda_graphs:
            self.captured = CapturedSteps(
                model,
                cache,
                draft_len=draft_len,
                max_num_seqs=config.max_num_seqs,
                max_pages=pages_for(self.max_model_len + 3 * draft_len + 1),
            )
        self.drafter: Drafter = self.runner
        if config.draft_method == "ngram":
            self.drafter = PromptLookup(config.lookup_max, config.lookup_min)
        self.lengths: DraftLengths | None = None
        if config.adaptive_drafts:
            build = replace(build_of(loaded.report.formats), kv=kv_format(config))
            self.lengths = DraftLengths(spec, build, draft_len, mtp=config.draft_method == "mtp")

    def _forget(self) -> None:
        """No request, nothing cached, nothing counted. Nothing may be under way."""
        config, plan = self.config, self.plan
        pages = Pool(plan.n_pages)
        build, grain = plan.kv_format, PAGE_SIZE
        if self.sparse is not None:  # a span computed in one piece has one index, wherever the budget cuts
            build += f"+{self.sparse.key}"
            grain = SPAN if config.max_num_batched_tokens >= 2 * SPAN else PAGE_SIZE
        self.scheduler = Scheduler(
            pages,
            Pool(config.max_num_seqs),
            PrefixCache(
                pages,
                SnapshotSlots(plan.n_snapshots, plan.n_host_snapshots),
                build=build,
                n_host=plan.n_host_pages,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting,
            snapshot_every=config.snapshot_every,
            grain=grain,
        )
        self.sequences: dict[str, Sequence] = {}
        self._counts: Counter[str] = Counter()
        self._accepted_per_pos = [0] * self.draft_len
        self._arrivals = 0

    def warm_up(self, progress: Progress = unheard) -> None:
        """Capture what would be captured in the way of the first requests. Before any request."""
        if self.captured is not None:
            self.captured.capture_all(lambda done, total: progress("capture", done, total))

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
            plan=self.plan.json(),
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthError, QueueFullError, or RequestError naming the field.

        A grammar is compiled meanwhile; a fault in it comes as the request's only Output, with `refused`.
        """
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
        if params.ignore_eos and request.grammar is None:
            eos: tuple[int, ...] = ()
        else:
            eos = self.eos_token_ids  # where a grammar allows the end, it is the end
        matcher = self.grammars.get(request.grammar) if request.grammar is not None else None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        SamplingRows.of([params], [seed], [0], torch.device("cpu"))  # what a step cannot build fails here, alone
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            seed=seed,
            draft_len=draft_len,
            stop_ids=frozenset(stop_ids | set(eos)),
            max_len=min(len(request.prompt) + params.max_tokens, self.max_model_len),
            matcher=matcher,
            ready=request.grammar is None or matcher is not None,
        )
        self.scheduler.add(sequence)
        if request.grammar is not None and matcher is None:
            self._compiling[sequence] = self.grammars.compile(request.grammar)
        self._arrivals += 1
        self.sequences[request.id] = sequence

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds now. Unknown or finished ids are ignored."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            if future := self._compiling.pop(sequence, None):
                future.cancel()
            self.scheduler.cancel(sequence)
            self._count(cancelled=1)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self.flight is not None

    def step(self) -> list[Output]:
        """Run one step of everything that is scheduled. Gives what each request got."""
        outputs = self._take_compiled()
        if self.flight is not None:
            return self._settle_flight(self.flight, outputs)
        plan = self.scheduler.schedule()
        with torch.inference_mode():
            self.runner.move(plan.ops)
            news: list[News] = []
            odd = (
                plan.window
            )  # sequences that the device alone cannot choose for take the eager step, beside the others
            if self.captured is not None and (plain := tuple(s for s in plan.window if capturable(s))):
                odd = tuple(s for s in plan.window if not capturable(s))
                flight = self.captured.launch(plain)
                if not plan.prefill and not odd:
                    return self._settle_flight(flight, outputs)
                self._settle_captured(self.captured, flight, outputs)
            if odd:
                news += self._step_window(odd, outputs)
            if plan.prefill:
                news += self._step_prefill(plan.prefill, outputs)
            if self.lengths is not None:
                self.lengths.choose([s for s, _, _ in news])
            self.drafter.draft(news)
        self._finish(outputs)
        self.scheduler.settle(plan.sequences)
        return outputs

    def _finish(self, outputs: list[Output]) -> None:
        """Let go of the requests that ended, and count the step."""
        for output in outputs:
            if output.finish_reason is not None:
                self.scheduler.finish(self.sequences.pop(output.request_id))
        self._count(steps=1, finished=sum(o.finish_reason is not None for o in outputs))
        if self.config.debug:
            self.scheduler.check()

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
            host_pages_total=scheduler.prefix.host.total,
            host_pages_free=scheduler.prefix.host.n_free,
            accepted_per_pos=tuple(self._accepted_per_pos),
            prefix=dict(scheduler.prefix.counts),
        )

    def _take_compiled(self) -> list[Output]:
        """Let sequences run whose grammar is compiled, and give the others' faults."""
        if not self._compiling:
            return []
        if len(self._compiling) == len(self.sequences):
            wait(self._compiling.values(), COMPILE_POLL_S, FIRST_COMPLETED)
        outputs = []
        for s, future in [(s, f) for s, f in self._compiling.items() if f.done()]:
            del self._compiling[s]
            fault = future.exception()
            if fault is None:
                s.matcher, s.ready = future.result(), True
                continue
            if not isinstance(fault, RequestError):
                logger.error("a grammar did not compile", exc_info=fault)
            outputs.append(Output(s.request.id, finish_reason="error", error=str(fault), refused=True))
        return outputs

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
        for s in window:
            if s.matcher is not None:
                s.drafts = s.matcher.cut(s.drafts)
        hidden = self.runner.window(window)
        logits = self.runner.model.logits(hidden)
        targets = choose(logits, [(s, s.drafts[:i]) for s in window for i in range(1 + len(s.drafts))])
        news, row = [], 0
        for s in window:
            rows = 1 + len(s.drafts)
            tokens = accept(s.drafts, targets[row : row + rows])
            s.drafted += rows - 1
            self._count(drafted_tokens=rows - 1, draft_windows=int(rows > 1))
            if self.lengths is not None:
                self.lengths.observe(s, rows - 1, len(tokens) - 1)
            n = self._settle(s, len(tokens), tokens, logits[row : row + rows], outputs)
            news.append(News(s, n, hidden[row : row + n]))
            row += rows
        return news

    def _settle_flight(self, flight: Flight, outputs: list[Output]) -> list[Output]:
        """Settle a step that the device runs, with the one after it launched first where nothing else is to be done."""
        captured = self.captured
        assert captured is not None
        with torch.inference_mode():
            self.flight = captured.again(flight) if self._may_run_ahead(flight.sequences) else None
            self._settle_captured(captured, flight, outputs)
        self._finish(outputs)
        if self.flight is None:
            self.scheduler.settle(flight.sequences)
        elif all(s.phase is Phase.FINISHED for s in flight.sequences):
            self.flight = None  # it stands in nobody's slot
        return outputs

    def _may_run_ahead(self, sequences: tuple[Sequence, ...]) -> bool:
        """Whether the next step can be launched before this one is read: the same sequences, and nothing to decide."""
        live = tuple(s for s in sequences if s.phase is not Phase.FINISHED)
        return (
            not any(s.cancelled for s in live)
            and all(capturable(s) and foreseeable(s) for s in live)
            and self.scheduler.may_run_ahead(live, 1 + self.draft_len)
        )

    def _settle_captured(self, captured: CapturedSteps, flight: Flight, outputs: list[Output]) -> None:
        """Read a step and tell its sequences; those over since it was launched stood in nobody's slot."""
        step = captured.land(flight)
        width = 1 + captured.draft_len
        for b, s in enumerate(flight.sequences):
            if s.phase is Phase.FINISHED:
                continue
            told = outputs if not s.cancelled else []  # nobody listens to the cancelled; their numbers are settled
            n_drafts = len(s.drafts)
            tokens = accept(s.drafts, step.targets[b][: 1 + n_drafts])
            s.drafted += n_drafts
            self._count(drafted_tokens=n_drafts, draft_windows=int(n_drafts > 0))
            self._settle(s, len(tokens), tokens, step.logits[b * width : (b + 1) * width], told)
            s.drafts = step.drafts[b][: s.n_drafts]

    def _settle(self, s: Sequence, n_rows: int, tokens: list[int], logits: Tensor, outputs: list[Output]) -> int:
        """Append and report the step's tokens, of which `n_rows` rows of a window stand. Gives how many were kept."""
        reason: FinishReason | None = None
        stop_token: int | None = None
        said = len(s.tokens) - s.prompt_len
        m, least = s.matcher, s.request.params.min_tokens
        for i, token in enumerate(tokens):
            # with a grammar, an end that min_tokens forbids was the only token there was
            if token in s.stop_ids and (m is not None or said + i >= least):
                reason, stop_token, tokens = "stop", token, tokens[:i]
                break
            if m is None:
                continue
            m.accept(token)
            if m.finished:
                reason, tokens = "stop", tokens[: i + 1]
                break
        if m is not None and m.error:
            reason, tokens = "error", []
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
                error=m.error if m is not None else None,
                refused=reason == "error",
                stop_token=stop_token,
                prompt_tokens=s.prompt_len,
                cached_tokens=s.cached_tokens,
                drafted=s.drafted,
                accepted=s.accepted,
                accepted_per_pos=tuple(s.accepted_per_pos),
                waited_s=s.waited_s or 0.0,
            )
        )
        self._count(generated_tokens=len(tokens), accepted_tokens=kept)
        return len(tokens)

    def _count(self, **added: int) -> None:
        self._counts.update(added)


def build_of(formats: Mapping[str, int]) -> Build:
    """The ledger's build that comes nearest to a checkpoint's formats."""
    names = {"int4": "hybrid", "nvfp4": "nvfp4", "fp8": "fp8"}
    return BUILDS[next((build for name, build in names.items() if name in formats), "bf16")]


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
