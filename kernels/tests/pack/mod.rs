//! Makes tensors in the file's layout, for tests.

use quern_models::{FloatType, Mini, SUPER, Scheme, TensorView, ZeroKind, p64::Shape};

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
    /// Random codes, zeros, minima, and scales of either sign; no code is NaN.
    pub fn random(rng: &mut Rng, n: usize, k: usize, scheme: Scheme) -> Packed {
        let has_nan = matches!(scheme, Scheme::Mini { kind: Mini::E4M3, .. });
        Packed::with(rng, n, k, scheme, |rng| match rng.next() as u8 {
            q @ (0x7f | 0xff) if has_nan => q ^ 1,
            q => q,
        })
    }

    /// Every code the same.
    pub fn constant(rng: &mut Rng, n: usize, k: usize, scheme: Scheme, code: u8) -> Packed {
        Packed::with(rng, n, k, scheme, |_| code)
    }

    fn with(rng: &mut Rng, n: usize, k: usize, scheme: Scheme, mut code: impl FnMut(&mut Rng) -> u8) -> Packed {
        let planes = scheme.planes(n as u64, k as u64).expect("a small tensor");
        let mut bytes = vec![0u8; planes.total as usize];
        if let Scheme::Float(kind) = scheme {
            bytes.clear();
            (0..n * k).for_each(|_| kind.push(rng.float() * 0.2, &mut bytes));
            return Packed { n, k, scheme, bytes };
        }
        let (bits, group) = scheme.coded().expect("floats were handled above, orders are no weights");
        let (zero, scale) = match scheme {
            Scheme::Int { zero, scale, .. } => (zero, Some(scale)),
            Scheme::Mini { scale, .. } => (ZeroKind::Mid, Some(scale)),
            Scheme::Nested { zero, .. } => (zero, None),
            Scheme::Float(_) | Scheme::Order => unreachable!("no codes"),
        };
        let shape = Shape::new(n, k, bits, group);
        let mask = ((1u16 << bits) - 1) as u8;
        for row in 0..shape.n_pad {
            for col in 0..shape.k_pad {
                let real = row < n && col < k;
                let q = if real { code(rng) & mask } else { 1 << (bits - 1) };
                let (byte, shift) = shape.code_at(row, col);
                bytes[planes.codes.0 as usize + byte] |= q << shift;
            }
        }
        for row in 0..n {
            for g in 0..shape.groups {
                let cell = shape.cell(row, g);
                // A stored level of a scale, of a type or a signed byte.
                let mut put_level = |plane: u64, x: f32| match scale {
                    Some(scale) => put(scale, x, &mut bytes[plane as usize + cell * scale.size()..]),
                    None => bytes[plane as usize + cell] = (x * 200.0) as i8 as u8,
                };
                put_level(planes.scales.0, rng.float() * 0.2 * if scale.is_some() { 1.0 } else { 6.0 });
                match zero {
                    ZeroKind::Mid => {}
                    ZeroKind::Code => {
                        let (byte, shift) = shape.zero_at(row, g);
                        bytes[planes.zeros.0 as usize + byte] |= (rng.next() as u8 & mask) << shift;
                    }
                    ZeroKind::Min => put_level(planes.zeros.0, rng.float()),
                }
            }
            let levels = if zero == ZeroKind::Min { 2 } else { 1 };
            for block in (0..shape.k_pad.div_ceil(SUPER)).filter(|_| scale.is_none()) {
                for level in 0..levels {
                    let at = planes.supers.0 as usize + 2 * shape.super_at(row, block, levels, level);
                    put(FloatType::F16, rng.float() * 0.02, &mut bytes[at..]);
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
