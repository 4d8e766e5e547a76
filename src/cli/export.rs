//! `quern export`: flags, a progress line, the closing table. The work is `quern_convert`'s.

use std::{error::Error, path::PathBuf};

use clap::{Args, ValueEnum};
use quern_convert::{ExportOptions, Format, GptqFormat, Progress, export};
use quern_models::FloatType;

use super::{
    Usage,
    convert::{Line, closing},
    print,
};

/// Flags of `quern export`.
#[derive(Debug, Args)]
#[command(
    after_help = "Codes, scales, zero-points and the order of columns are the file's own; what a format cannot hold \
exactly is refused by name. The export is read back and compared with the file before it takes its name, so that \
`quern convert` of it gives the same codes. gptq, awq and float write a folder that transformers loads; gguf writes one \
file of architecture llama, qwen2 or qwen3, with Q4_0, Q4_1, Q8_0 and float tensors."
)]
pub struct ExportArgs {
    /// A .qrn file
    file: PathBuf,
    /// What to write
    #[arg(long, value_enum)]
    to: To,
    /// Where to write: a folder, or a file for gguf [default: NAME-gptq, NAME-awq, NAME-float or NAME.gguf]
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    /// How --to gptq stores zero-points [default: gptq]
    #[arg(long, value_enum)]
    format: Option<FormatArg>,
    /// Type of all numbers of --to float [default: floats keep theirs, integers become f32, which is exact]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Replace an existing export
    #[arg(long)]
    force: bool,
}

/// [`Format`] as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    /// GPTQ: 2, 3, 4 and 8 bits, with zero-points and act-order
    Gptq,
    /// AWQ (gemm): 4 bits
    Awq,
    /// Floating-point numbers
    Float,
    /// GGUF, as llama.cpp reads it
    Gguf,
}

/// [`GptqFormat`] as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FormatArg {
    /// Zero-points less one, as most programs read them
    #[value(name = "gptq")]
    Gptq,
    /// Zero-points as they are
    #[value(name = "gptq_v2")]
    GptqV2,
}

/// [`FloatType`] as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    /// Half precision
    F16,
    /// The upper half of single precision
    Bf16,
    /// Single precision
    F32,
}

/// Runs the command.
pub fn main(args: ExportArgs) -> Result<(), Box<dyn Error>> {
    let format = match (args.to, args.format, args.dtype) {
        (To::Gptq, format, None) => {
            Format::Gptq(if format == Some(FormatArg::GptqV2) { GptqFormat::V2 } else { GptqFormat::V1 })
        }
        (To::Float, None, dtype) => Format::Float(dtype.map(|d| match d {
            DtypeArg::F16 => FloatType::F16,
            DtypeArg::Bf16 => FloatType::BF16,
            DtypeArg::F32 => FloatType::F32,
        })),
        (To::Awq, None, None) => Format::Awq,
        (To::Gguf, None, None) => Format::Gguf,
        (_, Some(_), _) => return Err(Usage("--format is for --to gptq".into()).into()),
        (_, _, Some(_)) => return Err(Usage("--dtype is for --to float".into()).into()),
    };
    let out = args.out.unwrap_or_else(|| name(&args.file, args.to).into());
    let options = ExportOptions { force: args.force, ..ExportOptions::new(format) };
    // Says what to do with a checkpoint; the export itself opens the file again.
    let file = super::open(&args.file)?;
    let mut line = Line::new()?;
    if let Some(draft) = file.draft() {
        let what = if draft.spec().draft_head.is_some() { "head" } else { "draft model" };
        line.note(&format!("the {what} behind the model is left out: other programs have it in a folder of its own"));
    }
    let result = export(&args.file, &out, &options, &mut line);
    line.clear();
    print(&closing(&result?))
}

/// `NAME-gptq` or `NAME.gguf`, after the file.
fn name(file: &std::path::Path, to: To) -> String {
    let stem = file.file_stem().map_or("model".into(), |s| s.to_string_lossy());
    match to {
        To::Gguf => format!("{stem}.gguf"),
        To::Gptq => format!("{stem}-gptq"),
        To::Awq => format!("{stem}-awq"),
        To::Float => format!("{stem}-float"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_named_after_the_file() {
        let file = std::path::Path::new("/models/SmolLM2-135M.qrn");
        assert_eq!(name(file, To::Gptq), "SmolLM2-135M-gptq");
        assert_eq!(name(file, To::Gguf), "SmolLM2-135M.gguf");
    }
}
