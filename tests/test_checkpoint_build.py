"""Builds: every tensor in the planned format, from base or donor; and a build killed at any moment ends the same."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYOUTS, VOCAB, Layout, config, fp8, left_16_bit, make_twin, plain, write, write_files

from onebox.bench.quality import next_token_logits
from onebox.checkpoint import manifest
from onebox.checkpoint.hybrid import Matrix
from onebox.checkpoint.int8_head import quantize_int8
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.verify import verify
from onebox.checkpoint.write import BuildOptions, build, prepare, run
from onebox.errors import CheckpointError, ConfigError
from onebox.ledger import Build
from onebox.model.load import load_model

TWIN = make_twin()
SCALES = ("scales", "weight_scale", "weight_scale_inv")


def kinds(path: Path, names: list[str]) -> list[str]:
    reader = WeightReader.open(path)
    return [Matrix.of(reader, name).scheme.kind for name in names]


def hashes(path: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.iterdir())}


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


NAMES = [
    "layers.0.mlp.experts.1.down_proj",
    "layers.0.mlp.shared_expert.up_proj",
    "layers.0.linear_attn.in_proj_qkv",
    "layers.3.self_attn.q_proj",
    "lm_head",
    "mtp.layers.0.mlp.experts.0.gate_proj",
    "mtp.fc",
    "layers.0.linear_attn.in_proj_a",
    "layers.0.mlp.gate",
]


@pytest.mark.parametrize("layout", ["bf16", "bf16-fused-mtp"])
@pytest.mark.parametrize(
    ("recipe", "want"),
    [
        ("hybrid", ["int4", "fp8", "int4", "int4", "int8", "int4", "fp8", "16-bit", "16-bit"]),
        ("int4", ["int4", "16-bit", "int4", "int4", "16-bit", "16-bit", "16-bit", "16-bit", "16-bit"]),
        ("nvfp4", ["nvfp4", "nvfp4", "nvfp4", "nvfp4", "int8", "nvfp4", "nvfp4", "16-bit", "16-bit"]),
        ("fp8", ["fp8", "fp8", "fp8", "fp8", "16-bit", "fp8", "fp8", "16-bit", "16-bit"]),
    ],
)
def test_recipe_decides_every_format_and_each_is_near_its_source(
    layout: str, recipe: str, want: list[str], tmp_path: Path
) -> None:
    write(TWIN, tmp_path / "src", layout, vision=True)
    result = build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(recipe=recipe, shard_bytes=200_000))
    assert kinds(tmp_path / "out", NAMES) == want
    report = load_model(tmp_path / "out", mtp=True).report
    assert report.vision_tensors == 2
    reader = WeightReader.open(tmp_path / "out")
    bound = {"int4": 0.13, "nvfp4": 0.11, "fp8": 0.04, "int8": 0.012, "16-bit": 0.0}
    for name, w in TWIN.matrices.items():
        if layout == "bf16" or ".experts." not in name or name in reader.modules:
            m = Matrix.of(reader, name)
            got = torch.cat([x for _, x in m.chunks()])
            assert relative_rms(got, w) <= bound[m.scheme.kind], name
    made = {n for n in reader.modules if n in TWIN.matrices and reader.scheme(n).kind != "16-bit"}
    assert result.errors.keys() == made
    verify(tmp_path / "out", str(tmp_path / "src"))


@pytest.mark.parametrize(
    ("mtp", "want"),
    [
        ("keep", ["16-bit", "16-bit"]),
        ("int8", ["int8", "int8"]),
        ("int4", ["int4", "int4"]),
        ("fp8", ["fp8", "fp8"]),
        ("nvfp4", ["nvfp4", "nvfp4"]),
    ],
)
def test_drafter_takes_its_own_format(mtp: str, want: list[str], tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src", mtp="side")
    build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(mtp=mtp))
    assert kinds(tmp_path / "out", ["mtp.layers.0.mlp.experts.0.up_proj", "mtp.fc"]) == want
    assert load_model(tmp_path / "out", mtp=True).report.mtp


def test_drafter_can_be_dropped(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(mtp="drop"))
    report = load_model(tmp_path / "out").report
    assert not report.mtp and not WeightReader.open(tmp_path / "out").has_mtp()


def test_tied_head_gets_a_head_of_its_own(tmp_path: Path) -> None:
    twin = make_twin(moe=False, tied=True)
    write(twin, tmp_path / "src", nested=False)
    build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(recipe=Build(head="int8")))
    model = load_model(tmp_path / "out", unpack=False).model
    assert not model.spec.tied
    tokens = torch.randint(0, VOCAB, (9,))
    assert torch.equal(model.head.q, quantize_int8(twin.tensors["embed_tokens.weight"]).q)  # type: ignore[union-attr]
    with torch.inference_mode():
        got, want = (next_token_logits(m, tokens) for m in (model, load_model(tmp_path / "src").model))
    assert relative_rms(got, want) < 0.02
    verify(tmp_path / "out", str(tmp_path / "src"))


def with_plain_shared_experts(layout: Layout) -> Layout:
    """As published INT4 bodies have it."""
    quant = dict(layout.quantization or {})
    if quant["quant_method"] == "gptq":
        quant["dynamic"] = {"-:.*shared_expert.*": {}}
    for key in ("ignore", "modules_to_not_convert"):
        if key in quant:
            quant[key] = [*quant[key], "shared_expert"]
    return Layout(lambda name: plain if ".shared_expert." in name else layout.encode(name), quant)


FP8_WITH_MTP = Layout(
    lambda name: plain if left_16_bit(name) and (name[:4] != "mtp." or name.endswith("gate")) else fp8,
    {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "gate", "shared_expert_gate", "in_proj_a", "in_proj_b"],
    },
)


@pytest.mark.parametrize("base", ["autoround", "autoround-g32-asym", "ct-int4", "awq", "gptq"])
def test_packed_base_keeps_its_levels_and_the_donor_gives_fp8(base: str, tmp_path: Path) -> None:
    body = write(TWIN, tmp_path / "base", with_plain_shared_experts(LAYOUTS[base]), mtp="side")
    donor = write(TWIN, tmp_path / "donor", FP8_WITH_MTP)
    options = BuildOptions(donor=str(tmp_path / "donor"))
    prepared = prepare(str(tmp_path / "base"), options)
    assert any("not needed" in note for note in prepared.plan.donor_notes)
    build(str(tmp_path / "base"), tmp_path / "out", options)
    reader = WeightReader.open(tmp_path / "out")
    for name in TWIN.matrices:
        got = torch.cat([x for _, x in Matrix.of(reader, name).chunks()])
        if ".shared_expert." in name or name in ("mtp.fc", "mtp.layers.0.self_attn.q_proj"):
            assert torch.equal(got, donor.meaning[name]), name
        elif not name.startswith(("lm_head", "mtp.")):
            assert torch.equal(got.float(), body.meaning[name]), name
    load_model(tmp_path / "out", mtp=True)


def test_donor_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "base", "autoround")
    base, options = str(tmp_path / "base"), BuildOptions(donor=str(tmp_path / "donor"))

    def donor(change: Callable[[Any], None]) -> None:
        twin = make_twin()
        change(twin)
        write(twin, tmp_path / "donor", "fp8")

    def missing(twin: Any) -> None:
        for name in [n for n in twin.matrices if n.endswith("layers.2.mlp.shared_expert.up_proj")]:
            del twin.matrices[name]

    donor(missing)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.shared_expert\.up_proj.*donor"):
        prepare(base, options)
    donor(lambda twin: twin.matrices.update({"layers.1.mlp.shared_expert.up_proj": torch.ones(256, 128).bfloat16()}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.shared_expert\.up_proj.*\[256, 128\].*\[128, 128\]"):
        prepare(base, options)
    donor(lambda twin: twin.config.update({"hidden_size": 256}))
    with pytest.raises(CheckpointError, match="hidden_size 256"):
        prepare(base, options)
    donor(lambda twin: twin.matrices.update({"layers.0.mlp.strange.up_proj": torch.ones(8, 128).bfloat16()}))
    with pytest.raises(CheckpointError, match="strange"):
        prepare(base, options)


def test_only_the_donor_files_that_are_needed_have_to_be_there(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "base", "autoround")
    donor = write(TWIN, tmp_path / "donor", "fp8", shards=12)
    needed = {file for name, file in donor.weight_map.items() if ".shared_expert." in name and "mtp." not in name}
    for file in set(donor.weight_map.values()) - needed:
        (tmp_path / "donor" / file).unlink()
    recipe = Build(experts="int4", attention="int4", gdn="int4", shared="fp8")
    build(str(tmp_path / "base"), tmp_path / "out", BuildOptions(recipe=recipe, donor=str(tmp_path / "donor")))
    assert len(needed) < 12
    assert kinds(tmp_path / "out", ["layers.2.mlp.shared_expert.up_proj"]) == ["fp8"]


def test_packed_base_is_not_quantised_twice(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "base", "gptq")
    with pytest.raises(CheckpointError, match=r"shared_expert.*int4.*--fp8-from"):
        prepare(str(tmp_path / "base"), BuildOptions(recipe="hybrid"))


def values(path: Path, name: str) -> torch.Tensor:
    return torch.cat([x for _, x in Matrix.of(WeightReader.open(path), name).chunks()])


def test_fp8_base_keeps_its_shared_experts_and_gives_int4_experts(tmp_path: Path) -> None:
    body = write(TWIN, tmp_path / "src", "fp8")
    build(str(tmp_path / "src"), tmp_path / "out")
    assert kinds(tmp_path / "out", NAMES[:4]) == ["int4", "fp8", "int4", "int4"]
    shared, expert = "layers.2.mlp.shared_expert.down_proj", "layers.2.mlp.experts.3.down_proj"
    assert torch.equal(values(tmp_path / "out", shared), body.meaning[shared])
    assert 0.05 < relative_rms(values(tmp_path / "out", expert), body.meaning[expert]) < 0.13
    verify(tmp_path / "out", str(tmp_path / "src"))


@pytest.mark.parametrize("layout", ["nvfp4-ct", "nvfp4-modelopt"])
def test_nvfp4_base_stays_nvfp4_bit_for_bit_and_gets_an_int8_head(layout: str, tmp_path: Path) -> None:
    body = write(TWIN, tmp_path / "src", layout)
    build(str(tmp_path / "src"), tmp_path / "out")
    assert kinds(tmp_path / "out", NAMES) == ["nvfp4"] * 4 + ["int8"] + ["nvfp4"] * 2 + ["16-bit"] * 2
    for name in NAMES[:4]:
        assert torch.equal(values(tmp_path / "out", name), body.meaning[name]), name
    assert load_model(tmp_path / "out", mtp=True).report.activation_scales == 0


def with_manifest_of(out: Path, change: Callable[[bytearray, dict[str, Any], int], None]) -> None:
    """Change the first shard's bytes and let the manifest vouch for them."""
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    change(data, json.loads(data[8 : 8 + length]), 8 + length)
    shard.write_bytes(bytes(data))
    made = json.loads((out / "onebox.json").read_text())
    made["files"][shard.name]["sha256"] = hashlib.sha256(data).hexdigest()
    (out / "onebox.json").write_text(json.dumps(made))


@pytest.mark.parametrize(
    ("tensor", "damage", "finding"),
    [
        ("layers.0.input_layernorm.weight", b"\xff\x7f", "NaN"),
        ("layers.1.mlp.experts.0.up_proj.scales", b"\x00\x7c", "Inf"),
        ("layers.1.mlp.experts.0.up_proj.scales", b"\x00\x00", "scale of zero"),
        ("layers.1.mlp.shared_expert.up_proj.weight", b"\x7f", "NaN"),
        ("layers.1.mlp.shared_expert.up_proj.weight", b"\xff", "NaN"),
        ("layers.1.mlp.shared_expert.up_proj.weight_scale_inv", b"\x00\x00\x80\xbf", "negative"),
        ("lm_head.weight", b"\x80", "-128"),
        ("layers.1.mlp.experts.0.up_proj.qzeros", b"\x66", "zero points"),
    ],
)
def test_verify_refuses_values_that_mean_nothing(tensor: str, damage: bytes, finding: str, tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    out = tmp_path / "out"
    build(str(tmp_path / "src"), out)

    def change(data: bytearray, header: dict[str, Any], base: int) -> None:
        name = next(n for n in header if n.endswith(tensor))
        at = base + header[name]["data_offsets"][0]
        data[at : at + len(damage)] = damage

    with_manifest_of(out, change)
    with pytest.raises(CheckpointError, match=finding) as caught:
        verify(out)
    assert tensor.rpartition(".")[0] in str(caught.value)


def test_verify_finds_a_level_that_left_its_source(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    out = tmp_path / "out"
    build(str(tmp_path / "src"), out)

    def change(data: bytearray, header: dict[str, Any], base: int) -> None:
        name = next(n for n in header if n.endswith("layers.3.self_attn.q_proj.qweight"))
        start, end = (base + o for o in header[name]["data_offsets"])
        data[start:end] = bytes(end - start)

    with_manifest_of(out, change)
    verify(out)
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.q_proj.*from the source"):
        verify(out, str(tmp_path / "src"))


def test_hybrid_exports_to_what_stock_engines_read(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src", "bf16-fused")
    build(str(tmp_path / "src"), tmp_path / "hybrid")
    build(str(tmp_path / "hybrid"), tmp_path / "stock", BuildOptions(recipe="int4"))
    quant = json.loads((tmp_path / "stock" / "config.json").read_text())["quantization_config"]
    assert (quant["quant_method"], quant["packing_format"]) == ("auto-round", "auto_round:auto_gptq")
    assert all(entry["bits"] == 16 for entry in quant["extra_config"].values())
    a, b = (WeightReader.open(tmp_path / d) for d in ("hybrid", "stock"))
    for name in ("layers.1.mlp.experts.2.up_proj", "layers.1.mlp.shared_expert.up_proj", "lm_head"):
        ours, theirs = (torch.cat([x for _, x in Matrix.of(r, name).chunks()]) for r in (a, b))
        assert torch.equal(ours.bfloat16(), theirs.bfloat16()), name


def test_plan_knows_the_bytes_before_any_are_written(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    prepared = prepare(str(tmp_path / "src"), BuildOptions(shard_bytes=300_000))
    result = build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(shard_bytes=300_000))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == prepared.plan.nbytes == result.plan.nbytes
    assert sorted(set(index["weight_map"].values())) == sorted(prepared.plan.file_names())
    assert len(list(prepared.plan.lines())) == len(prepared.plan.items) and prepared.seconds() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_source_with_nan_or_inf_is_refused_by_name(value: float, tmp_path: Path) -> None:
    twin = make_twin()
    twin.matrices["layers.2.mlp.experts.1.up_proj"][3, 5] = value
    write(twin, tmp_path / "src")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.1\.up_proj.*NaN or Inf"):
        build(str(tmp_path / "src"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="not finished"):
        load_model(tmp_path / "out")


def test_weights_past_the_scale_range_are_refused_by_name(tmp_path: Path) -> None:
    twin = make_twin()
    twin.matrices["layers.2.linear_attn.out_proj"][0, 0] = 1e30
    write(twin, tmp_path / "src")
    with pytest.raises(CheckpointError, match=r"layers\.2\.linear_attn\.out_proj.*16-bit"):
        build(str(tmp_path / "src"), tmp_path / "out")


def test_full_disk_is_noticed_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(TWIN, tmp_path / "src")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000})())
    with pytest.raises(ConfigError, match="GB free"):
        build(str(tmp_path / "src"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_disk_that_fills_up_is_one_line_and_the_build_goes_on_when_there_is_room(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    out, options = tmp_path / "out", BuildOptions(shard_bytes=300_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"model-0000\d-of-.*too large.*run the same command again"):
            build(str(tmp_path / "src"), out, options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [f for f in out.iterdir() if f.name.endswith("safetensors.partial")], "its room is not given back"
    with pytest.raises(CheckpointError, match="not finished"):
        verify(out)
    build(str(tmp_path / "src"), out, options)
    build(str(tmp_path / "src"), tmp_path / "clean", options)
    assert hashes(out) == hashes(tmp_path / "clean")


def test_folder_with_a_build_running_in_it_is_left_to_it(tmp_path: Path) -> None:
    import fcntl

    write(TWIN, tmp_path / "src")
    (tmp_path / "out").mkdir()
    fd = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another build is running"):
        build(str(tmp_path / "src"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    os.close(fd)
    build(str(tmp_path / "src"), tmp_path / "out")


def test_folder_that_another_tool_made_of_a_build_is_told_how_to_be_read(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    build(str(tmp_path / "src"), tmp_path / "out")
    (tmp_path / "out" / "onebox.json").unlink()
    with pytest.raises(CheckpointError, match=r"not finished.*'onebox_build' from config\.json if another tool"):
        load_model(tmp_path / "out")
    manifest.unmark(tmp_path / "out")
    load_model(tmp_path / "out")


class Stop(Exception):
    """An end in the middle of a build."""


def stopped_after(files: int, src: Path, out: Path, then: Callable[[], None]) -> None:
    """Begin a build, and end it once so many files are done and `then` has run."""

    class Ending:
        def advance(self, n_bytes: int, what: str) -> None:
            pass

        def finished(self, file: str, n_bytes: int) -> None:
            nonlocal files
            files -= 1
            if files == 0:
                then()
                raise Stop

    with pytest.raises(Stop):
        build(str(src), out, BuildOptions(shard_bytes=100_000), progress=Ending())


@pytest.mark.parametrize("when", ["before it goes on", "while it runs"])
def test_source_that_changes_under_a_build_is_noticed(when: str, tmp_path: Path) -> None:
    written = write(TWIN, tmp_path / "src")
    out, options = tmp_path / "out", BuildOptions(shard_bytes=100_000)
    shard = tmp_path / "src" / written.weight_map["lm_head.weight"]

    def change() -> None:
        data = bytearray(shard.read_bytes())
        data[-2:] = b"\x00\x3f"  # another weight under the same header
        shard.write_bytes(bytes(data))
        os.utime(shard, ns=(0, 1))

    if when == "before it goes on":
        stopped_after(2, tmp_path / "src", out, change)
        prepared = prepare(str(tmp_path / "src"), options)
    else:
        prepared = prepare(str(tmp_path / "src"), options)
        change()
    with pytest.raises(ConfigError, match=rf"{shard.name} of the base changed.*remove"):
        run(prepared, out)
    with pytest.raises(CheckpointError, match="not finished"):
        verify(out)


@pytest.mark.parametrize("layout", ["autoround", "fp8", "nvfp4-ct", "int8-head"])
def test_numbers_that_mean_nothing_are_not_copied(layout: str, tmp_path: Path) -> None:
    """What is taken over bit for bit is looked at too; the source and `serve` say the same."""
    written = write(TWIN, tmp_path / "src", layout)
    module = "lm_head" if layout == "int8-head" else "model.language_model.layers.1.mlp.experts.2.up_proj"
    scale = next(n for n in written.stored if n.startswith(module) and n.rpartition(".")[2] in SCALES)
    written.stored[scale].view(-1)[-1] = float("nan")
    write_files(tmp_path / "src", json.loads((tmp_path / "src" / "config.json").read_text()), written.stored, shards=3)
    recipe = {"autoround": "int4", "fp8": "fp8", "nvfp4-ct": "nvfp4", "int8-head": "hybrid"}[layout]
    for attempt in (
        lambda: build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(recipe=recipe)),
        lambda: load_model(tmp_path / "src"),
    ):
        with pytest.raises(CheckpointError, match=rf"{re.escape(module)}: its scale holds NaN"):
            attempt()


@pytest.mark.parametrize(
    ("layout", "value", "finding"),
    [
        ("autoround", 0.0, "scale of zero"),
        ("autoround-g32-asym", 0.0, "scale of zero"),
        ("autoround", 6e4, "past 10,000"),
        ("fp8", 0.0, "scale of zero"),
        ("fp8-ragged", 0.0, "scale of zero"),
        ("fp8", 1e30, "past 10,000"),
        ("fp8", -1.0, "negative"),
        ("int8-head", 0.0, "scale of zero"),
        ("nvfp4-modelopt", -1.0, "negative"),
    ],
)
def test_lost_and_absurd_scales_are_refused_by_name(layout: str, value: float, finding: str, tmp_path: Path) -> None:
    written = write(TWIN, tmp_path / "src", layout)
    module = "lm_head" if layout == "int8-head" else "model.language_model.layers.0.linear_attn.in_proj_z"
    scale = next(n for n in written.stored if n.startswith(module) and n.rpartition(".")[2] in SCALES)
    flat = written.stored[scale].float().flatten()
    flat[-1] = value
    written.stored[scale] = flat.view(written.stored[scale].shape).to(written.stored[scale].dtype)
    write_files(tmp_path / "src", json.loads((tmp_path / "src" / "config.json").read_text()), written.stored, shards=3)
    with pytest.raises(CheckpointError, match=rf"{re.escape(module)}: .*{finding}"):
        load_model(tmp_path / "src")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_2"])
def test_nvfp4_matrix_without_scales_is_refused_and_a_tiny_block_is_not(scale: str, tmp_path: Path) -> None:
    written = write(TWIN, tmp_path / "src", "nvfp4-modelopt")
    name = f"model.language_model.layers.0.linear_attn.in_proj_z.{scale}"
    settings = json.loads((tmp_path / "src" / "config.json").read_text())
    if scale == "weight_scale":
        written.stored[name].view(torch.uint8).view(-1)[0] = 0
        load_model(write_files(tmp_path / "src", settings, written.stored, shards=3).path)
    written.stored[name] = torch.zeros_like(written.stored[name].float()).to(written.stored[name].dtype)
    with pytest.raises(CheckpointError, match=r"in_proj_z: .*(scale of zero|not positive)"):
        load_model(write_files(tmp_path / "src", settings, written.stored, shards=3).path)


@pytest.mark.parametrize("name", ["layers.0.linear_attn.dt_bias", "layers.2.mlp.gate.weight", "norm.weight"])
def test_nan_in_a_tensor_that_stays_as_it_is_is_refused_by_name(name: str, tmp_path: Path) -> None:
    twin = make_twin()
    where = twin.tensors if name in twin.tensors else twin.matrices
    where[name if name in where else name.removesuffix(".weight")].view(-1)[3] = float("nan")
    write(twin, tmp_path / "src")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: holds NaN"):
        build(str(tmp_path / "src"), tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: holds NaN"):
        load_model(tmp_path / "src")


def test_output_in_a_source_is_refused_and_the_source_stays_as_it_was(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "base", "autoround")
    write(TWIN, tmp_path / "donor", "fp8")
    (tmp_path / "link").symlink_to(tmp_path / "donor")
    before = [hashes(tmp_path / d) for d in ("base", "donor")]
    options = BuildOptions(donor=str(tmp_path / "donor"))
    for out, what in (("base/in/side", "base"), ("donor", "donor"), ("link/x", "donor")):
        with pytest.raises(ConfigError, match=f"{what} itself"):
            build(str(tmp_path / "base"), tmp_path / out, options)
    assert [hashes(tmp_path / d) for d in ("base", "donor")] == before


def test_output_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        build(str(tmp_path / "src"), tmp_path / "out")
    with pytest.raises(ConfigError, match="base itself"):
        build(str(tmp_path / "src"), tmp_path / "src")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_finished_build_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    first = build(str(tmp_path / "src"), tmp_path / "out")
    before = hashes(tmp_path / "out")
    assert build(str(tmp_path / "src"), tmp_path / "out").errors == first.errors
    assert hashes(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="another finished build"):
        build(str(tmp_path / "src"), tmp_path / "out", BuildOptions(group=64))
    shard = next((tmp_path / "out").glob("*.safetensors"))
    os.truncate(shard, 1000)
    with pytest.raises(CheckpointError, match=f"{shard.name}: 1000 bytes"):
        build(str(tmp_path / "src"), tmp_path / "out")


@pytest.mark.parametrize("target", ["weights", "config", "missing", "surplus"])
def test_verify_finds_what_changed(target: str, tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    out = tmp_path / "out"
    build(str(tmp_path / "src"), out)
    verify(out)
    shard = next(out.glob("*.safetensors"))
    if target == "weights":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(bytes(data))
        name = shard.name
    elif target == "config":
        (out / "config.json").write_text((out / "config.json").read_text().replace("128", "129", 1))
        name = "config.json"
    elif target == "missing":
        (out / "model.safetensors.index.json").unlink()
        name = "model.safetensors.index.json"
    else:
        (out / "extra.safetensors").write_bytes(shard.read_bytes())
        name = "extra.safetensors"
    with pytest.raises(CheckpointError, match=name):
        verify(out)


@pytest.mark.parametrize(
    ("field", "value", "finding"),
    [
        ("files", {"../src/config.json": {"bytes": 1, "sha256": ""}}, r"\.\./src/config\.json.*no file of this folder"),
        ("files", {"..": {"bytes": 1, "sha256": ""}}, "no file of this folder"),
        ("files", [], "'files'"),
        ("errors", {"x": "y"}, "'errors'"),
        ("base", [], "'base'"),
    ],
)
def test_manifest_that_says_what_it_must_not_is_refused(
    field: str, value: object, finding: str, tmp_path: Path
) -> None:
    write(TWIN, tmp_path / "src")
    build(str(tmp_path / "src"), tmp_path / "out")
    made = json.loads((tmp_path / "out" / "onebox.json").read_text())
    (tmp_path / "out" / "onebox.json").write_text(json.dumps({**made, field: value}))
    with pytest.raises(CheckpointError, match=rf"onebox\.json: .*{finding}"):
        verify(tmp_path / "out")


def test_verify_against_another_source_names_the_tensor(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    other = make_twin()
    other.matrices["layers.1.linear_attn.out_proj"] = torch.randn(128, 128).bfloat16()
    write(other, tmp_path / "other")
    build(str(tmp_path / "src"), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\.out_proj"):
        verify(tmp_path / "out", str(tmp_path / "other"))


def _build_child(src: str, out: str) -> None:
    torch.set_num_threads(1)
    build(src, out, BuildOptions(shard_bytes=40_000))


@pytest.mark.slow
def test_build_killed_at_twenty_random_moments_ends_byte_identical(tmp_path: Path) -> None:
    src, out = str(tmp_path / "src"), tmp_path / "out"
    write(TWIN, tmp_path / "src", "bf16-fused")
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["onebox.checkpoint.write"])

    def start(folder: Path) -> Any:
        child = context.Process(target=_build_child, args=(src, str(folder)))
        child.start()
        return child

    start(tmp_path / "warm").join()  # the server is up
    begun = time.monotonic()
    clean = start(tmp_path / "clean")
    clean.join()
    seconds = time.monotonic() - begun
    assert clean.exitcode == 0
    want = hashes(tmp_path / "clean")
    rng = random.Random(0)
    kills = interrupted = 0
    while kills < 20:
        child = start(out)
        child.join(rng.uniform(0.0, seconds))
        child.kill()
        child.join()
        kills += 1
        if (out / "onebox.json").exists():
            assert hashes(out) | {"onebox.partial.json": ""} == want | {"onebox.partial.json": ""}
            for file in out.iterdir():
                file.unlink()
        elif (out / "onebox.partial.json").exists():
            interrupted += 1
            with pytest.raises(CheckpointError, match="not finished"):
                load_model(out)
            with pytest.raises(CheckpointError, match="not finished"):
                verify(out)
    assert interrupted >= 5, "the kills came too late to interrupt anything"
    last = start(out)
    last.join()
    assert last.exitcode == 0
    assert hashes(out) == want
    verify(out, src)


def _sparse_checkpoint(path: Path, layers: int, experts: int, width: int, vocab: int, hidden: int) -> int:
    """Zeros that take no disk: a header and a long hole. Gives the size in bytes."""
    values = config(mtp=False) | {"hidden_size": hidden, "num_hidden_layers": layers, "num_experts": experts}
    values |= {"moe_intermediate_size": width, "vocab_size": vocab, "num_attention_heads": 4}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        shapes[f"model.layers.{i}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes[f"model.layers.{i}.mlp.experts.down_proj"] = (experts, hidden, width)
        shapes[f"model.layers.{i}.mlp.shared_expert.down_proj.weight"] = (hidden, 49_152)
        shapes[f"model.layers.{i}.linear_attn.out_proj.weight"] = (hidden, 2048)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (path / "config.json").write_text(json.dumps(values))
    return at


def _measured_build(src: str, out: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    build(src, out, BuildOptions(recipe=Build(shared="fp8", gdn="int4", head="int8"), shard_bytes=1_500_000_000))
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@pytest.mark.slow
def test_six_gigabytes_build_within_two_and_a_half_of_memory(tmp_path: Path) -> None:
    size = _sparse_checkpoint(tmp_path / "src", layers=6, experts=48, width=1024, vocab=160_000, hidden=2048)
    largest = 160_000 * 2048 * 2
    assert size > 6e9 and largest > 6e8
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_measured_build, args=(str(tmp_path / "src"), str(tmp_path / "out"), theirs))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert ours.recv() < 2.5e9
    for file in (tmp_path / "out").iterdir():
        os.unlink(file)
