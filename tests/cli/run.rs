//! `quern run`: prompts from everywhere, answers as text and as JSON, limits, refusals, batches.

use std::{fs, io::Read, process::Stdio};

use serde_json::{Value, json};

use super::converted;
use crate::support::{
    fixture,
    program::{Ran, arg, command, interrupt, quern, quern_reads, wait_for},
};

const SLICE: &str = "models/smollm2-gptq-2layer";
const PROMPT: &str = "The harbour was quiet that evening.";
/// Greedy, with every token, so that answers have a known length.
const GREEDY: [&str; 3] = ["--temperature", "0", "--ignore-eos"];

fn with<'a>(args: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [args, more].concat()
}

#[test]
fn a_prompt_comes_from_a_flag_a_file_or_stdin() {
    let (scratch, file) = converted(SLICE);
    let run = with(&["run", arg(&file), "-n", "12"], &GREEDY);
    let asked = quern(&with(&run, &["-p", PROMPT])).ok();
    assert!(asked.out.trim().len() > 5 && asked.out.ends_with('\n'), "{asked:?}");
    let asked =
        asked.says(&["load", "first token", "prompt", "answer 12 tokens", "tokens/s", "cut off after 12 tokens"]);
    let path = scratch.write("prompt.txt", format!("{PROMPT}\n"));
    assert_eq!(quern(&with(&run, &["-f", arg(&path)])).ok().out, asked.out);
    assert_eq!(quern_reads(&run, PROMPT.as_bytes()).ok().out, asked.out);
    assert_eq!(quern_reads(&run, format!("{PROMPT}\n").as_bytes()).ok().out, asked.out);
    // A system prompt is part of the question: here it replaces the template's own, longer one.
    let tokens = |more: &[&str]| {
        let json = quern(&with(&run, &with(&["-p", PROMPT, "--json"], more))).ok().json();
        json["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(tokens(&["--system", "men"]) < tokens(&[]));
}

#[test]
fn raw_continues_the_text_itself() {
    let (_scratch, file) = converted(SLICE);
    let run = with(&["run", arg(&file), "-p", PROMPT, "-n", "12", "--json"], &GREEDY);
    let (chat, raw) = (quern(&run).ok().json(), quern(&with(&run, &["--raw"])).ok().json());
    let tokens = |json: &Value| json["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&chat) > tokens(&raw) + 8, "the template adds its own tokens");
    quern(&with(&run, &["--raw", "--system", "x"])).fails(&["--system", "no chat template"]);
    quern(&with(&run, &["--raw", "--template-arg", "a=1"])).fails(&["--template-arg", "no chat template"]);
    // A model without a template always continues, and says so.
    let (_scratch, file) = converted("models/llama");
    let run = with(&["run", arg(&file), "-p", "Hello", "-n", "3"], &GREEDY);
    quern(&run).ok().says(&["no chat template", "continues your text"]);
}

#[test]
fn json_has_the_answer_and_its_numbers() {
    let (_scratch, file) = converted(SLICE);
    let run = with(&["run", arg(&file), "-p", PROMPT, "-n", "9"], &GREEDY);
    let text = quern(&run).ok().out;
    let ran = quern(&with(&run, &["--json", "--seed", "5"])).ok();
    assert_eq!(ran.out.lines().count(), 1);
    let json = ran.json();
    assert_eq!(json["text"].as_str().unwrap().trim_end(), text.trim_end());
    assert_eq!(json["tokens"].as_array().unwrap().len(), 9);
    assert_eq!((&json["finish_reason"], &json["seed"]), (&json!("length"), &json!(5)));
    let usage = &json["usage"];
    let of = |key: &str| usage[key].as_u64().unwrap();
    assert_eq!((of("completion_tokens"), of("total_tokens")), (9, 9 + of("prompt_tokens")));
    for key in ["load_seconds", "first_token_seconds", "prompt_tokens_per_second", "generation_tokens_per_second"] {
        assert!(json["timings"][key].as_f64().unwrap() > 0.0, "{key}: {json}");
    }
}

#[test]
fn stop_texts_end_the_answer_and_are_not_shown() {
    let (_scratch, file) = converted(SLICE);
    let run = with(&["run", arg(&file), "-p", PROMPT, "--raw", "-n", "24", "--json"], &GREEDY);
    let whole = quern(&run).ok().json()["text"].as_str().unwrap().to_string();
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[characters.len() / 2..].iter().take(3).collect();
    let expected = whole.split(&stop).next().unwrap();
    let stopped = quern(&with(&run, &["--stop", &stop, "--stop", "never said"])).ok().json();
    assert_eq!((stopped["text"].as_str(), &stopped["finish_reason"]), (Some(expected), &json!("stop")), "{whole:?}");
    let unused = quern(&with(&run, &["--stop", "never said"])).ok().json();
    assert_eq!((unused["text"].as_str(), &unused["finish_reason"]), (Some(&whole[..]), &json!("length")));
}

#[test]
fn a_seed_decides_the_answer() {
    let (_scratch, file) = converted(SLICE);
    let run = ["run", arg(&file), "-p", PROMPT, "-n", "16", "--temperature", "1", "--ignore-eos", "--json"];
    let seeded = |seed: &str, threads: &str| {
        let json = quern(&with(&run, &["--seed", seed, "--threads", threads])).ok().json();
        (json["tokens"].clone(), json["text"].clone())
    };
    assert_eq!(seeded("7", "1"), seeded("7", "2"));
    assert_ne!(seeded("7", "1"), seeded("8", "1"));
    // Without a seed it differs, and the one that was drawn gives the same answer again.
    let (first, second) = (quern(&run).ok().json(), quern(&run).ok().json());
    assert_ne!(first["seed"], second["seed"]);
    assert_eq!(seeded(&first["seed"].to_string(), "2").0, first["tokens"]);
}

#[test]
fn sampling_flags_reach_the_sampler() {
    let (_scratch, file) = converted(SLICE);
    let run = with(&["run", arg(&file), "-p", PROMPT, "-n", "16", "--json"], &GREEDY);
    let tokens = |flags: &[&str]| -> Vec<u64> {
        let json = quern(&with(&run, flags)).ok().json();
        json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect()
    };
    let plain = tokens(&[]);
    let banned = format!("{}=-inf", plain[0]);
    assert!(!tokens(&["--logit-bias", &banned]).contains(&plain[0]));
    assert_eq!(tokens(&["--logit-bias", "77=1000"]), [77; 16]);
    let distinct = |tokens: &[u64]| tokens.iter().collect::<std::collections::HashSet<_>>().len();
    assert!(distinct(&tokens(&["--frequency-penalty", "50", "--presence-penalty", "50"])) == 16);
    let sampled = ["--temperature", "1", "--seed", "3"];
    let run = ["run", arg(&file), "-p", PROMPT, "-n", "16", "--ignore-eos", "--json"];
    let only = quern(&with(&run, &with(&sampled, &["--top-k", "1"]))).ok().json();
    assert_eq!(only["tokens"], json!(plain), "the likeliest alone is the greedy choice");
    quern(&with(&run, &["--temperature", "0", "--top-p", "0.5"])).ok().says(&["--top-p has no effect"]);
}

#[test]
fn a_full_context_is_said_and_not_hidden() {
    let (_scratch, file) = converted(SLICE);
    let long = "The men sat on the wall. ".repeat(20);
    let run = ["run", arg(&file), "--raw", "--temperature", "0", "--ignore-eos"];
    quern(&with(&run, &["--ctx", "32", "-p", &long])).fails(&["the prompt has", "the context holds 32", "raise --ctx"]);
    let ran = quern(&with(&run, &["--ctx", "32", "-p", "One two"])).ok();
    ran.says(&["the context is full", "of 32", "raise --ctx"]);
    let json = quern(&with(&run, &["--ctx", "32", "-p", "One two", "--json"])).ok().json();
    assert_eq!((&json["finish_reason"], &json["usage"]["total_tokens"]), (&json!("context"), &json!(32)));
    quern(&with(&run, &["--ctx", "8193", "-p", "x"])).misused(&["--ctx 8193", "8192"]);
    // The model itself ends at 256: there is nothing to raise.
    let (_scratch, file) = converted("models/llama");
    let ran = quern(&["run", arg(&file), "-p", &"abc ".repeat(200), "-n", "4"]).fails(&["256", "shorten the prompt"]);
    assert!(!ran.err.contains("raise"), "{}", ran.err);
}

#[test]
fn ctrl_c_ends_the_answer_and_keeps_what_there_is() {
    let (scratch, file) = converted(SLICE);
    let long = ["-n", "8000", "--ctx", "8192", "--ignore-eos"];
    let ask = with(&["run", arg(&file), "-p", PROMPT, "--temperature", "1", "--seed", "1"], &long);
    let mut child = command(&ask).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut begun = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut begun).unwrap();
    interrupt(&child);
    let ran = Ran::new(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{ran:?}");
    ran.says(&["[interrupted]", "tokens/s", "the answer is not complete"]);

    // A batch says how far it came, and goes on later.
    let rows = [json!({"prompt": "short", "max_tokens": 2}), json!({"prompt": "long", "temperature": 1, "seed": 1})];
    let input = scratch.write("in.jsonl", format!("{}\n{}\n", rows[0], rows[1]));
    let output = scratch.write("out.jsonl", "");
    let batch = with(&["run", arg(&file), "--batch", arg(&input), "--out", arg(&output)], &long);
    let child = command(&batch).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for("the short row", || fs::read_to_string(&output).unwrap().contains('\n'));
    interrupt(&child);
    let ran = Ran::new(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{ran:?}");
    ran.says(&["interrupted: 1 rows were written", "goes on with the rest"]);
    let again = with(&["run", arg(&file), "--batch", arg(&input), "--out", arg(&output)], &["-n", "3"]);
    quern(&again).ok().says(&["1 rows answered", "1 were there already"]);
}

#[test]
fn a_file_without_a_tokenizer_says_so() {
    let (scratch, _) = converted("models/llama");
    let dir = scratch.copy(&fixture("models/llama"), "bare");
    fs::remove_file(dir.join("tokenizer.json")).unwrap();
    let file = scratch.at("bare.qrn");
    quern(&["convert", arg(&dir), "--out", arg(&file)]).ok().says(&["note:", "no tokenizer.json"]);
    quern(&["info", arg(&file)]).ok().prints(&["tokenizer    none"]);
    quern(&["run", arg(&file), "-p", "x"]).fails(&["bare.qrn", "no tokenizer", "tokenizer.json"]);
}

#[test]
fn threads_that_cannot_be_had_are_refused() {
    let (_scratch, file) = converted("models/llama");
    let ran = quern(&["run", arg(&file), "-p", "x", "-n", "1", "--threads", "1000000"]);
    assert!(matches!(ran.code, Some(1 | 2)) && ran.err.contains("threads"), "{ran:?}");
}

#[test]
fn prompts_that_are_none_are_refused() {
    let (scratch, file) = converted(SLICE);
    let run = ["run", arg(&file)];
    quern(&with(&run, &["-p", ""])).fails(&["the prompt is empty"]);
    quern(&run).fails(&["the prompt is empty"]);
    quern(&with(&run, &["-f", "/nonexistent/prompt"])).fails(&["/nonexistent/prompt", "No such file"]);
    let bytes = scratch.write("bytes.txt", [0xff, 0xfe, 0x41]);
    quern(&with(&run, &["-f", arg(&bytes)])).fails(&["bytes.txt", "UTF-8"]);
    quern_reads(&run, &[0xff, 0xfe]).fails(&["stdin", "UTF-8"]);
}

#[test]
fn flags_that_cannot_be_read_are_wrong_usage() {
    let (_scratch, file) = converted("models/llama");
    for (flags, word) in [
        (&["-n", "0"][..], "--max-tokens"),
        (&["-n", "many"], "--max-tokens"),
        (&["--activations", "f64"], "f32, int8"),
        (&["--kv", "int4"], "f16, f32, int8"),
        (&["--logit-bias", "5"], "ID=NUMBER"),
        (&["--template-arg", "x"], "KEY=VALUE"),
        (&["--seed=-1"], "--seed"),
        (&["-f", "y"], "cannot be used with"),
        (&["--batch", "y", "--out", "z"], "cannot be used with"),
        (&["--out", "z"], "--batch"),
    ] {
        quern(&with(&["run", arg(&file), "-p", "x"], flags)).misused(&[word]);
    }
}

#[test]
fn values_out_of_range_are_wrong_usage() {
    let (_scratch, file) = converted("models/llama");
    for (flags, word) in [
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is NaN"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--min-p", "2"], "min_p is 2"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0"),
        (["--stop", ""], "stop text is empty"),
    ] {
        quern(&with(&["run", arg(&file), "-p", "x"], &flags)).misused(&[word]);
    }
    let run = ["run", arg(&file), "-p", "x", "--logit-bias", "320=1"];
    quern(&run).misused(&["token 320", "320 tokens"]);
}

#[test]
fn a_batch_goes_on_where_it_stopped() {
    let (scratch, file) = converted(SLICE);
    let rows = [
        json!({"id": "a", "prompt": "Hello"}).to_string(),
        json!({"id": 2, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}).to_string(),
        "{\"prompt\": \"unnamed\"}".to_string(),
        String::new(),
        "no json".to_string(),
        json!({"id": "bad", "prompt": "x", "max_token": 3}).to_string(),
        json!({"id": "neither"}).to_string(),
    ];
    let (input, output) = (scratch.write("in.jsonl", rows.join("\n")), scratch.at("out.jsonl"));
    let batch = ["run", arg(&file), "--batch", arg(&input), "--out", arg(&output), "-n", "5", "--temperature", "0"];
    quern(&batch).fails(&["6 rows answered, 3 of them with an error, 0 were there already"]);
    let text = fs::read_to_string(&output).unwrap();
    let answers = |text: &str| -> Vec<Value> { text.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let all = answers(&text);
    let by_line = |line: usize| all.iter().find(|row| row["line"] == line).unwrap();
    assert_eq!((&by_line(1)["id"], &by_line(2)["id"], by_line(3).get("id")), (&json!("a"), &json!(2), None));
    assert!(by_line(1)["text"].is_string());
    for (line, word) in [(5, "no JSON"), (6, "max_token"), (7, "neither")] {
        assert!(by_line(line)["error"]["message"].as_str().unwrap().contains(word), "{}", by_line(line));
    }
    // Rows with an error are tried again; the same error is not written twice.
    quern(&batch).fails(&["3 rows answered, 3 of them with an error, 3 were there already"]);
    assert_eq!(fs::read_to_string(&output).unwrap(), text);

    // Cut in the middle of the last line, as by a crash: that row is answered again, the same way.
    fs::write(&output, &text[..text.len() - 5]).unwrap();
    quern(&batch).fails(&["3 of them with an error"]);
    let sorted = |mut rows: Vec<Value>| {
        rows.sort_by_key(|row| row["line"].as_u64());
        rows
    };
    assert_eq!(sorted(answers(&fs::read_to_string(&output).unwrap())), sorted(all));

    // A file of something else is not written to.
    let letter = scratch.write("letter.txt", "Dear reader,\n");
    let other = ["run", arg(&file), "--batch", arg(&input), "--out", arg(&letter)];
    quern(&other).fails(&["letter.txt", "line 1", "give another --out"]);
    assert_eq!(fs::read_to_string(&letter).unwrap(), "Dear reader,\n");
    let missing = ["run", arg(&file), "--batch", "/nonexistent/in.jsonl", "--out", arg(&output)];
    quern(&missing).fails(&["/nonexistent/in.jsonl"]);
}
