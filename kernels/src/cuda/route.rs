//! A mixture of experts on the device: which rows go to which expert, and the sum of what they give
//! (`kernels/cuda/route.cu`). As [`super::ops`]: functions only launch.

use std::sync::Arc;

use super::{
    Args, Buffer, CudaError, Device, DevicePtr, Kernel,
    layout::EXACT_TOKENS,
    linear::{Tiles, tile},
    ptx,
};

/// Threads of a block, as in the source.
const SORT_THREADS: usize = 1024;
const THREADS: usize = 256;

/// The operations, compiled for a device.
pub struct Route {
    device: Arc<Device>,
    pick: Kernel,
    sort: Kernel,
    sum: Kernel,
}

/// Sizes of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Experts of the layer.
    pub experts: usize,
    /// Of a row.
    pub top: usize,
}

impl Shape {
    /// Rows that those of `m` rows take when they are sorted by expert, each of whose begin at an even place.
    pub fn room(self, m: usize) -> usize {
        let pairs = m * self.top;
        pairs + self.experts.min(pairs)
    }

    /// Tiles of so many tokens, at most.
    fn tiles(self, m: usize, tokens: usize) -> usize {
        let pairs = m * self.top;
        pairs / tokens + self.experts.min(pairs)
    }
}

/// What [`Route`] finds for the rows of a pass, with memory for some.
pub struct Routes {
    /// Tokens' experts, u32 `[rows][top]`.
    picks: Buffer<u32>,
    /// What they count, `[rows][top]`.
    weights: Buffer<f32>,
    /// Where each pair went, `[rows][top]`.
    places: Buffer<u32>,
    /// The row of each sorted pair, `[room]`.
    pub rows: Buffer<u32>,
    /// `[tiles][4]`.
    tiles: Buffer<u32>,
}

impl Routes {
    /// For up to `rows` rows.
    pub fn new(device: &Arc<Device>, shape: Shape, rows: usize) -> Result<Routes, CudaError> {
        let (what, pairs) = ("experts of a step", rows * shape.top);
        Ok(Routes {
            picks: Buffer::new(device, what, pairs)?,
            weights: Buffer::new(device, what, pairs)?,
            places: Buffer::new(device, what, pairs)?,
            rows: Buffer::new(device, what, shape.room(rows))?,
            tiles: Buffer::new(device, what, 4 * shape.tiles(rows, EXACT_TOKENS as usize))?,
        })
    }

    /// Bytes that they take.
    pub fn bytes(shape: Shape, rows: usize) -> usize {
        4 * (3 * rows * shape.top + shape.room(rows) + 4 * shape.tiles(rows, EXACT_TOKENS as usize))
    }
}

impl Route {
    /// Has the driver compile them.
    pub fn new(device: &Arc<Device>) -> Result<Route, CudaError> {
        let kernel = |name| device.kernel(&ptx::ROUTE, name);
        Ok(Route { device: device.clone(), pick: kernel("pick")?, sort: kernel("sort")?, sum: kernel("sum")? })
    }

    /// Picks the experts of `m` rows by their logits, f32 `[m][experts]`, and sorts the rows. `exact`: weights may read
    /// f32.
    pub fn run(
        &self,
        logits: DevicePtr,
        shape: Shape,
        normalized: bool,
        exact: bool,
        to: &Routes,
        m: usize,
    ) -> Result<Tiles, CudaError> {
        let Shape { experts, top } = shape;
        let pairs = m * top;
        assert!(pairs <= to.picks.len(), "{m} rows of {top} experts, room for {}", to.picks.len());
        let mut args = Args::new()
            .with(logits)
            .with(experts as u32)
            .with(top as u32)
            .with(u32::from(normalized))
            .with(to.picks.ptr())
            .with(to.weights.ptr());
        // SAFETY: the kernel's parameters; the caller keeps the logits, the rest is of these sizes by `Routes::new`.
        unsafe { self.device.launch(&self.pick, [m, 1, 1], 32, 0, &mut args)? };
        // Tiles of what an expert has on average: whatever their size, the sums are the same.
        let tokens = if exact { EXACT_TOKENS as usize } else { tile(pairs.div_ceil(experts)) };
        let most = shape.tiles(m, tokens);
        let mut args = Args::new()
            .with(to.picks.ptr())
            .with(pairs as u32)
            .with(top as u32)
            .with(experts as u32)
            .with(tokens as u32)
            .with(to.rows.ptr())
            .with(shape.room(m) as u32)
            .with(to.places.ptr())
            .with(to.tiles.ptr())
            .with(most as u32);
        // SAFETY: as above.
        unsafe { self.device.launch(&self.sort, [1, 1, 1], SORT_THREADS, 0, &mut args)? };
        Ok(Tiles { at: to.tiles.ptr(), most, tokens })
    }

    /// `x[row] += sum of weight * y` over a row's experts: `y` f32 `[room][hidden]` of the sorted rows, `x` f32
    /// `[m][hidden]`.
    pub fn sum(
        &self,
        y: DevicePtr,
        of: &Routes,
        top: usize,
        hidden: usize,
        x: DevicePtr,
        m: usize,
    ) -> Result<(), CudaError> {
        let args = Args::new().with(y).with(of.places.ptr()).with(of.weights.ptr());
        let mut args = args.with(top as u32).with(hidden as u32).with(x);
        // SAFETY: as above.
        unsafe { self.device.launch(&self.sum, [hidden.div_ceil(THREADS), m, 1], THREADS, 0, &mut args) }
    }
}
