#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| quern_fuzz::qrn::run(input));
