//! Keys and values of every token of a model in device memory, in blocks of [`BLOCK`] tokens.
//!
//! Which sequence owns which block is the scheduler's business; here is only memory. A block is contiguous, and so is
//! what belongs to one (block, layer, head), which one block of threads reads:
//!
//! ```text
//! f16, f32: [block][layer][kv head] { K: [BLOCK][head_dim], V: [BLOCK][head_dim] }
//! int8:     [block][layer][kv head] { scales of K, of V: f16 [BLOCK] each, K: i8 [BLOCK][head_dim], V: the same }
//! ```
//!
//! Blocks have as many bytes as on the CPU, and elements, codes and scales are the same, but for tokens with a NaN: of f16
//! too they are stored with a key of NaN and a value of zero. Stored values of f16 and int8 are therefore finite,
//! always, and a weight of zero hides them. All is zero at first.

use std::sync::Arc;

use super::{Buffer, CudaError, Device, DevicePtr, Pod};
use crate::cpu::kv::{KvLayer, KvMemory, KvType};

pub use crate::cpu::kv::BLOCK;

/// A place nowhere: keys and values of this row are not kept.
pub const NO_PLACE: u32 = u32::MAX;

/// The cache of one model.
pub struct KvPool {
    kind: KvType,
    blocks: usize,
    /// Blocks behind those, which no sequence has.
    spare: usize,
    /// Bytes of a block.
    block: usize,
    /// Shape of each layer, and where it starts in a block.
    layers: Vec<(KvLayer, usize)>,
    memory: Buffer<u8>,
}

/// One layer's part as kernels take it: address of block 0, bytes from block to block and from head to head.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct PoolArgs {
    base: DevicePtr,
    block: u64,
    head: u64,
}

// SAFETY: three words of 64 bits, no padding.
unsafe impl Pod for PoolArgs {}

impl KvPool {
    /// Room for `blocks` blocks of every layer, all zero.
    pub fn new(device: &Arc<Device>, layers: &[KvLayer], blocks: usize, kind: KvType) -> Result<KvPool, CudaError> {
        KvPool::with_spare(device, layers, blocks, 0, kind)
    }

    /// The same with blocks more that no sequence has, for [`Batch::lend`](super::Batch::lend).
    pub fn with_spare(
        device: &Arc<Device>,
        layers: &[KvLayer],
        blocks: usize,
        spare: usize,
        kind: KvType,
    ) -> Result<KvPool, CudaError> {
        let mut block = 0;
        let mut placed = vec![];
        for &layer in layers {
            placed.push((layer, block));
            block += layer.kv_heads * kind.head_bytes(layer.head_dim);
        }
        let mut memory = Buffer::new(device, "keys and values", block.saturating_mul(blocks.saturating_add(spare)))?;
        memory.fill(0)?;
        Ok(KvPool { kind, blocks, spare, block, layers: placed, memory })
    }

    /// The blocks that no sequence has.
    pub fn spare(&self) -> std::ops::Range<u32> {
        self.blocks as u32..(self.blocks + self.spare) as u32
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes that one block takes, all layers together.
    pub fn block_bytes(layers: &[KvLayer], kind: KvType) -> usize {
        KvMemory::block_bytes(layers, kind)
    }

    /// How elements are stored.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Blocks of every layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of a block, all layers together.
    pub fn bytes_of_block(&self) -> usize {
        self.block
    }

    /// Shape of a layer.
    pub fn layer(&self, layer: usize) -> KvLayer {
        self.layers[layer].0
    }

    pub(super) fn args(&self, layer: usize) -> PoolArgs {
        let (shape, at) = self.layers[layer];
        let head = self.kind.head_bytes(shape.head_dim) as u64;
        PoolArgs { base: DevicePtr(self.memory.ptr().0 + at as u64), block: self.block as u64, head }
    }

    /// Copies block `from` over block `to`, in the order of the stream.
    pub fn copy_block(&mut self, from: u32, to: u32) -> Result<(), CudaError> {
        self.check(from);
        self.check(to);
        if from == to || self.block == 0 {
            return Ok(());
        }
        self.memory.copy_within(from as usize * self.block, to as usize * self.block, self.block)
    }

    /// A block's bytes; waits for everything that was asked of the device.
    pub fn read_block(&self, block: u32, to: &mut [u8]) -> Result<(), CudaError> {
        self.check(block);
        assert_eq!(to.len(), self.block, "bytes of a block");
        self.memory.read(block as usize * self.block, to)
    }

    /// Puts back what [`KvPool::read_block`] gave; waits until it is there.
    pub fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), CudaError> {
        self.check(block);
        assert_eq!(from.len(), self.block, "bytes of a block");
        self.memory.write(block as usize * self.block, from)
    }

    fn check(&self, block: u32) {
        assert!((block as usize) < self.blocks, "block {block} of {}", self.blocks);
    }
}
