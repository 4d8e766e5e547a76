#!/usr/bin/env python3
"""What speculation gains, on prompts with and without repetition: the same server with it and without, in turns.

    tests/bench/spec.py QUERN MODEL.qrn [LLAMA_SERVER MODEL.gguf] [--speculate auto] [--peer FLAGS]... [--rounds 3]
                        [--groups json,edit,...] [--tokens 128] [--threads 2] [--out results.json]

The prompts are in tests/bench/spec/*.txt, one group per file; `repetition` is the groups summary, edit, quote and json
together. Answers are greedy but where a file's head says `# temperature T`; those have a seed. One client, one request
at a time. In a round, each prompt is put to each server in turn, and who begins alternates; every round starts the
servers afresh, so that no drafter has seen an answer to the same prompt. With LLAMA_SERVER, it takes its turns plain
and once for each --peer, with those flags; by default its n-gram mode as it comes (matches of 12 tokens, drafts of 48)
and with short matches and drafts.

Printed per group: medians over the prompts of tokens per second after the first token (`timings.predicted_per_second`;
of a prompt, the median of its rounds) without and with speculation, the median ratio and the range of ratios, and
accepted of drafted tokens. Answers shorter than 16 tokens are checked and not timed; how many end in a loop (a small
model's habit, and easy to guess) is said. The texts with and without speculation must be the same; if any of quern's is
not, the exit status is 1.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

FOLDER = pathlib.Path(__file__).parent / "spec"
REPETITION = ["summary", "edit", "quote", "json"]
GROUPS = [*REPETITION, "open", "random"]
SHORTEST = 16
PEER = [
    "--spec-type ngram-simple",
    "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8",
]


def prompts(group):
    """Names, temperature and text of a group's prompts."""
    head, *parts = ("\n" + (FOLDER / f"{group}.txt").read_text()).split("\n=== ")
    temperature = next((float(line.split()[2]) for line in head.splitlines() if line.startswith("# temperature ")), 0.0)
    return [(name, temperature, text.strip()) for name, text in (part.split("\n", 1) for part in parts)]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def server(command):
    """A running server's address."""
    port = free_port()
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            if process.poll() is not None:
                sys.exit(f"{shlex.join(command)}: exit status {process.returncode} before it could be asked")
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as reply:
                    if reply.status == 200:
                        break
            if time.monotonic() > deadline:
                sys.exit(f"{shlex.join(command)}: not ready within 60 s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url, text, temperature, seed, tokens):
    """The answer's text and its timings."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": seed,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            got = json.load(reply)
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: status {error.code}: {error.read()[:500].decode(errors='replace')}")
    return got["choices"][0]["message"]["content"] or "", got["timings"]


def measure(args, commands, todo):
    """Per prompt, server and round: text, tokens, speed and drafts."""
    results = {name: {side: [] for side in commands} for name, _, _ in todo}
    for round_number in range(args.rounds):
        with contextlib.ExitStack() as stack:
            urls = {side: stack.enter_context(server(command)) for side, command in commands.items()}
            for url in urls.values():
                # Pages are touched, threads are awake.
                ask(url, "Say hello.", 0.0, 1, 8)
            for index, (name, temperature, text) in enumerate(todo):
                sides = list(urls)
                for side in sides if (round_number + index) % 2 == 0 else reversed(sides):
                    answer, timings = ask(urls[side], text, temperature, 1000 * round_number + index, args.tokens)
                    results[name][side].append({
                        "text": answer,
                        "tokens": timings["predicted_n"],
                        "tokens_per_second": timings["predicted_per_second"],
                        "drafted": timings.get("draft_n", 0),
                        "accepted": timings.get("draft_n_accepted", 0),
                    })
        print(f"round {round_number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return results


def loops(text):
    """Whether the last 100 characters repeat one of up to 25."""
    tail = text[-100:]
    return len(tail) == 100 and any(tail[period:] == tail[:-period] for period in range(1, 26))


def row(label, names, results, off, on):
    """A line of the table: one group, two servers."""
    speeds, drafted, accepted, tokens, short, looping, other = [], 0, 0, [], 0, 0, []
    for name in names:
        rounds = list(zip(results[name][off], results[name][on]))
        drafted += sum(b["drafted"] for _, b in rounds)
        accepted += sum(b["accepted"] for _, b in rounds)
        tokens += [b["tokens"] for _, b in rounds]
        looping += any(loops(a["text"]) for a, _ in rounds)
        if any(a["text"] != b["text"] for a, b in rounds):
            other.append(name)
        timed = [(a, b) for a, b in rounds if min(a["tokens"], b["tokens"]) >= SHORTEST]
        if timed:
            speeds.append([statistics.median(side["tokens_per_second"] for side in sides) for sides in zip(*timed)])
        else:
            short += 1
    cells = [label, on, str(len(names)), f"{statistics.median(tokens):.0f}"]
    if speeds:
        ratios = [b / a for a, b in speeds]
        cells += [f"{statistics.median(side):.1f}" for side in zip(*speeds)]
        cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    else:
        cells += ["", "", "", ""]
    cells.append(f"{accepted} of {drafted}" + (f" ({100 * accepted / drafted:.0f} %)" if drafted else ""))
    notes = [f"{len(other)} differ" if other else "same"]
    notes += [f"{count} {what}" for count, what in [(short, "short"), (looping, "loop")] if count]
    cells.append(", ".join(notes))
    print("| " + " | ".join(cells) + " |", flush=True)
    return other


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quern")
    parser.add_argument("qrn")
    parser.add_argument("peer", nargs="*", metavar="LLAMA_SERVER MODEL.gguf")
    parser.add_argument("--speculate", default="auto", help="the method; `off` compares the server with itself")
    parser.add_argument("--peer", dest="peer_flags", action="append", metavar="FLAGS", help="repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--out", help="file for every answer and its figures")
    args = parser.parse_args()
    # The servers end with us, however we are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    groups = args.groups.split(",")
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"unknown group {unknown[0]}, expected some of {','.join(GROUPS)}")
    if len(args.peer) not in (0, 2):
        parser.error("the peer is two arguments: LLAMA_SERVER MODEL.gguf")
    if args.rounds < 1:
        parser.error("at least one round")
    serve = [args.quern, "serve", args.qrn, "-t", args.threads, "--speculate"]
    own = f"quern {args.speculate}"
    commands = {"quern": [*serve, "off"], own: [*serve, args.speculate]}
    pairs = [("quern", own)]
    if args.peer:
        plain = [args.peer[0], "-m", args.peer[1], "-np", "1", "-c", "4096", "-t", args.threads]
        commands["llama-server"] = plain
        for flags in args.peer_flags or PEER:
            commands[f"llama-server {flags}"] = plain + shlex.split(flags)
            pairs.append(("llama-server", f"llama-server {flags}"))
    of = {group: prompts(group) for group in groups}
    results = measure(args, commands, [prompt for group in groups for prompt in of[group]])
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(results, indent=1))

    print(f"{args.rounds} rounds, {args.threads} threads, {args.tokens} tokens\n")
    print("| group | server | prompts | tokens | off tokens/s | on tokens/s | ratio | range | accepted | texts |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = {group: [name for name, _, _ in of[group]] for group in groups}
    if len(together := [group for group in REPETITION if group in groups]) > 1:
        names = [name for group in together for name in rows[group]]
        straight = [name for name in names if not any(loops(got["text"]) for got in results[name]["quern"])]
        rows = {"repetition": names, "- without loops": straight, **rows}
    different = set()
    for label, names in ((label, names) for label, names in rows.items() if names):
        for off, on in pairs:
            other = row(label, names, results, off, on)
            if on == own:
                different.update(other)
    if different:
        sys.exit(f"quern answers differently with --speculate {args.speculate}: {', '.join(sorted(different))}")


if __name__ == "__main__":
    main()
