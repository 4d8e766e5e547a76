//! Makes tensors in the file's layout, for tests.

use quern_models::{FloatType, Scheme, TensorView, ZeroKind, p64::Shape};

/// xorshift64*: the same numbers on every machine.
pub struct Rng(pub u64);

impl Rng {
    /// 32 random bits.
    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Uniform in -0.5..0.5.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 24) as f32 - 0.5
    }
}

/// A tensor and its bytes.
pub struct Packed {
    pub n: usize,
    pub k: usize,
    pub scheme: Scheme,
    bytes: Vec<u8>,
}

impl Packed {
    /// Random codes, zeros, minima, and scales of either sign.
    pub fn random(rng: &mut Rng, n: usize, k: usize, scheme: Scheme) -> Packed {
        Packed::with(rng, n, k, scheme, |rng| rng.next() as u8)
    }

    /// Every code the same.
    pub fn constant(rng: &mut Rng, n: usize, k: usize, scheme: Scheme, code: u8) -> Packed {
        Packed::with(rng, n, k, scheme, |_| code)
    }

    fn with(rng: &mut Rng, n: usize, k: usize, scheme: Scheme, mut code: impl FnMut(&mut Rng) -> u8) -> Packed {
        let planes = scheme.planes(n as u64, k as u64).expect("a small tensor");
        let mut bytes = vec![0u8; planes.total as usize];
        match scheme {
            Scheme::Nested { .. } | Scheme::Mini { .. } | Scheme::Order => panic!("{scheme}"),
            Scheme::Float(kind) => {
                bytes.clear();
                (0..n * k).for_each(|_| kind.push(rng.float() * 0.2, &mut bytes));
            }
            Scheme::Int { bits, group, zero, scale } => {
                let shape = Shape::new(n, k, bits, group as usize);
                let mask = ((1u16 << bits) - 1) as u8;
                for row in 0..shape.n_pad {
                    for col in 0..shape.k_pad {
                        let real = row < n && col < k;
                        let q = if real { code(rng) & mask } else { 1 << (bits - 1) };
                        let (byte, shift) = shape.code_at(row, col);
                        bytes[planes.codes.0 as usize + byte] |= q << shift;
                    }
                    for g in (0..shape.groups).filter(|_| row < n) {
                        let cell = shape.cell(row, g) * scale.size();
                        put(scale, rng.float() * 0.2, &mut bytes[planes.scales.0 as usize + cell..]);
                        let zeros = &mut bytes[planes.zeros.0 as usize..];
                        match zero {
                            ZeroKind::Mid => {}
                            ZeroKind::Code => {
                                let (byte, shift) = shape.zero_at(row, g);
                                zeros[byte] |= (rng.next() as u8 & mask) << shift;
                            }
                            ZeroKind::Min => put(scale, rng.float(), &mut zeros[cell..]),
                        }
                    }
                }
            }
        }
        Packed { n, k, scheme, bytes }
    }

    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(self.n, self.k, self.scheme, &self.bytes).expect("the planes that were made")
    }
}

fn put(kind: FloatType, x: f32, to: &mut [u8]) {
    let mut bytes = vec![];
    kind.push(x, &mut bytes);
    to[..bytes.len()].copy_from_slice(&bytes);
}
