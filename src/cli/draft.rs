//! `--draft FILE`: a small model, or a head, that guesses for the model that is run.

use std::{error::Error, path::Path, sync::Arc};

use quern_kernels::exec::Device;
use quern_models::ModelFile;

use super::EngineArgs;
use crate::{
    draft::{Method, Speculation},
    engine::{Engine, EngineOptions, OpenError},
    text::{TextModel, Tokenizer, printable},
};

/// A flag that cannot be followed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag}: {reason}")]
pub struct Misfit {
    /// The flag.
    pub flag: &'static str,
    /// Why.
    pub reason: String,
}

/// The small model or head of the flags or else of the file, if there is one; refuses a method that needs another.
/// `requests`: whether requests may choose their method.
pub fn of(args: &EngineArgs, file: &ModelFile, requests: bool) -> Result<Option<Arc<ModelFile>>, Misfit> {
    let found = match &args.draft {
        Some(path) => {
            let opened = open(path, file);
            Some(opened.map_err(|e| Misfit { flag: "--draft", reason: e.to_string() })?)
        }
        // Nobody may ask for it.
        None if args.speculate.method == Method::Off && !requests => None,
        None => file.draft().cloned(),
    };
    let fits = fits(args.speculate, found.as_deref(), args.draft.is_some());
    fits.map_err(|reason| Misfit { flag: "--speculate", reason })?;
    Ok(found)
}

/// Lets an engine guess from what [`of`] found. What the model's file has and cannot be used here is left with a line on
/// stderr, unless it was asked for.
pub fn give(
    engine: &mut Engine,
    found: Option<Arc<ModelFile>>,
    args: &EngineArgs,
    options: EngineOptions,
) -> Result<(), OpenError> {
    let Some(found) = found else { return Ok(()) };
    let method = Method::of(found.spec());
    let Err(error) = engine.with_draft(found, options) else { return Ok(()) };
    let of = match args.draft {
        Some(_) => "--draft".to_string(),
        None => format!("the file's own guesses ({})", method.name()),
    };
    if args.draft.is_some() || args.speculate.method.needs_file() {
        return Err(OpenError::Guesses { of, source: Box::new(error) });
    }
    eprintln!("{of} cannot be used, going on without: {}", printable(&error.to_string()));
    Ok(())
}

/// KV blocks more that a GPU has for trees of a head's guesses: 17 ends of paths, which is the trees that are checked in
/// practice. The CPU needs none.
const TREE_BLOCKS: usize = 32;

/// Makes room for trees on a GPU, if what [`of`] found for a model is a head, which only one device with all layers can
/// have.
pub fn with_trees(options: EngineOptions, model: &ModelFile, found: Option<&ModelFile>) -> EngineOptions {
    let head = found.is_some_and(|file| Method::of(file.spec()).branches());
    let all = options.gpu_layers.is_none_or(|layers| layers == model.spec().layers.len());
    let place = options.device != Device::Cpu && all;
    EngineOptions { tree_blocks: if head && place { TREE_BLOCKS } else { 0 }, ..options }
}

/// Refuses a method that needs another file than is there. `given`: it is that of --draft, not the model's own.
pub fn fits(speculation: Speculation, found: Option<&ModelFile>, given: bool) -> Result<(), String> {
    let named = |method: Method| match method {
        Method::Draft => "a small model".to_string(),
        method => format!("a head of the kind {}", method.name()),
    };
    let there = found.map(|file| Method::of(file.spec()));
    if !speculation.method.needs_file() || there == Some(speculation.method) {
        return Ok(());
    }
    let needs = named(speculation.method);
    let whose = if given { "that of --draft" } else { "what the file has" };
    Err(match there {
        None => format!("{speculation} needs {needs}: --draft FILE, or one in the file"),
        Some(there) => format!("{speculation} needs {needs}, and {whose} is {}", named(there)),
    })
}

/// Opens a small model or head and refuses one that does not have the large one's tokens.
pub fn open(path: &Path, of: &ModelFile) -> Result<Arc<ModelFile>, Box<dyn Error>> {
    let file = super::open_any(path)?;
    check(of, &file).map_err(|reason| format!("{}: {reason}", path.display()))?;
    Ok(Arc::new(file))
}

/// Why a small model cannot write ahead of a large one.
pub fn check(large: &ModelFile, small: &ModelFile) -> Result<(), String> {
    if let Some(head) = &small.spec().draft_head {
        return head.fits(large.spec()).map_err(|e| e.to_string());
    }
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
