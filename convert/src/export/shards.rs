//! safetensors files: one, or shards with an index, each header written before its tensors.

use std::{
    fs::File,
    io::{BufWriter, Write},
};

use serde_json::{Map, Value, json};

use super::{
    folder::Folder,
    part::{Part, failed},
};
use crate::{ConvertError, source::Dtype, threads::Threads};

/// Writes all tensors, in shards of at most `limit` bytes where one tensor does not need more.
pub fn write(
    folder: &Folder,
    parts: &[Part],
    limit: u64,
    threads: &Threads,
    done: &mut dyn FnMut(&Part) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let shards = cut(parts, limit);
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        shard.iter().for_each(|p| drop(weight_map.insert(p.name.clone(), name.clone().into())));
        let path = folder.at(&name);
        let file = File::create_new(&path).map_err(|e| failed(&path, e))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&header(shard)).map_err(|e| failed(&path, e))?;
        for part in shard {
            threads.run(|| part.write(&mut out, &path))?;
            done(part)?;
        }
        let file = out.into_inner().map_err(|e| failed(&path, e.into_error()))?;
        file.sync_all().map_err(|e| failed(&path, e))?;
    }
    if shards.len() > 1 {
        let total: u64 = parts.iter().map(Part::bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        folder.json("model.safetensors.index.json", &index)?;
    }
    Ok(())
}

/// Fills shards in order. Within one, wider elements come first, so that all are aligned.
fn cut<'p, 'a>(parts: &'p [Part<'a>], limit: u64) -> Vec<Vec<&'p Part<'a>>> {
    let mut shards: Vec<Vec<&Part>> = vec![vec![]];
    let mut bytes = 0;
    for part in parts {
        let last = shards.last_mut().expect("there is one from the start");
        if !last.is_empty() && bytes + part.bytes() > limit {
            shards.push(vec![part]);
            bytes = part.bytes();
        } else {
            last.push(part);
            bytes += part.bytes();
        }
    }
    shards.iter_mut().for_each(|s| s.sort_by_key(|p| std::cmp::Reverse(size(p.dtype))));
    shards
}

fn header(shard: &[&Part]) -> Vec<u8> {
    let mut tensors = Map::new();
    tensors.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for part in shard {
        let end = at + part.bytes();
        let entry = json!({ "dtype": dtype(part.dtype), "shape": part.dims, "data_offsets": [at, end] });
        tensors.insert(part.name.clone(), entry);
        at = end;
    }
    let mut json = Value::from(tensors).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes(), &json[..]].concat()
}

fn dtype(dtype: Dtype) -> String {
    dtype.name().to_uppercase()
}

fn size(dtype: Dtype) -> usize {
    if let Dtype::Float(t) = dtype { t.size() } else { 4 }
}
