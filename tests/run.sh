#!/bin/sh
# The one test command: installs what the tests need, builds, runs all of them.
#
#   sh tests/run.sh            everything, at most 20 minutes on 2 cores
#   sh tests/run.sh --quick    no TSan, no fuzzing
#   sh tests/run.sh --long     soaks and long fuzzing on top (hours)
#   sh tests/run.sh --no-install   fail rather than install a package
#
# A failure is printed where it happens. The last line is `N passed, N failed`; exit 1 if any failed.
set -u
cd "$(dirname "$0")/.." || exit 2
. examples/lib.sh

quick=0 no_install=0 fuzz_seconds=10
PL_LONG=0
for argument in "$@"; do
    case "$argument" in
        --quick) quick=1 ;;
        --long) PL_LONG=1 fuzz_seconds=1200 ;;
        --no-install) no_install=1 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) say "unknown option $argument (see --help)"; exit 2 ;;
    esac
done
export PL_LONG

passed=0 failed=0
logs=build-logs # kept: the whole output of the last run of each kind
mkdir -p "$logs" || exit 2

headline() { say "== $*"; }
count() { # PASSED FAILED
    passed=$((passed + $1)) failed=$((failed + $2))
    say "   $1 passed, $2 failed"
}
finish() {
    headline "result"
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
    exit
}
# one NAME COMMAND...: a suite that counts as one test; its output is shown when it fails
one() {
    name=$1
    shift
    if "$@" >"$logs/one" 2>&1; then
        count 1 0
    else
        say "FAILED: $name"
        tail -n 60 "$logs/one" >&2
        count 0 1
    fi
}

# --- what the tests need ---------------------------------------------------------------------------
headline "packages"
packages() {
    if [ "$quick" = 1 ]; then need build test node; else need build test fuzz node; fi
    node -e 'process.exit(parseInt(process.versions.node) < 18 ? 1 : 0)' ||
        die "the flow tests need Node 18 or newer; $(command -v node) is $(node --version)"
}
if ! (packages); then
    count 0 1
    finish
fi
if ! cmp -s tests/package-lock.json tests/node_modules/.locked; then
    if (cd tests && npm ci --no-audit --no-fund --loglevel=error >&2); then
        cp tests/package-lock.json tests/node_modules/.locked
    else
        say "FAILED: npm ci in tests/"
        count 0 1
    fi
fi

# --- build -----------------------------------------------------------------------------------------
build() { # PRESET EXTRA...
    preset=$1
    shift
    headline "build $preset"
    # shellcheck disable=SC2016 # expands in the inner shell
    one "build $preset" sh -c 'cmake --preset "$@" && cmake --build --preset "$1"' - "$preset" "$@"
}
build asan
[ "$quick" = 1 ] || build tsan

# --- unit tests ------------------------------------------------------------------------------------
# Counts single cmocka tests; a binary that dies without naming one counts as one failure.
unit() { # BUILD_DIR CTEST_ARGUMENTS...
    directory=$1
    shift
    [ -f "$directory/CTestTestfile.cmake" ] || { say "FAILED: $directory has no tests"; count 0 1; return; }
    ctest --test-dir "$directory" -V -j 2 "$@" >"$logs/unit" 2>&1
    awk '
        { id = $1; sub(/:$/, "", id) }
        $1 ~ /^[0-9]+:$/ && / PASSED  \] [0-9]+ test/ { for (i = 2; i <= NF; i++) if ($i == "]") { p[id] += $(i + 1); break } }
        $1 ~ /^[0-9]+:$/ && / FAILED  \] [0-9]+ test/ { for (i = 2; i <= NF; i++) if ($i == "]") { f[id] += $(i + 1); break } }
        $2 == "Test" && $3 ~ /^#[0-9]+:$/ {
            id = substr($3, 2, length($3) - 2)
            ran++
            if (/ Passed /) good += p[id] ? p[id] : 1
            else { good += p[id]; bad += f[id] ? f[id] : 1; broken[id] = 1 }
        }
        { line[NR] = $0; of[NR] = id }
        END {
            for (i = 1; i <= NR; i++)
                if (of[i] in broken && shown[of[i]]++ < 200) print line[i] > "/dev/stderr"
            if (!ran) { print "no unit test ran" > "/dev/stderr"; bad = 1 }
            print good + 0, bad + 0
        }' "$logs/unit" >"$logs/counts"
    read -r good bad <"$logs/counts"
    count "$good" "$bad"
}
headline "unit tests (ASan, UBSan)"
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
unit build-asan

# --- policies and the rest of the Lua --------------------------------------------------------------
headline "policy specs (busted)"
busted -o TAP >"$logs/busted" 2>&1
good=$(grep -c '^ok ' "$logs/busted")
bad=$(grep -c '^not ok ' "$logs/busted")
[ $((good + bad)) -gt 0 ] || bad=1
[ "$bad" = 0 ] || grep -v '^ok ' "$logs/busted" | tail -n 100 >&2
count "$good" "$bad"

headline "luacheck"
one luacheck luacheck --no-color -q lua policies examples tests/policy

headline "clang-format"
if command -v clang-format >/dev/null 2>&1 && clang-format --version | grep -q 'version 14'; then
    one clang-format find core tests examples -name node_modules -prune -o -name '*.[ch]' \
        -exec clang-format --dry-run -Werror {} +
else
    say "   skipped: clang-format 14 is not installed"
fi

# --- flow tests: the router, engines and real clients -----------------------------------------------
flow() { # LOG FILE...
    log=$logs/$1
    shift
    timeout -k 10 "$flow_seconds" node --test --test-reporter=tap "$@" >"$log" 2>&1
    status=$?
    good=$(sed -n 's/^# pass \([0-9]*\)$/\1/p' "$log")
    bad=$(awk '/^# (fail|cancelled) [0-9]+$/ { n += $3 } END { print n + 0 }' "$log")
    good=${good:-0}
    if [ "$status" -ne 0 ] && [ "$bad" = 0 ]; then
        bad=1
        [ "$status" != 124 ] || say "FAILED: flow tests did not end within $flow_seconds s"
    fi
    [ "$bad" = 0 ] || awk '/^ *not ok /{ show = 70 } show-- > 0' "$log" >&2
    count "$good" "$bad"
}
flow_seconds=480
[ "$PL_LONG" = 0 ] || flow_seconds=14400
headline "flow tests (ASan, UBSan)"
PERILUNE="$PWD/build-asan/perilune" flow flow tests/flow/*.test.mjs

# --- several loops under TSan -----------------------------------------------------------------------
if [ "$quick" = 0 ]; then
    export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=0:exitcode=66:second_deadlock_stack=1}"
    headline "unit tests of what threads share (TSan)"
    unit build-tsan -R 'mailbox|queue|fleet|engine|breaker|ledger|active_blocks|gauges|log|hist|shared|decide|vm|reload|metrics|memory|router|feed|index|approx|tokens_cache|sessions'
    headline "load over several loops (TSan)"
    PERILUNE="$PWD/build-tsan/perilune" flow flow-tsan tests/flow/load.test.mjs tests/flow/reload.test.mjs \
        tests/flow/ledger.test.mjs tests/flow/matrix.test.mjs tests/flow/session_soak.test.mjs
fi

# --- fuzzing, briefly ------------------------------------------------------------------------------
if [ "$quick" = 0 ]; then
    clang=
    for candidate in clang-14 clang-19 clang-18 clang; do
        if command -v "$candidate" >/dev/null 2>&1; then clang=$candidate; break; fi
    done
    if [ -n "$clang" ]; then
        build fuzz -DCMAKE_C_COMPILER="$clang"
        for target in build-fuzz/fuzz_*; do
            case "$target" in *.* | *'*') continue ;; esac
            name=${target##*/fuzz_}
            headline "fuzz $name, $fuzz_seconds s"
            mkdir -p "build-fuzz/found/$name" "tests/fuzz/corpus/$name"
            one "fuzz $name (inputs that fail are kept in build-fuzz/)" \
                "$target" -max_total_time="$fuzz_seconds" -rss_limit_mb=2048 -timeout=10 \
                -artifact_prefix="build-fuzz/$name-" "build-fuzz/found/$name" \
                "tests/fuzz/corpus/$name"
        done
    else
        say "FAILED: no clang, so no fuzzing (--quick leaves it out)"
        count 0 1
    fi
fi

finish
