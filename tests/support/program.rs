//! The built program, run as a user runs it.

use std::{
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use serde_json::Value;

/// How a run of the program ended.
#[derive(Debug)]
pub struct Ran {
    /// Exit status; `None`: a signal.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// The program with arguments, to be changed before it is run.
pub fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quern"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the program on an empty stdin.
pub fn quern<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    Ran::of(&mut command(args))
}

/// Runs the program with a text on stdin.
pub fn quern_reads<S: AsRef<OsStr>>(args: &[S], stdin: &[u8]) -> Ran {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that does not want its input closes it.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    Ran::new(child.wait_with_output().unwrap())
}

/// Runs the program where the virtual GPU is the driver, with more of the environment.
pub fn quern_on_gpu<S: AsRef<OsStr>>(args: &[S], env: &[(&str, &str)]) -> Ran {
    let mut command = command(args);
    Ran::of(command.env("LD_LIBRARY_PATH", virtual_gpu()).envs(env.iter().copied()))
}

/// A folder with the virtual GPU under the name that programs look for.
pub fn virtual_gpu() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let library = quern_vgpu::library();
        let folder = library.parent().unwrap().join("virtual-gpu");
        std::fs::create_dir_all(&folder).unwrap();
        let (name, own) = (folder.join("libcuda.so"), folder.join(format!("{}.part", std::process::id())));
        std::os::unix::fs::symlink(&library, &own).unwrap();
        std::fs::rename(own, name).unwrap();
        folder
    })
}

impl Ran {
    pub fn of(command: &mut Command) -> Ran {
        Ran::new(command.output().unwrap())
    }

    pub fn new(output: std::process::Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
        let ran = Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) };
        assert!(!ran.err.contains("panicked"), "{ran:?}");
        ran
    }

    /// The run must have worked.
    #[track_caller]
    pub fn ok(self) -> Ran {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// The run must have failed (status 1) with a message, and nothing on stdout.
    #[track_caller]
    pub fn fails(self, parts: &[&str]) -> Ran {
        self.ends(1, parts)
    }

    /// The run must have been refused as wrong usage (status 2).
    #[track_caller]
    pub fn misused(self, parts: &[&str]) -> Ran {
        self.ends(2, parts)
    }

    #[track_caller]
    fn ends(self, code: i32, parts: &[&str]) -> Ran {
        assert_eq!((self.code, self.out.as_str()), (Some(code), ""), "{self:#?}");
        self.says(parts)
    }

    /// Everything in `parts` must be on stderr.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Ran {
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in: {}", self.err);
        }
        self
    }

    /// Everything in `parts` must be on stdout.
    #[track_caller]
    pub fn prints(self, parts: &[&str]) -> Ran {
        for part in parts {
            assert!(self.out.contains(part), "{part:?} is not in: {}", self.out);
        }
        self
    }

    /// Stdout as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e} in: {self:#?}"))
    }
}

/// Presses Ctrl-C.
pub fn interrupt(child: &Child) {
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap();
    assert!(kill.success());
}

/// Waits until something is so; a minute at most.
#[track_caller]
pub fn wait_for(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
