//! The `quern` program: parses the command line, runs the command, prints an error's whole chain once.
#![forbid(unsafe_code)]

use std::{io::Write, process::ExitCode};

use clap::Parser;

fn main() -> ExitCode {
    // A file-size limit then is an error of the write that meets it, and what was begun is removed.
    let ignored = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, ignored);
    match quern::cli::main(quern::cli::Cli::parse_from(quern::cli::arguments(std::env::args_os()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = error.to_string();
            let mut cause = error.source();
            while let Some(e) = cause {
                let next = e.to_string();
                // Some errors repeat their cause in their own text.
                if !text.contains(&next) {
                    text += ": ";
                    text += &next;
                }
                cause = e.source();
            }
            // A full or closed stderr is no reason to panic.
            let _ = writeln!(std::io::stderr(), "quern: {}", quern::cli::one_line(&text));
            ExitCode::from(quern::cli::exit_code(&*error))
        }
    }
}
