#!/usr/bin/env bash
# Sets up one box: environment, doctor, checkpoint, service unit, smoke test, bench. Needs no root.
#
#   ./install.sh                                    from a clone: the bundled test model
#   ./install.sh --model SOURCE                     builds the checkpoint of SOURCE first; goes on after a kill
#   curl -fsSL URL/install.sh | bash -s -- --package WHEEL_OR_GIT_URL
#
# Each step leaves a manifest of what went into it, and is done while that is the same: any run may be killed, and any
# may be repeated.
set -euo pipefail

usage() {
    cat <<'END'
usage: install.sh [options]
  --root DIR        where everything goes; default: $HOME/onebox
  --package WHAT    a wheel, folder or git URL to install; default: the folder of this script
  --python PATH     Python 3.11 or newer; default: the first one found
  --model SOURCE    folder or hub repository to build and serve; default: the bundled test model
  --recipe NAME     build to make of it; default: the best one for SOURCE
  --serve "FLAGS"   flags for 'onebox serve', such as "--max-model-len 32K"
  --port N          port of the service; default: 8000
  --user NAME       user of the service; default: the one who runs this
  --force           go on when doctor finds a problem
  --no-bench        leave the bench out
  --print-unit      print the service unit and stop
  --dry-run         say what would be done and change nothing
END
}

say() { printf '%-12s %s\n' "$1" "$2"; }

fail() {
    printf 'install.sh: error: %s\n' "$1" >&2
    exit 1
}

parse() {
    ROOT=${HOME:-/root}/onebox PACKAGE="" PYTHON="" MODEL="" RECIPE="" SERVE="" PORT=8000
    USER_NAME=${SUDO_USER:-$(id -un)}
    FORCE=0 BENCH=1 DRY=0 PRINT_UNIT=0
    while [ $# -gt 0 ]; do
        case $1 in
            --root | --package | --python | --model | --recipe | --serve | --port | --user)
                [ $# -ge 2 ] || fail "$1 needs a value"
                case $1 in
                    --root) ROOT=$2 ;;
                    --package) PACKAGE=$2 ;;
                    --python) PYTHON=$2 ;;
                    --model) MODEL=$2 ;;
                    --recipe) RECIPE=$2 ;;
                    --serve) SERVE=$2 ;;
                    --port) PORT=$2 ;;
                    --user) USER_NAME=$2 ;;
                esac
                shift 2
                ;;
            --force) FORCE=1 && shift ;;
            --no-bench) BENCH=0 && shift ;;
            --print-unit) PRINT_UNIT=1 && shift ;;
            --dry-run) DRY=1 && shift ;;
            -h | --help) usage && exit 0 ;;
            *) fail "unknown option '$1'; see --help" ;;
        esac
    done
    if ! [[ $PORT =~ ^[1-9][0-9]{0,4}$ ]] || ((PORT > 65535)); then
        fail "--port must be between 1 and 65535, got '$PORT'"
    fi
    [[ $ROOT == /* ]] || ROOT=$PWD/$ROOT
    # it is written into scripts and a unit file, and not every reader of those knows quotes
    [[ $ROOT =~ ^[A-Za-z0-9_./@+-]+$ ]] || fail "--root '$ROOT' has characters other than letters, digits and _ . / @ + -"
    [ -z "$MODEL" ] || [ ! -d "$MODEL" ] || MODEL=$(cd "$MODEL" && pwd)
    VENV=$ROOT/venv BIN=$ROOT/venv/bin DONE=$ROOT/done LOGS=$ROOT/logs CHECKPOINT=""
    [ -z "$MODEL" ] || CHECKPOINT=$ROOT/models/$(basename "$MODEL")
}

# a step's manifest: written whole, beside what went into it
is_done() { [ -f "$DONE/$1" ] && [ "$(cat "$DONE/$1")" = "$2" ]; }

set_done() {
    printf '%s\n' "$2" >"$DONE/.$1.new"
    mv "$DONE/.$1.new" "$DONE/$1"
}

new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local found
    if [ -n "$PYTHON" ]; then
        new_enough "$PYTHON" || fail "$PYTHON is not Python 3.11 or newer with venv"
        return
    fi
    for found in python3 python3.13 python3.12 python3.11; do
        if new_enough "$found"; then
            PYTHON=$(command -v "$found")
            return
        fi
    done
    fail "no Python 3.11 or newer with venv; name one with --python PATH, or on Debian: sudo apt-get install python3-venv"
}

find_package() {
    local here
    if [ -z "$PACKAGE" ]; then
        here=$(cd "$(dirname "${BASH_SOURCE[0]:-/nowhere/x}")" 2>/dev/null && pwd) || here=""
        if ! grep -qs '^name = "onebox"' "$here/pyproject.toml"; then
            fail "not in a clone of onebox: name what to install with --package WHEEL_OR_GIT_URL"
        fi
        PACKAGE=$here
    fi
    case $PACKAGE in
        *://* | git+*) ;;
        *)
            [ -e "$PACKAGE" ] || fail "--package $PACKAGE: no such file or folder"
            PACKAGE=$(cd "$(dirname "$PACKAGE")" && pwd)/$(basename "$PACKAGE")
            ;;
    esac
}

# of what will be installed: the bytes of a wheel, the package's files of a folder, else the address
print_of_package() {
    if [ -d "$PACKAGE" ]; then
        (cd "$PACKAGE" && find onebox pyproject.toml constraints.txt -type f ! -name '*.pyc' -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum) | sha256sum | cut -d' ' -f1
    elif [ -f "$PACKAGE" ]; then
        sha256sum "$PACKAGE" | cut -d' ' -f1
    else
        printf '%s' "$PACKAGE" | sha256sum | cut -d' ' -f1
    fi
}

environment() {
    ENVIRONMENT="python $("$PYTHON" -c 'import sys; print(sys.version.split()[0], sys.prefix)')
package $(print_of_package)
root $ROOT"
    if is_done environment "$ENVIRONMENT" && "$BIN/onebox" --version >/dev/null 2>&1; then
        say environment "done: $("$BIN/onebox" --version) in $VENV"
        return
    fi
    if [ "$DRY" = 1 ]; then
        say environment "would make $VENV with $PYTHON and install $PACKAGE (some minutes, torch is the largest part)"
        return
    fi
    say environment "making $VENV and installing (some minutes, torch is the largest part)"
    rm -rf "$DONE/environment" "$VENV" # what a killed run left is not to be trusted
    "$PYTHON" -m venv "$VENV" || fail "venv failed. On Debian or Ubuntu: sudo apt-get install python3-venv"
    local pins=()
    [ ! -f "$PACKAGE/constraints.txt" ] || pins=(-c "$PACKAGE/constraints.txt")
    local what="onebox[prompt] @ $PACKAGE"
    [ ! -e "$PACKAGE" ] || what="${PACKAGE}[prompt]"
    "$BIN/python" -m pip install --quiet --disable-pip-version-check "${pins[@]}" "$what" >"$LOGS/pip.log" 2>&1 ||
        fail "pip failed; the end of $LOGS/pip.log: $(grep -v '^WARNING' "$LOGS/pip.log" | tail -n 3)"
    "$BIN/onebox" --version >/dev/null || fail "the installed package does not start: $BIN/onebox --version"
    set_done environment "$ENVIRONMENT"
    say environment "done: $("$BIN/onebox" --version)"
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

doctor() {
    if [ "$DRY" = 1 ]; then
        say doctor "would look at this machine"
        return
    fi
    local status=0
    "$BIN/onebox" doctor --port "$(free_port)" --no-self-test >"$LOGS/doctor.log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        cat "$LOGS/doctor.log" >&2
        [ "$FORCE" = 1 ] || fail "doctor found a problem (above); --force goes on all the same"
    fi
    say doctor "$([ "$status" = 0 ] && echo "no problem" || echo "problems, forced"); its report: $LOGS/doctor.log"
}

# onebox.json, which a build writes last, tells of every file of it
print_of_checkpoint() {
    [ -n "$CHECKPOINT" ] || { echo bundled && return; }
    [ -f "$CHECKPOINT/onebox.json" ] && sha256sum "$CHECKPOINT/onebox.json" | cut -d' ' -f1 || echo none
}

checkpoint() {
    if [ -z "$MODEL" ]; then
        say checkpoint "the bundled test model"
        return
    fi
    local want
    want="source $MODEL
recipe ${RECIPE:-best}
onebox.json $(print_of_checkpoint)"
    if is_done checkpoint "$want" && [ "$(print_of_checkpoint)" != none ]; then
        say checkpoint "done: $CHECKPOINT"
        return
    fi
    if [ "$DRY" = 1 ]; then
        say checkpoint "would build $MODEL into $CHECKPOINT"
        return
    fi
    say checkpoint "building $MODEL into $CHECKPOINT"
    mkdir -p "$ROOT/models"
    local recipe=()
    [ -z "$RECIPE" ] || recipe=(--recipe "$RECIPE")
    "$BIN/onebox" build "$MODEL" --out "$CHECKPOINT" --quiet "${recipe[@]}" ||
        fail "the build stopped; run the same command again to go on"
    set_done checkpoint "source $MODEL
recipe ${RECIPE:-best}
onebox.json $(print_of_checkpoint)"
    say checkpoint "done: $CHECKPOINT"
}

unit() {
    cat <<END
[Unit]
Description=onebox: one model over the OpenAI and Anthropic APIs
After=network-online.target
Wants=network-online.target

[Service]
Type=exec
User=$USER_NAME
ExecStart=$BIN/onebox serve${CHECKPOINT:+ $CHECKPOINT} --port $PORT --log-format json${SERVE:+ $SERVE}
WorkingDirectory=$ROOT
# a file of lines such as ONEBOX_API_KEY=...; may be missing
EnvironmentFile=-$ROOT/environment
Restart=on-failure
RestartSec=5
# loading a large model takes minutes, finishing answers up to --drain-s (30 s)
TimeoutStartSec=infinity
TimeoutStopSec=60
KillMode=mixed
LimitMEMLOCK=infinity
LimitNOFILE=65536
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
END
}

service_unit() {
    local file=$ROOT/onebox.service
    if [ "$DRY" = 1 ]; then
        say unit "would write $file"
        return
    fi
    unit >"$file.new"
    mv "$file.new" "$file"
    say unit "$file; to start it with the machine:"
    say "" "sudo install -m 644 $file /etc/systemd/system/onebox.service"
    say "" "sudo systemctl daemon-reload && sudo systemctl enable --now onebox"
}

SERVER=""
stop_server() {
    [ -n "$SERVER" ] || return 0
    kill "$SERVER" 2>/dev/null || true
    wait "$SERVER" 2>/dev/null || true
    SERVER=""
}

start_server() {
    [ -z "$SERVER" ] || return 0
    TRIAL=http://127.0.0.1:$1
    # shellcheck disable=SC2086  # several flags
    "$BIN/onebox" serve ${CHECKPOINT:+"$CHECKPOINT"} --port "$1" $SERVE >"$LOGS/server.log" 2>&1 &
    SERVER=$!
    until "$BIN/python" -c 'import httpx, sys; httpx.get(sys.argv[1]).raise_for_status()' "$TRIAL/health/ready" 2>/dev/null; do
        kill -0 "$SERVER" 2>/dev/null || fail "the server ended while it started: $(tail -n 1 "$LOGS/server.log")"
        sleep 1
    done
}

ASK='
import sys, httpx
key = sys.argv[2]
headers = {"Authorization": f"Bearer {key}"} if key else {}
model = httpx.get(sys.argv[1] + "/v1/models", headers=headers).raise_for_status().json()["data"][0]["id"]
body = {"model": model, "max_tokens": 64, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False},
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}
made = httpx.post(sys.argv[1] + "/v1/chat/completions", json=body, headers=headers, timeout=600).raise_for_status()
text = made.json()["choices"][0]["message"]["content"]
assert text.strip(), "the answer is empty"
print(" ".join(text.split()))
'

smoke() {
    local want="$SERVED" answer
    if is_done smoke "$want"; then
        say smoke "done"
        return
    fi
    if [ "$DRY" = 1 ]; then
        say smoke "would serve on a free port and ask one question"
        return
    fi
    start_server "$(free_port)"
    answer=$("$BIN/python" -c "$ASK" "$TRIAL" "${ONEBOX_API_KEY:-}" 2>"$LOGS/smoke.log") ||
        fail "no answer: $(tail -n 1 "$LOGS/smoke.log")"
    set_done smoke "$want"
    say smoke "the model said: $answer"
}

bench() {
    if [ "$BENCH" = 0 ]; then
        say bench "left out"
        return
    fi
    if is_done bench "$SERVED"; then
        say bench "done: $ROOT/bench.jsonl"
        return
    fi
    if [ "$DRY" = 1 ]; then
        say bench "would measure a single stream into $ROOT/bench.jsonl"
        return
    fi
    start_server "$(free_port)"
    rm -f "$ROOT/bench.new"
    "$BIN/onebox" bench serve --url "$TRIAL" --scenario single --requests 4 --input-tokens 128 --output-tokens 64 \
        --out "$ROOT/bench.new" >"$LOGS/bench.log" 2>&1 ||
        fail "the bench failed: $(tail -n 1 "$LOGS/bench.log")"
    cat "$ROOT/bench.new" >>"$ROOT/bench.jsonl"
    rm "$ROOT/bench.new"
    set_done bench "$SERVED"
    tail -n 5 "$LOGS/bench.log"
    say bench "done: $ROOT/bench.jsonl"
}

main() {
    parse "$@"
    if [ "$PRINT_UNIT" = 1 ]; then
        unit
        return
    fi
    find_python
    find_package
    if [ "$DRY" = 0 ]; then
        mkdir -p "$DONE" "$LOGS" || fail "cannot write in $ROOT"
        if command -v flock >/dev/null; then
            exec 9>"$ROOT/.lock"
            flock -n 9 || fail "another install.sh is at work in $ROOT"
        fi
        trap stop_server EXIT
        trap 'exit 130' INT TERM HUP
    fi
    environment
    doctor
    checkpoint
    service_unit
    SERVED="$ENVIRONMENT
checkpoint $(print_of_checkpoint)
flags $SERVE"
    smoke
    bench
    [ "$DRY" = 1 ] || say ready "$BIN/onebox serve${CHECKPOINT:+ $CHECKPOINT} --port $PORT${SERVE:+ $SERVE}"
}

main "$@"
