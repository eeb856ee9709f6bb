#!/bin/sh
# What a request costs in the proxy: perilune beside nginx and haproxy, each with one thread pinned
# to core 0, load and backend on core 1. The measure is the proxy's CPU time (user and system, from
# schedstat) per request or event; the repetitions are interleaved and the tables show medians.
# "busy" is the share of core 0 that the proxy used: below 95 % its throughput says nothing.
#
# Usage: sh tests/bench/proxy.sh        REPS=5 SECONDS_EACH=3 PROXIES="nginx haproxy perilune"
#                                       IDLE=5000 BUILD=build
set -eu
build=${BUILD:-build}
tmp=$(mktemp -d)
chmod 755 "$tmp" # nginx's worker runs as another user
reps=${REPS:-5}
seconds=${SECONDS_EACH:-3}
proxies=${PROXIES:-nginx haproxy perilune}
idle=${IDLE:-5000}
pin="taskset -c 0"
# shellcheck source=tests/bench/lib.sh
. "$(dirname "$0")/lib.sh"
trap cleanup EXIT
trap 'exit 130' INT TERM
need wrk curl taskset
[ "$(nproc)" -ge 2 ] || die "needs two cores"
case $build in /*) ;; *) build=$root/$build ;; esac
[ -x "$build/bench_client" ] || die "no $build/bench_client: run tests/bench/run.sh, which builds it"
# shellcheck disable=SC3045 # dash and bash have it
ulimit -n 20000 2>/dev/null || ulimit -n "$(ulimit -Hn)"

start_backend
for p in $proxies; do
    [ "$p" = perilune ] || need "$p"
    "start_$p"
done

port_of() { eval "echo \$port_$1"; }
pid_of() { eval "echo \$pid_$1"; }

# Adds "CPU_US BUSY PER_SECOND EXTRA..." of one run to $tmp/CASE.PROXY.
record() { # case proxy cpu_ns wall_ns count extra
    awk -v cpu="$3" -v wall="$4" -v n="$5" -v extra="${6:-}" 'BEGIN {
        if (n < 1) { print "no answers" > "/dev/stderr"; exit 1 }
        printf "%.3f %.1f %.0f %s\n", cpu / n / 1000, cpu / wall * 100, n / wall * 1e9, extra
    }' >>"$tmp/$1.$2"
}

run_wrk() { # case proxy port body_bytes connections
    c0=0
    [ "$2" = direct ] || c0=$(cpu_ns "$(pid_of "$2")")
    t0=$(now_ns)
    taskset -c 1 wrk -t1 -c"$5" -d"${seconds}s" -s "$here/post.lua" "http://127.0.0.1:$3" -- "$4" \
        >"$tmp/wrk"
    t1=$(now_ns)
    c1=0
    [ "$2" = direct ] || c1=$(cpu_ns "$(pid_of "$2")")
    if grep -q -e 'Non-2xx' -e 'Socket errors' "$tmp/wrk"; then
        grep -e 'Non-2xx' -e 'Socket errors' "$tmp/wrk" | sed "s/^/$1 $2: /" >&2
    fi
    record "$1" "$2" $((c1 - c0)) $((t1 - t0)) "$(awk '$2 == "requests" { print $1 }' "$tmp/wrk")"
}

run_sse() { # case proxy port pace_us
    c0=0
    [ "$2" = direct ] || c0=$(cpu_ns "$(pid_of "$2")")
    t0=$(now_ns)
    taskset -c 1 "$build/bench_client" sse "$3" 64 200 "$4" "$seconds" >"$tmp/sse" ||
        echo "$1 $2: $(cat "$tmp/sse")" >&2
    t1=$(now_ns)
    c1=0
    [ "$2" = direct ] || c1=$(cpu_ns "$(pid_of "$2")")
    # chunks N p50_us X p99_us Y errors E
    read -r _ n _ p50 _ p99 _ <"$tmp/sse"
    record "$1" "$2" $((c1 - c0)) $((t1 - t0)) "$n" "$p50 $p99"
}

column() { # case proxy column
    awk -v k="$3" '{ print $k }' "$tmp/$1.$2" | median
}

# "| proxy | CPU us | against nginx | busy % | per second |" and the extra columns.
table() { # title case unit
    echo
    echo "### $1"
    echo
    if [ "$3" = event ]; then
        echo "| proxy | CPU us / event | vs nginx | busy % | events/s | p50 us | p99 us |"
        echo "|---|---|---|---|---|---|---|"
    else
        echo "| proxy | CPU us / request | vs nginx | busy % | requests/s |"
        echo "|---|---|---|---|---|"
    fi
    base=""
    [ ! -f "$tmp/$2.nginx" ] || base=$(column "$2" nginx 1)
    for p in direct $proxies; do
        cpu=$(column "$2" "$p" 1)
        ratio=-
        if [ "$p" = direct ]; then
            cpu=-
        elif [ -n "$base" ]; then
            ratio=$(awk -v a="$cpu" -v b="$base" 'BEGIN { printf "%.2f", a / b }')
        fi
        extra=""
        [ "$3" != event ] || extra=" $(column "$2" "$p" 4) | $(column "$2" "$p" 5) |"
        busy=$(column "$2" "$p" 2)
        [ "$p" != direct ] || busy=-
        echo "| $p | $cpu | $ratio | $busy | $(column "$2" "$p" 3) |$extra"
    done
}

direct=${backends%% *}
rep=0
while [ "$rep" -lt "$reps" ]; do
    rep=$((rep + 1))
    for p in direct $proxies; do
        port=$direct
        [ "$p" = direct ] || port=$(port_of "$p")
        if [ "$rep" = 1 ]; then # warm: connections, caches, compiled traces
            taskset -c 1 wrk -t1 -c32 -d1s -s "$here/post.lua" "http://127.0.0.1:$port" -- 1024 \
                >/dev/null
        fi
        run_wrk small "$p" "$port" 1024 32
        run_wrk large "$p" "$port" 102400 32
        run_sse sse "$p" "$port" 5000
        run_sse fast "$p" "$port" 1000
        run_sse burst "$p" "$port" 0
    done
done
table "Chat request, 1 KB body, 256 B answer, 32 keep-alive connections" small request
table "100 KB body, 256 B answer, 32 keep-alive connections" large request
table "SSE, 64 streams x 200 events of 200 B, an event each 5 ms" sse event
table "SSE, 64 streams x 200 events of 200 B, an event each 1 ms" fast event
table "SSE, 64 streams x 200 events, as fast as the backend sends" burst event

# --- idle streams: fresh processes, since memory that was used before would hide the growth ---
echo
echo "### $idle idle SSE streams"
echo
echo "| proxy | KiB / stream | RSS before KiB | RSS with streams KiB |"
echo "|---|---|---|---|"
for p in $proxies; do
    "start_$p"
    pid=$(pid_of "$p")
    before=$(rss_kib "$pid")
    mkfifo "$tmp/hold.$p"
    taskset -c 1 "$build/bench_client" idle "$(port_of "$p")" "$idle" <"$tmp/hold.$p" \
        >"$tmp/idle.$p" &
    client=$!
    exec 9>"$tmp/hold.$p"
    tries=0
    until [ -s "$tmp/idle.$p" ] || [ "$tries" -gt 800 ]; do
        tries=$((tries + 1))
        sleep 0.05
    done
    read -r _ n <"$tmp/idle.$p" || n=0
    after=$(rss_kib "$pid")
    exec 9>&-
    wait "$client" || echo "$p: idle streams: $n of $idle were opened" >&2
    awk -v p="$p" -v a="$before" -v b="$after" -v n="$n" \
        'BEGIN { printf "| %s | %s | %d | %d |\n", p, n ? sprintf("%.2f", (b - a) / n) : "-", a, b }'
done
