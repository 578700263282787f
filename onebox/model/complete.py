"""Whether a checkpoint holds exactly the tensors that its config's model is made of, by headers alone."""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.checkpoint import manifest
from onebox.checkpoint.reader import LoadReport, WeightReader
from onebox.model.published import Published
from onebox.spec import Spec


def check_complete(path: str | Path, *, mtp: bool = True) -> LoadReport:
    """Raises CheckpointError naming a tensor that is missing, misshapen or left over. Reads no weights.

    `mtp` False leaves an MTP head out of account.
    """
    reader = WeightReader.open(path)
    reader.headers_only = True
    spec = Spec.from_config(reader.config)
    build = Published(reader, spec, lambda w: w, torch.device("meta"), torch.bfloat16)
    build.tensor("embed_tokens.weight", spec.vocab, spec.hidden)
    build.tensor("norm.weight", spec.hidden)
    for i, kind in enumerate(spec.layer_types):
        build.block(f"layers.{i}", kind)
    if not spec.tied:
        build.linear("lm_head", spec.vocab, spec.hidden)
    with_mtp = mtp and spec.n_mtp_layers > 0 and reader.has_mtp()
    if with_mtp:
        build.mtp()
    report = reader.finish(ignore_mtp=not with_mtp)
    manifest.check_sizes(reader.path)  # last: a tensor's name says more than a file's length
    return report
