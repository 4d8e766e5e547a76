//! Sampling where nothing is asked, by one rule for `run` and `serve`.

use quern_kernels::sample::SamplingParams;
use quern_models::Generation;

/// What the model's authors recommend in generation_config.json, and temperature 1 where they say nothing.
///
/// As in vLLM, `do_sample` is not looked at: a file that has numbers means them to be used, and most of those that have
/// none just leave transformers' default, greedy search, standing, which no chat is meant to be run with.
pub fn defaults(file: &Generation) -> SamplingParams {
    let off = SamplingParams::default();
    SamplingParams {
        temperature: file.temperature.unwrap_or(off.temperature),
        top_k: file.top_k.unwrap_or(off.top_k),
        top_p: file.top_p.unwrap_or(off.top_p),
        min_p: file.min_p.unwrap_or(off.min_p),
        repetition_penalty: file.repetition_penalty.unwrap_or(off.repetition_penalty),
        ..off
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_decide_whether_or_not_they_sample() {
        for do_sample in [None, Some(false), Some(true)] {
            let file = Generation { temperature: Some(0.6), top_k: Some(20), do_sample, ..Generation::default() };
            assert_eq!(defaults(&file), SamplingParams { temperature: 0.6, top_k: 20, ..SamplingParams::default() });
            assert_eq!(defaults(&Generation { do_sample, ..Generation::default() }).temperature, 1.0);
        }
    }
}
