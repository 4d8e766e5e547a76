//! The thread team: every thread runs every region, whatever happens in it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use quern_kernels::team::{Disjoint, Team, split};

#[test]
fn every_thread_runs_every_region() {
    for threads in [0, 1, 2, 3, 8] {
        let team = Team::new(threads);
        assert_eq!(team.threads(), threads.max(1));
        let counts: Vec<AtomicUsize> = (0..team.threads()).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..200 {
            team.run(&|tid| {
                counts[tid].fetch_add(1, Relaxed);
            });
        }
        assert!(counts.iter().all(|c| c.load(Relaxed) == 200));
    }
}

#[test]
fn more_threads_than_cores_do_not_collapse() {
    let team = Team::new(8);
    let sum = AtomicUsize::new(0);
    for _ in 0..10_000 {
        team.run(&|tid| {
            sum.fetch_add(tid, Relaxed);
        });
    }
    assert_eq!(sum.load(Relaxed), 10_000 * 28);
}

#[test]
fn parked_workers_wake() {
    let team = Team::new(3);
    let sum = AtomicUsize::new(0);
    for i in 0..30 {
        // Around the time after which workers park.
        std::thread::sleep(Duration::from_micros(i * 300));
        team.run(&|_| {
            sum.fetch_add(1, Relaxed);
        });
    }
    assert_eq!(sum.load(Relaxed), 90);
}

#[test]
fn a_panic_reaches_the_caller_after_all_finished() {
    let team = Team::new(4);
    for culprit in 0..4 {
        let finished = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|tid| {
                if tid == culprit {
                    panic!("thread {tid} fell");
                }
                std::thread::sleep(Duration::from_millis(2));
                finished.fetch_add(1, Relaxed);
            });
        }));
        let message = result.expect_err("must panic");
        assert_eq!(message.downcast_ref::<String>(), Some(&format!("thread {culprit} fell")));
        assert_eq!(finished.load(Relaxed), 3);
    }
    // All at once: one of them arrives, and the team still works.
    assert!(catch_unwind(AssertUnwindSafe(|| team.run(&|_| panic!("all")))).is_err());
    let sum = AtomicUsize::new(0);
    team.run(&|_| {
        sum.fetch_add(1, Relaxed);
    });
    assert_eq!(sum.load(Relaxed), 4);
}

#[test]
fn a_region_in_a_region_is_refused() {
    for threads in [1, 2] {
        let (team, other) = (Team::new(threads), Team::new(threads));
        for inner in [&team, &other] {
            let result = catch_unwind(AssertUnwindSafe(|| team.run(&|_| inner.run(&|_| {}))));
            let message = result.expect_err("must panic");
            let text = message.downcast_ref::<&str>().expect("a literal");
            assert!(text.contains("regions do not nest"), "{text}");
        }
        team.run(&|_| {});
        other.run(&|_| {});
    }
}

#[test]
fn several_callers_take_turns() {
    let team = Team::new(3);
    let inside = AtomicUsize::new(0);
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    team.run(&|tid| {
                        if tid == 0 {
                            assert_eq!(inside.fetch_add(1, Relaxed), 0, "two regions at once");
                            inside.fetch_sub(1, Relaxed);
                        }
                        total.fetch_add(1, Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Relaxed), 4 * 200 * 3);
}

#[test]
fn teams_come_and_go() {
    for i in 0..100 {
        let team = Team::new(1 + i % 5);
        if i % 3 > 0 {
            team.run(&|_| {});
        }
    }
    let parked = Team::new(4);
    std::thread::sleep(Duration::from_millis(10));
    drop(parked);
}

#[test]
fn splits_cover_everything_evenly() {
    for total in [0, 1, 5, 64, 1001] {
        for parts in [1, 2, 3, 7, 64] {
            let mut next = 0;
            for index in 0..parts {
                let part = split(total, parts, index);
                assert_eq!(part.start, next);
                assert!((total / parts..=total.div_ceil(parts)).contains(&part.len()));
                next = part.end;
            }
            assert_eq!(next, total);
        }
    }
}

#[test]
fn disjoint_parts_fill_the_slice() {
    let team = Team::new(3);
    let mut x = vec![0; 100];
    let parts = Disjoint::new(&mut x);
    team.run(&|tid| {
        // SAFETY: splits do not overlap.
        let part = unsafe { parts.part(split(100, 3, tid)) };
        part.fill(tid + 1);
    });
    assert_eq!(x.iter().filter(|&&x| x == 2).count(), 33);
    assert!(!x.contains(&0));
}

#[test]
#[should_panic(expected = "part 3..11 of 10")]
fn parts_out_of_bounds_are_refused() {
    let mut x = [0; 10];
    // SAFETY: one part only.
    unsafe { Disjoint::new(&mut x).part(3..11) };
}

#[test]
fn items_and_parts_run_once_whatever_the_system_does() {
    // Far more threads than cores, regions of next to no work: threads come late, in the middle or not at all.
    for threads in [1, 2, 3, 16] {
        let team = Team::new(threads);
        let mut region = 0;
        let mut items = vec![(0, 0); 97];
        let mut parts = vec![0; threads];
        let busy: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..3000 {
            region += 1;
            let n = region * 7 % 98;
            let places = Disjoint::new(&mut items);
            team.deal(n, &|part, item| {
                assert_eq!(busy[part].fetch_add(1, Relaxed), 0, "two calls of part {part} at once");
                // SAFETY: an item runs once.
                let place = &mut unsafe { places.part(item..item + 1) }[0];
                *place = (region, place.1 + 1);
                assert_eq!(busy[part].fetch_sub(1, Relaxed), 1);
            });
            // Not atomic: a call that comes late would show, in this region or in the next.
            assert!(items[..n].iter().all(|&(last, _)| last == region));
            let places = Disjoint::new(&mut parts);
            team.run(&|part| {
                // SAFETY: a part runs once.
                let place = &mut unsafe { places.part(part..part + 1) }[0];
                *place += 1;
            });
            assert!(parts.iter().all(|&count| count == region));
        }
        let expected: usize = (1..=3000).map(|region| region * 7 % 98).sum();
        assert_eq!(items.iter().map(|&(_, count)| count).sum::<usize>(), expected);
    }
}

#[test]
fn a_share_whose_thread_is_held_up_is_taken_over() {
    for threads in [2, 3, 5] {
        let team = Team::new(threads);
        for held in (0..20 * threads).map(|i| split(20, threads, i % threads).start) {
            let done = AtomicUsize::new(0);
            // Whoever gets the first item of a share waits for all others, the rest of that share among them.
            team.deal(20, &|_, item| {
                while item == held && done.load(Relaxed) < 19 {
                    std::thread::yield_now();
                }
                done.fetch_add(1, Relaxed);
            });
            assert_eq!(done.load(Relaxed), 20);
        }
    }
}

#[test]
fn a_panic_of_an_item_reaches_the_caller() {
    for threads in [1, 2, 5] {
        let team = Team::new(threads);
        for culprit in [0, 6, 19] {
            let done = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.deal(20, &|_, item| {
                    assert!(item != culprit, "item {item} fell");
                    done.fetch_add(1, Relaxed);
                });
            }));
            let message = result.expect_err("must panic");
            assert_eq!(message.downcast_ref::<String>(), Some(&format!("item {culprit} fell")));
            assert!(done.load(Relaxed) < 20);
        }
        let done = AtomicUsize::new(0);
        team.deal(20, &|_, _| {
            done.fetch_add(1, Relaxed);
        });
        assert_eq!(done.load(Relaxed), 20);
    }
}
