//! What kernels and this program must agree on: structs that kernels take by value, and constants of layouts.
//!
//! Defined here once; `kernels/cuda/layout.h` is their text in C++, which a test compares with these definitions (and
//! writes, with `QUERN_WRITE_LAYOUT=1`).

use quern_models::{PANEL, SUPER};

use super::{DevicePtr, buffer::Pod};

macro_rules! device_struct {
    ($(#[$doc:meta])* struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $t:ident $([$n:literal])?,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $($(#[$field_doc])* pub $field: device_struct!(@type $t $($n)?),)* }

        // SAFETY: `repr(C)`, of addresses and numbers of which every bit pattern is valid; addresses come first and
        // the numbers are even in number, so that there is no padding (a test looks).
        unsafe impl Pod for $name {}

        #[cfg(test)]
        impl $name {
            const C: &str = concat!(
                "struct ", stringify!($name), " {\n",
                $("    ", stringify!($t), " ", stringify!($field), $("[", stringify!($n), "]",)? ";\n",)*
                "};\n"
            );
            const FIELDS: usize = 0 $(+ size_of::<device_struct!(@type $t $($n)?)>())*;
        }
    };
    (@type $t:ident) => { $t };
    (@type $t:ident $n:literal) => { [$t; $n] };
}

macro_rules! device_constants {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$doc])* #[allow(dead_code)] pub(super) const $name: u32 = $value as u32;)*
        #[cfg(test)]
        const CONSTANTS: &[(&str, u32)] = &[$((stringify!($name), $name)),*];
    };
}

device_constants! {
    /// Rows of a panel.
    PANEL_ROWS = PANEL;
    /// Columns under one upper level of nested scales.
    SUPER_COLUMNS = SUPER;

    /// P64 tiles of 4-bit integers.
    CODE_INT4 = 0;
    /// P64 tiles of 8-bit integers.
    CODE_INT8 = 1;
    /// P64 tiles of 4-bit floats.
    CODE_E2M1 = 2;
    /// P64 tiles of 8-bit floats.
    CODE_E4M3 = 3;
    /// Tiles like those of 8-bit integers with an f16 in place of a byte and the order 0, 2, 1, 3 in a quad.
    CODE_HALVES = 4;
    /// Rows of f32.
    CODE_F32 = 5;
    /// Rows of f16.
    CODE_F16 = 6;
    /// Rows of bf16.
    CODE_BF16 = 7;

    /// Zero is the middle code, or there are no zeros.
    ZERO_MID = 0;
    /// Zero codes.
    ZERO_CODE = 1;
    /// Minima.
    ZERO_MIN = 2;

    /// Scales (and minima) in f32.
    SCALE_F32 = 0;
    /// In f16.
    SCALE_F16 = 1;
    /// In bf16.
    SCALE_BF16 = 2;
    /// A signed byte times an f16 of the upper level.
    SCALE_NESTED = 3;
    /// No scales.
    SCALE_NONE = 4;

    /// Warps of a block that share the columns of a panel, each with a slice of its own.
    SLICES = 8;
    /// Columns that a warp takes at a time.
    STAGE_COLUMNS = 32;
    /// Values from one token's sums to the next's where warps meet: no two lanes of a store are in one bank.
    SUMS_PITCH = 68;
    /// Tokens of a block of the wide kernels.
    WIDE_TOKENS = 64;
    /// Tokens of a block of the exact kernels.
    EXACT_TOKENS = 8;

    /// Most experts of a layer.
    MAX_EXPERTS = quern_models::spec::MAX_EXPERTS;
    /// Most experts that a token may have.
    MAX_TOP = quern_models::spec::MAX_TOP;
}

device_struct! {
    /// A weight on the device, see [`Weight`](super::Weight).
    struct WeightRef {
        /// Codes in P64 tiles, halves in tiles, or rows of floats.
        codes: DevicePtr,
        /// Scales plane.
        scales: DevicePtr,
        /// Zero codes or minima.
        zeros: DevicePtr,
        /// Upper level of nested scales and minima.
        supers: DevicePtr,
        /// Bytes from one expert's to the next's, of a mixture whose first this is.
        step: u64,
        /// Rows: outputs.
        n: u32,
        /// Columns: inputs.
        k: u32,
        /// Columns with their padding; of rows of floats those of the file.
        k_pad: u32,
        /// Columns of a scale.
        group: u32,
        /// Groups of a row.
        groups: u32,
        /// Columns whose products tensor cores add before the scale comes in: divides the group.
        fold: u32,
        /// `CODE_...`
        code: u32,
        /// `ZERO_...`
        zero: u32,
        /// `SCALE_...`
        scale: u32,
        /// Upper levels of a row, one for [`SUPER_COLUMNS`] columns.
        row_supers: u32,
    }
}

device_struct! {
    /// One launch of a linear kernel: up to three weights of one kind that share their input.
    struct LinearArgs {
        /// The weights; those beyond `count` are not looked at.
        weight: WeightRef[3],
        /// f16 or i8 `[m][stride]`, see [`acts`](super::acts).
        h: DevicePtr,
        /// f32 `[m]`, or none.
        factors: DevicePtr,
        /// f32 `[m][stride / 16]`; in the int8 form scales and sums `[stride / block][rows][2]`.
        sums: DevicePtr,
        /// f32 `[m][stride]`.
        x: DevicePtr,
        /// f32 `[m][to_stride]`.
        to: DevicePtr,
        /// f32 `[columns]` or none.
        bias: DevicePtr,
        /// f32 `[splits][m][columns]`.
        partial: DevicePtr,
        /// Of a mixture: tiles of tokens, `[..][4]`: expert, first token, end of its tokens (none: nothing to do).
        tiles: DevicePtr,
        /// First panel of each weight in the launch's.
        first: u32[3],
        /// First output column of each weight.
        column: u32[3],
        /// Weights.
        count: u32,
        /// Tokens.
        m: u32,
        /// Columns from one token's inputs to the next's.
        stride: u32,
        /// Columns from one token's outputs to the next's.
        to_stride: u32,
        /// Whether the outputs are added to what is there.
        add: u32,
        /// Blocks that share the columns of a panel.
        splits: u32,
        /// Outputs of a token, of the launch's weights.
        columns: u32,
        /// First output column of the launch in the bias, and in `to`.
        offset: u32,
        /// Bytes into a stage at which activations begin.
        at_h: u32,
        /// Scales.
        at_scales: u32,
        /// Zero codes or minima.
        at_zeros: u32,
        /// Upper level.
        at_supers: u32,
        /// Sums of activations; in the int8 form scales and sums.
        at_sums: u32,
        /// Bytes of a stage.
        stage: u32,
        /// Rows from one block's scales and sums to the next's.
        rows: u32,
        /// Nothing: an even number of these.
        unused: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_says_what_is_defined_here() {
        assert_eq!(WeightRef::FIELDS, size_of::<WeightRef>(), "padding");
        assert_eq!(LinearArgs::FIELDS, size_of::<LinearArgs>(), "padding");
        let mut text = String::from(
            "// Structs and constants that kernels share with the program. Made of kernels/src/cuda/layout.rs by its\n\
             // test with QUERN_WRITE_LAYOUT=1; what they mean stands there.\n\
             #pragma once\n#include \"gpu.h\"\n\ntypedef u64 DevicePtr;\n\n",
        );
        CONSTANTS.iter().for_each(|(name, value)| text += &format!("#define {name} {value}\n"));
        for c in [WeightRef::C, LinearArgs::C] {
            text += "\n";
            text += c;
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/layout.h");
        if std::env::var_os("QUERN_WRITE_LAYOUT").is_some() {
            std::fs::write(path, &text).expect("a file to write");
        }
        let found = std::fs::read_to_string(path).expect("kernels/cuda/layout.h");
        assert_eq!(found, text, "run this test with QUERN_WRITE_LAYOUT=1, then kernels/cuda/ptx.py");
    }
}
