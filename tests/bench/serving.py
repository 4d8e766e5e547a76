#!/usr/bin/env python3
"""Serves one model with llama-server and with quern in turns, and compares what clients see.

    tests/bench/serving.py LLAMA_SERVER MODEL.gguf QUERN MODEL.qrn [--rounds N] [--tests clients,long,prefix]

Both get 2 threads (--threads), f16 keys and values and the same prompts, from `quern bench serve`. Per round each server
is started fresh for each test, one at a time, A B A B. Medians of the rounds, and their ratios, are printed.

clients  8 closed-loop clients, 128 tokens in, 128 out: tokens a second, gaps, resident memory afterwards
long     4 clients decode, a prompt of 2,500 tokens arrives: its time to first token, the others' longest gap
prefix   32 clients at once that share 1,000 tokens and have 30 of their own: time to first token
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

TESTS = {
    "clients": ["-c", "8", "-n", "24", "-i", "128", "-g", "128"],
    "long": ["-c", "4", "-n", "12", "-i", "64", "-g", "192", "--intrude", "2500", "--intrude-after", "1"],
    "prefix": ["-c", "32", "-n", "32", "-i", "30", "-g", "16", "--shared-prefix", "1000"],
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def resident(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmRSS"))


def measure(command, quern, test, seed):
    port = free_port()
    server = subprocess.Popen(command + ["--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as r:
                    if r.status == 200:
                        break
            except OSError:
                time.sleep(0.1)
        else:
            sys.exit(f"{command[0]} did not start within 30 s")
        bench = [quern, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "-o", "json", "--seed", str(seed)]
        # A few tokens first: pages are touched, threads are awake.
        subprocess.run(bench + ["-c", "1", "-n", "1", "-i", "16", "-g", "8"], check=True, stdout=subprocess.DEVNULL)
        got = json.loads(subprocess.run(bench + TESTS[test], check=True, stdout=subprocess.PIPE).stdout)
        got["resident_mib"] = resident(server.pid)
        if got["failed"]:
            sys.exit(f"{command[0]}: {got['errors']}")
        return got
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def figures(test, got):
    if test == "clients":
        return {
            "tokens/s": got["generated_per_second"],
            "gap p50 ms": got["itl_ms"]["p50"],
            "gap p99 ms": got["itl_ms"]["p99"],
            "first token mean ms": got["ttft_ms"]["mean"],
            "resident MiB": got["resident_mib"],
        }
    if test == "long":
        return {
            "its first token ms": got["intruder"]["ttft_ms"],
            "others' longest gap ms": got["intruder"]["longest_gap_ms"],
            "tokens/s": got["generated_per_second"],
            "resident MiB": got["resident_mib"],
        }
    return {
        "first token mean ms": got["ttft_ms"]["mean"],
        "first token max ms": got["ttft_ms"]["max"],
        "resident MiB": got["resident_mib"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_server")
    parser.add_argument("gguf")
    parser.add_argument("quern")
    parser.add_argument("qrn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--tests", default="clients,long,prefix")
    args = parser.parse_args()
    threads = ["-t", args.threads]
    servers = {
        "llama-server": [args.llama_server, "-m", args.gguf, "-np", "8", "-c", "32768", *threads],
        "quern": [args.quern, "serve", args.qrn, *threads],
    }
    print(f"{args.rounds} rounds, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    print("| test | figure | llama-server | quern | quern / llama-server |")
    print("|---|---|---|---|---|")
    for test in args.tests.split(","):
        got = {name: [] for name in servers}
        for round_number in range(args.rounds):
            for name, command in servers.items():
                got[name].append(figures(test, measure(command, args.quern, test, round_number + 1)))
        for figure in got["quern"][0]:
            a, b = (statistics.median(g[figure] for g in got[name]) for name in servers)
            print(f"| {test} | {figure} | {a:.1f} | {b:.1f} | {b / a:.2f} |", flush=True)


if __name__ == "__main__":
    main()
