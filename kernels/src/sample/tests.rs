use super::*;

const EMPTY: History<'static> = History { tokens: &[], prompt_len: 0 };

fn token(logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
    sample(&mut logits.to_vec(), params, EMPTY, position, None).unwrap().token
}

/// The distribution that `params` define, the slow way.
fn expected(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(params.temperature)).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]).then(a.cmp(&b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let max = scaled[order[0]];
    let total: f64 = order.iter().map(|&i| (scaled[i] - max).exp()).sum();
    let mut larger = 0.0;
    order.retain(|&i| {
        let keep = larger < f64::from(params.top_p);
        larger += (scaled[i] - max).exp() / total;
        keep
    });
    order.retain(|&i| (scaled[i] - max).exp() >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|&i| (scaled[i] - max).exp()).sum();
    let mut p = vec![0.0; logits.len()];
    order.iter().for_each(|&i| p[i] = (scaled[i] - max).exp() / total);
    p
}

/// Draws many tokens and compares their counts with the expected distribution.
fn check_distribution(logits: &[f32], params: &SamplingParams) {
    const DRAWS: u64 = 40_000;
    let p = expected(logits, params);
    let mut counts = vec![0u64; logits.len()];
    for i in 0..DRAWS {
        // Both parts of the key take turns.
        let params = SamplingParams { seed: i % 200, ..params.clone() };
        counts[token(logits, &params, i / 200) as usize] += 1;
    }
    let mut chi = 0.0;
    let mut free = -1.0;
    for (i, (&count, &p)) in counts.iter().zip(&p).enumerate() {
        if p == 0.0 {
            assert_eq!(count, 0, "token {i} has no probability, {params:?}");
            continue;
        }
        let mean = p * DRAWS as f64;
        chi += (count as f64 - mean).powi(2) / mean;
        free += 1.0;
    }
    // Mean `free`, deviation sqrt(2 free); five deviations and a little for the skew of small ones.
    assert!(chi <= free + 5.0 * (2.0f64 * f64::max(free, 1.0)).sqrt() + 3.0, "chi² {chi} with {free}, {params:?}");
}

#[test]
fn samples_follow_the_softmax() {
    let logits = [1.5, -0.5, 0.0, 2.0, 1.9, -3.0, 0.7, 0.7, -1.0, 1.0];
    let plain = SamplingParams::default();
    for params in [
        plain.clone(),
        SamplingParams { temperature: 0.5, ..plain.clone() },
        SamplingParams { temperature: 2.0, ..plain.clone() },
        SamplingParams { top_k: 3, ..plain.clone() },
        SamplingParams { top_p: 0.6, ..plain.clone() },
        SamplingParams { min_p: 0.3, ..plain.clone() },
        SamplingParams { temperature: 1.3, top_k: 7, top_p: 0.8, min_p: 0.25, ..plain.clone() },
    ] {
        check_distribution(&logits, &params);
    }
}

#[test]
fn noise_of_neighbouring_positions_is_independent() {
    // Two tokens at 1/2 each: pairs of consecutive draws must be uniform over four cases.
    let mut pairs = [0u32; 4];
    for position in 0..40_000u64 {
        let draw = |p| token(&[0.0, 0.0], &SamplingParams::default(), p);
        pairs[(draw(position) * 2 + draw(position + 1)) as usize] += 1;
    }
    for count in pairs {
        assert!((9600..10_400).contains(&count), "{pairs:?}");
    }
}

#[test]
fn the_same_key_gives_the_same_token() {
    let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 613) as f32 * 0.02).collect();
    let params = SamplingParams { seed: 3, ..SamplingParams::default() };
    let first: Vec<u32> = (0..50).map(|p| token(&logits, &params, p)).collect();
    let again: Vec<u32> = (0..50).map(|p| token(&logits, &params, p)).collect();
    assert_eq!(first, again);
    let other = SamplingParams { seed: 4, ..params };
    assert_ne!(first, (0..50).map(|p| token(&logits, &other, p)).collect::<Vec<_>>());
}

#[test]
fn filters_do_not_move_a_draw_that_they_keep() {
    // The noise belongs to the token, so removing other tokens leaves a surviving winner in place.
    let logits: Vec<f32> = (0..500).map(|i| ((i * 31) % 97) as f32 * 0.1).collect();
    let free = SamplingParams::default();
    let strict = SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, ..free.clone() };
    let kept = expected(&logits, &strict);
    let mut same = 0;
    for position in 0..200 {
        let winner = token(&logits, &free, position);
        if kept[winner as usize] > 0.0 {
            assert_eq!(token(&logits, &strict, position), winner);
            same += 1;
        }
    }
    assert!(same > 50, "{same}");
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let greedy = SamplingParams::greedy();
    assert_eq!(token(&[0.0, 3.0, 3.0, 1.0], &greedy, 0), 1);
    assert_eq!(token(&[f32::NAN, -5.0, f32::NAN, -4.0], &greedy, 0), 3);
    for params in [greedy, SamplingParams::default()] {
        let refused = sample(&mut [-1.0, f32::INFINITY, 2.0], &params, EMPTY, 0, None);
        assert_eq!(refused, Err(SampleError::Infinite { token: 1 }), "a model never means an infinity");
        let sure = SamplingParams { logit_bias: vec![(2, f32::INFINITY)], ..params };
        assert_eq!(token(&[-1.0, 5.0, 2.0], &sure, 0), 2);
    }
}

#[test]
fn nan_never_wins_a_draw() {
    let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN, 0.5];
    for params in [
        SamplingParams::default(),
        SamplingParams { top_k: 3, ..SamplingParams::default() },
        SamplingParams { top_p: 0.99, ..SamplingParams::default() },
        SamplingParams { min_p: 0.01, ..SamplingParams::default() },
    ] {
        for position in 0..500 {
            assert!([1, 4].contains(&token(&logits, &params, position)), "{params:?}");
        }
    }
}

#[test]
fn nothing_to_choose_is_an_error() {
    let cases: [(&[f32], usize); 3] =
        [(&[f32::NAN; 4], 4), (&[f32::NEG_INFINITY; 3], 0), (&[f32::NAN, f32::NEG_INFINITY], 1)];
    for (logits, nans) in cases {
        for params in [SamplingParams::greedy(), SamplingParams::default()] {
            let got = sample(&mut logits.to_vec(), &params, EMPTY, 0, Some(2));
            assert_eq!(got, Err(SampleError::NothingToChoose { vocab: logits.len(), nans }));
        }
    }
    assert!(sample(&mut [], &SamplingParams::greedy(), EMPTY, 0, None).is_err());
}

#[test]
fn penalties_match_values_computed_by_hand() {
    // Prompt 0 1, output 1 2 2.
    let history = History { tokens: &[0, 1, 1, 2, 2], prompt_len: 2 };
    let apply = |params: SamplingParams| {
        let mut logits = [2.0, -2.0, 4.0, 1.0];
        penalize(&mut logits, &params, history, &mut Vec::new(), |_| ());
        logits
    };
    let plain = SamplingParams::default();
    assert_eq!(apply(plain.clone()), [2.0, -2.0, 4.0, 1.0]);
    assert_eq!(apply(SamplingParams { repetition_penalty: 2.0, ..plain.clone() }), [1.0, -4.0, 2.0, 1.0]);
    assert_eq!(apply(SamplingParams { presence_penalty: 0.5, ..plain.clone() }), [2.0, -2.5, 3.5, 1.0]);
    assert_eq!(apply(SamplingParams { frequency_penalty: 0.5, ..plain.clone() }), [2.0, -2.5, 3.0, 1.0]);
    let all =
        SamplingParams { repetition_penalty: 2.0, presence_penalty: 0.25, frequency_penalty: 0.5, ..plain.clone() };
    assert_eq!(apply(all.clone()), [1.0, -4.75, 0.75, 1.0]);
    // Only the last two tokens: 2 2.
    assert_eq!(apply(SamplingParams { penalty_last_n: Some(2), ..all }), [2.0, -2.0, 0.75, 1.0]);
}

#[test]
fn tokens_outside_the_row_are_not_penalized() {
    let history = History { tokens: &[7, 1], prompt_len: 0 };
    let mut logits = [1.0, 1.0];
    let params = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
    penalize(&mut logits, &params, history, &mut Vec::new(), |_| ());
    assert_eq!(logits, [1.0, 0.0]);
}

#[test]
fn bias_is_added_after_the_penalties() {
    let params = SamplingParams {
        logit_bias: vec![(1, 3.0), (2, f32::NEG_INFINITY)],
        repetition_penalty: 2.0,
        ..SamplingParams::greedy()
    };
    // Token 1: 2 / 2 + 3 = 4, above token 0; (2 + 3) / 2 would be below.
    let history = History { tokens: &[1], prompt_len: 1 };
    let got = sample(&mut [3.5, 2.0, 100.0], &params, history, 0, None).unwrap();
    assert_eq!(got.token, 1);
    let unknown = SamplingParams { logit_bias: vec![(3, 1.0)], ..SamplingParams::greedy() };
    let got = sample(&mut [0.0; 3], &unknown, EMPTY, 0, None);
    assert_eq!(got, Err(SampleError::BiasToken { token: 3, vocab: 3 }));
}

#[test]
fn top_k_keeps_exactly_k_and_prefers_lower_ids() {
    let logits = [1.0, 2.0, 2.0, 2.0, 0.0];
    let ids = |k| likeliest(&logits, k).iter().map(|c| c.token).collect::<Vec<_>>();
    assert_eq!(ids(1), [1]);
    assert_eq!(ids(2), [1, 2]);
    assert_eq!(ids(4), [1, 2, 3, 0]);
    assert_eq!(ids(9), [1, 2, 3, 0, 4]);
    assert_eq!(ids(0), [] as [u32; 0]);
    let one = SamplingParams { top_k: 1, temperature: 5.0, ..SamplingParams::default() };
    assert!((0..100).all(|position| token(&logits, &one, position) == 1));
}

#[test]
fn likeliest_equals_sorting() {
    for (len, count) in [(1000, 1), (1000, 5), (1000, 40), (1000, 999), (5000, 64), (70, 64), (64, 64)] {
        let logits: Vec<f32> = (0..len).map(|i| ((i * 7919) % 271) as f32).collect();
        let mut sorted: Vec<u32> = (0..len).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let got: Vec<u32> = likeliest(&logits, count).iter().map(|c| c.token).collect();
        assert_eq!(got, sorted[..count], "{count} of {len}");
    }
}

#[test]
fn top_p_keeps_the_token_that_crosses_the_share() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let kept = |p| nucleus(&logits, 4, p).len();
    assert_eq!([kept(0.001), kept(0.49), kept(0.6), kept(0.74)], [1, 1, 2, 2]);
    assert_eq!([kept(0.76), kept(0.88), kept(0.999)], [3, 4, 4]);
    // Of the two that top-k leaves, the first holds two thirds.
    assert_eq!([nucleus(&logits, 2, 0.66).len(), nucleus(&logits, 2, 0.67).len()], [1, 2]);
}

#[test]
fn top_p_of_a_flat_row_grows_until_it_fits() {
    let flat = vec![0.0; 50_000];
    assert_eq!(nucleus(&flat, 50_000, 0.5).len(), 25_000);
    let kept = nucleus(&flat, 50_000, 0.999_999_9);
    assert!(kept.len() >= 49_995, "{}", kept.len());
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    let seen = |min_p| {
        let params = SamplingParams { min_p, ..SamplingParams::default() };
        let mut seen: Vec<u32> = (0..400).map(|position| token(&logits, &params, position)).collect();
        seen.sort();
        seen.dedup();
        seen
    };
    assert_eq!(seen(0.0), [0, 1, 2, 3]);
    assert_eq!(seen(0.26), [0, 1]);
    assert_eq!(seen(0.51), [0]);
    assert_eq!(seen(1.0), [0]);
}

#[test]
fn logprobs_are_those_of_the_model() {
    let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
    // Penalties and temperature change the choice but not what is reported.
    let params = SamplingParams { logit_bias: vec![(0, f32::NEG_INFINITY)], ..SamplingParams::greedy() };
    let got = sample(&mut logits.clone(), &params, EMPTY, 0, Some(3)).unwrap();
    assert_eq!(got.token, 1);
    assert!((got.logprob.unwrap() - 0.25f32.ln()).abs() < 1e-6);
    let ids: Vec<u32> = got.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, [0, 1, 2]);
    for ((_, logprob), p) in got.top.iter().zip([0.5f32, 0.25, 0.125]) {
        assert!((logprob - p.ln()).abs() < 1e-6);
    }
    let got = sample(&mut logits.clone(), &params, EMPTY, 0, Some(0)).unwrap();
    assert!(got.logprob.is_some() && got.top.is_empty());
}

#[test]
fn huge_logits_and_tiny_temperatures_do_not_overflow() {
    let logits = [3e38, -3e38, 2.9e38, 1.0];
    let cold = SamplingParams { temperature: 2e-5, ..SamplingParams::default() };
    assert!((0..50).all(|position| token(&logits, &cold, position) == 0));
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let plain = SamplingParams::default();
    assert_eq!(plain.validate(), Ok(()));
    assert_eq!(SamplingParams::greedy().validate(), Ok(()));
    let bad = [
        (SamplingParams { temperature: -0.1, ..plain.clone() }, "temperature is -0.1"),
        (SamplingParams { temperature: f32::NAN, ..plain.clone() }, "temperature is NaN"),
        (SamplingParams { top_p: 0.0, ..plain.clone() }, "top_p is 0"),
        (SamplingParams { top_p: 1.1, ..plain.clone() }, "top_p is 1.1"),
        (SamplingParams { min_p: 2.0, ..plain.clone() }, "min_p is 2"),
        (SamplingParams { repetition_penalty: 0.0, ..plain.clone() }, "repetition_penalty is 0"),
        (SamplingParams { presence_penalty: f32::INFINITY, ..plain.clone() }, "presence_penalty is inf"),
        (SamplingParams { frequency_penalty: -101.0, ..plain.clone() }, "frequency_penalty is -101"),
        (SamplingParams { logit_bias: vec![(5, f32::NAN)], ..plain.clone() }, "token 5 is NaN"),
    ];
    for (params, message) in bad {
        let got = params.validate().unwrap_err().to_string();
        assert!(got.contains(message), "{got}");
    }
}
