//! Logits of given tokens, for comparison with other programs.

use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    sync::Arc,
};

use quern_kernels::cpu::kv::BLOCK;
use quern_kernels::exec::{self, Chunk, ChunkOutput, ExecOptions, Executor, Mask, Output, Plan};
use quern_models::format::{create_sibling, destination};

use super::Place;
use crate::cli::{Activations, Kv, Usage, open, print};

/// Computes and writes the logits after each of the ids.
pub fn main(
    model: &Path,
    ids: &str,
    out: &Path,
    (device, gpu_layers): Place,
    activations: Option<Activations>,
    kv: Kv,
    threads: Option<usize>,
) -> Result<(), Box<dyn Error>> {
    let given = ids;
    let ids = parse_ids(ids)?;
    let file = open(model)?;
    let (vocab, most) = (file.spec().vocab, file.spec().max_context);
    if ids.len() > most {
        return Err(Usage(format!("--ids: {} tokens, the model was made for at most {most}", ids.len())).into());
    }
    if let Some(bad) = ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(Usage(format!("--ids: token {bad}, the vocabulary has {vocab} tokens")).into());
    }
    let blocks: Vec<u32> = (0..ids.len().div_ceil(BLOCK) as u32).collect();
    let options = ExecOptions {
        device,
        threads: threads.unwrap_or(0),
        blocks: blocks.len(),
        activations: activations.map(Into::into),
        kv: kv.into(),
        rows: CHUNK,
        tree_blocks: 0,
        gpu_layers,
    };
    let mut executor = exec::open(Arc::new(file), options, |_| {})?;
    let path = destination(out).map_err(|e| format!("{}: {e}", out.display()))?;
    if path.canonicalize().is_ok_and(|path| model.canonicalize().is_ok_and(|model| path == model)) {
        return Err(Usage("--logits: that is the model's own file".into()).into());
    }
    let read = given.strip_prefix('@').and_then(|ids| Path::new(ids).canonicalize().ok());
    if read.is_some_and(|ids| path.canonicalize().is_ok_and(|path| path == ids)) {
        return Err(Usage("--logits: that is the file of --ids; give another name".into()).into());
    }
    let (temp, out) = create_sibling(&path)?;
    let written = write(&mut *executor, &ids, &blocks, vocab, out).and_then(|bad| {
        std::fs::rename(&temp, &path)?;
        Ok(bad)
    });
    let bad = written.map_err(|e| {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&temp);
        format!("{}: {e}", path.display())
    })?;
    print(&format!("{}: logits [{}, {vocab}], {}\n", path.display(), ids.len(), executor.describe()))?;
    match bad {
        Some(token) => {
            Err(format!("the logits after token {token} are not finite: the model's weights are damaged").into())
        }
        None => Ok(()),
    }
}

/// Computes and writes all logits; returns the first position whose logits are not finite.
fn write(
    executor: &mut dyn Executor,
    ids: &[u32],
    blocks: &[u32],
    vocab: usize,
    file: File,
) -> Result<Option<usize>, Box<dyn Error>> {
    let mut out = BufWriter::new(file);
    out.write_all(&safetensors_header(ids.len(), vocab))?;
    let (mut start, mut bad) = (0, None);
    for tokens in ids.chunks(CHUNK) {
        let output = Output::Logits { from: 0 };
        let ticket =
            executor.submit(&Plan { chunks: vec![Chunk { tokens, start, blocks, mask: Mask::Causal, output }] })?;
        for output in executor.collect(ticket)? {
            let ChunkOutput::Logits(rows) = output else { unreachable!("logits were asked") };
            let first = rows.chunks_exact(vocab).position(|row| !row.iter().all(|x| x.is_finite()));
            bad = bad.or(first.map(|row| start + row));
            let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
            out.write_all(&bytes)?;
        }
        start += tokens.len();
    }
    out.flush()?;
    Ok(bad)
}

/// Tokens of a step: bounds the memory that logits take.
const CHUNK: usize = 64;

fn parse_ids(text: &str) -> Result<Vec<u32>, Box<dyn Error>> {
    let text = match text.strip_prefix('@') {
        Some(path) => {
            let bytes = crate::cli::read_whole(path.as_ref()).map_err(|e| format!("--ids: {e}"))?;
            String::from_utf8(bytes).map_err(|_| format!("--ids: {path}: expected text, got other bytes"))?
        }
        None => text.to_string(),
    };
    let id = |t: &str| t.parse::<u32>().map_err(|_| Usage(format!("--ids: {t:?} is not a token id")));
    let ids =
        text.split([',', ' ', '\n', '\r', '\t']).filter(|t| !t.is_empty()).map(id).collect::<Result<Vec<_>, _>>()?;
    if ids.is_empty() { Err(Usage("--ids: at least one token id is needed".into()).into()) } else { Ok(ids) }
}

/// Length and JSON of a file with one f32 tensor; the format is that of the safetensors library.
fn safetensors_header(rows: usize, vocab: usize) -> Vec<u8> {
    let json =
        format!(r#"{{"logits":{{"dtype":"F32","shape":[{rows},{vocab}],"data_offsets":[0,{}]}}}}"#, rows * vocab * 4);
    // Padded with spaces so that the data is aligned.
    let len = json.len().next_multiple_of(8);
    let mut header = (len as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header.resize(8 + len, b' ');
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_or_refused() {
        assert_eq!(parse_ids("1, 2,3\n").unwrap(), [1, 2, 3]);
        assert!(parse_ids("1,x").unwrap_err().to_string().contains("\"x\""));
        assert!(parse_ids(" ").is_err());
        assert!(parse_ids("@/nonexistent/ids").unwrap_err().to_string().contains("nonexistent"));
    }

    #[test]
    fn the_header_is_aligned() {
        let header = safetensors_header(2, 5);
        assert_eq!(header.len() % 8, 0);
        assert!(String::from_utf8_lossy(&header).contains("[0,40]"));
    }
}
