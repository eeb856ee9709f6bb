#!/bin/sh
# All benchmarks, as markdown on standard output: builds what they need, then proxy.sh (CPU time and
# memory beside nginx and haproxy), bench_score (a decision beside the same in C), instructions.sh.
# Takes some five minutes and wants a machine with two cores and nothing else to do.
#
# Usage: sh tests/bench/run.sh [proxy|score|instructions ...]      the knobs are those of each
set -eu
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
export BUILD
[ -f "$BUILD/CMakeCache.txt" ] || cmake -B "$BUILD" >&2
cmake --build "$BUILD" --target perilune bench_backend bench_client bench_score >&2
[ $# -gt 0 ] || set -- proxy score instructions

echo "## perilune benchmarks"
echo
sed -n 's/^model name[^:]*: \(.*\)/\1/p' /proc/cpuinfo | sort | uniq -c |
    awk '{ n = $1; $1 = ""; printf "%d x%s, ", n, $0 }'
echo "Linux $(uname -r | cut -d- -f1), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
for part in "$@"; do
    case $part in
    proxy)
        sh tests/bench/proxy.sh
        ;;
    score)
        printf '\n### A score policy, C to C, beside the same cost in C\n\n'
        taskset -c 0 "$BUILD/bench_score" tests/bench/score.lua
        ;;
    instructions)
        printf '\n### Instructions per request (callgrind)\n\n'
        sh tests/bench/instructions.sh
        ;;
    *)
        echo "usage: sh tests/bench/run.sh [proxy|score|instructions ...]" >&2
        exit 2
        ;;
    esac
done
