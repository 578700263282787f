"""INT4 levels tuned by the auto-round library. Takes a 16-bit checkpoint and text, gives a Quantizer.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", arXiv 2309.05516. The library loads the model by
its own means and writes a checkpoint of its own; a build takes the levels from there, so everything else of the
build (plan, other formats, resuming, hashes) stays as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from onebox.checkpoint import manifest
from onebox.checkpoint.calibration_text import read_texts
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.scheme import Scheme
from onebox.checkpoint.shards import read_json
from onebox.errors import ConfigError
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.weights import Packed, rows

DONE = "onebox.tuned.json"  # the library's checkpoint beside it is whole, and made as it says
ITERATIONS, SAMPLES, LENGTH, BATCH = 200, 128, 512, 8  # steps a layer, texts at most, tokens of each


def library_version() -> str:
    """Raises ConfigError with the way out when the library is not there."""
    try:
        return metadata.version("auto-round")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "auto-round is not installed: pip install auto-round, or calibrate with 'gptq', which needs nothing."
        ) from None


Tune = Callable[[Path, Path, int, Path], Path]  # base, text, group, a folder to write in -> the checkpoint in it


class TunedLevels:
    """A Quantizer: levels of `base` tuned on `text` in groups of `group`.

    The library's checkpoint is made in the folder `work` at the first question, and kept there under `label` for the
    same build to go on with. `taken` and `left` are the matrices it has levels for, and those it has none for.
    """

    def __init__(self, base: Path, text: Path, group: int, label: str, work: Path, tune: Tune | None = None) -> None:
        self.base, self.text, self.group, self.label, self.work = base, text, group, label, work
        self.tune = tune or _tune
        self.reader: WeightReader | None = None
        self.taken: set[str] = set()
        self.left: set[str] = set()
        self.last: tuple[str, Int4Weight | None] = ("", None)

    def __call__(self, name: str, first: int, w: Tensor, scheme: Scheme) -> Packed | None:
        if scheme.kind != "int4":
            return None
        if self.last[0] != name:
            self.last = (name, self._matrix(name, scheme.group))
        whole = self.last[1]
        (self.left if whole is None else self.taken).add(name)
        if whole is None:
            return None
        part = rows(whole, slice(first, first + w.shape[0]))
        assert isinstance(part, Int4Weight)
        return part

    def _matrix(self, name: str, group: int) -> Int4Weight | None:
        """None for what the library only rounds: the MTP head, which its model does not have, and odd widths."""
        self.reader = self.reader or WeightReader.open(self._made())
        if name.startswith("mtp.") or name not in self.reader.modules or self.reader.scheme(name).kind != "int4":
            return None
        w = self.reader.read_module(name)
        assert isinstance(w, Int4Weight)
        return replace(w, scale=w.scale.to(torch.float16)) if w.group == group and w.zero is None else None

    def _made(self) -> Path:
        """The library's checkpoint, made now unless an interrupted build of the same label left it."""
        done = self.work / DONE
        if not (done.is_file() and read_json(done).get("label") == self.label):
            if self.work.exists() and not (self.work / "library").is_dir() and any(self.work.iterdir()):
                raise ConfigError(f"{self.work}: AutoRound's checkpoint goes here, but the folder holds other files.")
            shutil.rmtree(self.work, ignore_errors=True)
            (self.work / "library").mkdir(parents=True)
            made = self.tune(self.base, self.text, self.group, self.work / "library")
            manifest.unmark(made)
            done.write_text(json.dumps({"label": self.label, "folder": str(made.relative_to(self.work))}))
        return self.work / str(read_json(done)["folder"])

    def clean(self) -> None:
        """Remove the library's checkpoint, once the build that took levels from it is done."""
        if (self.work / DONE).is_file():
            shutil.rmtree(self.work)


def count_long(text: Path, tokenizer: Path) -> int:
    """Lines of `text` with LENGTH tokens or more, which is what the library makes samples of."""
    found = sum(len(ids) >= LENGTH for ids in read_texts(text, tokenizer))
    if not found:
        raise ConfigError(f"{text}: no line has {LENGTH} tokens, which auto-round makes samples of; join short texts.")
    return found


def _tune(base: Path, text: Path, group: int, out: Path) -> Path:
    """The library's own checkpoint of `base`, somewhere in `out`."""
    library_version()
    from auto_round import AutoRound

    found = count_long(text, base / "tokenizer.json")
    batch = min(found, BATCH)
    try:
        AutoRound(
            str(base),
            scheme="W4A16",
            group_size=group,
            iters=ITERATIONS,
            nsamples=min(found // batch * batch, SAMPLES),  # whole batches: the library trips over a smaller last one
            batch_size=batch,
            seqlen=LENGTH,
            dataset=str(text),
            device_map="auto" if torch.cuda.is_available() else "cpu",
            enable_torch_compile=False,
        ).quantize_and_save(str(out), format="auto_round")
    except Exception as error:  # whatever a library of this size may raise
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{base}: auto-round ended with {type(error).__name__}: {first}; calibrate with 'gptq' instead."
        ) from error
    made = next((path.parent for path in sorted(out.rglob("config.json"))), None)
    if made is None:
        raise ConfigError(f"{base}: auto-round wrote no checkpoint into {out}; calibrate with 'gptq' instead.")
    return made
