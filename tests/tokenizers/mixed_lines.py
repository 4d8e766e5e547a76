"""Mixed lines for comparing tokenizers: the same in every run, seeded by their number.

Scripts of the world, emoji with joiners, code, numbers of every length, spaces at every place, line ends,
control characters, combining marks, texts of special tokens, and characters that look like broken bytes.
"""
import json
import random
import sys

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because "
    "each just those people Mr how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three internationalization Donaudampfschifffahrt antidisestablishmentarianism e-mail co-op "
    "don't I'm we'll you've they'd it's John's o'clock rock'n'roll naïve café résumé Zürich façade jalapeño Łódź İstanbul"
).split()
SCRIPTS = [
    "Съешь же ещё этих мягких французских булок да выпей чаю Москва Санкт-Петербург",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία Αθήνα ὀρθός ᾧ",
    "我能吞下玻璃而不伤身体 你好，世界！ 人工智能 機器學習 中文維基百科 北京市 上海",
    "日本語のテキストです。 カタカナ ひらがな 東京都 トウキョウ ｶﾀｶﾅ ゔ が",
    "한국어 텍스트 안녕하세요 서울특별시 ᄒᆞᆫ글",
    "مرحبا بالعالم اللغة العربية مَرْحَبًا ١٢٣ لا إله ﷺ",
    "שלום עולם בְּרֵאשִׁית ירושלים",
    "नमस्ते दुनिया हिन्दी क्षत्रिय १२३ मैं काँच खा सकता हूँ",
    "สวัสดีชาวโลก ภาษาไทย ๑๒๓",
    "தமிழ் மொழி বাংলা ভাষা తెలుగు ಕನ್ನಡ മലയാളം ગુજરાતી ਪੰਜਾਬੀ",
    "Հայաստան საქართველო አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ខ្មែរ ລາວ မြန်မာ བོད་ཡིག",
    "Tiếng Việt Việt Nam Pchnąć w tę łódź jeża Árvíztűrő tükörfúrógép Ğğ Şş",
]
EMOJI = [
    "😀", "😂", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀", "🫠", "👩‍❤️‍💋‍👨", "☃", "✈️", "🀄", "⚕️", "🤷🏻‍♂️",
]
CODE = [
    "def f(x):", "    return x ** 2", "\tif (a && b || !c) {", "for (int i = 0; i < n; ++i)", "println!(\"{:?}\", v);",
    "SELECT * FROM t WHERE a<>'b';", "<div class=\"x\">&nbsp;</div>", "$HOME/.config", "{\"a\": [1, 2.5e-3, null]}",
    "x->y::z<T>()", "a+=b--c==d!=e<<f>>g", "https://example.com/a/b?c=d&e=f%20g#h", "user.name+tag@example.co.uk",
    "camelCase snake_case SCREAMING_CASE", "\\begin{align} x^2_{i} \\\\", "C:\\Users\\x\\file.txt", "0x1F 0b101 1_000",
    "// TODO: fix", "/* c */", "#include <stdio.h>", "lambda x: x[::-1]", "@decorator", "!!important", "~/.bashrc",
    "==========", "----------", "**********", "##########", "__init__", "...", "!?!?", "->=>|>", "```rust",
]
CONTROL = [chr(c) for c in list(range(0x20)) + [0x7F, 0x80, 0x85, 0x9F]]
ODD = [
    "\u00a0", "\u2003", "\u2009", "\u202f", "\u3000", "\u200b", "\u200c", "\u200d", "\ufeff", "\u2028", "\u2029", "\u00ad",
    "\u2060", "\u202e", "\u1680", "\u180e", "\ufffd", "\ufffe", "\uffff", "\ue000", "\U0010ffff", "\U000f0000", "\U00040000",
    "\u2581", "\u2581\u2581", "\u0120", "\u010a", "\u0100", "ﬁ", "ﬃ", "Ǆ", "½", "²", "Ⅷ", "①", "㎏", "㍿", "Å", "Ω", "ſ", "K", "ß", "ẞ", "ı",
    "\u00c3\u00a9", "\u00e2\u20ac\u2122", "\u00ef\u00bf\u00bd", "\u00f0\u0178\u02dc\u20ac", "\U00020000", "\U0002a6d6", "\U0001d54f", "\U00010348",
]
MARKS = ["\u0301", "\u0308", "\u0323", "\u0345", "\u20dd", "\u0489", "\u0fb7", "\u3099", "\u1160", "\u093f", "\u0e31"]
SPECIAL = [
    "<s>", "</s>", "<unk>", "<pad>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>",
    "<|begin_of_text|>", "<0x0A>", "<0xFF>", "<mask>", "<bos>", "</s", "<s", "[INST", "<|im_start|", "<|endoftext|>\n",
    "[TOOL_CALLS]", "[REFERENCE_DOC_3]", "<|fim_prefix|>", "<file_sep>", "<｜begin▁of▁sentence｜>", "<extra_id_7>",
]


def number(r):
    digits = "".join(r.choice("0123456789") for _ in range(r.choice([1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 19, 31, 64])))
    form = r.randrange(8)
    if form == 0:
        return f"{int(digits):,}"
    if form == 1:
        return digits + "." + digits[::-1][:3]
    if form == 2:
        return "-" + digits
    if form == 3:
        return digits + r.choice(["%", "€", "kg", "th", "x", "e10", "日", "ª"])
    if form == 4:
        return r.choice(["$", "#", "v", "~", "№", "x"]) + digits
    if form == 5:
        return "".join(chr(r.choice([0x660, 0x966, 0xFF10, 0x1D7CE]) + int(d)) for d in digits[:6])
    return digits


def part(r, special):
    kind = r.randrange(26)
    if kind < 7:
        words = [r.choice(WORDS) for _ in range(r.randrange(1, 9))]
        style = r.randrange(6)
        if style == 0:
            words = [w.upper() for w in words]
        if style == 1:
            words = [w.capitalize() for w in words]
        if style == 2:
            words = [w + r.choice([",", ".", ";", ":", "!", "?", "…", "—"]) for w in words]
        return " ".join(words)
    if kind < 11:
        text = r.choice(SCRIPTS)
        start = r.randrange(len(text))
        return text[start : start + r.randrange(1, 30)]
    if kind < 13:
        return "".join(r.choice(EMOJI) for _ in range(r.randrange(1, 4)))
    if kind < 16:
        return r.choice(CODE)
    if kind < 18:
        return number(r)
    if kind == 18:
        return r.choice([" ", "\t", "\n", "\r\n", "\u00a0", "\u3000"]) * r.choice([1, 2, 3, 4, 5, 8, 15, 16, 17, 33])
    if kind == 19:
        return "".join(r.choice(" \t\n\r") for _ in range(r.randrange(1, 8)))
    if kind == 20:
        return "".join(r.choice(CONTROL) for _ in range(r.randrange(1, 4)))
    if kind == 21:
        return "".join(r.choice(ODD) for _ in range(r.randrange(1, 4)))
    if kind == 22:
        return r.choice("aeiouAEIOUnN кかཀ ") + "".join(r.choice(MARKS) for _ in range(r.randrange(1, 4)))
    if kind == 23:
        return r.choice(SPECIAL) if special else r.choice(WORDS)
    if kind == 24:
        code = r.choice([r.randrange(0x20, 0x250), r.randrange(0x250, 0x3000), r.randrange(0x3000, 0xD800), r.randrange(0xE000, 0x20000)])
        return "".join(chr(code + i) for i in range(r.randrange(1, 4)))
    return "".join(r.choice("aAbBzZ09_-'\".,  ") for _ in range(r.randrange(1, 12)))


def lines(count=10000, special=True):
    """`special`: whether texts of special tokens are among them."""
    out = {}
    seed = 0
    while len(out) < count:
        r = random.Random(f"quern mixed line {seed}")
        seed += 1
        parts = [part(r, special) for _ in range(r.choice([1, 1, 2, 3, 4, 6]))]
        text = r.choice(["", " ", " ", "  ", "\n"]).join(parts)
        edge = r.randrange(12)
        if edge == 0:
            text = " " * r.choice([1, 1, 2, 3, 7]) + text
        if edge == 1:
            text = text + r.choice([" ", "  ", "\n", "\r\n", "\t"])
        out[text] = None
    return list(out)


if __name__ == "__main__":
    json.dump(lines(int(sys.argv[1]) if len(sys.argv) > 1 else 10000), sys.stdout)
