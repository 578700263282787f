"""Whether a checkpoint holds exactly the tensors that its config's model is made of, by headers alone."""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.checkpoint import manifest
from onebox.checkpoint.reader import LoadReport, WeightReader
from onebox.errors import CheckpointError
from onebox.model.published import Published
from onebox.spec import Spec


def takes_mtp(reader: WeightReader, spec: Spec, mtp: bool | None) -> bool:
    """Whether the MTP head is loaded: True insists on one, False leaves it out, None takes it when it is there.

    Raises CheckpointError when it is insisted on and absent, or there against what the config says.
    """
    if mtp is True and not (spec.n_mtp_layers and reader.has_mtp()):
        found = "no 'mtp.' tensors" if spec.n_mtp_layers else "mtp_num_hidden_layers 0"
        raise CheckpointError(
            f"{reader.path}: speculation by MTP was asked for, but the checkpoint has {found}; use k = 0."
        )
    if mtp is None and reader.has_mtp() and not spec.n_mtp_layers:
        raise CheckpointError(
            f"config.json: mtp_num_hidden_layers is 0, but {reader.path} has 'mtp.' tensors; set it to 1, or leave "
            "them out: build with --mtp drop, serve with num_speculative_tokens 0."
        )
    taken = bool(spec.n_mtp_layers) and reader.has_mtp() and mtp is not False
    if spec.n_mtp_layers > 1 and taken:
        raise CheckpointError(f"config.json: mtp_num_hidden_layers {spec.n_mtp_layers} is not supported; expected 1.")
    return taken


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
    with_mtp = mtp and takes_mtp(reader, spec, None)
    if with_mtp:
        build.mtp()
    report = reader.finish(ignore_mtp=not with_mtp)
    manifest.check_sizes(reader.path)  # last: a tensor's name says more than a file's length
    return report
