use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use crate::random::Random;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/smollm2-gptq-2layer/tokenizer.json");

/// The tokenizer of the fixture, cut from SmolLM2's; `<|im_end|>` ends answers.
fn small() -> GrammarFactory {
    factory(&std::fs::read(FIXTURE).unwrap(), 64)
}

/// SmolLM2's whole tokenizer (3.5 MB) lives outside the repository.
fn whole() -> Option<GrammarFactory> {
    let shared = std::env::var("QUERN_SHARED").unwrap_or_default();
    let path = std::path::Path::new(&shared).join("fixtures/real/gptq-w4-g64-sym/tokenizer.json");
    match std::fs::read(path) {
        Ok(json) => Some(factory(&json, 0)),
        Err(_) => {
            println!("SKIPPED grammar: SmolLM2's vocabulary needs QUERN_SHARED=<folder with fixtures/real>");
            None
        }
    }
}

/// `padding`: rows of the model beyond the tokenizer's tokens.
fn factory(json: &[u8], padding: usize) -> GrammarFactory {
    let plain = TextModel::new(json, None, None, None, &[]).unwrap();
    let end = plain.tokenizer().id_of("<|im_end|>").unwrap();
    let text = TextModel::new(json, None, None, None, &[end, 0]).unwrap();
    let vocab = text.tokenizer().vocab_size() + padding;
    GrammarFactory::new(Arc::new(text), vocab)
}

fn members(set: &TokenSet) -> Vec<u32> {
    let bits = |(i, &word): (usize, &u32)| (0..32).filter(move |b| word >> b & 1 == 1).map(move |b| i as u32 * 32 + b);
    set.words().iter().enumerate().flat_map(bits).collect()
}

fn allowed(factory: &GrammarFactory, grammar: &mut dyn Grammar) -> Vec<u32> {
    let mut set = TokenSet::new(factory.0.vocab);
    grammar.allow(&mut set).unwrap();
    members(&set)
}

/// A random answer, and whether it came to its end within `most` tokens; towards the end it prefers to close.
fn walk(factory: &GrammarFactory, constraint: &Constraint, random: &mut Random, most: usize) -> (String, bool) {
    let mut grammar = constraint.clone().0;
    let text = factory.text();
    let mut bytes = vec![];
    for n in 0..most {
        let may = allowed(factory, &mut *grammar);
        assert!(!may.is_empty(), "{}", String::from_utf8_lossy(&bytes));
        let end = may.iter().find(|t| text.stop_ids().contains(t));
        let closing = |t: &&u32| {
            let bytes = text.tokenizer().token_bytes(**t).unwrap();
            bytes.len() == 1 && b"\"}]0".contains(&bytes[0])
        };
        let closers: Vec<&u32> = may.iter().filter(closing).collect();
        let token = match end {
            Some(&end) if grammar.ended() || n > most / 4 || random.below(4) == 0 => end,
            _ if n > most / 4 && !closers.is_empty() => *closers[random.below(closers.len())],
            _ => may[random.below(may.len())],
        };
        grammar.follow(token).unwrap();
        if text.stop_ids().contains(&token) {
            assert!(grammar.ended());
            return (String::from_utf8(bytes).unwrap(), true);
        }
        assert!(!text.tokenizer().is_special(token), "a control token inside the text: {token}");
        bytes.extend(text.tokenizer().token_bytes(token).unwrap());
    }
    (String::from_utf8_lossy(&bytes).into_owned(), false)
}

fn walks(factory: &GrammarFactory, constraint: &Constraint, count: usize, seed: u64, check: impl Fn(&str)) {
    let mut random = Random::new(seed);
    let mut complete = 0;
    for _ in 0..count {
        let (text, ended) = walk(factory, constraint, &mut random, 120);
        if ended {
            complete += 1;
            check(&text);
        }
    }
    assert!(complete > count / 2, "{complete} of {count} walks came to an end");
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 3},
            "home": {"$ref": "#/$defs/place"},
            "score": {"type": ["number", "null"]},
        },
        "required": ["name", "age", "home"],
        "additionalProperties": false,
        "$defs": {"place": {"anyOf": [
            {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
             "required": ["zip"], "additionalProperties": false},
            {"const": "nowhere"}
        ]}}
    })
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    let object = value.as_object().unwrap();
    let known = ["name", "age", "tags", "home", "score"];
    assert!(object.keys().all(|k| known.contains(&k.as_str())), "{text}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 20, "{text}");
    assert!((0..=130).contains(&value["age"].as_i64().unwrap()), "{text}");
    let zip = |zip: &str| zip.len() == 5 && zip.bytes().all(|b| b.is_ascii_digit());
    assert!(value["home"] == "nowhere" || zip(value["home"]["zip"].as_str().unwrap()), "{text}");
    assert!(value["score"].is_null() || value["score"].is_number(), "{text}");
    if let Some(tags) = object.get("tags") {
        let tags = tags.as_array().unwrap();
        assert!(tags.len() <= 3 && tags.iter().all(|t| t == "a" || t == "b\n" || t == "ü"), "{text}");
    }
}

#[test]
fn random_answers_fit_the_schema() {
    let factory = small();
    walks(&factory, &factory.json_schema(&person()).unwrap(), 1500, 1, check_person);
}

#[test]
fn random_answers_over_a_real_vocabulary_fit_the_schema() {
    let Some(factory) = whole() else { return };
    let begun = Instant::now();
    let object = factory.json_object().unwrap();
    println!("{} tokens are ready after {:?}", factory.0.vocab, begun.elapsed());
    let mut grammar = object.clone().0;
    let (mut set, mut took) = (TokenSet::new(factory.0.vocab), Duration::ZERO);
    for token in factory.text().tokenizer().encode(r#"{"name": "Somebody said that", "n": [1, 2.5]}"#, false).unwrap() {
        let begun = Instant::now();
        set.clear();
        grammar.allow(&mut set).unwrap();
        took = took.max(begun.elapsed());
        assert!(set.contains(token));
        grammar.follow(token).unwrap();
    }
    assert!(grammar.ended());
    println!("the slowest mask took {took:?}");
    let begun = Instant::now();
    let schema = factory.json_schema(&person()).unwrap();
    println!("a schema is compiled in {:?}", begun.elapsed());
    walks(&factory, &schema, 60, 2, check_person);
    walks(&factory, &object, 40, 3, |text| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        assert!(value.is_object());
    });
}

#[test]
fn random_answers_are_json_objects_words_and_choices() {
    let factory = small();
    walks(&factory, &factory.json_object().unwrap(), 600, 4, |text| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        assert!(value.is_object());
    });
    walks(&factory, &factory.regex("[ab]{3}(c|dé)").unwrap(), 200, 5, |text| {
        let rest = text.strip_suffix("c").or(text.strip_suffix("dé")).unwrap();
        assert!(rest.len() == 3 && rest.bytes().all(|b| b == b'a' || b == b'b'), "{text}");
    });
    let choices = ["yes", "no \"quoted\"\n", "näin"];
    walks(&factory, &factory.choice(&choices).unwrap(), 200, 6, |text| assert!(choices.contains(&text), "{text}"));
    let sum = factory.lark("start: sum\nsum: N (\"+\" N)*\nN: /[0-9]{1,2}/").unwrap();
    walks(&factory, &sum, 200, 7, |text| {
        assert!(text.split('+').all(|n| (1..=2).contains(&n.len()) && n.parse::<u32>().is_ok()), "{text}");
    });
}

#[test]
fn the_mask_is_what_trying_each_token_gives() {
    let factory = small();
    let grammars = [
        factory.json_schema(&person()).unwrap(),
        factory.json_object().unwrap(),
        factory.regex(r"(foo|b.?r)+\d{2,4}").unwrap(),
    ];
    let mut random = Random::new(8);
    for constraint in grammars {
        for _ in 0..3 {
            let mut grammar = constraint.clone().0;
            for _ in 0..15 {
                let may = allowed(&factory, &mut *grammar);
                let tried = (0..factory.0.vocab as u32).filter(|&t| grammar.boxed_clone().follow(t).is_ok());
                assert_eq!(may, tried.collect::<Vec<u32>>());
                if grammar.ended() {
                    break;
                }
                grammar.follow(may[random.below(may.len())]).unwrap();
            }
        }
    }
}

#[test]
fn a_complete_answer_allows_the_end_alone() {
    let factory = small();
    let mut grammar = factory.choice(&["a"]).unwrap().0;
    let a = factory.text().tokenizer().encode("a", false).unwrap();
    assert!(!grammar.ended());
    assert_eq!(allowed(&factory, &mut *grammar), a);
    grammar.follow(a[0]).unwrap();
    let mut ends = factory.text().stop_ids().to_vec();
    ends.sort();
    assert!(grammar.ended());
    assert_eq!(allowed(&factory, &mut *grammar), ends);
    assert!(grammar.boxed_clone().follow(a[0]).is_err());
    grammar.follow(ends[1]).unwrap();
    assert!(grammar.ended());
}

#[test]
fn only_so_many_grammars_wait() {
    let factory = small();
    let one = factory.0.compiling.lock().unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..MOST_WAITING).map(|_| scope.spawn(|| factory.choice(&["a"]))).collect();
        while factory.0.waiting.load(Ordering::Acquire) < MOST_WAITING {
            std::thread::yield_now();
        }
        let refused = factory.choice(&["a"]).unwrap_err();
        assert_eq!(refused, GrammarError::Busy { waiting: MOST_WAITING });
        drop(one);
        assert!(waiting.into_iter().all(|w| w.join().unwrap().is_ok()));
    });
    assert_eq!(factory.0.waiting.load(Ordering::Acquire), 0);
    assert!(factory.choice(&["a"]).is_ok());
}

#[test]
fn spaces_do_not_go_on_for_ever() {
    let factory = small();
    let mut grammar = factory.json_object().unwrap().0;
    let token = |text: &str| factory.text().tokenizer().encode(text, false).unwrap()[0];
    grammar.follow(token("{")).unwrap();
    let spaces = (0..100).take_while(|_| grammar.follow(token("\n")).is_ok()).count();
    assert!(spaces <= 3, "{spaces}");
}

#[test]
fn what_cannot_be_compiled_is_refused_with_a_short_reason() {
    let factory = small();
    let errors = [
        factory.json_schema(&json!({"type": "strin"})),
        factory.json_schema(&json!({"type": "string", "format": "no-such-format"})),
        factory.json_schema(&json!({"$ref": "#/$defs/missing"})),
        factory.json_schema(&json!({"type": "string", "pattern": "(((("})),
        factory.json_schema(&json!({"type": "string", "pattern": "(?=a)b"})),
        factory.json_schema(&json!({"oneOf": [{"type": "string"}, {"minLength": 2}]})),
        factory.json_schema(&json!({"allOf": [{"type": "string"}, {"type": "null"}]})),
        factory.json_schema(&json!({"type": "ü".repeat(200).chars().collect::<String>()})),
        factory.regex("a(b"),
        factory.regex(r"(a)\1"),
        factory.regex("(?<!a)b"),
        factory.lark("start: missing"),
        factory.lark("root ::= \"a\""),
        factory.lark(" \n"),
        factory.lark("start: %json {\"not\": {}}"),
        factory.choice::<&str>(&[]),
        factory.choice(&["a", ""]),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        let text = error.err().unwrap_or_else(|| panic!("{i} was accepted")).to_string();
        println!("{i}: {text}");
        assert!(text.len() < 800 && text.contains("cannot be used: ") && !text.contains('\n'), "{i}: {text}");
        assert!(!text.contains("backtrace") && !text.contains("panic"), "{i}: {text}");
    }
}

/// Grammars made to eat time, memory or stack: each is refused or answered soon, as are its first masks.
#[test]
fn hostile_grammars_cost_little() {
    let factory = small();
    let _ = factory.json_object();
    let many = |n: usize| (0..n).map(|i| json!(format!("v{i:05}"))).collect::<Vec<Value>>();
    let chain: serde_json::Map<String, Value> = (0..900)
        .map(|i| (format!("a{i}"), json!({"type": "array", "items": {"$ref": format!("#/$defs/a{}", (i + 1) % 900)}})))
        .collect();
    let doubling: serde_json::Map<String, Value> = (0..40)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/a{}", i + 1)});
            (format!("a{i}"), json!({"allOf": [next, next], "minLength": i}))
        })
        .chain([("a40".to_string(), json!({"type": "string"}))])
        .collect();
    let patterns: serde_json::Map<String, Value> =
        (0..300).map(|i| (format!("^(a|b)*{i}(c|d){{20}}$"), json!({"type": "string"}))).collect();
    let wide = |n: usize| json!({"anyOf": (0..n).map(|i| json!({"properties": {format!("p{i}"): {"minLength": i}}})).collect::<Vec<_>>()});
    let nested =
        (0..30).fold(json!({"type": "string"}), |inner, _| json!({"items": inner, "minItems": 4000, "type": "array"}));
    let properties: serde_json::Map<String, Value> =
        (0..4000).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
    let schemas = [
        ("cycle", json!({"$ref": "#"})),
        ("two cycles", json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        (
            "cycle of allOf",
            json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"}),
        ),
        ("chain", json!({"$defs": chain, "$ref": "#/$defs/a0"})),
        ("doubling", json!({"$defs": doubling, "$ref": "#/$defs/a0"})),
        ("enum", json!({"enum": many(20_000)})),
        ("patterns", json!({"type": "object", "patternProperties": patterns})),
        ("wide", wide(1000)),
        ("product", json!({"allOf": [wide(40), wide(40), wide(40), wide(40)]})),
        ("nested counts", nested),
        ("properties", json!({"type": "object", "properties": properties, "additionalProperties": false})),
        ("bounded properties", json!({"type": "object", "properties": properties, "minProperties": 3999})),
        ("exponential", json!({"type": "string", "pattern": "^(a|b)*a(a|b){40}$"})),
        ("length", json!({"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"})),
        ("counted", json!({"type": "string", "minLength": 60000, "maxLength": 65000})),
        ("large numbers", json!({"type": "integer", "minimum": 1e30, "maximum": 1.7e308})),
        ("close numbers", json!({"type": "number", "minimum": 1e-300, "exclusiveMaximum": 1.7e308})),
        ("multiple", json!({"type": "integer", "multipleOf": 999_999_937})),
        ("fraction", json!({"type": "number", "multipleOf": 1e-300, "minimum": 1e-300, "maximum": 1e300})),
    ];
    let nest = |open: &str, close: &str, n: usize| format!("{}a{}", open.repeat(n), close.repeat(n));
    let rules: String = (0..1000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    type Compile<'a> = Box<dyn Fn() -> Result<Constraint, GrammarError> + 'a>;
    let mut grammars: Vec<(String, Compile)> = vec![];
    for (name, schema) in &schemas {
        grammars.push((format!("schema: {name}"), Box::new(|| factory.json_schema(schema))));
    }
    for expression in [
        nest("(", ")", 2000),
        nest("(", ")*", 240),
        "(a|b)*a(a|b){60}".into(),
        "((a{100}){100}){100}".into(),
        "(x+x+)+y".into(),
        "a?".repeat(2000),
        "a|".repeat(2000),
        "a?".repeat(20_000),
        r"(\w|\s|.)*\p{L}{200}(\w|é){300}".into(),
    ] {
        let name: String = expression.chars().take(30).collect();
        grammars.push((format!("regex: {name}"), Box::new(move || small().regex(&expression))));
    }
    for grammar in [
        format!("start: A\nA: /{}/", "a?".repeat(8000)),
        format!("start: A\nA: {}", "\"a\"? ".repeat(3000)),
        format!("start: {}", "\"a\"? ".repeat(3000)),
        format!("start: {}", nest("(", ")", 7_000).replace('a', "\"a\"")),
        format!("start: {}", nest("[", "]", 7_000).replace('a', "\"a\"")),
        format!("start: r0\n{rules}r1000: \"a\""),
        "start: start".into(),
        "start: start start | \"a\" | \"\"".into(),
        "start: a a a a a a a a\na: b b b b b b b b\nb: c c c c c c c c\nc: d d d d d d d d\nd: \"x\" | start |".into(),
        "start: \"a\"{100000}{100000}".into(),
        format!("start: A\nA: {}", nest("(", ")", 7_000).replace('a', "\"a\"")),
        format!("start: A\nA: {}\"a\"", "~".repeat(7_000)),
        format!("start: A\nA: /a/{}", " & /(a|b)*a(a|b){12}/".repeat(60)),
        format!("start: %lark {{ {} }}", nest("start: %lark {", "}", 2000).replace('a', "start: \"a\"")),
    ] {
        let name: String = grammar.chars().take(40).collect();
        grammars.push((format!("lark: {name}"), Box::new(move || small().lark(&grammar))));
    }
    let choices: Vec<String> = (0..30_000).map(|i| format!("{:x}", i * 7919)).collect();
    grammars.push(("choices".into(), Box::new(move || small().choice(&choices))));
    for (name, compile) in &grammars {
        let begun = Instant::now();
        let compiled = compile();
        let compiling = begun.elapsed();
        let mut longest = Duration::ZERO;
        let outcome = match compiled {
            Err(e) => e.to_string(),
            Ok(constraint) => {
                let mut random = Random::new(9);
                let mut grammar = constraint.0;
                let mut steps = 0;
                let mut set = TokenSet::new(factory.0.vocab);
                let outcome = loop {
                    if steps == 40 {
                        break "goes on".into();
                    }
                    steps += 1;
                    set.clear();
                    let begun = Instant::now();
                    if let Err(e) = grammar.allow(&mut set) {
                        break e;
                    }
                    let may = members(&set);
                    if let Err(e) = grammar.follow(may[random.below(may.len())]) {
                        break e;
                    }
                    longest = longest.max(begun.elapsed());
                };
                format!("{steps} steps, the longest {longest:?}: {outcome}")
            }
        };
        println!("{name}: {compiling:?}: {}", outcome.chars().take(200).collect::<String>());
        // Loose, because machines that test are shared; a tenth of it was measured.
        assert!(compiling < Duration::from_secs(20), "{name}: {compiling:?}");
        assert!(longest < Duration::from_secs(2), "{name}: {longest:?}");
    }
}
#[test]
fn grammars_whose_masks_take_too_long_are_refused() {
    let factory = small();
    let optional = |n: usize| factory.lark(&format!("start: {}", "\"a\"? ".repeat(n)));
    assert!(optional(200).is_ok());
    let refused = optional(3250).unwrap_err().to_string();
    assert!(refused.contains("ms to tell which token may come next"), "{refused}");
    let many: serde_json::Map<String, Value> =
        (0..400).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
    let begun = Instant::now();
    let most = factory.json_schema(&json!({"type": "object", "properties": many, "additionalProperties": false}));
    println!("400 properties: {:?}", begun.elapsed());
    assert!(most.is_ok(), "{most:?}");
}
