"""`onebox build` from the command line, and what docs/checkpoints.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import LAYOUTS, make_twin, write

from onebox.checkpoint.reader import WeightReader
from onebox.cli import main
from onebox.ledger import BUILDS, SHAPES, resident_bytes

DOCS = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["build", *map(str, args)])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(make_twin(), tmp_path / "src")
    code, out, _ = run(capsys, tmp_path / "src", "--out", tmp_path / "out", "--dry-run", "--verbose")
    assert code == 0 and not (tmp_path / "out").exists()
    assert re.search(r"layers\.0\.mlp\.experts\.1\.up_proj  base quantize -> int4 .* [\d,]+ B", out)
    assert "total" in out and "GB free" in out and "s to build" in out


def test_build_verify_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, out, stock = (tmp_path / name for name in ("src", "out", "stock"))
    write(make_twin(), src, "autoround")
    write(make_twin(), tmp_path / "donor", "fp8")
    code, said, err = run(capsys, src, "--fp8-from", tmp_path / "donor", "--out", out, "--quiet")
    assert code == 0 and "donor tensors taken" in said, err
    assert len(err.splitlines()) == 1 and err.startswith("model-00001-of-00001.safetensors")
    code, said, err = run(capsys, src, "--verify", out)
    assert code == 0 and "as the manifest says" in said, err
    code, _, err = run(capsys, out, "--format", "auto-round", "--out", stock)
    assert code == 0, err
    reader = WeightReader.open(stock)
    assert {reader.scheme(m).kind for m in reader.modules if m.endswith("_proj") or m == "lm_head"} == {
        "int4",
        "16-bit",
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "SOURCE"),
        (["nowhere/at/all", "--out", "x"], "neither a folder nor a hub id"),
        (["SRC"], "--out"),
        (["SRC", "--out", "OUT", "--recipe", "int3"], "int3"),
        (["SRC", "--out", "OUT", "--format", "gguf"], "gguf"),
        (["SRC", "--out", "OUT", "--format", "auto-round", "--recipe", "fp8"], "auto-round"),
        (["SRC", "--out", "OUT", "--calibrate", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--verify", "SRC"], "onebox.json"),
        (["--verify", "x" * 300], "File name too long"),
        (["SRC", "--out", ""], "--out"),
        (["SRC", "--out", "OUT", "--shard-gb", "nan"], "--shard-gb"),
        (["SRC", "--out", "OUT", "--calibrate", "SRC/config.json"], "tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_twin(), tmp_path / "src")
    places = {"SRC": str(tmp_path / "src"), "OUT": str(tmp_path / "out")}
    code, _, err = run(capsys, *(places.get(arg, arg.replace("SRC/", f"{tmp_path}/src/")) for arg in args))
    assert code != 0 and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("out/*"))


def test_incomplete_base_is_refused_before_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = make_twin()
    del twin.tensors["layers.1.linear_attn.dt_bias"]
    write(twin, tmp_path / "src")
    code, _, err = run(capsys, tmp_path / "src", "--out", tmp_path / "out")
    assert code == 1 and "layers.1.linear_attn.dt_bias" in err and not (tmp_path / "out").exists()


def test_drafter_that_the_config_denies_is_refused_or_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = make_twin()
    twin.config["mtp_num_hidden_layers"] = 0
    write(twin, tmp_path / "src")
    code, _, err = run(capsys, tmp_path / "src", "--out", tmp_path / "out")
    assert code == 1 and "mtp_num_hidden_layers" in err and "--mtp drop" in err and not (tmp_path / "out").exists()
    code, _, err = run(capsys, tmp_path / "src", "--out", tmp_path / "out", "--mtp", "drop")
    assert code == 0 and not WeightReader.open(tmp_path / "out").has_mtp(), err


def test_name_in_a_file_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = make_twin()
    twin.tensors["layers.0.\x1b[31mred\nline"] = twin.tensors["norm.weight"].clone()
    write(twin, tmp_path / "src")
    code, _, err = run(capsys, tmp_path / "src", "--out", tmp_path / "out")
    assert code == 1 and "[31mred" in err and "\x1b" not in err and len(err.splitlines()) == 1


def test_size_table_of_the_docs_is_the_ledgers() -> None:
    table = DOCS.split("<!-- sizes -->")[1].split("<!-- end of sizes -->")[0].strip().splitlines()
    names = [cell.strip() for cell in table[0].strip("|").split("|")][1:]
    assert set(names) == set(BUILDS)
    for row in table[2:]:
        shape, *sizes = (cell.strip() for cell in row.strip("|").split("|"))
        want = [f"{resident_bytes(SHAPES[shape], BUILDS[name], slots=0).weights / 1e9:.1f}" for name in names]
        assert sizes == want, shape
    assert len(table) == 2 + len(SHAPES)


def test_docs_name_every_recipe_and_every_quant_method() -> None:
    for name in BUILDS:
        assert f"`{name}`" in DOCS
    for layout in LAYOUTS.values():
        method = (layout.quantization or {}).get("quant_method")
        assert method is None or f"`{method}`" in DOCS
