//! What a parallel region costs, the way a decoding step uses it: our team against rayon.
//!
//! `cargo run --release -p quern-kernels --example team_bench [threads] [rounds]`. A step is 200 regions with a
//! little serial work between them; in a region every thread has so many microseconds of work. All ways run in turn,
//! round after round; printed are medians of the time of a region beyond its work, in microseconds.

use quern_kernels::team::Team;
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// Regions of a step.
const REGIONS: usize = 200;
/// Items of a region for each thread, where items are what is shared.
const ITEMS: usize = 8;
/// Microseconds of work for each thread of a region.
const WORK: [f64; 4] = [0.0, 5.0, 20.0, 100.0];

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse().expect("a number"));
    let threads: usize = args.next().unwrap_or(2);
    let rounds: usize = args.next().unwrap_or(15);
    let team = Team::new(threads);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    let per_us = speed();
    println!("{threads} threads, {rounds} rounds; us of a region beyond its work, medians");
    println!("{:>28}{}", "us of work for each thread", WORK.map(|w| format!("{w:>9}")).concat());
    let ways: [(&str, &dyn Fn(usize)); 6] = [
        ("team run", &|work| step(|| team.run(&|_| spin(work)))),
        ("team deal", &|work| step(|| team.deal(threads * ITEMS, &|_, _| spin(work / ITEMS)))),
        ("rayon broadcast", &|work| {
            pool.install(|| {
                step(|| {
                    rayon::broadcast(|_| spin(work));
                })
            })
        }),
        ("rayon scope", &|work| {
            pool.install(|| {
                step(|| {
                    rayon::scope(|scope| {
                        (1..threads).for_each(|_| scope.spawn(|_| spin(work)));
                        spin(work);
                    })
                })
            })
        }),
        ("rayon for_each", &|work| {
            pool.install(|| step(|| (0..threads * ITEMS).into_par_iter().for_each(|_| spin(work / ITEMS))))
        }),
        ("rayon install and broadcast", &|work| {
            step(|| {
                pool.broadcast(|_| spin(work));
            })
        }),
    ];
    let mut costs = ways.map(|_| WORK.map(|_| vec![]));
    for _ in 0..rounds {
        for (w, us) in WORK.iter().enumerate() {
            let work = (us * per_us) as usize;
            let alone = time(|| step(|| spin(work)));
            for ((_, run), costs) in ways.iter().zip(&mut costs) {
                // Wakes everybody.
                step(|| spin(0));
                run(work);
                costs[w].push((time(|| run(work)) - alone) / REGIONS as f64);
            }
        }
    }
    for ((name, _), costs) in ways.iter().zip(&mut costs) {
        let medians = costs.each_mut().map(|c| {
            c.sort_by(f64::total_cmp);
            format!("{:>9.2}", c[c.len() / 2])
        });
        println!("{name:>28}{}", medians.concat());
    }
}

/// A decoding step: regions, and between them what one thread does.
fn step(mut region: impl FnMut()) {
    for _ in 0..REGIONS {
        spin(200);
        region();
    }
}

/// Work that keeps to the core; one piece of code for all, or alignment would decide.
#[inline(never)]
fn spin(rounds: usize) {
    let mut x = 1u64;
    for _ in 0..rounds {
        x = black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
}

/// Rounds of [`spin`] in a microsecond.
fn speed() -> f64 {
    let rounds = 1_000_000;
    let best = (0..10).map(|_| time(|| spin(rounds))).fold(f64::INFINITY, f64::min);
    rounds as f64 / best
}

/// Microseconds that `f` takes.
fn time(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64() * 1e6
}
