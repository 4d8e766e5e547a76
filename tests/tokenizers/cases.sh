#!/bin/sh
# Makes the cases of the test of real vocabularies in FOLDER: Mistral's SentencePiece models, which ship inside the
# Python package mistral-common, and 10,000 mixed lines with the ids that transformers and SentencePiece give.
# usage: cases.sh FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
[ -f "$out/done" ] && exit 0
mkdir -p "$out"
python3 -m venv "$out/venv"
"$out/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    transformers==5.24.0 tokenizers==0.23.3 sentencepiece==0.2.1 protobuf gguf==0.19.0 jinja2
"$out/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$out/wheel" mistral-common==1.8.5
cd "$out/wheel"
python3 -m zipfile -e ./*.whl .
cd "$here"
v1=$(find "$out/wheel" -name "tokenizer.model.v1" | head -1)
v3=$(find "$out/wheel" -name "mistral_instruct_tokenizer_240323.model.v3" | head -1)
mkdir -p "$out/cases"
"$out/venv/bin/python" make_cases.py large "$out/cases" mistral-v1="$v1" mistral-v3="$v3"
touch "$out/done"
