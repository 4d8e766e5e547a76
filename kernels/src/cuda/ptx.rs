//! The kernels as they lie in the program: PTX of `kernels/cuda/*.cu`, made by `kernels/cuda/ptx.py`.

use super::module::Ptx;

macro_rules! ptx {
    ($($(#[$doc:meta])* $constant:ident = $name:literal;)*) => {
        $( $(#[$doc])* pub const $constant: Ptx = Ptx { name: $name, text: include_str!(concat!("../../ptx/", $name, ".ptx")) }; )*
        /// All of them.
        pub const ALL: &[Ptx] = &[$($constant),*];
    };
}

ptx! {
    /// Attention.
    ATTEND = "attend";
    /// The likeliest tokens.
    CHOOSE = "choose";
    /// What the rows of heads begin with, and Medusa's blocks.
    HEADS = "heads";
    /// Norms, activations, rope and append.
    OPS = "ops";
    /// Linear layers in f32.
    EXACT = "exact";
    /// Linear layers on integer tensor cores.
    INT8 = "int8";
    /// Linear layers on tensor cores.
    LINEAR = "linear";
    /// Linear layers on tensor cores, for many tokens.
    WIDE = "wide";
    /// Mixtures of experts.
    ROUTE = "route";
    /// Rows of tables, and floats on their way to tiles.
    ROWS = "rows";
    /// What a device can do at most.
    PEAK = "peak";
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::PathBuf};

    use super::*;

    /// Hash of a source and the headers that it includes, as `ptx.py` computes it.
    fn hash(source: &str) -> String {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let read = |name: &str| fs::read(folder.join(name)).expect("a source");
        let (mut headers, mut new) = (BTreeSet::new(), vec![source.to_string()]);
        while let Some(name) = new.pop() {
            let text = String::from_utf8(read(&name)).expect("text");
            let included = text.lines().filter_map(|l| l.strip_prefix("#include \"")?.strip_suffix('"'));
            new.extend(included.filter(|h| headers.insert(h.to_string())).map(String::from));
        }
        let mut state = 0xcbf29ce484222325u64;
        for name in std::iter::once(source.to_string()).chain(headers) {
            let bytes = name.bytes().chain([0]).chain(read(&name)).chain([0]);
            bytes.for_each(|b| state = (state ^ u64::from(b)).wrapping_mul(0x100000001b3));
        }
        format!("{state:016x}")
    }

    #[test]
    fn ptx_is_that_of_the_sources() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let files = fs::read_dir(folder).expect("sources").map(|e| e.expect("an entry").path());
        let sources: BTreeSet<String> = files
            .filter(|p| p.extension().is_some_and(|e| e == "cu"))
            .map(|p| p.file_stem().expect("a name").to_string_lossy().into_owned())
            .collect();
        let known: BTreeSet<String> = ALL.iter().map(|p| p.name.to_string()).collect();
        assert_eq!(sources, known, "sources in kernels/cuda and modules in ptx.rs");
        for ptx in ALL {
            let first = format!("// fnv1a64 {} of {}.cu and the headers", hash(&format!("{}.cu", ptx.name)), ptx.name);
            assert_eq!(ptx.text.lines().next(), Some(&*first), "run kernels/cuda/ptx.py and commit its output");
            assert!(ptx.text.contains("\n.version 8.0\n.target sm_80\n"), "{}", ptx.name);
        }
    }
}
