//! Choosing tokens on the device: the sampler's own answers.

use quern_kernels::{
    cuda::{Buffer, Choose, choose::read},
    sample::{History, SamplingParams, sample},
};

use crate::common::{Random, device, up};

#[test]
fn the_likeliest_token_is_the_samplers() {
    let Some(device) = device("the_likeliest_token_is_the_samplers") else { return };
    for vocab in [1, 2, 63, 100, 4095, 4096, 4097, 9001] {
        let mut random = Random(vocab as u64);
        let mut rows: Vec<Vec<f32>> = (0..10).map(|_| random.floats(vocab)).collect();
        let mut at = |row: &mut Vec<f32>, x: f32| row[random.bits() as usize % vocab] = x;
        rows[1].iter_mut().for_each(|x| *x = x.round());
        (0..vocab / 3).for_each(|_| at(&mut rows[2], f32::NAN));
        at(&mut rows[3], f32::INFINITY);
        at(&mut rows[3], f32::INFINITY);
        rows[4].fill(f32::NEG_INFINITY);
        (0..vocab.min(5)).for_each(|_| at(&mut rows[4], f32::NAN));
        rows[5].fill(-0.0);
        at(&mut rows[5], 0.0);
        rows[6].fill(f32::NEG_INFINITY);
        at(&mut rows[6], -3e38);
        rows[7].iter_mut().for_each(|x| *x -= 100.0);
        at(&mut rows[8], f32::MAX);
        rows[9].fill(f32::NAN);
        let logits = up(&device, &rows.concat());
        let to: Buffer<u32> = Buffer::new(&device, "a test", rows.len() * 4).unwrap();
        let choose = Choose::new(&device, rows.len(), vocab).unwrap();
        choose.best(logits.ptr(), rows.len(), to.ptr()).unwrap();
        let found = to.to_vec().unwrap();
        for (i, (row, found)) in rows.iter().zip(found.as_chunks::<4>().0).enumerate() {
            let history = History { tokens: &[], prompt_len: 0 };
            let want = sample(&mut row.clone(), &SamplingParams::greedy(), history, 0, None).map(|s| s.token);
            assert_eq!(read(*found, vocab), want, "row {i} of {vocab}");
            if let Ok(token) = want {
                assert_eq!(f32::from_bits(found[1]), row[token as usize], "row {i} of {vocab}");
            }
        }
    }
}
