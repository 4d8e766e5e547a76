#!/bin/sh
# Makes a Python with the official OpenAI client in FOLDER, for the test that drives the server with it.
# usage: openai.sh FOLDER
set -eu
[ -f "$1/done" ] && exit 0
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check openai==3.57.0
touch "$1/done"
