"""What must not be loaded is refused with one line that names the tensor, the file or the field."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYOUTS, Written, make_twin, write, write_files
from safetensors.torch import load_file, save_file
from serving import TINY

from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.scheme import declaration
from onebox.errors import CheckpointError
from onebox.model.layers import Rope
from onebox.model.load import load_model
from onebox.spec import Spec

TWIN = make_twin()
P = "model.language_model."


def refused(path: Path, *names: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    for name in names:
        assert name in message, f"{name!r} is not in {message!r}"
    assert "\n" not in message
    return message


def rewrite(written: Written, path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    config = json.loads((written.path / "config.json").read_text())
    tensors = dict(written.stored)
    change(tensors, config)
    return write_files(path, config, tensors).path


def test_shard_cut_short(tmp_path: Path) -> None:
    write(TWIN, tmp_path)
    file = tmp_path / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    refused(tmp_path, file.name, "tensor", "cut short")


def test_missing_shard(tmp_path: Path) -> None:
    write(TWIN, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors", "missing")


def test_missing_fp8_scale(tmp_path: Path) -> None:
    name = P + "layers.1.mlp.shared_expert.up_proj.weight_scale_inv"
    path = rewrite(write(TWIN, tmp_path / "a", "fp8"), tmp_path / "b", lambda t, c: t.__delitem__(name))
    refused(path, name, "scale")


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [("autoround", "scales"), ("nvfp4-ct", "weight_global_scale"), ("nvfp4-modelopt", "weight_scale")],
)
def test_missing_scale_of_other_formats(layout: str, suffix: str, tmp_path: Path) -> None:
    name = f"{P}layers.0.mlp.experts.1.down_proj.{suffix}"
    path = rewrite(write(TWIN, tmp_path / "a", layout), tmp_path / "b", lambda t, c: t.__delitem__(name))
    refused(path, name)


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("bf16", "layers.0.input_layernorm.weight", (64,)),
        ("bf16", "layers.3.self_attn.k_proj.weight", (64, 96)),
        ("autoround", "layers.0.linear_attn.in_proj_qkv.qweight", (16, 128)),
        ("fp8", "layers.0.linear_attn.in_proj_qkv.weight_scale_inv", (1, 1)),
    ],
)
def test_wrong_shape(layout: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[P + name] = torch.zeros(shape).to(tensors[P + name].dtype)

    message = refused(rewrite(write(TWIN, tmp_path / "a", layout), tmp_path / "b", change), P + name)
    assert str(list(shape)) in message and "expected" in message


def test_wrong_dtype(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[P + "norm.weight"] = torch.zeros(128, dtype=torch.int64)

    refused(rewrite(write(TWIN, tmp_path / "a"), tmp_path / "b", change), P + "norm.weight", "I64")


def test_surplus_tensors_are_named_and_counted(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for i in range(5):
            tensors[f"{P}layers.{10 + i}.input_layernorm.weight"] = torch.zeros(128)

    refused(rewrite(write(TWIN, tmp_path / "a"), tmp_path / "b", change), "5 tensors", P + "layers.10.", "2 more")


def test_missing_expert(tmp_path: Path) -> None:
    name = f"{P}layers.2.mlp.experts.3.up_proj"
    path = rewrite(write(TWIN, tmp_path / "a"), tmp_path / "b", lambda t, c: t.__delitem__(f"{name}.weight"))
    refused(path, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "bitsandbytes"),
        ("quant_method", None),
        ("bits", 3),
        ("group_size", 96),
        ("packing_format", "auto_round:exllamav9"),
    ],
)
def test_unsupported_quantization_field(field: str, value: object, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = {**config["quantization_config"], field: value}

    refused(
        rewrite(write(TWIN, tmp_path / "a", "autoround"), tmp_path / "b", change), "config.json", field, repr(value)
    )


def test_desc_act_is_refused_by_name(tmp_path: Path) -> None:
    def declared(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["desc_act"] = True

    def shuffled(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        name = P + "layers.0.linear_attn.in_proj_z.g_idx"
        tensors[name] = 1 - tensors[name]

    written = write(TWIN, tmp_path / "a", "gptq")
    refused(rewrite(written, tmp_path / "b", declared), "desc_act")
    refused(rewrite(written, tmp_path / "c", shuffled), "in_proj_z.g_idx", "desc_act")


def test_declared_format_and_stored_tensors_must_agree(tmp_path: Path) -> None:
    def undeclared(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del config["quantization_config"]

    def declared(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    refused(rewrite(write(TWIN, tmp_path / "a", "fp8"), tmp_path / "b", undeclared), "16-bit", "F8_E4M3")
    refused(rewrite(write(TWIN, tmp_path / "c", "bf16"), tmp_path / "d", declared), "fp8", "BF16")


def test_symmetric_declaration_with_other_zero_points(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["sym"] = True

    path = rewrite(write(TWIN, tmp_path / "a", "autoround-g32-asym"), tmp_path / "b", change)
    refused(path, "symmetric", "zero points")


def test_one_tensor_under_two_prefixes(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = torch.zeros(128)

    refused(rewrite(write(TWIN, tmp_path / "a"), tmp_path / "b", change), "model.norm.weight", P + "norm.weight")


def test_mtp_asked_for_and_absent(tmp_path: Path) -> None:
    write(make_twin(mtp=False), tmp_path)
    with pytest.raises(CheckpointError, match="MTP"):
        load_model(tmp_path, mtp=True)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no safetensors files")


# --- config.json with values of the wrong kind ---

ODD = (None, "x", [], {}, -1, 0, 1.5, True, float("nan"), 10**30, [[1]], {"a": 1}, [0, 0])


def accepts_or_names_the_field(call: Callable[[], object], field: str) -> None:
    """Whatever a value is, it is taken or refused in a line; anything else than CheckpointError fails the test."""
    try:
        call()
        return
    except CheckpointError as error:
        message = str(error)
    assert "config.json" in message and "\n" not in message, (field, message)


@pytest.mark.parametrize("moe", [True, False])
def test_every_field_of_the_model_may_hold_anything_and_is_refused_by_name(moe: bool) -> None:
    good = make_twin(moe=moe).config | {"layer_types": ["linear_attention"] * 4, "full_attention_interval": 4}
    for field in good:
        for value in ODD:
            accepts_or_names_the_field(lambda f=field, v=value: Spec.from_config(good | {f: v}), field)  # type: ignore[misc]
    for field in ("rope_type", "rope_theta", "partial_rotary_factor", "factor", "beta_fast", "attention_factor"):
        for value in ODD:
            rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, field: value}
            accepts_or_names_the_field(
                lambda r=rope: Rope.from_spec(Spec.from_config(good | {"rope_parameters": r}), torch.device("cpu")),  # type: ignore[misc]
                field,
            )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "small"),
        ("full_attention_interval", 0),
        ("num_hidden_layers", 10**9),
        ("layer_types", 3),
        ("eos_token_id", 10**9),
        ("eos_token_id", "stop"),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", "no"),
        ("max_position_embeddings", 0),
    ],
)
def test_field_of_the_wrong_kind_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: '{field}'"):
        Spec.from_config(make_twin().config | {field: value})


def odd_variants(value: Any, path: tuple[str, ...] = ()) -> Any:
    """(path, value) with one entry of a nested object replaced, for each entry and each odd value."""
    for key, inner in value.items():
        for odd in ODD:
            yield (*path, key), {**value, key: odd}
        if isinstance(inner, dict):
            for where, changed in odd_variants(inner, (*path, key)):
                yield where, {**value, key: changed}


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.quantization])
def test_every_field_of_a_quantization_may_hold_anything_and_is_refused_by_name(layout: str) -> None:
    quant = dict(LAYOUTS[layout].quantization or {})
    for where, changed in odd_variants(quant):
        accepts_or_names_the_field(
            lambda q=changed: declaration({"quantization_config": q}).scheme("layers.0.mlp.up_proj"),  # type: ignore[misc]
            ".".join(where),
        )


@pytest.mark.parametrize("pattern", ["(a+)+$", r"(.*)*x", r"(.*,){11}P" + r".*.*.*.*.*"])
def test_regex_that_could_match_for_ever_is_refused(pattern: str) -> None:
    quant = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {pattern: {"bits": 16}}}
    with pytest.raises(CheckpointError, match="repeats"):
        declaration({"quantization_config": quant})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"])
def test_pipe_in_place_of_a_file_is_refused_and_not_read(name: str, tmp_path: Path) -> None:
    write(TWIN, tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    refused(tmp_path, name, "no regular file")


def test_experts_of_two_dtypes_say_which(tmp_path: Path) -> None:
    name = P + "layers.2.mlp.experts.1.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].half()

    refused(rewrite(write(TWIN, tmp_path / "a"), tmp_path / "b", change), "experts.1", "bfloat16", "float16")


# --- damaged headers and index files ---


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def widen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def add(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}.more"] = tensors[name].clone()


@pytest.mark.parametrize("change", [drop, widen, add])
def test_a_changed_tensor_of_a_finished_build_is_named(
    change: Callable[[dict[str, torch.Tensor], str], None], tmp_path: Path
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "m")
    file = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors.index.json").unlink()  # the header alone decides
    file = file.rename(folder / "model.safetensors")
    tensors, name = load_file(file), "model.layers.2.post_attention_layernorm.weight"
    change(tensors, name)
    save_file(tensors, file)
    refused(folder, name)


def test_a_changed_file_of_a_finished_build_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "m")
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    refused(folder, "tokenizer.json")


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write_header(path: Path, header: object, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


Damage = Callable[[Path, random.Random], str]


def _entry(path: Path, rng: random.Random) -> tuple[dict[str, Any], bytes, str]:
    header, data = _header(path)
    return header, data, rng.choice([name for name in header if name != "__metadata__"])


def cut_anywhere(path: Path, rng: random.Random) -> str:
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name


def huge_header_length(path: Path, rng: random.Random) -> str:
    header, data = _header(path)
    _write_header(path, header, data, rng.choice([2**63, 2**64 - 1, 10**9, 0, 1, len(data) * 2]))
    return path.name


def header_is_no_json(path: Path, rng: random.Random) -> str:
    _write_header(path, rng.choice([b"[1, 2]", b"{", b"\xff\xfe{}", b"nul", b'{"a": [', b"[" * 5000]), _header(path)[1])
    return path.name


def shifted_offsets(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    by = rng.choice([-64, -1, 1, 2, 4096, 10**15])
    header[name]["data_offsets"] = [o + by for o in header[name]["data_offsets"]]
    _write_header(path, header, data)
    return path.name


def overlapping_offsets(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    other = rng.choice([n for n in header if n not in (name, "__metadata__")])
    header[name] = {**header[other]}
    _write_header(path, header, data)
    return path.name


def huge_length(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    start = header[name]["data_offsets"][0]
    header[name]["data_offsets"] = [start, rng.choice([2**63, 2**70, start - 1, 10**12])]
    _write_header(path, header, data)
    return name


def wrong_shape(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    header[name]["shape"] = rng.choice([[2**40, 2**40], [-1, 4], [1.5], "wide", None, [True], [[3]], [7, 11, 13]])
    _write_header(path, header, data)
    return name


def wrong_dtype(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    header[name]["dtype"] = rng.choice(["F4", "Q8", "", None, 7, "bf16", "C64"])
    _write_header(path, header, data)
    return name


def entry_is_no_object(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    header[name] = rng.choice([None, 3, "x", [], {}])
    _write_header(path, header, data)
    return name


def duplicate_name(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    _write_header(path, text.encode(), data)
    return name


def tensor_renamed(path: Path, rng: random.Random) -> str:
    header, data, name = _entry(path, rng)
    header[f"{name}.strange"] = header.pop(name)
    _write_header(path, header, data)
    return name


def trailing_bytes(path: Path, rng: random.Random) -> str:
    path.write_bytes(path.read_bytes() + b"\0" * rng.randrange(1, 100))
    return path.name


def _index(path: Path) -> tuple[Path, dict[str, Any]]:
    index = path.parent / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def index_leaves_the_folder(path: Path, rng: random.Random) -> str:
    index, value = _index(path)
    name = rng.choice(list(value["weight_map"]))
    value["weight_map"][name] = rng.choice(
        ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "..", "", 7, None, ["x.safetensors"]]
    )
    index.write_text(json.dumps(value))
    return name


def index_names_another_file(path: Path, rng: random.Random) -> str:
    index, value = _index(path)
    name = rng.choice(list(value["weight_map"]))
    value["weight_map"][name] = "model-00009-of-00003.safetensors"
    index.write_text(json.dumps(value))
    return name


def index_is_damaged(path: Path, rng: random.Random) -> str:
    index, value = _index(path)
    text = json.dumps(value)
    index.write_text(
        rng.choice([text[: rng.randrange(len(text))], "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
    )
    return index.name


def index_names_a_tensor_twice(path: Path, rng: random.Random) -> str:
    index, value = _index(path)
    name = rng.choice(list(value["weight_map"]))
    text = json.dumps(value)
    index.write_text(text.replace('"weight_map": {', f'"weight_map": {{{json.dumps(name)}: "x.safetensors", ', 1))
    return name


DAMAGES: tuple[Damage, ...] = (
    cut_anywhere,
    huge_header_length,
    header_is_no_json,
    shifted_offsets,
    overlapping_offsets,
    huge_length,
    wrong_shape,
    wrong_dtype,
    entry_is_no_object,
    duplicate_name,
    tensor_renamed,
    trailing_bytes,
    index_leaves_the_folder,
    index_names_another_file,
    index_is_damaged,
    index_names_a_tensor_twice,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_headers_are_refused_by_name_and_nothing_outside_is_opened(
    damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {f"model.layers.{i}.x": torch.full((i + 1, 3), float(i)) for i in range(9)}
    written = write_files(tmp_path / "good", {"model_type": "qwen3_5_moe_text"}, small, shards=3)
    (tmp_path / "secret.safetensors").write_bytes((written.path / "model-00001-of-00003.safetensors").read_bytes())
    good = {f.name: f.read_bytes() for f in written.path.iterdir()}
    opened: list[str] = []
    real_open, real_path_open = os.open, Path.open

    def os_open(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(path))
        return real_open(path, *args, **kwargs)

    def path_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(path))
        return real_path_open(path, *args, **kwargs)

    for seed in range(13):  # 16 kinds x 13 > 200
        folder = tmp_path / f"bad{seed}"
        folder.mkdir()
        for name, data in good.items():
            (folder / name).write_bytes(data)
        rng = random.Random(f"{damage.__name__} {seed}")
        named = damage(folder / rng.choice([n for n in good if n.endswith(".safetensors")]), rng)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", os_open)
            patch.setattr(Path, "open", path_open)
            with pytest.raises(CheckpointError) as caught:
                WeightReader.open(folder)
        message = str(caught.value)
        assert named in message and re.search(r"\.(safetensors|json)", message), (seed, named, message)
        assert all(Path(p).resolve().is_relative_to(folder) for p in opened), opened
        opened.clear()
