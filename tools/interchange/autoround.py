"""What onebox exports, read by AutoRound's own loader, and what AutoRound quantises, read by onebox.

    pip install auto-round && python tools/interchange/autoround.py ORIGINAL --text tests/data/calibration.jsonl

ORIGINAL is a 16-bit checkpoint folder. Two rows: (a) `onebox build ORIGINAL --format auto-round` loaded by transformers
with AutoRound's layers, (b) ORIGINAL quantised by the auto-round library, as it writes it. Each compares next-token
logits of both readers on the same tokens, in fp32. Exits with 1 when a token's is past 1e-4 (relative RMS) or a first
choice differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.bench.quality import next_token_logits
from onebox.bench.record import append, environment
from onebox.checkpoint.write import BuildOptions, build
from onebox.model.load import load_model

LIMIT = 1e-4
SAMPLES = 8  # calibration samples: one batch of the library


def stock_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [T, V] fp32 by transformers, with the layers that AutoRound puts in for packed weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    torch.nn.Module.float(model)  # fp16 otherwise, in which experts that nearly tie change places
    packed = sum(hasattr(m, "qweight") for m in model.modules())
    if not packed:
        sys.exit(f"{folder}: transformers found no packed layer; is auto-round installed?")
    with torch.inference_mode():
        return model(tokens[None]).logits[0].float()


def quantised_by_autoround(original: Path, text: Path, out: Path, iterations: int) -> Path:
    """The library's own checkpoint of `original`."""
    from auto_round import AutoRound

    tuning = AutoRound(
        str(original),
        scheme="W4A16",
        iters=iterations,
        nsamples=SAMPLES,
        seqlen=128,
        dataset=str(text),
        device_map="cpu",
        enable_torch_compile=False,
    )
    tuning.quantize_and_save(str(out), format="auto_round")
    return next(path.parent for path in out.rglob("config.json"))


def compare(row: str, folder: Path, tokens: Tensor) -> dict[str, Any]:
    theirs = stock_logits(folder, tokens)
    ours = next_token_logits(load_model(folder).model, tokens)
    errors = ((ours - theirs).square().mean(-1) / theirs.square().mean(-1)).sqrt()
    return {
        "bench": "interchange.autoround",
        "row": row,
        "tokens": len(tokens),
        "median_relative_rms": round(float(errors.median()), 6),
        "largest_relative_rms": round(float(errors.max()), 6),
        "same_first_choice": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="calibration text: JSON lines with a 'text'")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/interchange.jsonl"))
    args = parser.parse_args()
    tokens = torch.randint(10, 5000, (64,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        build(str(args.original), work / "export", BuildOptions(recipe="int4"))
        theirs = quantised_by_autoround(args.original, args.text, work / "library", args.iterations)
        lines = [
            compare("export read by AutoRound", work / "export", tokens),
            compare("AutoRound's checkpoint read by onebox", theirs, tokens),
        ]
    for line in lines:
        print(line)
        packages = {name: version(name) for name in ("auto-round", "transformers")}
        append(
            args.out, {**line, "iterations": args.iterations, **environment(torch.device("cpu")), "packages": packages}
        )
    if any(line["largest_relative_rms"] > LIMIT or line["same_first_choice"] < 1 for line in lines):
        sys.exit("interchange: the two readers disagree")


if __name__ == "__main__":
    main()
