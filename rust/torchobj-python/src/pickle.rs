//! Measures the nesting depth of a pickle before it is unpickled. Creates no objects and imports no classes.
//!
//! Python hashes tuples by recursion in C, without a limit. A megabyte of nested tuples as the key of a dict overflows the
//! stack, and 40 nested pairs that share one tuple take hours. A memo index of a few bytes allocates gigabytes. All of
//! this happens in the unpickler itself.

use std::collections::HashMap;

use pyo3::prelude::*;

/// The result for a pickle whose tuples would take too long to hash, whose memo would be larger than the pickle, or that
/// this module cannot parse.
const UNBOUNDED: u32 = u32::MAX;

/// Maximum number of objects that hashing a tuple may visit, counted once per visit.
const MAX_VISITED: u64 = 10_000_000;

/// An object on the stack of the unpickler.
#[derive(Clone, Copy, Debug, Default)]
struct StackObject {
    depth: u32,
    /// Number of objects that hashing it visits; 1 for everything but tuples.
    visited: u64,
}

/// A model of the unpickler.
#[derive(Debug, Default)]
struct Machine {
    stack: Vec<StackObject>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u64, StackObject>,
    /// Number of opcodes so far.
    opcodes: u64,
    deepest: u32,
    most_visited: u64,
}

/// Returns the nesting depth of the objects in a pickle; 2^32 - 1 if it cannot be determined.
// Up to where the unpickler fails. The depth of a container is that of its items when it is put into another container.
#[pyfunction]
pub(crate) fn pickle_nesting(pickle: &[u8]) -> u32 {
    let mut machine = Machine::default();
    match machine.run(pickle) {
        Some(()) if machine.most_visited <= MAX_VISITED => machine.deepest,
        _ => UNBOUNDED,
    }
}

impl Machine {
    /// Runs to the end, or to an opcode that the unpickler rejects. Returns `None` if the unpickler may continue where this
    /// module cannot.
    fn run(&mut self, pickle: &[u8]) -> Option<()> {
        let mut rest = pickle;
        while let Some((&opcode, after)) = rest.split_first() {
            rest = after;
            self.opcodes += 1;
            let Some(argument) = argument(opcode, &mut rest) else { return Some(()) };
            match opcode {
                b'.' => return Some(()),
                b'(' => self.marks.push(self.stack.len()),
                b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
                b'0' => drop(self.stack.pop()),
                b'1' => drop(self.above_mark()),
                b'2' => self.stack.extend(self.stack.last().copied()),
                b'a' | b'b' => self.add_top(1),
                b's' => self.add_top(2),
                b'e' | b'u' | 0x90 => {
                    let added = self.above_mark();
                    self.add(&added);
                }
                b't' | b'l' | b'd' | b'o' | b'i' | 0x91 => {
                    let items = self.above_mark();
                    self.push_container(&items, opcode == b't');
                }
                0x85..=0x87 => self.replace(usize::from(opcode - 0x84), true),
                b'Q' => self.replace(1, false),
                b'R' | 0x81 | 0x93 => self.replace(2, false),
                0x92 => self.replace(3, false),
                b'g' | b'h' | b'j' => {
                    let known = self.memo.get(&number(opcode, argument)?).copied();
                    self.stack.push(known.unwrap_or_default());
                }
                b'p' | b'q' | b'r' => {
                    let last = self.stack.last().copied().unwrap_or_default();
                    let index = number(opcode, argument)?;
                    // The unpickler's memo is an array: it allocates 16 bytes for each index up to this one.
                    if index > self.opcodes {
                        return None;
                    }
                    self.memo.insert(index, last);
                }
                0x94 => {
                    let last = self.stack.last().copied().unwrap_or_default();
                    self.memo.insert(self.memo.len() as u64, last);
                }
                0x80 | 0x95 | 0x98 => {}
                _ => self.stack.push(StackObject { depth: 0, visited: 1 }),
            }
        }
        Some(())
    }

    fn above_mark(&mut self) -> Vec<StackObject> {
        let height = self.marks.pop().unwrap_or(0).min(self.stack.len());
        self.stack.split_off(height)
    }

    /// Adds the top `count` objects to the container below them.
    fn add_top(&mut self, count: usize) {
        let items = self.stack.split_off(self.stack.len().saturating_sub(count));
        self.add(&items);
    }

    /// Adds `items` to the container on top of the stack.
    fn add(&mut self, items: &[StackObject]) {
        let depth = depth_of_container(items);
        if let Some(container) = self.stack.last_mut() {
            container.depth = container.depth.max(depth);
        }
        self.deepest = self.deepest.max(depth);
    }

    /// Replaces the top `count` objects by a container of them.
    fn replace(&mut self, count: usize, is_tuple: bool) {
        let items = self.stack.split_off(self.stack.len().saturating_sub(count));
        self.push_container(&items, is_tuple);
    }

    fn push_container(&mut self, items: &[StackObject], is_tuple: bool) {
        let depth = depth_of_container(items);
        let inside = items.iter().fold(0, |sum: u64, object| sum.saturating_add(object.visited));
        let visited = if is_tuple { inside.saturating_add(1) } else { 1 };
        self.deepest = self.deepest.max(depth);
        self.most_visited = self.most_visited.max(visited);
        self.stack.push(StackObject { depth, visited });
    }
}

fn depth_of_container(items: &[StackObject]) -> u32 {
    items.iter().map(|object| object.depth + 1).max().unwrap_or(0)
}

/// Takes the argument of an opcode; `None` if it is truncated.
fn argument<'a>(opcode: u8, rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let mut take = |length: u64| {
        let (taken, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        *rest = after;
        Some(taken)
    };
    match opcode {
        b'K' | b'h' | b'q' | 0x80 | 0x82 => take(1),
        b'M' | 0x83 => take(2),
        b'J' | b'j' | b'r' | 0x84 => take(4),
        b'G' | 0x95 => take(8),
        b'U' | b'C' | 0x8a | 0x8c => counted(1, &mut take),
        b'T' | b'X' | b'B' | 0x8b => counted(4, &mut take),
        0x8d | 0x8e | 0x96 => counted(8, &mut take),
        b'F' | b'I' | b'L' | b'S' | b'V' | b'P' | b'g' | b'p' => line(rest),
        b'c' | b'i' => line(rest).and_then(|_| line(rest)),
        _ => Some(&[]),
    }
}

/// Takes bytes that follow their length, an integer of `width` bytes.
fn counted<'a>(width: u64, take: &mut impl FnMut(u64) -> Option<&'a [u8]>) -> Option<&'a [u8]> {
    let length = little_endian(take(width)?);
    take(length)
}

fn line<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let (taken, after) = rest.split_at(end);
    *rest = &after[1..];
    Some(taken)
}

/// Returns the index in the memo; `None` for text that no pickler writes.
fn number(opcode: u8, argument: &[u8]) -> Option<u64> {
    match opcode {
        b'g' | b'p' => std::str::from_utf8(argument).ok()?.parse().ok(),
        _ => Some(little_endian(argument)),
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}
