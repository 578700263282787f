"""Sources: folders and hub ids, completeness by headers, and how progress is shown."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LAYOUTS, make_twin, write

from onebox.checkpoint import sources
from onebox.checkpoint.progress import progress
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.write import BuildOptions, build, prepare
from onebox.errors import CheckpointError, ConfigError
from onebox.model.complete import check_complete
from onebox.model.load import load_model

TWIN = make_twin()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`snapshot_download` over folders: copies what the patterns name, remembers what was asked for."""

    def __init__(self, root: Path, repos: dict[str, Path]) -> None:
        self.root, self.repos = root, repos
        self.asked: list[tuple[str, str | None, list[str]]] = []

    def __call__(self, name: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
        self.asked.append((name, revision, patterns))
        snapshot = self.root / name.replace("/", "--") / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        for pattern in patterns:
            for file in self.repos[name].glob(pattern):
                shutil.copy(file, snapshot / file.name)
        return snapshot, COMMIT


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    write(TWIN, tmp_path / "int4", "autoround")
    write(TWIN, tmp_path / "fp8", "fp8", shards=12)
    fake = FakeHub(tmp_path / "cache", {"Intel/int4": tmp_path / "int4", "Qwen/fp8": tmp_path / "fp8"})
    monkeypatch.setattr(sources, "_download", fake)
    return fake


def test_hub_sources_are_pinned_and_only_the_needed_donor_files_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    options = BuildOptions(revision="main", donor="Qwen/fp8", mtp="keep")
    build("Intel/int4", tmp_path / "out", options)
    made = json.loads((tmp_path / "out" / "onebox.json").read_text())
    assert (made["base"]["name"], made["base"]["revision"]) == ("Intel/int4", COMMIT)
    assert (made["donor"]["name"], made["donor"]["revision"]) == ("Qwen/fp8", COMMIT)
    assert all(len(f["header_sha256"]) == 64 for f in made["donor"]["files"].values())
    donor_asks = [(revision, patterns) for name, revision, patterns in hub.asked if name == "Qwen/fp8"]
    assert donor_asks[0][1] == sources.SMALL_FILES
    fetched = [p for p in donor_asks[1][1] if p.endswith(".safetensors")]
    assert donor_asks[1][0] == COMMIT and 0 < len(fetched) < 12
    load_model(tmp_path / "out", mtp=True)


def test_name_that_is_neither_a_folder_nor_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        prepare(str(tmp_path / "nowhere"), BuildOptions())


def test_folder_has_no_revision(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    with pytest.raises(ConfigError, match="no revisions"):
        prepare(str(tmp_path / "src"), BuildOptions(revision="main"))


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "int3"},
        {"group": 100},
        {"mtp": "int3"},
        {"shard_bytes": 0},
    ],
)
def test_unknown_option_values_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    with pytest.raises(ConfigError, match=next(iter(options))):
        prepare(str(tmp_path / "src"), BuildOptions(**options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_completeness_is_known_from_headers(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(TWIN, tmp_path, layout, mtp="side", vision=True)
    monkeypatch.setattr("onebox.checkpoint.shards.Shards.read", _no_reads)
    report = check_complete(tmp_path)
    assert report.mtp and report.tensors + report.vision_tensors + report.activation_scales == len(written.stored)


def _no_reads(*args: object) -> None:
    raise AssertionError("a weight was read")


def _drop(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_incomplete_base_is_named_before_a_build(tmp_path: Path) -> None:
    write(TWIN, tmp_path)
    _drop(tmp_path, "model.language_model.layers.2.linear_attn.A_log")
    with pytest.raises(CheckpointError, match=r"layers\.2\.linear_attn\.A_log"):
        check_complete(tmp_path)


def test_progress_gives_one_line_a_file_when_it_is_no_terminal(tmp_path: Path) -> None:
    write(TWIN, tmp_path / "src")
    stream = io.StringIO()
    options = BuildOptions(shard_bytes=400_000)
    plan = prepare(str(tmp_path / "src"), options).plan
    with progress(plan.nbytes, "build", stream=stream) as shown:
        build(str(tmp_path / "src"), tmp_path / "out", options, progress=shown)
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == list(plan.file_names())


def test_progress_on_a_terminal_shows_bytes_and_ends_at_the_total(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    write(TWIN, tmp_path / "src")
    plan = prepare(str(tmp_path / "src"), BuildOptions()).plan
    total = 0
    with progress(plan.nbytes, "build", stream=stream) as shown:
        advance: Callable[[int, str], None] = shown.advance

        def counting(n_bytes: int, what: str) -> None:
            nonlocal total
            total += n_bytes
            advance(n_bytes, what)

        shown.advance = counting  # type: ignore[method-assign]
        build(str(tmp_path / "src"), tmp_path / "out", progress=shown)
    assert total == plan.nbytes
    assert "model-00001-of-00001.safetensors" in stream.getvalue()


def test_reader_of_a_donor_opens_only_the_files_it_wants(tmp_path: Path) -> None:
    written = write(TWIN, tmp_path, "fp8", shards=12)
    name = "model.language_model.layers.1.mlp.shared_expert.up_proj.weight"
    reader = WeightReader.open(tmp_path, wanted=lambda stored: stored == name)
    assert {info.file.name for info in reader.shards.tensors.values()} == {written.weight_map[name]}
