//! Keys and values of every token of a model, in fixed-size blocks of [`BLOCK`] tokens.
//!
//! Which sequence owns which block is the scheduler's business (the root package); here is only memory. A block id
//! names the same slot range in every layer. Inside a layer:
//!
//! ```text
//! [block][kv head] { K^T: [head_dim][BLOCK], V: [BLOCK][head_dim] }
//! ```
//!
//! K is transposed so that tokens are vector lanes in `q . k` and no horizontal sum is needed; the 4 KiB of one
//! (block, head) of a 64-wide head are read once for all query heads that share it.
//!
//! Pages are zeroed lazily by the system: a cache nobody writes to costs address space only.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use half::f16;

/// Tokens of a block.
pub const BLOCK: usize = 16;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE binary16, rounded to nearest even and clamped to the largest finite value.
    F16,
    /// IEEE binary32: the exact mode.
    F32,
}

impl KvType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// Shape of one layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one key and of one value; a multiple of 8.
    pub head_dim: usize,
}

/// The cache of one model. Shared by all threads; see [`KvMemory::append`] for who may write when.
pub struct KvMemory {
    kind: KvType,
    blocks: usize,
    layers: Vec<Placed>,
    /// What the allocator returned; `base` is the first 64-byte boundary in it.
    raw: *mut u8,
    base: *mut u8,
    layout: Layout,
}

/// A layer and where it starts.
struct Placed {
    shape: KvLayer,
    offset: usize,
}

// SAFETY: the memory is owned; it is written only through `&mut self` or through unsafe functions whose contracts
// exclude data races.
unsafe impl Send for KvMemory {}
// SAFETY: as above.
unsafe impl Sync for KvMemory {}

impl KvMemory {
    /// Room for `blocks` blocks of every layer, all zero. `None` if the size overflows or the system refuses.
    ///
    /// Panics if a head size is not a multiple of 8: the specification of a model guarantees it.
    pub fn new(layers: &[KvLayer], blocks: usize, kind: KvType) -> Option<KvMemory> {
        let mut total = 0usize;
        let mut placed = Vec::with_capacity(layers.len());
        for &shape in layers {
            assert!(shape.head_dim.is_multiple_of(8), "head size {} is not a multiple of 8", shape.head_dim);
            placed.push(Placed { shape, offset: total });
            let block = shape.kv_heads.checked_mul(shape.head_dim)?.checked_mul(2 * BLOCK * kind.size())?;
            total = total.checked_add(block.checked_mul(blocks)?)?;
        }
        // Alignment by hand: for more than 16 bytes std's `alloc_zeroed` clears, and so touches, every page.
        let layout = Layout::from_size_align(total.checked_add(ALIGN)?, 16).ok()?;
        // SAFETY: the size is at least ALIGN, not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        if raw.is_null() {
            return None;
        }
        // SAFETY: at most ALIGN - 1 further, inside the allocation of total + ALIGN bytes.
        let base = unsafe { raw.add(raw.align_offset(ALIGN)) };
        Some(KvMemory { kind, blocks, layers: placed, raw, base, layout })
    }

    /// Bytes that one block takes, all layers together.
    pub fn block_bytes(layers: &[KvLayer], kind: KvType) -> usize {
        layers.iter().map(|l| 2 * BLOCK * l.kv_heads * l.head_dim * kind.size()).sum()
    }

    /// How elements are stored.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Blocks of every layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Shape of a layer.
    pub fn layer(&self, layer: usize) -> KvLayer {
        self.layers[layer].shape
    }

    /// Writes the key and the value, `[head_dim]` each, of one token and head.
    ///
    /// # Safety
    /// Until it returns, no other thread may append or read the same (layer, block, slot, head), nor attend over the
    /// block. Different slots or heads may be written at the same time.
    pub unsafe fn append(&self, layer: usize, block: u32, slot: usize, kv_head: usize, k: &[f32], v: &[f32]) {
        let d = self.layers[layer].shape.head_dim;
        assert!(
            slot < BLOCK && k.len() == d && v.len() == d,
            "slot {slot}, key {}, value {}, head {d}",
            k.len(),
            v.len()
        );
        let at = self.head(layer, block, kv_head);
        match self.kind {
            // SAFETY: `head` checked block and head; K^T is [d][BLOCK] and V is [BLOCK][d] from there, slot < BLOCK.
            // No race by the caller's promise.
            KvType::F16 => unsafe { write(at as *mut f16, slot, k, v, half_of) },
            // SAFETY: as above.
            KvType::F32 => unsafe { write(at as *mut f32, slot, k, v, |x| x) },
        }
    }

    /// The key and the value stored for one token and head. Slow: for tests and the oracle.
    pub fn read(&self, layer: usize, block: u32, slot: usize, kv_head: usize) -> (Vec<f32>, Vec<f32>) {
        let d = self.layers[layer].shape.head_dim;
        assert!(slot < BLOCK, "slot {slot}");
        let at = self.head(layer, block, kv_head);
        let element = |i: usize| match self.kind {
            // SAFETY: i < 2 * BLOCK * d, the size of a (block, head); `head` checked the rest.
            KvType::F16 => unsafe { *(at as *const f16).add(i) }.to_f32(),
            // SAFETY: as above.
            KvType::F32 => unsafe { *(at as *const f32).add(i) },
        };
        let k = (0..d).map(|i| element(i * BLOCK + slot)).collect();
        let v = (0..d).map(|i| element(BLOCK * d + slot * d + i)).collect();
        (k, v)
    }

    /// Copies block `from` over block `to` in every layer: a fork gets its own copy before it writes.
    ///
    /// # Safety
    /// Until it returns, no other thread may use block `to` or append to block `from`.
    pub unsafe fn copy_block(&self, from: u32, to: u32) {
        for (i, layer) in self.layers.iter().enumerate() {
            let (src, dst) = (self.head(i, from, 0), self.head(i, to, 0));
            let bytes = 2 * BLOCK * layer.shape.kv_heads * layer.shape.head_dim * self.kind.size();
            // SAFETY: both are whole blocks of this layer; `copy` allows from == to; no race by the caller's promise.
            unsafe { std::ptr::copy(src, dst, bytes) };
        }
    }

    /// Start of the K^T of a (block, head). Panics when out of range, like indexing.
    #[inline]
    pub(crate) fn head(&self, layer: usize, block: u32, kv_head: usize) -> *mut u8 {
        let Placed { shape, offset } = &self.layers[layer];
        let block = block as usize;
        assert!(block < self.blocks && kv_head < shape.kv_heads, "block {block} head {kv_head} of layer {layer}");
        let index = block * shape.kv_heads + kv_head;
        // SAFETY: block and head are in range, so this is inside the layer's part of the allocation.
        unsafe { self.base.add(offset + index * 2 * BLOCK * shape.head_dim * self.kind.size()) }
    }
}

impl Drop for KvMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.raw, self.layout) };
    }
}

const ALIGN: usize = 64;

/// f16 nearest to `x`; never infinite, so that one large key cannot turn a whole score into NaN. NaN stays NaN.
fn half_of(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// # Safety
/// `at` must be valid for writes of `2 * BLOCK * k.len()` elements, `v` as long as `k`, `slot < BLOCK`.
unsafe fn write<T>(at: *mut T, slot: usize, k: &[f32], v: &[f32], convert: impl Fn(f32) -> T) {
    let d = k.len();
    for i in 0..d {
        // SAFETY: i < d and slot < BLOCK, so both lie in the 2 * BLOCK * d elements.
        unsafe {
            at.add(i * BLOCK + slot).write(convert(k[i]));
            at.add(BLOCK * d + slot * d + i).write(convert(v[i]));
        }
    }
}
