"""Whether a loaded model's numbers can be believed: a fixed prompt's logits, before the first request is served.

Three findings refuse a model: a logit that is no number; a 16-bit model on a GPU whose first layers differ from
the same layers in fp32, where no Triton kernel takes part; logits that differ from those stored for the same weights.
They are stored in the checkpoint's own `fingerprint.json` (`python -m onebox.model.selfcheck DIR` writes it) or, by the
first start that passes, in the user's cache. Bounds are wide: they tell wrong numbers from rounding, and quality is
bench.quality's business.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.checkpoint import manifest
from onebox.errors import CheckpointError
from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.model.cache import Cache
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch

NAME = "fingerprint.json"
VERSION = 1
PROMPT, WINDOW = 45, 3  # tokens prefilled, and then decoded as one window; together within a page
TOP = 32  # logits that a fingerprint keeps, the largest first
FIRST_LAYERS = 4  # three gated delta nets and an attention layer in the published models
# Between 16 bits and fp32 a near tie between two experts may fall the other way, in one row of three or so a layer, and
# moves that row by a tenth: hence medians, and bounds that only wrong numbers pass.
PATHS_BOUND = 0.3  # median over rows of the relative RMS, 16-bit against fp32, after the first layers
LOGITS_BOUND = 0.75  # median difference of the stored logits, in standard deviations of a row
LOGITS_BOUND_FP32 = 0.01  # the same, where both were fp32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fingerprint:
    """The largest logits after the fixed prompt. `dtype` is the arithmetic's; `spread` a row's standard deviation."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    spread: float
    dtype: str
    version: int = VERSION

    @classmethod
    def of(cls, logits: Tensor, dtype: torch.dtype) -> Fingerprint:
        """logits [V] fp32."""
        top = logits.topk(min(TOP, logits.shape[0]))
        values = tuple(round(v, 5) for v in top.values.tolist())
        return cls(tuple(top.indices.tolist()), values, float(logits.std()), str(dtype).removeprefix("torch."))

    @classmethod
    def read(cls, path: Path) -> Fingerprint | None:
        """None where there is none, or one of another version. Raises CheckpointError where it is damaged."""
        try:
            value: Any = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path}: not a fingerprint ({e}); delete it and the next start stores one.") from e
        if isinstance(value, dict) and type(value.get("version")) is int and value["version"] != VERSION:
            return None
        try:
            found = cls(**{**value, "tokens": tuple(value["tokens"]), "logits": tuple(value["logits"])})
            sound = len(found.tokens) == len(found.logits) > 0 and 0 < found.spread < math.inf
            sound = sound and all(type(t) is int and t >= 0 for t in found.tokens)
            sound = sound and all(math.isfinite(v) for v in found.logits)
        except (TypeError, KeyError, AttributeError):
            sound = False
        if not sound:
            raise CheckpointError(f"{path}: not a fingerprint; delete it and the next start stores one.")
        return found

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(self), file)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def self_check(model: Qwen35, folder: Path, store: Path | None) -> str:
    """Check `model`, loaded from `folder`; `store` keeps fingerprints of folders without one (None: nowhere).

    Gives what it was checked by, in words. Raises CheckpointError with what is wrong and the way out.
    """
    by = []
    with torch.inference_mode():
        if model.device.type == "cuda" and model.dtype.itemsize == 2:
            check_paths(model, folder)
            by.append(f"the first {min(FIRST_LAYERS, model.spec.n_layers)} layers in fp32")
        logits = probe(model)
    now = checked(logits, folder, model.dtype)
    stored_at = folder / NAME
    stored = Fingerprint.read(stored_at)
    if stored is None and store is not None:
        stored_at = store / f"{identity(folder)}.json"
        try:
            stored = Fingerprint.read(stored_at)
        except CheckpointError as e:  # a cache is no reason to refuse anything
            logger.warning("%s", e)
        if stored is None:
            try:
                now.write(stored_at)
                by.append("no stored logits yet: stored now")
            except OSError as e:
                logger.info("the fingerprint could not be stored: %s", e)
    if stored is not None:
        check_logits(logits, stored, stored_at, folder, model.dtype)
        by.append("stored logits")
    return ", ".join(by) or "finite logits"


def checked(logits: Tensor, folder: Path, dtype: torch.dtype) -> Fingerprint:
    """The fingerprint of logits that are numbers, and not all the same."""
    if not bool(logits.isfinite().all()) or float(logits.std()) == 0:
        what = "no numbers" if not bool(logits.isfinite().all()) else "all the same"
        raise CheckpointError(
            f"{folder}: self-check: the logits of a fixed prompt are {what}. Check the weights with "
            f"'onebox build --verify {folder}', and another --dtype or --device."
        )
    return Fingerprint.of(logits, dtype)


def check_logits(logits: Tensor, stored: Fingerprint, at: Path, folder: Path, dtype: torch.dtype) -> None:
    both_fp32 = stored.dtype == "float32" and dtype == torch.float32
    bound = LOGITS_BOUND_FP32 if both_fp32 else LOGITS_BOUND
    off = math.inf
    if max(stored.tokens) < logits.shape[0]:
        now = logits[torch.tensor(stored.tokens, device=logits.device)].double().cpu()
        off = float((now - torch.tensor(stored.logits, dtype=torch.float64)).abs().median()) / stored.spread
    if off > bound:
        raise CheckpointError(
            f"{folder}: self-check: the logits of a fixed prompt are off by {off:.2g} of their spread "
            f"(bound {bound:g}) from those in {at}. Check the weights with 'onebox build --verify {folder}'; "
            "if they were changed on purpose, delete that file."
        )


def check_paths(model: Qwen35, folder: Path) -> None:
    """The first layers as they are served against the same layers in fp32, which no kernel takes."""
    cut = first_layers(model)
    got, want = hidden(cut).float(), hidden(replace(cut, dtype=torch.float32, fused=None))
    off = float(((got - want).square().mean(-1) / want.square().mean(-1)).sqrt().median())
    if not off <= PATHS_BOUND:
        raise CheckpointError(
            f"{folder}: self-check: the first {cut.spec.n_layers} layers on {model.device} differ from the same in "
            f"fp32 by {off:.2g} (relative RMS; bound {PATHS_BOUND:g}): the kernels give wrong numbers on this device. "
            "Serve it with --dtype float32 or --device cpu, and report the device, its driver, torch and triton."
        )


def first_layers(model: Qwen35) -> Qwen35:
    """The same model cut after FIRST_LAYERS, without a drafter. Weights are shared."""
    n = min(FIRST_LAYERS, model.spec.n_layers)
    spec = replace(model.spec, layer_types=model.spec.layer_types[:n], n_mtp_layers=0)
    cut = replace(model, spec=spec, layers=model.layers[:n], mtp=None, fused=None)
    if model.fused is None:
        return cut
    return replace(cut, fused=replace(model.fused, model=cut, layers=model.fused.layers[:n], drafter=None))


def probe(model: Qwen35) -> Tensor:
    """Logits [V] fp32 of the last row."""
    return model.logits(hidden(model)[-1:])[0].float()


def hidden(model: Qwen35) -> Tensor:
    """Hidden states [WINDOW, H] of a window after the fixed prompt, over a cache of its own."""
    spec, device = model.spec, model.device
    cache = Cache.allocate(
        spec, n_pages=2, n_slots=2, n_snapshots=0, window=WINDOW, dtype=model.dtype, device=device, mtp=False
    )
    common = min(spec.vocab, 4096)  # frequent pieces in a byte-pair vocabulary
    tokens = [(i * 997 + 331) % common for i in range(PROMPT + WINDOW)]
    model.forward(one_sequence(tokens[:PROMPT], 0, device, window=False), cache)
    return model.forward(one_sequence(tokens[PROMPT:], PROMPT, device, window=True), cache)


def one_sequence(tokens: list[int], start: int, device: torch.device, *, window: bool) -> Batch:
    """Rows of one sequence in page 1 and slot 1."""

    def int64(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    n = len(tokens)
    return Batch(
        tokens=int64(tokens),
        positions=int64(list(range(start, start + n))),
        query_start=int64([0, n]),
        context_len=int64([start]),
        page_table=int64([[1]]),
        kv_slot=int64([PAGE_SIZE + p for p in range(start, start + n)]),
        state_slot=int64([1]),
        commit=int64([0]),
        window=window,
        max_query=n,
        max_context=start + n,
    )


def identity(folder: Path) -> str:
    """A name for a folder's weights: by its manifest's hashes, else by names, sizes and times of its files."""
    sha = hashlib.sha256(str(VERSION).encode())
    if (folder / manifest.MANIFEST).exists():
        sha.update((folder / manifest.MANIFEST).read_bytes())
    else:
        for path in sorted(folder.glob("*")):
            if path.suffix in (".json", ".safetensors"):
                stat = path.stat()
                sha.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return sha.hexdigest()[:40]


def main() -> None:
    """Write DIR/fingerprint.json by the plain fp32 path on a CPU."""
    from onebox.model.load import load_model

    folder = Path(sys.argv[1])
    model = load_model(folder, mtp=False).model
    with torch.inference_mode():
        checked(probe(model), folder, model.dtype).write(folder / NAME)


if __name__ == "__main__":
    main()
