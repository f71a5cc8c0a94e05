//! Decorators: stores over any store.

mod fault;

pub use fault::{Fault, FaultyStore};
