"""Hessians of a model's matrices over calibration text, one layer in memory at a time.

Takes a 16-bit checkpoint and token windows, gives the mean of x x^T over the inputs x of a module asked for by name.
Layers see the inputs that the unquantised layers before them make, so a layer's Hessians do not depend on what was
built before: a resumed build sees the same ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onebox.checkpoint import tuning
from onebox.checkpoint.calibration_text import read_texts
from onebox.checkpoint.gptq import gptq_quantizer
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.write import Quantizer
from onebox.errors import ConfigError
from onebox.model.attention import AttentionWeights
from onebox.model.block import BlockWeights, attention_block, gdn_block
from onebox.model.cache import Cache
from onebox.model.gated_delta import GatedDeltaWeights
from onebox.model.layers import MlpWeights, Rope, rms_norm
from onebox.model.moe import MoeWeights
from onebox.model.mtp import MtpWeights, mtp
from onebox.model.published import Published, place
from onebox.model.sequence import even_batch, page_table
from onebox.spec import Spec

MIN_INPUTS = 64  # an expert met less often is rounded to nearest


WINDOW = 1024


METHODS = ("gptq", "auto-round")


def calibration_label(text: Path, method: str = "gptq", window: int = WINDOW) -> str:
    """What a build calibrated with the file `text` says of it: the method, its settings and the text's hash."""
    if method not in METHODS:
        raise ConfigError(f"--calibrate-with {method!r} is not known. Known: {', '.join(METHODS)}.")
    how = f"gptq, windows of {window} tokens"
    if method == "auto-round":
        steps = f"{tuning.ITERATIONS} steps, {tuning.SAMPLES} texts of {tuning.LENGTH} tokens"
        how = f"auto-round {tuning.library_version()}, {steps}"
    try:
        return f"{how}, text sha256 {hashlib.sha256(text.read_bytes()).hexdigest()}"
    except OSError as error:
        raise ConfigError(f"{text}: {error.strerror or error}; expected calibration text.") from None


def read_windows(text: Path, tokenizer: Path, window: int = WINDOW) -> list[Tensor]:
    """Token windows of a file with one JSON object with a `text` a line; `tokenizer` is a tokenizer.json."""
    texts = read_texts(text, tokenizer)
    windows = [w for ids in texts for w in torch.split(torch.tensor(ids), window) if len(w) > 1]
    if not windows:
        raise ConfigError(f"{text}: holds no text to calibrate with.")
    return windows


class Taps(TorchFunctionMode):
    """Keeps the inputs of `F.linear` by the address of its weight."""

    def __init__(self, names: dict[int, tuple[str, ...]]) -> None:
        self.names = names
        self.inputs: dict[str, list[Tensor]] = {name: [] for each in names.values() for name in each}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) >= 2 and isinstance(args[1], Tensor):
            for name in self.names.get(args[1].data_ptr(), ()):
                self.inputs[name].append(args[0].reshape(-1, args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


class Calibration:
    """Hessians by canonical module name. Ask in layer order: going back starts from the embedding again."""

    def __init__(
        self,
        path: str | Path,
        windows: Sequence[Tensor],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.path, self.device, self.dtype = Path(path), torch.device(device), dtype
        self.windows = [w.to(self.device) for w in windows]
        self.spec = Spec.from_config(WeightReader.open(path).config)
        largest = max((int(w.max()) for w in windows), default=0)
        if largest >= self.spec.vocab:
            raise ConfigError(
                f"{self.path / 'tokenizer.json'}: gives token {largest}, but vocab_size is {self.spec.vocab}; it "
                "belongs to another model."
            )
        self.rope = Rope.from_spec(self.spec, self.device)
        self.layer = -1  # the layer whose taps are held; n_layers is the MTP head
        self.hidden: list[Tensor] = []
        self.taps = Taps({})
        self.last: tuple[str, Tensor | None] = ("", None)

    def hessian(self, name: str) -> Tensor | None:
        """[K, K] fp32, or None for a module that calibration does not reach or that met fewer than 64 inputs."""
        match = re.match(r"(layers\.(\d+)|mtp\.layers\.0|mtp)\.", name)
        if match is None:
            return None
        layer = self.spec.n_layers if match[2] is None else int(match[2])
        if layer < self.layer:
            self.layer = -1
        with torch.inference_mode():
            while self.layer < layer:
                self._advance()
            inputs = self.taps.inputs.get(name, [])
            key = ",".join(str(x.data_ptr()) for x in inputs)
            if key and self.last[0] == key:
                return self.last[1]  # gate and up, or q, k and v, have the same inputs
            count = sum(len(x) for x in inputs)
            if count < MIN_INPUTS:
                return None
            total = torch.zeros(inputs[0].shape[1], inputs[0].shape[1], device=self.device)
            for x in inputs:
                total += x.float().T @ x.float()
            self.last = (key, (total / count).cpu())
        return self.last[1]

    def _builder(self, reader: WeightReader) -> Published:
        dense = lambda w: place(w, self.device, self.dtype, unpack=True)  # noqa: E731
        return Published(reader, self.spec, dense, self.device, self.dtype)

    def _advance(self) -> None:
        """Run the next layer over every window and keep the inputs of its matrices."""
        reader = WeightReader.open(self.path)
        build, spec = self._builder(reader), self.spec
        if self.layer < 0:
            embedding = build.tensor("embed_tokens.weight", spec.vocab, spec.hidden)
            self.hidden = [F.embedding(w, embedding).to(self.dtype) for w in self.windows]
        self.layer += 1
        if self.layer == spec.n_layers:
            self._advance_mtp(build)
        else:
            kind = spec.layer_types[self.layer]
            weights = build.block(f"layers.{self.layer}", kind)
            self.taps = Taps(_block_names(f"layers.{self.layer}", weights))
            one = replace(spec, layer_types=(kind,))
            with self.taps:
                self.hidden = [
                    self._run(tokens, x, weights, one) for tokens, x in zip(self.windows, self.hidden, strict=True)
                ]
        reader.shards.close()

    def _run(self, tokens: Tensor, x: Tensor, weights: BlockWeights, one: Spec) -> Tensor:
        table = page_table(1, len(tokens), self.device)
        batch, cache = even_batch(tokens[None], 0, table), self._cache(one, table)
        if one.layer_types[0] == "full_attention":
            rope = self.rope.tables(batch.positions, self.dtype)
            return attention_block(x, weights, batch, cache.kv[0], rope, one)
        return gdn_block(x, weights, batch, cache.gdn[0], one)

    def _advance_mtp(self, build: Published) -> None:
        spec = self.spec
        norm = build.tensor("norm.weight", spec.hidden)
        embedding = build.tensor("embed_tokens.weight", spec.vocab, spec.hidden)
        weights = build.mtp()
        self.taps = Taps(_mtp_names(weights))
        one = replace(spec, layer_types=("full_attention",))
        with self.taps:
            for tokens, x in zip(self.windows, self.hidden, strict=True):
                table = page_table(1, len(tokens), self.device)
                batch = even_batch(tokens[None, 1:], 1, table)
                embedded = F.embedding(tokens[1:], embedding).to(self.dtype)
                final = rms_norm(x, norm, spec.norm_eps)[:-1]
                mtp(embedded, final, weights, batch, self._cache(one, table).kv[0], self.rope, one)

    def _cache(self, one: Spec, table: Tensor) -> Cache:
        return Cache.allocate(
            one,
            n_pages=1 + table.numel(),
            n_slots=2,
            n_snapshots=0,
            window=1,
            dtype=self.dtype,
            device=self.device,
            mtp=False,
        )


def quantizer_for(base: Path, text: Path) -> Quantizer:
    """GPTQ on the inputs that `text` makes in the 16-bit checkpoint `base`, on a GPU where there is one."""
    windows = read_windows(text, base / "tokenizer.json")
    cuda = torch.cuda.is_available()
    calibration = Calibration(
        base, windows, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32
    )
    return gptq_quantizer(calibration.hessian)


def _block_names(name: str, w: BlockWeights) -> dict[int, tuple[str, ...]]:
    """Address of each matrix of a layer -> canonical names of the modules in it."""
    found: dict[int, tuple[str, ...]] = {}

    def put(weight: Any, *names: str) -> None:
        found[weight.data_ptr()] = names

    if isinstance(w.mixer, AttentionWeights):
        for which, weight in (("q", w.mixer.q), ("k", w.mixer.k), ("v", w.mixer.v), ("o", w.mixer.out)):
            put(weight, f"{name}.self_attn.{which}_proj")
    else:
        assert isinstance(w.mixer, GatedDeltaWeights)
        for which, weight in (("in_proj_qkv", w.mixer.qkv), ("in_proj_z", w.mixer.z), ("out_proj", w.mixer.out)):
            put(weight, f"{name}.linear_attn.{which}")
    shared = w.mlp.shared if isinstance(w.mlp, MoeWeights) else w.mlp
    assert isinstance(shared, MlpWeights)
    at = f"{name}.mlp.shared_expert" if isinstance(w.mlp, MoeWeights) else f"{name}.mlp"
    for which, weight in (("gate", shared.gate), ("up", shared.up), ("down", shared.down)):
        put(weight, f"{at}.{which}_proj")
    if isinstance(w.mlp, MoeWeights):
        assert isinstance(w.mlp.gate_up, Tensor) and isinstance(w.mlp.down, Tensor)
        for e in range(w.mlp.gate_up.shape[0]):
            expert = f"{name}.mlp.experts.{e}"
            put(w.mlp.gate_up[e], f"{expert}.gate_proj", f"{expert}.up_proj")
            put(w.mlp.down[e], f"{expert}.down_proj")
    return found


def _mtp_names(w: MtpWeights) -> dict[int, tuple[str, ...]]:
    assert isinstance(w.fc, Tensor)
    return {w.fc.data_ptr(): ("mtp.fc",), **_block_names("mtp.layers.0", w.block)}
