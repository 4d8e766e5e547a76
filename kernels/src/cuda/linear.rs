//! Linear layers on the device: `y[row][n] = sum over k of w[n][k] * x[row][k]`.
//!
//! **f16 form.** Columns of a weight are cut into slices, whose bounds depend on its shape, the launch's panels and the
//! number of multiprocessors only. In a slice, `t = sum of (q - z) * h` over `fold` columns by tensor cores (exact
//! products, f32 sums), then `y = fma(s, t, y)` and with minima `y = fma(min, sum of h, y)`, ascending; slices are
//! added in order, eight at a time, then those sums in order; the row's power of two comes last. That is the order at
//! every number of rows.
//!
//! **int8 form.** The same slices. A block of 32 columns (16, if the weight's group is no multiple of 32) has an exact sum
//! of `(q - z) * a` by integer tensor cores; `t = fma(sum, scale of a, t)` over the blocks of `fold` columns, then
//! `y = fma(s, t, y)` and with minima `y = fma(min, sum of scale of a * sum of a, y)`. Weights that are no integers
//! take the f32 form of the same input.
//!
//! **f32 form.** Weights are dequantized as [`TensorView::at`](quern_models::TensorView::at) does, products added by
//! fma in an order that depends on the weight only.
//!
//! Nothing here allocates or waits in `run`, so that it can be recorded in a graph; see [`Linear::reserve`].

use std::sync::Arc;

use super::{
    Args, Buffer, CudaError, Device, DevicePtr, Kernel, Ptx, Weight,
    acts::{Acts, Form},
    layout::{self, LinearArgs, SLICES, WeightRef},
    ptx,
};

/// Where the outputs of a layer go; addresses are of live memory of the shapes given, in the order of the stream.
#[derive(Debug, Clone, Copy)]
pub enum Output {
    /// `to[row][column] = y + bias`, the weights' outputs side by side.
    Store {
        /// f32 `[m][stride]`.
        to: DevicePtr,
        /// Columns from one row to the next.
        stride: usize,
        /// f32 `[sum of n]`.
        bias: Option<DevicePtr>,
    },
    /// `to[row][column] += y + bias`.
    Add {
        /// f32 `[m][stride]`.
        to: DevicePtr,
        /// Columns from one row to the next.
        stride: usize,
        /// f32 `[sum of n]`.
        bias: Option<DevicePtr>,
    },
}

/// The kernels, and memory for partial sums.
pub struct Linear {
    device: Arc<Device>,
    /// By code kind, then whether a fold is a multiple of 32 columns, then by tokens of a block.
    narrow: Vec<[[Kernel; NARROW.len()]; 2]>,
    /// By code kind, then whether a fold is a multiple of 32 columns.
    wide: Vec<[Kernel; 2]>,
    /// For the int8 form: codes of 4 bits, of 8.
    narrow_int8: [[[Kernel; NARROW.len()]; 2]; 2],
    wide_int8: [[Kernel; 2]; 2],
    reduce: Kernel,
    exact: Vec<Kernel>,
    rows: Kernel,
    partial: Buffer<f32>,
}

/// Tokens of a block, by kernel.
const NARROW: [usize; 2] = [8, 32];

/// Names, by code kind (see `layout`), by fold, by [`NARROW`].
const NARROW_NAMES: [[[&str; NARROW.len()]; 2]; 5] = [
    [["int4_16_8", "int4_16_32"], ["int4_32_8", "int4_32_32"]],
    [["int8_16_8", "int8_16_32"], ["int8_32_8", "int8_32_32"]],
    [["e2m1_16_8", "e2m1_16_32"], ["e2m1_32_8", "e2m1_32_32"]],
    [["e4m3_16_8", "e4m3_16_32"], ["e4m3_32_8", "e4m3_32_32"]],
    [["halves_32_8", "halves_32_32"], ["halves_32_8", "halves_32_32"]],
];

/// Names for more tokens than the last of [`NARROW`], by code kind, by fold.
const WIDE_NAMES: [[&str; 2]; 5] = [
    ["wide_int4_16", "wide_int4_32"],
    ["wide_int8_16", "wide_int8_32"],
    ["wide_e2m1_16", "wide_e2m1_32"],
    ["wide_e4m3_16", "wide_e4m3_32"],
    ["wide_halves_32", "wide_halves_32"],
];

/// The same for the int8 form: codes of 4 bits, of 8.
const NARROW_INT8_NAMES: [[[&str; NARROW.len()]; 2]; 2] = [
    [["four_int8_16_8", "four_int8_16_32"], ["four_int8_32_8", "four_int8_32_32"]],
    [["eight_int8_16_8", "eight_int8_16_32"], ["eight_int8_32_8", "eight_int8_32_32"]],
];
const WIDE_INT8_NAMES: [[&str; 2]; 2] =
    [["wide_four_int8_16", "wide_four_int8_32"], ["wide_eight_int8_16", "wide_eight_int8_32"]];

/// Rows at a time where blocks share the columns of a panel: their partial sums stay in a device's cache.
const ROWS: usize = 512;

/// By code kind; none for halves, which the f32 form does not have.
const EXACT_NAMES: [&str; 8] =
    ["exact_int4", "exact_int8", "exact_e2m1", "exact_e4m3", "exact_f32", "exact_f32", "exact_f16", "exact_bf16"];

/// Stages of a warp's pipeline, as in `linear.cu`: they and their rest fit into the 99 KiB of shared memory that every
/// device has.
fn stages(code: u32, tokens: usize, long: bool) -> usize {
    let four = [layout::CODE_INT4, layout::CODE_E2M1].contains(&code);
    match (tokens, four, long) {
        (8, true, _) => 4,
        (8, ..) if code == layout::CODE_HALVES => 2,
        (8, ..) | (_, true, true) => 3,
        _ => 2,
    }
}

/// Most blocks that share the columns of a panel.
const MOST_SPLITS: usize = 8;

impl Linear {
    /// Has the driver compile the kernels.
    pub fn new(device: &Arc<Device>) -> Result<Linear, CudaError> {
        let kernel = |ptx: &Ptx, name: &'static str| -> Result<Kernel, CudaError> {
            let kernel = device.kernel(ptx, name)?;
            kernel.allow_shared(device.info().shared)?;
            Ok(kernel)
        };
        let two = |ptx: &Ptx, [a, b]: [&'static str; 2]| Ok::<_, CudaError>([kernel(ptx, a)?, kernel(ptx, b)?]);
        let (mut narrow, mut wide) = (vec![], vec![]);
        for [short, long] in NARROW_NAMES {
            narrow.push([two(&ptx::LINEAR, short)?, two(&ptx::LINEAR, long)?]);
        }
        for names in WIDE_NAMES {
            wide.push(two(&ptx::WIDE, names)?);
        }
        let four = |ptx: &Ptx, [a, b]: [[&'static str; 2]; 2]| Ok::<_, CudaError>([two(ptx, a)?, two(ptx, b)?]);
        let [narrow_4, narrow_8] = NARROW_INT8_NAMES;
        Ok(Linear {
            device: device.clone(),
            narrow,
            wide,
            narrow_int8: [four(&ptx::INT8, narrow_4)?, four(&ptx::INT8, narrow_8)?],
            wide_int8: four(&ptx::INT8, WIDE_INT8_NAMES)?,
            reduce: device.kernel(&ptx::LINEAR, "reduce")?,
            exact: EXACT_NAMES.iter().map(|name| device.kernel(&ptx::EXACT, name)).collect::<Result<_, _>>()?,
            rows: device.kernel(&ptx::ROWS, "embed")?,
            partial: Buffer::new(device, "partial sums", 0)?,
        })
    }

    /// Makes room for `run` with these weights and up to `m` rows. To be called before; a graph that was recorded
    /// before must be recorded again.
    pub fn reserve(&mut self, weights: &[&Weight], m: usize) -> Result<(), CudaError> {
        let need = self.launches(weights).map(|l| self.partials(&l, m)).max().unwrap_or(0);
        if need > self.partial.len() {
            self.partial = Buffer::new(&self.device, "partial sums", need)?;
        }
        Ok(())
    }

    /// Bytes that [`Linear::reserve`] would have taken after these calls.
    pub fn bytes(&self, weights: &[&Weight], m: usize) -> usize {
        self.launches(weights).map(|l| self.partials(&l, m)).max().unwrap_or(0) * 4
    }

    /// Computes `m` rows of `acts` through up to three weights that share them: q, k and v, or gate and up.
    ///
    /// # Panics
    /// If shapes contradict each other, or no room was [reserved](Linear::reserve).
    pub fn run(&mut self, weights: &[&Weight], acts: &Acts, m: usize, out: Output) -> Result<(), CudaError> {
        assert!((1..=3).contains(&weights.len()), "{} weights", weights.len());
        assert!(m <= acts.rows, "{m} rows of {}", acts.rows);
        if m == 0 {
            return Ok(());
        }
        for launch in self.launches(weights) {
            let mut args = self.args(&launch, acts, m, out);
            if launch.weights[0].form == Form::F32 {
                self.exact(&launch, args, m.div_ceil(layout::EXACT_TOKENS as usize))?;
                continue;
            }
            let rows = if launch.splits > 1 { ROWS } else { m };
            for start in (0..m).step_by(rows) {
                args.m = rows.min(m - start) as u32;
                let tokens = tile(args.m as usize);
                self.tensor(&launch, args, tokens, rows.min(m - start).div_ceil(tokens))?;
                args.skip(rows, launch.weights[0].form);
            }
        }
        Ok(())
    }

    /// Computes the rows of `acts` that tiles name, each through those weights of its tile's expert
    /// ([`Weight::upload_experts`]) that share their input: `to[row][column]`, f32 `[acts.rows][stride]`. Rows of no tile
    /// stay as they are.
    ///
    /// # Panics
    /// If shapes contradict each other, or tiles are larger than weights that read f32 take.
    pub fn run_experts(
        &self,
        weights: &[&Weight],
        acts: &Acts,
        tiles: &Tiles,
        to: DevicePtr,
        stride: usize,
    ) -> Result<(), CudaError> {
        assert!((1..=3).contains(&weights.len()), "{} weights", weights.len());
        for launch in self.launches(weights) {
            // Experts are blocks enough: a panel's columns are not cut.
            let launch = Launch { splits: 1, ..launch };
            let out = Output::Store { to, stride, bias: None };
            let args = LinearArgs { tiles: tiles.at, ..self.args(&launch, acts, acts.rows, out) };
            if launch.weights[0].form == Form::F32 {
                assert_eq!(tiles.tokens, layout::EXACT_TOKENS as usize, "tokens of a tile for weights that read f32");
                self.exact(&launch, args, tiles.most)?;
            } else {
                self.tensor(&launch, args, tiles.tokens, tiles.most)?;
            }
        }
        Ok(())
    }

    /// Rows of a table, as the weight holds them: `to[i] = scale * table[tokens[i]] (+ positions[places[i]])`. A row that is
    /// not there is NaN. In the f16 form floats were rounded to f16: a table that is only looked up is better
    /// uploaded in the f32 form.
    ///
    /// `tokens`: u32 `[m]`; `positions`: a table and u32 `[m]`; `to`: f32 `[m][table.k]`.
    pub fn embed(
        &mut self,
        table: &Weight,
        tokens: DevicePtr,
        positions: Option<(&Weight, DevicePtr)>,
        scale: f32,
        to: DevicePtr,
        m: usize,
    ) -> Result<(), CudaError> {
        let (second, places) = positions.unwrap_or((table, DevicePtr::NULL));
        assert_eq!(second.k, table.k, "columns of the positions and of the table");
        if m == 0 {
            return Ok(());
        }
        let args = Args::new().with(table.device).with(second.device).with(tokens).with(places);
        let mut args = args.with(to).with(scale);
        let quads = table.k.div_ceil(4);
        // SAFETY: the tables are alive while they are borrowed and freeing them waits for the stream; the other
        // addresses are the caller's, of the shapes above.
        unsafe { self.device.launch(&self.rows, [m, quads.div_ceil(128), 1], 128, 0, &mut args) }
    }

    /// Weights that one launch can take, in order.
    fn launches<'a>(&self, weights: &'a [&'a Weight]) -> impl Iterator<Item = Launch<'a>> + use<'a> {
        let mut column = 0;
        let processors = self.device.info().processors;
        weights.chunk_by(|a, b| kernel_of(a) == kernel_of(b)).map(move |weights| {
            let first = column;
            column += weights.iter().map(|w| w.n).sum::<usize>();
            let panels = weights.iter().map(|w| w.panels()).sum();
            let k = weights.iter().map(|w| w.k_pad).max().unwrap_or(0);
            Launch { weights, column: first, columns: column - first, panels, splits: splits(panels, k, processors) }
        })
    }

    /// Values of partial sums that a launch needs.
    fn partials(&self, launch: &Launch, m: usize) -> usize {
        let coded = launch.weights.first().is_some_and(|w| w.form != Form::F32);
        if coded && launch.splits > 1 { launch.splits * m.min(ROWS) * launch.columns } else { 0 }
    }

    fn args(&self, launch: &Launch, acts: &Acts, m: usize, out: Output) -> LinearArgs {
        let (to, to_stride, bias, add) = match out {
            Output::Store { to, stride, bias } => (to, stride, bias, 0),
            Output::Add { to, stride, bias } => (to, stride, bias, 1),
        };
        let (form, block) = (launch.weights[0].form, launch.weights[0].block());
        let (h, factors, sums) = match form {
            Form::Int8 => (acts.blocks(block).q.ptr(), DevicePtr::NULL, acts.blocks(block).levels.ptr()),
            _ => (acts.h.ptr(), acts.factors.ptr(), acts.sums.ptr()),
        };
        let mut args = LinearArgs {
            weight: [launch.weights[0].device; 3],
            h,
            factors,
            sums,
            x: acts.x.ptr(),
            to,
            bias: bias.unwrap_or(DevicePtr::NULL),
            partial: self.partial.ptr(),
            tiles: DevicePtr::NULL,
            first: [0; 3],
            column: [0; 3],
            count: launch.weights.len() as u32,
            m: m as u32,
            stride: acts.stride as u32,
            to_stride: to_stride as u32,
            add,
            splits: launch.splits as u32,
            columns: launch.columns as u32,
            offset: launch.column as u32,
            at_h: 0,
            at_scales: 0,
            at_zeros: 0,
            at_supers: 0,
            at_sums: 0,
            stage: 0,
            rows: acts.level_rows() as u32,
            unused: 0,
        };
        let (mut panel, mut column) = (0, 0);
        for (i, w) in launch.weights.iter().enumerate() {
            assert!(acts.serves(w.form, w.block()), "a weight reads {:?}, its input is {:?}", w.form, acts.form);
            assert!(w.k_pad.next_multiple_of(4) <= acts.stride, "{} columns of {}", w.k_pad, acts.stride);
            assert_eq!(w.k, launch.weights[0].k, "columns of weights that share an input");
            args.weight[i] = w.device;
            (args.first[i], args.column[i]) = (panel as u32, column as u32);
            panel += w.panels();
            column += w.n;
        }
        args
    }

    /// Tensor cores: for few tokens the warps of a block share the columns of a panel, for many its rows and tokens.
    /// `tokens` of a block ([`tile`]), and so many blocks of them.
    fn tensor(&self, launch: &Launch, mut args: LinearArgs, tokens: usize, tiles: usize) -> Result<(), CudaError> {
        let (m, slices) = (args.m as usize, SLICES as usize);
        let (form, code, long) = kernel_of(launch.weights[0]);
        let bits = usize::from(code == layout::CODE_INT8);
        let weights = launch.weights.iter().map(|w| &w.device);
        let (kernel, grid, threads, shared) = match NARROW.iter().position(|&t| t == tokens) {
            Some(which) => {
                args.stage(form, tokens, 1, weights, !long);
                let shared = slices
                    * (stages(code, tokens, long) * args.stage as usize).max(tokens * layout::SUMS_PITCH as usize * 4);
                let kernel = match form {
                    Form::Int8 => &self.narrow_int8[bits][long as usize][which],
                    _ => &self.narrow[code as usize][long as usize][which],
                };
                (kernel, [tiles, launch.panels, launch.splits], 32 * slices, shared)
            }
            None => {
                assert_eq!(tokens, layout::WIDE_TOKENS as usize, "tokens of a block");
                args.stage(form, tokens, 2, weights, !long);
                let pairs = args.blocks(launch.weights.iter().map(|w| w.panels().div_ceil(2)));
                // Sums of 128 rows, of the activations, three stages.
                let shared = tokens * (128 + 1) * 4 + 3 * args.stage as usize;
                let kernel = match form {
                    Form::Int8 => &self.wide_int8[bits][long as usize],
                    _ => &self.wide[code as usize][long as usize],
                };
                (kernel, [tiles, pairs, launch.splits], 128, shared)
            }
        };
        if launch.splits > 1 {
            let need = launch.splits * m * launch.columns;
            assert!(need <= self.partial.len(), "{need} partial sums of {}", self.partial.len());
        }
        // SAFETY: the weights are alive while they are borrowed and freeing them waits for the stream; inputs and
        // outputs are of the shapes that `run` checks or its caller promises.
        unsafe { self.device.launch(kernel, grid, threads, shared, &mut Args::new().with(args))? };
        if launch.splits == 1 {
            return Ok(());
        }
        let grid = [launch.columns.div_ceil(256), m, 1];
        // SAFETY: as above; the partial sums are this value's.
        unsafe { self.device.launch(&self.reduce, grid, 256, 0, &mut Args::new().with(args)) }
    }

    /// Plain f32; so many blocks of tokens.
    fn exact(&self, launch: &Launch, args: LinearArgs, tiles: usize) -> Result<(), CudaError> {
        let code = launch.weights[0].device.code;
        let mut args = args;
        let blocks = match code {
            layout::CODE_F32.. => args.blocks(launch.weights.iter().map(|w| w.n.div_ceil(8))),
            _ => launch.panels,
        };
        let grid = [tiles, blocks, 1];
        // SAFETY: as in `tensor`.
        unsafe { self.device.launch(&self.exact[code as usize], grid, 256, 0, &mut Args::new().with(args)) }
    }
}

/// Tokens of a block for so many in all.
pub(super) fn tile(m: usize) -> usize {
    NARROW.into_iter().find(|&t| m <= t).unwrap_or(layout::WIDE_TOKENS as usize)
}

/// Which rows have which expert, on the device.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    /// u32 `[most][4]`: expert, first row, end of its rows.
    pub at: DevicePtr,
    /// Tiles, at most: those without rows are passed over.
    pub most: usize,
    /// Rows of a tile, at most: 8, 32 or 64; 8 where a weight reads f32.
    pub tokens: usize,
}

/// Weights of one launch.
struct Launch<'a> {
    weights: &'a [&'a Weight],
    /// Outputs before them.
    column: usize,
    /// Outputs of theirs.
    columns: usize,
    panels: usize,
    splits: usize,
}

/// What weights of one launch have in common: form, code kind, and whether folds are multiples of 32 columns.
fn kernel_of(weight: &Weight) -> (Form, u32, bool) {
    (weight.form, weight.device.code, weight.device.fold.is_multiple_of(32))
}

/// Blocks that share the columns of a panel: as many as give every multiprocessor one, while a warp has some columns.
fn splits(panels: usize, k: usize, processors: usize) -> usize {
    let enough = (1..MOST_SPLITS).find(|s| panels * s * 8 >= processors * 7).unwrap_or(MOST_SPLITS);
    enough.min((k / (128 * SLICES as usize)).max(1))
}

impl LinearArgs {
    /// Moves inputs and outputs on by some rows, an even number.
    fn skip(&mut self, rows: usize, form: Form) {
        let (rows, stride) = (rows as u64, u64::from(self.stride));
        if form == Form::Int8 {
            self.h.0 += rows * stride;
            self.sums.0 += rows * 8;
        } else {
            self.h.0 += rows * stride * 2;
            self.factors.0 += rows * 4;
            self.sums.0 += rows * (stride / 16) * 4;
        }
        self.to.0 += rows * u64::from(self.to_stride) * 4;
    }

    /// Says where each weight's blocks begin, given how many it has; returns how many there are.
    fn blocks(&mut self, of: impl Iterator<Item = usize>) -> usize {
        let mut all = 0;
        for (first, blocks) in self.first.iter_mut().zip(of) {
            *first = all as u32;
            all += blocks;
        }
        all
    }

    /// Where the parts of a stage of a pipeline are: codes, activations, scales, zeros, upper level, sums.
    fn stage<'a>(
        &mut self,
        form: Form,
        tokens: usize,
        panels: usize,
        weights: impl Iterator<Item = &'a WeightRef>,
        two: bool,
    ) {
        let columns = layout::STAGE_COLUMNS as usize;
        let (mut codes, mut scales, mut zeros, mut supers, mut sums) = (0, 0, 0, 0, 0);
        // Two short folds in a stage have scales of their own.
        let folds = if two { 2 * panels } else { panels };
        for w in weights {
            let bits = match w.code {
                layout::CODE_INT4 | layout::CODE_E2M1 => 4,
                layout::CODE_HALVES => 16,
                _ => 8,
            };
            codes = codes.max(64 * columns * bits / 8);
            let (scale, level) = match w.scale {
                layout::SCALE_F32 => (256, 0),
                layout::SCALE_NESTED => (64, 128),
                layout::SCALE_NONE => (0, 0),
                _ => (128, 0),
            };
            scales = scales.max(scale);
            let zero = match w.zero {
                layout::ZERO_MID => 0,
                layout::ZERO_CODE => 64 * bits / 8,
                _ => scale,
            };
            zeros = zeros.max(zero);
            let min = w.zero == layout::ZERO_MIN;
            supers = supers.max(if min { 2 * level } else { level });
            sums = sums.max(match form {
                Form::Int8 => tokens * 8 * if two { 2 } else { 1 },
                _ if min => tokens * columns / 16 * 4,
                _ => 0,
            });
        }
        let mut end = 0;
        let mut part = |bytes: usize| {
            let at = end;
            end += bytes;
            at as u32
        };
        part(codes * panels);
        // 16 columns and 16 columns, apart by half of the banks.
        let size = if form == Form::Int8 { 1 } else { 2 };
        self.at_h = part(tokens * columns * size + if two { 64 } else { 0 });
        self.at_scales = part(scales * folds);
        self.at_zeros = part(zeros * folds);
        self.at_supers = part(supers * folds);
        self.at_sums = part(sums);
        self.stage = part(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fill_the_device_and_leave_columns_to_every_warp() {
        // Panels, columns, multiprocessors.
        assert_eq!(splits(64, 4096, 132), 2);
        assert_eq!(splits(448, 4096, 132), 1);
        assert_eq!(splits(64, 14336, 132), 2);
        assert_eq!(splits(9, 576, 132), 1);
        assert_eq!(splits(32, 2048, 128), 2);
        assert_eq!(splits(1, 1 << 20, 132), MOST_SPLITS);
    }
}
