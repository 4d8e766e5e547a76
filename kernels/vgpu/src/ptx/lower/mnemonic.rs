//! An opcode with its modifiers, which must all be asked for: one that nobody knows is an error, not ignored.

use super::Lowered;
use crate::ptx::types::Ty;

/// The parts of `ld.global.v4.u32` and which of them were understood.
pub struct Mnemonic<'i> {
    parts: &'i [String],
    used: Vec<bool>,
}

impl<'i> Mnemonic<'i> {
    pub fn new(parts: &'i [String]) -> Mnemonic<'i> {
        let mut used = vec![false; parts.len()];
        used[0] = true;
        Mnemonic { parts, used }
    }

    /// The opcode: the part before the first dot.
    pub fn base(&self) -> &'i str {
        &self.parts[0]
    }

    /// Whether a modifier is there.
    pub fn has(&mut self, name: &str) -> bool {
        let mut found = false;
        for (part, used) in self.parts.iter().zip(&mut self.used).skip(1) {
            let same = part == name;
            *used |= same;
            found |= same;
        }
        found
    }

    /// The first of `names` that is there.
    pub fn one_of<'n>(&mut self, names: &[&'n str]) -> Option<&'n str> {
        names.iter().copied().find(|name| self.has(name))
    }

    /// Modifiers that change nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.has(name);
        }
    }

    /// The types, in order.
    pub fn types(&mut self) -> Vec<Ty> {
        let mut found = Vec::new();
        for (at, part) in self.parts.iter().enumerate().skip(1) {
            if let Some(ty) = Ty::parse(part) {
                self.used[at] = true;
                found.push(ty);
            }
        }
        found
    }

    /// The only type, or the last of several.
    pub fn ty(&mut self) -> Lowered<Ty> {
        self.types().last().copied().ok_or_else(|| format!("`{}` without a type", self.parts.join(".")))
    }

    /// Hints of caches: `L1::evict_last`, `L2::128B`, and the like.
    pub fn ignore_caches(&mut self) {
        for (part, used) in self.parts.iter().zip(&mut self.used) {
            *used |= part.starts_with("L1::") || part.starts_with("L2::");
        }
    }

    /// An error if a modifier was not asked for.
    pub fn finish(&self) -> Lowered<()> {
        match self.used.iter().position(|used| !used) {
            Some(at) => Err(format!("unknown modifier `.{}` of `{}`", self.parts[at], self.parts.join("."))),
            None => Ok(()),
        }
    }
}
