"""Whether prompts may go through the Triton prefill kernels on this device: tried, before a prompt depends on it.

A process of its own runs two layers with the served model's heads and random weights, by the kernels and by torch. So
a kernel that does not compile, hangs, reads where it must not or gives wrong numbers costs a start some seconds and
prompts some speed, never an answer. What worked is remembered for the same device, versions, sources and heads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.kernels.sparse_attention_ref import HeadPattern
from onebox.kernels.turboquant_ref import FORMATS
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.kv_layout import kv_layout
from onebox.model.layers import MlpWeights, Rope
from onebox.model.qwen3_5 import Qwen35
from onebox.model.sequence import Sequences
from onebox.model.sparse import SparsePrefill
from onebox.spec import Spec

BOUND = 3e-2  # relative RMS, 16-bit against 16-bit, after two layers
BOUND_CODED = 0.1  # the same over KV pages in fewer bits, where a rounding moves an entry by a whole level
TIMEOUT_S = 300.0
CHUNKS = (130, 5, 70)  # tokens: over pages' edges, less than a tile, and after a history
SEQUENCES = 2
SOURCES = ("kernels/*.py", "kernels/configs.json", "model/prefill.py", "model/trial.py")
# by the place of this package, wherever the parent found it
CHILD = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from onebox.model import trial; trial.main()"
)

Run = Callable[[list[str], float], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Verdict:
    works: bool
    why: str  # in words, for the log


def run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def try_prefill(
    spec: Spec, dtype: torch.dtype, store: Path | None, *, kv: str = "auto", sparse: bool = False, run: Run = run
) -> Verdict:
    """Whether the kernels compute what torch does for models with the heads of `spec`, on the CUDA device in use.

    Over KV pages in format `kv`, with sparse heads too if `sparse`. `store` remembers what worked (None: nowhere); what
    failed is tried again at the next start.
    """
    task = {"spec": asdict(cut(spec)), "dtype": str(dtype).removeprefix("torch."), "kv": kv, "sparse": sparse}
    kept = store / f"prefill-{key(task)}.json" if store is not None else None
    if kept is not None and kept.exists():
        return Verdict(True, "they equalled torch at an earlier start")
    verdict = judged(task, run)
    if verdict.works and kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({**task, "why": verdict.why}) + "\n", encoding="utf-8")
        except OSError:
            pass  # tried again at the next start
    return verdict


def judged(task: dict[str, Any], run: Run) -> Verdict:
    try:
        done = run([sys.executable, "-c", CHILD, json.dumps(task)], TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"no result within {TIMEOUT_S:g} s")
    except OSError as e:
        return Verdict(False, f"the trial could not be run: {e}")
    lines = done.stdout.strip().splitlines()
    try:
        off = float(json.loads(lines[-1])["off"]) if done.returncode == 0 and lines else math.nan
    except (ValueError, KeyError, TypeError):
        off = math.nan
    bound = BOUND_CODED if task["kv"] in FORMATS else BOUND
    if off <= bound:
        return Verdict(True, f"relative RMS {off:.2g} from torch's")
    if not math.isnan(off):
        return Verdict(False, f"relative RMS {off:.2g} from torch's, bound {bound:g}")
    said = done.stderr.strip().splitlines()
    return Verdict(False, f"the trial ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")


def cut(spec: Spec) -> Spec:
    """Two layers with the heads of `spec`, and little else."""
    kinds = tuple(kind for kind in ("linear_attention", "full_attention") if kind in spec.layer_types)
    return replace(
        spec, hidden=256, vocab=512, layer_types=kinds, n_experts=0, top_k=0, expert_width=0, shared_width=256,
        n_mtp_layers=0, max_positions=4096, tied=True,
    )  # fmt: skip


def key(task: dict[str, Any]) -> str:
    """A name for what a verdict holds for."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    sha = hashlib.sha256(json.dumps(task, sort_keys=True).encode())
    for what in (
        torch.__version__,
        torch.version.cuda,
        device and device.name,
        device and (device.major, device.minor),
    ):
        sha.update(f"{what}\0".encode())
    sha.update(_sources())
    return sha.hexdigest()[:40]


@functools.cache
def _sources() -> bytes:
    folder = Path(__file__).parent.parent
    sha = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(folder.glob(pattern)):
            sha.update(path.read_bytes())
    return sha.digest()


def random_model(spec: Spec, dtype: torch.dtype, device: torch.device) -> Qwen35:
    """A model of `spec`, dense, its weights random with variance 1 / K."""
    random = torch.Generator().manual_seed(0)

    def w(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=random) * k**-0.5).to(device, dtype)

    def small(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random) * 0.1).to(device, dtype)

    def mixer(kind: str) -> AttentionWeights | GatedDeltaWeights:
        h, d, hv = spec.hidden, spec.head_dim, spec.gdn_v_heads
        if kind == "full_attention":
            q, kv = spec.n_heads * d, spec.n_kv_heads * d
            return AttentionWeights(w(2 * q, h), w(kv, h), w(kv, h), w(h, q), small(d), small(d))
        return GatedDeltaWeights(
            qkv=w(spec.conv_channels, h),
            z=w(spec.gdn_value_width, h),
            b=w(hv, h),
            a=w(hv, h),
            conv=w(spec.conv_channels, spec.conv_width),
            dt_bias=small(hv).float(),
            a_log=small(hv).float(),
            norm=1 + small(spec.gdn_v_dim),
            out=w(h, spec.gdn_value_width),
        )

    def block(kind: str) -> BlockWeights:
        h, i = spec.hidden, spec.shared_width
        return BlockWeights(small(h), mixer(kind), small(h), MlpWeights(w(i, h), w(i, h), w(h, i)))

    embedding = 0.02 * w(spec.vocab, spec.hidden)  # small beside what the layers add, so that their errors show
    return Qwen35(
        spec=spec,
        embedding=embedding,
        layers=tuple(block(kind) for kind in spec.layer_types),
        norm=small(spec.hidden),
        head=embedding,
        mtp=None,
        rope=Rope.from_spec(spec, device),
        dtype=dtype,
        device=device,
    )


def difference(model: Qwen35, kv: str = "auto", sparse: bool = False) -> float:
    """The largest relative RMS between the kernels' hidden states and torch's, over chunks. NaN counts as infinite."""
    tokens = torch.arange(SEQUENCES * sum(CHUNKS)).view(SEQUENCES, -1) * 997 % model.spec.vocab
    tokens = tokens.to(model.device)
    if sparse:
        model = replace(model, sparse=SparsePrefill((heads_of_all_kinds(model.spec),) * model.spec.n_layers, 0))
    layout = kv_layout(model, kv)
    paths = [
        Sequences(replace(model, prefill_kernels=on), SEQUENCES, tokens.shape[1], kv=layout) for on in (True, False)
    ]
    worst = 0.0
    for part in tokens.split(CHUNKS, dim=1):
        got, want = (path.forward(part).double() for path in paths)
        off = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def heads_of_all_kinds(spec: Spec) -> tuple[HeadPattern, ...]:
    """Patterns whose choice is no near tie, so that both paths read the same: few local pages, or every column."""
    kinds = HeadPattern("a_shape", pages=1), HeadPattern("vertical_slash", columns=4096), HeadPattern()
    return tuple(kinds[h % len(kinds)] for h in range(spec.n_heads))


def main() -> None:
    """The trial itself: a task as JSON in, the difference as JSON out."""
    task = json.loads(sys.argv[1])
    values = {**task["spec"], "layer_types": tuple(task["spec"]["layer_types"])}
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    values["rope_parameters"] = tuple((name, value) for name, value in values["rope_parameters"])
    model = random_model(Spec(**values), getattr(torch, task["dtype"]), torch.device("cuda"))
    with torch.inference_mode():
        print(json.dumps({"off": difference(model, task["kv"], task["sparse"])}))
