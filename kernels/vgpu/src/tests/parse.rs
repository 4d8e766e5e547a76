//! What is refused, and hostile texts.

use super::{load, module, module_with, refused};
use crate::ptx::module::LoadError;

#[test]
fn errors_name_line_and_reason() {
    assert!(refused("").1.contains("not PTX"));
    assert!(refused(".version 8.0\n.target sm_80\n.address_size 32").1.contains("64"));
    assert!(refused(&module("bra NOWHERE;")).1.contains("no label `NOWHERE`"));
    assert!(refused(&module("X: X: ret;")).1.contains("twice"));
    assert!(refused(&module("ld.global.u32 %h1, [%d0];")).1.contains("cannot hold"));
    assert!(refused(&module("ld.global.v4.u32 {%r1, %r2}, [%d0];")).1.contains("4 registers"));
    assert!(refused(&module("st.const.u32 [%d0], %r1;")).1.contains("Const"));
    assert!(refused(&module("add.s32 %r1, %r2;")).1.contains("operands"));
    assert!(
        refused(&module("mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%r1},{%r1},{%r1},{%r1};"))
            .1
            .contains("mma")
    );
    assert!(refused(&module("call nobody;")).1.contains("no function"));
    assert!(refused(&module_with(".extern .global .u32 x;", "")).1.contains("elsewhere"));
    assert!(refused(&module_with(".global .u32 x[1] = {1, 2};", "")).1.contains("2 values"));
    assert!(refused(&module(".shared .b8 huge[4000000];")).1.contains("more than there can be"));
    assert!(refused(&module(".reg .b32 %x<70000>;")).1.contains("registers"));
    assert!(refused(&module("mov.u64 %d5, %clock64;")).1.contains("unknown"));
    let (line, what) = refused(&module("\n\nadd.s32 %r1, %r2, %nope;"));
    assert_eq!((line, what.contains("kernel `k`")), (12, true));
}

#[test]
fn any_cut_or_flipped_text_is_an_error_and_no_panic() {
    let text = module_with(
        ".file 1 \"a.cu\" .shared .align 4 .b8 s[8]; .const .u32 c[2] = {1, -2};",
        "@!%p1 bra L; L: ld.shared.v2.u32 {%r1, _}, [s+0]; { .reg .f32 %x; mov.f32 %x, 0f3F800000; } T: .branchtargets L; brx.idx %r1, T;",
    );
    assert!(load(&text).is_ok());
    for end in 0..text.len() {
        let _ = load(&text[..end]);
    }
    for at in 0..text.len() {
        for other in ["{", "]", "%", "9", "\"", "-", ";", ".", "é"] {
            let changed = format!("{}{other}{}", &text[..at], &text[at + 1..]);
            match load(&changed) {
                Err(LoadError::Ptx(error)) => assert!(!error.what.is_empty()),
                Err(other) => panic!("{other:?}"),
                Ok(_) => {}
            }
        }
    }
}
