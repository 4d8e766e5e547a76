//! Linear layers, one 64-row panel of the weight at a time: `y[row][n] = sum over k of w[n][k] * x[row][k]`.
//!
//! Every table computes the sums defined in [`crate::reference::linear`], bit for bit: a result
//! depends neither on the instruction set, nor on the number of rows, nor on how rows and panels
//! were split over calls and threads. (Only a NaN's payload is left open.)

use super::acts::{Acts, MR, Mode};
use super::buf::Buf;
use super::isa::Isa;
use quern_models::p64::Shape;
use quern_models::{FloatType, PANEL, Scheme, TensorView, ZeroKind};
use std::ops::Range;

/// Columns that a kernel treats at a time: two or four activation blocks.
pub(crate) const SPAN: usize = 128;

/// Outputs of panel `panel` of `w` for activation rows `rows`: `tile[r - rows.start][n % 64]`.
///
/// `rows` starts at a multiple of [`MR`] and ends at one or at the last row. `tile` is
/// `[rows.len()][64]`; columns past the weight's last row are unspecified for integer weights and
/// zero for floats. Float weights read the f32 form whatever the mode. Panics if `acts` lacks the
/// form that [`super::acts::Forms::of`] names (a smaller block will do), or if shapes disagree.
pub fn linear_panel(
    isa: &Isa,
    w: &TensorView,
    acts: &Acts,
    mode: Mode,
    panel: usize,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    assert!(panel < w.panels(), "panel {panel} of {}", w.panels());
    assert_eq!(acts.k(), w.k, "columns of the activations, columns of the weight");
    assert!(rows.start <= rows.end && rows.end <= acts.m(), "rows {rows:?} of {}", acts.m());
    assert!(
        rows.start.is_multiple_of(MR) && (rows.end.is_multiple_of(MR) || rows.end == acts.m()),
        "rows {rows:?} cut a block"
    );
    assert_eq!(tile.len(), rows.len() * PANEL);
    match w.scheme {
        Scheme::Float(kind) => {
            assert!(acts.forms().floats, "float weights need f32 activations");
            let panel = FloatPanel::new(w, kind, panel);
            // SAFETY: shapes were checked above and in `new`; an Isa is only handed out if detected.
            unsafe { (isa.float)(&panel, acts, rows, tile, scratch) }
        }
        Scheme::Nested { .. } | Scheme::Mini { .. } | Scheme::Order => panic!("no kernel for {}", w.scheme),
        Scheme::Int { bits, .. } => {
            let panel = IntPanel::new(w, panel);
            let kernel = match mode {
                Mode::F32 => {
                    assert!(acts.forms().floats, "exact mode needs f32 activations");
                    if bits == 4 { isa.int4_f32 } else { isa.int8_f32 }
                }
                Mode::Int8 => {
                    let block = acts.block();
                    assert!(
                        block > 0 && panel.group.is_multiple_of(block),
                        "activation block {block}, group {}",
                        panel.group
                    );
                    if bits == 4 { isa.int4_int8 } else { isa.int8_int8 }
                }
            };
            // SAFETY: as above.
            unsafe { kernel(&panel, acts, rows, tile, scratch) }
        }
    }
}

/// One panel of an integer weight; the slices are exactly this panel's.
#[derive(Clone, Copy)]
pub(crate) struct IntPanel<'a> {
    /// Real columns.
    pub k: usize,
    pub bits: u8,
    pub group: usize,
    pub zero: ZeroKind,
    pub scale: FloatType,
    /// Address arithmetic of a tensor that is this panel alone.
    shape: Shape,
    /// `[groups * group / 4]` quads of 128 bytes (int4) or 256 (int8).
    pub codes: &'a [u8],
    /// `[groups][64]` of type `scale`.
    pub scales: &'a [u8],
    /// Zero codes `[groups][32]` (int4) or `[groups][64]` (int8), minima `[groups][64]`, or nothing.
    pub zeros: &'a [u8],
}

impl<'a> IntPanel<'a> {
    /// Cuts panel `p` out of `w`, an integer tensor; panics if a plane is too short for the shape.
    fn new(w: &TensorView<'a>, p: usize) -> Self {
        let Scheme::Int { bits, group, zero, scale } = w.scheme else { unreachable!("the caller matched Int") };
        let group = group as usize;
        assert!((bits == 4 || bits == 8) && group > 0 && group.is_multiple_of(32), "no kernel for {}", w.scheme);
        let groups = w.k.div_ceil(group);
        let cut = |plane: &'a [u8], each: usize| &plane[p * each..(p + 1) * each];
        let scales = groups * PANEL * scale.size();
        let zeros = match zero {
            ZeroKind::Mid => 0,
            ZeroKind::Code => groups * PANEL * bits as usize / 8,
            ZeroKind::Min => scales,
        };
        IntPanel {
            k: w.k,
            bits,
            group,
            zero,
            scale,
            shape: Shape::new(PANEL, w.k, bits, group),
            codes: cut(w.codes, groups * group * PANEL * bits as usize / 8),
            scales: cut(w.scales, scales),
            zeros: cut(w.zeros, zeros),
        }
    }

    /// Scale of (row of the panel, group).
    pub fn scale_at(&self, r: usize, g: usize) -> f32 {
        self.scale.read(self.scales, g * PANEL + r)
    }

    /// Code of (row of the panel, column).
    pub fn code_at(&self, r: usize, k: usize) -> i32 {
        self.shape.code(self.codes, r, k) as i32
    }

    /// The code that means zero; 0 where a minimum is stored instead.
    pub fn zero_at(&self, r: usize, g: usize) -> i32 {
        match self.zero {
            ZeroKind::Mid => 1 << (self.bits - 1),
            ZeroKind::Min => 0,
            ZeroKind::Code => self.shape.zero(self.zeros, r, g) as i32,
        }
    }

    /// Stored minimum, or 0.
    pub fn min_at(&self, r: usize, g: usize) -> f32 {
        if self.zero == ZeroKind::Min { self.scale.read(self.zeros, g * PANEL + r) } else { 0.0 }
    }
}

/// Up to 64 rows of a float weight.
#[derive(Clone, Copy)]
pub(crate) struct FloatPanel<'a> {
    /// Rows in this panel, 1..=64.
    pub n: usize,
    pub k: usize,
    pub kind: FloatType,
    /// `[n][k]` elements.
    pub rows: &'a [u8],
}

impl<'a> FloatPanel<'a> {
    fn new(w: &TensorView<'a>, kind: FloatType, p: usize) -> Self {
        let n = (w.n - p * PANEL).min(PANEL);
        let row = w.k * kind.size();
        FloatPanel { n, k: w.k, kind, rows: &w.codes[p * PANEL * row..][..n * row] }
    }
}

/// Memory that kernels work in; one per thread, kept and reused.
#[derive(Default)]
pub struct Scratch {
    /// Unpacked codes of a span.
    pub(crate) bytes: Buf<u8>,
    /// Dequantized weights of a span.
    pub(crate) weights: Buf<f32>,
    /// Partial sums of a tile.
    pub(crate) partial: Buf<f32>,
    pub(crate) meta: Box<Meta>,
}

impl Scratch {
    /// Empty; kernels grow it to what they need.
    pub fn new() -> Self {
        Scratch::default()
    }
}

/// Scales and zeros of the groups that a span touches, widened.
#[repr(C, align(64))]
pub(crate) struct Meta {
    /// Scales, `[group slot][64]`.
    pub s: [[f32; PANEL]; SPAN / 32],
    /// What to subtract, times the sum of the activations.
    pub z: [[i32; PANEL]; SPAN / 32],
    /// Minima.
    pub m: [[f32; PANEL]; SPAN / 32],
    /// Group slot of each activation block of the span.
    pub slot: [usize; SPAN / 32],
}

impl Meta {
    /// Scales, zeros and minima of `slot`, from row `c` of the panel on; in range if both are.
    #[inline]
    pub fn at(&self, slot: usize, c: usize) -> (*const f32, *const i32, *const f32) {
        let i = slot * PANEL + c;
        let (s, z, m) = (self.s.as_ptr(), self.z.as_ptr(), self.m.as_ptr());
        (s.cast::<f32>().wrapping_add(i), z.cast::<i32>().wrapping_add(i), m.cast::<f32>().wrapping_add(i))
    }
}

impl Default for Meta {
    fn default() -> Self {
        Meta { s: [[0.0; PANEL]; 4], z: [[0; PANEL]; 4], m: [[0.0; PANEL]; 4], slot: [0; 4] }
    }
}
