"""install.sh: mistakes are one line, a dry run changes nothing, half a download does nothing, a kill is made good; and
the files of deploy/ agree with it and with the server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import app_of, saying

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "install.sh"
DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent


def install(home: Path, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *argv], env=env_of(home), capture_output=True, text=True, **options)


def env_of(home: Path) -> dict[str, str]:
    """The environment of somebody with an empty home, and of a machine that may need settings to reach its packages."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {**kept, "HOME": str(home), "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "venv/" not in str(path)}


def test_the_scripts_are_clean_to_shellcheck() -> None:
    scripts = [str(SCRIPT), str(ROOT / ".ci" / "run")]
    done = subprocess.run([str(TOOLS / "shellcheck"), *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_dry_run_says_each_step_and_changes_nothing(tmp_path: Path) -> None:
    done = install(tmp_path, "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert steps == ["environment", "doctor", "checkpoint", "unit", "smoke", "bench"]
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--frob"], "unknown option '--frob'"),
        (["--root"], "--root needs a value"),
        (["--root", "/tmp/a b"], "characters other than letters"),
        (["--port", "70000"], "between 1 and 65535, got '70000'"),
        (["--port", "08"], "between 1 and 65535, got '08'"),
        (["--python", "/bin/true/none"], "/bin/true/none is not Python 3.11 or newer"),
        (["--package", "/no/such.whl"], "/no/such.whl: no such file or folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, argv: list[str], says: str) -> None:
    done = install(tmp_path, *argv)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("install.sh: error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr and not tree(tmp_path)


def test_an_older_python_is_passed_over(tmp_path: Path) -> None:
    fakes = tmp_path / "bin"
    fakes.mkdir()
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        (fakes / name).write_text("#!/bin/sh\nexit 1\n")  # what an older one makes of the question
        (fakes / name).chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{fakes}:/usr/bin:/bin"}
    done = subprocess.run([str(SCRIPT), "--dry-run"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "no Python 3.11 or newer with venv" in done.stderr


def test_half_a_download_does_nothing_and_a_whole_one_wants_a_package(tmp_path: Path) -> None:
    text = SCRIPT.read_text("utf-8")

    def piped(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-s"], input=script, cwd=tmp_path, env=env_of(tmp_path), capture_output=True, text=True
        )

    for share in (0.2, 0.5, 0.8, 0.99):
        assert piped(text[: int(len(text) * share)]).stdout == ""
    assert "name what to install with --package" in piped(text).stderr
    assert not tree(tmp_path)


def test_the_unit_in_deploy_is_the_one_it_writes(tmp_path: Path) -> None:
    printed = install(tmp_path, "--print-unit", "--root", "/opt/onebox", "--user", "onebox").stdout
    assert (DEPLOY / "onebox.service").read_text("utf-8") == printed
    mine = install(tmp_path, "--print-unit", "--serve", "--max-model-len 32K", "--port", "81").stdout
    assert f"ExecStart={tmp_path}/onebox/venv/bin/onebox serve --port 81 --log-format json --max-model-len 32K" in mine


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    binary = tmp_path / "onebox" / "venv" / "bin" / "onebox"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    unit = tmp_path / "onebox.service"
    unit.write_text(install(tmp_path, "--print-unit").stdout)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and "onebox.service" not in done.stderr, done.stderr


def test_the_image_is_clean_to_hadolint_and_runs_what_install_sh_takes() -> None:
    done = subprocess.run([str(TOOLS / "hadolint"), str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    users = re.findall(r"^USER (\S+)", text, re.M)
    assert users and users[-1] not in ("0", "root")
    flags = re.findall(r"(--[\w-]+)", re.search(r"^RUN .*install\.sh (.*)", text, re.M).group(1))  # type: ignore[union-attr]
    assert flags and all(flag in SCRIPT.read_text("utf-8") for flag in flags)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").split() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)


def test_paths_that_the_manifests_ask_for_are_served() -> None:
    pod = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    served = {getattr(route, "path", "") for route in app_of(saying("x")).routes}
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= served
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800  # a large model loads
    assert probes["liveness"]["httpGet"]["path"] == "/health"
    assert pod["securityContext"]["runAsNonRoot"]
    asked = re.search(r"127\.0\.0\.1:8000(/[\w/]+)", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert asked and asked.group(1) in served


def test_compose_mounts_what_is_there_and_scrapes_the_server() -> None:
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert (DEPLOY / made["services"]["onebox"]["build"]["context"] / "deploy" / "Dockerfile").exists()
    for volume in made["services"]["grafana"]["volumes"]:
        assert (DEPLOY / volume.split(":")[0]).exists()
    wanted = {c["source"] for service in made["services"].values() for c in service.get("configs", [])}
    assert wanted == set(made["configs"])
    scrape = yaml.safe_load(made["configs"]["scrape"]["content"])
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["onebox:8000"]
    boxes = yaml.safe_load((DEPLOY / "litellm.yaml").read_text("utf-8"))["model_list"]
    assert len({box["litellm_params"]["api_base"] for box in boxes}) == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_three_runs_and_two_kills_end_the_same(tmp_path: Path) -> None:
    """Killed while it installs and while it serves; then to the end, and twice again."""
    home, root = tmp_path, tmp_path / "onebox"

    def killed_when(seen: Any) -> None:
        process = subprocess.Popen([str(SCRIPT)], env=env_of(home), stdout=subprocess.DEVNULL, start_new_session=True)
        while not seen():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    killed_when(lambda: len(list(root.glob("venv/lib/python*/site-packages/*"))) > 12)
    assert not (root / "done" / "environment").exists()
    killed_when(lambda: (root / "logs" / "server.log").exists())
    assert (root / "done" / "environment").exists() and not (root / "done" / "smoke").exists()
    first = install(home)
    assert first.returncode == 0, first.stderr
    assert "The capital of France is Paris." in first.stdout
    state = tree(home), {path.name: path.read_text() for path in (root / "done").iterdir()}
    for _ in range(2):
        began = time.monotonic()
        again = install(home)
        assert again.returncode == 0 and again.stderr == "" and time.monotonic() - began < 60
        assert (tree(home), {path.name: path.read_text() for path in (root / "done").iterdir()}) == state
    assert subprocess.run([str(root / "venv/bin/onebox"), "--version"], capture_output=True).returncode == 0
