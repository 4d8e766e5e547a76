#!/usr/bin/env python3
"""Assembles kernels/ptx/*.ptx for every GPU that is meant, and writes what each kernel takes to kernels/ptx/resources.txt.

    kernels/cuda/resources.py PTXAS [--check]

PTXAS is bin/ptxas of the Python package nvidia-cuda-nvcc, version 13.5.37. --check compares instead of writing. A kernel
that spills registers to memory is a failure in either case, as is PTX that the assembler refuses.
"""

import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys

PTX = pathlib.Path(__file__).resolve().parent.parent / "ptx"
TABLE = PTX / "resources.txt"
TARGETS = [80, 86, 87, 89, 90, 100, 120]
KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def assemble(job):
    """Rows (kernel, target, registers, spilled bytes, stack bytes, static shared bytes) of a module for a target."""
    ptxas, module, target = job
    command = [ptxas, f"-arch=sm_{target}", "-v", str(module), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"{module.name} for sm_{target}: ptxas refuses it\n{text}")
    rows = []
    for name, arch, stack, stores, loads, registers, rest in KERNEL.findall(text):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stores) + int(loads)
        rows.append((name, int(arch), int(registers), spilled, int(stack), int(shared[1]) if shared else 0))
    entries = set(re.findall(r"\.entry (\w+)", module.read_text()))
    if entries != {row[0] for row in rows}:
        sys.exit(f"{module.name} for sm_{target}: expected a report on every kernel, got\n{text}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ptxas", metavar="PTXAS")
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    args = parser.parse_args()
    jobs = [(args.ptxas, module, target) for module in sorted(PTX.glob("*.ptx")) for target in TARGETS]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = sorted(row for rows in pool.map(assemble, jobs) for row in rows)
    spilling = [f"{name} on sm_{target}: {spilled} bytes" for name, target, _, spilled, _, _ in rows if spilled]
    if spilling:
        sys.exit("registers are spilled: " + "; ".join(spilling))
    header = "# Made by kernels/cuda/resources.py: kernel, target, registers, stack bytes, static shared bytes; no spills\n"
    text = header + "".join(f"{n} sm_{t} {regs} {stack} {shared}\n" for n, t, regs, _, stack, shared in rows)
    if not args.check:
        TABLE.write_text(text)
    elif TABLE.read_text() != text:
        old, new = set(TABLE.read_text().splitlines()), text.splitlines()
        changed = "\n".join(line for line in new if line not in old)
        sys.exit(f"{TABLE.name} is not what ptxas says; run kernels/cuda/resources.py and commit its output:\n{changed}")


main()
