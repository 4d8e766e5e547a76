#!/bin/sh
# Runs every test of the workspace and counts those that were skipped and why.
# Real checkpoints: QUERN_SMOLLM2_GGUF=FILE (models/fetch.sh gets it), QUERN_SHARED=FOLDER.
# Real vocabularies: QUERN_TOKENIZER_CASES=FOLDER (tests/tokenizers/cases.sh makes it).
# The official OpenAI client: QUERN_OPENAI_PYTHON=PROGRAM (tests/serve/openai.sh makes it).
# Kernels for 64-bit Arm, emulated (tests/aarch64.sh), with QUERN_AARCH64=1: minutes the first time.
set -eu
cd "$(dirname "$0")/.."
cached=models/cache/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -z "${QUERN_SMOLLM2_GGUF:-}" ] && [ -f "$cached" ]; then
    QUERN_SMOLLM2_GGUF="$PWD/$cached"
    export QUERN_SMOLLM2_GGUF
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# Skipped tests print a line; --show-output lets it through.
{ cargo test --workspace --no-fail-fast -- --show-output 2>&1 || echo "TESTS FAILED"; } | tee "$log" | grep -v "^$" || true
arm_skipped=0
if [ -n "${QUERN_AARCH64:-}" ]; then
    { sh tests/aarch64.sh 2>&1 || echo "TESTS FAILED"; } | tee -a "$log"
    arm_skipped=$(grep -c "^SKIPPED kernels for aarch64" "$log" || true)
fi
grep -q "^TESTS FAILED" "$log" && status=1
passed=$(grep -E "^test result:" "$log" | sed -E 's/.* ([0-9]+) passed.*/\1/' | awk '{s+=$1} END {print s+0}')
failed=$(grep -E "^test result:" "$log" | sed -E 's/.* ([0-9]+) failed.*/\1/' | awk '{s+=$1} END {print s+0}')
skipped=$(grep -cE "^SKIPPED " "$log" || true)
echo
grep -E "^SKIPPED " "$log" || true
# A skipped test counts as passed for cargo; here it does not. (Cargo did not run those for Arm.)
echo "$((passed - skipped + arm_skipped)) passed, $failed failed, $skipped skipped"
exit $status
