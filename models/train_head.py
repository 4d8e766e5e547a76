#!/usr/bin/env python3
"""Trains an EAGLE-3 head for a small chat model, on a CPU, on text that the chat model itself generates.

    python3 -m pip install torch transformers safetensors
    quern convert SmolLM2-135M-Instruct.Q4_1.gguf -o model.qrn
    quern export model.qrn --to float --dtype f32 -o FOLDER
    models/train_head.py texts  WORK FOLDER --quern quern --model model.qrn --answers 3000
    models/train_head.py states WORK FOLDER
    models/train_head.py train  WORK FOLDER --minutes 60
    models/train_head.py eval   WORK FOLDER --prompts tests/bench/spec/open.txt --quern quern --model model.qrn

WORK is a folder that the script makes; each stage goes on from what it finds there, so it may be stopped at any time.

texts   lets the model write questions (it continues "<|im_start|>user" at temperature 0.9 after a few words, listed
        below) and answer them: three of four greedily, the others at temperature 0.7, up to 256 tokens. WORK/texts/.
states  puts the texts through the float model FOLDER (the weights that the .qrn file stands for) and keeps, for each
        token, the input of layers 2, L/2 and L-3 and the state after the final norm, as f16. WORK/states/.
train   learns. WORK/head/ is a head in the layout of SafeAILab/EAGLE, written every few minutes: config.json and
        model.safetensors. WORK/train.jsonl is the log.
eval    drafts chains for the target's own greedy answers and says how much of them would have been accepted.

Measured, of a core with AVX2 (80 GFLOPS in f32) to itself: 300 tokens of answers a second, 290 of states (prompts
count), about 450 rows learned: a million tokens of answers, passed over three times, is four hours. Of one with AMX and
with --bf16: 680 tokens of answers, 1300 of states, 650 to 840 rows. Published heads have seen tens of millions of
tokens.

The head (Li et al., EAGLE-3, arXiv 2503.01840): row p reads the embedding of token p+1 and, in its first pass, the
target's three states of position p, joined by `fc` to h = fc([low, middle, high]). Then one layer:

    x = [input_layernorm(embedding), hidden_norm(h)]        2*hidden numbers
    y = h + o_proj(attention(q_proj x, k_proj x, v_proj x))  RoPE at position p, causal over rows
    z = y + down_proj(silu(gate_proj n) * up_proj n)         n = post_attention_layernorm(y)
    logits = lm_head(norm(z))                                of token p+2; row i of lm_head is token i + d2t[i]

In later passes row p+1 reads the token just drafted, and z of row p in place of h: no fc, no norm between. "Input of
layer i" is the residual stream that layer i adds to, i counted from 0: what transformers calls hidden_states[i].
"""

import argparse
import json
import math
import pathlib
import random
import subprocess
import sys
import time

# How a conversation begins in the template of SmolLM2.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ASK = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
STARTS = """What;What is;What are;What is the difference between;What makes;What should;How do;How do I;How does;
How can I;How did;Why;Why is;Why do;Explain;Explain how;Explain why;Describe;Tell me about;Give me;Give me five;
Give me some advice on;Write;Write a short;Write a story about;Write an email to;Write a letter to;Write a poem about;
I want to;I have;I am;I need;My friend;Can you;Could you;Is it;Should I;Compare;List;Plan;Help me;Imagine;Suggest;When;
Who;Which;Do you think;In what way;Please explain;What happens when;I would like to learn;What do you think about;
Summarize what is known about;What are the advantages of""".replace("\n", "").split(";")
TOPICS = """volcanoes;bicycles;baking bread;the moon;chess;rivers;honey bees;trains;winter;libraries;whales;paper;
the Roman Empire;electricity;a vegetable garden;deserts;clocks;bridges;dreams;salt;the human heart;forests;computers;
rice;storms;glass;birds;money;mathematics;oceans;wool;football;maps;cheese;stars;mountains;dogs;photography;vaccines;
islands;steel;spiders;theatre;markets;tides;soap;airplanes;mushrooms;memory;castles;radio;gold;friendship;kitchens;
running;first aid;my landlord;the stock market;old age;a birthday party;public speaking;recycling;the French Revolution;
robots;dinosaurs;coral reefs;yoga;a used car;solar panels;time management;the immune system;evolution;novels;painting;
poverty;democracy;a new puppy;camping;weather forecasts;stress at work;a small business;homework;statistics;black holes;
nutrition;knitting;the Silk Road;earthquakes;cooking for guests;saving money;ethics""".replace("\n", "").split(";")
FORMS = """I have a question about {}.;I want to know more about {}.;Explain {};Write about {};
What is the best way to think about {};Let's talk about {}.;How has {};Tell me why {};Give me a list of ideas for {};
What should a beginner know about {};I am curious about {}.""".replace("\n", "").split(";")
CHUNK = 384  # questions of a file, of which some are dropped
MAX_TOKENS = 256


def run(args, rows, out, *flags):
    """Answers rows with quern; what is answered already stays."""
    asked = out.with_suffix(".asked")
    asked.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    command = [args.quern, "run", args.model, "--batch", asked, "--out", out, "-t", args.threads, "--speculate", "off"]
    subprocess.run([*map(str, command), *flags], check=True, stderr=subprocess.DEVNULL)
    asked.unlink()
    done = sorted((r for r in map(json.loads, out.open()) if "tokens" in r), key=lambda r: r["line"])
    return [(rows[r["line"] - 1], r) for r in done]


def texts(args):
    """Writes chunk after chunk of {"question", "tokens", "temperature"}."""
    folder = args.work / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    have = sum(len(path.read_text().splitlines()) for path in folder.glob("*.jsonl"))
    chunk = 0
    while have < args.answers:
        path, chunk = folder / f"{chunk:03}.jsonl", chunk + 1
        if path.exists():
            continue
        dice = random.Random(999 + chunk)
        starts = [
            dice.choice(STARTS) if dice.random() < 0.55 else dice.choice(FORMS).format(dice.choice(TOPICS))
            for _ in range(CHUNK)
        ]
        seed = ["--seed", str(chunk)]
        begun = run(args, [ASK + s for s in starts], path.with_suffix(".begun"), "--raw", "--temperature", "0.9",
                    "--max-tokens", "60", *seed)
        asked = sorted(
            (row[len(ASK):] + r["text"]).strip() for row, r in begun
            if r["finish_reason"] == "stop" and len(row) + len(r["text"]) - len(ASK) <= 400
        )
        done = []
        for temperature, rows in [("0", [q for i, q in enumerate(asked) if i % 4]), ("0.7", asked[::4])]:
            got = run(args, rows, path.with_suffix(f".{temperature}"), "--temperature", temperature,
                      "--max-tokens", str(MAX_TOKENS), *seed)
            done += [{"question": q, "tokens": r["tokens"], "temperature": float(temperature)} for q, r in got]
        path.write_text("".join(json.dumps(row) + "\n" for row in done))
        for end in [".begun", ".0", ".0.7"]:
            path.with_suffix(end).unlink()
        have += len(done)
        print(f"{path}: {len(done)} answers, {sum(len(r['tokens']) for r in done)} tokens; {have} in all", flush=True)


def aux_layers(config):
    return [2, config.num_hidden_layers // 2, config.num_hidden_layers - 3]


def load(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer, question):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def half(args):
    """Matrices are multiplied in bf16 inside of it, with --bf16."""
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16)


def states_of(model, batch):
    """The four states of each token of texts of about the same length: [tokens][4][hidden], f16, one per text."""
    import torch

    longest = max(map(len, batch))
    ids = torch.tensor([t + [0] * (longest - len(t)) for t in batch])
    with torch.no_grad():
        # No mask: what fills a text up stands behind it.
        hidden = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    kept = torch.stack([hidden[i] for i in [*aux_layers(model.config), -1]], 2).clamp(-65504, 65504).half()
    return [kept[i, : len(t)] for i, t in enumerate(batch)]


def states(args):
    """Writes, for each file of texts, a list of (tokens, length of the prompt, states)."""
    import torch

    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.folder)
    (args.work / "states").mkdir(exist_ok=True)
    while True:
        todo = [p for p in sorted((args.work / "texts").glob("*.jsonl"))
                if not (args.work / "states" / (p.stem + ".pt")).exists()]
        if not todo:
            if not args.follow:
                return
            time.sleep(10)
            continue
        for path in todo:
            start = time.time()
            rows = []
            for r in map(json.loads, path.open()):
                asked = prompt_ids(tokenizer, r["question"])
                rows.append((asked + r["tokens"], len(asked)))
            rows.sort(key=lambda row: len(row[0]))
            done, at = [], 0
            while at < len(rows):
                size = max(1, 1024 // len(rows[min(at + 4, len(rows) - 1)][0]))
                some = rows[at : at + size]
                at += size
                with half(args):
                    found = states_of(model, [t for t, _ in some])
                for (tokens, asked), kept in zip(some, found):
                    done.append((torch.tensor(tokens, dtype=torch.int32), asked, kept))
            out = args.work / "states" / (path.stem + ".pt")
            torch.save(done, out.with_suffix(".part"))
            out.with_suffix(".part").rename(out)
            count = sum(len(t) for t, _ in rows)
            print(f"{out}: {count} tokens, {count / (time.time() - start):.0f} a second", flush=True)


def rms_norm(x, weight, eps):
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x, positions, theta):
    """RoPE of [.., rows, heads, dim], halves as pairs, as in transformers' llama."""
    import torch

    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def earlier(x, rows):
    """Row p of [texts][width].. becomes what row p-rows was."""
    import torch

    return torch.cat([torch.zeros_like(x[:, :rows]), x[:, : x.shape[1] - rows]], 1)


def new_head(args, target, tokens):
    """The head's weights at the beginning, and its config. `tokens`: how often each token is in the answers."""
    import torch

    of, hidden = target.config, target.config.hidden_size
    heads = of.num_attention_heads
    dim = getattr(of, "head_dim", None) or hidden // heads
    theta = (getattr(of, "rope_parameters", None) or {}).get("rope_theta") or getattr(of, "rope_theta", 10000.0)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "target_hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": dim, "intermediate_size": args.inner, "hidden_act": "silu",
        "rms_norm_eps": of.rms_norm_eps, "rope_theta": theta, "max_position_embeddings": of.max_position_embeddings,
        "vocab_size": of.vocab_size, "draft_vocab_size": args.vocab, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": of.bos_token_id, "eos_token_id": of.eos_token_id,
        "eagle_aux_hidden_state_layer_ids": aux_layers(of), "norm_before_residual": False, "torch_dtype": "float16",
    }
    # The likeliest tokens; where two are as likely, the lower id.
    best = sorted(range(of.vocab_size), key=lambda t: (-tokens[t].item(), t))[: args.vocab]
    ids = torch.tensor(sorted(best))
    wide, inner = heads * dim, args.inner
    small = lambda *shape: torch.randn(*shape) / math.sqrt(shape[1])
    # Query and key begin alike and look at the token alone: a row sees most of itself.
    look = torch.cat([small(wide, hidden) * math.sqrt(7 / math.sqrt(dim)), torch.zeros(wide, hidden)], 1)
    see = torch.zeros(wide, 2 * hidden)
    see[:, :hidden] = torch.eye(wide, hidden)
    weights = {
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": look,
        "midlayer.self_attn.k_proj.weight": look.clone(),
        "midlayer.self_attn.v_proj.weight": see,
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, wide),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.mlp.gate_proj.weight": small(inner, hidden),
        "midlayer.mlp.up_proj.weight": small(inner, hidden),
        "midlayer.mlp.down_proj.weight": small(hidden, inner) * 0.1,
        "norm.weight": target.model.norm.weight.detach().clone(),
        "lm_head.weight": target.lm_head.weight.detach()[ids].clone(),
    }
    return weights, config, ids


class Head:
    """The head's arithmetic. `scale`: what the target's states are divided by before `fc`, which takes it up on disk."""

    def __init__(self, weights, config, ids, table, scale):
        import torch

        self.w = {name: w.float().requires_grad_() for name, w in weights.items()}
        self.config, self.ids, self.table, self.scale = config, ids, table, scale
        self.of_token = torch.full((config["vocab_size"],), -1)
        self.of_token[ids] = torch.arange(len(ids))

    def chain(self, tokens, aux, asked, lengths, steps, survivors=True):
        """Drafts from every row of texts at once, feeding the texts' own tokens: for each step, the rows computed
        (indices into texts*width), their logits. Step j of row p is what a chain gives as its j-th draft when its
        first pass ended at row p-j+1 and its drafts up to there were the text's tokens. tokens [texts][width],
        aux [texts][width][3*hidden], asked and lengths [texts]. With `survivors`, step j+1 has only the rows that
        a chain can reach: those whose token was the best guess of step j.
        """
        import torch

        w, c = self.w, self.config
        eps, heads, dim = c["rms_norm_eps"], c["num_attention_heads"], c["head_dim"]
        texts, width = tokens.shape
        hidden, rows = c["hidden_size"], texts * width
        positions = torch.arange(width)
        shifted = torch.cat([tokens[:, 1:], tokens[:, :1] * 0], 1)
        e = rms_norm(self.table[shifted], w["midlayer.input_layernorm.weight"], eps).reshape(rows, hidden)
        names = [f"midlayer.self_attn.{n}_proj.weight" for n in "qkv"]
        halves = torch.cat([w[n][:, :hidden] for n in names]), torch.cat([w[n][:, hidden:] for n in names])
        from_token = e @ halves[0].T
        h = (aux / self.scale).reshape(rows, -1) @ w["fc.weight"].T
        seen, results = [], []
        alive = None
        for step in range(steps):
            # Rows whose token p+1 and p+2 are of the answer.
            keep = (positions >= asked[:, None] - 1 + step) & (positions < lengths[:, None] - 2)
            if alive is not None:
                keep &= alive
            kept = keep.flatten().nonzero()[:, 0]
            if not len(kept):
                break
            n = rms_norm(h, w["midlayer.hidden_norm.weight"], eps)
            q, k, v = (from_token + n @ halves[1].T).view(texts, width, 3, heads, dim).unbind(2)
            q, k = rotate(q, positions, c["rope_theta"]), rotate(k, positions, c["rope_theta"])
            seen.append((k, v))
            # Keys: rows up to p-step of the first pass, then the chain's own rows.
            if step == 0:
                by_head = (x.transpose(1, 2) for x in (q, k, v))
                out = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)
            else:
                scores = torch.einsum("tphd,tkhd->thpk", q, seen[0][0])
                scores = scores.masked_fill(positions[None, :] > positions[:, None] - step, -1e30)
                own = [(q * earlier(seen[step - back][0], back)).sum(-1).transpose(1, 2) for back in range(step)]
                weight = (torch.cat([scores, torch.stack(own, -1)], -1) / math.sqrt(dim)).softmax(-1)
                out = torch.einsum("thpk,tkhd->tphd", weight[..., :width], seen[0][1])
                for back in range(step):
                    share = weight[..., width + back].transpose(1, 2)[..., None]
                    out = out + share * earlier(seen[step - back][1], back)
            y = h[kept] + out.reshape(rows, -1)[kept] @ w["midlayer.self_attn.o_proj.weight"].T
            m = rms_norm(y, w["midlayer.post_attention_layernorm.weight"], eps)
            gate, up = m @ w["midlayer.mlp.gate_proj.weight"].T, m @ w["midlayer.mlp.up_proj.weight"].T
            z = y + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
            logits = rms_norm(z, w["norm.weight"], eps) @ w["lm_head.weight"].T
            results.append((kept, logits))
            # What row p gave is what row p+1 reads.
            h = torch.zeros(rows, hidden).index_copy(0, kept, z.float()).view(texts, width, hidden)
            h = earlier(h, 1).reshape(rows, hidden)
            if survivors:
                right = torch.zeros(rows, dtype=torch.bool)
                right[kept] = self.ids[logits.detach().argmax(-1)] == tokens.flatten()[kept + 2]
                alive = earlier(right.view(texts, width), 1)
        return results

    def save(self, folder):
        """config.json and model.safetensors as SafeAILab has them."""
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach() for name, w in self.w.items()}
        weights["fc.weight"] = weights["fc.weight"] / self.scale
        weights = {name: w.half().contiguous() for name, w in weights.items()}
        weights["d2t"] = self.ids - torch.arange(len(self.ids))
        weights["t2d"] = self.of_token >= 0
        save_file(weights, folder / "model.part", metadata={"format": "pt"})
        (folder / "model.part").rename(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")


def load_head(folder, target):
    import torch
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    ids = weights.pop("d2t") + torch.arange(weights["lm_head.weight"].shape[0])
    weights.pop("t2d")
    config = json.loads((folder / "config.json").read_text())
    return Head(weights, config, ids, target.model.embed_tokens.weight.detach(), torch.ones(()))


def batch_of(some):
    """Texts side by side: tokens, states of f32, length of prompts, lengths."""
    import torch

    width = max(len(t) for t, _, _ in some)
    tokens = torch.zeros(len(some), width, dtype=torch.long)
    kept = torch.zeros(len(some), width, *some[0][2].shape[1:])
    for i, (t, _, s) in enumerate(some):
        tokens[i, : len(t)], kept[i, : len(t)] = t.long(), s.float()
    return tokens, kept, torch.tensor([a for _, a, _ in some]), torch.tensor([len(t) for t, _, _ in some])


def right_by_step(head, some, steps):
    """For each text, [steps][width]: whether step j of a chain guesses token p+2 at row p, with all before it right."""
    import torch

    tokens, kept, asked, lengths = batch_of(some)
    right = torch.zeros(steps, tokens.numel(), dtype=torch.bool)
    with torch.no_grad():
        found = head.chain(tokens, kept[:, :, :3].flatten(2), asked, lengths, steps)
        for step, (rows, logits) in enumerate(found):
            right[step, rows] = head.ids[logits.argmax(-1)] == tokens.flatten()[rows + 2]
    return right.view(steps, *tokens.shape).transpose(0, 1), asked, lengths


def walk(right, asked, length, steps):
    """Accepted drafts of each verification step of an answer whose first token is there."""
    last, accepted = asked, []
    while last < length - 1:
        count = 0
        # Draft j (from 0) of the chain behind token `last` is token last+1+j, guessed by row last-1+j in step j.
        while count < steps and last + 1 + count < length and right[count][last - 1 + count]:
            count += 1
        accepted.append(count)
        last += count + 1
    return accepted


def walks(head, some, longest):
    """For each text, for chains of 1..longest drafts, the accepted drafts of each step."""
    found = []
    for at in range(0, len(some), 8):
        right, asked, lengths = right_by_step(head, some[at : at + 8], longest)
        for which, begin, length in zip(right.tolist(), asked.tolist(), lengths.tolist()):
            found.append({k: walk(which, begin, length, k) for k in range(1, longest + 1)})
    return found


def acceptance(found):
    """Of greedy chains of each length: mean tokens of a verification step, share of drafts accepted by place."""
    result = {}
    for k in found[0]:
        counts = [c for of in found for c in of[k]]
        result[k] = {
            "steps": len(counts), "length": 1 + sum(counts) / max(len(counts), 1),
            "by_place": [sum(c > j for c in counts) / max(sum(c >= j for c in counts), 1) for j in range(k)],
        }
    return result


def orthogonal(m):
    """About U V' of the singular value decomposition of a matrix (Newton-Schulz, Muon's coefficients)."""
    turned = m.shape[0] > m.shape[1]
    x = m.T if turned else m
    x = x / (x.norm() + 1e-7)
    for _ in range(3):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if turned else x


class Optimizer:
    """Muon (Jordan et al. 2024) for the layer's matrices and `fc`, AdamW for norms and lm_head."""

    def __init__(self, weights, rate, head_rate):
        import torch

        self.matrices = {n: w for n, w in weights.items() if w.dim() == 2 and n != "lm_head.weight"}
        self.moved = {n: torch.zeros_like(w) for n, w in self.matrices.items()}
        others = [w for n, w in weights.items() if n not in self.matrices]
        self.adam = torch.optim.AdamW(others, lr=head_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.rate, self.head_rate, self.all = rate, head_rate, list(weights.values())

    def step(self, share):
        """One step at `share` of the full rates."""
        import torch

        with torch.no_grad():
            for name, w in self.matrices.items():
                moved = self.moved[name].mul_(0.95).add_(w.grad)
                # A matrix that joins several inputs is moved part by part: each has its own scale.
                parts = w.shape[1] // w.shape[0] if w.shape[1] % w.shape[0] == 0 else 1
                for of, part in zip((w.grad + 0.95 * moved).chunk(parts, 1), w.chunk(parts, 1)):
                    part.add_(orthogonal(of), alpha=-share * self.rate * max(1, of.shape[0] / of.shape[1]) ** 0.5)
        for group in self.adam.param_groups:
            group["lr"] = self.head_rate * share
        self.adam.step()
        for w in self.all:
            w.grad = None


def begin_linear(head, some, target):
    """Sets fc and o_proj so that h + o_proj(v of the own row) is the best linear guess of the target's next state."""
    import torch

    n, c = target.config.hidden_size, head.config
    square, product = torch.zeros(4 * n, 4 * n), torch.zeros(4 * n, n)
    weight = target.model.norm.weight.detach()
    for tokens, asked, kept in some:
        kept, rows = kept.float(), slice(asked - 1, len(tokens) - 1)
        e = rms_norm(head.table[tokens.long()[asked:]], None, c["rms_norm_eps"])
        x = torch.cat([kept[rows, :3].flatten(1) / head.scale, e], 1)
        square += x.T @ x
        product += x.T @ (kept[asked:, 3] / weight)
    square += torch.eye(4 * n) * square.diagonal().mean() * 0.02
    linear = torch.linalg.solve(square, product).T
    with torch.no_grad():
        head.w["fc.weight"].copy_(linear[:, : 3 * n])
        head.w["midlayer.self_attn.o_proj.weight"].zero_()[:, :n].copy_(linear[:, 3 * n :])


def train(args):
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    target, _ = load(args.folder)
    table = target.model.embed_tokens.weight.detach()
    del target.model.layers
    out, log = args.work / "head", (args.work / "train.jsonl").open("a")
    loaded, texts, held = set(), [], []

    def more():
        """Takes up files of states that are new."""
        for path in sorted((args.work / "states").glob("*.pt")):
            if path not in loaded:
                got = torch.load(path)
                if not loaded:
                    # Held out: the first texts; never learned from.
                    every = max(2, len(got) // 24)
                    held.extend(got[::every])
                    got = [t for i, t in enumerate(got) if i % every]
                texts.extend(t for t in got if len(t[0]) > t[1] + 3)
                loaded.add(path)

    more()
    begun = torch.load(args.work / "last.pt") if args.resume else None
    answers = torch.cat([t[a:].long() for t, a, _ in texts])
    counts = torch.bincount(answers, minlength=target.config.vocab_size)
    weights, config, ids = new_head(args, target, counts)
    seen = torch.isin(torch.cat([t[a:].long() for t, a, _ in held]), ids).float().mean().item()
    if begun:
        weights, ids, scale = begun["weights"], begun["ids"], begun["scale"]
    else:
        some = texts[:: max(1, len(texts) // 200)]
        scale = torch.cat([s[a:, :3].float().flatten(1) for _, a, s in some]).square().mean(0).sqrt()
    head = Head(weights, config, ids, table, scale)
    if not begun:
        begin_linear(head, texts[:: max(1, len(texts) // 400)], target)
    size = sum(w.numel() for w in weights.values())
    print(f"{size / 1e6:.2f} M weights, {len(texts)} texts, {len(answers)} tokens of answers; draft vocabulary has "
          f"{seen:.1%} of held-out tokens", flush=True)
    optimizer = Optimizer(head.w, args.rate, args.head_rate)
    step, rows_seen = 0, 0
    if begun:
        optimizer.moved, rows_seen = begun["moved"], begun["rows"]
        optimizer.adam.load_state_dict(begun["adam"])
    dice, start, waiting = random.Random(rows_seen), time.time(), []
    said = start
    sums = [[0.0, 0, 0] for _ in range(args.steps)]

    def keep():
        """Writes the head, and what --resume needs."""
        head.save(out)
        weights = {name: w.detach() for name, w in head.w.items()}
        torch.save({"weights": weights, "ids": ids, "scale": scale, "moved": optimizer.moved, "rows": rows_seen,
                    "adam": optimizer.adam.state_dict()}, args.work / "last.part")
        (args.work / "last.part").rename(args.work / "last.pt")

    def say(done):
        nonlocal sums
        at = acceptance(walks(head, held, 4))
        row = {
            "minutes": round((time.time() - start) / 60, 1), "step": step, "rows": rows_seen, "texts": len(texts),
            "loss": [round(l / max(n, 1), 3) for l, n, _ in sums],
            "right": [round(r / max(n, 1), 3) for _, n, r in sums],
            "held": {k: round(a["length"], 3) for k, a in at.items()},
            "places": [round(x, 3) for x in at[4]["by_place"]],
        }
        sums = [[0.0, 0, 0] for _ in range(args.steps)]
        print(f"{done:.0%}", json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    say(0)
    while (done := (time.time() - start) / (60 * args.minutes)) < 1:
        if not waiting:
            more()
            # Texts of about the same length together.
            order = dice.sample(texts, len(texts))
            pools = [sorted(order[i : i + 128], key=lambda t: len(t[0])) for i in range(0, len(order), 128)]
            waiting = [p[i : i + args.batch] for p in pools for i in range(0, len(p), args.batch)]
            dice.shuffle(waiting)
        tokens, kept, asked, lengths = batch_of(waiting.pop())
        with half(args):
            results = head.chain(tokens, kept[:, :, :3].flatten(2), asked, lengths, args.steps)
        # What the target says of token p+2 is in its state of p+1, one row further.
        first = results[0][0]
        with torch.no_grad(), half(args):
            chance = (kept[:, :, 3].flatten(0, 1)[first + 1] @ table[ids].T).float().softmax(-1)
            # A row whose token cannot be drafted teaches nothing.
            chance *= (head.of_token[tokens.flatten()[first + 2]] >= 0)[:, None]
        place = torch.zeros(tokens.numel(), dtype=torch.long).index_copy(0, first, torch.arange(len(first)))
        loss = 0.0
        for i, (rows, logits) in enumerate(results):
            want = chance[place[rows]]
            each = -(want * logits.float().log_softmax(-1)).sum(-1)
            loss = loss + each.sum()
            sums[i][0] += each.sum().item()
            sums[i][1] += len(rows)
            sums[i][2] += (ids[logits.argmax(-1)] == tokens.flatten()[rows + 2]).sum().item()
        (loss / len(first)).backward()
        share = min(1, (step + 1) / 10) * min(1, (1 - done) / 0.8)
        optimizer.step(share)
        step, rows_seen = step + 1, rows_seen + len(first)
        if time.time() - said > 60 * args.say:
            say(done)
            keep()
            said = time.time()
    keep()
    say(1)


def evaluate(args):
    import torch

    torch.set_num_threads(args.threads)
    target, tokenizer = load(args.folder)
    head = load_head(args.head or args.work / "head", target)
    lines = [l for l in ("\n" + pathlib.Path(args.prompts).read_text()).split("\n=== ")[1:]]
    questions = [l.split("\n", 1)[1].strip() for l in lines]
    if args.quern:
        path = args.work / "eval.jsonl"
        path.unlink(missing_ok=True)
        got = run(args, questions, path, "--temperature", "0", "--max-tokens", str(args.tokens))
        if len(got) < len(questions):
            sys.exit(f"{args.prompts}: {len(got)} of {len(questions)} prompts answered; see {path}")
        answers = [r["tokens"] for _, r in got]
    else:
        answers = []
        for q in questions:
            asked = torch.tensor([prompt_ids(tokenizer, q)])
            with torch.no_grad():
                whole = target.generate(asked, max_new_tokens=args.tokens, do_sample=False)
            answers.append(whole[0, asked.shape[1]:].tolist())
    some = []
    for q, answer in zip(questions, answers):
        asked = prompt_ids(tokenizer, q)
        some.append((torch.tensor(asked + answer), len(asked), states_of(target, [asked + answer])[0]))
    found = walks(head, some, args.longest)
    result = acceptance(found)
    for k, a in result.items():
        places = " ".join(f"{x:.3f}" for x in a["by_place"])
        print(f"K={k}: {a['length']:.3f} tokens a step over {a['steps']} steps; accepted by place: {places}")
    singles = [acceptance([of]) for of in found]
    names = [line.split("\n", 1)[0] for line in lines]
    report = {"prompts": args.prompts, "tokens": [len(a) for a in answers], "chains": result,
              "lengths": {name: {k: a["length"] for k, a in of.items()} for name, of in zip(names, singles)}}
    (args.work / "eval.json").write_text(json.dumps(report, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    by_name = {}
    for name, what in [("texts", texts), ("states", states), ("train", train), ("eval", evaluate)]:
        by_name[name] = stage = stages.add_parser(name)
        stage.set_defaults(run=what)
        stage.add_argument("work", type=pathlib.Path)
        stage.add_argument("folder", type=pathlib.Path, help="the float checkpoint of `quern export --to float`")
        stage.add_argument("--threads", type=int, default=1)
    for name in ["states", "train"]:
        by_name[name].add_argument("--bf16", action="store_true", help="multiply matrices in bf16 (CPUs with AMX)")
    for name in ["texts", "eval"]:
        by_name[name].add_argument("--quern", required=name == "texts", help="the program")
        by_name[name].add_argument("--model", required=name == "texts", help="the .qrn file")
    by_name["texts"].add_argument("--answers", type=int, default=3000)
    by_name["states"].add_argument("--follow", action="store_true", help="wait for further texts")
    add = by_name["train"].add_argument
    add("--minutes", type=float, default=60)
    add("--resume", action="store_true", help="go on from WORK/last.pt, with rates that begin and end anew")
    add("--steps", type=int, default=3, help="drafts of a chain that are learned")
    add("--vocab", type=int, default=6144, help="tokens that the head can draft")
    add("--inner", type=int, default=1152, help="width of the MLP")
    add("--batch", type=int, default=10, help="texts of a step")
    add("--rate", type=float, default=0.004, help="of Muon")
    add("--head-rate", type=float, default=1e-4, help="of AdamW")
    add("--say", type=float, default=5, help="minutes between two lines of the log; the head is written then, too")
    add = by_name["eval"].add_argument
    add("--prompts", required=True, help="texts between lines that begin with `=== `")
    add("--head", type=pathlib.Path, help="a head's folder instead of WORK/head")
    add("--tokens", type=int, default=128)
    add("--longest", type=int, default=5)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
