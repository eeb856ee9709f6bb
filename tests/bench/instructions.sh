#!/bin/sh
# Instructions that perilune executes per request, counted by callgrind: unlike times, they can be
# compared between machines with other things to do, and between commits. Start-up, warming up and
# the idle work of the loops are not in them.
#
# Usage: sh tests/bench/instructions.sh      REQUESTS=3000 BUILD=build
#                                            POLICY=least_loaded CONFIG= (a file)
#                                            TOP=30: also the functions with the largest shares
set -eu
build=${BUILD:-build}
tmp=$(mktemp -d)
requests=${REQUESTS:-3000}
# shellcheck source=tests/bench/lib.sh
. "$(dirname "$0")/lib.sh"
trap cleanup EXIT
trap 'exit 130' INT TERM
need valgrind callgrind_control callgrind_annotate curl taskset
case $build in /*) ;; *) build=$root/$build ;; esac
[ -x "$build/bench_client" ] || die "no $build/bench_client: run tests/bench/run.sh, which builds it"

pin="taskset -c 0 valgrind --tool=callgrind --callgrind-out-file=$tmp/out.%p"
pin="$pin --log-file=$tmp/valgrind.log"
start_backend
start_perilune

# The process that callgrind runs is the one that was started: valgrind replaces itself.
zero() { callgrind_control -z "$pid_perilune" >/dev/null 2>&1; }

# Instructions since the last zero; the profile stays in $dump.
dumps=0
count() {
    dumps=$((dumps + 1))
    dump=$tmp/out.$pid_perilune.$dumps
    callgrind_control -d "$pid_perilune" >/dev/null 2>&1
    tries=0
    until [ -f "$dump" ] && grep -q '^totals:' "$dump"; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || die "callgrind wrote no $dump"
        sleep 0.05
    done
    instructions=$(awk '$1 == "totals:" { print $2 }' "$dump")
}

zero
sleep 4
count
idle_per_ms=$((instructions / 4000))

echo "| request | instructions | of these idle work, subtracted |"
echo "|---|---|---|"
measure() { # title command...
    title=$1
    shift
    "$@" 500 >/dev/null # warm
    zero
    t0=$(now_ns)
    "$@" "$requests" >/dev/null || die "$title: the requests failed"
    ms=$((($(now_ns) - t0) / 1000000))
    count
    awk -v t="$title" -v i="$instructions" -v idle="$((idle_per_ms * ms))" -v n="$requests" \
        'BEGIN { printf "| %s | %.0f | %.0f |\n", t, (i - idle) / n, idle / n }'
    if [ -n "${TOP:-}" ]; then
        callgrind_annotate --threshold=100 "$dump" 2>/dev/null |
            awk '/^-----/ { next } /Ir / { on = 1 } on' | head -n "$TOP" >&2
    fi
}
body_1k() { taskset -c 1 "$build/bench_client" post "$port_perilune" "$1" 1024; }
body_100k() { taskset -c 1 "$build/bench_client" post "$port_perilune" "$1" 102400; }
measure "1 KB body, 256 B answer" body_1k
measure "100 KB body, 256 B answer" body_100k
