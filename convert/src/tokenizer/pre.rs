//! How a text is cut before byte pairs are merged, by the name that llama.cpp gives it
//! (`tokenizer.ggml.pre`).
//!
//! A name stands for the models that introduced it, so the pipelines are theirs, as their own
//! tokenizer.json has them (llama.cpp's src/llama-vocab.cpp quotes many): regular expressions whose
//! matches become pieces, one after the other, then the bytes as characters. Where only llama.cpp's
//! form is known, it is llama.cpp's.

use serde_json::{Value as Json, json};

use super::json::{byte_level, sequence, split};

/// A way to cut a text, and what its name implies besides.
#[derive(Debug, Clone, PartialEq)]
pub struct Pre {
    /// What happens to the characters before.
    pub normalizer: Json,
    /// The cutting.
    pub pre_tokenizer: Json,
    /// A piece that is a token is not built from merges.
    pub ignore_merges: bool,
    /// What an absent `add_bos_token` means.
    pub add_bos: bool,
}

/// One step of the cutting.
#[derive(Clone, Copy)]
enum Step {
    /// Matches are pieces of their own.
    Split(&'static str),
    /// Every digit (true) or every run of digits is a piece.
    Digits(bool),
    /// Runs of punctuation are pieces.
    Punctuation,
    /// GPT-2's expression, bytes as characters.
    Gpt2,
    /// Bytes as characters.
    Bytes,
}

use Step::{Bytes, Digits, Gpt2, Punctuation, Split};

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const UFAK: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

/// The names known here.
pub const NAMES: &[&str] = &[
    "a.x-4.0",
    "bailingmoe",
    "bailingmoe2",
    "bloom",
    "chatglm-bpe",
    "codeshell",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone-moe",
    "exaone4",
    "f2llmv2",
    "falcon",
    "falcon-h1",
    "falcon3",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "gpt-4o",
    "gpt3-finnish",
    "granite-docling",
    "grok-2",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "jais",
    "jais-2",
    "joyai-llm",
    "kanana2",
    "kormo",
    "laguna",
    "lfm2",
    "llada-moe",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "llama4",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "minicpm5",
    "minimax-m2",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "spark2_5",
    "stablelm2",
    "starcoder",
    "superbpe",
    "talkie",
    "tekken",
    "trillion",
    "ufakzeka",
    "viking",
    "youtu",
];

/// The way to cut that a name stands for. `add_prefix_space`: as if a text began with a space.
pub fn named(name: &str, add_prefix_space: bool) -> Option<Pre> {
    let steps: &[Step] = match name {
        // A file that does not name it is older than the names.
        "default" | "gpt-2" | "phi-2" | "gigachat" | "a.x-4.0" | "mellum" | "mpt" | "olmo" | "jais" | "trillion"
        | "granite-docling" | "exaone4" => &[Gpt2],
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            &[Digits(true), Gpt2]
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" | "dbrx"
        | "smaug-bpe" | "chatglm-bpe" | "glm4" | "glm5" => &[Split(LLAMA3), Bytes],
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan" | "solar-open"
        | "grok-2" => &[Split(QWEN2), Bytes],
        "qwen35" => &[Split(QWEN35), Bytes],
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => &[Split(GPT4O), Bytes],
        "tekken" => &[Split(TEKKEN), Bytes],
        "deepseek-llm" => &[
            Split(r"[\r\n]"),
            Split(DEEPSEEK_LETTERS),
            Split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Split(r"\s+$"),
            Split("[一-龥ࠀ-一가-퟿]+"),
            Digits(true),
            Bytes,
        ],
        "deepseek-coder" => &[
            Split(r"[\r\n]"),
            Split(r"\s?\p{L}+"),
            Split(r"\s?\p{P}+"),
            Split("[一-龥ࠀ-一가-퟿]+"),
            Digits(true),
            Bytes,
        ],
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
            &[Split(r"\p{N}{1,3}"), Split("[一-龥぀-ゟ゠-ヿ]+"), Split(DEEPSEEK3), Bytes]
        }
        "spark2_5" => &[Split(r"\p{N}{1,3}"), Split("[一-龥぀-ゟ゠-ヿ]+"), Split(SPARK), Split(r"\p{N}"), Bytes],
        "youtu" => &[Split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"), Split(YOUTU), Bytes],
        "falcon" => &[Punctuation, Gpt2, Digits(false), Split("[0-9][0-9][0-9]")],
        "poro-chat" | "bloom" | "gpt3-finnish" => &[Split(BLOOM), Bytes],
        "viking" => &[Split(BLOOM), Digits(true), Bytes],
        "superbpe" => &[Split(r"\p{N}+"), Split(r"(?=(\d{3})+(?!\d))"), Bytes],
        "bailingmoe" | "bailingmoe2" | "llada-moe" => &[Split(BAILING), Bytes],
        "seed-coder" => &[Split(SEED), Bytes],
        "ufakzeka" => &[Split(UFAK), Bytes],
        "exaone-moe" => &[Split(EXAONE_MOE), Bytes],
        "minicpm5" => &[Split(r"\p{N}{1,3}"), Split(MINICPM5), Bytes],
        "jais-2" => &[Split(JAIS2), Bytes],
        "laguna" => &[Split(r"[^\n]+|[\n]+"), Split(QWEN2), Bytes],
        _ => return None,
    };
    let llama3 =
        matches!(name, "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2");
    // Their tokenizers compose characters; llama.cpp does not.
    let composed = matches!(name, "qwen2" | "qwen35" | "deepseek-r1-qwen" | "command-r" | "mpt" | "olmo");
    Some(Pre {
        normalizer: if composed { json!({ "type": "NFC" }) } else { Json::Null },
        pre_tokenizer: sequence(
            "Sequence",
            "pretokenizers",
            steps.iter().map(|step| step.json(add_prefix_space)).collect(),
        ),
        ignore_merges: llama3 || matches!(name, "tekken" | "glm4" | "glm5" | "youtu" | "minicpm5"),
        add_bos: llama3 || name == "tekken",
    })
}

impl Step {
    fn json(self, add_prefix_space: bool) -> Json {
        match self {
            Split(regex) => split(regex),
            Digits(individual) => json!({ "type": "Digits", "individual_digits": individual }),
            Punctuation => json!({ "type": "Punctuation", "behavior": "Contiguous" }),
            Gpt2 => byte_level(true, add_prefix_space),
            Bytes => byte_level(false, add_prefix_space),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_known_and_sorted() {
        assert!(NAMES.is_sorted());
        for name in NAMES {
            assert!(named(name, false).is_some(), "{name}");
        }
        assert_eq!(named("chameleon", false), None);
    }
}
