//! The `quern` program.
fn main() {}
