//! GPTQ of every bit width, group, order and version, from integers that the tests chose.

use quern_convert::{Options, Progress, Quant, Step};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};
use serde_json::{Value, json};

use crate::made::*;

const HEAD: (&str, &str, usize, usize) = ("head", "lm_head", VOCAB, HIDDEN);

fn gptq_config(format: &str, bits: usize, group: i64, sym: bool) -> Value {
    let mut config = config();
    config["quantization_config"] = json!({ "quant_method": "gptq", "bits": bits, "group_size": group,
        "checkpoint_format": format, "sym": sym, "lm_head": true });
    config
}

/// Groups of `group` columns each, columns assigned at random.
fn shuffled(random: &mut Random, k: usize, group: usize) -> Vec<u32> {
    let mut index: Vec<u32> = (0..k).map(|col| (col / group) as u32).collect();
    for i in (1..k).rev() {
        index.swap(i, random.below(i as u64 + 1) as usize);
    }
    index
}

/// Columns sorted by group, as the file must have them.
fn sorted(index: &[u32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..index.len()).collect();
    order.sort_by_key(|&col| index[col]);
    order
}

/// Where the columns and rows of a tensor of the file come from in the source: by the orders in the file, and for
/// `down` and what makes its input by `down`'s own order.
fn origin(file: &ModelFile, target: &str, n: usize, k: usize, down: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let name = match target {
        "layers.0.q" | "layers.0.k" | "layers.0.v" => "layers.0.attn_order",
        "layers.0.o" => "layers.0.o_order",
        "layers.0.gate" | "layers.0.up" => "layers.0.mlp_order",
        _ => "head_order",
    };
    let cols = match (target, file.tensor(name)) {
        ("layers.0.down", _) => down.to_vec(),
        (_, Some(order)) => (0..k).map(|i| order.order(i) as usize).collect(),
        (_, None) => (0..k).collect(),
    };
    let rows = match target {
        "layers.0.gate" | "layers.0.up" => down.to_vec(),
        _ => (0..n).collect(),
    };
    (rows, cols)
}

fn check(file: &ModelFile, target: &str, chosen: &Chosen, down: &[usize]) {
    let view = file.tensor(target).unwrap();
    let (rows, cols) = origin(file, target, chosen.n, chosen.k, down);
    for (row, &from_row) in rows.iter().enumerate() {
        for (col, &from_col) in cols.iter().enumerate() {
            assert_eq!(view.at(row, col), chosen.at(from_row, from_col), "{target} [{row}, {col}]");
        }
    }
}

/// Every width, group, version, symmetry and order; the head has rows that are no multiple of 32, `down` a partial
/// last group with 64 columns each.
#[test]
fn every_kind_is_exact() {
    let mut random = Random::new(31);
    let natural: Vec<usize> = (0..INNER).collect();
    for bits in [2, 3, 4, 8] {
        for group in [-1i64, 16, 32, 48, 64, 128, 256] {
            for (sym, v1, order) in (0..8).map(|i| (i & 1 == 0, i & 2 == 0, i & 4 == 0)) {
                let scratch = Scratch::new(&format!("all-{bits}-{group}-{sym}-{v1}-{order}"));
                let mut tensors = around(&mut random);
                tensors.remove("lm_head.weight");
                let columns = |k: usize| if group < 0 { k } else { k.min(group as usize) };
                let index = [HIDDEN, HIDDEN, HIDDEN, INNER, HIDDEN].map(|k| shuffled(&mut random, k, columns(k)));
                let mut all = vec![];
                for (target, module, n, k) in LINEARS.into_iter().chain([HEAD]) {
                    let mut chosen = Chosen::new(&mut random, n, k, bits, columns(k), sym);
                    let which = ["q", "k", "v", "o", "gate", "up", "down", "head"];
                    let which = which.iter().position(|w| target.ends_with(w)).unwrap();
                    if order {
                        chosen = chosen.ordered(&index[[0, 0, 0, 1, 2, 2, 3, 4][which]]);
                    }
                    chosen.gptq(&mut tensors, module, v1, FloatType::F16);
                    all.push((target, chosen));
                }
                let config = gptq_config(if v1 { "gptq" } else { "gptq_v2" }, bits, group, sym);
                write(&scratch.model(), &config, &tensors, "model.safetensors");
                let (report, file) = scratch.convert(&Options::default()).unwrap();
                let moved = order && columns(INNER) < INNER;
                let down = if moved { sorted(&index[3]) } else { natural.clone() };
                all.iter().for_each(|(target, chosen)| check(&file, target, chosen, &down));
                assert_eq!(file.tensor("head_order").is_some(), order && columns(HIDDEN) < HIDDEN);
                let Scheme::Int { bits: kept, zero, .. } = file.tensor("layers.0.q").unwrap().scheme else { panic!() };
                assert_eq!(kept as usize, bits.max(4));
                assert_eq!(zero, if sym { ZeroKind::Mid } else { ZeroKind::Code });
                let codes: usize = all.iter().map(|(_, c)| c.n * c.k).sum();
                assert_eq!((report.verified.codes, report.verified.values), (codes as u64, 0));
                let provenance = file.provenance();
                assert_eq!(provenance["bits"], bits);
                let wider = provenance["wider"][0].as_str().unwrap_or_default();
                assert_eq!(wider.starts_with(&format!("8 x {bits}-bit codes in 4-bit fields (+")), bits < 4, "{wider}");
            }
        }
    }
}

/// Collects notes.
struct Notes(Vec<String>);

impl Progress for Notes {
    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
    fn step(&mut self, _: &Step<'_>) {}
}

/// Converts a model whose linears are as given (the rest as `around` has them); the notes come too.
fn convert(name: &str, all: &[(&str, Chosen)], tensors: &mut Tensors) -> (ModelFile, Vec<String>) {
    for (target, chosen) in all {
        let module = LINEARS.iter().find(|l| l.0 == *target).unwrap().1;
        chosen.gptq(tensors, module, true, FloatType::F16);
    }
    let scratch = Scratch::new(name);
    write(&scratch.model(), &config(), tensors, "model.safetensors");
    let mut notes = Notes(vec![]);
    quern_convert::convert(&scratch.model(), &scratch.out(), &Options::default(), &mut notes).unwrap();
    let file = ModelFile::open(&scratch.out()).unwrap();
    file.verify().unwrap();
    (file, notes.0)
}

#[test]
fn orders_that_cannot_be_shared_cost_f32() {
    let mut random = Random::new(32);
    let mut tensors = around(&mut random);
    let natural: Vec<usize> = (0..INNER).collect();
    let index = [0, 1].map(|_| shuffled(&mut random, HIDDEN, 32));
    let mut all = vec![];
    for (target, _, n, k) in LINEARS {
        let chosen = Chosen::new(&mut random, n, k, 4, 32, false);
        all.push((
            target,
            match target {
                "layers.0.q" => chosen.ordered(&index[0]),
                "layers.0.k" | "layers.0.up" => chosen.ordered(&index[1]),
                _ => chosen,
            },
        ));
    }
    let (file, notes) = convert("unequal", &all, &mut tensors);
    let scheme = |t: &str| file.tensor(t).unwrap().scheme.to_string();
    // The order of q wins over k and v by size; gate and up are as large, the first stays as it is.
    let schemes = ["q", "k", "v", "gate", "up"].map(|t| scheme(&format!("layers.0.{t}")));
    assert_eq!(schemes, ["int4 g32 zero", "f32", "f32", "int4 g32 zero", "f32"]);
    assert!(file.tensor("layers.0.attn_order").is_some() && file.tensor("layers.0.mlp_order").is_none());
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen, &natural));
    let note = |text: &str| assert!(notes.iter().any(|n| n.contains(text)), "{text}: {notes:?}");
    note(
        "self_attn.k_proj and 1 more is stored as f32, the values its codes mean: its g_idx is not that of model.layers",
    );
    note("up_proj is stored as f32");
    note("3 tensor(s) have 4-bit codes as f32 values: the file is ");
}

#[test]
fn groups_that_do_not_tile_cost_f32() {
    let mut random = Random::new(33);
    let mut tensors = around(&mut random);
    let natural: Vec<usize> = (0..INNER).collect();
    let mut all = vec![];
    for (target, _, n, k) in LINEARS {
        let group = match target {
            "layers.0.o" => 24,
            "layers.0.up" => 8,
            _ => 32,
        };
        let mut chosen = Chosen::new(&mut random, n, k, 4, group, target == "layers.0.q");
        match target {
            // Sizes 31 and 33.
            "layers.0.q" => chosen.index[31] = 1,
            // In order, but for one column that comes early.
            "layers.0.down" => chosen.index.swap(0, 95),
            _ => {}
        }
        all.push((target, chosen));
    }
    let down = sorted(&all[6].1.index);
    let (file, notes) = convert("untiled", &all, &mut tensors);
    let schemes =
        ["q", "k", "o", "up", "down"].map(|t| file.tensor(&format!("layers.0.{t}")).unwrap().scheme.to_string());
    assert_eq!(schemes, ["f32", "int4 g32 zero", "f32", "f32", "int4 g32 zero"]);
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen, &down));
    assert_ne!(down, natural);
    let note = |text: &str| assert!(notes.iter().any(|n| n.contains(text)), "{text}: {notes:?}");
    note("q_proj is stored as f32, the values its codes mean: the groups of g_idx have different sizes");
    note("o_proj is stored as f32, the values its codes mean: groups of 24 columns are no multiple of 16");
    note("groups of 8 columns are no multiple of 16");
}

/// Floats and tensors of one group take their neighbours' order; `dynamic` may skip any module.
#[test]
fn floats_follow_their_neighbours() {
    for quant in [Quant::Keep, Quant::F16, Quant::Int4] {
        let mut random = Random::new(34);
        let mut tensors = around(&mut random);
        let index = [HIDDEN, HIDDEN, INNER].map(|k| shuffled(&mut random, k, 16));
        let mut all = vec![];
        for (target, module, n, k) in LINEARS {
            let chosen = match target {
                "layers.0.v" | "layers.0.gate" => {
                    let values: Vec<f32> = (0..n * k).map(|_| random.weight()).collect();
                    let bytes = floats(FloatType::BF16, &values);
                    tensors.insert(format!("{module}.weight"), ("BF16", vec![n, k], bytes));
                    continue;
                }
                "layers.0.q" => Chosen::new(&mut random, n, k, 4, 16, true).ordered(&index[0]),
                "layers.0.up" => Chosen::new(&mut random, n, k, 8, 16, true).ordered(&index[1]),
                "layers.0.down" => Chosen::new(&mut random, n, k, 3, 16, true).ordered(&index[2]),
                _ => Chosen::new(&mut random, n, k, 4, k, true),
            };
            chosen.gptq(&mut tensors, module, true, FloatType::F16);
            all.push((target, chosen));
        }
        let scratch = Scratch::new(&format!("follow-{quant:?}"));
        let mut config = gptq_config("gptq", 4, 16, true);
        config["quantization_config"]["dynamic"] = json!({ "-:.*v_proj": {}, "+:.*up_proj": { "bits": 8 } });
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        let options = Options { quant, lm_head: Some(Quant::Keep), ..Options::default() };
        let (report, file) = scratch.convert(&options).unwrap();
        let down = sorted(&index[2]);
        all.iter().for_each(|(target, chosen)| check(&file, target, chosen, &down));
        for (target, module, n, k) in LINEARS.into_iter().filter(|l| ["layers.0.v", "layers.0.gate"].contains(&l.0)) {
            let source = &tensors[&format!("{module}.weight")].2;
            let (rows, cols) = origin(&file, target, n, k, &down);
            let view = file.tensor(target).unwrap();
            for (row, col) in (0..n).flat_map(|row| (0..k).map(move |col| (row, col))) {
                let expected = FloatType::BF16.read(source, rows[row] * k + cols[col]);
                let off = (view.at(row, col) - expected).abs();
                assert!(off <= if quant == Quant::Int4 { 0.13 } else { 0.0 }, "{target} [{row}, {col}]");
            }
        }
        assert_eq!(report.verified.nearest > 0, quant == Quant::Int4);
        assert!(file.tensor("layers.0.attn_order").is_some() && file.tensor("layers.0.o_order").is_none());
    }
}

#[test]
fn auto_round_packs_like_gptq() {
    for (packing, sym, v1) in [
        ("auto_round", true, false),
        ("auto_round:gptqmodel", false, false),
        ("auto_round:auto_gptq", true, true),
        ("auto_round:auto_gptq", false, true),
        ("auto_round:gptq", false, true),
    ] {
        let mut random = Random::new(35);
        let mut tensors = around(&mut random);
        let mut all = vec![];
        for (target, module, n, k) in LINEARS {
            let group = if target == "layers.0.k" { 16 } else { 32 };
            let chosen = Chosen::new(&mut random, n, k, 4, group, sym);
            assert!(chosen.scales.iter().any(|&s| s < 0.0));
            chosen.gptq(&mut tensors, module, v1, FloatType::F16);
            tensors.remove(&format!("{module}.g_idx"));
            all.push((target, chosen));
        }
        let scratch = Scratch::new(&format!("round-{v1}-{sym}"));
        let mut config = config();
        config["quantization_config"] = json!({ "quant_method": "auto-round", "packing_format": packing, "bits": 4,
            "group_size": 32, "sym": sym, "data_type": "int", "autoround_version": "0.16.1",
            "extra_config": { "model.layers.0.self_attn.k_proj": { "group_size": 16 } } });
        // Where modules differ, only a g_idx could say that `down` has groups of 32: they divide its columns.
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        let (_, file) = scratch.convert(&Options::default()).unwrap();
        let natural: Vec<usize> = (0..INNER).collect();
        all.iter().for_each(|(target, chosen)| check(&file, target, chosen, &natural));
        assert_eq!(file.tensor("layers.0.k").unwrap().scheme.coded(), Some((4, 16)));
    }
}
