#!/usr/bin/env python3
"""Compiles kernels/cuda/*.cu to kernels/ptx/*.ptx, without a GPU and without the CUDA toolkit.

    kernels/cuda/ptx.py LIBNVRTC [--check] [NAME ...]

LIBNVRTC is lib/libnvrtc.so.13 of the Python package nvidia-cuda-nvrtc, version 13.5.37: the output names the compiler's
build, so another version gives other bytes. --check compiles and compares instead of writing. A file begins with a
hash of what it was made of, which a test of this package compares with the sources.

The compiler writes `.version 9.5`, which only its own generation of drivers takes. Nothing here needs more than 8.0
(the assembler checks that against the declared version), so 8.0 is declared: drivers from 525 on.
"""

import argparse
import ctypes
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parent / "ptx"
OPTIONS = ["--gpu-architecture=compute_80", "-std=c++17", f"-I{HERE}"]


def fnv1a(data, state=0xCBF29CE484222325):
    """FNV-1a, 64 bits."""
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def source_hash(source):
    """Of a source and the headers that it includes, those by name: names and bytes, each ended by a zero."""
    headers, new = set(), [source.name]
    while new:
        included = re.findall(r'^#include "(.*)"$', (HERE / new.pop()).read_text(), re.MULTILINE)
        new += set(included) - headers
        headers |= set(included)
    state = 0xCBF29CE484222325
    for path in [source, *(HERE / name for name in sorted(headers))]:
        state = fnv1a(path.name.encode() + b"\0" + path.read_bytes() + b"\0", state)
    return f"{state:016x}"


def compile_one(nvrtc, source):
    """PTX of one source; exits with the compiler's log if it does not compile."""
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None):
        sys.exit(f"{source.name}: the compiler takes no program")
    argv = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), argv)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if status:
        sys.exit(f"{source.name}: error {status} of the compiler")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    text = ptx.raw.rstrip(b"\0").decode()
    before, found, after = text.partition("\n.version 9.5\n")
    if not found:
        sys.exit(f"{source.name}: expected `.version 9.5` from the compiler, which is not the pinned one")
    # Comments around inline assembly, a tenth of the text.
    after = re.sub(r"\t// (begin|end) inline asm\n", "", after)
    # Hints about vector loads of which not every byte is used, for the assembler of PTX 8.3.
    after = re.sub(r'\t\.pragma "used_bytes_mask \d+";\n', "", after)
    return f"// fnv1a64 {source_hash(source)} of {source.name} and the headers\n{before}\n.version 8.0\n{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nvrtc", metavar="LIBNVRTC")
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help="sources without .cu; all if none is named")
    args = parser.parse_args()
    nvrtc = ctypes.CDLL(args.nvrtc)
    sources = [HERE / f"{name}.cu" for name in args.names] or sorted(HERE.glob("*.cu"))
    different = []
    for source in sources:
        ptx, path = compile_one(nvrtc, source), OUT / f"{source.stem}.ptx"
        if not args.check:
            path.write_text(ptx)
        elif not path.exists() or path.read_text() != ptx:
            different.append(path.name)
    if different:
        sys.exit(f"not what the sources give: {', '.join(different)}; run kernels/cuda/ptx.py and commit its output")


main()
