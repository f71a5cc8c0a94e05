//! Writing: how large parts are (`plan`), one upload in parts from its beginning to its commit or abort (`session`), the commit itself
//! (`commit`),
//! an object whose bytes are all there (`whole`), one whose bytes come by and by (`writer`), and one that is gathered from
//! memory of others (`gather`).

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
pub(crate) use session::of_changed_memory;
pub use writer::Writer;
