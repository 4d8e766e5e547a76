use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::args::tests::parse;
use super::chat::{Lines, Typed};
use super::*;
use crate::engine::{Event, Finish, Request};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama/tokenizer.json");
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}";
const EOS: u32 = 2;

/// Answers every prompt with the prompt itself and EOS.
struct Echo {
    context: usize,
    next: u64,
    requests: Vec<Request>,
    running: BTreeMap<u64, (usize, usize)>, // id -> (index in requests, tokens generated)
    ended: Vec<Event>,
    /// Sets this flag once so many tokens were generated, as Ctrl-C does.
    interrupt: Option<(usize, Arc<AtomicBool>)>,
    generated: usize,
}

impl Echo {
    fn new(context: usize) -> Echo {
        let (requests, running, ended) = (Vec::new(), BTreeMap::new(), Vec::new());
        Echo { context, next: 0, requests, running, ended, interrupt: None, generated: 0 }
    }
}

impl Generator for Echo {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.running.insert(self.next, (self.requests.len(), 0));
        self.requests.push(request);
        self.next += 1;
        Ok(self.next - 1)
    }

    fn cancel(&mut self, request: u64) {
        if self.running.remove(&request).is_some() {
            self.ended.push(Event::Finished { request, finish: Finish::Cancelled });
        }
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        events.append(&mut self.ended);
        for (id, (index, generated)) in std::mem::take(&mut self.running) {
            let request = &self.requests[index];
            let token = request.prompt.get(generated).copied().unwrap_or(EOS);
            events.push(Event::Token { request: id, id: token, logprob: None, top: vec![] });
            self.generated += 1;
            let finish = if request.stop_ids.contains(&token) && !request.ignore_eos {
                Finish::Stop
            } else if generated + 1 == request.max_tokens {
                Finish::Length
            } else if request.prompt.len() + generated + 1 == self.context {
                Finish::Context
            } else {
                self.running.insert(id, (index, generated + 1));
                continue;
            };
            events.push(Event::Finished { request: id, finish });
        }
        if let Some((_, flag)) = self.interrupt.take_if(|(after, _)| self.generated >= *after) {
            flag.store(true, Ordering::Relaxed);
        }
        Ok(!self.running.is_empty())
    }

    fn max_context(&self) -> usize {
        self.context
    }
}

/// A model that echoes, run with some flags.
struct Bench {
    engine: Echo,
    text: TextModel,
    settings: Settings,
    flag: Arc<AtomicBool>,
}

impl Bench {
    fn new(flags: &[&str]) -> Bench {
        let json = std::fs::read(TOKENIZER).unwrap();
        let mut text = TextModel::new(&json, Some(TEMPLATE), Some("<|bos|>"), Some("<|eos|>"), &[EOS]).unwrap();
        let args = parse(flags).unwrap();
        if args.raw {
            text = text.raw();
        }
        let settings = Settings::new(&args, &quern_models::Generation::default(), 320).unwrap();
        Bench { engine: Echo::new(1000), text, settings, flag: Arc::default() }
    }

    fn session(&mut self) -> Session<'_, Echo> {
        Session {
            engine: &mut self.engine,
            text: &self.text,
            settings: &self.settings,
            most_context: 2000,
            interrupted: self.flag.clone(),
            load: Duration::from_millis(5),
            device: "2 threads".into(),
        }
    }

    fn once(&mut self, prompt: &str) -> String {
        let mut out = Vec::new();
        once(&mut self.session(), prompt, false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn json(&mut self, prompt: &str) -> Value {
        let mut out = Vec::new();
        let got = once(&mut self.session(), prompt, true, &mut out);
        assert!(matches!(got, Ok(()) | Err(RunError::Cut)), "{got:?}");
        serde_json::from_slice(&out).unwrap()
    }

    fn chat(&mut self, typed: &[&str]) -> String {
        let mut typed = Script(typed.iter().map(|line| line.to_string()).rev().collect());
        let mut out = Vec::new();
        chat::run(&mut self.session(), &mut typed, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }
}

/// Lines to come, last first; `^C` is Ctrl-C.
struct Script(Vec<String>);

impl Lines for Script {
    fn read(&mut self, _: &str) -> Result<Typed, RunError> {
        Ok(match self.0.pop() {
            Some(line) if line == "^C" => Typed::Interrupt,
            Some(line) => Typed::Line(line),
            None => Typed::End,
        })
    }
}

#[test]
fn an_answer_streams_to_stdout() {
    assert_eq!(Bench::new(&[]).once("Grüße 😀\n"), "<u:Grüße 😀>\n");
    assert_eq!(Bench::new(&["--system", "be"]).once("x"), "<s:be><u:x>\n");
    assert_eq!(Bench::new(&["--raw"]).once("once upon\n"), "once upon\n");
}

#[test]
fn control_tokens_are_not_shown() {
    assert_eq!(Bench::new(&["--raw"]).once("a<|bos|>b"), "ab\n");
    let mut bench = Bench::new(&["--raw", "--ignore-eos", "-n", "4"]);
    assert_eq!(bench.once("a"), "a\n");
    assert_eq!(bench.json("a")["tokens"], json!([67, EOS, EOS, EOS]));
}

#[test]
fn json_has_everything() {
    let got = Bench::new(&["--seed", "9"]).json("hi");
    assert_eq!(got["text"], "<u:hi>");
    assert_eq!(got["finish_reason"], "stop");
    let tokens = got["tokens"].as_array().unwrap().len();
    assert_eq!(got["tokens"][tokens - 1], EOS);
    assert_eq!(
        got["usage"],
        json!({"prompt_tokens": tokens - 1, "completion_tokens": tokens, "total_tokens": 2 * tokens - 1})
    );
    assert_eq!(got["seed"], 9);
    assert_eq!(got["timings"]["load_seconds"], 0.005);
    assert!(got["timings"]["generation_tokens_per_second"].is_number());
}

#[test]
fn stop_texts_end_the_answer_unseen() {
    let mut bench = Bench::new(&["--stop", "lo wo", "--stop", "zzz"]);
    assert_eq!(bench.once("hello world"), "<u:hel\n");
    let got = bench.json("hello world");
    assert_eq!((&got["text"], &got["finish_reason"]), (&json!("<u:hel"), &json!("stop")));
    assert!(bench.engine.running.is_empty());
}

#[test]
fn limits_are_told_apart() {
    let got = Bench::new(&["-n", "3"]).json("hello world");
    assert_eq!((&got["finish_reason"], got["tokens"].as_array().unwrap().len()), (&json!("length"), 3));
    let mut bench = Bench::new(&["--raw"]);
    bench.engine.context = 5;
    let got = bench.json("abc");
    assert_eq!((&got["finish_reason"], &got["text"]), (&json!("context"), &json!("ab")));
    let answer = answer::answer(&mut bench.session(), vec![67, 67, 67], |_| Ok(())).unwrap();
    let start = answer.summary(&bench.session(), Some(Duration::from_millis(5)));
    assert!(start.starts_with("[2 threads | load 0.01 s | first token"), "{start}");
    let summary = answer.summary(&bench.session(), None);
    assert!(
        summary.contains("3 prompt + 2 answer tokens of 5; the model was made for up to 2000; raise --ctx"),
        "{summary}"
    );
}

#[test]
fn a_prompt_without_room_is_refused_with_numbers() {
    let mut bench = Bench::new(&["--raw"]);
    bench.engine.context = 3;
    let error = once(&mut bench.session(), "abc", false, &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(
        error,
        "the prompt has 3 tokens and the context holds 3, of which the answer needs at least 1; \
         the model was made for up to 2000 tokens: raise --ctx, or shorten the prompt"
    );
    for mut bench in [bench, Bench::new(&[])] {
        let error = once(&mut bench.session(), "", false, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("prompt is empty"), "{error}");
    }
}

#[test]
fn ctrl_c_ends_an_answer() {
    let mut bench = Bench::new(&["--raw"]);
    bench.engine.interrupt = Some((2, bench.flag.clone()));
    let got = bench.json("abcdef");
    assert_eq!((&got["finish_reason"], &got["text"]), (&json!("interrupted"), &json!("ab")));
    // What there is of it is shown, but it is no success.
    for json in [false, true] {
        let mut bench = Bench::new(&["--raw"]);
        bench.engine.interrupt = Some((2, bench.flag.clone()));
        let mut out = Vec::new();
        let got = once(&mut bench.session(), "abcdef", json, &mut out);
        assert!(matches!(got, Err(RunError::Cut)), "{got:?}");
        assert!(json || out == b"ab\n");
    }
}

#[test]
fn a_reader_that_went_away_ends_the_answer() {
    struct Gone;
    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut bench = Bench::new(&[]);
    let got = once(&mut bench.session(), "hello", false, &mut Gone);
    assert!(matches!(got, Err(RunError::Io { source, .. }) if source.kind() == ErrorKind::BrokenPipe));
    assert!(bench.engine.running.is_empty());
}

#[test]
fn a_chat_remembers_and_forgets() {
    let mut bench = Bench::new(&["--system", "S"]);
    let got = bench.chat(&["a", "b\\", "c", "/reset", "d", "/exit", "never"]);
    assert_eq!(got, "<s:S><u:a>\n<s:S><u:a><a:<s:S><u:a>><u:b\nc>\n<s:S><u:d>\n");
}

#[test]
fn chat_commands() {
    let mut bench = Bench::new(&[]);
    let got = bench.chat(&["", "/help", "/nothing", " /etc is a folder"]);
    assert_eq!(got.lines().last(), Some("<u:/etc is a folder>"));
    assert!(got.starts_with("/reset"));
    assert_eq!(bench.engine.requests.len(), 1);
    // One Ctrl-C warns and drops what was begun, the second leaves.
    assert_eq!(bench.chat(&["begun\\", "^C", "x", "^C", "^C", "never"]), "<u:x>\n");
}

#[test]
fn a_chat_survives_what_it_cannot_answer() {
    let mut bench = Bench::new(&[]);
    bench.engine.context = 24;
    let long = "x".repeat(40);
    assert_eq!(bench.chat(&[&long, "a"]), "<u:a>\n");
    // An interrupted answer stays in the conversation.
    let mut bench = Bench::new(&[]);
    bench.engine.interrupt = Some((3, bench.flag.clone()));
    let got = bench.chat(&["a", "b"]);
    assert!(got.starts_with("<u:\n<u:a><a:<u:><u:b>"), "{got}");
}

#[test]
fn without_a_template_a_chat_continues_each_line() {
    assert_eq!(Bench::new(&["--raw"]).chat(&["one", "two"]), "one\ntwo\n");
}

#[test]
fn flags_that_need_a_template() {
    for flags in [&["--raw", "--system", "x", "-p", "y"][..], &["--raw", "--template-arg", "a=1", "-p", "y"]] {
        let error = run(Bench::new(flags).session(), &parse(flags).unwrap()).unwrap_err().to_string();
        assert!(error.contains("no chat template"), "{error}");
    }
}

/// A folder of its own for each test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("quern-run-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn rows(path: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    rows.sort_by_key(|row| row["line"].as_u64());
    rows
}

#[test]
fn a_batch_answers_every_row() {
    let folder = folder("batch");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let many: String = (0..40).map(|i| format!("{{\"prompt\": \"row {i}\"}}\n")).collect();
    let odd = "{\"id\": \"a\", \"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"max_tokens\": 2}\n\
               \n{\"prompt\": 5}\nnot json\n{\"prompt\": \"x\", \"max_token\": 1}\n{\"prompt\": \"x\", \"temperature\": -1}\n\
               {\"id\": 7, \"prompt\": \"stop here\", \"stop\": \" h\", \"metadata\": {\"k\": 1}}\n{\"id\": 7, \"prompt\": \"again\"}\n";
    let mut bytes = (many + odd).into_bytes();
    bytes.extend_from_slice(b"{\"prompt\": \"\xff\"}\n{\"prompt\": \"no line break\"}");
    std::fs::write(&input, bytes).unwrap();
    let mut bench = Bench::new(&["--seed", "3"]);
    let error = batch::run(&mut bench.session(), &input, &out).unwrap_err().to_string();
    assert!(error.starts_with("49 rows answered, 6 of them with an error, 0 were there"), "{error}");
    let got = rows(&out);
    assert_eq!(got.len(), 40 + 9);
    for (i, row) in got[..40].iter().enumerate() {
        assert_eq!((&row["text"], &row["line"]), (&json!(format!("<u:row {i}>")), &json!(i + 1)));
    }
    assert_eq!((&got[40]["id"], &got[40]["finish_reason"]), (&json!("a"), &json!("length")));
    let errors = ["`prompt` is 5", "line 44 is no JSON", "unknown field `max_token`", "temperature is -1"];
    for (row, expected) in got[41..45].iter().zip(errors) {
        let message = row["error"]["message"].as_str().unwrap();
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!((&got[45]["id"], &got[45]["text"]), (&json!(7), &json!("<u:stop")));
    assert_eq!((&got[46]["line"], &got[46]["id"]), (&json!(48), &Value::Null));
    assert_eq!(got[46]["error"]["message"], "id 7 was used on line 47");
    assert!(got[47]["error"]["message"].as_str().unwrap().contains("no JSON"));
    assert_eq!(got[48]["text"], "<u:no line break>");
    // Rows with one prompt are drawn with noise of their own.
    let seeds: std::collections::BTreeSet<u64> = bench.engine.requests.iter().map(|r| r.sampling.seed).collect();
    assert_eq!(seeds.len(), bench.engine.requests.len());
    // The same errors again are no news.
    let before = std::fs::read(&out).unwrap();
    let error = batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap_err().to_string();
    assert!(error.starts_with("6 rows answered, 6 of them with an error, 43 were there"), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), before);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_batch_goes_on_where_it_stopped() {
    let folder = folder("resume");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    std::fs::write(&input, "{\"prompt\": \"one\"}\n{\"id\": \"b\", \"prompt\": \"two\"}\n{\"prompt\": \"three\"}\n")
        .unwrap();
    // The second row is there, the third was cut short.
    std::fs::write(&out, "{\"line\": 2, \"id\": \"b\", \"text\": \"old\"}\n{\"line\":3,\"te").unwrap();
    batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap();
    let texts: Vec<Value> = rows(&out).iter().map(|row| row["text"].clone()).collect();
    assert_eq!(texts, ["<u:one>", "old", "<u:three>"]);
    // Nothing is left to do.
    let before = std::fs::read(&out).unwrap();
    let mut bench = Bench::new(&[]);
    batch::run(&mut bench.session(), &input, &out).unwrap();
    assert_eq!(std::fs::read(&out).unwrap(), before);
    assert!(bench.engine.requests.is_empty());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_batch_does_not_write_into_other_files() {
    let folder = folder("other");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    std::fs::write(&input, "{\"prompt\": \"one\"}\n").unwrap();
    for other in ["precious notes\nno line break", "no line break", "{\"prompt\": \"one\"}\n"] {
        std::fs::write(&out, other).unwrap();
        let error = batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap_err().to_string();
        assert!(error.contains("line 1 is") && error.contains("another --out"), "{error}");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), other);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_batch_tries_errors_again() {
    let folder = folder("errors");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    // A byte order mark is no part of the first row; zeros are what a crash left of the last.
    std::fs::write(&input, "\u{feff}{\"prompt\": \"one\"}\n{\"prompt\": \"two\"}\n").unwrap();
    let old = "{\"line\":1,\"error\":{\"message\":\"x\"}}\n";
    std::fs::write(&out, format!("{old}{{\"line\":2,\"te\0\0\0")).unwrap();
    batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap();
    let text = std::fs::read_to_string(&out).unwrap();
    assert!(text.starts_with(old) && !text.contains('\0'), "{text}");
    let texts: Vec<Value> = rows(&out).iter().map(|row| row["text"].clone()).collect();
    assert_eq!(texts, [json!(null), json!("<u:one>"), json!("<u:two>")]);
    let mut bench = Bench::new(&[]);
    batch::run(&mut bench.session(), &input, &out).unwrap();
    assert!(bench.engine.requests.is_empty());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_batch_has_its_output_for_itself() {
    let folder = folder("alone");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let failed = |input: &PathBuf, out: &PathBuf| {
        batch::run(&mut Bench::new(&[]).session(), input, out).unwrap_err().to_string()
    };
    // No input, no output.
    failed(&input, &out);
    failed(&folder, &out);
    assert!(!out.exists());
    std::fs::write(&input, "{\"prompt\": \"one\"}\n").unwrap();
    let error = failed(&input, &folder);
    assert!(error.contains("no regular file"), "{error}");
    let other = std::fs::File::create(&out).unwrap();
    other.lock().unwrap();
    let error = failed(&input, &out);
    assert!(error.contains("another process is writing it"), "{error}");
    drop(other);
    batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap();
    assert_eq!(rows(&out).len(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_interrupted_batch_keeps_what_is_done() {
    let folder = folder("interrupt");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let many: String = (0..40).map(|i| format!("{{\"prompt\": \"row {i}\"}}\n")).collect();
    std::fs::write(&input, many).unwrap();
    let mut bench = Bench::new(&[]);
    bench.engine.interrupt = Some((batch::IN_FLIGHT * 12, bench.flag.clone()));
    let error = batch::run(&mut bench.session(), &input, &out).unwrap_err().to_string();
    let done = rows(&out).len();
    assert!(error.contains(&format!("{done} rows were written")), "{error}");
    batch::run(&mut Bench::new(&[]).session(), &input, &out).unwrap();
    assert_eq!(rows(&out).len(), 40);
    std::fs::remove_dir_all(folder).unwrap();
}
