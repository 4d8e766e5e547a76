//! From what the engine does to what the client reads: whole answers and streams, for chat and completions alike.
//!
//! A choice is a series of [`Delta`]s. A stream sends each; a whole answer is their sum, so both say the same.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time};

use super::{
    aside,
    constrain::Form,
    run::{Chosen, Run, Update, failed},
    with_list,
};
use crate::{
    engine::{Finish, Request},
    server::{ApiError, Reply, State},
    text::{TextModel, TextStream, Utf8Stream},
    tools::{Part, ToolCallParser, ToolSet},
};

/// Chunks that wait for a slow reader; further ones wait as events of the engine.
const WAITING: usize = 64;

/// A request that has been understood.
#[derive(Debug)]
pub struct Task {
    /// Which endpoint answers.
    pub kind: Kind,
    /// `n` for each prompt, in order.
    pub requests: Vec<Request>,
    /// What every choice must keep to.
    pub form: Option<Form>,
    /// Choices of each prompt.
    pub n: usize,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Answer as it comes.
    pub stream: bool,
    /// Count the tokens at a stream's end.
    pub include_usage: bool,
}

/// What an endpoint makes of deltas.
#[derive(Debug)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat {
        /// What the model may call.
        tools: Option<ToolSet>,
    },
    /// `/v1/completions`; the texts of the prompts where they are to be repeated.
    Completion {
        /// One for each prompt, or none.
        echo: Vec<String>,
    },
}

/// What came to a choice.
#[derive(Debug, Default)]
struct Delta {
    text: String,
    /// Calls of tools.
    calls: Vec<Value>,
    tokens: Vec<Chosen>,
    finish: Option<&'static str>,
}

impl Delta {
    /// A call that begins, or more of the arguments of the last one.
    fn call(&mut self, call: Value) {
        match self.calls.last_mut().filter(|last| last["index"] == call["index"]) {
            Some(last) => {
                if let Value::String(text) = &mut last["function"]["arguments"] {
                    *text += call["function"]["arguments"].as_str().unwrap_or_default();
                }
            }
            None => self.calls.push(call),
        }
    }

    /// Logprobs to be written.
    fn entries(&self) -> usize {
        self.tokens.iter().map(|t| 1 + t.top.len()).sum()
    }

    fn add(&mut self, more: Delta) {
        self.text += &more.text;
        more.calls.into_iter().for_each(|call| self.call(call));
        self.tokens.extend(more.tokens);
        self.finish = more.finish.or(self.finish);
    }
}

/// Answers a task. `id` names the request, which arrived then.
pub async fn answer(state: Arc<State>, id: &str, arrived: Instant, mut task: Task) -> Result<Reply, ApiError> {
    let late = late(&state, arrived);
    if let Some(form) = task.form.take() {
        let constraint = in_time(late, form.made(&state.grammars)).await??;
        task.requests.iter_mut().for_each(|r| r.constraint.clone_from(&constraint));
    }
    let text = match task.kind {
        Kind::Chat { .. } => state.text.stream(&task.stops),
        // What continues a text keeps its space.
        Kind::Completion { .. } => TextStream::new(task.stops.iter().cloned(), false),
    };
    let prompts = match &task.kind {
        Kind::Chat { .. } => vec![],
        Kind::Completion { .. } => task.requests.iter().map(|r| r.prompt.clone()).collect(),
    };
    let logprobs = task.requests.iter().any(|r| r.logprobs.is_some());
    let tools = match &task.kind {
        Kind::Chat { tools } => tools.clone(),
        Kind::Completion { .. } => None,
    };
    let progress = Progress { calls: tools.as_ref().map(ToolSet::parser), ..Progress::default() };
    let run = Run::start(state.clone(), arrived, std::mem::take(&mut task.requests), &text, tools)?;
    let chat = matches!(task.kind, Kind::Chat { .. });
    let shape = Shape {
        id: format!("{}-{id}", if chat { "chatcmpl" } else { "cmpl" }),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        logprobs,
        choices: vec![progress; run.choices()],
        prompts,
        task,
        state,
    };
    if shape.task.stream { Ok(stream(run, shape, late)) } else { whole(run, shape, late).await }
}

async fn whole(mut run: Run, mut shape: Shape, late: Late) -> Result<Reply, ApiError> {
    let mut sums: Vec<Delta> = shape.choices.iter().map(|_| Delta::default()).collect();
    let mut entries = 0;
    while let Some((at, update)) = in_time(late, run.next()).await?? {
        let delta = shape.delta(at, update);
        entries += delta.entries();
        if entries > MOST_ENTRIES {
            let message = format!(
                "the answer has more than {MOST_ENTRIES} logprobs, which are not kept in memory; stream it, or ask for \
                 fewer tokens, choices or logprobs"
            );
            return Err(ApiError::invalid(message).at("logprobs"));
        }
        sums[at].add(delta);
    }
    let mut body = shape.head(if shape.is_chat() { "chat.completion" } else { "text_completion" }, vec![]);
    body["usage"] = run.usage(shape.task.n);
    body["timings"] = run.timings(shape.task.n);
    let lane = shape.state.lanes.write.clone();
    let write = move || {
        let choice = |(at, sum)| shape.choice(at, sum).to_string();
        let choices: Vec<String> = sums.into_iter().enumerate().map(choice).collect();
        with_list(&body, "choices", &choices)
    };
    let body = if entries > LARGE { in_time(late, aside(Some(&lane), write)).await?? } else { write() };
    Ok(Reply::text(200, body))
}

/// Logprobs of an answer, or of a part of it, that is written on another thread.
const LARGE: usize = 2048;

/// Most logprobs of an answer that is not streamed: some hundred MB.
const MOST_ENTRIES: usize = 4 << 20;

fn stream(run: Run, shape: Shape, late: Late) -> Reply {
    let (sender, receiver) = mpsc::channel(WAITING);
    let (unread, id, state) = (run.unread(), shape.id.clone(), shape.state.clone());
    tokio::spawn(async move {
        let sent = tokio::select! {
            biased;
            // Nobody reads any more; dropping the run cancels it.
            () = sender.closed() => return,
            // Nor soon enough: what waits is dropped with the run.
            failure = unread.over() => {
                (state.note)(&format!("{id}: {failure}"));
                Ok(Err(failed(&failure)))
            }
            sent = in_time(late, send_all(run, shape, &sender)) => sent,
        };
        if let Err(error) = sent.and_then(|sent| sent) {
            // A reader so slow that there is no room even for this must make do with the end.
            let _ = sender.try_send(event(&error.body()));
        }
    });
    Reply::Events(receiver)
}

async fn send_all(mut run: Run, mut shape: Shape, sender: &mpsc::Sender<Bytes>) -> Result<(), ApiError> {
    let n = shape.task.n;
    let mut left = shape.choices.len();
    while let Some((at, update)) = run.next().await? {
        let delta = shape.delta(at, update);
        left -= usize::from(delta.finish.is_some());
        let timings = (left == 0 && delta.finish.is_some()).then(|| run.timings(n));
        let large = delta.entries() > LARGE;
        let lane = shape.state.lanes.write.clone();
        let write = move || {
            let chunks: Vec<Bytes> = shape.chunks(at, delta, timings).iter().map(event).collect();
            (shape, chunks)
        };
        let chunks;
        (shape, chunks) = if large { aside(Some(&lane), write).await? } else { write() };
        for chunk in chunks {
            if sender.send(chunk).await.is_err() {
                return Ok(());
            }
        }
    }
    if shape.task.include_usage {
        let mut chunk = shape.head(shape.chunk_object(), vec![]);
        chunk["usage"] = run.usage(n);
        chunk["timings"] = run.timings(n);
        let _ = sender.send(event(&chunk)).await;
    }
    let _ = sender.send(Bytes::from_static(b"data: [DONE]\n\n")).await;
    Ok(())
}

/// One server-sent event.
fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// When a request's time is over, and how long it was.
pub type Late = Option<(time::Instant, Duration)>;

/// When the time of a request is over that arrived then.
pub fn late(state: &State, arrived: Instant) -> Late {
    state.timeout.map(|limit| (time::Instant::from_std(arrived + limit), limit))
}

/// A result, unless the request's time is over.
pub async fn in_time<T>(late: Late, work: impl Future<Output = T>) -> Result<T, ApiError> {
    match late {
        None => Ok(work.await),
        Some((until, limit)) => time::timeout_at(until, work).await.map_err(|_| too_late(limit)),
    }
}

fn too_late(limit: Duration) -> ApiError {
    let message = format!(
        "the request took longer than {} s and was ended; ask for fewer tokens, or see --timeout",
        limit.as_secs_f32()
    );
    ApiError { code: Some("timeout"), ..ApiError::new(504, "timeout_error", message) }
}

/// How an answer looks.
struct Shape {
    state: Arc<State>,
    task: Task,
    id: String,
    created: u64,
    logprobs: bool,
    /// Of each choice, where the prompt may be repeated.
    prompts: Vec<Vec<u32>>,
    choices: Vec<Progress>,
}

/// What was sent of a choice.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// The role, or the prompt that is repeated.
    began: bool,
    /// Finds the calls in its text.
    calls: Option<ToolCallParser>,
}

impl Shape {
    fn is_chat(&self) -> bool {
        matches!(self.task.kind, Kind::Chat { .. })
    }

    fn chunk_object(&self) -> &'static str {
        if self.is_chat() { "chat.completion.chunk" } else { "text_completion" }
    }

    fn head(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.state.model.name,
            "system_fingerprint": fingerprint(&self.state),
            "choices": choices,
        })
    }

    /// What an update means for the client.
    fn delta(&mut self, at: usize, update: Update) -> Delta {
        let echo = match &self.task.kind {
            Kind::Completion { echo } => echo.get(at / self.task.n),
            Kind::Chat { .. } => None,
        };
        let mut delta = Delta::default();
        if let Some(text) = echo
            && !std::mem::replace(&mut self.choices[at].began, true)
        {
            delta.text.clone_from(text);
        }
        match update {
            Update::Prompt(tokens) => {
                let none = (None, vec![]);
                let logprobs = std::iter::once(none).chain(tokens.into_iter().map(|(l, top)| (Some(l), top)));
                let offsets = offsets(&self.state.text, &self.prompts[at], echo.map_or("", String::as_str));
                let of = |((&id, offset), (logprob, top)): ((&u32, usize), _)| Chosen { id, logprob, top, offset };
                delta.tokens = self.prompts[at].iter().zip(offsets).zip(logprobs).map(of).collect();
            }
            Update::Token(tokens, text) => {
                delta.text += &text;
                delta.tokens = self.generated(echo, tokens);
            }
            Update::End(finish, tokens, text) => {
                delta.text += &text;
                delta.tokens = self.generated(echo, tokens);
                delta.finish = Some(if finish == Finish::Stop { "stop" } else { "length" });
            }
            Update::Embedding(_) => {}
        }
        if let Some(parser) = &mut self.choices[at].calls {
            let mut parts = parser.push(&std::mem::take(&mut delta.text));
            if delta.finish.is_some() {
                parts.extend(parser.finish());
            }
            for part in parts {
                match part {
                    Part::Content(text) => delta.text += &text,
                    Part::Call { index, id, name } => {
                        let function = json!({"name": name, "arguments": ""});
                        delta.call(json!({"index": index, "id": id, "type": "function", "function": function}));
                    }
                    Part::Arguments { index, text } => {
                        delta.call(json!({"index": index, "function": {"arguments": text}}));
                    }
                }
            }
            if delta.finish == Some("stop") && parser.calls() > 0 {
                delta.finish = Some("tool_calls");
            }
        }
        delta
    }

    /// Tokens of an answer, where their logprobs were asked for, with their places in the whole text.
    fn generated(&self, echo: Option<&String>, mut tokens: Vec<Chosen>) -> Vec<Chosen> {
        if !self.logprobs {
            return vec![];
        }
        let before = echo.map_or(0, |text| text.chars().count());
        tokens.iter_mut().for_each(|token| token.offset += before);
        tokens
    }

    /// A whole choice.
    fn choice(&mut self, at: usize, sum: Delta) -> Value {
        let logprobs = self.logprobs(&sum.tokens);
        match self.task.kind {
            Kind::Chat { .. } => {
                let mut message = json!({"role": "assistant", "content": sum.text, "refusal": null});
                if !sum.calls.is_empty() {
                    if sum.text.is_empty() {
                        message["content"] = Value::Null;
                    }
                    message["tool_calls"] = sum.calls.into_iter().map(without_index).collect();
                }
                json!({"index": at, "message": message, "logprobs": logprobs, "finish_reason": sum.finish})
            }
            Kind::Completion { .. } => {
                json!({"index": at, "text": sum.text, "logprobs": logprobs, "finish_reason": sum.finish})
            }
        }
    }

    /// What is sent of a delta; nothing where there is nothing new.
    fn chunks(&mut self, at: usize, delta: Delta, timings: Option<Value>) -> Vec<Value> {
        let mut choices = vec![];
        let logprobs = self.logprobs(&delta.tokens);
        let news = !delta.text.is_empty() || !delta.tokens.is_empty();
        match self.task.kind {
            Kind::Chat { .. } => {
                let choice = |delta: Value, logprobs: Value, finish: Option<&str>| json!({"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
                if !std::mem::replace(&mut self.choices[at].began, true) {
                    choices.push(choice(json!({"role": "assistant", "content": ""}), Value::Null, None));
                }
                if news {
                    choices.push(choice(json!({"content": delta.text}), logprobs, None));
                }
                if !delta.calls.is_empty() {
                    choices.push(choice(json!({"tool_calls": delta.calls}), Value::Null, None));
                }
                if delta.finish.is_some() {
                    choices.push(choice(json!({}), Value::Null, delta.finish));
                }
            }
            Kind::Completion { .. } => {
                if news || delta.finish.is_some() {
                    choices.push(
                        json!({"index": at, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}),
                    );
                }
            }
        }
        let chunk = |choice| {
            let mut chunk = self.head(self.chunk_object(), vec![choice]);
            if self.task.include_usage {
                chunk["usage"] = Value::Null;
            }
            chunk
        };
        let mut chunks: Vec<Value> = choices.into_iter().map(chunk).collect();
        if let (Some(last), Some(timings)) = (chunks.last_mut(), timings) {
            last["timings"] = timings;
        }
        chunks
    }

    /// Logprobs in the endpoint's form; null where none were asked for.
    fn logprobs(&self, tokens: &[Chosen]) -> Value {
        if !self.logprobs || tokens.is_empty() {
            return match self.logprobs && !self.is_chat() {
                true => json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}),
                false => Value::Null,
            };
        }
        let text = &self.state.text;
        if self.is_chat() {
            let entry = |id: u32, logprob: f32| {
                let bytes = token_bytes(text, id);
                json!({"token": String::from_utf8_lossy(&bytes), "logprob": decimal(logprob), "bytes": bytes})
            };
            let content = tokens.iter().map(|t| {
                let mut value = entry(t.id, t.logprob.unwrap_or(0.0));
                value["top_logprobs"] = t.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
                value
            });
            return json!({"content": content.collect::<Value>(), "refusal": null});
        }
        let (mut names, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
        for t in tokens {
            let bytes = token_bytes(text, t.id);
            offsets.push(t.offset);
            names.push(name(&bytes));
            logprobs.push(t.logprob.map(decimal));
            let top = |&(id, logprob): &(u32, f32)| (name(&token_bytes(text, id)), decimal(logprob));
            tops.push(t.logprob.map(|own| {
                let mut map: serde_json::Map<String, Value> = t.top.iter().map(top).collect();
                // As OpenAI does: the token itself is always there.
                map.entry(name(&bytes)).or_insert_with(|| decimal(own));
                Value::from(map)
            }));
        }
        json!({"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }
}

/// Only streams number their calls.
fn without_index(mut call: Value) -> Value {
    if let Some(map) = call.as_object_mut() {
        map.shift_remove("index");
    }
    call
}

/// Where each token of a prompt begins in its text, in characters. The text may lack what the tokenizer added: BOS, and
/// the space in front.
fn offsets(text: &TextModel, tokens: &[u32], echo: &str) -> Vec<usize> {
    let tokenizer = text.tokenizer();
    let (mut characters, mut at, mut rest) = (Utf8Stream::default(), 0, echo);
    let place = |&id: &u32| {
        let offset = at;
        let bytes = token_bytes(text, id);
        let own = std::str::from_utf8(&bytes).unwrap_or_default();
        // Text of which a part was added is found without that part.
        let bytes = match () {
            () if tokenizer.is_special(id) && !rest.starts_with(own) => &[][..],
            () if at == 0 && own.starts_with(' ') && !rest.starts_with(' ') => &bytes[1..],
            () => &bytes,
        };
        let came = characters.push(bytes).chars().count();
        at += came;
        rest = rest.char_indices().nth(came).map_or("", |(i, _)| &rest[i..]);
        offset
    };
    tokens.iter().map(place).collect()
}

/// What a token stands for; control tokens: their text.
fn token_bytes(text: &TextModel, id: u32) -> Vec<u8> {
    text.tokenizer().token_bytes(id).unwrap_or_default()
}

/// The text of a token, or its bytes where they are no whole characters (`bytes:\xe2\x80`), as OpenAI writes them.
fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_string(),
        Err(_) => bytes.iter().fold("bytes:".to_string(), |name, byte| name + &format!("\\x{byte:02x}")),
    }
}

/// A logprob with the digits that it has, and a number even where the probability is 0.
pub fn decimal(logprob: f32) -> Value {
    let bounded = if logprob.is_finite() { logprob } else { -9999.0 };
    bounded.to_string().parse::<f64>().unwrap_or(-9999.0).into()
}

/// Changes when answers may: with the program, the model or the numeric mode.
fn fingerprint(state: &State) -> String {
    let what = format!("{}\n{}\n{}", env!("CARGO_PKG_VERSION"), state.model.name, state.model.device);
    format!("fp_{:012x}", xxhash_rust::xxh3::xxh3_64(what.as_bytes()) >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_without_whole_characters_keep_their_bytes() {
        assert_eq!(name("é ".as_bytes()), "é ");
        assert_eq!(name(&[0xE2, 0x80]), "bytes:\\xe2\\x80");
    }

    #[test]
    fn logprobs_are_short_numbers() {
        assert_eq!(decimal(-0.1).to_string(), "-0.1");
        assert_eq!(decimal(f32::NEG_INFINITY).to_string(), "-9999.0");
        assert_eq!(decimal(0.0).to_string(), "0.0");
    }
}
