# shellcheck shell=sh disable=SC2034,SC2154 # variables are for the sourcing script, and its own
# Shared by proxy.sh and instructions.sh: starts the backend and the proxies under test and measures
# their CPU time. Sourced, not run; the caller has set `build` (build directory) and `tmp`.

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
pids=""

die() {
    echo "$0: $*" >&2
    exit 1
}

cleanup() {
    for q in $pids; do
        kill "$q" 2>/dev/null
    done
    wait 2>/dev/null
    rm -rf "$tmp"
}

need() {
    for tool in "$@"; do
        command -v "$tool" >/dev/null || die "needs $tool (apt-get install nginx haproxy wrk valgrind curl)"
    done
}

# The first line that a background program writes to FILE.
first_line() {
    tries=0
    until [ -s "$1" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || die "no answer in $1"
        sleep 0.05
    done
    head -n 1 "$1"
}

wait_200() { # URL
    tries=0
    until [ "$(curl -s -o /dev/null -w '%{http_code}' "$1")" = 200 ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || die "$1 does not answer 200"
        sleep 0.05
    done
}

# Four backend ports in $backends.
start_backend() {
    taskset -c 1 "$build/bench_backend" 4 >"$tmp/backend" &
    pids="$pids $!"
    backends=$(first_line "$tmp/backend")
}

# --- the proxies: start_NAME sets port_NAME and pid_NAME. $pin comes before the command. ---

start_perilune() {
    : >"$tmp/perilune.log"
    engines=""
    for b in $backends; do
        engines="$engines --engine http://127.0.0.1:$b"
    done
    # shellcheck disable=SC2086 # $pin, $CONFIG and $engines are words
    $pin "$build/perilune" serve ${CONFIG:-} --listen 127.0.0.1:0 --admin off --threads 1 \
        --policy "${POLICY:-least_loaded}" $engines 2>"$tmp/perilune.log" &
    pid_perilune=$!
    pids="$pids $pid_perilune"
    tries=0
    until grep -q '"event":"listening"' "$tmp/perilune.log"; do
        tries=$((tries + 1))
        [ "$tries" -lt 400 ] || die "perilune does not start: $(cat "$tmp/perilune.log")"
        sleep 0.05
    done
    port_perilune=$(sed -n 's/.*"event":"listening".*http:\/\/127.0.0.1:\([0-9]*\).*/\1/p' \
        "$tmp/perilune.log" | head -n 1)
    wait_200 "http://127.0.0.1:$port_perilune/readyz"
}

free_port() {
    "$build/bench_client" ports 1
}

start_nginx() {
    port_nginx=$(free_port | tr -d ' ')
    {
        cat <<END
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
error_log $tmp/nginx.log error;
pid $tmp/nginx.pid;
events { worker_connections 19000; }
http {
    access_log off;
    keepalive_requests 1000000000;
    client_max_body_size 32m;
    client_body_buffer_size 256k;
    client_body_temp_path $tmp/nginx_body;
    proxy_temp_path $tmp/nginx_proxy;
    fastcgi_temp_path $tmp/nginx_fastcgi;
    uwsgi_temp_path $tmp/nginx_uwsgi;
    scgi_temp_path $tmp/nginx_scgi;
    upstream engines {
END
        for b in $backends; do
            echo "        server 127.0.0.1:$b;"
        done
        cat <<END
        keepalive 128;
        keepalive_requests 1000000000;
    }
    server {
        listen 127.0.0.1:$port_nginx;
        location / {
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_request_buffering on;
            proxy_buffering off;
            proxy_read_timeout 600s;
        }
    }
}
END
    } >"$tmp/nginx.conf"
    # shellcheck disable=SC2086
    $pin nginx -p "$tmp" -c "$tmp/nginx.conf" 2>"$tmp/nginx.err" &
    master=$!
    pids="$pids $master"
    wait_200 "http://127.0.0.1:$port_nginx/health"
    pid_nginx=$(tr -d ' ' </proc/"$master"/task/"$master"/children) # the worker
}

start_haproxy() {
    port_haproxy=$(free_port | tr -d ' ')
    cat >"$tmp/pick.lua" <<'END'
local at, names = 0, { "s1", "s2", "s3", "s4" }
core.register_action("pick", { "http-req" }, function(txn)
  at = at % 4 + 1
  txn:set_var("txn.server", names[at])
end)
END
    {
        cat <<END
global
    nbthread 1
    maxconn 9500
    lua-load $tmp/pick.lua
defaults
    mode http
    timeout connect 2s
    timeout client 600s
    timeout server 600s
    option http-no-delay
    http-reuse always
frontend f
    bind 127.0.0.1:$port_haproxy
    http-request lua.pick
    default_backend b
backend b
END
        i=0
        for b in $backends; do
            i=$((i + 1))
            echo "    use-server s$i if { var(txn.server) -m str s$i }"
        done
        i=0
        for b in $backends; do
            i=$((i + 1))
            echo "    server s$i 127.0.0.1:$b"
        done
    } >"$tmp/haproxy.cfg"
    # shellcheck disable=SC2086
    $pin haproxy -f "$tmp/haproxy.cfg" -db 2>"$tmp/haproxy.err" &
    pid_haproxy=$!
    pids="$pids $pid_haproxy"
    wait_200 "http://127.0.0.1:$port_haproxy/health"
}

# Nanoseconds on a CPU so far, over all threads of a process.
cpu_ns() {
    cat /proc/"$1"/task/*/schedstat | awk '{ s += $1 } END { printf "%.0f\n", s }'
}

now_ns() {
    date +%s%N
}

rss_kib() {
    awk '$1 == "VmRSS:" { print $2 }' /proc/"$1"/status
}

# The median of the numbers on standard input.
median() {
    sort -g | awk '{ v[NR] = $1 } END { print NR ? (NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2) : "-" }'
}
