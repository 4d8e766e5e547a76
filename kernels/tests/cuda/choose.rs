//! Choosing tokens on the device: the sampler's own answers.

use quern_kernels::{
    cuda::{
        Buffer, Choose, Pinned,
        choose::{Ask, Chosen, chosen, read},
    },
    sample::{History, SamplingParams, finish, sample},
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

#[test]
fn the_next_step_reads_the_tokens_that_were_chosen() {
    let Some(device) = device("the_next_step_reads_the_tokens_that_were_chosen") else { return };
    let choose = Choose::new(&device, 1, 10).unwrap();
    // A token, none, one that the host has to choose, and a token.
    let chosen = up(&device, &[[7, 1, 2, 1], [0, 0, 9, 0], [3, 0, 0, 2], [u32::MAX - 1, 0, 0, 1]].concat());
    for rows in [1, 4, 255, 256, 257, 600] {
        let from: Vec<u32> = (0..rows as u32).map(|i| (i * 7 + 3) % 4).collect();
        let from_there = up(&device, &from);
        let tokens = up(&device, &vec![100u32; rows + 1]);
        choose.follow(tokens.ptr(), from_there.ptr(), chosen.ptr(), rows).unwrap();
        let of = |&from: &u32| [7, 0, 0, u32::MAX - 1][from as usize];
        let want: Vec<u32> = from.iter().map(of).chain([100]).collect();
        assert_eq!(tokens.to_vec().unwrap(), want);
    }
}

/// What the virtual GPU is for, where steps overlap: what is changed or read too early is seen to be.
#[test]
fn a_lazy_device_shows_what_comes_too_early() {
    if std::env::var_os("QUERN_CUDA_DEVICE").is_some() {
        return println!("SKIPPED a_lazy_device_shows_what_comes_too_early: the device is a real one");
    }
    let Some(device) = device("a_lazy_device_shows_what_comes_too_early") else { return };
    let gpu = quern_vgpu::load();
    let mut buffer: Buffer<u32> = Buffer::new(&device, "a test", 4).unwrap();
    let [mut up, mut down] = [Pinned::<u32>::new(&device, 4).unwrap(), Pinned::new(&device, 4).unwrap()];
    // Other tests' work goes on beside this and may end it at any time; at some time it does not.
    let mut seen = [false; 2];
    gpu.set("lazy", "1");
    for round in 1..200 {
        up.fill(round);
        // SAFETY: of a virtual device, which copies when this thread, or another, waits; what it copies is the test.
        unsafe {
            buffer.write_async(0, &up, 4).unwrap();
            buffer.read_async(0, &mut down, 4).unwrap();
        }
        seen[0] |= down[0] == round - 1;
        up[3] = round + 1000;
        device.synchronize().unwrap();
        assert_eq!(down[..3], [round; 3]);
        seen[1] |= down[3] == round + 1000;
    }
    gpu.set("lazy", "0");
    assert_eq!(seen, [true; 2], "not lazy");
}

/// Logits as models give them, and as no model should.
fn row(random: &mut Random, vocab: usize) -> Vec<f32> {
    let mut of = |choices: &[f32]| choices[random.bits() as usize % choices.len()];
    let (size, shift) = (of(&[0.0, 0.1, 1.0, 3.0, 8.0, 1e4, 1e37]), of(&[0.0, -20.0, 500.0]));
    let mut row: Vec<f32> = random.floats(vocab).iter().map(|x| x * size + shift).collect();
    let mut at = |row: &mut Vec<f32>, x: f32| row[random.bits() as usize % vocab] = x;
    match size.to_bits() as usize / 7 % 8 {
        0 => row.iter_mut().for_each(|l| *l = l.round()),
        1 => (0..vocab / 3).for_each(|_| at(&mut row, f32::NAN)),
        2 => (0..vocab / 2).for_each(|_| at(&mut row, f32::NEG_INFINITY)),
        _ => {}
    }
    match random.bits() % 8 {
        0 => row[vocab / 2] = 20.0,
        1 => row[vocab / 3] = f32::INFINITY,
        2 => row.fill(f32::NEG_INFINITY),
        3 => (0..vocab).filter(|i| i % 50 == 3).for_each(|i| row[i] += 9.0 * size),
        _ => {}
    }
    row
}

fn params(random: &mut Random, vocab: usize) -> SamplingParams {
    let mut of = |choices: &[f32]| choices[random.bits() as usize % choices.len()];
    let mut p = SamplingParams {
        temperature: of(&[0.0, 1.0, 1.0, 0.8, 0.1, 2e-5, 30.0]),
        top_k: of(&[0.0, 0.0, 1.0, 2.0, 5.0, 40.0, 64.0, 1000.0]) as u32,
        top_p: of(&[1.0, 1.0, 0.95, 0.5, 0.01, 0.999_99]),
        min_p: of(&[0.0, 0.0, 0.05, 1.0]),
        repetition_penalty: of(&[1.0, 1.0, 1.1, 0.5]),
        presence_penalty: of(&[0.0, 0.0, 0.5]),
        frequency_penalty: of(&[0.0, 0.0, -0.2]),
        penalty_last_n: [None, Some(3)][of(&[0.0, 1.0]) as usize],
        ..SamplingParams::default()
    };
    p.seed = random.bits();
    if random.bits().is_multiple_of(4) {
        let values = [1.0, -5.0, f32::NEG_INFINITY, 100.0];
        let tokens = random.order(vocab).into_iter().take(4);
        p.logit_bias = tokens.zip(values).collect();
    }
    p
}

#[test]
fn the_device_samples_what_the_host_does() {
    let Some(device) = device("the_device_samples_what_the_host_does") else { return };
    let (mut tokens, mut refused, mut left) = (0, 0, 0);
    for (vocab, rounds) in [(1, 2), (2, 2), (63, 6), (300, 12), (1024, 4), (3001, 8), (20_000, 1)] {
        let mut random = Random(vocab as u64 * 77);
        let mut choose = Choose::new(&device, 8, vocab).unwrap();
        for round in 0..rounds {
            let rows: Vec<Vec<f32>> = (0..8).map(|_| row(&mut random, vocab)).collect();
            let asked: Vec<SamplingParams> = (0..8).map(|_| params(&mut random, vocab)).collect();
            let histories: Vec<Vec<u32>> =
                (0..8).map(|i| (0..5 * i).map(|_| random.bits() as u32 % (vocab as u32 + 2)).collect()).collect();
            let logits = up(&device, &rows.concat());
            let to: Buffer<u32> = Buffer::new(&device, "a test", 32).unwrap();
            let history = |i: usize| History { tokens: &histories[i], prompt_len: histories[i].len() / 2 };
            let order = random.order(8);
            let asks: Vec<Ask> = order
                .iter()
                .map(|&i| i as usize)
                .map(|row| Ask { row, params: &asked[row], history: history(row), position: 1 << 33 | round })
                .collect();
            assert!(asks.iter().all(|a| Choose::serves(a.params, vocab)));
            choose.sample(logits.ptr(), &asks, to.ptr()).unwrap();
            let (found, mut changed) = (to.to_vec().unwrap(), logits.to_vec().unwrap());
            for (ask, found) in asks.iter().zip(found.as_chunks::<4>().0) {
                let p = ask.params;
                let want = sample(&mut rows[ask.row].clone(), p, ask.history, ask.position, None).map(|s| s.token);
                let got = chosen(*found, vocab);
                left += usize::from(got == Ok(Chosen::Host));
                let got = got.and_then(|chosen| match chosen {
                    Chosen::Token(token) => Ok(token),
                    Chosen::Host => finish(&mut changed[ask.row * vocab..(ask.row + 1) * vocab], p, ask.position),
                });
                assert_eq!(got, want, "vocab {vocab}, round {round}, row {}, {p:?}", ask.row);
                match want {
                    Ok(_) => tokens += 1,
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(
        tokens > 150 && refused > 20 && left < tokens / 4,
        "{tokens} tokens, {refused} refused, {left} for the host"
    );
}

#[test]
fn requests_that_are_not_for_the_device() {
    let p = SamplingParams::default();
    assert!(Choose::serves(&p, 100));
    assert!(Choose::serves(&SamplingParams { top_k: 1024, ..p.clone() }, 5000));
    assert!(!Choose::serves(&SamplingParams { top_k: 1025, ..p.clone() }, 5000));
    assert!(!Choose::serves(&SamplingParams { logit_bias: vec![(3, 1.0), (3, 2.0)], ..p.clone() }, 100));
    assert!(!Choose::serves(&SamplingParams { logit_bias: vec![(100, 1.0)], ..p }, 100));
}
