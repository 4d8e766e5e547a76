//! Every seed through its target: needs no fuzzer and no nightly compiler.

use std::fs;

fn each(target: &str, run: impl Fn(&[u8])) {
    let dir = format!("{}/seeds/{target}", env!("CARGO_MANIFEST_DIR"));
    for entry in fs::read_dir(dir).expect("there are seeds") {
        run(&fs::read(entry.expect("it can be listed").path()).expect("it can be read"));
    }
}

#[test]
fn seeds_run() {
    each("qrn", quern_fuzz::qrn::run);
    each("safetensors", quern_fuzz::safetensors::run);
    each("gguf", quern_fuzz::gguf::run);
}
