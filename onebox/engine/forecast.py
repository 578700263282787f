"""What a box would do with a model, before anything is downloaded. Takes a model's name or folder, a box, a context and
a number of users; gives bytes, what fits, tokens a second at the roof and expected, the ladder, and advice.

All bytes are the ledger's, all memory the plan's; `Efficiency` turns bytes into expected seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from onebox.config import MAX_DRAFT_LEN, EngineConfig
from onebox.engine.engine import build_of
from onebox.engine.plan import GB, Facts, Machine, plan_memory, users_that_fit, weight_bytes
from onebox.errors import CheckpointError, ConfigError
from onebox.ledger import (
    BOXES,
    BUILDS,
    MEASURED,
    SHAPES,
    Box,
    Build,
    Efficiency,
    Rung,
    StepBytes,
    kv_bytes_per_token,
    ladder,
    resident_bytes,
    step_bytes,
    tokens_per_step,
)
from onebox.spec import Spec

ACCEPTANCE = (0.9, 0.8, 0.7, 0.6)  # an assumption: draft i kept, given that those before it were
SERVED_KV = ("bf16",)  # what the engine stores today
PLANNED_KV = ("fp8", "tq4")
READING_TOK_S = 10  # as fast as one reads
BUILD_OF_NAME = (("nvfp4", "nvfp4"), ("fp8", "fp8"), ("int4", "int4"), ("gptq", "int4"), ("awq", "int4"))
PARTS = {
    "routed": "routed experts",
    "shared": "shared experts",
    "router": "routers",
    "attention": "attention projections",
    "gdn": "gated delta net projections",
    "head": "LM head",
    "state": "recurrent states, read and written",
    "kv": "KV pages",
    "mtp": "drafter's block",
    "draft_head": "LM head again, for drafts",
}


@dataclass(frozen=True)
class Subject:
    """A model as far as a forecast needs it. `stored`: weight bytes of a checkpoint that is at hand."""

    name: str
    spec: Spec
    build: Build
    build_name: str
    stored: float | None = None

    @classmethod
    def of(cls, model: str, build: str | None = None) -> Subject:
        """A folder with a config.json, a shape's name, or a hub id that names a known shape.

        A name that ends in a format (`-FP8`, `-NVFP4`, `-int4-AutoRound`) means that build; `build` overrides it.
        Raises ConfigError and CheckpointError.
        """
        if build is not None and build not in BUILDS:
            raise ConfigError(f"--build {build!r} is not known. Known: {', '.join(BUILDS)}.")
        folder = Path(model)
        if folder.is_dir():
            return cls._folder(folder, build)
        name = model.rpartition("/")[2].lower().removesuffix("-instruct")
        found = re.match(r"qwen3\.[56]-(\d+b(?:-a\d+b)?)", name)
        shape = f"qwen3.5-{found[1]}" if found else ""
        if shape not in SHAPES:
            raise ConfigError(
                f"{model}: neither a folder nor a known model. Known: {', '.join(SHAPES)}, and hub ids that name one; "
                "for another, give a folder with its config.json."
            )
        guess = next((b for mark, b in BUILD_OF_NAME if mark in name), "hybrid")
        chosen = build or guess
        return cls(model, SHAPES[shape], BUILDS[chosen], chosen)

    @classmethod
    def _folder(cls, folder: Path, build: str | None) -> Subject:
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path}: cannot be read as JSON ({e}).") from e
        name, spec = folder.resolve().name, Spec.from_config(config)
        if build is not None or not any(folder.glob("*.safetensors")):
            chosen = build or "hybrid"
            return cls(name, spec, BUILDS[chosen], chosen)
        engine = EngineConfig(str(folder), device="cuda", dtype="bfloat16")
        facts = Facts.read(engine)
        stored = weight_bytes(spec, facts.report.formats, engine, mtp=facts.mtp)
        found = build_of(facts.report.formats)
        label = next((n for n, b in BUILDS.items() if b == found), "checkpoint")
        spec = spec if facts.mtp else replace(spec, n_mtp_layers=0)
        return cls(name, spec, found, label, stored)

    def weights(self, build: Build) -> float:
        """Bytes that stay in memory for weights in `build`; the folder's own for its own build."""
        if self.stored is not None and replace(build, kv=self.build.kv) == self.build:
            return self.stored
        return resident_bytes(self.spec, build, slots=0, mtp=True).weights

    @property
    def most_drafts(self) -> int:
        return MAX_DRAFT_LEN if self.spec.n_mtp_layers else 0


@dataclass(frozen=True)
class Speed:
    """Of `users` answers at once with `k` drafts: tokens a second of all together, at the roof and expected."""

    users: int
    k: int
    tokens_per_step: float
    step_gb: float
    roof_tok_s: float
    expected_tok_s: float


@dataclass(frozen=True)
class Fit:
    """What a KV format leaves room for. `users` at the asked context; `longest` is one answer's."""

    kv: str
    served: bool
    kv_kb_per_token: float
    users: int
    longest: int


@dataclass(frozen=True)
class Step:
    """One rung of the ladder."""

    rung: str
    k: int
    kv: str
    step_gb: float
    roof_tok_s: float
    expected_tok_s: float


@dataclass(frozen=True)
class Advice:
    """Settings for a workload, and why."""

    workload: str
    settings: str
    tok_s: float
    tok_s_user: float
    reason: str


@dataclass(frozen=True)
class Forecast:
    """Everything `onebox plan --box` says."""

    model: str
    build: str
    box: str
    context: int
    users: int
    k: int
    acceptance: tuple[float, ...]
    weights_gb: float
    memory_gb: float
    capacity_gb: float
    step: StepBytes
    fits: tuple[Fit, ...]
    speeds: tuple[Speed, ...]
    ladder: tuple[Step, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        made = asdict(self)
        made["step"] = {name: round(size) for name, size in made["step"].items()}
        return made


def machine_of(box: Box) -> Machine:
    """The box with nothing running, as the memory plan takes it."""
    free = box.memory - box.taken
    host = free if box.unified else 64e9
    return Machine("unified" if box.unified else "discrete", box.title, box.memory, free, host)


class Forecaster:
    """One model on one box: speeds and fits by users, drafts, context and KV format."""

    def __init__(
        self,
        subject: Subject,
        box: Box,
        config: EngineConfig,
        acceptance: Sequence[float] = ACCEPTANCE,
        efficiency: Efficiency = MEASURED,
    ) -> None:
        self.subject, self.box, self.config = subject, box, config
        self.acceptance, self.efficiency = tuple(acceptance), efficiency
        self.machine = machine_of(box)

    def speed(self, users: int, context: int, k: int, build: Build | None = None) -> Speed:
        spec = self.subject.spec
        step = step_bytes(spec, build or self.subject.build, batch=users, context=context, k=k)
        tokens = tokens_per_step(self.acceptance[:k])
        seconds = self.efficiency.step_s(spec, step, self.box, batch=users, k=k)
        roof = users * step.roof_tok_s(self.box.bytes_per_s, tokens)
        return Speed(users, k, tokens, step.total / GB, roof, users * tokens / seconds)

    def users(self, context: int, k: int, kv: str, build: Build | None = None) -> int:
        build = build or self.subject.build
        return users_that_fit(
            replace(self.config, draft_len=k),
            self.subject.spec,
            self.machine,
            context=min(context, self.subject.spec.max_positions),
            weights=self.subject.weights(build),
            draft_len=k,
            mtp=self.subject.spec.n_mtp_layers > 0,
            kv=kv,
        )

    def longest(self, k: int, kv: str) -> int:
        """Tokens of one answer alone, up to the checkpoint's positions; 0 when none fits."""
        alone = replace(self.config, draft_len=k, max_num_seqs=1, max_model_len=None, kv_gb=None)
        mtp = self.subject.spec.n_mtp_layers > 0
        weights = self.subject.weights(self.subject.build)
        try:
            made = plan_memory(alone, self.subject.spec, self.machine, weights=weights, draft_len=k, mtp=mtp, kv=kv)
        except ConfigError:
            return 0
        return made.max_model_len

    def best_k(self, users: int, context: int, build: Build | None = None) -> Speed:
        return max(
            (self.speed(users, context, k, build) for k in range(self.drafts + 1)), key=lambda s: s.expected_tok_s
        )

    @property
    def drafts(self) -> int:
        return min(self.subject.most_drafts, len(self.acceptance))


def forecast(
    subject: Subject,
    box_name: str,
    *,
    context: int = 4096,
    users: int = 1,
    k: int | None = None,
    acceptance: Sequence[float] = ACCEPTANCE,
    config: EngineConfig | None = None,
    efficiency: Efficiency = MEASURED,
) -> Forecast:
    """Raises ConfigError for an unknown box, a value out of range, or weights that do not fit, naming what would."""
    if box_name not in BOXES:
        raise ConfigError(f"--box {box_name!r} is not known. Known: {', '.join(BOXES)}.")
    box, spec = BOXES[box_name], subject.spec
    if not 1 <= context <= spec.max_positions:
        raise ConfigError(f"--context must be 1 to {spec.max_positions} tokens, got {context}.")
    if users < 1:
        raise ConfigError(f"--users must be at least 1, got {users}.")
    if any(not 0 <= a <= 1 for a in acceptance):
        raise ConfigError(f"--acceptance must be shares between 0 and 1, got {list(acceptance)}.")
    most = min(subject.most_drafts, len(acceptance))
    if k is not None and not 0 <= k <= most:
        why = f"{len(acceptance)} acceptances are given" if k <= subject.most_drafts else f"{most} is the most"
        raise ConfigError(f"--k {k}: must be 0 to {most} ({why if subject.most_drafts else 'no MTP head'}).")
    base = config or EngineConfig(subject.name)
    base = replace(base, device="cuda", dtype="bfloat16", fused=True)
    made = Forecaster(subject, box, base, acceptance, efficiency)
    k = made.best_k(users, context).k if k is None else k
    _check_weights(made, k)
    kv_formats = (*SERVED_KV, *PLANNED_KV)
    fits = tuple(
        Fit(
            kv,
            kv in SERVED_KV,
            kv_bytes_per_token(spec, replace(subject.build, kv=kv), mtp=spec.n_mtp_layers > 0) / 1e3,
            made.users(context, k, kv),
            made.longest(k, kv),
        )
        for kv in kv_formats
    )
    speeds = tuple(made.speed(users, context, n) for n in range(most + 1))
    rungs: list[Step] = []
    for rung in ladder(PLANNED_KV):
        step = _rung(made, rung, users, context)
        if rung.k <= most and not (rungs and rungs[-1].step_gb == step.step_gb):  # a dense model has no shared expert
            rungs.append(step)
    notes = [
        f"expected = the share of the bandwidth that the engine reached on one {efficiency.device} "
        f"({efficiency.share:.0%} of the data sheet's, and {efficiency.layer_s * 1e6:.0f} us a layer)"
        + ("" if efficiency.device.endswith(box_name.upper()) else f"; never run on a {box.title}"),
        "drafts: acceptance " + ", ".join(f"{a:g}" for a in acceptance[:most]) + " is assumed, not measured",
    ]
    if not spec.n_mtp_layers:
        notes[-1] = "no MTP head: nothing is drafted"
    if fits[0].users < users:
        others = ", ".join(f"{f.users} with {f.kv} KV" for f in fits[1:])
        notes.append(f"{users} users at {context:,} tokens do not fit: {fits[0].users} do ({others})")
    plan = plan_memory(
        replace(base, max_num_seqs=1, draft_len=k),
        spec,
        made.machine,
        weights=subject.weights(subject.build),
        draft_len=k,
        mtp=spec.n_mtp_layers > 0,
    )
    return Forecast(
        model=subject.name,
        build=subject.build_name,
        box=box_name,
        context=context,
        users=users,
        k=k,
        acceptance=tuple(acceptance[:most]),
        weights_gb=subject.weights(subject.build) / GB,
        memory_gb=box.memory / GB,
        capacity_gb=plan.capacity / GB,
        step=step_bytes(spec, subject.build, batch=users, context=context, k=k),
        fits=fits,
        speeds=speeds,
        ladder=tuple(rungs),
        advice=tuple(_advice(made, fits, context)),
        notes=tuple(notes),
    )


def _check_weights(made: Forecaster, k: int) -> None:
    """Raises ConfigError when not one short answer fits beside the weights, with builds and boxes that would do."""
    subject, box = made.subject, made.box
    if made.users(2, k, "bf16"):
        return
    own = subject.weights(subject.build)
    builds = [
        f"{name} ({subject.weights(build) / GB:.0f} GB)"
        for name, build in BUILDS.items()
        if made.users(2, k, "bf16", build)
    ]
    boxes = [
        name
        for name, other in BOXES.items()
        if Forecaster(subject, other, made.config, made.acceptance, made.efficiency).users(2, k, "bf16")
    ]
    ways = [f"builds that fit here: {', '.join(builds)}"] if builds else []
    ways += [f"boxes that hold this build: {', '.join(boxes)}"] if boxes else []
    room = made.machine.capacity(made.config) / GB
    raise ConfigError(
        f"{subject.name}: {own / GB:.1f} GB of {subject.build_name} weights do not fit on a {box.title}, which has "
        f"{room:.1f} GB to give; {'; '.join(ways) or 'no box in the table holds it'}."
    )


def _rung(made: Forecaster, rung: Rung, users: int, context: int) -> Step:
    s = made.speed(users, context, rung.k, rung.build)
    return Step(rung.name, rung.k, rung.build.kv, s.step_gb, s.roof_tok_s, s.expected_tok_s)


def _advice(made: Forecaster, fits: Sequence[Fit], context: int) -> list[Advice]:
    subject = made.subject
    alone, plain = made.best_k(1, context), made.speed(1, context, 0)
    builds = {name: made.best_k(1, context, build) for name, build in BUILDS.items()}
    fitting = {n: s for n, s in builds.items() if made.users(context, s.k, "bf16", BUILDS[n])}
    top = max(fitting, key=lambda n: fitting[n].expected_tok_s, default=subject.build_name)
    reason = (
        f"{alone.k} drafts give {alone.tokens_per_step:.2f} tokens a step for {alone.step_gb / plain.step_gb:.2f}x the "
        f"bytes of a step without ({alone.step_gb:.2f} GB)"
        if alone.k
        else f"a draft would cost more bytes than it saves; a step reads {plain.step_gb:.2f} GB"
    )
    if top in fitting and fitting[top].expected_tok_s > 1.02 * alone.expected_tok_s:
        reason += f"; build {top} would give {fitting[top].expected_tok_s:.0f} tok/s"
    found = [
        Advice("single stream", f"{alone.k} drafts", alone.expected_tok_s, alone.expected_tok_s, reason),
    ]
    # many users: the number and draft length with the most tokens a second of all together
    most = fits[0].users
    if most > 1:
        speeds = [
            made.speed(n, context, k)
            for k in range(made.drafts + 1)
            for fit in (made.users(context, k, "bf16"),)
            for n in sorted({2**i for i in range(13) if 2**i <= fit} | {fit})
        ]
        quick = [s for s in speeds if s.expected_tok_s / s.users >= READING_TOK_S]
        best = max(quick or speeds, key=lambda s: s.expected_tok_s)
        step = step_bytes(subject.spec, subject.build, batch=best.users, context=context, k=best.k)
        own = (step.state + step.kv) / step.total
        rows = best.users * (best.k + 1)
        reasons = [f"weights are read once for all; {own:.0%} of a step's bytes are states and KV"]
        if rows >= made.efficiency.rows:
            reasons.append(f"beyond {made.efficiency.rows} rows a step (here {rows}) each row costs time of its own")
        if best.users >= most:
            reasons.append(f"more do not fit ({most} at {context:,} tokens)")
        elif quick and len(quick) < len(speeds):
            reasons.append(f"more would each have less than {READING_TOK_S} tok/s ({most} fit)")
        found.append(
            Advice(
                "many users",
                f"--max-num-seqs {best.users}, {best.k} drafts",
                best.expected_tok_s,
                best.expected_tok_s / best.users,
                "; ".join(reasons),
            )
        )
    longest = fits[0].longest
    if longest:
        far = made.best_k(1, longest)
        share = step_bytes(subject.spec, subject.build, context=longest, k=far.k)
        kv = share.kv + max(share.mtp - step_bytes(subject.spec, subject.build, context=0, k=far.k).mtp, 0.0)
        smaller = ", ".join(f"{f.kv} {f.longest:,} x {made.users(f.longest, far.k, f.kv)}" for f in fits[1:])
        bound = "the checkpoint's positions" if longest >= subject.spec.max_positions else "memory"
        found.append(
            Advice(
                "long context",
                f"--max-model-len {longest}, {far.k} drafts",
                far.expected_tok_s,
                far.expected_tok_s,
                f"bound by {bound}; {made.users(longest, far.k, 'bf16')} such answers at once; KV is "
                f"{kv / share.total:.0%} of a step's bytes. Smaller formats, not served yet: {smaller}",
            )
        )
    return found


def show(made: Forecast, stream: TextIO) -> None:
    """Print it as tables; plain lines of at most 120 columns where there is no terminal."""
    from rich import box as borders
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, width=None if stream.isatty() else 120, highlight=False)
    box = BOXES[made.box]

    def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
        console.print(title, style="bold")
        t = Table(box=borders.SIMPLE, pad_edge=False)
        for i, column in enumerate(columns):
            t.add_column(column, justify="left" if i in left else "right", overflow="fold")
        for row in rows:
            t.add_row(*row)
        console.print(t)

    kind = "unified" if box.unified else "device"
    capability = "{}.{}".format(*box.capability)
    console.print(
        f"{made.model}, build {made.build}, on {box.title}: {box.bytes_per_s / 1e9:,.0f} GB/s, "
        f"{made.memory_gb:.0f} GB of {kind} memory, compute capability {capability}\n"
        f"weights {made.weights_gb:.1f} GB of the {made.capacity_gb:.1f} GB that a plan may use\n",
        soft_wrap=True,
    )

    def people(n: int) -> str:
        return f"{n} user" if n == 1 else f"{n} users"

    names = PARTS if made.step.routed else PARTS | {"shared": "MLP"}
    sizes = [(names[f.name], float(getattr(made.step, f.name))) for f in fields(made.step)]
    total = made.step.total
    table(
        f"bytes a decode step: {people(made.users)} at {made.context:,} tokens, {made.k} drafts",
        ("component", "GB", "share"),
        [(name, f"{size / GB:.3f}", f"{size / total:.0%}") for name, size in sizes if size]
        + [("total", f"{total / GB:.3f}", "")],
    )
    table(
        f"what fits beside the weights, {made.k} drafts",
        ("KV format", "kB a token", f"users at {made.context:,}", "longest alone", ""),
        [
            (f.kv, f"{f.kv_kb_per_token:.1f}", str(f.users), f"{f.longest:,}", "" if f.served else "not served yet")
            for f in made.fits
        ],
        left=(0, 4),
    )
    table(
        f"tokens a second of {people(made.users)}",
        ("drafts", "tokens a step", "GB a step", "roof", "expected"),
        [
            (
                str(s.k),
                f"{s.tokens_per_step:.2f}",
                f"{s.step_gb:.2f}",
                f"{s.roof_tok_s:.1f}",
                f"{s.expected_tok_s:.1f}",
            )
            for s in made.speeds
        ],
    )
    table(
        "the ladder, each rung on top of those above it",
        ("rung", "GB a step", "roof tok/s", "expected tok/s", "gain"),
        [
            (
                r.rung,
                f"{r.step_gb:.2f}",
                f"{r.roof_tok_s:.1f}",
                f"{r.expected_tok_s:.1f}",
                f"{r.expected_tok_s / made.ladder[i - 1].expected_tok_s - 1:+.1%}" if i else "",
            )
            for i, r in enumerate(made.ladder)
        ],
    )
    table(
        "what to choose",
        ("workload", "settings", "tok/s", "each", "why"),
        [(a.workload, a.settings, f"{a.tok_s:.0f}", f"{a.tok_s_user:.1f}", a.reason) for a in made.advice],
        left=(0, 1, 4),
    )
    for note in made.notes:
        console.print(f"note: {note}", soft_wrap=True)
