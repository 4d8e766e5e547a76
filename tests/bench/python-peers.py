#!/usr/bin/env python3
"""Side by side with ik_llama.cpp and mistral.rs, as their Python packages bring them: interleaved, medians and ratios.

    pip install ik-llama-cpp-python mistralrs
    tests/bench/python-peers.py MODEL.gguf QUERN MODEL.qrn [--threads 2] [--rounds 5] [--peers ik,mistralrs]

Prompts of 512 tokens and generations of 128, greedy. ik_llama.cpp takes token ids, and its time is taken from outside:
a prompt with one token, and 129 tokens less one after a prompt of one. mistral.rs reports its own speeds, of a text of
about 512 tokens; it takes every core, and its chat model's end of text is not ignored, so fewer than 128 tokens may be
generated. Each measurement is a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def ik(model, threads):
    from ik_llama_cpp import IkLlama

    llama = IkLlama(model, n_ctx=1024, n_threads=threads, verbose=False)
    prompt = [100 + i * 7 % 20000 for i in range(512)]
    llama.generate(prompt[:32], max_tokens=2)

    def seconds(tokens, count):
        begin = time.perf_counter()
        made = llama.generate(tokens, max_tokens=count)
        return time.perf_counter() - begin, len(made)

    long, _ = seconds(prompt, 1)
    one, _ = seconds([504], 1)
    many, made = seconds([504], 129)
    return 512 / long, (made - 1) / (many - one) if made > 1 else float("nan")


def mistralrs(model, _):
    from mistralrs import CompletionRequest, Runner, Which

    folder, name = os.path.split(os.path.abspath(model))
    runner = Runner(which=Which.GGUF(quantized_model_id=folder, quantized_filename=name))
    words = "the river runs past old stones and quiet fields while morning light falls over distant hills "
    prompt = CompletionRequest(model="default", prompt=words * 30, max_tokens=1, temperature=0.0)
    answer = CompletionRequest(model="default", prompt="Once upon a time", max_tokens=128, temperature=0.0)
    runner.send_completion_request(answer)
    first = runner.send_completion_request(prompt).usage.avg_prompt_tok_per_sec
    return first, runner.send_completion_request(answer).usage.avg_compl_tok_per_sec


PEERS = {"ik": ik, "mistralrs": mistralrs}


def own(args):
    done = subprocess.run([args.quern, "bench", args.qrn, "-t", str(args.threads), "-p", "512", "-n", "128", "-r", "1",
                           "-o", "json"], capture_output=True, text=True, check=True)
    return [row["tokens_per_second"] for row in json.loads(done.stdout)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gguf", "quern", "qrn"):
        parser.add_argument(name)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="ik,mistralrs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("speeds", json.dumps(PEERS[args.one](args.gguf, args.threads)))
        return
    for name in args.peers.split(","):
        rounds = []
        for _ in range(args.rounds):
            done = subprocess.run([sys.executable, *sys.argv, "--one", name], capture_output=True, text=True)
            line = next((x for x in done.stdout.splitlines() if x.startswith("speeds ")), None)
            if line is None:
                sys.exit(f"{name}: no speeds\n{done.stderr[-2000:]}")
            rounds.append((json.loads(line[7:]), own(args)))
        print(f"| test, {args.threads} threads | {name} | quern | median ratio | ratios of the rounds |")
        print("|:--|--:|--:|--:|:--|")
        for i, test in enumerate(("pp512", "tg128")):
            ratios = [mine[i] / peer[i] for peer, mine in rounds]
            sides = [f"{statistics.median(r[s][i] for r in rounds):.1f}" for s in (0, 1)]
            each = " ".join(f"{r:.2f}" for r in ratios)
            print(f"| {test} | {sides[0]} | {sides[1]} | {statistics.median(ratios):.2f} | {each} |")
        print()


main()
