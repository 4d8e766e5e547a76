//! The page at `/`, in a headless browser. The server behind it is a fake: what is tested is what a reader sees.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use quern::server::{Reply, page::page};
use serde_json::{Value, json};

use crate::support::{browser::Browser, skip};

/// Markup, code and a wide line: nothing of it may run or push the page apart.
const ANSWER: &str = "Plain <img src=x onerror=\"document.title='run'\"> and `code` and **bold**.\n\n```html\n\
                      <script>document.title='run'</script>\n0123456789012345678901234567890123456789012345678901234567890\n```\nDone.";

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line)? > 2 {
        head += &std::mem::take(&mut line).to_lowercase();
    }
    let length = head.split("content-length: ").nth(1).map_or(0, |l| l.lines().next().unwrap().parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let answer = |status: &str, kind: &str, more: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n{more}\r\n");
        [head.as_bytes(), body].concat()
    };
    if head.starts_with("get / ") {
        let Reply::Whole { content_type, headers, body, .. } = page() else { panic!("a page is whole") };
        let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        return stream.write_all(&answer("200 OK", content_type, &more, &body));
    }
    if head.starts_with("get /v1/models ") {
        let models = json!({"data": [{"id": "fake-model"}]}).to_string();
        return stream.write_all(&answer("200 OK", "application/json", "", models.as_bytes()));
    }
    assert!(head.starts_with("post /v1/chat/completions "), "{head}");
    let request: Value = serde_json::from_slice(&body).unwrap();
    let messages = request["messages"].as_array().unwrap();
    let asked = messages.last().unwrap()["content"].as_str().unwrap();
    if asked == "secret" && !head.contains("authorization: bearer open sesame") {
        let error = json!({"error": {"message": "a key is needed"}}).to_string();
        return stream.write_all(&answer("401 Unauthorized", "application/json", "", error.as_bytes()));
    }
    stream.write_all(&answer("200 OK", "text/event-stream", "", b""))?;
    let mut event = |value: Value| write!(stream, "data: {value}\n\n");
    let text = match asked {
        "slow" => "word ".repeat(2000),
        "request" => request.to_string(),
        _ => ANSWER.to_string(),
    };
    event(json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))?;
    let pause = if asked == "slow" { 10 } else { 1 };
    for piece in text.split_inclusive(' ') {
        std::thread::sleep(Duration::from_millis(pause));
        event(json!({"choices": [{"delta": {"content": piece}}]}))?;
    }
    event(json!({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"predicted_per_second": 123.4}}))?;
    event(json!({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 20}}}))?;
    write!(stream, "data: [DONE]\n\n")
}

#[test]
fn the_page_works_by_keyboard_on_a_phone_and_without_running_markup() {
    let Some(mut browser) = Browser::new() else {
        return skip("the page at /", "QUERN_CHROMIUM=<path of a Chromium> is not set");
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A reader that stopped is no failure.
            std::thread::spawn(move || drop(serve(stream.unwrap())));
        }
    });
    let answered = |n: usize| {
        format!(
            "document.querySelectorAll('.assistant .again').length == 1 && document.querySelectorAll('.assistant').length == {n}"
        )
    };
    let ask = |browser: &mut Browser, text: &str| {
        browser.until("document.activeElement.id == 'text'");
        browser.write(text);
        browser.press("Enter", 13, "\r", 0);
    };
    let wide = "document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth";

    // A question and its answer, by keyboard alone.
    browser.open(&url);
    browser.until("document.querySelector('#model').textContent == 'fake-model'");
    browser.picture("empty");
    browser.write("first line");
    browser.press("Enter", 13, "\r", 8);
    browser.write("second line");
    assert_eq!(browser.value("document.querySelector('#text').value"), "first line\nsecond line");
    browser.press("Enter", 13, "\r", 0);
    browser.until(&answered(1));
    browser.picture("answer");
    let text = browser.value("document.querySelector('.assistant .body').innerText");
    assert!(text.as_str().unwrap().contains("<img src=x onerror="), "{text}");
    assert_eq!(browser.value("document.querySelectorAll('.body img, .body script').length"), 0);
    assert!(browser.value("document.title").as_str().unwrap().starts_with("fake-model"));
    assert_eq!(browser.value("document.querySelector('.assistant pre code').textContent.split('\\n').length"), 2);
    assert_eq!(browser.value("document.querySelector('.assistant strong').textContent"), "bold");
    let info = browser.value("document.querySelector('.assistant .info').textContent");
    assert_eq!(info, "123.4 tokens/s · 12 tokens · prompt 30, 20 of them cached");

    // Stopping; what came stays.
    ask(&mut browser, "slow");
    browser.until("document.querySelectorAll('.assistant')[1]?.innerText.includes('word word')");
    assert_eq!(browser.value("document.querySelector('#stop').hidden"), false);
    browser.press("Escape", 27, "", 0);
    browser.until(&answered(2));
    let stopped = browser.value("document.querySelectorAll('.assistant')[1].innerText");
    assert!(stopped.as_str().unwrap().contains("stopped"), "{stopped}");
    assert!(stopped.as_str().unwrap().matches("word").count() < 1500);

    // Settings reach the request and outlive the page.
    browser.value("document.querySelector('#gear').click()");
    for (field, value) in [("system", "Be brief."), ("temperature", "0.5"), ("max_tokens", "77"), ("seed", "3")] {
        browser.value(&format!("document.querySelector('#{field}').focus()"));
        browser.write(value);
    }
    browser.picture("settings");
    browser.press("Escape", 27, "", 0);
    assert_eq!(browser.value("document.querySelector('#settings').hidden"), true);
    browser.call("Page.reload", json!({}));
    browser.until("document.readyState == 'complete' && document.querySelectorAll('article').length == 0");
    ask(&mut browser, "request");
    browser.until(&answered(1));
    let sent = browser.value("document.querySelector('.assistant .body').textContent");
    let sent: Value = serde_json::from_str(sent.as_str().unwrap()).unwrap();
    assert_eq!(sent["messages"][0], json!({"role": "system", "content": "Be brief."}));
    assert_eq!((&sent["temperature"], &sent["max_tokens"], &sent["seed"]), (&json!(0.5), &json!(77), &json!(3)));
    assert!(sent.get("top_p").is_none());

    // A key, where the server wants one.
    assert_eq!(browser.complaints, Vec::<String>::new());
    ask(&mut browser, "secret");
    browser.until("document.querySelector('.error')?.textContent.includes('a key is needed')");
    browser.until("document.activeElement.id == 'key'");
    browser.write("open sesame");
    browser.value("document.querySelector('.again').click()");
    browser.until(
        "document.querySelectorAll('.assistant')[1].innerText.includes('Done.') && !document.querySelector('.error')",
    );
    browser.press("Escape", 27, "", 0);

    // On a small phone, in the dark.
    let phone = json!({"width": 320, "height": 640, "deviceScaleFactor": 2, "mobile": true});
    browser.call("Emulation.setDeviceMetricsOverride", phone);
    let dark = json!({"features": [{"name": "prefers-color-scheme", "value": "dark"}]});
    browser.call("Emulation.setEmulatedMedia", dark);
    browser.until("innerWidth == 320");
    assert_eq!(browser.value(wide), false);
    browser.picture("phone-answer");
    browser.value("document.querySelector('#gear').click()");
    assert_eq!(browser.value(wide), false);
    browser.picture("phone-settings");
    // The field to write in stays on the screen.
    let bottom = browser.value("document.querySelector('#send').getBoundingClientRect().bottom");
    assert!(bottom.as_f64().unwrap() <= 640.0, "{bottom}");
    // The refused request is the only thing that was complained about.
    assert!(browser.complaints.iter().all(|c| c.contains("401")), "{:?}", browser.complaints);
}
