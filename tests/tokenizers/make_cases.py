"""Cases for tests/tokenizers: vocabularies, mixed lines, and the ids that other libraries give.

usage: make_cases.py large OUT [NAME=FILE ...]     real vocabularies, 10,000 lines each
       make_cases.py small OUT                     tiny ones, trained here (for tests/fixtures/tokenizers)

pip install transformers tokenizers sentencepiece protobuf gguf

NAME=FILE for `large`: a SentencePiece tokenizer.model, a tokenizer.json, or a .gguf file with a vocabulary.
mistral-common (on PyPI) brings several in mistral_common/data. With LT=PROGRAM in the environment GGUF files are
also given to llama.cpp: PROGRAM MODEL TEXTS PARSE_SPECIAL prints the ids of each text, one line a text; TEXTS has the
length of each text (u32) before its bytes.
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from importlib.metadata import version

from mixed_lines import lines

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
# How a LlamaTokenizer or a family without a class of its own may be configured.
CONFIGS = {
    "bare": ("llama", None),
    "mistral": ("mistral", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}),
    "mistral-new": ("mistral", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}),
    "class": ("llama", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": True}),
    "legacy": ("llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}),
    "no-prefix": ("llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_prefix_space": False}),
}


def write(out, name, case):
    case["versions"] = {p: version(p) for p in ("transformers", "tokenizers", "sentencepiece")}
    with open(f"{out}/{name}.case.json", "w") as f:
        json.dump(case, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")
    print(f"{name}: {len(case['ids'])} lines, {sum(map(len, case['ids']))} ids")


def transformers_case(out, name, kind, files, texts, config_name, extra=None, inline=None):
    """`files`: names in the model directory -> path."""
    from transformers import AutoTokenizer

    model_type, config = CONFIGS[config_name] if isinstance(config_name, str) else config_name
    paths = list(files.values())
    config = dict(config or {}, **(extra or {})) if config is not None or extra else None
    with tempfile.TemporaryDirectory() as d:
        json.dump({"model_type": model_type}, open(f"{d}/config.json", "w"))
        if config is not None:
            json.dump(config, open(f"{d}/tokenizer_config.json", "w"))
        for file, path in files.items():
            shutil.copy(path, f"{d}/{file}")
        tokenizer = AutoTokenizer.from_pretrained(d)
        if type(tokenizer).__name__ == "LlamaTokenizer":
            tokenizer._tokenizer = by_score(tokenizer, paths[0])
        ids = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
        with_bos = [tokenizer.encode(t) for t in texts[:20]]
    case = {"kind": kind, "file": os.path.relpath(paths[0], out), "model_type": model_type}
    if len(paths) > 1:
        case["merges"] = os.path.relpath(paths[1], out)
    if config is not None:
        case["tokenizer_config"] = config
    case |= {"texts": inline or "lines.json", "ids": ids, "with_bos": with_bos}
    write(out, name, case)


def by_score(tokenizer, path):
    """LlamaTokenizer of transformers 5.24 ranks merges by id, which is wrong where scores are not in that order.

    In the vocabularies of Llama and Mistral they are not: runs of spaces have early ids and the lowest score. SentencePiece,
    llama.cpp, transformers 4 and the tokenizer.json files that it made rank by score; so do these cases.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer
    from transformers.tokenization_utils_base import generate_merges

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(open(path, "rb").read())
    vocab = {p.piece: i for i, p in enumerate(model.pieces)}
    scores = {p.piece: p.score for p in model.pieces if p.type in (1, 4)}
    state = json.loads(tokenizer._tokenizer.to_str())
    state["model"]["merges"] = [list(m) for m in generate_merges(vocab, scores)]
    return Tokenizer.from_str(json.dumps(state))


def sentencepiece_case(out, name, path, texts_name, texts):
    """SentencePiece's own ids; texts of special tokens are text."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=path)
    write(out, name, {
        "kind": "sentencepiece", "file": os.path.relpath(path, out), "model_type": "", "texts": texts_name, "plain": True,
        "ids": [sp.encode(t) for t in texts],
    })


def gguf_of_sentencepiece(path, out):
    """What llama.cpp's converter writes of a tokenizer.model."""
    import gguf
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(open(path, "rb").read())
    spec, trainer = model.normalizer_spec, model.trainer_spec
    w = gguf.GGUFWriter(out, "llama")
    w.add_tokenizer_model("llama" if trainer.model_type == 2 else "t5")
    w.add_tokenizer_pre("default")
    w.add_token_list([p.piece.replace("\u2581", " ") if p.type == 4 else p.piece for p in model.pieces])
    w.add_token_scores([p.score for p in model.pieces])
    w.add_token_types([p.type for p in model.pieces])
    w.add_add_space_prefix(spec.add_dummy_prefix)
    w.add_remove_extra_whitespaces(spec.remove_extra_whitespaces)
    if spec.precompiled_charsmap:
        w.add_precompiled_charsmap(list(spec.precompiled_charsmap))
    w.add_bos_token_id(trainer.bos_id)
    w.add_eos_token_id(trainer.eos_id)
    w.add_unk_token_id(trainer.unk_id)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    close(w)


def gguf_of_tokenizer_json(path, out, pre):
    import gguf

    tokenizer = json.load(open(path))
    vocab = {i: t for t, i in tokenizer["model"]["vocab"].items()}
    kinds = {i: 1 for i in vocab}
    for token in tokenizer["added_tokens"]:
        vocab[token["id"]] = token["content"]
        kinds[token["id"]] = 3 if token["special"] else 4
    w = gguf.GGUFWriter(out, "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([vocab[i] for i in range(len(vocab))])
    w.add_token_types([kinds[i] for i in range(len(vocab))])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    w.add_add_bos_token(False)
    close(w)


def close(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama_cpp_case(out, name, path, texts_name, texts, special=True, pre=None):
    program = os.environ.get("LT")
    if not program:
        return
    with tempfile.NamedTemporaryFile() as f:
        for t in texts:
            b = t.encode()
            f.write(struct.pack("<I", len(b)) + b)
        f.flush()
        printed = subprocess.run([program, path, f.name, str(int(special))], check=True, capture_output=True).stdout
    ids = [[int(i) for i in line.split()] for line in printed.decode().split("\n")[:-1]]
    case = {"kind": "gguf", "file": os.path.relpath(path, out), "texts": texts_name, "plain": not special, "ids": ids}
    if pre:
        case["pre"] = pre
    write(out, name, case)


def large(out, vocabularies):
    os.makedirs(out, exist_ok=True)
    texts, plain = lines(), lines(special=False)
    json.dump(texts, open(f"{out}/lines.json", "w"))
    json.dump(plain, open(f"{out}/plain.json", "w"))
    for name, path in vocabularies:
        if path.endswith(".json"):
            pre = name.split("@")[1]
            name = name.split("@")[0]
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(path)
            ids = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
            write(out, f"{name}-json", {"kind": "tokenizer.json", "file": os.path.relpath(path, out), "texts": "lines.json", "ids": ids})
            gguf_of_tokenizer_json(path, f"{out}/{name}.gguf", pre)
            write(out, f"{name}-gguf", {"kind": "gguf", "file": f"{name}.gguf", "texts": "lines.json", "ids": ids})
            llama_cpp_case(out, f"{name}-llama.cpp", f"{out}/{name}.gguf", "lines.json", texts)
        elif path.endswith(".gguf"):
            llama_cpp_case(out, f"{name}-llama.cpp", path, "lines.json", texts)
        else:
            sentencepiece_case(out, f"{name}-sentencepiece", path, "plain.json", plain)
            for config in CONFIGS:
                transformers_case(out, f"{name}-{config}", "sentencepiece", {"tokenizer.model": path}, texts, config)
            gguf_of_sentencepiece(path, f"{out}/{name}.gguf")
            llama_cpp_case(out, f"{name}-llama.cpp", f"{out}/{name}.gguf", "lines.json", texts)


TEXT = """The old miller ground the rye and the wheat between two heavy stones. Every grain was counted twice.
A quern is a hand mill: the upper stone turns, the lower stone rests. Water, wind and oxen came later.
In 1086 there were 6,082 mills in the book; 3.5 of them on every river, said he. She said: it is not so!
def grind(grain, stones=2):
    return [flour for flour in grain if stones > 1]
Das Mehl wird gemahlen, der Müller schläft nicht. Le moulin tourne, le café est prêt. El niño come pan.
Мельница стоит у реки, мельник спит. 磨坐を回す。 石磨磨面粉。 الطاحونة على النهر
"""


def train(out, name, **options):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentences = [line for line in TEXT.split("\n") if line] * 8
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=options.pop("vocab_size", 420),
        hard_vocab_limit=False, num_threads=1, minloglevel=2, **options,
    )
    path = f"{out}/{name}.model"
    with open(path, "wb") as f:
        f.write(without_paths(model.getvalue()))
    return path


def without_paths(model):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    proto.trainer_spec.ClearField("input")
    proto.trainer_spec.ClearField("model_prefix")
    return proto.SerializeToString()


def small(out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.makedirs(out, exist_ok=True)
    # Without the longest lines and without repetitions of one character: these say nothing here.
    pick = lambda texts: [t for t in texts if len(t) < 60 and len(set(t)) > len(t) / 3][:90]
    texts, plain = pick(lines(1500)), pick(lines(1500, special=False))
    texts += ["", " ", "  ", "</s>", " </s> x", "a</s>b", "[IMG]", " [IMG]</s>", "x [IMG]  y[IMG]", "▁x", " ▁", "<0x41>", "ﬁne ABC"]
    json.dump(texts, open(f"{out}/lines.json", "w"))
    json.dump(plain, open(f"{out}/plain.json", "w"))
    # Rules for characters, as `nmt_nfkc` has thousands: capital letters, the ligature fi, no soft hyphen.
    rules = f"{out}/rules.tsv"
    with open(rules, "w") as f:
        f.write("41\t61\n42\t62\n54\t74\nFB01\t66 69\nAD\t\n9\t20\n")
    llama = dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, vocab_size=560,
    )
    bpe = train(out, "bpe", **llama)
    users = train(out, "bpe-users", user_defined_symbols=["[IMG]", "▁▁▁", "stones"], control_symbols=["[INST]"], **llama)
    bare = train(out, "bpe-bare", **llama | dict(add_dummy_prefix=False, byte_fallback=False, vocab_size=330))
    unigram = train(out, "unigram", model_type="unigram", normalization_rule_tsv=rules, vocab_size=300, user_defined_symbols=["[IMG]"])
    fallback = train(out, "unigram-bytes", model_type="unigram", normalization_rule_name="identity", byte_fallback=True, vocab_size=520)
    os.remove(rules)
    chat = {"added_tokens_decoder": {"0": dict(ADDED, content="<unk>"), "1": dict(ADDED, content="<s>"), "2": dict(ADDED, content="</s>"),
                                     "560": dict(ADDED, content="<|im_start|>", rstrip=True), "561": dict(ADDED, content="<|im_end|>", special=False)},
            "pad_token": "<pad>", "eos_token": "<|im_end|>"}
    for name, path in [("bpe", bpe), ("bpe-users", users), ("bpe-bare", bare), ("unigram", unigram), ("unigram-bytes", fallback)]:
        transformers_case(out, f"{name}-own", "sentencepiece", {"tokenizer.model": path}, texts, "bare", inline="lines.json")
    for config in ("mistral-new", "class", "legacy", "no-prefix"):
        transformers_case(out, f"bpe-{config}", "sentencepiece", {"tokenizer.model": bpe}, texts, config, inline="lines.json")
    transformers_case(out, "bpe-chat", "sentencepiece", {"tokenizer.model": bpe}, texts, "mistral", extra=chat, inline="lines.json")
    sentencepiece_case(out, "bpe-sentencepiece", bpe, "plain.json", plain)
    gguf_of_sentencepiece(bpe, f"{out}/bpe.gguf")
    llama_cpp_case(out, "bpe-llama.cpp", f"{out}/bpe.gguf", "lines.json", texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(TEXT.split("\n"), trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    state = json.loads(tokenizer.to_str())["model"]
    json.dump(state["vocab"], open(f"{out}/vocab.json", "w"))
    with open(f"{out}/merges.txt", "w") as f:
        f.write("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in state["merges"]))
    files = {"vocab.json": f"{out}/vocab.json", "merges.txt": f"{out}/merges.txt"}
    extra = {"added_tokens_decoder": {"480": dict(ADDED, content="<|im_end|>")}}
    for name, config in [("gpt2", ("gpt2", None)), ("gpt2-prefix", ("gpt_neo", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True})),
                         ("qwen2", ("qwen2", {"tokenizer_class": "Qwen2Tokenizer"} | extra))]:
        transformers_case(out, f"vocab-{name}", "vocab", files, texts, config, inline="lines.json")


def main(mode, out, *rest):
    if mode == "large":
        large(out, [r.split("=", 1) for r in rest])
    else:
        small(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
