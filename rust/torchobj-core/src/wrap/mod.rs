//! Decorators of stores.

mod fault;
mod prefix;

pub use fault::{Fault, FaultyStore};
pub use prefix::PrefixStore;
