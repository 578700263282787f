"""A checkpoint folder -> a model on its device, with nothing missing and nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onebox.checkpoint.reader import LoadReport, WeightReader
from onebox.model.block import BlockWeights
from onebox.model.complete import check_complete, takes_mtp
from onebox.model.layers import Rope
from onebox.model.published import Published, place
from onebox.model.qwen3_5 import Qwen35
from onebox.spec import Spec

if TYPE_CHECKING:
    from onebox.model.decode import DecodeLayer


@dataclass(frozen=True)
class Loaded:
    """A model and what was met while reading it."""

    model: Qwen35
    report: LoadReport


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    mtp: bool | None = None,
    unpack: bool | None = None,
    fused: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Read every text tensor of the checkpoint at `path`.

    `mtp`: True insists on an MTP head, False leaves it out, None takes it when it is there. `unpack` turns packed
    weights into dense ones of `dtype` once, at load (None: on a CPU, where a packed product would unpack them anew at
    every step). `fused` runs decode windows through the Triton kernels, on CUDA, where they can read the weights.
    `progress` hears of layers read, and of how many there are.
    Raises CheckpointError naming the tensor or the field at fault.
    """
    device = torch.device(device)
    reader = WeightReader.open(path)
    spec = Spec.from_config(reader.config)
    with_mtp = takes_mtp(reader, spec, mtp)
    check_complete(path, mtp=with_mtp)  # by headers: damage is found before gigabytes are read
    unpack = device.type == "cpu" if unpack is None else unpack
    build = Published(reader, spec, lambda w: place(w, device, dtype, unpack=unpack), device, dtype)
    if fused:
        from onebox.model import decode  # needs triton
    embedding = build.tensor("embed_tokens.weight", spec.vocab, spec.hidden)
    packed: list[DecodeLayer | None] = []
    n_read = 0

    def merged(weights: BlockWeights) -> BlockWeights:
        """For the kernels a layer's projections are merged as soon as it is read: no two layers are there twice."""
        nonlocal n_read
        n_read += 1
        if progress is not None:
            progress(min(n_read, len(spec.layer_types)), len(spec.layer_types))
        if fused:
            weights, layer = decode.merge(weights)
            packed.append(layer)
        return weights

    model = Qwen35(
        spec=spec,
        embedding=embedding,
        layers=tuple(merged(build.block(f"layers.{i}", kind)) for i, kind in enumerate(spec.layer_types)),
        norm=build.tensor("norm.weight", spec.hidden),
        head=embedding if spec.tied else build.linear("lm_head", spec.vocab, spec.hidden),
        mtp=build.mtp() if with_mtp else None,
        rope=Rope.from_spec(spec, device),
        dtype=dtype,
        device=device,
    )
    if fused:
        if model.mtp is not None:
            model = replace(model, mtp=replace(model.mtp, block=merged(model.mtp.block)))
        drafter = packed[-1] if model.mtp is not None else None
        model = replace(model, fused=decode.Fused.of(model, packed[: len(model.layers)], drafter))
    return Loaded(model, reader.finish(ignore_mtp=not with_mtp))
