#!/usr/bin/env python3
"""Side by side with llama.cpp on the same integers: interleaved runs, medians and ratios.

    tests/bench/llama-cpp.py FOLDER MODEL.gguf QUERN MODEL.qrn [--threads 2,1] [--rounds 5] [--tests pp512,tg128,...]

FOLDER holds llama.cpp's binaries (llama-bench, llama-batched-bench, and for `start` llama-simple, which is
examples/simple, with the number of threads set in its source);
MODEL.qrn is `quern convert MODEL.gguf`. Both sides use f16 keys and values, and llama.cpp its defaults (mmap, repacked
weights). A round runs every test once on each side, one after the other, and who begins alternates.

Tests: ppN a prompt of N tokens; tgN N tokens generated; tgN@D the same with D tokens in the cache (flash attention on);
tgNxB B sequences at once (tokens of all); start: wall time from the start of a process to its first token, and its
peak memory, with the file in the page cache.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time


def run(command):
    """Standard output of a command; exits if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def peer_speed(args, test, threads):
    """Tokens per second of llama.cpp."""
    kind, tokens, depth, batch = test
    if batch > 1:
        out = run([f"{args.folder}/llama-batched-bench", "-m", args.gguf, "-t", threads, "-npp", "16", "-ntg", tokens,
                   "-npl", str(batch), "-c", str(batch * (16 + int(tokens)) + 64), "--output-format", "jsonl"])
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return next(row["speed_tg"] for row in rows if row["pl"] == batch)
    flags = ["-p", tokens, "-n", "0"] if kind == "pp" else ["-p", "0", "-n", tokens]
    flags += ["-d", depth, "-fa", "1"] if depth != "0" else []
    out = run([f"{args.folder}/llama-bench", "-m", args.gguf, "-t", threads, "-r", "1", "-o", "json", *flags])
    return json.loads(out)[0]["avg_ts"]


def own_speed(args, test, threads):
    """Tokens per second of quern."""
    kind, tokens, depth, batch = test
    flags = ["-p", tokens, "-n", "0"] if kind == "pp" else ["-p", "0", "-n", tokens]
    depth = "16" if batch > 1 else depth
    out = run([args.quern, "bench", args.qrn, "-t", threads, "-r", "1", "-o", "json", "-d", depth, "-b", str(batch), *flags])
    return json.loads(out)[0]["tokens_per_second"]


def start(command):
    """Seconds and peak bytes of one process that answers with one token."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status != 0:
        sys.exit(f"{' '.join(command)}: wait status {status}")
    return seconds, usage.ru_maxrss * 1024


def starts(args, threads):
    """Commands of both sides that print one token."""
    peer = f"{args.folder}/llama-simple"
    if not os.path.exists(peer):
        sys.exit(f"start: {peer} is not there (llama.cpp's examples/simple; llama-cli sleeps at its end)")
    prompt = "The capital of France is"
    return (
        [peer, "-m", args.gguf, "-ngl", "0", "-n", "1", prompt],
        [args.quern, "run", args.qrn, "-t", threads, "--raw", "-n", "1", "--temperature", "0", "--ctx", "512", "-p", prompt],
    )


def parse(name):
    """(kind, tokens, depth, batch) of a test's name."""
    found = re.fullmatch(r"(pp|tg)(\d+)(?:@(\d+))?(?:x(\d+))?", name)
    if not found:
        sys.exit(f"test {name!r}: expected ppN, tgN, tgN@D, tgNxB or start")
    return found[1], found[2], found[3] or "0", int(found[4] or 1)


def line(name, peer, own, per_round):
    ratios = " ".join(f"{r:.2f}" for r in per_round)
    return f"| {name} | {peer} | {own} | {statistics.median(per_round):.2f} | {ratios} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "gguf", "quern", "qrn"):
        parser.add_argument(name)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tests", default="pp512,tg128,tg64@4096,tg32x4,tg32x8,tg32x16,start")
    args = parser.parse_args()
    tests = args.tests.split(",")
    for name in tests:
        if name != "start":
            parse(name)
    for threads in args.threads.split(","):
        results = {}
        for i in range(args.rounds):
            for name in tests:
                if name == "start":
                    peer, own = starts(args, threads)
                    measure = (lambda: start(peer), lambda: start(own))
                else:
                    test = parse(name)
                    measure = (lambda: peer_speed(args, test, threads), lambda: own_speed(args, test, threads))
                pair = [None, None]
                for side in (0, 1) if i % 2 == 0 else (1, 0):
                    pair[side] = measure[side]()
                results.setdefault(name, []).append(pair)
        print(f"| test, {threads} thread{'s' if threads != '1' else ''} | llama.cpp | quern | median ratio | ratios of the rounds |")
        print("|:--|--:|--:|--:|:--|")
        for name, pairs in results.items():
            if name == "start":
                for what, which, unit in (("start, ms", 0, 1e3), ("start, peak MB", 1, 1e-6)):
                    peer, own = ([pair[side][which] * unit for pair in pairs] for side in (0, 1))
                    sides = [f"{statistics.median(x):.0f}" for x in (peer, own)]
                    print(line(what, *sides, [b / a for a, b in zip(peer, own)]))
                continue
            peer, own = zip(*pairs)
            sides = [f"{statistics.median(x):.1f}" for x in (peer, own)]
            print(line(name, *sides, [b / a for a, b in zip(peer, own)]))
        print()


main()
