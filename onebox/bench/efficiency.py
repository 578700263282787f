"""What `onebox plan --box` expects of the engine: step times, fitted to measured ones by least squares of the ratio.

    onebox bench efficiency results/engine.jsonl --at a9d08f1

A step's seconds = (bytes + layers * rows beyond 32 * row_bytes) / (share * bandwidth) + layers * layer_s. The figures
that `plan` uses stand in onebox/ledger.py; lines of other commits are shown beside the prediction, not fitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onebox.bench import values
from onebox.errors import ConfigError
from onebox.ledger import BOXES, BUILDS, MEASURED, SHAPES, Box, Efficiency, step_bytes

DEVICES = {"NVIDIA H200": BOXES["h200"]}
AT = "a9d08f1"  # the commit whose lines the figures in the ledger come from
ROWS = MEASURED.rows


@dataclass(frozen=True)
class Case:
    """One measured step."""

    model: str
    build: str
    batch: int
    k: int
    context: int
    draft_vocab: int | None
    ms: float
    commit: str
    device: str

    @property
    def box(self) -> Box:
        return DEVICES[self.device]

    def bytes(self) -> float:
        shape, build = SHAPES[self.model], BUILDS[self.build]
        return step_bytes(
            shape, build, batch=self.batch, context=self.context, k=self.k, draft_vocab=self.draft_vocab
        ).total

    @property
    def layers(self) -> int:
        return SHAPES[self.model].n_layers + self.k

    def predicted_ms(self, e: Efficiency) -> float:
        shape, build = SHAPES[self.model], BUILDS[self.build]
        step = step_bytes(shape, build, batch=self.batch, context=self.context, k=self.k, draft_vocab=self.draft_vocab)
        return 1e3 * e.step_s(shape, step, self.box, batch=self.batch, k=self.k)


def cases(records: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Captured engine steps of published shapes and builds on a box of the table."""
    found = []
    for r in records:
        if r.get("bench") != "engine" or not r.get("captured") or r.get("device") not in DEVICES:
            continue
        if r.get("model") not in SHAPES or r.get("build") not in BUILDS or r.get("mtp_format", "build's") != "build's":
            continue
        wanted = (r.get("batch"), r.get("k"), r.get("prompt"), r.get("ms_per_step"))
        if not all(isinstance(n, int | float) and 0 <= n < 1e9 for n in wanted) or not r["ms_per_step"]:
            continue
        found.append(
            Case(
                r["model"],
                r["build"],
                r["batch"],
                r["k"],
                r["prompt"] + 100,  # the middle of the steps that are timed
                r.get("draft_vocab"),
                r["ms_per_step"],
                str(r.get("commit")),
                r["device"],
            )
        )
    return found


def fit(measured: Sequence[Case]) -> Efficiency:
    """Figures of the engine; needs lines with few rows and one with more than 32."""
    unit = np.array([c.bytes() / c.box.bytes_per_s for c in measured])
    layers = np.array([float(c.layers) for c in measured])
    beyond = np.array([max(c.batch * (c.k + 1) - ROWS, 0) for c in measured]) * layers / measured[0].box.bytes_per_s
    seconds = np.array([c.ms / 1e3 for c in measured])
    columns = np.stack([unit, layers, beyond], axis=1) / seconds[:, None]
    (per_byte, layer_s, per_row), *_ = np.linalg.lstsq(columns, np.ones(len(measured)), rcond=None)
    return Efficiency(1 / per_byte, layer_s, per_row / per_byte, measured[0].device)


def read(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines. Raises ConfigError."""
    try:
        found = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not a file of JSON lines ({e}).") from e
    return [line for line in found if isinstance(line, dict)]


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=Path("results/engine.jsonl"))
    parser.add_argument("--at", default=AT, help="commit whose lines are fitted")
    args = parser.parse_args()
    found = cases(read(args.results))
    at = [c for c in found if c.commit == args.at]
    if len(at) < 3:
        parser.error(f"{args.results} has {len(at)} captured engine steps of commit {args.at}; at least 3 are needed")
    e = fit(at)
    print(f"share {e.share:.3f}  layer {e.layer_s * 1e6:.1f} us  row {e.row_bytes / 1e6:.1f} MB a layer  ({e.device})")
    for c in found:
        ms, fitted = c.predicted_ms(e), "fitted" if c.commit == args.at else c.commit
        vocab = "" if c.draft_vocab is None else f" of {c.draft_vocab}"
        case = f"{c.model:18} batch {c.batch:3} k {c.k}{vocab:9}"
        print(f"{case} {c.ms:8.3f} ms, model {ms:8.3f}, {ms / c.ms:.2f}  {fitted}")


if __name__ == "__main__":
    main()
