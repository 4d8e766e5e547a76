#!/bin/sh
# Everything there is to check and to time on a GPU, in one run of at most 6 minutes. Needs a driver and a shell.
#
#     tests/gpu/check.sh OUT [BUNDLE]
#
# BUNDLE is what build.sh made (default: the folder of this script, or bundle in it). Results go to files under OUT; the
# table at the end is OUT/summary.txt. Exit status 0: every check passed. SMALL=1 makes the timed part tiny, for a
# virtual device.
set -u
out=${1:?a folder for the results}
here=$(cd "$(dirname "$0")" && pwd)
bundle=${2:-$here}
[ -x "$bundle/quern" ] || bundle=$here/bundle
[ -x "$bundle/quern" ] || {
    echo "$bundle: no programs there; make them with tests/gpu/build.sh" >&2
    exit 2
}
mkdir -p "$out"
out=$(cd "$out" && pwd)
summary=$out/summary.txt
: > "$summary"
failed=0
begin=$(date +%s)
small=${SMALL:+--small}

# check NAME SECONDS COMMAND...: its output to NAME.txt, its result to the summary.
check() {
    name=$1 limit=$2
    shift 2
    start=$(date +%s)
    # Six minutes for everything.
    left=$((350 - start + begin))
    [ "$left" -ge 1 ] || left=1
    [ "$left" -ge "$limit" ] || limit=$left
    timeout "$limit" "$@" > "$out/$name.txt" 2>&1
    status=$?
    seconds=$(($(date +%s) - start))
    case $status in
    0) result=passed ;;
    124) result="not done after $limit s" failed=1 ;;
    *) result="FAILED, status $status" failed=1 ;;
    esac
    tests=$(sed -n 's/^test result: .*\. \([0-9]* passed; [0-9]* failed\).*/, \1/p' "$out/$name.txt" | head -1)
    skipped=$(grep -c '^SKIPPED' "$out/$name.txt")
    [ "$skipped" = 0 ] || tests="$tests, $skipped skipped"
    printf '%-24s %s (%s s%s)\n' "$name" "$result" "$seconds" "$tests" >> "$summary"
}

command -v nvidia-smi > /dev/null && timeout 20 nvidia-smi -q > "$out/nvidia-smi.txt" 2>&1
check devices 20 "$bundle/quern" info --devices
grep -q '^cuda:0' "$out/devices.txt" || {
    cat "$out/devices.txt" >&2
    exit 1
}
# Kernels, executor and graphs on the device itself.
export QUERN_CUDA_DEVICE=1
check conformance 120 "$bundle/test-cuda" --show-output
# Instruction sets of this machine's processor.
for suite in linear attend ops exec; do
    check "cpu-$suite" 80 "$bundle/test-$suite" --show-output
done
ask() { timeout 40 "$bundle/quern" run "$bundle/two-layers.qrn" -p "The harbour was quiet" -n 32 --temperature 0 --json "$@"; }
same() {
    exact="--activations f32 --kv f32"
    cpu=$(ask --device cpu $exact | tr -d ' \n' | sed 's/.*"tokens":\(\[[^]]*\]\).*/\1/')
    gpu=$(ask --device cuda $exact | tr -d ' \n' | sed 's/.*"tokens":\(\[[^]]*\]\).*/\1/')
    echo "cpu  $cpu"
    echo "cuda $gpu"
    [ -n "$cpu" ] && [ "$cpu" = "$gpu" ]
}
start=$(date +%s)
if same > "$out/parity.txt" 2>&1; then result=passed; else result=FAILED failed=1; fi
printf '%-24s %s (%s s)\n' parity "$result" "$(($(date +%s) - start))" >> "$summary"

check kernels 90 "$bundle/cuda_bench" $small
if [ -z "$small" ]; then
    # Cold from the disk's cache to the first token, then prompts and generation.
    for shape in llama-1b llama-3b llama-8b; do
        check "bench-$shape" 75 "$bundle/quern" bench --synthetic "$shape" --group 128 --device cuda -p 512 -n 64 \
            -b 1,4,16,64 -r 3
    done
fi
{
    echo
    cat "$out/devices.txt"
    echo
    cat "$out/kernels.txt"
    cat "$out"/bench-*.txt 2> /dev/null
} >> "$summary"
cat "$summary"
exit $failed
