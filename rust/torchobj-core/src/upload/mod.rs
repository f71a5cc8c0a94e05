//! Writes objects. `plan` computes part sizes. `begun` is one upload in parts from its beginning to its end, `session` sends its
//! parts, and `commit` is the commit. `whole` writes an object from memory, `writer` one whose bytes arrive over time, and `gather` one
//! from pieces of the caller's memory.

mod begun;
mod commit;
#[cfg(test)]
mod commit_tests;
mod gather;
mod plan;
mod session;
mod whole;
mod writer;

pub use begun::{BegunUpload, Unfinished, begin, unfinished};
pub use commit::{Commit, CommitFailure};
pub use gather::{Gather, Piece};
pub(crate) use session::Session;
pub use writer::Writer;
