//! What a worker asks for, as its owner reads it out of the lane. Knows not where it stands there.

/// What a worker asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Of which lane it came.
    pub lane: u32,
    pub(super) number: u32,
    /// What the objects are objects of.
    pub source: u64,
    /// Those that are wanted now.
    pub objects: Asked,
    /// The numbers of those that will be wanted, in this order; none behind names.
    pub ahead: Vec<u64>,
    /// For which iterator these are announced: the worker's own name for it.
    pub iterator: u32,
    /// The iterator that has ended: what was announced for it is not wanted any more.
    pub ended: Option<u32>,
}

/// How a worker names what it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// By number.
    Numbers(Vec<u64>),
    /// By name; `None` where the worker wrote less than it said.
    Names(Vec<Option<Vec<u8>>>),
}

impl Asked {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Names(names) => names.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `count` names, each behind its length in two bytes.
pub(super) fn split_names(mut bytes: &[u8], count: usize) -> Vec<Option<Vec<u8>>> {
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        bytes = rest;
        Some(name.to_vec())
    };
    (0..count).map(|_| next()).collect()
}
