#!/usr/bin/env python3
"""Trains a GPT-2-shaped model and a smaller one that writes ahead of it, with one tokenizer, on a CPU.

    models/train_gpt2.py TEXT OUT [--steps 600,600] [--threads 1] [--prompts 100]

This makes what `quern bench spec --draft` needs where no small model with the same tokens is at hand; see
tests/bench/gpt2.sh. TEXT is UTF-8, such as wiki.test.raw of WikiText-2 (1.3 MB). Its last fifth is kept back, from
a heading (` = Title = `) on where there is one, and is where the prompts are from: the first words of paragraphs. On
the rest are trained: a byte-level BPE of 2048 tokens (with `<|endoftext|>`, which begins and ends articles), the target
(4 layers of 256, 3.7 M weights) and the draft (1 layer of 128, .5 M), each with AdamW from random weights, batches of
4 windows of 128 tokens (the longest text they take), and a learning rate that falls as a cosine.

Needs torch, transformers and tokenizers. 600 steps read the text once; both together take less than ten minutes on one
core that has nothing else to do. That is enough for phrases, not for sense. Everything is seeded.

Written to OUT: `target` and `draft`, checkpoints that `quern convert` takes; `prompts.txt` for `quern bench spec
--prompts`; `losses.json`, the mean loss of both on the text kept back, and how many tokens each has seen.
"""

import argparse
import json
import math
import pathlib
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, WINDOW, BATCH = 2048, 128, 4
END = "<|endoftext|>"
SHAPES = {"target": (4, 256, 4), "draft": (1, 128, 2)}
RATE = 2e-3


def split(text):
    """The text's first four fifths and the rest, cut where an article begins."""
    lines = text.splitlines(keepends=True)
    size, at = 0, 0
    for at, line in enumerate(lines):
        size += len(line)
        if size > 0.8 * len(text) and line.startswith(" = ") and not line.startswith(" = = "):
            break
    else:
        at = len(lines) * 4 // 5
    return "".join(lines[:at]), "".join(lines[at:])


def articles(text):
    """Texts between headings of the first level."""
    article = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" = ") and not line.startswith(" = = ") and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)


def make_tokenizer(text):
    """A byte-level BPE, as GPT-2's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def ids(tokenizer, text):
    """All tokens of a text, articles one after another."""
    end = tokenizer.token_to_id(END)
    all_ids = [end]
    for article in articles(text):
        all_ids += tokenizer.encode(article).ids + [end]
    return torch.tensor(all_ids)


def loss_of(model, tokens):
    """Mean loss over windows one after another, at most 100."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)[:100]
    with torch.no_grad():
        return sum(model(w[None], labels=w[None]).loss.item() for w in windows) / len(windows)


def train(name, tokens, kept, steps, tokenizer, out):
    """Trains a model for so many steps and writes it."""
    torch.manual_seed(1)
    layers, width, heads = SHAPES[name]
    end = tokenizer.token_to_id(END)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=WINDOW, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    start = time.monotonic()
    for step in range(steps):
        warm = min(1, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        at = torch.randint(len(tokens) - WINDOW, (BATCH,))
        batch = torch.stack([tokens[i : i + WINDOW] for i in at])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"{name}: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    model.eval()
    folder = out / name
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "bos_token": END, "eos_token": END, "add_bos_token": True})
    )
    seconds = time.monotonic() - start
    result = {"loss": loss_of(model, kept), "tokens_seen": steps * BATCH * WINDOW, "seconds": round(seconds)}
    print(f"{name}: {result}", flush=True)
    return result


def prompts(text, count):
    """The first 25 words of paragraphs, evenly spread."""
    paragraphs = [line.split() for line in text.splitlines() if not line.startswith(" =")]
    long = [words for words in paragraphs if len(words) > 60]
    picked = [long[i * len(long) // count] for i in range(min(count, len(long)))]
    return [" ".join(words[:25]) for words in picked]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", default="600,600", help="of the target and of the draft")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=100)
    args = parser.parse_args()
    steps = dict(zip(SHAPES, map(int, args.steps.split(",")), strict=True))
    torch.set_num_threads(args.threads)
    text, rest = split(args.text.read_text(encoding="utf-8"))
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = prompts(rest, args.prompts)
    if len(chosen) < args.prompts:
        parser.error(f"{args.text}: {len(chosen)} paragraphs of more than 60 words kept back, {args.prompts} wanted")
    (args.out / "prompts.txt").write_text("".join(f"=== {i + 1}\n{prompt}\n" for i, prompt in enumerate(chosen)))
    tokenizer = make_tokenizer(text)
    tokens, kept = ids(tokenizer, text), ids(tokenizer, rest)
    print(f"{len(tokens)} tokens to train on, {len(kept)} kept back", flush=True)
    results = {name: train(name, tokens, kept, steps[name], tokenizer, args.out) for name in SHAPES}
    (args.out / "losses.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
