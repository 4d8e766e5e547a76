//! Trees of guesses: several tokens for one position, each with what may follow it.
//!
//! A head offers, for a position, tokens and how sure it is of each. A tree grows from there: nodes are valued by the
//! product of the chances along their path, the best of a level get children (EAGLE-2,
//! [Li et al. 2024](https://arxiv.org/abs/2406.16858)), and of all nodes the best are checked. Those are a tree, too, as
//! nothing is worth more than what it hangs on. Of heads that guess each position by itself (Medusa, blocks) all paths
//! through the positions' tokens are nodes.
//!
//! Pure, as all of this folder.

use quern_kernels::exec::MOST_MASKED;

use super::{Guess, Place, chances::Sure};

/// Most guesses of a tree: with the token that they follow they are rows of one mask.
pub const MOST_NODES: usize = MOST_MASKED - 1;

/// Most children of a node, and most nodes of a level that get some; as EAGLE-2 has it.
pub const MOST_WIDTH: usize = 10;

/// How far a tree grows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Most nodes that are checked.
    pub nodes: usize,
    /// Most children of a node, and most nodes of a level that get some.
    pub width: usize,
    /// A path that is right with a smaller chance is no guess.
    pub floor: f64,
    /// A path that is right with a smaller chance gets no pass of the head for what follows it.
    pub expand: f64,
    /// How often a head that is so sure was right; `None`: as often as it says.
    pub sure: Option<Sure>,
}

impl Limits {
    /// A tree of so many nodes whatever they are worth, with paths of at most `depth`.
    pub fn fixed(nodes: usize, depth: usize) -> Limits {
        let nodes = nodes.min(MOST_NODES);
        let width = nodes.div_ceil(depth.max(1)).clamp(2, MOST_WIDTH);
        Limits { nodes, width, floor: 0.0, expand: 0.0, sure: None }
    }
}

/// A tree as it grows.
#[derive(Debug, Clone)]
pub struct Tree {
    limits: Limits,
    nodes: Vec<Node>,
    /// Where the deepest level begins.
    level: usize,
    levels: usize,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    token: u32,
    parent: Option<usize>,
    place: Place,
    /// The chance that it and all before it are right.
    value: f64,
}

impl Tree {
    /// Nothing yet.
    pub fn new(limits: Limits) -> Tree {
        Tree { limits, nodes: vec![], level: 0, levels: 0 }
    }

    /// How far it grows.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// A node's token and what it hangs on.
    pub fn node(&self, i: usize) -> (u32, Option<usize>) {
        (self.nodes[i].token, self.nodes[i].parent)
    }

    /// Levels that there are.
    pub fn levels(&self) -> usize {
        self.levels
    }

    /// Goes on with a new level: under each of `parents` (`None`: the text) what may follow it, the likeliest first.
    pub fn grow<'a>(&mut self, parents: impl Iterator<Item = (Option<usize>, &'a [(u32, f64)])>) {
        let level = self.nodes.len();
        for (parent, choices) in parents {
            let above = parent.map_or(1.0, |parent| self.nodes[parent].value);
            for &(token, sure) in choices.iter().take(self.limits.width) {
                let chance = self.limits.sure.map_or(sure, |of| of.chance(sure)).min(1.0);
                let value = above * chance;
                if value >= self.limits.floor {
                    self.nodes.push(Node { token, parent, place: Place::sure(sure), value });
                }
            }
        }
        self.level = level;
        self.levels += 1;
    }

    /// The nodes of the deepest level that get children, the best first, at most `most`.
    pub fn frontier(&self, most: usize) -> Vec<usize> {
        let worth = |&i: &usize| self.nodes[i].value >= self.limits.expand;
        let mut best: Vec<usize> = (self.level..self.nodes.len()).filter(worth).collect();
        best.sort_by(|&a, &b| self.nodes[b].value.total_cmp(&self.nodes[a].value));
        best.truncate(most);
        best
    }

    /// Leaves out nodes with such tokens, and what hangs on them.
    pub fn without(&mut self, left_out: impl Fn(u32) -> bool) {
        let mut new: Vec<Option<usize>> = vec![];
        let mut nodes: Vec<Node> = vec![];
        for node in &self.nodes {
            let above = node.parent.map(|parent| new[parent]);
            let stays = above != Some(None) && !left_out(node.token);
            new.push(stays.then_some(nodes.len()));
            if stays {
                nodes.push(Node { parent: above.flatten(), ..*node });
            }
        }
        self.nodes = nodes;
        self.level = self.level.min(self.nodes.len());
    }

    /// Values of the nodes that may be checked, the largest first.
    pub fn values(&self) -> Vec<f64> {
        let mut values: Vec<f64> = self.nodes.iter().map(|node| node.value).collect();
        values.sort_by(|a, b| b.total_cmp(a));
        values.truncate(self.limits.nodes);
        values
    }

    /// The best nodes, at most `count` with at most `leaves` ends of paths, as guesses: each path from its best node on
    /// in one piece, as far as it goes.
    pub fn best(&self, count: usize, leaves: usize) -> Guess {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // Stable: what a node hangs on stays before it.
        order.sort_by(|&a, &b| self.nodes[b].value.total_cmp(&self.nodes[a].value));
        let mut chosen = vec![false; self.nodes.len()];
        let mut parents = vec![false; self.nodes.len()];
        let (mut nodes, mut ends) = (0, 0);
        for i in order {
            let above = self.nodes[i].parent;
            // It ends a path, in place of what it hangs on if that did.
            let more = usize::from(above.is_none_or(|above| parents[above]));
            if nodes == count.min(self.limits.nodes) {
                break;
            }
            if ends + more > leaves || above.is_some_and(|above| !chosen[above]) {
                continue;
            }
            above.into_iter().for_each(|above| parents[above] = true);
            (nodes, ends, chosen[i]) = (nodes + 1, ends + more, true);
        }
        let mut guess = Guess::default();
        self.put(None, None, &chosen, &mut guess);
        guess.straighten();
        guess
    }

    /// Puts the chosen ones of what hangs on `at`, the best first, and what hangs on each behind it.
    fn put(&self, at: Option<usize>, to: Option<usize>, chosen: &[bool], guess: &mut Guess) {
        let from = at.map_or(0, |at| at + 1);
        let mut children: Vec<usize> =
            (from..self.nodes.len()).filter(|&i| chosen[i] && self.nodes[i].parent == at).collect();
        children.sort_by(|&a, &b| self.nodes[b].value.total_cmp(&self.nodes[a].value));
        for i in children {
            let place = guess.tokens.len();
            guess.tokens.push(self.nodes[i].token);
            guess.places.push(self.nodes[i].place);
            guess.parents.push(to);
            self.put(Some(i), Some(place), chosen, guess);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(choices: &[(u32, f64)]) -> Vec<(u32, f64)> {
        choices.to_vec()
    }

    /// Two levels: 1 (.6) -> 3 (.5), 4 (.4); 2 (.3) -> 5 (.9).
    fn tree(limits: Limits) -> Tree {
        let mut tree = Tree::new(limits);
        tree.grow([(None, &level(&[(1, 0.6), (2, 0.3), (9, 0.05)])[..])].into_iter());
        let frontier = tree.frontier(2);
        assert_eq!(frontier, [0, 1]);
        let next = [level(&[(3, 0.5), (4, 0.4), (9, 0.01)]), level(&[(5, 0.9), (9, 0.0)])];
        tree.grow(frontier.iter().zip(&next).map(|(&i, next)| (Some(i), &next[..])));
        tree
    }

    #[test]
    fn the_best_nodes_are_a_tree() {
        let tree = tree(Limits::fixed(8, 2));
        let best = |count, leaves| {
            let guess = tree.best(count, leaves);
            assert_eq!((guess.tokens.len(), guess.places.len()), (count.min(guess.tokens.len()), guess.tokens.len()));
            (guess.tokens, guess.parents)
        };
        assert_eq!(best(1, 99), (vec![1], vec![]));
        assert_eq!(best(2, 99), (vec![1, 2], vec![None, None]));
        assert_eq!(best(3, 99), (vec![1, 3, 2], vec![None, Some(0), None]));
        assert_eq!(best(4, 99), (vec![1, 3, 2, 5], vec![None, Some(0), None, Some(2)]));
        assert_eq!(best(5, 99), (vec![1, 3, 4, 2, 5], vec![None, Some(0), Some(0), None, Some(3)]));
        assert_eq!(best(5, 1), (vec![1, 3], vec![]), "one path");
        assert_eq!(best(5, 2), (vec![1, 3, 2, 5], vec![None, Some(0), None, Some(2)]));
        assert_eq!(best(9, 0), (vec![], vec![]));
        assert_eq!(tree.values().len(), 8);
        assert!(tree.values().is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn limits_keep_a_tree_small() {
        let limits = Limits { floor: 0.2, expand: 0.25, ..Limits::fixed(8, 2) };
        let of = tree(limits);
        assert_eq!(of.nodes.iter().map(|node| node.token).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(of.frontier(9), [2, 4]);
        assert_eq!(of.frontier(1), [2]);
        let narrow = tree(Limits { width: 2, ..Limits::fixed(3, 2) });
        assert_eq!((narrow.values().len(), narrow.nodes.len()), (3, 6));
        assert_eq!(Limits::fixed(99, 4), Limits { nodes: MOST_NODES, width: 10, ..Limits::fixed(1, 1) });
        assert_eq!([Limits::fixed(16, 4).width, Limits::fixed(5, 4).width], [4, 2]);
        // Where it may end, nothing hangs on it.
        let mut tree = tree(Limits::fixed(8, 2));
        tree.without(|token| token == 1 || token == 9);
        assert_eq!(tree.best(9, 9).tokens, [2, 5]);
        assert!(Tree::new(Limits::fixed(3, 3)).best(3, 3).tokens.is_empty());
        assert!(Tree::new(Limits::fixed(3, 3)).frontier(3).is_empty());
    }

    /// Whatever grows, what is checked are the best nodes, each behind what it hangs on.
    #[test]
    fn any_tree_is_checked_from_its_best_nodes_on() {
        let mut random = crate::random::Random::new(9);
        for case in 0..300 {
            let (nodes, depth) = (1 + random.below(20), 1 + random.below(4));
            let mut tree = Tree::new(Limits::fixed(nodes, depth));
            let mut at = vec![None];
            for _ in 0..depth {
                let choices: Vec<Vec<(u32, f64)>> = at
                    .iter()
                    .map(|_| {
                        let mut left = 1.0;
                        let count = random.below(5) as u32;
                        (0..count)
                            .map(|t| {
                                (t, {
                                    left *= random.fraction() * 0.7;
                                    left
                                })
                            })
                            .collect()
                    })
                    .collect();
                tree.grow(at.iter().copied().zip(choices.iter().map(|c| &c[..])));
                at = tree.frontier(tree.limits().width).into_iter().map(Some).collect();
            }
            let (count, leaves) = (random.below(25), random.below(6));
            let guess = tree.best(count, leaves);
            assert!(guess.tokens.len() <= count.min(nodes), "case {case}");
            let parent = |i: usize| guess.parent(i);
            assert!((0..guess.tokens.len()).all(|i| parent(i).is_none_or(|p| p < i)), "case {case}");
            let ends = (0..guess.tokens.len()).filter(|&i| !(i..guess.tokens.len()).any(|j| parent(j) == Some(i)));
            assert!(ends.count() <= leaves, "case {case}");
            let most = tree.best(count, usize::MAX);
            assert_eq!(most.tokens.len(), count.min(nodes).min(tree.nodes.len()), "case {case}");
        }
    }
}
