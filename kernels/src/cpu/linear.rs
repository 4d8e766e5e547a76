//! Linear layers, one 64-row panel of the weight at a time: `y[row][n] = sum over k of w[n][k] * x[row][k]`.
//!
//! Every table computes the sums defined in [`crate::reference::linear`], bit for bit: a result
//! depends neither on the instruction set, nor on the number of rows, nor on how rows and panels
//! were split over calls and threads. (Only a NaN's payload is left open.)

use super::acts::{self, Acts, MR, Mode, SMALL_BLOCK};
use super::buf::Buf;
use super::isa::Isa;
use super::mini::{E2M1, E2M1_ZERO, E4M3};
use quern_models::p64::Shape;
use quern_models::{FloatType, Mini, PANEL, SUPER, Scheme, TensorView, ZeroKind};
use std::ops::Range;

/// Columns that a kernel treats at a time: four activation blocks, or eight small ones.
pub(crate) const SPAN: usize = 128;

/// Outputs of panel `panel` of `w` for activation rows `rows`: `tile[r - rows.start][n % 64]`.
///
/// `rows` starts at a multiple of [`MR`] and ends at one or at the last row. `tile` is
/// `[rows.len()][64]`; columns past the weight's last row are unspecified for codes and zero for
/// floats. Panics if `acts` lacks the form that [`super::acts::Forms::of`] names, or if shapes disagree.
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
    linear_strips(isa, w, acts, mode, (panel, 0..STRIPS), rows, tile, scratch)
}

/// Strips of 16 weight rows in a panel.
pub const STRIPS: usize = PANEL / 16;

/// The same for some strips of a panel: outputs of the others are unspecified.
pub fn linear_strips(
    isa: &Isa,
    w: &TensorView,
    acts: &Acts,
    mode: Mode,
    (panel, strips): (usize, Range<usize>),
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    assert!(strips.start < strips.end && strips.end <= STRIPS, "strips {strips:?}");
    assert!(panel < w.panels(), "panel {panel} of {}", w.panels());
    assert_eq!(acts.k(), w.k, "columns of the activations, columns of the weight");
    assert!(rows.start <= rows.end && rows.end <= acts.m(), "rows {rows:?} of {}", acts.m());
    assert!(
        rows.start.is_multiple_of(MR) && (rows.end.is_multiple_of(MR) || rows.end == acts.m()),
        "rows {rows:?} cut a block"
    );
    assert_eq!(tile.len(), rows.len() * PANEL);
    if rows.is_empty() {
        return;
    }
    match w.scheme {
        Scheme::Float(kind) => {
            assert!(acts.forms().floats, "float weights need f32 activations");
            let panel = FloatPanel::new(w, kind, panel);
            // SAFETY: shapes were checked above and in `new`; an Isa is only handed out if detected.
            unsafe { (isa.float)(&panel, acts, rows, tile, scratch) }
        }
        Scheme::Order => panic!("an order is no weight"),
        Scheme::Int { .. } | Scheme::Nested { .. } | Scheme::Mini { .. } => {
            let block = acts::block(w.scheme, mode);
            let panel = IntPanel { strips, ..IntPanel::new(w, panel, block) };
            let kernel = match (block, panel.bits) {
                (None, _) => {
                    assert!(acts.forms().floats, "{} in {mode:?} mode needs f32 activations", w.scheme);
                    if panel.bits == 4 { isa.int4_f32 } else { isa.int8_f32 }
                }
                // The kernels fetch the form, which panics if it is not there.
                (Some(_), 4) => isa.int4_int8,
                (Some(_), _) => isa.int8_int8,
            };
            // SAFETY: as above.
            unsafe { kernel(&panel, acts, rows, tile, scratch) }
        }
    }
}

/// One panel of a weight of codes; the slices are exactly this panel's.
#[derive(Clone)]
pub(crate) struct IntPanel<'a> {
    /// Strips of 16 rows that are wanted; a kernel may compute the others as well.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub strips: Range<usize>,
    /// Real columns.
    pub k: usize,
    pub bits: u8,
    pub group: usize,
    /// `Mid` for small floats.
    pub zero: ZeroKind,
    /// What the codes are, if not integers.
    pub mini: Option<Mini>,
    /// Columns of a block: of int8 activations, or in exact mode of what shares a scale.
    pub block: usize,
    /// What one integer step is worth, in scales: a half for e2m1 codes taken as integers, else 1.
    pub unit: f32,
    /// Type of the scales; of the upper level if they are nested.
    pub scale: FloatType,
    /// Address arithmetic of a tensor that is this panel alone.
    shape: Shape,
    /// `[groups * group / 4]` quads of 128 bytes (4 bits) or 256 (8 bits).
    pub codes: &'a [u8],
    /// Scales `[groups][64]` of type `scale`, or of i8 if they are nested.
    pub scales: &'a [u8],
    /// Zero codes `[groups][32]` (4 bits) or `[groups][64]` (8 bits), minima like the scales, or nothing.
    pub zeros: &'a [u8],
    /// Upper level of nested scales, `[supers][levels][64]`, else nothing.
    pub supers: &'a [u8],
}

impl<'a> IntPanel<'a> {
    /// Cuts panel `p` out of `w`, a tensor of codes; panics if a plane is too short for the shape.
    /// `block`: of the int8 activations; `None` for f32 ones.
    fn new(w: &TensorView<'a>, p: usize, block: Option<usize>) -> Self {
        let (bits, group) = w.scheme.coded().expect("the caller matched the schemes with codes");
        assert!(
            (bits == 4 || bits == 8) && group > 0 && group.is_multiple_of(SMALL_BLOCK),
            "no kernel for {}",
            w.scheme
        );
        let shape = Shape::new(PANEL, w.k, bits, group);
        let cut = |plane: &'a [u8], each: usize| &plane[p * each..(p + 1) * each];
        let (zero, mini, scale, nested) = match w.scheme {
            Scheme::Int { zero, scale, .. } => (zero, None, scale, false),
            Scheme::Mini { kind, scale, .. } => (ZeroKind::Mid, Some(kind), scale, false),
            Scheme::Nested { zero, .. } => (zero, None, FloatType::F16, true),
            Scheme::Float(_) | Scheme::Order => unreachable!("no codes"),
        };
        let scales = shape.groups * PANEL * if nested { 1 } else { scale.size() };
        let zeros = match zero {
            ZeroKind::Mid => 0,
            ZeroKind::Code => shape.groups * PANEL * bits as usize / 8,
            ZeroKind::Min => scales,
        };
        let levels = if zero == ZeroKind::Min { 2 } else { 1 };
        let supers = if nested { shape.supers() * levels * PANEL * scale.size() } else { 0 };
        // Blocks never cross a group.
        let small = !group.is_multiple_of(acts::BLOCK);
        IntPanel {
            strips: 0..STRIPS,
            k: w.k,
            bits,
            group,
            zero,
            mini,
            block: if small { SMALL_BLOCK } else { acts::BLOCK },
            unit: if block.is_some() && mini == Some(Mini::E2M1) { 0.5 } else { 1.0 },
            scale,
            shape,
            codes: cut(w.codes, shape.k_pad * PANEL * bits as usize / 8),
            scales: cut(w.scales, scales),
            zeros: cut(w.zeros, zeros),
            supers: cut(w.supers, supers),
        }
    }

    /// Scale of (row of the panel, group), of one integer step in int8 kernels.
    pub fn scale_at(&self, r: usize, g: usize) -> f32 {
        self.unit
            * match self.upper(g, 0) {
                Some(d) => self.scale.read(d, r) * self.scales[g * PANEL + r] as i8 as f32,
                None => self.scale.read(self.scales, g * PANEL + r),
            }
    }

    /// Upper level of the nested scales (`level` 0) or minima (1) of a group, `[64]`.
    #[inline]
    pub fn upper(&self, g: usize, level: usize) -> Option<&'a [u8]> {
        if self.supers.is_empty() {
            return None;
        }
        let levels = if self.zero == ZeroKind::Min { 2 } else { 1 };
        let at = self.shape.super_at(0, g * self.group / SUPER, levels, level) * self.scale.size();
        Some(&self.supers[at..][..PANEL * self.scale.size()])
    }

    /// Integer that the code of (row of the panel, column) is or stands for; not for e4m3.
    pub fn int_at(&self, r: usize, k: usize) -> i32 {
        let code = self.shape.code(self.codes, r, k);
        if self.mini == Some(Mini::E2M1) { E2M1[code as usize] as i32 } else { code as i32 }
    }

    /// The integer that means zero; 0 where a minimum is stored instead.
    pub fn zero_at(&self, r: usize, g: usize) -> i32 {
        match self.zero {
            ZeroKind::Mid => self.middle(),
            ZeroKind::Min => 0,
            ZeroKind::Code => self.shape.zero(self.zeros, r, g) as i32,
        }
    }

    /// The integer that means zero where none is stored.
    pub fn middle(&self) -> i32 {
        if self.mini == Some(Mini::E2M1) { E2M1_ZERO } else { 1 << (self.bits - 1) }
    }

    /// Stored minimum, or 0.
    pub fn min_at(&self, r: usize, g: usize) -> f32 {
        if self.zero != ZeroKind::Min {
            return 0.0;
        }
        match self.upper(g, 1) {
            Some(d) => self.scale.read(d, r) * self.zeros[g * PANEL + r] as i8 as f32,
            None => self.scale.read(self.zeros, g * PANEL + r),
        }
    }

    /// Weights of row `r`, `[k]`, as [`TensorView::at`] has them.
    pub fn weights(&self, r: usize, to: &mut [f32]) {
        for (g, to) in to.chunks_mut(self.group).enumerate() {
            let (s, z, m) = (self.scale_at(r, g), self.zero_at(r, g), self.min_at(r, g));
            for (k, to) in (g * self.group..).zip(to) {
                *to = match self.mini {
                    Some(Mini::E4M3) => s * E4M3[self.shape.code(self.codes, r, k) as usize],
                    Some(Mini::E2M1) => s * (0.5 * (self.int_at(r, k) - z) as f32),
                    None if self.zero == ZeroKind::Min => s * self.int_at(r, k) as f32 + m,
                    None => s * (self.int_at(r, k) - z) as f32,
                };
            }
        }
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

/// Blocks of a span, at most.
const SLOTS: usize = SPAN / SMALL_BLOCK;

/// Scales and zeros of the groups that a span touches, widened.
#[repr(C, align(64))]
pub(crate) struct Meta {
    /// Scales, `[group slot][64]`.
    pub s: [[f32; PANEL]; SLOTS],
    /// What to subtract, times the sum of the activations.
    pub z: [[i32; PANEL]; SLOTS],
    /// Minima.
    pub m: [[f32; PANEL]; SLOTS],
    /// Group slot of each activation block of the span.
    pub slot: [usize; SLOTS],
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
        let (floats, ints) = ([[0.0; PANEL]; SLOTS], [[0; PANEL]; SLOTS]);
        Meta { s: floats, z: ints, m: floats, slot: [0; SLOTS] }
    }
}
