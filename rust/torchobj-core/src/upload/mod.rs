//! Writing: how large parts are (`plan`), one upload in parts from its beginning to its commit or abort (`session`),
//! an object whose bytes are all there (`whole`), and one whose bytes come by and by (`writer`).

mod plan;
mod session;
mod whole;
mod writer;

pub use writer::Writer;
