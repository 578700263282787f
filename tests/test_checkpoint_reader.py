"""Readers: what each stored format means, and that no checkpoint is half read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import EXPERTS, HIDDEN, LAYOUTS, VOCAB, WIDTH, Written, make_twin, meaning_as_fp32, write

from onebox.bench.quality import next_token_logits
from onebox.checkpoint.reader import WeightReader
from onebox.kernels.weights import dequantize
from onebox.model.load import load_model


def assert_reads_as(written: Written, meaning: dict[str, torch.Tensor]) -> None:
    reader = WeightReader.open(written.path)
    for name, want in meaning.items():
        if ".experts." not in name:
            assert torch.equal(dequantize(reader.linear(name, *want.shape)), want), name
    for layer in {name.partition(".experts.")[0] for name in meaning if ".experts." in name}:
        gate_up, down = reader.experts(f"{layer}.experts", EXPERTS, WIDTH, HIDDEN)
        for e in range(EXPERTS):
            gate, up, want_down = (meaning[f"{layer}.experts.{e}.{w}_proj"] for w in ("gate", "up", "down"))
            assert torch.equal(dequantize(gate_up)[e], torch.cat((gate, up))), (layer, e)
            assert torch.equal(dequantize(down)[e], want_down), (layer, e)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_reads_as_its_format_says_bit_for_bit(layout: str, tmp_path: Path) -> None:
    written = write(make_twin(), tmp_path, layout)
    assert_reads_as(written, written.meaning)


@pytest.mark.parametrize(
    ("layout", "nested"), [*((name, True) for name in LAYOUTS), ("bf16", False), ("awq", False), ("nvfp4-ct", False)]
)
def test_logits_of_a_loaded_checkpoint_equal_its_dequantised_twin(layout: str, nested: bool, tmp_path: Path) -> None:
    twin = make_twin(1)
    written = write(twin, tmp_path / "build", layout, nested=nested, mtp="side")
    exact = meaning_as_fp32(twin, written, tmp_path / "exact")
    tokens = torch.randint(0, VOCAB, (23,))
    with torch.inference_mode():
        got, want = (next_token_logits(load_model(w.path, mtp=True).model, tokens) for w in (written, exact))
    assert float((got - want).abs().max()) < 1e-3
    assert float(want.std()) > 0.1


@pytest.mark.parametrize("mtp", ["index", "side"])
def test_mtp_head_is_found_in_the_index_or_in_a_side_file(mtp: str, tmp_path: Path) -> None:
    write(make_twin(), tmp_path, "autoround", mtp=mtp)
    loaded = load_model(tmp_path, mtp=True)
    assert loaded.report.mtp and loaded.model.mtp is not None
    assert loaded.report.side_files == (("model_extra_tensors.safetensors",) if mtp == "side" else ())


def test_checkpoint_without_mtp_loads_without_it(tmp_path: Path) -> None:
    write(make_twin(mtp=False), tmp_path, "fp8")
    assert not load_model(tmp_path).report.mtp


@pytest.mark.parametrize("tied", [True, False])
def test_dense_model_loads_tied_or_not(tied: bool, tmp_path: Path) -> None:
    written = write(make_twin(moe=False, tied=tied), tmp_path, "gptq")
    report = load_model(tmp_path).report
    assert report.tensors == len(written.stored)


def test_vision_tensors_are_skipped_and_counted_once(tmp_path: Path) -> None:
    write(make_twin(), tmp_path, "bf16", vision=True)
    report = load_model(tmp_path).report
    assert report.vision_tensors == 2 and "2 vision tensors skipped" in str(report)


def test_activation_scales_are_not_left_over(tmp_path: Path) -> None:
    write(make_twin(), tmp_path, "nvfp4-modelopt")
    report = load_model(tmp_path).report
    assert report.activation_scales > 0 and "activation scales" in str(report)


def test_gate_and_up_of_different_global_scales_keep_their_own(tmp_path: Path) -> None:
    twin = make_twin(2)
    for name in [n for n in twin.matrices if n.endswith(".0.gate_proj")]:
        twin.matrices[name] = twin.matrices[name] * 40
    written = write(twin, tmp_path, "nvfp4-ct")
    assert_reads_as(written, {n: w for n, w in written.meaning.items() if n.startswith("layers.0.mlp.experts")})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ct-int4", "ct-int4-asym", "nvfp4-ct"])
def test_compressed_tensors_itself_reads_the_same(layout: str, tmp_path: Path) -> None:
    """The library that defines the format, against the reader: the same matrix."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import NVFP4PackedCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    declared = (LAYOUTS[layout].quantization or {})["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**declared))
    library = NVFP4PackedCompressor if layout == "nvfp4-ct" else PackedQuantizationCompressor
    written = write(make_twin(4), tmp_path, layout)
    reader = WeightReader.open(tmp_path)
    for name in ("layers.0.linear_attn.in_proj_qkv", "layers.3.self_attn.k_proj", "layers.1.mlp.experts.2.down_proj"):
        stored = {
            suffix: written.stored[full] for suffix, full in reader.modules[name].items() if "input" not in suffix
        }
        theirs = library.decompress(stored, scheme)["weight"].float()
        ours = dequantize(reader.read_module(name))
        assert float((ours - theirs).norm() / theirs.norm()) < 4e-3, name  # the library works in 16 bits
