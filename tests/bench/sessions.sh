#!/bin/sh
# What a session adds to a request's latency: turns beside the same requests without a session, all in
# one run, interleaved, through a router with one thread on core 0; client and engine on core 1.
# The engine answers at once. Writes a table in markdown.
#
# Usage: sh tests/bench/sessions.sh      ROUNDS=40000 BUILD=build
set -eu
build=${BUILD:-build}
tmp=$(mktemp -d)
rounds=${ROUNDS:-40000}
# shellcheck source=tests/bench/lib.sh
. "$(dirname "$0")/lib.sh"
trap cleanup EXIT
trap 'exit 130' INT TERM
need curl taskset
case $build in /*) ;; *) build=$root/$build ;; esac
[ -f "$build/CMakeCache.txt" ] || cmake -S "$root" -B "$build" >&2
cmake --build "$build" --target perilune bench_turns >&2

mkfifo "$tmp/hold"
taskset -c 1 "$build/bench_turns" serve <"$tmp/hold" >"$tmp/backend" &
exec 9>"$tmp/hold"
pids="$pids $!"
backends=$(first_line "$tmp/backend")
pin="taskset -c 0"
start_perilune
echo "### A session's turn beside a request without a session, one at a time ($(nproc) cores, Linux $(uname -r | cut -d- -f1), commit $(git -C "$root" rev-parse --short HEAD))"
echo
# an engine's capabilities are asked for when it is found, after it is usable
tries=0
until taskset -c 1 "$build/bench_turns" run "$port_perilune" 16 >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || die "sessions do not open: $(taskset -c 1 "$build/bench_turns" run "$port_perilune" 16 2>&1)"
    sleep 0.1
done
taskset -c 1 "$build/bench_turns" run "$port_perilune" "$rounds"
