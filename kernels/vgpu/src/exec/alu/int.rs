//! Integers and bits.

use crate::exec::lanes::{lanes, pick};
use crate::exec::warp::CARRY;
use crate::exec::{Args, Lanes, Warp};
use crate::ptx::types::Ty;

/// What the six integer types have in common.
pub trait Int: Copy {
    fn mul_hi(self, other: Self) -> Self;
    fn quotient(self, other: Self) -> Self;
    fn remainder(self, other: Self) -> Self;
    fn shift_left(self, by: u32) -> Self;
    fn shift_right(self, by: u32) -> Self;
    fn find_msb(self) -> u32;
}

macro_rules! int {
    ($ty:ty, $wide:ty, $bits:literal, $signed:literal) => {
        impl Int for $ty {
            #[inline(always)]
            fn mul_hi(self, other: Self) -> Self {
                ((self as $wide * other as $wide) >> $bits) as $ty
            }
            #[inline(always)]
            fn quotient(self, other: Self) -> Self {
                // Division by zero yields all ones, the smallest by -1 wraps.
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }
            #[inline(always)]
            fn remainder(self, other: Self) -> Self {
                if other == 0 { self } else { self.wrapping_rem(other) }
            }
            #[inline(always)]
            fn shift_left(self, by: u32) -> Self {
                if by >= $bits { 0 } else { self << by }
            }
            #[inline(always)]
            fn shift_right(self, by: u32) -> Self {
                if by < $bits {
                    self >> by
                } else if $signed {
                    self >> ($bits - 1)
                } else {
                    0
                }
            }
            #[inline(always)]
            fn find_msb(self) -> u32 {
                // Of negative numbers the highest zero.
                #[allow(unused_comparisons)]
                let bits = if self < 0 { !self } else { self };
                if bits == 0 { !0 } else { $bits - 1 - bits.leading_zeros() }
            }
        }
    };
}
int!(u16, u32, 16, false);
int!(i16, i32, 16, true);
int!(u32, u64, 32, false);
int!(i32, i64, 32, true);
int!(u64, u128, 64, false);
int!(i64, i128, 64, true);

/// The same expression for each integer type; `|a, b|` get the type.
macro_rules! each {
    ($ty:expr, $map:ident, |$first:ident $(, $more:ident)*| $e:expr) => {
        match $ty {
            Ty::U16 | Ty::B16 => lanes!($map, |$first: u16 $(, $more: u16)*| $e),
            Ty::S16 => lanes!($map, |$first: i16 $(, $more: i16)*| $e),
            Ty::U32 | Ty::B32 => lanes!($map, |$first: u32 $(, $more: u32)*| $e),
            Ty::S32 => lanes!($map, |$first: i32 $(, $more: i32)*| $e),
            Ty::U64 | Ty::B64 => lanes!($map, |$first: u64 $(, $more: u64)*| $e),
            Ty::S64 => lanes!($map, |$first: i64 $(, $more: i64)*| $e),
            _ => return None,
        }
    };
}

/// The same expression for bits of each size.
macro_rules! each_size {
    ($ty:expr, $map:ident, |$first:ident $(, $more:ident)*| $e:expr) => {
        match $ty.size() {
            2 => lanes!($map, |$first: u16 $(, $more: u16)*| $e),
            4 => lanes!($map, |$first: u32 $(, $more: u32)*| $e),
            8 => lanes!($map, |$first: u64 $(, $more: u64)*| $e),
            _ => return None,
        }
    };
}

/// One source.
pub fn unary(op: &str, ty: Ty) -> Option<Lanes> {
    Some(match op {
        "mov" => each_size!(ty, map1, |a| a),
        "not" => each_size!(ty, map1, |a| !a),
        "cnot" => match ty.size() {
            2 => lanes!(map1, |a: u16| u16::from(a == 0)),
            4 => lanes!(map1, |a: u32| u32::from(a == 0)),
            8 => lanes!(map1, |a: u64| u64::from(a == 0)),
            _ => return None,
        },
        "neg" if ty.integer() => each_size!(ty, map1, |a| a.wrapping_neg()),
        "abs" => match ty {
            Ty::S16 => lanes!(map1, |a: i16| a.wrapping_abs()),
            Ty::S32 => lanes!(map1, |a: i32| a.wrapping_abs()),
            Ty::S64 => lanes!(map1, |a: i64| a.wrapping_abs()),
            _ => return None,
        },
        "popc" => match ty {
            Ty::B32 => lanes!(map1, |a: u32| a.count_ones()),
            Ty::B64 => lanes!(map1, |a: u64| a.count_ones()),
            _ => return None,
        },
        "clz" => match ty {
            Ty::B32 => lanes!(map1, |a: u32| a.leading_zeros()),
            Ty::B64 => lanes!(map1, |a: u64| a.leading_zeros()),
            _ => return None,
        },
        "brev" => match ty {
            Ty::B32 => lanes!(map1, |a: u32| a.reverse_bits()),
            Ty::B64 => lanes!(map1, |a: u64| a.reverse_bits()),
            _ => return None,
        },
        "bfind" => match ty {
            Ty::U32 => lanes!(map1, |a: u32| a.find_msb()),
            Ty::S32 => lanes!(map1, |a: i32| a.find_msb()),
            Ty::U64 => lanes!(map1, |a: u64| a.find_msb()),
            Ty::S64 => lanes!(map1, |a: i64| a.find_msb()),
            _ => return None,
        },
        // bfind.shiftamt: how far to shift left.
        "bfind_shift" => match ty {
            Ty::U32 => lanes!(map1, |a: u32| if a == 0 { !0 } else { 31 - a.find_msb() }),
            Ty::S32 => lanes!(map1, |a: i32| if a == 0 || a == -1 { !0 } else { 31 - a.find_msb() }),
            Ty::U64 => lanes!(map1, |a: u64| if a == 0 { !0 } else { 63 - a.find_msb() }),
            Ty::S64 => lanes!(map1, |a: i64| if a == 0 || a == -1 { !0 } else { 63 - a.find_msb() }),
            _ => return None,
        },
        _ => return None,
    })
}

/// Two sources of the instruction's type (shifts: the second is 32 bits).
pub fn binary(op: &str, ty: Ty) -> Option<Lanes> {
    Some(match op {
        "add" => each_int(ty, each_size!(ty, map2, |a, b| a.wrapping_add(b)))?,
        "sub" => each_int(ty, each_size!(ty, map2, |a, b| a.wrapping_sub(b)))?,
        "mul.lo" => each_int(ty, each_size!(ty, map2, |a, b| a.wrapping_mul(b)))?,
        "mul.hi" => each!(ty, map2, |a, b| a.mul_hi(b)),
        "mul.wide" => match ty {
            Ty::U16 => lanes!(map2, |a: u16, b: u16| u32::from(a) * u32::from(b)),
            Ty::S16 => lanes!(map2, |a: i16, b: i16| i32::from(a) * i32::from(b)),
            Ty::U32 => lanes!(map2, |a: u32, b: u32| u64::from(a) * u64::from(b)),
            Ty::S32 => lanes!(map2, |a: i32, b: i32| i64::from(a) * i64::from(b)),
            _ => return None,
        },
        "mul24.lo" => match ty {
            Ty::U32 => lanes!(map2, |a: u32, b: u32| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)),
            Ty::S32 => lanes!(map2, |a: i32, b: i32| ((a << 8) >> 8).wrapping_mul((b << 8) >> 8)),
            _ => return None,
        },
        "div" => each!(ty, map2, |a, b| a.quotient(b)),
        "rem" => each!(ty, map2, |a, b| a.remainder(b)),
        "min" => each!(ty, map2, |a, b| a.min(b)),
        "max" => each!(ty, map2, |a, b| a.max(b)),
        "and" => each_size!(ty, map2, |a, b| a & b),
        "or" => each_size!(ty, map2, |a, b| a | b),
        "xor" => each_size!(ty, map2, |a, b| a ^ b),
        "shl" => match ty.size() {
            2 => lanes!(map2, |a: u16, b: u32| a.shift_left(b)),
            4 => lanes!(map2, |a: u32, b: u32| a.shift_left(b)),
            8 => lanes!(map2, |a: u64, b: u32| a.shift_left(b)),
            _ => return None,
        },
        "shr" => match ty {
            Ty::U16 | Ty::B16 => lanes!(map2, |a: u16, b: u32| a.shift_right(b)),
            Ty::S16 => lanes!(map2, |a: i16, b: u32| a.shift_right(b)),
            Ty::U32 | Ty::B32 => lanes!(map2, |a: u32, b: u32| a.shift_right(b)),
            Ty::S32 => lanes!(map2, |a: i32, b: u32| a.shift_right(b)),
            Ty::U64 | Ty::B64 => lanes!(map2, |a: u64, b: u32| a.shift_right(b)),
            Ty::S64 => lanes!(map2, |a: i64, b: u32| a.shift_right(b)),
            _ => return None,
        },
        "add.sat" if ty == Ty::S32 => lanes!(map2, |a: i32, b: i32| a.saturating_add(b)),
        "sub.sat" if ty == Ty::S32 => lanes!(map2, |a: i32, b: i32| a.saturating_sub(b)),
        "bmsk.clamp" => lanes!(map2, |a: u32, b: u32| mask_bits(a, b)),
        "bmsk.wrap" => lanes!(map2, |a: u32, b: u32| mask_bits(a & 31, b & 31)),
        _ => return None,
    })
}

fn each_int(ty: Ty, found: Lanes) -> Option<Lanes> {
    ty.integer().then_some(found)
}

/// `width` ones from bit `at` on.
#[inline(always)]
fn mask_bits(at: u32, width: u32) -> u32 {
    let ones = if width >= 32 { !0 } else { (1u32 << width) - 1 };
    ones.shift_left(at)
}

/// Three sources.
pub fn ternary(op: &str, ty: Ty) -> Option<Lanes> {
    Some(match op {
        "mad.lo" => each_int(ty, each_size!(ty, map3, |a, b, c| a.wrapping_mul(b).wrapping_add(c)))?,
        "mad.hi" => each!(ty, map3, |a, b, c| a.mul_hi(b).wrapping_add(c)),
        "mad.wide" => match ty {
            Ty::U16 => lanes!(map3, |a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)),
            Ty::S16 => lanes!(map3, |a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)),
            Ty::U32 => lanes!(map3, |a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
            Ty::S32 => lanes!(map3, |a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
            _ => return None,
        },
        "sad" => match ty {
            Ty::U16 => lanes!(map3, |a: u16, b: u16, c: u16| c.wrapping_add(a.abs_diff(b))),
            Ty::S16 => lanes!(map3, |a: i16, b: i16, c: u16| c.wrapping_add(a.abs_diff(b))),
            Ty::U32 => lanes!(map3, |a: u32, b: u32, c: u32| c.wrapping_add(a.abs_diff(b))),
            Ty::S32 => lanes!(map3, |a: i32, b: i32, c: u32| c.wrapping_add(a.abs_diff(b))),
            _ => return None,
        },
        "bfe" => match ty {
            Ty::U32 => lanes!(map3, |a: u32, b: u32, c: u32| extract(u64::from(a), b, c, 32) as u32),
            Ty::S32 => lanes!(map3, |a: i32, b: u32, c: u32| extract_signed(i64::from(a), b, c, 32) as i32),
            Ty::U64 => lanes!(map3, |a: u64, b: u32, c: u32| extract(a, b, c, 64)),
            Ty::S64 => lanes!(map3, |a: i64, b: u32, c: u32| extract_signed(a, b, c, 64)),
            _ => return None,
        },
        "shf.l.wrap" => lanes!(map3, |a: u32, b: u32, c: u32| funnel_left(a, b, c & 31)),
        "shf.l.clamp" => lanes!(map3, |a: u32, b: u32, c: u32| funnel_left(a, b, c.min(32))),
        "shf.r.wrap" => lanes!(map3, |a: u32, b: u32, c: u32| funnel_right(a, b, c & 31)),
        "shf.r.clamp" => lanes!(map3, |a: u32, b: u32, c: u32| funnel_right(a, b, c.min(32))),
        "prmt" => lanes!(map3, |a: u32, b: u32, c: u32| permute(a, b, c)),
        "prmt.f4e" => lanes!(map3, |a: u32, b: u32, c: u32| permute(a, b, 0x3210 + 0x1111 * (c & 3))),
        "prmt.b4e" => {
            lanes!(map3, |a: u32, b: u32, c: u32| { permute(a, b, [0x5670, 0x6701, 0x7012, 0x0123][c as usize & 3]) })
        }
        "prmt.rc8" => lanes!(map3, |a: u32, b: u32, c: u32| permute(a, b, 0x1111 * (c & 3))),
        "prmt.rc16" => lanes!(map3, |a: u32, b: u32, c: u32| permute(a, b, if c & 1 == 0 { 0x1010 } else { 0x3232 })),
        "prmt.ecl" => {
            lanes!(map3, |a: u32, b: u32, c: u32| { permute(a, b, [0x3210, 0x3211, 0x3222, 0x3333][c as usize & 3]) })
        }
        "prmt.ecr" => {
            lanes!(map3, |a: u32, b: u32, c: u32| { permute(a, b, [0x0000, 0x1110, 0x2210, 0x3210][c as usize & 3]) })
        }
        "slct32" => lanes!(map3, |a: u32, b: u32, c: i32| if c >= 0 { a } else { b }),
        "slct64" => lanes!(map3, |a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
        "slct32f" => lanes!(map3, |a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b }),
        "slct64f" => lanes!(map3, |a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b }),
        _ => return None,
    })
}

/// `c` bits of `a` from bit `b` on; both count 8 bits.
#[inline(always)]
fn extract(a: u64, b: u32, c: u32, bits: u32) -> u64 {
    let (at, width) = (b & 255, (c & 255).min(bits));
    let ones = if width >= 64 { !0 } else { (1u64 << width) - 1 };
    a.shift_right(at) & ones
}

/// The same, with the sign bit of the field, or of `a` where the field reaches beyond it.
#[inline(always)]
fn extract_signed(a: i64, b: u32, c: u32, bits: u32) -> i64 {
    let (at, width) = (b & 255, (c & 255).min(bits));
    if width == 0 {
        return 0;
    }
    let field = a.shift_right(at);
    (field << (64 - width)) >> (64 - width)
}

#[inline(always)]
fn funnel_left(a: u32, b: u32, by: u32) -> u32 {
    (((u64::from(b) << 32) | u64::from(a)) << by >> 32) as u32
}

#[inline(always)]
fn funnel_right(a: u32, b: u32, by: u32) -> u32 {
    (((u64::from(b) << 32) | u64::from(a)) >> by) as u32
}

/// Four bytes of `b:a` by the nibbles of `c`; bit 3 of a nibble: the byte's sign instead.
#[inline(always)]
fn permute(a: u32, b: u32, c: u32) -> u32 {
    let both = u64::from(b) << 32 | u64::from(a);
    let mut found = 0;
    for k in 0..4 {
        let nibble = c >> (4 * k) & 15;
        let byte = (both >> (8 * (nibble & 7))) as u32 & 0xff;
        let sign = if byte & 0x80 != 0 { 0xff } else { 0 };
        found |= (if nibble & 8 != 0 { sign } else { byte }) << (8 * k);
    }
    found
}

/// `bfi`: `c`, `d` (register `k`) are place and width.
pub fn insert(ty: Ty) -> Option<Lanes> {
    #[inline(always)]
    fn field(a: u64, b: u64, at: u32, width: u32, bits: u32) -> u64 {
        let (at, width) = (at & 255, (width & 255).min(bits));
        let ones = if width >= 64 { !0u64 } else { (1u64 << width) - 1 };
        let mask = ones.shift_left(at);
        (b & !mask) | (a.shift_left(at) & mask)
    }
    Some(match ty {
        Ty::B32 => lanes!(map4, |a: u32, b: u32, c: u32, d: u32| field(a.into(), b.into(), c, d, 32) as u32),
        Ty::B64 => lanes!(map4, |a: u64, b: u64, c: u32, d: u32| field(a, b, c, d, 64)),
        _ => return None,
    })
}

/// Any function of three bits by its table.
pub fn lop3(table: u8) -> Lanes {
    #[inline(always)]
    fn any(a: u32, b: u32, c: u32, k: u32) -> u32 {
        let mut found = 0;
        for row in 0..8 {
            let x = if row & 4 != 0 { a } else { !a };
            let y = if row & 2 != 0 { b } else { !b };
            let z = if row & 1 != 0 { c } else { !c };
            found |= x & y & z & 0u32.wrapping_sub(k >> row & 1);
        }
        found
    }
    match table {
        0x80 => lanes!(map3, |a: u32, b: u32, c: u32| a & b & c),
        0xea => lanes!(map3, |a: u32, b: u32, c: u32| (a & b) | c),
        0xfe => lanes!(map3, |a: u32, b: u32, c: u32| a | b | c),
        0x96 => lanes!(map3, |a: u32, b: u32, c: u32| a ^ b ^ c),
        0x6a => lanes!(map3, |a: u32, b: u32, c: u32| (a & b) ^ c),
        0xca => lanes!(map3, |a: u32, b: u32, c: u32| (a & b) | (!a & c)),
        0xf8 => lanes!(map3, |a: u32, b: u32, c: u32| a | (b & c)),
        _ => lanes!(map3k, |a: u32, b: u32, c: u32, k: u32| any(a, b, c, k)),
    }
}

/// Dot products of four or two small integers, whether `a` and `b` are signed. Of dp2a `k` says that too (bits 0 and
/// 1), and with bit 2 that the upper bytes of `b` are meant.
pub fn dot(op: &str, a: bool, b: bool) -> Option<Lanes> {
    #[inline(always)]
    fn byte(word: u32, at: u32, signed: bool) -> i32 {
        let byte = (word >> (8 * at)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    }
    #[inline(always)]
    fn four(a: u32, b: u32, c: i32, sa: bool, sb: bool) -> i32 {
        let mut sum = c;
        for at in 0..4 {
            sum = sum.wrapping_add(byte(a, at, sa) * byte(b, at, sb));
        }
        sum
    }
    #[inline(always)]
    fn two(a: u32, b: u32, c: i32, sa: bool, sb: bool, high: bool) -> i32 {
        let mut sum = c;
        for at in 0..2 {
            let half = (a >> (16 * at)) as u16;
            let x = if sa { i32::from(half as i16) } else { i32::from(half) };
            sum = sum.wrapping_add(x.wrapping_mul(byte(b, at + 2 * u32::from(high), sb)));
        }
        sum
    }
    Some(match (op, a, b) {
        ("dp4a", true, true) => lanes!(map3, |a: u32, b: u32, c: i32| four(a, b, c, true, true)),
        ("dp4a", true, false) => lanes!(map3, |a: u32, b: u32, c: i32| four(a, b, c, true, false)),
        ("dp4a", false, true) => lanes!(map3, |a: u32, b: u32, c: i32| four(a, b, c, false, true)),
        ("dp4a", false, false) => lanes!(map3, |a: u32, b: u32, c: i32| four(a, b, c, false, false)),
        ("dp2a", ..) => {
            lanes!(map3k, |a: u32, b: u32, c: i32, k: u32| two(a, b, c, k & 1 != 0, k & 2 != 0, k & 4 != 0))
        }
        _ => return None,
    })
}

/// Additions with carry: `k` bit 0 reads the flag, bit 1 writes it, bit 2 subtracts.
pub fn carry(ty: Ty) -> Option<Lanes> {
    macro_rules! body {
        ($bank:ident, $raw:ty) => {{
            #[inline(always)]
            fn body(w: &mut Warp, x: &Args, m: u32) {
                let mut flags = w.p[CARRY as usize];
                for i in 0..32 {
                    if m >> i & 1 == 0 {
                        continue;
                    }
                    let (a, b) = (w.$bank[x.a as usize].0[i], w.$bank[x.b as usize].0[i]);
                    let flag = x.k & 1 != 0 && flags >> i & 1 == 1;
                    let (value, out) = if x.k & 4 == 0 {
                        let (sum, first) = a.overflowing_add(b);
                        let (sum, second) = sum.overflowing_add(<$raw>::from(flag));
                        (sum, first | second)
                    } else {
                        let (sum, first) = a.overflowing_sub(b);
                        let (sum, second) = sum.overflowing_sub(<$raw>::from(flag));
                        (sum, first | second)
                    };
                    w.$bank[x.d as usize].0[i] = value;
                    if x.k & 2 != 0 {
                        flags = (flags & !(1 << i)) | u32::from(out) << i;
                    }
                }
                w.p[CARRY as usize] = flags;
            }
            pick!(body)
        }};
    }
    Some(match ty {
        Ty::U32 | Ty::S32 => body!(r, u32),
        Ty::U64 | Ty::S64 => body!(q, u64),
        _ => return None,
    })
}

/// Halves and quarters of a register put together (`k`: 0 two 16 bits, 1 two 32 bits, 2 four 16 bits).
pub fn pack(kind: u32) -> Lanes {
    match kind {
        0 => lanes!(map2, |a: u16, b: u16| u32::from(a) | u32::from(b) << 16),
        1 => lanes!(map2, |a: u32, b: u32| u64::from(a) | u64::from(b) << 32),
        2 => lanes!(map4, |a: u16, b: u16, c: u16, d: u16| {
            u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48
        }),
        _ => lanes!(map2, |a: u8, b: u8| u16::from(a) | u16::from(b) << 8),
    }
}

/// The part `at` of a register (`kind` as in [`pack`]).
pub fn unpack(kind: u32, at: usize) -> Option<Lanes> {
    Some(match (kind, at) {
        (0, 0) => lanes!(map1, |a: u32| a as u16),
        (0, 1) => lanes!(map1, |a: u32| (a >> 16) as u16),
        (1, 0) => lanes!(map1, |a: u64| a as u32),
        (1, 1) => lanes!(map1, |a: u64| (a >> 32) as u32),
        (2, 0) => lanes!(map1, |a: u64| a as u16),
        (2, 1) => lanes!(map1, |a: u64| (a >> 16) as u16),
        (2, 2) => lanes!(map1, |a: u64| (a >> 32) as u16),
        (2, 3) => lanes!(map1, |a: u64| (a >> 48) as u16),
        (3, 0) => lanes!(map1, |a: u16| a as u8),
        (3, 1) => lanes!(map1, |a: u16| (a >> 8) as u8),
        _ => return None,
    })
}

/// A comparison of integers (`lo`, `ls`, `hi`, `hs`: unsigned whatever the type).
pub fn compare(op: &str, ty: Ty) -> Option<Lanes> {
    let unsigned = match ty {
        Ty::S16 | Ty::B16 => Ty::U16,
        Ty::S32 | Ty::B32 => Ty::U32,
        Ty::S64 | Ty::B64 => Ty::U64,
        other => other,
    };
    Some(match op {
        "eq" => each!(ty, test2, |a, b| a == b),
        "ne" => each!(ty, test2, |a, b| a != b),
        "lt" => each!(ty, test2, |a, b| a < b),
        "le" => each!(ty, test2, |a, b| a <= b),
        "gt" => each!(ty, test2, |a, b| a > b),
        "ge" => each!(ty, test2, |a, b| a >= b),
        "lo" => compare("lt", unsigned)?,
        "ls" => compare("le", unsigned)?,
        "hi" => compare("gt", unsigned)?,
        "hs" => compare("ge", unsigned)?,
        _ => return None,
    })
}

/// `selp`, by size.
pub fn select(ty: Ty) -> Option<Lanes> {
    Some(match ty.size() {
        2 => lanes!(choose, |_: u16| {}),
        4 => lanes!(choose, |_: u32| {}),
        8 => lanes!(choose, |_: u64| {}),
        _ => return None,
    })
}

/// Logic of predicates; `xor` with true is `not`, `or` with false is `mov`.
pub fn predicates(op: &str) -> Option<Lanes> {
    Some(match op {
        "and" => lanes!(logic, |a: u32, b: u32| a & b),
        "or" => lanes!(logic, |a: u32, b: u32| a | b),
        "xor" => lanes!(logic, |a: u32, b: u32| a ^ b),
        _ => return None,
    })
}
