//! Every checkpoint that other tools made for this project, and what becomes of it.
//!
//! The table "What becomes of every handed checkpoint" of `tests/fixtures/README.md` says for each
//! one whether it loads, is refused or comes later. Here the table is held to its word: a line for
//! every folder, exact-mode logits within the bound of [`Golden::exact_bound`], weights equal to the
//! golden's slices, greedy tokens where they are decided, and the quoted message where it is refused.
//! The checkpoints lie under QUERN_SHARED.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use quern_convert::{
    Options, convert,
    source::{Dtype, safetensors},
};
use quern_models::ModelFile;

use crate::compressed;
use crate::support::{
    Scratch, fixture,
    golden::{Golden, distance, margin},
    model::{self, Run, kept},
    skip,
};

/// A line of the table.
enum Fate {
    /// The checkpoint is converted; its golden logits are those of this tensor.
    Loads,
    /// The conversion fails, and its message holds these words.
    Refused(String),
}

#[test]
fn every_handed_checkpoint_is_in_the_table() {
    let Some(root) = root("every_handed_checkpoint_is_in_the_table") else { return };
    let table = table();
    let mut folders = vec![];
    for part in ["tiny", "tiny-quant", "real"] {
        for entry in fs::read_dir(root.join(part)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if entry.path().is_dir() && !name.starts_with('_') {
                folders.push(format!("{part}/{name}"));
            }
        }
    }
    folders.sort();
    let listed: Vec<&String> = table.keys().collect();
    assert_eq!(listed, folders.iter().collect::<Vec<_>>(), "lines of the table, folders that were handed over");
}

#[test]
fn what_the_table_says_of_families_is_true() {
    prove("what_the_table_says_of_families_is_true", "tiny/");
}

#[test]
fn what_the_table_says_of_formats_is_true() {
    prove("what_the_table_says_of_formats_is_true", "tiny-quant/");
}

#[test]
fn the_real_checkpoints_have_their_own_tests() {
    let tests = include_str!("real.rs");
    for (name, fate) in table().into_iter().filter(|(name, _)| name.starts_with("real/")) {
        assert!(matches!(fate, Fate::Loads), "{name}");
        assert!(tests.contains(name.trim_start_matches("real/")), "{name} is not in real.rs");
    }
}

fn root(test: &str) -> Option<PathBuf> {
    let root = env::var_os("QUERN_SHARED").map(|s| Path::new(&s).join("fixtures"));
    let root = root.filter(|r| r.join("tiny-quant").is_dir());
    if root.is_none() {
        skip(test, "QUERN_SHARED names no folder with fixtures/tiny-quant");
    }
    root
}

/// The table's lines: `| folder | loads | ... |`, `| folder | refused | "message" |`, and `later` likewise.
fn table() -> BTreeMap<String, Fate> {
    let text = fs::read_to_string(fixture("README.md")).unwrap();
    let mut lines = BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with("| `tiny") || l.starts_with("| `real/")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells[1].trim_matches('`').to_string();
        let fate = match cells[2] {
            "loads" => Fate::Loads,
            "refused" | "later" => {
                let message = cells[3].split('`').nth(1).unwrap_or_else(|| panic!("{line}: no quoted message"));
                Fate::Refused(message.to_string())
            }
            other => panic!("{line}: {other}"),
        };
        assert!(lines.insert(name, fate).is_none(), "{line}: twice");
    }
    lines
}

/// Proves every line whose name starts with `part`; all failures are reported together.
fn prove(test: &str, part: &str) {
    let Some(root) = root(test) else { return };
    let mut failures = vec![];
    for (name, fate) in table().into_iter().filter(|(name, _)| name.starts_with(part)) {
        let result = match fate {
            Fate::Loads => loads(&name, &root.join(&name)),
            Fate::Refused(message) => refused(&root.join(&name), &message),
        };
        match result {
            Ok(measured) => println!("{name}: {measured}"),
            Err(why) => failures.push(format!("{name}: {why}")),
        }
    }
    assert!(failures.is_empty(), "{} lines do not hold:\n{}", failures.len(), failures.join("\n"));
}

fn refused(dir: &Path, message: &str) -> Result<String, String> {
    let scratch = Scratch::new("handed");
    let out = scratch.at("model.qrn");
    let text = match convert(dir, &out, &Options::default(), &mut ()) {
        Ok(_) => return Err("it loads".into()),
        Err(e) => e.to_string(),
    };
    if !text.contains(message) || text.contains('\n') || out.exists() {
        return Err(format!("expected {message:?}, got {text:?}"));
    }
    Ok(format!("refused: {text}"))
}

fn loads(name: &str, dir: &Path) -> Result<String, String> {
    let scratch = Scratch::new("handed");
    if let Err(e) = convert(dir, &scratch.at("probe.qrn"), &Options::default(), &mut ()) {
        return Err(format!("expected to load: {e}"));
    }
    let golden = Golden::read(dir);
    // This golden was computed with tensors that the checkpoint holds rounded.
    let whole = name.ends_with("llama-fp8-finegrained-64").then(|| compressed::unrounded(dir, &scratch));
    let (_, file) = kept(whole.as_deref().unwrap_or(dir), &scratch);
    let slices = weights(dir, &file, &golden)?;
    // A source that quantizes activations, too, has a golden of its weights alone.
    let weight_only = golden.has("logits_weight_only");
    let logits = golden.floats(if weight_only { "logits_weight_only" } else { "logits" });
    let range = logits.range();
    let bound = golden.exact_bound(range);
    let prompt = golden.ids("input_ids");
    let exact = distance(&model::logits(&file, Run::Exact, prompt), &logits.data);
    if exact > bound {
        return Err(format!(
            "{name}: exact mode is {:.2e} of the range off, bound {:.2e}",
            exact / range,
            bound / range
        ));
    }
    let mut measured = format!("exact {:.1e} of the range, bound {:.1e}; {slices}", exact / range, bound / range);
    if !weight_only {
        let (ids, steps) = (golden.ids("greedy_ids"), golden.floats("greedy_logits"));
        let decided = steps.rows().position(|row| margin(row) <= 2.0 * bound).unwrap_or(ids.len());
        let greedy = model::greedy(&file, Run::Exact, &[prompt.to_vec()], ids.len()).remove(0).tokens;
        let agree = greedy.iter().zip(ids).take_while(|(a, b)| a == b).count();
        if agree < decided {
            return Err(format!("greedy tokens {greedy:?}, golden {ids:?}, the first {decided} are decided"));
        }
        measured += &format!("; greedy {agree} of {}", ids.len());
    }
    Ok(measured)
}

/// Compares the golden's slices of dense weights, `dequant.MODULE`, element by element.
fn weights(dir: &Path, file: &ModelFile, golden: &Golden) -> Result<String, String> {
    let mut count = 0;
    for (module, slice) in golden.named("dequant.") {
        let name = ours(module);
        let Some(view) = file.tensor(&name) else { return Err(format!("{module}: no tensor {name}")) };
        if slice.cols != view.k {
            return Err(format!("{module}: {} columns in the golden, {} in the file", slice.cols, view.k));
        }
        let order = column_order(dir, module, view.k);
        for (row, wanted) in slice.rows().enumerate() {
            for (col, &from) in order.iter().enumerate() {
                let (got, wanted) = (view.at(row, col), wanted[from]);
                if got != wanted {
                    return Err(format!("{module} [{row}, {from}]: golden {wanted}, file {got}"));
                }
                count += 1;
            }
        }
    }
    Ok(format!("{count} weights equal"))
}

/// Our name of a Hugging Face linear layer.
fn ours(module: &str) -> String {
    let mut parts = module.split('.').skip_while(|p| *p != "layers").skip(1);
    let layer = parts.next().unwrap_or_else(|| panic!("{module}"));
    let last = module.rsplit('.').next().unwrap_or_default().trim_end_matches("_proj");
    match module.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next()) {
        Some(expert) => format!("layers.{layer}.experts.{expert}.{last}"),
        None => format!("layers.{layer}.{last}"),
    }
}

/// Which source column each column of the file is: those of a group together, in order.
fn column_order(dir: &Path, module: &str, k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..k).collect();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        if !file.ends_with(".safetensors") || file.starts_with("golden") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let tensors = safetensors::parse(&bytes).unwrap();
        let index = ["g_idx", "weight_g_idx"].iter().find_map(|part| tensors.get(&format!("{module}.{part}")));
        if let Some(raw) = index.filter(|raw| raw.dtype == Dtype::I32) {
            let group = |i: usize| i32::from_le_bytes(raw.bytes[i * 4..i * 4 + 4].try_into().unwrap());
            order.sort_by_key(|&i| group(i));
        }
    }
    order
}
