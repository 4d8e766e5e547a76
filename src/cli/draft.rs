//! `--draft FILE`: a small model that writes ahead of the one that is run.

use std::{error::Error, path::Path, sync::Arc};

use quern_models::ModelFile;

use super::EngineArgs;
use crate::{
    draft::Method,
    text::{TextModel, Tokenizer, printable},
};

/// The small model of the flags or else of the file, if there is one; refuses a method that needs one without it.
/// `requests`: whether requests may choose their method.
pub fn of(args: &EngineArgs, file: &ModelFile, requests: bool) -> Result<Option<Arc<ModelFile>>, String> {
    match &args.draft {
        Some(path) => open(path, file).map(Some).map_err(|e| e.to_string()),
        // Nobody may ask for it.
        None if args.speculate.method == Method::Off && !requests => Ok(None),
        None if args.speculate.method == Method::Draft && file.draft().is_none() => {
            Err(format!("--speculate {} needs a small model: --draft FILE, or one in the file", args.speculate))
        }
        None => Ok(file.draft().cloned()),
    }
}

/// Opens a small model and refuses one that does not have the large one's tokens.
pub fn open(path: &Path, of: &ModelFile) -> Result<Arc<ModelFile>, Box<dyn Error>> {
    let file = super::open(path)?;
    check(of, &file).map_err(|reason| format!("{}: {reason}", path.display()))?;
    Ok(Arc::new(file))
}

/// Why a small model cannot write ahead of a large one.
pub fn check(large: &ModelFile, small: &ModelFile) -> Result<(), String> {
    let refused = |reason| format!("{reason}; a draft model must have the same tokens as the model it writes ahead of");
    let text = |file| TextModel::of(file).map_err(|e| e.to_string());
    match (text(large)?, text(small)?) {
        (Some(large), Some(small)) => same(large.tokenizer(), small.tokenizer()).map_err(refused),
        // Without a tokenizer there are only numbers to compare.
        _ if small.spec().vocab == large.spec().vocab => Ok(()),
        _ => Err(refused(format!("it has {} tokens, expected {}", small.spec().vocab, large.spec().vocab))),
    }
}

/// Every token stands for the same bytes, and is special where the other is.
fn same(large: &Tokenizer, small: &Tokenizer) -> Result<(), String> {
    let (expected, got) = (large.vocab_size(), small.vocab_size());
    if expected != got {
        return Err(format!("its tokenizer has {got} tokens, expected {expected}"));
    }
    for id in 0..expected as u32 {
        let of = |tokenizer: &Tokenizer| (tokenizer.token_bytes(id), tokenizer.is_special(id));
        let (expected, got) = (of(large), of(small));
        if expected != got {
            let shown = |(bytes, _): (Option<Vec<u8>>, bool)| match bytes {
                Some(bytes) => format!("{:?}", printable(&String::from_utf8_lossy(&bytes[..bytes.len().min(60)]))),
                None => "nothing".into(),
            };
            return Err(format!("its token {id} is {}, expected {}", shown(got), shown(expected)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(words: &[&str]) -> Tokenizer {
        let vocab: serde_json::Map<String, serde_json::Value> =
            words.iter().enumerate().map(|(i, word)| (word.to_string(), i.into())).collect();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
        });
        Tokenizer::from_json(json.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn tokens_are_compared_one_by_one() {
        let large = tokenizer(&["a", "b", "c"]);
        assert_eq!(same(&large, &tokenizer(&["a", "b", "c"])), Ok(()));
        let error = same(&large, &tokenizer(&["a", "c", "b"])).unwrap_err();
        assert_eq!(error, "its token 1 is \"c\", expected \"b\"");
        let error = same(&large, &tokenizer(&["a", "b"])).unwrap_err();
        assert_eq!(error, "its tokenizer has 2 tokens, expected 3");
    }
}
