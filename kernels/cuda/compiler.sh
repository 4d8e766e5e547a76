#!/bin/sh
# Makes a Python in FOLDER with the CUDA compiler and assembler that kernels/ptx is made with, and prints where the
# two lie. usage: compiler.sh FOLDER
set -eu
if [ ! -f "$1/done" ]; then
    python3 -m venv "$1" >&2
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        nvidia-cuda-nvrtc==13.5.37 nvidia-cuda-nvcc==13.5.37 >&2
    touch "$1/done"
fi
find "$1" -name libnvrtc.so.13
find "$1" -name ptxas -type f
