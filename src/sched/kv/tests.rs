use super::*;
use crate::random::Random;

fn node(pool: &mut KvPool, before: Node, tokens: &[u32], held: &[u32], at: usize) -> Node {
    pool.remember(before, tokens, held[at]).unwrap()
}

#[test]
fn growing_is_all_or_nothing() {
    let mut pool = KvPool::new(3, 16);
    let (mut a, mut b) = (vec![], vec![]);
    pool.grow(&mut a, 17).unwrap();
    assert_eq!(a, [0, 1]);
    assert_eq!(pool.grow(&mut b, 33), Err(OutOfBlocks { wanted: 3, idle: 1 }));
    assert!(b.is_empty());
    pool.grow(&mut b, 16).unwrap();
    pool.check([&a, &b].into_iter());
    pool.grow(&mut a, 32).unwrap();
    assert_eq!(pool.grow(&mut a, 33), Err(OutOfBlocks { wanted: 1, idle: 0 }));
    pool.free(&mut b);
    pool.free(&mut a);
    assert_eq!(pool.idle(), 3);
    let mut c = vec![];
    pool.grow(&mut c, 16).unwrap();
    assert_eq!(c, [0], "what nobody remembers is reused at once");
    pool.check([&c].into_iter());
}

#[test]
fn a_text_is_found_by_its_tokens_and_what_stands_before() {
    let mut pool = KvPool::new(8, 2);
    let mut a = vec![];
    pool.grow(&mut a, 5).unwrap();
    let first = node(&mut pool, Node::ROOT, &[1, 2], &a, 0);
    node(&mut pool, first, &[3, 4], &a, 1);
    pool.remember(first, &[5], a[2]);
    assert_eq!(pool.find(Node::ROOT, &[1, 2, 3, 4, 9]).blocks, a[..2]);
    assert_eq!(
        pool.find(Node::ROOT, &[1, 2, 3]),
        Hit { blocks: vec![a[0]], nodes: vec![first], part: Some((a[1], 1)) }
    );
    assert_eq!(pool.find(Node::ROOT, &[1, 2, 5, 6]).part, Some((a[2], 1)));
    assert_eq!(pool.find(Node::ROOT, &[1]).part, Some((a[0], 1)));
    assert_eq!(pool.find(Node::ROOT, &[3, 4]), Hit::default(), "known only after [1, 2]");
    let salted = Node::salted("mine", 7);
    assert_eq!(pool.find(salted, &[1, 2]), Hit::default());
    assert_ne!(salted, Node::salted("mine", 8));
    // The same text again: the known block stays the one that is found, and what follows it is found behind it.
    let mut b = vec![];
    pool.grow(&mut b, 2).unwrap();
    assert_eq!(pool.remember(Node::ROOT, &[1, 2], b[0]), Some(first));
    pool.free(&mut b);
    let hit = pool.find(Node::ROOT, &[1, 2, 3, 4]);
    pool.take(&hit);
    let mut c = hit.blocks;
    pool.check([&a, &c].into_iter());
    pool.free(&mut a);
    pool.free(&mut c);
    pool.check([].into_iter());
    assert_eq!(pool.idle(), 8);
}

#[test]
fn the_end_of_a_text_is_reused_before_its_beginning_and_old_texts_before_young_ones() {
    let mut pool = KvPool::new(4, 1);
    let texts = [[1, 2], [3, 4]];
    for text in texts {
        let mut held = vec![];
        pool.grow(&mut held, 2).unwrap();
        let first = node(&mut pool, Node::ROOT, &text[..1], &held, 0);
        node(&mut pool, first, &text[1..], &held, 1);
        pool.free(&mut held);
    }
    let left = |pool: &KvPool| texts.map(|t| pool.find(Node::ROOT, &t).blocks.len());
    let mut held = vec![];
    let mut seen = vec![];
    for n in 1..=4 {
        pool.grow(&mut held, n).unwrap();
        seen.push(left(&pool));
    }
    assert_eq!(seen, [[1, 2], [0, 2], [0, 1], [0, 0]]);
}

#[test]
fn what_is_copied_from_counts_as_used() {
    let mut pool = KvPool::new(2, 4);
    for text in [[1, 2, 3, 4], [5, 6, 7, 8]] {
        let mut held = vec![];
        pool.grow(&mut held, 4).unwrap();
        node(&mut pool, Node::ROOT, &text, &held, 0);
        pool.free(&mut held);
    }
    let hit = pool.find(Node::ROOT, &[1, 2, 9]);
    assert_eq!(hit.part, Some((0, 2)));
    pool.take(&hit);
    let mut held = vec![];
    pool.grow(&mut held, 4).unwrap();
    assert_eq!(held, [1], "the text that was not looked at goes first");
}

/// Random life in small pools, small vocabularies: the same text is the same blocks, and nothing is ever lost.
#[test]
fn a_hundred_thousand_random_operations() {
    let mut numbers = Random::new(3);
    let mut random = move |n| numbers.below(n);
    struct Holder {
        root: Node,
        tokens: Vec<u32>,
        blocks: Vec<u32>,
        nodes: Vec<Node>,
    }
    let (mut hits, mut parts, mut refused, mut met) = (0, 0, 0, 0);
    for round in 0..20 {
        let (size, blocks) = (1 + random(3), 4 + random(20));
        let mut pool = KvPool::new(blocks, size);
        if round % 2 == 0 {
            pool.hash_bits = 1;
        }
        // What each block really holds: the texts up to each of its tokens.
        let mut memory: Vec<Vec<(Node, Vec<u32>)>> = vec![vec![]; blocks];
        let mut holders: Vec<Holder> = vec![];
        for _ in 0..5_000 {
            match random(5) {
                0 | 1 => {
                    let root = if random(4) == 0 { Node::salted("x", 1) } else { Node::ROOT };
                    let tokens: Vec<u32> = (0..1 + random(4 * size)).map(|_| random(2) as u32).collect();
                    let hit = pool.find(root, &tokens);
                    assert!(hit.blocks.len() * size + hit.part.map_or(0, |(_, n)| n) <= tokens.len());
                    let new = tokens.len().div_ceil(size) - hit.blocks.len();
                    if new > pool.idle() - pool.idle_of(&hit) {
                        refused += 1;
                        continue;
                    }
                    pool.take(&hit);
                    let (mut held, mut nodes) = (hit.blocks.clone(), hit.nodes.clone());
                    for (i, &b) in held.iter().enumerate() {
                        let want: Vec<_> = (0..size).map(|k| (root, tokens[..=i * size + k].to_vec())).collect();
                        assert_eq!(memory[b as usize], want, "round {round}: a shared block holds another text");
                        hits += 1;
                    }
                    if let Some((b, n)) = hit.part {
                        let at = held.len() * size;
                        let want: Vec<_> = (0..n).map(|k| (root, tokens[..=at + k].to_vec())).collect();
                        assert_eq!(memory[b as usize][..n], want, "round {round}: a copied block holds another text");
                        parts += 1;
                    }
                    pool.grow(&mut held, tokens.len()).unwrap();
                    for i in nodes.len()..held.len() {
                        let part = i * size..((i + 1) * size).min(tokens.len());
                        memory[held[i] as usize] = part.clone().map(|k| (root, tokens[..=k].to_vec())).collect();
                        if part.len() == size && nodes.len() == i {
                            let before = nodes.last().copied().unwrap_or(root);
                            match pool.remember(before, &tokens[part], held[i]) {
                                Some(node) if nodes.len() == i => nodes.push(node),
                                Some(_) => panic!("a text behind one that is not remembered"),
                                None => {
                                    assert_eq!(pool.hash_bits, 1, "only texts of one hash are not remembered");
                                    met += 1;
                                }
                            }
                        }
                    }
                    holders.push(Holder { root, tokens, blocks: held, nodes });
                }
                _ if holders.is_empty() => {}
                _ => {
                    let i = random(holders.len());
                    let mut gone = holders.swap_remove(i);
                    let at = gone.nodes.len();
                    if at == gone.tokens.len() / size && at < gone.blocks.len() && random(2) == 0 {
                        let before = gone.nodes.last().copied().unwrap_or(gone.root);
                        pool.remember(before, &gone.tokens[at * size..], gone.blocks[at]);
                    }
                    pool.free(&mut gone.blocks);
                }
            }
            pool.check(holders.iter().map(|h| &h.blocks));
        }
    }
    assert!(hits > 10_000 && parts > 5_000 && refused > 1_000 && met > 1_000, "{hits} {parts} {refused} {met}");
}

#[test]
fn what_is_shared_can_be_restored() {
    let mut pool = KvPool::new(8, 2);
    let texts: [&[u32]; 3] = [&[1, 2, 3, 4, 5, 6], &[1, 2, 7, 8], &[9, 9]];
    let mut blocks_of = HashMap::new();
    for (i, text) in texts.into_iter().enumerate() {
        let hit = pool.find(Node::ROOT, text);
        pool.take(&hit);
        let (mut held, mut before) = (hit.blocks, hit.nodes.last().copied().unwrap_or(Node::ROOT));
        let known = held.len();
        pool.grow(&mut held, text.len()).unwrap();
        for at in known..held.len() {
            before = pool.remember(before, &text[at * 2..at * 2 + 2], held[at]).unwrap();
            blocks_of.insert(held[at], (i, at));
        }
        pool.free(&mut held);
    }
    let mut secret = vec![];
    pool.grow(&mut secret, 2).unwrap();
    pool.remember(Node::salted("s", 1), &[1, 2], secret[0]);
    let shared = pool.shared(usize::MAX);
    assert_eq!(shared.len(), 5, "a salted text is nobody else's: {shared:?}");
    assert_eq!(shared[0].2, [9, 9], "the youngest first");
    for (_, before, _) in &shared {
        assert!(before.is_none_or(|b| b < shared.len()));
    }
    assert_eq!(pool.shared(3).len(), 3);

    let mut again = KvPool::new(4, 2);
    let mut nodes: Vec<Option<Node>> = vec![];
    let mut given = vec![];
    for (_, before, tokens) in &shared {
        let known = before.map(|b| nodes[b]);
        let restored = if known == Some(None) { None } else { again.restore(known.flatten(), tokens) };
        given.extend(restored.map(|(b, _)| b));
        nodes.push(restored.map(|(_, node)| node));
    }
    given.iter().rev().for_each(|&b| again.touch(b));
    again.check([].into_iter());
    assert_eq!(given.len(), 4, "there is no room for the fifth");
    assert_eq!(again.find(Node::ROOT, &[9, 9]).blocks.len(), 1);
    assert_eq!(again.find(Node::ROOT, &[1, 2, 7, 8]).blocks.len(), 2);
    assert!(again.restore(None, &[5, 5]).is_none(), "every block is remembered");
    let mut held = vec![];
    again.grow(&mut held, 4).unwrap();
    assert_eq!(again.find(Node::ROOT, &[9, 9]).blocks.len(), 1, "the oldest went first");
}
