//! What is counted of kernels: instructions by class, memory traffic, bank conflicts.

use std::collections::BTreeMap;

macro_rules! classes {
    ($($name:ident = $text:literal),* $(,)?) => {
        /// What an instruction is counted as.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Class { $($name),* }

        impl Class {
            pub fn name(self) -> &'static str {
                match self { $(Class::$name => $text),* }
            }
        }
    };
}
classes! {
    Mma = "mma",
    LoadMatrix = "ldmatrix",
    CopyAsync = "cp.async",
    LoadGlobal = "ld.global",
    StoreGlobal = "st.global",
    LoadShared = "ld.shared",
    StoreShared = "st.shared",
    LoadOther = "ld.other",
    StoreOther = "st.other",
    Atomic = "atom",
    Barrier = "bar",
    Warp = "shfl",
    Float = "float",
    Half = "half",
    Special = "special",
    Int = "int",
    Convert = "cvt",
    Move = "mov",
    Compare = "setp",
    Branch = "bra",
    Other = "other",
}

impl Class {
    /// The class of an opcode that is given in parts.
    pub fn of(parts: &[String]) -> Class {
        let has = |name: &str| parts.iter().any(|part| part == name);
        match parts[0].as_str() {
            "mma" => Class::Mma,
            "ldmatrix" => Class::LoadMatrix,
            "cp" => Class::CopyAsync,
            "ld" | "ldu" if has("global") => Class::LoadGlobal,
            "ld" if has("shared") => Class::LoadShared,
            "ld" => Class::LoadOther,
            "st" if has("global") => Class::StoreGlobal,
            "st" if has("shared") => Class::StoreShared,
            "st" => Class::StoreOther,
            "atom" | "red" => Class::Atomic,
            "bar" | "barrier" => Class::Barrier,
            "shfl" | "vote" | "match" | "redux" | "activemask" => Class::Warp,
            "ex2" | "lg2" | "rcp" | "rsqrt" | "sqrt" | "sin" | "cos" | "tanh" => Class::Special,
            "cvt" => Class::Convert,
            "mov" | "cvta" | "selp" | "prmt" => Class::Move,
            "setp" | "set" | "slct" | "testp" => Class::Compare,
            "bra" | "brx" | "ret" | "exit" | "call" => Class::Branch,
            "membar" | "fence" | "trap" | "nanosleep" | "isspacep" | "prefetch" => Class::Other,
            _ if has("f16x2") || has("bf16x2") || has("f16") || has("bf16") => Class::Half,
            _ if has("f32") || has("f64") => Class::Float,
            _ => Class::Int,
        }
    }
}

/// Memory traffic of a launch. Sectors are 32 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Instructions of a warp that touched global memory.
    pub requests: u64,
    /// Sectors they touched, and the fewest that could hold their bytes.
    pub sectors: u64,
    pub ideal: u64,
    /// Bytes that were asked for.
    pub read: u64,
    pub written: u64,
    /// Instructions of a warp that touched shared memory, and the passes they need over its banks.
    pub shared_requests: u64,
    pub shared_waves: u64,
    /// The fewest passes in which as many bytes can be moved.
    pub shared_ideal: u64,
}

impl Traffic {
    pub fn add(&mut self, other: &Traffic) {
        self.requests += other.requests;
        self.sectors += other.sectors;
        self.ideal += other.ideal;
        self.read += other.read;
        self.written += other.written;
        self.shared_requests += other.shared_requests;
        self.shared_waves += other.shared_waves;
        self.shared_ideal += other.shared_ideal;
    }
}

/// All launches of one kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelStats {
    pub launches: u64,
    pub ctas: u64,
    pub thread_instructions: u64,
    pub warp_instructions: u64,
    /// Warp instructions of each class.
    pub classes: BTreeMap<&'static str, u64>,
    pub traffic: Traffic,
    /// Bytes of the different sectors that each launch read and wrote, over all launches.
    pub unique_read: u64,
    pub unique_written: u64,
    /// Processor time of the launches.
    pub nanoseconds: u64,
}

impl KernelStats {
    /// One line of `name=value` pairs.
    pub fn line(&self, name: &str) -> String {
        let t = &self.traffic;
        let mut line = format!("kernel={name}");
        for (key, value) in [
            ("launches", self.launches),
            ("ctas", self.ctas),
            ("thread_instructions", self.thread_instructions),
            ("warp_instructions", self.warp_instructions),
            ("requests", t.requests),
            ("sectors", t.sectors),
            ("ideal_sectors", t.ideal),
            ("read", t.read),
            ("written", t.written),
            ("unique_read", self.unique_read),
            ("unique_written", self.unique_written),
            ("shared_requests", t.shared_requests),
            ("shared_waves", t.shared_waves),
            ("shared_ideal", t.shared_ideal),
            ("nanoseconds", self.nanoseconds),
        ] {
            line += &format!("\t{key}={value}");
        }
        for (class, count) in &self.classes {
            line += &format!("\tclass:{class}={count}");
        }
        line
    }
}
