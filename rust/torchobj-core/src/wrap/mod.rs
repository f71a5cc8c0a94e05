//! Decorators of stores.

mod fault;

pub use fault::{Fault, FaultyStore};
