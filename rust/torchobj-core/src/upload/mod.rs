//! Writes objects. `plan` computes part sizes. `session` is one upload in parts, from its beginning to its commit or abort;
//! `commit` is the commit. `whole` writes an object from memory, `writer` one whose bytes arrive over time, and `gather` one
//! from pieces of the caller's memory.

mod commit;
#[cfg(test)]
mod commit_tests;
mod gather;
mod plan;
mod session;
mod whole;
mod writer;

pub use commit::{Commit, CommitFailure};
pub use gather::{Gather, Piece};
pub(crate) use session::Session;
pub use session::{abort, begin};
pub use writer::Writer;
