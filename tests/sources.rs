//! Guards on the source itself.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Everything that is compiled from this repository.
const FOLDERS: [&str; 5] = ["src", "models", "kernels", "convert", "tests"];

#[test]
fn unsafe_is_in_the_kernels_and_in_one_line_of_the_map() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![];
    FOLDERS.iter().for_each(|folder| rust_files(&root.join(folder), &mut files));
    assert!(files.len() > 50, "only {} files were found", files.len());
    let mut found = vec![];
    for path in files {
        let relative = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        // The fuzz targets are a workspace of their own and count allocations, which needs it.
        if relative.starts_with("kernels/") || relative.starts_with("tests/fuzz/") {
            continue;
        }
        let code = code_of(&fs::read_to_string(&path).unwrap());
        let word = |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| *w == UNSAFE).count();
        for (number, line) in code.lines().enumerate() {
            (0..word(line)).for_each(|_| found.push((relative.clone(), number + 1)));
        }
    }
    let places: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(places, ["models/src/map.rs"], "{found:?}");
}

#[test]
fn packages_above_the_kernels_forbid_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in ["src/lib.rs", "src/main.rs", "convert/src/lib.rs", "tests/main.rs"] {
        let code = code_of(&fs::read_to_string(root.join(file)).unwrap());
        assert!(code.contains(&format!("#![forbid({UNSAFE}_code)]")), "{file}");
    }
}

const UNSAFE: &str = "unsafe";

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, files);
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
}

/// The text without comments, strings and character literals; lines stay where they are.
fn code_of(text: &str) -> String {
    let text: Vec<char> = text.chars().collect();
    let mut code = String::new();
    let mut at = 0;
    while at < text.len() {
        let end = skipped(&text, at);
        if end == at {
            code.push(text[at]);
            at += 1;
        } else {
            code.push(' ');
            code.extend(text[at..end].iter().filter(|&&c| c == '\n'));
            at = end;
        }
    }
    code
}

/// Where the comment, string or character literal that begins at `at` ends; `at` if none does.
fn skipped(text: &[char], at: usize) -> usize {
    let is = |i: usize, wanted: &str| wanted.chars().enumerate().all(|(j, c)| text.get(i + j) == Some(&c));
    let until = |from: usize, end: &str| (from..text.len()).find(|&i| is(i, end)).map_or(text.len(), |i| i + end.len());
    if is(at, "//") {
        return (at..text.len()).find(|&i| text[i] == '\n').unwrap_or(text.len());
    }
    if is(at, "/*") {
        let (mut depth, mut i) = (1, at + 2);
        while i < text.len() && depth > 0 {
            if is(i, "/*") || is(i, "*/") {
                depth = if text[i] == '/' { depth + 1 } else { depth - 1 };
                i += 1;
            }
            i += 1;
        }
        return i;
    }
    let inside_word = at > 0 && (text[at - 1].is_alphanumeric() || text[at - 1] == '_');
    let raw = if is(at, "br") { at + 2 } else { at + 1 };
    if !inside_word && (is(at, "r") || is(at, "br")) {
        let hashes = text[raw..].iter().take_while(|&&c| c == '#').count();
        if text.get(raw + hashes) == Some(&'"') {
            return until(raw + hashes + 1, &format!("\"{}", "#".repeat(hashes)));
        }
    }
    let quoted = |from: usize, quote: char| {
        let mut i = from;
        while i < text.len() && text[i] != quote {
            i += if text[i] == '\\' { 2 } else { 1 };
        }
        (i + 1).min(text.len())
    };
    match text[at] {
        '"' => quoted(at + 1, '"'),
        // A lifetime has no second quote right after its first character.
        '\'' if is(at + 1, "\\") || text.get(at + 2) == Some(&'\'') => quoted(at + 1, '\''),
        _ => at,
    }
}

#[test]
fn words_in_comments_and_texts_are_not_code() {
    let text = r##"
        let a = "unsafe \" unsafe"; // unsafe
        /* unsafe /* unsafe */ unsafe */ let b = r#"unsafe " unsafe"#; let c = b"unsafe";
        fn f<'a>(x: &'a str) -> char { let q = '"'; let s = '\''; unsafe { g(x) }; 'u' } // '
        #![forbid(unsafe_code)]
    "##;
    let code = code_of(text);
    assert_eq!(code.matches("unsafe").count(), 2, "{code}");
    assert_eq!(code.lines().count(), text.lines().count());
    assert!(code.lines().nth(3).unwrap().contains("unsafe { g(x) }"), "{code}");
}
