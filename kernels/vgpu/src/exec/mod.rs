//! A machine that runs lowered PTX: warps of 32 lanes in lockstep, registers as rows of 32 values.
//!
//! A kernel's CTAs are spread over host threads; a CTA's warps run one after the other up to their next barrier.
//! Within a warp the lanes at the lowest instruction run first (so that they meet again behind a branch), and lanes
//! wait at `.sync` instructions until all that are named have come, as from Volta on.

pub mod alu;
pub mod atomic;
pub mod barrier;
pub mod bytes;
pub mod collective;
pub mod copy;
pub mod cta;
pub mod lanes;
pub mod launch;
pub mod matrix;
pub mod memory;
pub mod step;
pub mod warp;

use crate::ptx::types::{Reg, Space, Ty};
pub use cta::Cta;
pub use lanes::{Args, Lanes};
pub use warp::Warp;

/// One instruction.
#[derive(Clone, Copy, Debug)]
pub struct Ins {
    pub op: Op,
    /// Predicate that decides which lanes take part, or `NONE`.
    pub guard: Reg,
    /// The guard holds where the predicate does not.
    pub unless: bool,
    /// Line of the PTX text, from 1.
    pub line: u32,
}

/// What an instruction does.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Every lane for itself.
    Lanes(Lanes, Args),
    /// The same bytes of the parameters into all lanes.
    Param(ParamLoad),
    Load(Access),
    Store(Access),
    Atomic(Atomic),
    Branch(u32),
    /// Index register, number of the table.
    BranchTable(Reg, u32),
    Exit,
    Barrier(Barrier),
    /// `bar.warp.sync` with a mask.
    WarpSync(Reg),
    Shuffle(Shuffle),
    Vote(Vote),
    /// Sets the bits of the lanes that hold the same value; `d`, value, mask, wide, predicate or `NONE` (match.all).
    Match {
        d: Reg,
        a: Reg,
        mask: Reg,
        wide: bool,
        all: bool,
        p: Reg,
    },
    Redux {
        kind: ReduxKind,
        d: Reg,
        a: Reg,
        mask: Reg,
    },
    ActiveMask(Reg),
    LoadMatrix {
        n: u8,
        trans: bool,
        d: [Reg; 4],
        addr: Reg,
        wide: bool,
        off: i32,
    },
    Mma {
        kind: MmaKind,
        d: [Reg; 4],
        a: [Reg; 4],
        b: [Reg; 2],
        c: [Reg; 4],
    },
    CopyAsync {
        n: u8,
        to: Reg,
        to_wide: bool,
        to_off: i32,
        from: Reg,
        from_off: i32,
        size: Reg,
    },
    CopyCommit,
    CopyWait(u32),
    /// Memory fences: every access here is performed in order already.
    Fence,
    Trap,
    /// `__assertfail`; the addresses of message, file and the line are in local memory at these offsets.
    Assert {
        at: [u32; 3],
    },
}

/// A load of kernel parameters at a known place.
#[derive(Clone, Copy, Debug)]
pub struct ParamLoad {
    pub at: u32,
    pub size: u8,
    pub signed: bool,
    pub n: u8,
    /// Bytes of the destination registers.
    pub ext: u8,
    pub regs: [Reg; 4],
}

/// A load or store.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub space: Space,
    /// Bytes of one element.
    pub size: u8,
    pub signed: bool,
    /// Elements: 1, 2 or 4.
    pub n: u8,
    /// Bytes of the registers (2, 4 or 8).
    pub ext: u8,
    /// The address register is a 64-bit one.
    pub wide: bool,
    pub addr: Reg,
    pub off: i32,
    pub regs: [Reg; 4],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

/// `atom` and `red`.
#[derive(Clone, Copy, Debug)]
pub struct Atomic {
    pub space: Space,
    pub kind: AtomicKind,
    pub ty: Ty,
    /// `NONE`: a reduction.
    pub d: Reg,
    pub addr: Reg,
    pub wide: bool,
    pub off: i32,
    pub b: Reg,
    pub c: Reg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierKind {
    Sync,
    Arrive,
    And,
    Or,
    Popc,
}

/// `bar` and `barrier`.
#[derive(Clone, Copy, Debug)]
pub struct Barrier {
    pub kind: BarrierKind,
    /// Register with the barrier's number.
    pub id: Reg,
    /// Register with the number of threads; `NONE`: all of the CTA.
    pub count: Reg,
    pub d: Reg,
    pub p: Reg,
    pub negate: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShuffleKind {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Clone, Copy, Debug)]
pub struct Shuffle {
    pub kind: ShuffleKind,
    pub d: Reg,
    pub p: Reg,
    pub a: Reg,
    pub b: Reg,
    pub c: Reg,
    pub mask: Reg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteKind {
    Ballot,
    Any,
    All,
    Uni,
}

#[derive(Clone, Copy, Debug)]
pub struct Vote {
    pub kind: VoteKind,
    pub d: Reg,
    pub p: Reg,
    pub negate: bool,
    pub mask: Reg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduxKind {
    Add,
    MinS,
    MaxS,
    MinU,
    MaxU,
    And,
    Or,
    Xor,
}

/// Operand types and depth of `mma.sync`; all are m16n8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaKind {
    F16K16,
    F16K8,
    Bf16K16,
    Bf16K8,
    /// f16 accumulators, packed in pairs.
    F16K16Half,
    F16K8Half,
    Tf32K4,
    Tf32K8,
    /// 8-bit integers; whether a and b are signed, whether the result saturates.
    I8K16 {
        a: bool,
        b: bool,
        sat: bool,
    },
    I8K32 {
        a: bool,
        b: bool,
        sat: bool,
    },
    /// 4-bit integers.
    I4K32 {
        a: bool,
        b: bool,
        sat: bool,
    },
    I4K64 {
        a: bool,
        b: bool,
        sat: bool,
    },
    /// 8-bit floats, as of sm_89: whether a and b are e5m2 (or e4m3).
    F8K32 {
        a: bool,
        b: bool,
    },
}
