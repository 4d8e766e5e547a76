use super::*;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden/chat_templates.json");

/// Renders a template without messages.
fn plain(source: &str) -> Result<String, TemplateError> {
    ChatTemplate::new(source, None, None)?.render(&[], None, false, &Map::new())
}

fn now(text: &str) -> Date {
    let parts: Vec<u32> = text.split(['-', 'T', ':']).map(|part| part.parse().unwrap()).collect();
    Date::new(i64::from(parts[0]), parts[1], parts[2], parts[3], parts[4], parts[5])
}

fn render_case(case: &Value) -> Result<String, TemplateError> {
    let text = |name: &str| case[name].as_str();
    let date = now(text("now").unwrap_or("2026-01-01T00:00:00"));
    let template = text("template").unwrap();
    let template = ChatTemplate::with_clock(template, text("bos_token"), text("eos_token"), move || date)?;
    let mut extra = case["kwargs"].as_object().unwrap().clone();
    let tools = extra.shift_remove("tools");
    let prompt = extra.shift_remove("add_generation_prompt").is_some_and(|v| v == true);
    template.render(&Message::list(case["messages"].clone())?, tools.as_ref(), prompt, &extra)
}

#[test]
fn conversations_match_transformers() {
    let golden: Value = serde_json::from_slice(&std::fs::read(GOLDEN).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 50);
    let mut wrong = Vec::new();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let expected = case["expected"].as_str();
        let matches = match (render_case(case), expected, case["expected_error"].as_str()) {
            (Ok(text), Some(expected), None) if text == expected => true,
            (Err(TemplateError::Refused(message)), None, Some(expected)) if message == expected => true,
            (got, expected, error) => {
                println!("=== {name}\ngot      {got:?}\nexpected {expected:?} {error:?}");
                false
            }
        };
        if !matches {
            wrong.push(name);
        }
    }
    assert_eq!(wrong, [""; 0], "{} of {} cases", wrong.len(), cases.len());
}

#[test]
fn json_is_written_as_python_writes_it() {
    let cases = [
        ("{{ {'b': 1, 'a': [1.5, none, true]} | tojson }}", r#"{"b": 1, "a": [1.5, null, true]}"#),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", r#"{"a": 2, "b": 1}"#),
        ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", r#"[1,{"a":2}]"#),
        ("{{ [1, {'a': 2}] | tojson(indent=1) }}", "[\n 1,\n {\n  \"a\": 2\n }\n]"),
        ("{{ [1] | tojson(indent='\t') }}", "[\n\t1\n]"),
        ("{{ [1, []] | tojson(indent=0) }}", "[\n1,\n[]\n]"),
        ("{{ 'é<&>\\'😀' | tojson }}", "\"é<&>'😀\""),
        ("{{ 'é😀' | tojson(ensure_ascii=true) }}", r#""\u00e9\ud83d\ude00""#),
        ("{{ '\\n\\t\\\"\\\\\\u0001\\u007f' | tojson }}", "\"\\n\\t\\\"\\\\\\u0001\u{7f}\""),
        (
            "{{ [1.0, 0.1, 1e16, 1e15, 1e22, 0.0001, 0.00001, -0.0, 1.5e-7, 123456789.125] | tojson }}",
            "[1.0, 0.1, 1e+16, 1000000000000000.0, 1e+22, 0.0001, 1e-05, -0.0, 1.5e-07, 123456789.125]",
        ),
        ("{{ {1: 'a'} | tojson }}", r#"{"1": "a"}"#),
    ];
    for (source, expected) in cases {
        assert_eq!(plain(source).unwrap(), expected, "{source}");
    }
    let error = plain("{{ nothing | tojson }}").unwrap_err().to_string();
    assert!(error.contains("undefined cannot be written as JSON"), "{error}");
}

#[test]
fn methods_of_python() {
    let cases = [
        ("{{ 'a.b.c'.rsplit('.', 1) | join('|') }}", "a.b|c"),
        ("{{ ' a  b c '.rsplit(none, 1) | join('|') }}", " a  b|c"),
        ("{{ 'a b'.rsplit() | join('|') }}", "a|b"),
        ("{{ 'a=b=c'.partition('=') | join('|') }}", "a|=|b=c"),
        ("{{ 'a=b=c'.rpartition('=') | join('|') }}", "a=b|=|c"),
        ("{{ 'abc'.partition('x') | join('|') }}", "abc||"),
        ("{{ 'tool_x'.removeprefix('tool_') }} {{ 'a.py'.removesuffix('.py') }} {{ '-7'.zfill(4) }}", "x a -007"),
        ("{{ {'a': 1}.copy().items() | list }}", "[('a', 1)]"),
    ];
    for (source, expected) in cases {
        assert_eq!(plain(source).unwrap(), expected, "{source}");
    }
    let error = plain("{% set x = [] %}{{ x.append(1) }}").unwrap_err().to_string();
    assert!(error.contains("`append` changes a value"), "{error}");
}

#[test]
fn generation_marks_keep_whitespace_rules() {
    let source = "a\n{% generation %}\nb\n{%- endgeneration -%}\n c {%- generation %} d{% endgeneration %}";
    assert_eq!(plain(source).unwrap(), "a\nbc d");
    assert_eq!(plain("{{ '{% generation' }}").unwrap(), "{% generation");
}

#[test]
fn errors_name_the_line() {
    let error = plain("a\n\n{% if x %}\nb").unwrap_err();
    assert!(matches!(error, TemplateError::Syntax(_)), "{error}");
    let error = plain("a\n{{ 'x' | nofilter }}").unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("nofilter"), "{error}");
    let error = plain("a\nb\n{{ missing.field }}").unwrap_err();
    assert!(matches!(error, TemplateError::Render(_)), "{error}");
    assert!(error.to_string().contains("line 3") && error.to_string().contains("missing.field"), "{error}");
}

#[test]
fn refusals_pass_through_loops_and_macros() {
    let source =
        "{% macro m() %}{% for x in [1] %}{{ raise_exception('no: ' ~ x) }}{% endfor %}{% endmacro %}{{ m() }}";
    let error = plain(source).unwrap_err();
    assert!(matches!(&error, TemplateError::Refused(message) if message == "no: 1"), "{error}");
}

#[test]
fn endless_templates_are_stopped() {
    let source = "{% for a in range(90000) %}{% for b in range(90000) %}{{ '' }}{% endfor %}{% endfor %}";
    let error = plain(source).unwrap_err().to_string();
    assert!(error.contains("come to an end"), "{error}");
}

#[test]
fn variables() {
    let template = ChatTemplate::new(
        "{{ bos_token }}{{ eos_token is defined }}{{ tools is none }}{{ x }}{{ add_generation_prompt }}",
        Some("<s>"),
        None,
    )
    .unwrap();
    let extra = Map::from_iter([("x".to_string(), 5.into()), ("add_generation_prompt".to_string(), 1.into())]);
    assert_eq!(template.render(&[], None, true, &extra).unwrap(), "<s>FalseTrue5True");
    let extra = Map::from_iter([("bos_token".to_string(), "<b>".into())]);
    assert_eq!(template.render(&[], None, false, &extra).unwrap(), "<b>FalseTrueFalse");
}

#[test]
fn messages_are_objects_with_a_role() {
    let list = Message::list(serde_json::json!([{"role": "user", "content": "x", "name": "n"}])).unwrap();
    assert_eq!((list[0].role(), list[0].text(), list[0].fields().len()), ("user", Some("x"), 3));
    assert_eq!(list[0].fields()["name"], "n");
    assert_eq!(Message::new("a", "b").fields().keys().collect::<Vec<_>>(), ["role", "content"]);
    let error = Message::list(serde_json::json!([{"role": "user"}, {"content": "x"}])).unwrap_err().to_string();
    assert_eq!(error, r#"message 1 is {"content":"x"}, expected an object with a `role`"#);
    assert!(Message::list(serde_json::json!("x")).is_err());
}

#[test]
fn hostile_templates_are_errors() {
    // The library's time grows with the square of some chains.
    let long = |begin: &str, again: &str, end: &str| {
        let most = if again.contains(['~', 'f']) { MAX_SOURCE / 4 } else { MAX_SOURCE };
        let times = (most - begin.len() - end.len()) / again.len();
        [begin, &again.repeat(times), end].concat()
    };
    for source in [
        long("{{ x", "~x", " }}"),
        long("{{ x", ".x", " }}"),
        long("{{ x", "()", " }}"),
        long("{{ 1", "**1", " }}"),
        long("{{ x", "|e", " }}"),
        long("{{ ", "-", "1 }}"),
        long("{{ ", "not ", "1 }}"),
        long("{{ 1", " if 1 else 1", " }}"),
        long("{% if x %}", "{%elif x%}", "{% endif %}"),
        long(
            "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = [[ns.x]] %}{% endfor %}{{ ns.x }}",
            " ",
            "",
        ),
    ] {
        let _ = plain(&source); // either way: it comes back
    }
    let error = plain(&" ".repeat(MAX_SOURCE + 1)).unwrap_err().to_string();
    assert!(error.contains("65537 bytes, expected at most 65536"), "{error}");
    let source =
        "{% set ns = namespace(x=1) %}{% for i in range(200) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}";
    let error = plain(source).unwrap_err().to_string();
    assert!(error.contains("more than 128 deep"), "{error}");
}

#[test]
fn control_characters_are_written_out() {
    let error = plain("{{ raise_exception('a\\u001b[2Jb\\nc') }}").unwrap_err().to_string();
    assert!(error.ends_with("a\\u{1b}[2Jb\\nc"), "{error}");
    let error = plain("{{ '\u{1b}[2J' | nofilter }}").unwrap_err().to_string();
    assert!(!error.contains('\u{1b}'), "{error}");
}

#[test]
fn values_that_are_nested_too_deep_are_not_shown() {
    let deep = format!("{}ns.x{}", "[".repeat(30), "]".repeat(30));
    let source = format!(
        "{{% set ns = namespace(x=1) %}}{{% for i in range(90000) %}}{{% set ns.x = {deep} %}}{{% endfor %}}{{{{ ns.x }}}}"
    );
    let error = plain(&source).unwrap_err().to_string();
    assert!(error.contains("more than 1000 deep"), "{error}");
}
