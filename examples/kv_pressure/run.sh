#!/bin/sh
# KV pressure with and without sessions: the same 60 requests of a lead agent and five sub-agents go
# through the router to one simulated engine, first with a session for each sub-agent, then without.
#
#   sh examples/kv_pressure/run.sh [--speed X] [--out FOLDER] [--build FOLDER]
#
# --speed X        times real time (20: about half a minute for both)
# --out FOLDER     where sessions.csv and plain.csv go (.)
# --build FOLDER   of the perilune binary (build)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
speed=20 out=. build=$here/../../build
while [ $# -gt 0 ]; do
    case "$1" in
        --speed) speed=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --build) build=$2; shift 2 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
done
perilune=${PERILUNE:-$build/perilune}
[ -x "$perilune" ] || { echo "no $perilune: build it first (cmake -B build && cmake --build build)" >&2; exit 1; }
logs=$(mktemp -d)
pids=
stop() {
    # shellcheck disable=SC2086 # a list
    [ -z "$pids" ] || kill $pids 2>/dev/null || :
    wait 2>/dev/null || :
    pids=
}
trap 'stop; rm -rf "$logs"' EXIT
trap 'exit 1' INT TERM
# address LOG: waits until a program says where it listens
address() {
    for _ in $(seq 1 200); do
        found=$(sed -n 's/.*"event":"listening".*\(http:[^ "]*\).*/\1/p; s/.* listening.*\(http:[^ "]*\).*/\1/p' "$1" | head -n 1)
        [ -z "$found" ] || { echo "$found"; return; }
        sleep 0.1
    done
    cat "$1" >&2
    return 1
}
for mode in sessions plain; do
    "$perilune" engine --listen 127.0.0.1:0 --preset glm47flash-l40s-tp2 --speed "$speed" --pool-tokens 180224 \
        --enable-streaming-session 2>"$logs/engine.$mode" &
    pids=$!
    engine=$(address "$logs/engine.$mode")
    "$perilune" serve --listen 127.0.0.1:0 --admin off --engine "$engine" 2>"$logs/router.$mode" &
    pids="$pids $!"
    router=$(address "$logs/router.$mode")
    for _ in $(seq 1 100); do
        [ "$(curl -s -o /dev/null -w '%{http_code}' "$router/readyz")" = 200 ] && break
        sleep 0.1
    done
    node "$here/replay.mjs" "$router" "$engine" "$mode" "$speed" "$out/$mode.csv"
    stop
done
