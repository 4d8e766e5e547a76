#!/bin/sh
# Makes tests/gpu/bundle: what check.sh needs on a machine that has a GPU and nothing else. Programs for glibc 2.17,
# built with cargo-zigbuild (`pip install ziglang cargo-zigbuild`), and a small model.
#
#     tests/gpu/build.sh [FOLDER]
set -eu
cd "$(dirname "$0")/../.."
out=${1:-tests/gpu/bundle}
target=x86_64-unknown-linux-gnu.2.17
mkdir -p "$out"
log=$(mktemp) list=$(mktemp)
trap 'rm -f "$log" "$list"' EXIT

# Prints the executables that a build made, by name.
built() {
    cargo zigbuild --release --target $target --message-format=json "$@" > "$log"
    sed -n 's/.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p' "$log" > "$list"
}

built -p quern --bin quern
while read -r name path; do cp "$path" "$out/$name"; done < "$list"
built -p quern-kernels --example cuda_bench
while read -r name path; do cp "$path" "$out/$name"; done < "$list"
built -p quern-kernels --tests
while read -r name path; do
    case $name in
    cuda | linear | attend | ops | exec) cp "$path" "$out/test-$name" ;;
    esac
done < "$list"
for name in quern cuda_bench test-cuda test-linear test-attend test-ops test-exec; do
    [ -x "$out/$name" ] || {
        echo "$name was not built" >&2
        exit 1
    }
done
"${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release/quern" convert tests/fixtures/models/smollm2-gptq-2layer \
    --out "$out/two-layers.qrn" --force > /dev/null
strip "$out"/quern "$out"/cuda_bench "$out"/test-* 2> /dev/null || true
cp tests/gpu/check.sh "$out/"
du -sm "$out" | awk '{ print $1 " MB in " $2; if ($1 > 60) { print "more than 60 MB" > "/dev/stderr"; exit 1 } }'
