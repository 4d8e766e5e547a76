//! The flags of `quern run`, and what they mean for a model.

use std::path::PathBuf;

use clap::Args;
use quern_kernels::sample::{SampleError, SamplingParams};
use quern_models::Generation;
use serde_json::{Map, Value};

use super::RunError;
use crate::{cli::EngineArgs, engine::defaults, random};

/// Flags of `quern run`.
#[derive(Debug, Args)]
#[command(
    after_help = "Without -p, -f or --batch the prompt is read from stdin, or you chat if stdin is a terminal.\n\
    Sampling defaults are those of the model file, as for quern serve; what it does not say is temperature 1.\n\
    --temperature 0 takes the likeliest tokens."
)]
pub struct RunArgs {
    /// A .qrn file
    pub file: PathBuf,

    /// Prompt
    #[arg(short, long, value_name = "TEXT", group = "from")]
    pub prompt: Option<String>,
    /// File with the prompt
    #[arg(short = 'f', long = "file", value_name = "FILE", group = "from")]
    pub prompt_file: Option<PathBuf>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Variable of the chat template, e.g. enable_thinking=false (JSON, else text); repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = template_arg)]
    pub template_arg: Vec<(String, Value)>,

    /// Most tokens to generate [default: as many as fit]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Sampling")]
    pub max_tokens: Option<u32>,
    /// Text that ends the answer and is not shown; repeatable
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-text token
    #[arg(long, help_heading = "Sampling")]
    pub ignore_eos: bool,
    /// 0 takes the likeliest token, 1 samples as the model says, more is wilder
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Sampling")]
    pub temperature: Option<f32>,
    /// Only the K likeliest tokens; 0: all
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    pub top_k: Option<u32>,
    /// Only the likeliest tokens that hold this share of the probability; 1: all
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Only tokens at least this share as likely as the likeliest; 0: all
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub min_p: Option<f32>,
    /// Divides the logits of tokens seen in prompt and answer; 1: off
    #[arg(long, value_name = "R", allow_negative_numbers = true, help_heading = "Sampling")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from tokens of the answer; 0: off
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub presence_penalty: Option<f32>,
    /// Subtracted from tokens of the answer per occurrence; 0: off
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub frequency_penalty: Option<f32>,
    /// Added to the logit of a token; -inf forbids it; repeatable
    #[arg(long, value_name = "ID=X", value_parser = logit_bias, help_heading = "Sampling")]
    pub logit_bias: Vec<(u32, f32)>,
    /// Decides the noise: the same seed gives the same answer [default: random, and shown; 0 with --batch]
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    pub seed: Option<u64>,

    /// How the model is run.
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Print one JSON object at the end instead of the text
    #[arg(long, conflicts_with = "batch", help_heading = "Output")]
    pub json: bool,
    /// Answer every row of a JSONL file: {"prompt": ..} or {"messages": [..]}, optionally "id"
    #[arg(long, value_name = "IN.jsonl", requires = "out", conflicts_with = "from", help_heading = "Output")]
    pub batch: Option<PathBuf>,
    /// Where the answers of --batch go; rows that are there already are skipped,
    /// those with an error are tried again
    #[arg(long, value_name = "OUT.jsonl", requires = "batch", conflicts_with = "from", help_heading = "Output")]
    pub out: Option<PathBuf>,
}

impl RunArgs {
    /// Whether a flag says what a sampling parameter is.
    fn gives(&self, parameter: &str) -> bool {
        match parameter {
            "temperature" => self.temperature.is_some(),
            "top_p" => self.top_p.is_some(),
            "min_p" => self.min_p.is_some(),
            "repetition_penalty" => self.repetition_penalty.is_some(),
            _ => true, // files have no others
        }
    }
}

/// How to answer: flags, on top of the file's defaults.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub sampling: SamplingParams,
    pub max_tokens: usize,
    pub stops: Vec<String>,
    pub ignore_eos: bool,
    pub system: Option<String>,
    pub template_args: Map<String, Value>,
    /// Tokens the model knows.
    pub vocab: usize,
    /// What the user should know about the flags.
    pub notes: Vec<String>,
}

impl Settings {
    pub fn new(args: &RunArgs, file: &Generation, vocab: usize) -> Result<Settings, RunError> {
        let file = defaults(file);
        let sampling = SamplingParams {
            temperature: args.temperature.unwrap_or(file.temperature),
            top_k: args.top_k.unwrap_or(file.top_k),
            top_p: args.top_p.unwrap_or(file.top_p),
            min_p: args.min_p.unwrap_or(file.min_p),
            repetition_penalty: args.repetition_penalty.unwrap_or(file.repetition_penalty),
            presence_penalty: args.presence_penalty.unwrap_or(0.0),
            frequency_penalty: args.frequency_penalty.unwrap_or(0.0),
            penalty_last_n: None,
            logit_bias: args.logit_bias.clone(),
            seed: args.seed.unwrap_or_else(|| if args.batch.is_some() { 0 } else { random::seed() }),
        };
        let settings = Settings {
            notes: notes(args, &sampling),
            sampling,
            max_tokens: args.max_tokens.map_or(usize::MAX, |n| n as usize),
            stops: args.stop.clone(),
            ignore_eos: args.ignore_eos,
            system: args.system.clone(),
            template_args: args.template_arg.iter().cloned().collect(),
            vocab,
        };
        if let Err(error @ SampleError::Range { name, .. }) = settings.sampling.validate()
            && !args.gives(name)
        {
            let (path, flag) = (args.file.clone(), format!("--{}", name.replace('_', "-")));
            return Err(RunError::Defaults { path, reason: error.to_string(), flag });
        }
        settings.check().map_err(|reason| RunError::Flag { flag: "sampling", reason })?;
        Ok(settings)
    }

    /// Refuses what no model can do.
    pub fn check(&self) -> Result<(), String> {
        self.sampling.validate().map_err(|error| error.to_string())?;
        if let Some((token, _)) = self.sampling.logit_bias.iter().find(|(token, _)| *token as usize >= self.vocab) {
            return Err(format!("logit bias for token {token}, the vocabulary has {} tokens", self.vocab));
        }
        if self.stops.iter().any(String::is_empty) {
            return Err("a stop text is empty, expected at least one letter".to_string());
        }
        Ok(())
    }
}

/// Flags that do nothing as they stand.
fn notes(args: &RunArgs, sampling: &SamplingParams) -> Vec<String> {
    let given = [
        ("--top-k", args.top_k.is_some()),
        ("--top-p", args.top_p.is_some()),
        ("--min-p", args.min_p.is_some()),
        ("--seed", args.seed.is_some()),
    ];
    let idle: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    if idle.is_empty() || !sampling.is_greedy() {
        return Vec::new();
    }
    vec![format!("temperature is {}: {} has no effect; add --temperature 1", sampling.temperature, idle.join(", "))]
}

fn template_arg(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}` has no `=`, expected KEY=VALUE"))?;
    if key.is_empty() {
        return Err(format!("`{text}` has no key, expected KEY=VALUE"));
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
    Ok((key.to_string(), value))
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let (token, bias) = text.split_once('=').ok_or_else(|| format!("`{text}` has no `=`, expected ID=NUMBER"))?;
    let token = token.parse().map_err(|_| format!("`{token}` is no token id, expected a number from 0"))?;
    let bias = bias.parse().map_err(|_| format!("`{bias}` is no number, expected e.g. -2.5 or -inf"))?;
    Ok((token, bias))
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: RunArgs,
    }

    pub fn parse(flags: &[&str]) -> Result<RunArgs, clap::Error> {
        Command::try_parse_from(["run", "m.qrn"].iter().chain(flags)).map(|command| command.args)
    }

    fn settings(flags: &[&str], file: &Generation) -> Result<Settings, RunError> {
        Settings::new(&parse(flags).unwrap(), file, 100)
    }

    fn authors() -> Generation {
        Generation {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.9),
            repetition_penalty: Some(1.1),
            do_sample: Some(true),
            ..Generation::default()
        }
    }

    #[test]
    fn the_file_decides_until_a_flag_does() {
        let s = settings(&["--seed", "7"], &authors()).unwrap().sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.repetition_penalty, s.seed), (0.6, 20, 0.9, 1.1, 7));
        let s = settings(&["--temperature", "0", "--top-k", "5"], &authors()).unwrap().sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p), (0.0, 5, 0.9));
    }

    #[test]
    fn it_samples_as_the_server_does() {
        for file in [authors(), Generation { do_sample: None, ..authors() }, Generation::default()] {
            let seed = settings(&[], &file).unwrap().sampling.seed;
            let own = SamplingParams { seed, ..settings(&[], &file).unwrap().sampling };
            assert_eq!(own, SamplingParams { seed, ..defaults(&file) });
        }
        let notes = settings(&["--temperature", "0", "--top-p", "0.5", "--seed", "1"], &authors()).unwrap().notes;
        assert_eq!(notes, ["temperature is 0: --top-p, --seed has no effect; add --temperature 1"]);
    }

    #[test]
    fn seeds_differ_unless_given() {
        let seed = || settings(&[], &authors()).unwrap().sampling.seed;
        let first = seed();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert_ne!(first, seed());
    }

    #[test]
    fn template_args_are_json_or_text() {
        let flags = ["--template-arg", "a=false", "--template-arg", "b=x=y", "--template-arg", "c=[1, \"z\"]"];
        let args = settings(&flags, &authors()).unwrap().template_args;
        assert_eq!(Value::from(args), serde_json::json!({"a": false, "b": "x=y", "c": [1, "z"]}));
        for bad in ["a", "=1"] {
            let error = parse(&["--template-arg", bad]).unwrap_err().to_string();
            assert!(error.contains("expected KEY=VALUE"), "{error}");
        }
    }

    #[test]
    fn biases_are_numbers_for_known_tokens() {
        let s = settings(&["--logit-bias", "5=-2.5", "--logit-bias", "6=-inf"], &authors()).unwrap().sampling;
        assert_eq!(s.logit_bias, [(5, -2.5), (6, f32::NEG_INFINITY)]);
        for (bad, message) in [("x=1", "no token id"), ("5=x", "no number"), ("5", "no `=`")] {
            let error = parse(&["--logit-bias", bad]).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let error = settings(&["--logit-bias", "100=1"], &authors()).unwrap_err().to_string();
        assert!(error.contains("token 100, the vocabulary has 100 tokens"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let bad: [(&[&str], &str); 4] = [
            (&["--temperature", "-1"], "temperature is -1"),
            (&["--top-p", "0"], "top_p is 0"),
            (&["--min-p", "nan"], "min_p is NaN"),
            (&["--stop", ""], "stop text is empty"),
        ];
        for (flags, message) in bad {
            let error = settings(flags, &authors()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        assert!(parse(&["-n", "0"]).is_err());
    }

    #[test]
    fn defaults_out_of_range_are_the_files_fault() {
        let file = Generation { top_p: Some(3.0), ..authors() };
        let error = settings(&[], &file).unwrap_err();
        assert!(matches!(error, RunError::Defaults { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("m.qrn: ") && text.contains("top_p is 3") && text.ends_with("give --top-p"), "{text}");
        assert_eq!(settings(&["--top-p", "0.5"], &file).unwrap().sampling.top_p, 0.5);
        assert!(matches!(settings(&["--top-p", "4"], &file), Err(RunError::Flag { .. })));
    }

    #[test]
    fn flags_that_exclude_or_need_each_other() {
        for flags in [
            &["-p", "x", "-f", "y"][..],
            &["--batch", "x"],
            &["--out", "x"],
            &["--batch", "x", "--out", "y", "-p", "z"],
            &["--batch", "x", "--out", "y", "--json"],
        ] {
            assert!(parse(flags).is_err(), "{flags:?}");
        }
        assert!(parse(&["--batch", "x", "--out", "y"]).is_ok());
    }
}
