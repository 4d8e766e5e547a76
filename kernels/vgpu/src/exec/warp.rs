//! The state of a warp.

// Loops over lanes index several rows at once.
#![allow(clippy::needless_range_loop)]

use super::bytes::Bytes;
use super::copy::Copies;
use super::lanes::Row;
use crate::ptx::Kernel;

/// Registers that every warp has before a kernel's own: their names and places in the 32-bit bank.
pub const SPECIAL: [&str; 26] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%smid",
    "%nsmid",
    "%gridid",
    "%total_smem_size",
    "%dynamic_smem_size",
    "%WARP_SZ",
];

/// Predicates with fixed values: false, true; then the carry flag.
pub const FALSE: u16 = 0;
pub const TRUE: u16 = 1;
pub const CARRY: u16 = 2;

/// Where a barrier holds lanes up.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Lanes that have come.
    pub lanes: u32,
    pub pc: u32,
    pub id: u32,
    /// Threads that must come, or 0: all of the CTA.
    pub count: u32,
    /// Lanes whose predicate holds, of a reduction.
    pub votes: u32,
}

/// 32 lanes of a CTA.
pub struct Warp {
    /// 32-bit registers; 16-bit values lie in their lower halves, the upper ones zero.
    pub r: Vec<Row<u32>>,
    /// 64-bit registers.
    pub q: Vec<Row<u64>>,
    /// Predicates, a bit for each lane.
    pub p: Vec<u32>,
    /// Next instruction of each lane that is not running.
    pub pcs: [u32; 32],
    /// Lanes that have not exited.
    pub live: u32,
    /// Lanes that wait at a `.sync` instruction for others of their warp.
    pub parked: u32,
    /// Lanes that wait at a barrier of the CTA.
    pub waiting: Option<Waiting>,
    /// Local memory: one piece of the kernel's size for each lane.
    pub local: Bytes,
    pub copies: Copies,
    /// Number within the CTA.
    pub id: u32,
    /// When each pair of lanes last met at a `bar.warp.sync` (checks only).
    pub met: Box<[[u32; 32]; 32]>,
}

impl Warp {
    pub fn new(kernel: &Kernel, id: u32, shape: &Shape) -> Warp {
        let mut warp = Warp {
            r: vec![Row([0; 32]); kernel.regs32],
            q: vec![Row([0; 32]); kernel.regs64],
            p: vec![0; kernel.preds],
            pcs: [0; 32],
            live: 0,
            parked: 0,
            waiting: None,
            local: Bytes::new(kernel.local_bytes * 32),
            copies: Copies::default(),
            id,
            met: Box::new([[0; 32]; 32]),
        };
        for &(reg, value) in &kernel.consts32 {
            warp.r[reg as usize] = Row([value; 32]);
        }
        for &(reg, value) in &kernel.consts64 {
            warp.q[reg as usize] = Row([value; 32]);
        }
        warp.p[TRUE as usize] = !0;
        warp.shape(shape);
        warp
    }

    /// Sets the special registers that are the same in every CTA.
    fn shape(&mut self, shape: &Shape) {
        let first = self.id * 32;
        for i in 0..32 {
            let t = first + i as u32;
            self.r[0].0[i] = t % shape.block[0];
            self.r[1].0[i] = t / shape.block[0] % shape.block[1];
            self.r[2].0[i] = t / shape.block[0] / shape.block[1];
            self.r[12].0[i] = i as u32;
            self.r[15].0[i] = 1 << i;
            self.r[16].0[i] = (1 << i) | ((1 << i) - 1);
            self.r[17].0[i] = (1 << i) - 1;
            self.r[18].0[i] = !((1 << i) - 1);
            self.r[19].0[i] = !((1 << i) | ((1 << i) - 1));
        }
        for axis in 0..3 {
            self.r[3 + axis] = Row([shape.block[axis]; 32]);
            self.r[9 + axis] = Row([shape.grid[axis]; 32]);
        }
        let rest = [
            (13, self.id),
            (14, shape.threads().div_ceil(32)),
            (21, shape.multiprocessors),
            (22, 0),
            (23, shape.shared),
            (24, shape.dynamic),
            (25, 32),
        ];
        for (reg, value) in rest {
            self.r[reg] = Row([value; 32]);
        }
    }

    /// Turns to a CTA. `fill`: the content of local memory that nobody wrote.
    pub fn begin(&mut self, shape: &Shape, cta: [u32; 3], number: u32, fill: u8) {
        for axis in 0..3 {
            self.r[6 + axis] = Row([cta[axis]; 32]);
        }
        self.r[20] = Row([number % shape.multiprocessors.max(1); 32]);
        let left = shape.threads() - self.id * 32;
        self.live = if left >= 32 { !0 } else { (1 << left) - 1 };
        self.pcs = [0; 32];
        self.parked = 0;
        self.waiting = None;
        self.copies.clear();
        if !self.local.is_empty() {
            self.local.fill(fill);
        }
    }

    /// Lanes at a barrier.
    #[inline(always)]
    pub fn held(&self) -> u32 {
        self.waiting.map_or(0, |waiting| waiting.lanes)
    }

    /// Whether all lanes have exited.
    pub fn done(&self) -> bool {
        self.live == 0
    }
}

/// A launch's shape, as special registers show it.
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of shared memory, all and dynamic.
    pub shared: u32,
    pub dynamic: u32,
    pub multiprocessors: u32,
}

impl Shape {
    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}
