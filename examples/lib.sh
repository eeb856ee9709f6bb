# shellcheck shell=sh
# Shared by examples/quickstart.sh and tests/run.sh: installs the packages that are missing.
# POSIX sh; sourced, never run. Nothing here replaces or removes a package that is installed.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"
    elif command -v sudo >/dev/null 2>&1; then sudo "$@"
    else die "need root to run: $* (run it yourself, or install sudo)"
    fi
}

# debian-12, debian-13, ubuntu-24.04, fedora, alpine, other
distribution() {
    [ -r /etc/os-release ] || { echo other; return; }
    (
        . /etc/os-release
        case "${ID:-}" in
            debian) echo "debian-${VERSION_ID:-13}" ;;
            ubuntu) echo "ubuntu-${VERSION_ID:-24.04}" ;;
            fedora | alpine) echo "$ID" ;;
            *) echo other ;;
        esac
    )
}

# The package table. Verified: debian-12. The other rows are UNTESTED: names as their distributions
# publish them.
# packages_for SET DISTRIBUTION; sets: build, test, fuzz
packages_for() {
    case "$2:$1" in
        debian-12:build) echo "gcc libc6-dev make cmake ninja-build pkg-config libluajit-5.1-dev
            libuv1-dev node-llhttp libjansson-dev libxxhash-dev libssl-dev libhiredis-dev libzmq3-dev
            libmsgpack-dev curl" ;;
        debian-12:test) echo "luajit lua-busted lua-check libcmocka-dev redis-server" ;;
        debian-12:fuzz) echo "clang-14 libclang-rt-14-dev" ;;

        # untested
        debian-*:build | ubuntu-*:build) echo "gcc libc6-dev make cmake ninja-build pkg-config
            libluajit-5.1-dev libuv1-dev libllhttp-dev libjansson-dev libxxhash-dev libssl-dev
            libhiredis-dev libzmq3-dev libmsgpack-c-dev curl" ;;
        debian-*:test | ubuntu-*:test) echo "luajit lua-busted lua-check libcmocka-dev redis-server" ;;
        debian-*:fuzz) echo "clang-19 libclang-rt-19-dev" ;;
        ubuntu-*:fuzz) echo "clang-18 libclang-rt-18-dev" ;;

        # untested
        fedora:build) echo "gcc make cmake ninja-build pkgconf luajit-devel libuv-devel
            llhttp-devel jansson-devel xxhash-devel openssl-devel hiredis-devel zeromq-devel
            msgpack-c-devel curl" ;;
        fedora:test) echo "luajit lua-busted luacheck libcmocka-devel valkey libasan libubsan libtsan" ;;
        fedora:fuzz) echo "clang compiler-rt" ;;

        # untested
        alpine:build) echo "build-base cmake samurai pkgconf luajit-dev libuv-dev llhttp-dev
            jansson-dev xxhash-dev openssl-dev hiredis-dev zeromq-dev msgpack-c-dev curl" ;;
        alpine:test) echo "luajit lua5.1-busted luacheck cmocka-dev redis" ;;
        alpine:fuzz) echo "clang compiler-rt" ;;
    esac
}

is_installed() {
    case "$1" in
        debian-* | ubuntu-*)
            [ "$(dpkg-query -W -f '${db:Status-Status}' "$2" 2>/dev/null)" = installed ] ;;
        fedora) rpm -q "$2" >/dev/null 2>&1 ;;
        alpine) apk info -e "$2" >/dev/null 2>&1 ;;
    esac
}

# install_missing PACKAGE...: one transaction; refuses one that would remove something. With
# no_install=1 a missing package is an error that names it.
install_missing() {
    distro=$(distribution)
    missing=
    for package in "$@"; do
        is_installed "$distro" "$package" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    [ "${no_install:-0}" = 0 ] || die "these packages are missing:$missing"
    say "installing:$missing"
    # shellcheck disable=SC2086 # lists on purpose
    case "$distro" in
        debian-* | ubuntu-*)
            as_root apt-get update -qq >/dev/null || say "warning: apt-get update failed"
            removals=$(apt-get -s --no-install-recommends install $missing | grep '^Remv ') || :
            [ -z "$removals" ] || die "that would remove packages, so nothing was done: $removals"
            as_root env DEBIAN_FRONTEND=noninteractive \
                apt-get install -qq -y --no-install-recommends $missing >/dev/null ;;
        fedora) as_root dnf install -y --setopt=install_weak_deps=False $missing >&2 ;;
        alpine) as_root apk add $missing >&2 ;;
    esac || die "could not install:$missing"
}

# need SET...: installs what the sets lack. The set node is Node and npm, whoever made them: the
# distribution's packages only where the commands are absent.
need() {
    distro=$(distribution)
    list=
    for set_name in "$@"; do
        if [ "$set_name" = node ]; then
            command -v node >/dev/null 2>&1 || list="$list nodejs"
            command -v npm >/dev/null 2>&1 || list="$list npm"
            continue
        fi
        row=$(packages_for "$set_name" "$distro")
        [ -n "$row" ] || {
            say "warning: no package table for this distribution ($distro); taking it as it is"
            return 0
        }
        list="$list $row"
    done
    # shellcheck disable=SC2086
    install_missing $list
}
