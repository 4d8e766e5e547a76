use std::sync::Arc;

use super::*;
use crate::engine::TokenSet;
use crate::random::Random;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/smollm2-gptq-2layer/tokenizer.json");
const TEMPLATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden/templates");

/// A fixture's vocabulary with a template of `tests/fixtures/golden/templates`, or with one that only says how calls
/// are written; some control tokens may be renamed.
fn model(template: &str, renamed: Option<&str>) -> Arc<TextModel> {
    let mut json = String::from_utf8(std::fs::read(FIXTURE).unwrap()).unwrap();
    if let Some(mark) = renamed {
        json = json.replace("<repo_name>", mark).replace("<reponame>", "[ARGS]");
    }
    let template = match template {
        "qwen3-coder" => "{{ tools }}<tool_call>\n<function=name>\n<parameter=key>".to_string(),
        "mistral-3.2" => "{{ tools }}[TOOL_CALLS]name[ARGS]{}".to_string(),
        name => std::fs::read_to_string(format!("{TEMPLATES}/{name}.jinja")).unwrap(),
    };
    let plain = TextModel::new(json.as_bytes(), None, None, None, &[]).unwrap();
    let end = plain.tokenizer().id_of("<|im_end|>").unwrap();
    Arc::new(TextModel::new(json.as_bytes(), Some(&template), None, None, &[end]).unwrap())
}

fn declared() -> Value {
    json!([
        {"type": "function", "function": {"name": "get.time", "description": "d"}},
        {"type": "function", "function": {"name": "add", "parameters": {
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"enum": ["x", "y"]}}, "required": ["a"],
            "additionalProperties": false, "$defs": {"n": {"type": "integer"}}}}},
    ])
}

fn read(text: &TextModel, choice: Value, parallel: bool) -> ToolSet {
    ToolSet::read(Some(&declared()), Some(&choice), Some(parallel), text).unwrap().unwrap()
}

/// Whether an answer follows the constraint to an end; control tokens stand as their text.
fn follows(set: &ToolSet, text: &Arc<TextModel>, answer: &str) -> bool {
    fits(set, text, None, answer)
}

fn fits(set: &ToolSet, text: &Arc<TextModel>, schema: Option<&Value>, answer: &str) -> bool {
    let factory = GrammarFactory::new(text.clone(), text.tokenizer().vocab_size());
    let mut grammar = set.constraint(&factory, schema).unwrap().unwrap().0;
    let mut tokens = text.tokenizer().encode(answer, !set.marks.is_empty()).unwrap();
    tokens.push(text.stop_ids()[0]);
    let mut allowed = TokenSet::new(text.tokenizer().vocab_size());
    tokens.into_iter().all(|token| {
        allowed.clear();
        grammar.allow(&mut allowed).unwrap();
        allowed.contains(token) && grammar.follow(token).is_ok()
    })
}

/// Answers that must follow are also read as these calls.
fn check(set: &ToolSet, text: &Arc<TextModel>, good: &[(&str, usize)], bad: &[&str]) {
    for (answer, calls) in good {
        assert!(follows(set, text, answer), "{answer:?}");
        let mut parser = set.parser();
        parser.push(answer);
        parser.finish();
        assert_eq!(parser.calls(), *calls, "{answer:?}");
    }
    for answer in bad {
        assert!(!follows(set, text, answer), "{answer:?}");
    }
}

#[test]
fn hermes_answers_are_text_or_calls_of_the_schema() {
    let add = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"x\"}}\n</tool_call>";
    let time = "<tool_call>{\"name\":\"get.time\",\"arguments\":{}}</tool_call>";
    let both = format!("{add}\n{time}");
    let text = format!("I think <b>so</b>.\n{add}");
    let wrong = [
        "<tool_call>\n{\"name\": \"other\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": \"x\"}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"getXtime\", \"arguments\": {}}\n</tool_call>",
        "Well, <tool_call> it is",
        "<tool_call>\n{\"name\": \"get.time\", \"arguments\": {}}",
    ];
    // As text and as control tokens; a template that knows no tools gets the same.
    for (template, renamed) in [("qwen2.5", None), ("smollm2", None), ("qwen3", Some("<tool_call>"))] {
        let model = model(template, renamed);
        let auto = read(&model, json!("auto"), true);
        assert_eq!(auto.style, Style::Hermes);
        assert_eq!(auto.argument(), (template != "smollm2").then_some("tools"));
        assert_eq!(auto.marks.len(), usize::from(renamed.is_some()));
        check(&auto, &model, &[("Just text.", 0), ("", 0), (add, 1), (&text, 1), (&both, 2)], &wrong);
        let one = read(&model, json!("auto"), false);
        check(&one, &model, &[("2 < 3", 0), (add, 1)], &[&both]);
        let must = read(&model, json!("required"), true);
        check(&must, &model, &[(add, 1), (&both, 2)], &["Just text.", &text, "", wrong[1]]);
        let named = read(&model, json!({"type": "function", "function": {"name": "add"}}), true);
        check(&named, &model, &[(add, 1)], &[time, &both]);
        assert!(
            read(&model, json!("none"), true)
                .constraint(&GrammarFactory::new(model.clone(), 1), None)
                .unwrap()
                .is_none()
        );
    }
}

#[test]
fn llama_answers_are_text_or_one_object() {
    let add = "{\"name\": \"add\", \"parameters\": {\"a\": -1}}";
    for renamed in [None, Some("<|python_tag|>")] {
        let model = model("llama-3.1", renamed);
        let auto = read(&model, json!("auto"), true);
        assert_eq!(auto.style, Style::Llama);
        check(&auto, &model, &[("Text {", 0), ("", 0), (add, 1)], &["{\"a\": 1}", &[add, add].concat(), "{}"]);
        let must = read(&model, json!("required"), true);
        check(&must, &model, &[(add, 1)], &["Text", ""]);
        if renamed.is_some() {
            check(&auto, &model, &[(&format!("<|python_tag|>{add}"), 1)], &["<|python_tag|>Text"]);
        }
    }
}

#[test]
fn mistral_answers_are_text_or_a_list() {
    let one = "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"abcDEF123\"}]";
    let two =
        "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"get.time\", \"arguments\": {}}]";
    for renamed in [None, Some("[TOOL_CALLS]")] {
        let model = model("mistral-v0.3", renamed);
        let auto = read(&model, json!("auto"), true);
        assert_eq!(auto.style, Style::Mistral);
        check(&auto, &model, &[("Text [TOOL]", 0), (one, 1), (two, 2)], &["[TOOL_CALLS] []", "[TOOL_CALLS] x"]);
        check(&read(&model, json!("required"), false), &model, &[(one, 1)], &["Text", two]);
    }
}

#[test]
fn newer_mistral_answers_are_text_or_calls_by_name() {
    let add = "[TOOL_CALLS]add[ARGS]{\"a\": 1}";
    let both = format!("{add}[TOOL_CALLS]get.time[ARGS]{{}}");
    let bad =
        ["[TOOL_CALLS]add[ARGS]{\"a\": \"x\"}", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]add", "[TOOL_CALLS] []"];
    for renamed in [None, Some("[TOOL_CALLS]")] {
        let model = model("mistral-3.2", renamed);
        let auto = read(&model, json!("auto"), true);
        assert_eq!((auto.style, auto.marks.len()), (Style::MistralArgs, 2 * usize::from(renamed.is_some())));
        check(&auto, &model, &[("Text", 0), (add, 1), (&both, 2)], &bad);
        check(&read(&model, json!("required"), false), &model, &[(add, 1)], &["Text", &both]);
    }
}

#[test]
fn qwen_coder_answers_are_text_or_tagged_calls() {
    let add = "<tool_call>\n<function=add>\n<parameter=a>\n-5\n</parameter>\n</function>\n</tool_call>";
    let both = add.replace("</function>", "<parameter=b>\ny\n</parameter>\n</function>");
    let time = "<tool_call>\n<function=get.time>\n</function>\n</tool_call>";
    let text = format!("So <b>:\n{both}\n{time}");
    let bad = [
        &add.replace("-5", "x"),
        &add.replace("=add", "=other"),
        &both.replace("y\n", "z\n"),
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "<tool_call>\n{\"name\": \"get.time\", \"arguments\": {}}\n</tool_call>",
    ];
    for renamed in [None, Some("<tool_call>")] {
        let model = model("qwen3-coder", renamed);
        let auto = read(&model, json!("auto"), true);
        assert_eq!(auto.style, Style::Qwen);
        check(&auto, &model, &[("Text", 0), (add, 1), (&both, 1), (time, 1), (&text, 2)], &bad);
        check(&read(&model, json!("required"), true), &model, &[(add, 1)], &["Text"]);
        // Any text is one, up to its end tag.
        let say = json!([{"type": "function", "function": {"name": "say", "parameters": {
            "properties": {"text": {"type": "string"}, "any": {}}}}}]);
        let set = ToolSet::read(Some(&say), Some(&json!("required")), None, &model).unwrap().unwrap();
        let call = "<tool_call>\n<function=say>\n<parameter=text>\nfn <T>() {\n\"é\"}\n\n</parameter>\n<parameter=any>\n[1]\n\
                    </parameter>\n</function>\n</tool_call>";
        check(&set, &model, &[(call, 1)], &[&call.replace("any>", "other>")]);
        let mut parser = set.parser();
        let parts = parser.push(call);
        assert!(
            matches!(&parts[1], Part::Arguments { text, .. }
            if serde_json::from_str::<Value>(text).unwrap() == json!({"text": "fn <T>() {\n\"é\"}\n", "any": [1]})),
            "{parts:?}"
        );
    }
}

#[test]
fn with_a_schema_an_answer_is_calls_or_json_of_it() {
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": false});
    let (answer, wrong) = ("{\"ok\": true}", "{\"ok\": 3}");
    for (template, call) in [
        ("qwen2.5", "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=get.time>\n</function>\n</tool_call>"),
        ("llama-3.1", "{\"name\": \"add\", \"parameters\": {\"a\": 1}}"),
        ("mistral-v0.3", "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}]"),
        ("mistral-3.2", "[TOOL_CALLS]add[ARGS]{\"a\": 1}"),
    ] {
        let model = model(template, None);
        let auto = read(&model, json!("auto"), true);
        let may = |answer: &str| fits(&auto, &model, Some(&schema), answer);
        assert!(may(answer) && may(call) && !may(wrong) && !may("Text") && !may(""), "{template}");
        let named = json!({"type": "object", "properties": {"name": {"type": "string"}, "n": {"enum": ["add"]}}});
        let may = |answer: &str| fits(&auto, &model, Some(&named), answer);
        assert!(may("{\"name\": \"adder\"}") && may("{\"name\":\"add\",\"n\":\"add\"}") && may(call), "{template}");
        let must = read(&model, json!("required"), true);
        assert!(fits(&must, &model, Some(&schema), call) && !fits(&must, &model, Some(&schema), answer), "{template}");
    }
}

#[test]
fn fields_that_make_no_sense_are_named() {
    let model = model("qwen2.5", None);
    let function = |f: Value| json!([{"type": "function", "function": f}]);
    let error = |tools: Value, choice: Value| ToolSet::read(Some(&tools), Some(&choice), None, &model).unwrap_err();
    assert_eq!(error(json!({}), json!(null)).0, "tools");
    assert_eq!(error(json!([{"type": "web_search"}]), json!(null)).0, "tools[0].type");
    assert_eq!(error(function(json!({"name": "a b"})), json!(null)).0, "tools[0].function.name");
    let list = json!([declared()[0], declared()[0]]);
    assert_eq!(error(list, json!(null)).0, "tools[1].function.name");
    assert_eq!(error(function(json!({"name": "a", "parameters": 1})), json!(null)).0, "tools[0].function.parameters");
    assert_eq!(error(declared(), json!("any")).0, "tool_choice");
    assert_eq!(error(declared(), json!({"function": {"name": "b"}})).0, "tool_choice.function.name");
    assert_eq!(error(json!([]), json!("required")).0, "tool_choice");
    assert!(ToolSet::read(None, None, None, &model).unwrap().is_none());
    let impossible = function(json!({"name": "a", "parameters": {"not": {}}}));
    let set = ToolSet::read(Some(&impossible), None, None, &model).unwrap().unwrap();
    let factory = GrammarFactory::new(model.clone(), model.tokenizer().vocab_size());
    assert!(set.constraint(&factory, None).unwrap_err().to_string().contains("`#/not` is not supported"));
}

/// A random answer that follows the constraint, as the reader of control tokens sees it.
fn random_answer(set: &ToolSet, constraint: &Constraint, text: &TextModel, random: &mut Random) -> Option<String> {
    let mut grammar = constraint.clone().0;
    let (mut bytes, mut allowed) = (vec![], TokenSet::new(text.tokenizer().vocab_size()));
    for _ in 0..300 {
        allowed.clear();
        grammar.allow(&mut allowed).unwrap();
        let may: Vec<u32> = (0..text.tokenizer().vocab_size() as u32).filter(|&t| allowed.contains(t)).collect();
        let end = may.iter().copied().find(|t| text.stop_ids().contains(t));
        let token = end.unwrap_or_else(|| may[random.below(may.len())]);
        grammar.follow(token).unwrap();
        if end.is_some() {
            return Some(String::from_utf8(bytes).unwrap());
        }
        match set.text_of(token) {
            Some(mark) => bytes.extend(mark.bytes()),
            None => bytes.extend(text.shown_bytes(token)),
        }
    }
    None
}

#[test]
fn random_answers_that_must_call_are_read_as_calls_of_the_schema() {
    let models = [
        ("qwen2.5", None),
        ("qwen3", Some("<tool_call>")),
        ("llama-3.1", None),
        ("mistral-v0.3", Some("[TOOL_CALLS]")),
        ("mistral-3.2", Some("[TOOL_CALLS]")),
        ("qwen3-coder", None),
    ];
    let mut random = Random::new(1);
    for (template, renamed) in models {
        let model = model(template, renamed);
        let set = read(&model, json!("required"), true);
        let factory = GrammarFactory::new(model.clone(), model.tokenizer().vocab_size());
        let constraint = set.constraint(&factory, None).unwrap().unwrap();
        let mut complete = 0;
        for _ in 0..100 {
            let Some(answer) = random_answer(&set, &constraint, &model, &mut random) else { continue };
            complete += 1;
            let mut parser = set.parser();
            let mut parts = parser.push(&answer);
            parts.extend(parser.finish());
            assert!(!parts.is_empty(), "{answer:?}");
            let mut calls: Vec<(String, String)> = vec![];
            for part in parts {
                match part {
                    Part::Call { name, .. } => calls.push((name, String::new())),
                    Part::Arguments { text, .. } => calls.last_mut().unwrap().1 += &text,
                    Part::Content(text) => panic!("{text:?} in {answer:?}"),
                }
            }
            for (name, arguments) in calls {
                let arguments: Value = serde_json::from_str(&arguments).unwrap();
                let object = arguments.as_object().unwrap();
                match name.as_str() {
                    "get.time" => assert!(object.is_empty(), "{answer:?}"),
                    _ => {
                        assert!(object["a"].is_i64() || object["a"].is_number(), "{answer:?}");
                        assert!(object.get("b").is_none_or(|b| b == "x" || b == "y"), "{answer:?}");
                        assert!(object.keys().all(|k| k == "a" || k == "b"), "{answer:?}");
                    }
                }
            }
        }
        assert!(complete > 50, "{template}: {complete}");
    }
}
