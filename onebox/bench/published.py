"""Published speeds of other stacks on these models, and what the ledger says of them: bytes a step, the roof, and the
share of the box's bandwidth that the measurement implies.

What a source leaves open is filled in and said in `assumed`; a share outside 0.5 to 0.95 has its reason in `why`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onebox.ledger import BOXES, BUILDS, SHAPES, Box, Build, StepBytes, step_bytes

LOW, HIGH = 0.5, 0.95
BIG, SMALL, DENSE = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "qwen3.5-27b"
_INT8_HEAD = replace(BUILDS["int4-fp8"], head="int8")  # drafter in 16 bits
_NVFP4_EXPERTS = Build(experts="nvfp4")  # the rest in 16 bits
_NVFP4_DENSE = replace(BUILDS["nvfp4"], head="bf16", mtp_dense="bf16")


@dataclass(frozen=True)
class Published:
    """One measurement. `tok_s` is of all `batch` streams; `tokens_per_step` comes from the source's acceptance.

    Stacks that keep a state a row write the recurrent state k + 1 times a step.
    """

    what: str
    source: str
    model: str
    build: Build
    tok_s: float
    batch: int = 1
    context: int = 400
    k: int = 0
    tokens_per_step: float = 1.0
    box: str = "dgx-spark"
    assumed: str = ""
    why: str = ""

    @property
    def step(self) -> StepBytes:
        return step_bytes(
            SHAPES[self.model],
            self.build,
            batch=self.batch,
            context=self.context,
            k=self.k,
            state_writes=self.k + 1,
        )

    @property
    def machine(self) -> Box:
        return BOXES[self.box]

    @property
    def roof_tok_s(self) -> float:
        return self.batch * self.step.roof_tok_s(self.machine.bytes_per_s, self.tokens_per_step)

    @property
    def share(self) -> float:
        """Of the bandwidth, if every byte of the ledger was read once: an upper bound where rows share experts."""
        return self.tok_s / self.roof_tok_s

    @property
    def explained(self) -> bool:
        return LOW <= self.share <= HIGH or bool(self.why)


RECIPE = "github.com/albond/DGX_Spark_Qwen3.5-122B-A10B-AR-INT4"
SUCCESSOR = "github.com/Entrpi/qwen3.5-122B-A10B-on-spark"
WARPCORE = "github.com/jtchilders-ai-assistant/warpcore-benchmarks"
DAILY = "Builder Daily, 2026-05-04"
_KEPT = "drafts kept 0.95, then 0.8 (README)"
_PREFILL = "each answer's prompt (512 tokens for 256) is in its time: prefill takes the rest, and requests wait"
_TRITON = "experts ran in generic FP8 block kernels: launches and dequantisation, not bytes"

PUBLISHED: tuple[Published, ...] = (
    Published("INT4", RECIPE, BIG, BUILDS["int4"], 28.3),
    Published("+ FP8 shared experts", RECIPE, BIG, BUILDS["int4-fp8"], 30.8),
    Published("+ INT8 head, no drafts", SUCCESSOR, BIG, _INT8_HEAD, 36.0),
    Published("+ MTP-1", RECIPE, BIG, BUILDS["int4-fp8"], 38.4, k=1, tokens_per_step=1.95, assumed=_KEPT),
    Published("+ MTP-2, INT8 head", RECIPE, BIG, _INT8_HEAD, 51.0, k=2, tokens_per_step=2.71, assumed=_KEPT),
    Published(
        "+ TurboQuant KV",
        RECIPE,
        BIG,
        _INT8_HEAD,
        39.0,
        k=2,
        tokens_per_step=2.71,
        assumed=_KEPT + "; at 400 tokens KV is 0.1 % of the bytes whatever its format",
    ),
    Published("35B, the same stack", RECIPE, SMALL, _INT8_HEAD, 112.0, k=2, tokens_per_step=2.71, assumed=_KEPT),
    *(
        Published(
            f"INT4, {users} at a time",
            WARPCORE,
            BIG,
            BUILDS["int4"],
            tok_s,
            batch=users,
            context=640,
            why=_PREFILL if users == 256 else "",
        )
        for users, tok_s in (
            (1, 26.9),
            (2, 44.2),
            (4, 63.0),
            (8, 81.5),
            (16, 109.0),
            (32, 141.0),
            (64, 187.0),
            (128, 226.0),
            (192, 228.0),
            (256, 223.0),
        )
    ),
    *(
        Published(
            what,
            DAILY,
            SMALL,
            _NVFP4_EXPERTS,
            tok_s,
            batch=users,
            context=context,
            k=1,
            tokens_per_step=1 + kept,
            assumed=f"drafts kept {kept:g} (source); experts NVFP4, the rest and the drafter 16-bit",
        )
        for what, tok_s, users, context, kept in (
            ("35B NVFP4 + MTP-1, 512 / 512", 55.9, 1, 768, 0.854),
            ("35B NVFP4 + MTP-1, 32 at a time, 1024 / 512", 433.4, 32, 1280, 0.852),
        )
    ),
    Published("35B FP8, low end", DAILY, SMALL, BUILDS["fp8"], 28.0, context=768, why=_TRITON),
    Published("35B FP8, high end", DAILY, SMALL, BUILDS["fp8"], 33.0, context=768, why=_TRITON),
    Published("35B FP8, 32 at a time", DAILY, SMALL, BUILDS["fp8"], 155.6, batch=32, context=1280, why=_TRITON),
    Published(
        "27B dense, slower figure",
        "community reports, format not stated",
        DENSE,
        _NVFP4_DENSE,
        10.0,
        assumed="4-bit, 16-bit head: in FP8 this would be 99.7 % of the bandwidth",
    ),
    Published(
        "27B dense, faster figure",
        "community reports, format not stated",
        DENSE,
        _NVFP4_DENSE,
        15.2,
        assumed="4-bit, 16-bit head, no drafts: in FP8 it would need 1.5 times the bandwidth",
    ),
)


def markdown() -> str:
    """The table of docs/benchmarks.md."""
    lines = [
        "| measurement | tok/s | GB a step | roof tok/s | bandwidth share | filled in, or why outside 0.5 to 0.95 |",
        "|---|---|---|---|---|---|",
    ]
    for p in PUBLISHED:
        said = p.why if not LOW <= p.share <= HIGH else p.assumed
        numbers = f"{p.tok_s:g} | {p.step.total / 1e9:.2f} | {p.roof_tok_s:.1f} | {p.share:.2f}"
        lines.append(f"| {p.what} | {numbers} | {said} |")
    return "\n".join(lines) + "\n"
