#!/bin/sh
# Side by side with llama.cpp on the same integers, interleaved, medians and ratios.
#   tests/bench/llama-cpp.sh LLAMA_BENCH MODEL.gguf QUERN MODEL.qrn [ROUNDS] [THREADS]
# MODEL.qrn is `quern convert MODEL.gguf`. Both use f16 KV. A round runs llama-bench, then quern bench.
set -eu
peer=$1 gguf=$2 quern=$3 qrn=$4 rounds=${5:-5} threads=${6:-2}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
i=0
while [ "$i" -lt "$rounds" ]; do
    "$peer" -m "$gguf" -t "$threads" -p 512 -n 128 -r 1 -o json 2>/dev/null |
        python3 -c 'import json,sys
for r in json.load(sys.stdin): print("peer", "pp512" if r["n_prompt"] else "tg128", r["avg_ts"])' >> "$log"
    "$quern" bench "$qrn" -t "$threads" -p 512 -n 128 -r 1 -o json |
        python3 -c 'import json,sys
for r in json.load(sys.stdin): print("quern", r["test"], r["tokens_per_second"])' >> "$log"
    i=$((i + 1))
done
python3 - "$log" "$threads" <<'PY'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    who, test, speed = line.split()
    rows.setdefault(test, {}).setdefault(who, []).append(float(speed))
print(f"| test, {sys.argv[2]} threads | llama.cpp | quern | ratio of medians | ratios of the rounds |")
print("|:--|--:|--:|--:|:--|")
for test, r in rows.items():
    a, b = statistics.median(r["peer"]), statistics.median(r["quern"])
    each = " ".join(f"{q / p:.2f}" for p, q in zip(r["peer"], r["quern"]))
    print(f"| {test} | {a:.1f} | {b:.1f} | {b / a:.2f} | {each} |")
PY
