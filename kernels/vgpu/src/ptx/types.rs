//! The type names of PTX instructions.

/// A type as it is written in an opcode (`.f32`) or a declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ty {
    Pred,
    B8,
    U8,
    S8,
    B16,
    U16,
    S16,
    F16,
    Bf16,
    E4m3x2,
    E5m2x2,
    B32,
    U32,
    S32,
    F32,
    Tf32,
    F16x2,
    Bf16x2,
    B64,
    U64,
    S64,
    F64,
}

impl Ty {
    /// The type of this name, written without its dot.
    pub fn parse(name: &str) -> Option<Ty> {
        use Ty::*;
        Some(match name {
            "pred" => Pred,
            "b8" => B8,
            "u8" => U8,
            "s8" => S8,
            "b16" => B16,
            "u16" => U16,
            "s16" => S16,
            "f16" => F16,
            "bf16" => Bf16,
            "e4m3x2" => E4m3x2,
            "e5m2x2" => E5m2x2,
            "b32" => B32,
            "u32" => U32,
            "s32" => S32,
            "f32" => F32,
            "tf32" => Tf32,
            "f16x2" => F16x2,
            "bf16x2" => Bf16x2,
            "b64" => B64,
            "u64" => U64,
            "s64" => S64,
            "f64" => F64,
            _ => return None,
        })
    }

    /// Bytes in memory and in a register.
    pub fn size(self) -> usize {
        use Ty::*;
        match self {
            B8 | U8 | S8 => 1,
            B16 | U16 | S16 | F16 | Bf16 | E4m3x2 | E5m2x2 => 2,
            Pred | B32 | U32 | S32 | F32 | Tf32 | F16x2 | Bf16x2 => 4,
            B64 | U64 | S64 | F64 => 8,
        }
    }

    pub fn signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    /// Whether a value lies in the bank of 64-bit registers.
    pub fn wide(self) -> bool {
        self.size() == 8
    }

    /// An integer or plain bits.
    pub fn integer(self) -> bool {
        use Ty::*;
        matches!(self, B8 | U8 | S8 | B16 | U16 | S16 | B32 | U32 | S32 | B64 | U64 | S64)
    }
}

/// Where an address points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    Local,
    Param,
    Const,
    Generic,
}

/// Number of a register within its bank. [`NONE`]: no register.
pub type Reg = u16;
/// Stands for an operand that is not there.
pub const NONE: Reg = u16::MAX;

/// Addresses of shared memory begin here when they are generic.
pub const SHARED_WINDOW: u64 = 0x0100_0000_0000;
/// Addresses of a thread's local memory begin here when they are generic.
pub const LOCAL_WINDOW: u64 = 0x0200_0000_0000;
/// Addresses of a kernel's parameters begin here when they are generic.
pub const PARAM_WINDOW: u64 = 0x0300_0000_0000;
/// Size of each window.
pub const WINDOW: u64 = 1 << 32;
