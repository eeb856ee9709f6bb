#!/bin/sh
# perilune in one command: installs what is missing to build it, builds it, starts three simulated
# engines and the router with examples/policies/same_prefix.lua, sends streaming chats through curl
# and shows which worker took each one and why.
#
#   sh examples/quickstart.sh          leaves nothing running
#   sh examples/quickstart.sh --keep   keeps everything running until Ctrl-C, router on port 8000
#   sh examples/quickstart.sh --no-install   fails rather than install a package
set -eu
cd "$(dirname "$0")/.."
. examples/lib.sh

keep=0 no_install=0
for argument in "$@"; do
    case "$argument" in
        --keep) keep=1 ;;
        --no-install) no_install=1 ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) say "unknown option $argument (see --help)"; exit 2 ;;
    esac
done

say "== 1. packages and build"
need build
mkdir -p build
if ! { cmake -B build && cmake --build build -j 2; } >build/quickstart.log 2>&1; then
    tail -n 30 build/quickstart.log >&2
    die "the build failed; all of its output is in build/quickstart.log"
fi
perilune=build/perilune
policy=examples/policies/same_prefix.lua

scratch=$(mktemp -d)
pids=
stop() {
    trap - EXIT INT TERM
    # shellcheck disable=SC2086 # a list on purpose
    [ -z "$pids" ] || kill $pids 2>/dev/null || :
    wait 2>/dev/null || :
    rm -rf "$scratch"
}
trap stop EXIT
trap 'stop; exit 130' INT TERM

# start NAME COMMAND...: runs it in the background
start() {
    name=$1
    shift
    : >"$scratch/$name.log" # there before address looks into it
    "$@" 2>"$scratch/$name.log" >/dev/null &
    pid=$!
    pids="$pids $pid"
}
# address NAME EVENT: the http://host:port that the last started program logs once it accepts
address() {
    tries=0
    while :; do
        url=$(sed -n "/\"event\":\"$2\"/s/.*\(http:\/\/[^\" ]*\).*/\1/p" "$scratch/$1.log" | head -n 1)
        [ -z "$url" ] || break
        tries=$((tries + 1))
        if [ "$tries" -gt 300 ] || ! kill -0 "$pid" 2>/dev/null; then
            cat "$scratch/$1.log" >&2
            die "$1 did not start"
        fi
        sleep 0.1
    done
    echo "$url"
}

say "== 2. three engines and the router"
engines=
for name in ada bob cyd; do
    start "$name" "$perilune" engine --listen 127.0.0.1:0 --model demo
    url=$(address "$name" listening)
    engines="$engines --engine $name=$url"
    say "   engine $name at $url"
done
listen=127.0.0.1:0 admin=127.0.0.1:0
[ "$keep" = 0 ] || listen=127.0.0.1:8000 admin=127.0.0.1:8001
# shellcheck disable=SC2086
start router "$perilune" serve --listen "$listen" --admin "$admin" --policy "$policy" $engines
router=$(address router listening)
admin_url=$(address router admin_listening)
tries=0
until curl -fs "$router/readyz" >/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -le 100 ] || { cat "$scratch/router.log" >&2; die "no engine became usable"; }
    sleep 0.1
done
say "   router at $router, admin at $admin_url, policy $policy"

say "== 3. streaming chats: three assistants, each with its own long instructions"
instructions() { # WHO: some thousand bytes that all chats of one assistant share
    i=0
    while [ "$i" -lt 40 ]; do
        printf 'Rule %d of the %s: answer briefly, kindly and with an example. ' "$i" "$1"
        i=$((i + 1))
    done
}
header() { tr -d '\r' <"$scratch/head" | sed -n "s/^$1: //p"; }
chat() { # WHO QUESTION
    printf '{"model":"demo","stream":true,"stream_options":{"include_usage":true},"max_tokens":12,"messages":[{"role":"system","content":"%s"},{"role":"user","content":"%s"}]}' \
        "$(instructions "$1")" "$2" >"$scratch/body"
    curl -sN -D "$scratch/head" -H 'content-type: application/json' --data-binary "@$scratch/body" \
        "$router/v1/chat/completions" >"$scratch/answer" || die "curl failed for $1"
    grep -q '^data: \[DONE\]' "$scratch/answer" || { cat "$scratch/answer" >&2; die "a stream was cut"; }
    cached=$(sed -n 's/.*"cached_tokens": *\([0-9]*\).*/\1/p' "$scratch/answer" | tail -n 1)
    prompt=$(sed -n 's/.*"prompt_tokens": *\([0-9]*\).*/\1/p' "$scratch/answer" | tail -n 1)
    printf '   %-10s %-26s %-8s %-12s %5s of %5s prompt tokens cached\n' "$1" "\"$2\"" \
        "$(header x-perilune-worker)" "$(header x-perilune-reason)" "${cached:-0}" "${prompt:-?}"
}
printf '   %-10s %-26s %-8s %-12s\n' assistant question worker reason
for question in "What is a moon?" "How far is it?" "Who went there?"; do
    for who in gardener sailor cook; do
        chat "$who" "$question"
    done
done

cat <<END

Each assistant stayed with one worker: from its second chat on, the instructions came from that
worker's cache. Where to go next:
  $policy   the policy that decided this: change it
  policies/                         ready-made ones: build/perilune serve --policy least_loaded ...
  build/perilune check $policy
                                    what is wrong with a policy, and whether it is compiled
  README.md                         configuration, your own engines, how it works
END

if [ "$keep" = 1 ]; then
    cat <<END

Still running until you press Ctrl-C:
  curl $router/v1/models
  curl $admin_url/engines
  curl -X POST $admin_url/policy/reload
END
    wait
fi
