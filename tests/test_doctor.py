"""`onebox doctor`: every kind of trouble is found on a made machine, with a way out; a sound one has none."""

from __future__ import annotations

import json
import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from onebox import cli, doctor
from onebox.config import bundled_model
from onebox.doctor import Finding

Usage = namedtuple("Usage", "total used free")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def meminfo(root: Path, *, total: float, available: float, cached: float) -> None:
    lines = {"MemTotal": total, "MemAvailable": available, "Cached": cached}
    write(root, "proc/meminfo", "".join(f"{name}: {int(gb * 1e9 / 1024)} kB\n" for name, gb in lines.items()))


def test_a_sound_machine_has_no_problem_and_the_engine_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(SystemExit) as e:
        cli.main(["doctor", "--json", "--device", "cpu", "--port", str(port)])
    found = json.loads(capsys.readouterr().out)
    assert e.value.code == 0 and found["ok"] and found["problems"] == []
    by_name = {f["name"]: f for f in found["findings"]}
    assert by_name["self-test"]["status"] == "ok" and "tokens/s" in by_name["self-test"]["found"]
    assert {"python", "torch", "memory", "disk", "hub cache", "port", "plan"} <= set(by_name)
    assert all(f["fix"] for f in found["findings"] if f["status"] != "ok")


def test_a_port_in_use_is_a_problem_with_a_free_one_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(1)
        port = s.getsockname()[1]
        with pytest.raises(SystemExit) as e:
            cli.main(["doctor", "--no-self-test", "--port", str(port)])
        other = int(doctor.check_port("127.0.0.1", port).fix.split()[3].rstrip(","))
    assert e.value.code == doctor.FAILED
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().out
    assert doctor.check_port("127.0.0.1", other).status == "ok"


@pytest.mark.parametrize("argv", [["doctor", "--port", "0"], ["doctor", "--port", "70000"], ["doctor", "--port", "x"]])
def test_a_port_that_is_none_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code in (1, 2) and "--port" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_or_damaged_is_a_problem(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        found = {f.name: f for f in doctor.examine(str(folder), device="cpu", self_test=True)}
        assert found["plan"].status == found["self-test"].status == "problem", found
        assert str(folder) in found["plan"].found


def test_text_that_drafts_change_and_a_step_that_breaks_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "answers", lambda model, device: ([1, 2], [1, 3], 10.0))
    assert "differs" in doctor.check_engine("x", "cpu").found

    def broken(model: str, device: str) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(doctor, "answers", broken)
    found = doctor.check_engine("x", "cpu")
    assert found.status == "problem" and found.found == "RuntimeError: no kernel image is available" and found.fix


def test_an_old_python_and_old_packages_are_problems() -> None:
    assert doctor.check_python((3, 10, 1)).status == "problem" and doctor.check_python((3, 11, 0)).status == "ok"
    found = doctor.check_packages(["torch>=99", "no-such-package>=1", "numpy>=1.26", 'ray>=99; extra == "ray"'])
    assert found.status == "problem" and "older than 99" in found.found and "no-such-package is missing" in found.found
    assert "numpy" not in found.found and "ray" not in found.found
    assert doctor.check_packages(["torch>=2.11"]).status == "ok"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch>=2.11", ("torch", "2.11", False)),
        ("uvicorn", ("uvicorn", "", False)),
        ('ray[serve]>=2.50; extra == "ray"', ("ray", "2.50", True)),
        ("huggingface-hub<2,>=1.0", ("huggingface-hub", "1.0", False)),
    ],
)
def test_a_requirement_is_a_name_and_a_least_version(line: str, found: tuple[str, str, bool]) -> None:
    assert doctor.requirement(line) == found


def test_a_driver_that_torch_cannot_use_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\n")
    assert doctor.driver_version(tmp_path) == "570.86.15"
    monkeypatch.setattr(torch.version, "cuda", None)
    found = doctor.check_torch(tmp_path)
    assert found.status == "problem" and "570.86.15" in found.found and "CUDA build" in found.fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no device visible" in doctor.check_torch(tmp_path).found
    assert [f.status for f in doctor.check_gpus(tmp_path)] == ["problem"]


def test_little_memory_and_a_busy_or_saving_processor_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    meminfo(tmp_path, total=32, available=1, cached=8)
    assert doctor.check_memory(tmp_path).status == "problem"
    meminfo(tmp_path, total=32, available=20, cached=30)
    assert doctor.check_memory(tmp_path).status == "ok"  # a page cache beside a CPU goes when it is asked to
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(is_integrated=True))
    assert "drop_caches" in doctor.check_memory(tmp_path).fix
    monkeypatch.undo()
    write(tmp_path, "proc/cpuinfo", "processor: 0\nmodel name\t: Some CPU\n")
    write(tmp_path, "proc/loadavg", "99.5 1 1 1/1 1\n")
    assert (
        "load 99.5" in doctor.check_processor(tmp_path).found and "Some CPU" in doctor.check_processor(tmp_path).found
    )
    write(tmp_path, "proc/loadavg", "0.1 1 1 1/1 1\n")
    assert doctor.check_processor(tmp_path).status == "ok"
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    assert "governor powersave" in doctor.check_processor(tmp_path).found


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ("0, 1980, 1980, 90, 60, 0x0000000000000000", "ok"),
        ("0, 345, 1980, 0, 30, 0x0000000000000001", "ok"),  # idle
        ("0, 345, 1980, 99, 60, 0x0000000000000000", "note"),  # a low clock under load
        ("0, 1200, 1980, 99, 88, 0x0000000000000040", "note"),  # heat
    ],
)
def test_a_device_that_is_held_back_is_a_note(row: str, status: str) -> None:
    (found,) = doctor.check_clocks(row + "\n")
    assert found.status == status and (status == "ok" or found.fix)


def test_rows_of_another_form_are_left_out() -> None:
    assert doctor.check_clocks("") == doctor.check_clocks("0, [N/A], 1980, 1, 1, 0x0\n") == []


def test_a_full_slow_or_closed_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "not" / "there"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1e12, 0, 5e11))
    assert doctor.check_disk(cache, 1 << 20).found.startswith(f"500 GB free at {tmp_path}")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(doctor, "read_rate", lambda folder, nbytes: 0.1e9)
    assert doctor.check_disk(cache).status == "note" and "660 s" in doctor.check_disk(cache).fix
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e9))
    assert "19 GB" in doctor.check_disk(cache).fix
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e6))
    assert doctor.check_disk(cache).status == "problem"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "cannot be written" in doctor.check_disk(cache).found
    assert doctor.check_writable(cache).status == "note"


def test_a_fetch_that_was_not_finished_is_a_note(tmp_path: Path) -> None:
    assert doctor.check_hub(tmp_path / "hub").status == "ok"
    write(tmp_path, "hub/models--a--b/blobs/one", "")
    assert doctor.check_hub(tmp_path / "hub").found.startswith("1 models")
    write(tmp_path, "hub/models--a--b/blobs/two.incomplete", "")
    assert doctor.check_hub(tmp_path / "hub").status == "note"


def test_what_cannot_be_looked_at_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = {f.name: f for f in doctor.examine(bundled_model(), device="cpu", self_test=False, root=tmp_path)}
    assert found["memory"].status == "problem" and "/proc/meminfo" in found["memory"].found
    assert found["port"].name == "port" and found["plan"].status == "ok"


def test_a_finding_reads_as_a_line_and_a_way_out() -> None:
    assert list(Finding("disk", "ok", "fine").lines()) == ["ok       disk         fine"]
    assert list(Finding("disk", "note", "slow", "buy one").lines())[1].strip() == "-> buy one"
